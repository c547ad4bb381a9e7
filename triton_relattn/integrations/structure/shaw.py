"""A row of an embedding for each clipped distance, gathered as (N, N, D): Shaw's term in lucidrains' conformer and its like.

Source: Shaw et al., "Self-Attention with Relative Position Representations", 2018.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...functional import fused_relative_attention
from ...positions import RelativePositions
from ..operators import join_heads, split_heads
from ..shadow import projections
from .kind import HIDDEN, SHOWN, Kind, Reading, Sample, mask_of, padded, taken, with_masks
from .roles import assigned, is_table, own_parameters, rows_of


class ClippedDistances(Kind):
    """(q_i . k_j + q_i . E[clamp(j - i, -m, m)]) / sqrt(D); E, an embedding of 2m + 1 rows, in either order, shared by
    the heads.
    """

    title = "an embedding of clipped distances (Shaw et al.)"

    @classmethod
    def readings(cls, module: nn.Module) -> Iterator[Reading]:
        tables: dict[str, Any] = {name: child.weight for name, child in module.named_children() if is_table(child)}
        tables |= own_parameters(module)
        made = projections(module)
        if len(tables) != 1 or len(next(iter(tables.values())).shape) != 2:
            return
        (table,) = tables
        rows, width = tables[table].shape
        joint = [name for name, (_, given) in made.items() if any(given == 2 * other for _, other in made.values())]
        if len(made) == 3 and len(joint) == 1:
            rest = assigned([name for name in made if name != joint[0]], ("out", "query"))
            roles = {**(rest or {}), "key_value": joint[0]}
        else:
            roles = assigned(list(made), ("out", "query", "key", "value")) or {}
        if "query" not in roles or rows % 2 == 0 or rows < 3 or made[roles["query"]][1] % width:
            return
        roles["rel_key"] = table
        masks = with_masks(type(module).forward, ("states",), SHOWN, HIDDEN)
        for flipped, (arguments, means) in itertools.product((True, False), masks):
            options = {"flipped": flipped, "mask": means, "width": width}
            yield Reading(tuple(roles.items()), tuple(arguments.items()), tuple(options.items()))

    @classmethod
    def examples(cls, module: Any, reading: Reading) -> Iterator[Sample]:
        channels = taken(module, reading)
        clipped = len(rows_of(getattr(module, reading.role("rel_key")))) // 2
        longest = clipped + 7 if clipped < 256 else 61
        states, mask = reading.argument("states"), reading.argument("mask")
        for batch, length in ((2, 11), (1, 5), (2, longest), (1, 130)):
            given: dict[str, Any] = {states: torch.randn(batch, length, channels)}  # type: ignore[dict-item]
            pairs = length, length
            yield Sample(f"{batch} sequences of {length}", given, pairs)
            if mask is not None:
                real = padded(batch, length)
                given = {**given, mask: mask_of(real, reading.option("mask"))}
                yield Sample(f"{batch} sequences of {length} with padding", given, pairs, real[..., None])
        if clipped >= 256:  # the distances that are clipped, in a sequence that is as long
            length = clipped + 9
            given = {states: torch.randn(1, length, channels)}  # type: ignore[dict-item]
            yield Sample(f"a sequence of {length}", given, (length, length))

    def serves(self, module: Any, states: torch.Tensor, mask: torch.Tensor | None = None) -> bool:
        table = self.part(module, "rel_key")
        if isinstance(table, nn.Embedding) and (table._forward_hooks or table._forward_pre_hooks or table.max_norm is not None):
            return False  # its rows are read, it is not called
        return states.dim() == 3 and (mask is None or mask.shape == states.shape[:2])

    def compute(self, module: Any, states: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        options = self.options
        query = self.child(module, "query", states)
        if "key_value" in self.roles:
            key, value = self.child(module, "key_value", states).chunk(2, dim=-1)
        else:
            key, value = self.child(module, "key", states), self.child(module, "value", states)
        q, k, v = (split_heads(each, options["width"]) for each in (query, key, value))
        rel_key = rows_of(self.part(module, "rel_key")).to(q.dtype)
        rel_key = rel_key.flip(0) if options["flipped"] else rel_key
        last = len(rel_key) // 2
        out: Any = fused_relative_attention(
            q,
            k,
            v,
            rel_key,
            positions=RelativePositions(-last, last),
            attn_mask=self.seen(mask),
            dropout_p=self.weights_dropout(module),
        )
        return self.output(module, join_heads(out))
