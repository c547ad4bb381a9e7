"""Transformer-XL's terms with projected positions, as in ESPnet's Conformer: its copies in FunASR, CosyVoice,
chatterbox, WeNet's kin.

Source: Dai et al., "Transformer-XL", 2019; Gulati et al., "Conformer", 2020.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...positions import RelativePositions
from .. import operators
from ..operators import join_heads, split_heads
from ..shadow import projections
from .kind import ADDED, HIDDEN, SHOWN, Kind, Reading, Sample, mask_of, taken, with_masks
from .roles import of_transformer_xl

LATEST, LATEST_PAST, LEGACY_PAST = "2N - 1 rows", "2N - 1 rows, those of the past count", "N rows, of the past"
"""The rows of the position embeddings, the first of the most distant past, and whether keys in the future have a term of them."""


class ProjectedPositions(Kind):
    """((q_i + u) . k_j + (q_i + v) . R[j - i]) / sqrt(D); R, a row per distance and head, projected position embeddings.

    Position embeddings (1, 2N - 1, C), or (1, N, C) where no term is for the future. Calls with others are the stock forward's.
    """

    title = "Transformer-XL's terms (ESPnet's Conformer)"

    @classmethod
    def readings(cls, module: nn.Module) -> Iterator[Reading]:
        parts = of_transformer_xl(module)
        if parts is None:
            return
        roles, shape = parts
        channels, width = math.prod(shape), shape[-1]
        if len(shape) < 2 or projections(module)[roles["position"]][1] != channels:
            return
        only_past = getattr(module, "zero_triu", None)
        rows = (LATEST, LATEST_PAST, LEGACY_PAST) if only_past is None else (LATEST_PAST if only_past else LATEST, LEGACY_PAST)
        scales = (width**-0.5, channels**-0.5)
        masks = with_masks(type(module).forward, STATES, SHOWN, HIDDEN, ADDED)
        # First one table for all sequences; some classes want one for each of them.
        for shared, (arguments, means), of, scale in itertools.product((True, False), masks, rows, scales):
            if "positions" not in arguments.values():
                continue
            options = {"mask": means, "rows": of, "scale": scale, "width": width, "shared": shared}
            yield Reading(tuple(roles.items()), tuple(arguments.items()), tuple(options.items()))

    @classmethod
    def examples(cls, module: Any, reading: Reading) -> Iterator[Sample]:
        channels, of_rows = taken(module, reading), taken(module, reading, "position")
        mask, means = reading.argument("mask"), reading.option("mask")
        states = [name for name, role in reading.arguments if role in STATES]
        for batch, length in ((2, 9), (1, 5), (3, 23), (1, 130)):
            rows = length if reading.option("rows") == LEGACY_PAST else 2 * length - 1
            given = {name: torch.randn(batch, length, channels) for name in states}
            given[reading.argument("positions")] = torch.randn(1 if reading.option("shared") else batch, rows, of_rows)  # type: ignore[index]
            real = (
                torch.arange(length) < torch.tensor([length, *torch.randint(length // 2, length, (batch - 1,)).tolist()])[:, None]
            )
            every = torch.ones(batch, 1, length, dtype=torch.bool)
            pairs = length, length
            if mask is None:
                yield Sample(f"{batch} sequences of {length}", given, pairs)
                continue
            yield Sample(f"{batch} sequences of {length}", {**given, mask: mask_of(every, means)}, pairs)
            yield Sample(f"{batch} sequences of {length} with padding", {**given, mask: mask_of(real[:, None], means)}, pairs)
            window = (torch.arange(length)[:, None] - torch.arange(length)).abs() < 4
            seen = real[:, None] & window & (torch.eye(length, dtype=torch.bool) | (torch.rand(batch, length, length) < 0.7))
            yield Sample(
                f"{batch} sequences of {length}, a mask of pairs", {**given, mask: mask_of(seen, means)}, pairs, real[..., None]
            )
        cache = reading.argument("cache")
        if cache is not None and reading.returns == WITH_CACHE and reading.option("rows") == LATEST:
            heads, width, past = module_heads(module, reading), reading.option("width"), 6
            given = {name: torch.randn(1, 4, channels) for name in states}
            given[reading.argument("positions")] = torch.randn(1, 2 * (4 + past) - 1, of_rows)  # type: ignore[index]
            given[cache] = torch.randn(1, heads, past, 2 * width)
            if mask is not None:
                given[mask] = mask_of(torch.ones(1, 1, 4 + past, dtype=torch.bool), means)
            yield Sample(f"4 queries behind a cache of {past} keys", given, (4, 4 + past))

    def at_length(self, module: Any, length: int, parent: Any) -> dict[str, Any]:
        reading = self.reading
        channels, of_rows = taken(module, reading), taken(module, reading, "position")
        rows = length if reading.option("rows") == LEGACY_PAST else 2 * length - 1
        given = {name: torch.empty(1, length, channels, device="meta") for name, role in reading.arguments if role in STATES}
        given[reading.argument("positions")] = torch.empty(1, rows, of_rows, device="meta")  # type: ignore[index]
        if (mask := reading.argument("mask")) is not None:
            dtype = torch.float32 if reading.option("mask") == ADDED else torch.bool
            given[mask] = torch.empty(1, 1, length, dtype=dtype, device="meta")
        return given

    def serves(
        self,
        module: Any,
        query: torch.Tensor,
        positions: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        cache: torch.Tensor | None = None,
    ) -> bool:
        keys = (query if key is None else key).shape[1]
        if cache is not None and cache.numel() > 0:
            if self.reading.returns != WITH_CACHE or cache.dim() != 4 or self.options["rows"] != LATEST:
                return False
            keys += cache.shape[2]
        elif keys != query.shape[1]:
            return False
        if mask is not None and mask.numel() > 0 and mask.dim() != (4 if self.options["mask"] == ADDED else 3):
            return False
        rows = keys if self.options["rows"] == LEGACY_PAST else 2 * keys - 1
        tables = 1 if self.options["shared"] else len(query)
        return positions is not None and positions.dim() == 3 and tuple(positions.shape[:2]) == (tables, rows) and keys > 1

    def compute(
        self,
        module: Any,
        query: torch.Tensor,
        positions: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        cache: torch.Tensor | None = None,
    ) -> Any:
        options = self.options
        key, width = query if key is None else key, options["width"]
        states = (("query", query), ("key", key), ("value", key if value is None else value))
        q, k, v = (split_heads(self.child(module, *each), width) for each in states)
        if cache is not None and cache.numel() > 0:
            past_key, past_value = cache.chunk(2, dim=-1)
            k, v = torch.cat((past_key, k), 2), torch.cat((past_value, v), 2)
        first, last = 1 - q.shape[2], positions.shape[1] - q.shape[2]
        if options["rows"] != LATEST:
            last = 0
            positions = positions[:, : 1 - first]
        seen = self.seen(mask)
        if seen is not None and seen.shape[-1] != k.shape[2]:
            seen = seen[..., : k.shape[2]]
        u, v_bias = (self.part(module, name).reshape(-1, width) for name in ("content_bias", "position_bias"))
        out = operators.attend(
            q,
            k,
            v,
            split_heads(self.child(module, "position", positions), width),
            u,
            v_bias,
            RelativePositions(first, last, "error" if options["rows"] == LATEST else "zero"),
            options["scale"],
            attn_mask=seen,
            dropout_p=self.weights_dropout(module),
        )
        result = self.output(module, join_heads(out))
        return (result, torch.cat((k, v), -1)) if self.reading.returns == WITH_CACHE else result


STATES = ("query", "key", "value")
WITH_CACHE = ("tensor", "tensor")
"""What a forward with a cache returns."""


def module_heads(module: Any, reading: Reading) -> int:
    """The number of heads."""
    return int(projections(module)[reading.role("query")][1] // reading.option("width"))
