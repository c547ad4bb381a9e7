"""Transformer-XL's own layer: a memory before the queries, biases as arguments, and normalisation and residual inside.

Source: Dai et al., "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context", 2019.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ...positions import RelativePositions
from ..comparison import Sample
from ..operators import attend, drop_probability, join_heads, split_heads
from .kind import HIDDEN, Kind, Reading, hides_future
from .roles import MASK, POSITIONS

CONTENT_BIAS, POSITION_BIAS, MEMORY = "content_bias", "position_bias", "memory"
ARGUMENTS = {"r_w_bias": CONTENT_BIAS, "r_r_bias": POSITION_BIAS, "attn_mask": MASK, "mems": MEMORY}
PARTS = ("qkv_net", "r_net", "o_net", "layer_norm", "dropatt", "drop")


class MemoryBefore(Kind):
    """((q_i + u) . k_j + (q_i + v) . R[j - i]) / sqrt(D) for j <= i, where keys of a memory come first; R, a row for each
    distance to the past and head, projected position embeddings. States (N, B, C).

    For the future the shift leaves other rows' terms there, so only calls are served whose mask hides it.
    """

    title = "Transformer-XL's attention with a memory"
    meanings = (HIDDEN,)

    @classmethod
    def read(cls, module: nn.Module) -> Reading | None:
        if not all(isinstance(getattr(module, name, None), nn.Module) for name in PARTS):
            return None
        return {"qkv": "qkv_net", "position": "r_net", "out": "o_net"}, {"swapped": ((0, 1),), "width": (module.d_head,)}

    @classmethod
    def arguments(cls, forward: Any) -> Iterator[dict[str, str]]:
        names = list(inspect.signature(forward).parameters)[1:]
        if set(ARGUMENTS) <= set(names):
            yield {names[0]: "states", names[1]: POSITIONS, **ARGUMENTS}

    def sizes(self, module: Any) -> Iterable[tuple[int, int]]:
        return (2, 9), (1, 5), (1, 130)

    def masks(self, batch: int, length: int) -> Iterator[tuple[str, torch.Tensor | None]]:
        yield ", causal", torch.ones(length, length, dtype=torch.bool).triu(1)[..., None]

    def example(self, module: Any, batch: int, length: int, mask: torch.Tensor | None) -> dict[str, Any]:
        keys = length if mask is None else mask.shape[1]
        biases = {name: torch.randn(module.n_head, module.d_head) for name, role in ARGUMENTS.items() if role.endswith("bias")}
        given = {**super().example(module, batch, length, mask), **biases}
        given[self.layout.argument(POSITIONS)] = torch.randn(keys, 1, self.layout.channels)  # type: ignore[index]
        return given

    def samples(self, module: Any, is_light: bool) -> Iterator[Sample]:
        yield from super().samples(module, is_light)
        batch, queries, past = 2, 7, 5
        behind = past + torch.arange(queries)[:, None] - torch.arange(past + queries)
        for name, hidden in (("", behind < 0), (", in a window", (behind < 0) | (behind > past))):
            given = self.example(module, batch, queries, hidden[..., None])
            given["mems"] = torch.randn(past, batch, self.layout.channels)
            yield Sample(f"{queries} queries behind a memory of {past}{name}", given, (queries, past + queries))

    def accepts(
        self,
        module: Any,
        states: torch.Tensor,
        positions: torch.Tensor,
        content_bias: torch.Tensor,
        position_bias: torch.Tensor,
        mask: torch.Tensor | None = None,
        memory: torch.Tensor | None = None,
    ) -> bool:
        keys = len(states) + (0 if memory is None else len(memory))
        if mask is None or mask.dtype != torch.bool or mask.dim() != 3 or mask.shape[:2] != (len(states), keys):
            return False
        return states.dim() == 3 and tuple(positions.shape[:2]) == (keys, 1) and hides_future(mask, self.attn_mask(mask))

    def serves(self, module: Any, **given: Any) -> bool:
        return isinstance(module.dropatt, nn.Dropout) and self.accepts(module, **given)

    def pairs(self, module: Any, states: torch.Tensor, memory: torch.Tensor | None = None) -> int:  # type: ignore[override]
        keys = len(states) + (0 if memory is None else len(memory))
        return int(states.shape[1] * self.layout.heads * len(states) * keys)

    def counted(self, mask: torch.Tensor) -> None:
        """Each query sees itself."""

    def attn_mask(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        return None if mask is None else ~mask.permute(2, 0, 1)[:, None]

    def compute(
        self,
        module: Any,
        states: torch.Tensor,
        positions: torch.Tensor,
        content_bias: torch.Tensor,
        position_bias: torch.Tensor,
        mask: torch.Tensor | None = None,
        memory: torch.Tensor | None = None,
    ) -> torch.Tensor:
        whole = states if memory is None else torch.cat((memory, states))
        queries, keys, width = len(states), len(whole), self.options["width"]
        joint = module.qkv_net(module.layer_norm(whole) if module.pre_lnorm else whole)
        q, k, v = (split_heads(self.swap(part), width) for part in joint.chunk(3, dim=-1))  # (B, H, N, D)
        out = attend(
            q[:, :, keys - queries :],
            k,
            v,
            split_heads(self.swap(module.r_net(positions)), width),  # (1, H, Nk, D), the most distant past first
            content_bias,
            position_bias,
            RelativePositions(1 - keys, 0),
            attn_mask=self.attn_mask(mask),
            is_causal=True,
            query_offset=keys - queries,
            dropout_p=drop_probability(module.dropatt),
        )
        out = states + module.drop(module.o_net(self.swap(join_heads(out))))
        return out if module.pre_lnorm else module.layer_norm(out)  # type: ignore[no-any-return]
