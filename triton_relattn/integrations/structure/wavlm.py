"""A bias by bucket of the distance that each layer multiplies by a gate, as in WavLM: its copies in BEATs, torchaudio and
programs for voices.

The first layer makes the bias and passes it on. An enabled layer passes on a row per distance, of which a stock layer gets
the bias of all pairs.

Source: Chen et al., "WavLM: Large-Scale Self-Supervised Pre-Training for Full Stack Speech Processing", 2021.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from ...positions import RelativePositions
from ..compact import Compact, rows
from ..comparison import Sample
from ..operators import fused_relative_attention, join_heads, split_heads
from ..shadow import projections
from .kind import HIDDEN, Kind, Reading
from .roles import POSITIONS, assigned, is_table, own_parameters

BUCKETS = "_relative_positions_bucket"
"""The method of all copies that returns the buckets of distances; how it rounds is not T5's."""
WEIGHTS = "need_weights"
"""An argument of some copies, whose default asks for attention weights."""


def bucket_rows(module: Any, table: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Return the bias of each distance, (H, R), by the buckets of a module; from max_distance on all have the last one.

    states: (B, N, C). Their device counts: the weight may be on another one until the table is called.
    """
    last = min(module.max_distance, states.shape[1] - 1)
    distances = torch.arange(-last, last + 1, device=states.device)
    return table(getattr(module, BUCKETS)(distances)).T  # type: ignore[no-any-return]


def gate(states: torch.Tensor, linear: nn.Module, factor: torch.Tensor) -> torch.Tensor:
    """Return the gate of each query and head, (B, H, N, 1), of states (B, H, N, D); linear: D to 8; factor (1, H, 1, 1)."""
    a, b = linear(states).unflatten(-1, (2, 4)).sum(-1).sigmoid().chunk(2, dim=-1)
    return a * (b * factor - 1.0) + 2.0  # type: ignore[no-any-return]


def small_bias(table: torch.Tensor, batch: int, length: int, joined: bool = True) -> Any:
    """Return a bias (H, R) for the next layer, of which a stock layer makes (B * H, N, N), or, not joined, (B, H, N, N)."""
    positions = RelativePositions.centred(table.shape[1])

    def make(small: torch.Tensor) -> torch.Tensor:
        bias = rows(small, positions, length, length).repeat(batch, 1, 1)
        return bias if joined else bias.unflatten(0, (batch, -1))

    return Compact.of(table, make)


class GatedBuckets(Kind):
    """q_i . k_j / sqrt(D) + g_i * b[bucket(j - i)]; b, a number per bucket and head, passed on by the first layer; g_i, a
    gate of each query and head.
    """

    title = "a bias by bucket, times a gate (WavLM)"
    state_roles = ("query", "key", "value")
    meanings = (HIDDEN,)
    small = (POSITIONS,)

    @classmethod
    def read(cls, module: nn.Module) -> Reading | None:
        own, sizes = own_parameters(module), projections(module)
        gates = [name for name, (_, size) in sizes.items() if size == 8]
        factors = [name for name, factor in own.items() if factor.dim() == 4 and factor.numel() == factor.shape[1]]
        if len(gates) != 1 or len(factors) != 1 or not hasattr(module, BUCKETS):
            return None
        tables = [name for name, child in module.named_children() if is_table(child)]
        roles = {"gate": gates[0], "factor": factors[0], **({"table": tables[0]} if tables else {})}
        joint = [name for name, child in module.named_children() if isinstance(child, nn.MultiheadAttention)]
        if joint:
            choices: dict[str, tuple[Any, ...]] = {"gate of": ("query",), "swapped": (None,), "joined": (False,), "self": (True,)}
            return {**roles, "joint": joint[0]}, {**choices, "width": (sizes[gates[0]][0],)}
        children = assigned([name for name in sizes if name != gates[0]], ("out", "query", "key", "value"))
        choices = {"gate of": ("query", "projected query"), "swapped": ((0, 1),), "joined": (True,), "self": (True, False)}
        return None if children is None else ({**roles, **children}, {**choices, "width": (sizes[gates[0]][0],)})

    @classmethod
    def channels(cls, module: nn.Module, roles: dict[str, str]) -> tuple[int, int]:
        if "joint" in roles:
            return (getattr(module, roles["joint"]).embed_dim,) * 2
        return super().channels(module, roles)

    @classmethod
    def arguments(cls, forward: Any) -> Iterator[dict[str, str]]:
        for roles in super().arguments(forward):
            if POSITIONS in roles.values():
                yield {**roles, **({WEIGHTS: WEIGHTS} if WEIGHTS in forward.__code__.co_varnames else {})}

    def sizes(self, module: Any) -> Iterable[tuple[int, int]]:
        return (2, 9), (1, 5), (1, min(module.max_distance, 500) + 13)

    def example(self, module: Any, batch: int, length: int, mask: torch.Tensor | None) -> dict[str, Any]:
        given = super().example(module, batch, length, mask)
        if self.layout.argument(WEIGHTS):
            given[WEIGHTS] = False
        return given if "table" in self.roles else given | self.bias_of_another_layer(module, batch, length)

    def bias_of_another_layer(self, module: Any, batch: int, length: int) -> dict[str, Any]:
        table = torch.randn(self.layout.heads, 2 * min(length, module.max_distance + 1) - 1)
        return {self.layout.argument(POSITIONS): small_bias(table, batch, length, self.options["joined"])}  # type: ignore[dict-item]

    def samples(self, module: Any, is_light: bool) -> Iterator[Sample]:
        yield from super().samples(module, is_light)
        batch, length = 2, 11
        given = self.example(module, batch, length, None) | self.bias_of_another_layer(module, batch, length)
        yield Sample("a bias that another layer has made", given, (length, length))

    def accepts(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        positions: Any = None,
        need_weights: bool = False,
    ) -> bool:
        states = self.swap(query) if query.dim() == 3 else None
        if states is None or need_weights or any(part is not None and part.shape != query.shape for part in (key, value)):
            return False
        table = self.roles.get("table")
        if positions is None and (table is None or getattr(module, table)._forward_hooks):
            return False
        return mask is None or (mask.dtype == torch.bool and mask.shape == states.shape[:2])

    def compute(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> Any:
        width, states = self.options["width"], self.swap(query)
        if "joint" in self.roles:
            joint = self.part(module, "joint")
            q, k, v = (split_heads(part, width) for part in linear(states, joint.in_proj_weight, joint.in_proj_bias).chunk(3, -1))
        else:
            key, value = (query, query) if self.options["self"] else (key, value)  # some read the query alone
            q, k, v = self.project(module, query=query, key=key, value=value)  # type: ignore[arg-type]
        passed_on = positions
        if positions is None:
            positions = bucket_rows(module, self.part(module, "table"), states)
            passed_on = small_bias(positions, len(states), states.shape[1], self.options["joined"])
        gated = q if self.options["gate of"] == "projected query" else split_heads(states, width)
        out = fused_relative_attention(
            q,
            k,
            v,
            positions[..., None],  # type: ignore[index]
            rel_query=gate(gated, self.part(module, "gate"), self.part(module, "factor")),
            positions=RelativePositions.centred(positions.shape[1]),  # type: ignore[union-attr]
            rel_scale=1.0,
            attn_mask=self.attn_mask(mask),
            dropout_p=self.dropout_p(module),
        )
        result = self.output(module, join_heads(out))
        return result, *(None for _ in self.layout.returns[2:]), passed_on

    def output(self, module: Any, states: torch.Tensor) -> torch.Tensor:
        if "joint" in self.roles:
            return self.part(module, "joint").out_proj(states)  # type: ignore[no-any-return]
        return super().output(module, states)
