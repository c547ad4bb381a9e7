"""A row for each distance to the past, skewed, as in the Music Transformer: both public versions in PyTorch.

Source: Huang et al., "Music Transformer", 2018.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from ...functional import fused_relative_attention
from ...positions import RelativePositions
from ..operators import join_heads, split_heads
from ..shadow import projections
from .kind import ADDED, HIDDEN, SHOWN, Kind, Reading, Sample, mask_of
from .roles import MASK, argument_roles, assigned, is_table, own_parameters, rows_of, words_of

STATES = ("query", "key", "value")


class PastRows(Kind):
    """(q_i . k_j + q_i . E[j - i]) / sqrt(D) for j <= i; E, R rows, that of the most distant past first, for each head or shared.

    For the future the skew leaves other rows' terms there, so only calls are served whose mask hides it. Beyond R positions the
    first row applies, if E is an embedding (``clips``); else the stock forward raises.
    """

    title = "a row for each distance to the past (Music Transformer)"

    @classmethod
    def readings(cls, module: nn.Module) -> Iterator[Reading]:
        own, made = own_parameters(module), projections(module)
        tables = [name for name, child in module.named_children() if is_table(child) and "bias" not in words_of(name)]
        of_children = assigned(list(made), ("out", "query", "key", "value"))
        if of_children is not None and len(tables) == 1 and not own:
            channels = made[of_children["query"]][1]
            heads = getattr(module, "num_heads", getattr(module, "n_heads", getattr(module, "heads", 0)))
            if getattr(module, tables[0]).weight.shape[1] != channels or not heads or channels % heads:
                return
            roles, clips, width = {**of_children, "rel_key": tables[0]}, True, channels // heads
        else:
            joint = [name for name, each in own.items() if each.dim() == 2 and each.shape[0] == 3 * each.shape[1]]
            others = [name for name, each in own.items() if each.dim() == 2 and name not in joint]
            biases = [name for name, each in own.items() if each.dim() == 1]
            if len(made) != 1 or len(joint) != 1 or len(others) != 1 or len(biases) > 1 or len(own) != 2 + len(biases):
                return
            (out,) = made
            clips, width = False, own[others[0]].shape[1]
            if own[joint[0]].shape[1] % width:
                return
            roles = {"out": out, "joint": joint[0], "rel_key": others[0], **({"joint_bias": biases[0]} if biases else {})}
        forward = type(module).forward
        for arguments, means, batch_first in itertools.product(_arguments(forward), (ADDED, HIDDEN, SHOWN), (True, False)):
            options = {"mask": means, "width": width, "batch_first": batch_first, "clips": clips}
            yield Reading(tuple(roles.items()), tuple(arguments.items()), tuple(options.items()))

    @classmethod
    def examples(cls, module: Any, reading: Reading) -> Iterator[Sample]:
        rows = len(rows_of(getattr(module, reading.role("rel_key"))))
        channels = projections(module)[reading.role("out")][0]
        names = [name for name, role in reading.arguments if role in STATES]
        lengths = [min(rows, length) for length in (9, 5, 67)] + [rows + 7] * (reading.option("clips") and rows < 256)
        for batch, length in zip((2, 1, 3, 1), lengths, strict=False):
            shape = (batch, length, channels) if reading.option("batch_first") else (length, batch, channels)
            seen = torch.ones(length, length, dtype=torch.bool).tril()
            given: dict[str, Any] = {name: torch.randn(shape) for name in names}
            given[reading.argument(MASK)] = mask_of(seen, reading.option("mask"))  # type: ignore[index]
            yield Sample(f"{batch} sequences of {length}, causal", given, (length, length))

    def serves(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> bool:
        length = query.shape[1 if self.options["batch_first"] else 0]
        if query.dim() != 3 or key.shape != query.shape or mask is None or mask.shape[-2:] != (length, length):
            return False
        if not self.options["clips"] and length > len(rows_of(self.part(module, "rel_key"))):
            return False
        return mask.dim() in (2, 4) and self._hides_future(mask)

    def _hides_future(self, mask: torch.Tensor) -> bool:
        """Return whether a mask hides all keys behind each query. A compiler cannot know, nor can a tensor without values."""
        if torch.compiler.is_compiling() or type(mask) is not torch.Tensor:
            return False
        if mask.is_meta:  # memory is counted
            return True
        means = self.options["mask"]
        future = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu_(1)
        hidden = mask <= LOW if means == ADDED else mask == 0 if means == SHOWN else mask != 0
        return bool((hidden | ~future).all())

    @classmethod
    def size_of(cls, module: Any, reading: Reading) -> tuple[int, int]:
        channels = projections(module)[reading.role("out")][0]
        return channels, channels // reading.option("width")

    def at_length(self, module: Any, length: int, parent: Any) -> dict[str, Any]:
        reading = self.reading
        channels, is_added = projections(module)[reading.role("out")][0], reading.option("mask") == ADDED
        shape = (1, length, channels) if reading.option("batch_first") else (length, 1, channels)
        given = {name: torch.empty(shape, device="meta") for name, role in reading.arguments if role in STATES}
        mask = torch.empty(length, length, dtype=torch.float32 if is_added else torch.bool, device="meta")
        return {**given, reading.argument(MASK): mask}  # type: ignore[dict-item]

    def pairs(self, module: Any, given: dict[str, Any]) -> int:
        query: torch.Tensor = given["query"]
        return query.numel() // self.options["width"] * query.shape[1 if self.options["batch_first"] else 0]

    def compute(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        width, batch_first = self.options["width"], self.options["batch_first"]
        q, k, v = (
            split_heads(each if batch_first else each.transpose(0, 1), width)
            for each in self._projected(module, query, key, value)
        )
        table = rows_of(self.part(module, "rel_key")).to(q.dtype)
        rel_key = table if table.shape[1] == width else table.unflatten(1, (-1, width)).transpose(0, 1)
        out: Any = fused_relative_attention(
            q,
            k,
            v,
            rel_key,
            positions=RelativePositions(1 - len(table), 0),
            attn_mask=self.seen(mask),
            is_causal=True,
            dropout_p=self.weights_dropout(module),
        )
        states = join_heads(out)
        return self.output(module, states if batch_first else states.transpose(0, 1))

    def seen(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        return super().seen(mask[None, None] if mask is not None and mask.dim() == 2 else mask)

    def counted(self, given: dict[str, Any]) -> torch.Tensor | None:
        found = super().counted(given)
        return found if found is None or self.options["batch_first"] else found.transpose(0, 1)

    def _projected(self, module: Any, *states: torch.Tensor) -> list[torch.Tensor]:
        """Return queries, keys and values of all heads."""
        if "joint" not in self.roles:
            return [self.child(module, role, each) for role, each in zip(STATES, states, strict=True)]
        weights = self.part(module, "joint").chunk(3)
        biases = self.part(module, "joint_bias").chunk(3) if "joint_bias" in self.roles else (None,) * 3
        return [linear(*each) for each in zip(states, weights, biases, strict=True)]


LOW = -1e4
"""A number that hides a key if it is added to its score."""


def _arguments(forward: Any) -> Iterator[dict[str, str]]:
    """Yield the roles of the arguments of a forward, with each of its masks as the one that hides the future."""
    for roles in argument_roles(forward, STATES):
        masks = [name for name in inspect.signature(forward).parameters if "mask" in words_of(name)]
        for mask in masks:
            yield {**{name: role for name, role in roles.items() if role in STATES}, mask: MASK}
