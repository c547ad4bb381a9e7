"""A row per distance to the past, skewed, as in the Music Transformer: both public versions in PyTorch.

Source: Huang et al., "Music Transformer", 2018.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from ...positions import RelativePositions
from ..in_place import num_heads
from ..operators import fused_relative_attention, join_heads, split_heads
from ..shadow import projections
from .kind import ADDED, HIDDEN, SHOWN, Kind, Reading, hides_future
from .roles import MASK, assigned, is_readable, is_table, own_parameters, split_words, table_weight


class PastRows(Kind):
    """(q_i . k_j + q_i . E[j - i]) / sqrt(D) for j <= i; E, R rows, that of the most distant past first, per head or shared.

    For the future the skew leaves other rows' terms there, so only calls are served whose mask hides it. Beyond R positions the
    first row applies, if E is an embedding (``clips``); else the stock forward raises.
    """

    title = "a row per distance to the past (Music Transformer)"

    state_roles = ("query", "key", "value")
    meanings = (ADDED, HIDDEN, SHOWN)

    @classmethod
    def read(cls, module: nn.Module) -> Reading | None:
        own, sizes = own_parameters(module), projections(module)
        tables = [name for name, child in module.named_children() if is_table(child) and "bias" not in split_words(name)]
        children = assigned(list(sizes), ("out", "query", "key", "value"))
        swapped = (None, (0, 1))
        if children is not None and len(tables) == 1 and not own:
            channels = sizes[children["query"]][1]
            heads = num_heads(module, 0)
            if getattr(module, tables[0]).weight.shape[1] != channels or not heads or channels % heads:
                return None
            roles = {**children, "rel_key": tables[0]}
            return roles, {"width": (channels // heads,), "swapped": swapped, "clips": (True,)}
        joint = [name for name, weight in own.items() if weight.dim() == 2 and weight.shape[0] == 3 * weight.shape[1]]
        others = [name for name, weight in own.items() if weight.dim() == 2 and name not in joint]
        biases = [name for name, weight in own.items() if weight.dim() == 1]
        if len(sizes) != 1 or len(joint) != 1 or len(others) != 1 or len(biases) > 1 or len(own) != 2 + len(biases):
            return None
        (out,), width = sizes, own[others[0]].shape[1]
        if own[joint[0]].shape[1] % width:
            return None
        roles = {"out": out, "joint": joint[0], "rel_key": others[0], **({"joint_bias": biases[0]} if biases else {})}
        return roles, {"width": (width,), "swapped": swapped, "clips": (False,)}

    @classmethod
    def arguments(cls, forward: Any) -> Iterator[dict[str, str]]:
        """Yield the roles of states, with each of a forward's masks as the one that hides the future."""
        masks = [name for name in inspect.signature(forward).parameters if "mask" in split_words(name)]
        for roles, mask in itertools.product(super().arguments(forward), masks):
            yield {**{name: role for name, role in roles.items() if role in cls.state_roles}, mask: MASK}

    def sizes(self, module: Any) -> Iterable[tuple[int, int]]:
        rows = len(table_weight(self.part(module, "rel_key")))
        yield from ((batch, min(rows, length)) for batch, length in ((2, 9), (1, 5), (3, 67)))
        if self.options["clips"] and rows < 256:
            yield 1, rows + 7

    def masks(self, batch: int, length: int) -> Iterator[tuple[str, torch.Tensor | None]]:
        yield ", causal", self.stock_mask(torch.ones(length, length, dtype=torch.bool).tril())

    def accepts(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> bool:
        length = self.swap(query).shape[1]
        if query.dim() != 3 or key.shape != query.shape or mask is None or mask.shape[-2:] != (length, length):
            return False
        if not is_readable(self.part(module, "rel_key")):
            return False
        if not self.options["clips"] and length > len(table_weight(self.part(module, "rel_key"))):
            return False
        return mask.dim() in (2, 4) and hides_future(mask, self.attn_mask(mask))

    def compute(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        width = self.options["width"]
        if "joint" in self.roles:
            weights = self.part(module, "joint").chunk(3)
            biases = self.part(module, "joint_bias").chunk(3) if "joint_bias" in self.roles else (None,) * 3
            projected = map(linear, (query, key, value), weights, biases)
            q, k, v = (split_heads(self.swap(states), width) for states in projected)
        else:
            q, k, v = self.project(module, query=query, key=key, value=value)
        table = table_weight(self.part(module, "rel_key")).to(q.dtype)
        rel_key = table if table.shape[1] == width else table.unflatten(1, (-1, width)).transpose(0, 1)
        out = fused_relative_attention(
            q,
            k,
            v,
            rel_key,
            positions=RelativePositions(1 - len(table), 0),
            attn_mask=self.attn_mask(mask),
            is_causal=True,
            dropout_p=self.dropout_p(module),
        )
        return self.output(module, join_heads(out))

    def attn_mask(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        return super().attn_mask(mask[None, None] if mask is not None and mask.dim() == 2 else mask)
