"""Transformer-XL's terms with projected positions, as in ESPnet's Conformer: its copies in FunASR, CosyVoice,
chatterbox, WeNet's kin.

Source: Dai et al., "Transformer-XL", 2019; Gulati et al., "Conformer", 2020.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ...positions import RelativePositions
from ..comparison import Sample
from ..operators import attend, join_heads
from ..shadow import projections
from .kind import ADDED, HIDDEN, SHOWN, Kind, Reading, padded
from .roles import CACHE, MASK, POSITIONS, transformer_xl_roles

LATEST, LATEST_PAST, LEGACY_PAST = "2N - 1 rows", "2N - 1 rows, those of the past count", "N rows, of the past"
"""The rows of the position embeddings, the first of the most distant past, and whether keys in the future have a term of them."""


class ProjectedPositions(Kind):
    """((q_i + u) . k_j + (q_i + v) . R[j - i]) / sqrt(D); R, a row per distance and head, projected position embeddings.

    Position embeddings (1, 2N - 1, C), or (1, N, C) where no term is for the future. Calls with others are the stock forward's.
    """

    title = "Transformer-XL's terms (ESPnet's Conformer)"

    state_roles = ("query", "key", "value")
    meanings = (SHOWN, HIDDEN, ADDED)

    @classmethod
    def read(cls, module: nn.Module) -> Reading | None:
        parts = transformer_xl_roles(module)
        if parts is None:
            return None
        roles, shape = parts
        channels, width = math.prod(shape), shape[-1]
        if len(shape) < 2 or projections(module)[roles["position"]][1] != channels:
            return None
        only_past = getattr(module, "zero_triu", None)
        past = (LATEST, LATEST_PAST) if only_past is None else (LATEST_PAST if only_past else LATEST,)
        # One table for all sequences, or one for each of them.
        return roles, {
            "shared": (True, False),
            "rows": (*past, LEGACY_PAST),
            "scale": (width**-0.5, channels**-0.5),
            "width": (width,),
        }

    @classmethod
    def arguments(cls, forward: Any) -> Iterator[dict[str, str]]:
        return (arguments for arguments in super().arguments(forward) if POSITIONS in arguments.values())

    def sizes(self, module: Any) -> Iterable[tuple[int, int]]:
        return (2, 9), (1, 5), (3, 23), (1, 130)

    def masks(self, batch: int, length: int) -> Iterator[tuple[str, torch.Tensor | None]]:
        yield "", self.stock_mask(torch.ones(batch, 1, length, dtype=torch.bool))
        real = padded(batch, length)[:, None]
        yield " with padding", self.stock_mask(real)
        window = (torch.arange(length)[:, None] - torch.arange(length)).abs() < 4
        chosen = torch.eye(length, dtype=torch.bool) | (torch.rand(batch, length, length) < 0.7)
        yield ", a mask of pairs", self.stock_mask(real & window & chosen)

    def example(self, module: Any, batch: int, length: int, mask: torch.Tensor | None) -> dict[str, Any]:
        rows = length if self.options["rows"] == LEGACY_PAST else 2 * length - 1
        channels = projections(module)[self.roles["position"]][0]
        positions = torch.randn(1 if self.options["shared"] else batch, rows, channels)
        return {**super().example(module, batch, length, mask), self.layout.argument(POSITIONS): positions}  # type: ignore[dict-item]

    def samples(self, module: Any, is_light: bool) -> Iterator[Sample]:
        yield from super().samples(module, is_light)
        cache, queries, past = self.layout.argument(CACHE), 4, 6
        if cache is not None and self.layout.returns == WITH_CACHE and self.options["rows"] == LATEST:
            mask = self.stock_mask(torch.ones(1, 1, queries + past, dtype=torch.bool))
            given = self.example(module, 1, queries, mask if self.layout.argument(MASK) else None)
            channels = projections(module)[self.roles["position"]][0]
            given[self.layout.argument(POSITIONS)] = torch.randn(1, 2 * (queries + past) - 1, channels)  # type: ignore[index]
            given[cache] = torch.randn(1, self.layout.heads, past, 2 * self.options["width"])
            yield Sample(f"{queries} queries behind a cache of {past} keys", given, (queries, queries + past))

    def accepts(
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
            if self.layout.returns != WITH_CACHE or cache.dim() != 4 or self.options["rows"] != LATEST:
                return False
            keys += cache.shape[2]
        elif keys != query.shape[1]:
            return False
        if mask is not None and mask.numel() > 0 and mask.dim() != (4 if self.options[MASK] == ADDED else 3):
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
        options, key = self.options, query if key is None else key
        q, k, v = self.project(module, query=query, key=key, value=key if value is None else value)
        if cache is not None and cache.numel() > 0:
            past_key, past_value = cache.chunk(2, dim=-1)
            k, v = torch.cat((past_key, k), 2), torch.cat((past_value, v), 2)
        first, last = 1 - q.shape[2], positions.shape[1] - q.shape[2]
        if options["rows"] != LATEST:
            last = 0
            positions = positions[:, : 1 - first]
        u, v_bias = (self.part(module, role).reshape(-1, options["width"]) for role in ("content_bias", "position_bias"))
        visible = self.attn_mask(mask)
        out = attend(
            q,
            k,
            v,
            self.project(module, position=positions)[0],  # without a name, so that it is freed before the output projection
            u,
            v_bias,
            RelativePositions(first, last, "error" if options["rows"] == LATEST else "zero"),
            options["scale"],
            attn_mask=None if visible is None else visible[..., : k.shape[2]],
            dropout_p=self.dropout_p(module),
        )
        result = self.output(module, join_heads(out))
        return (result, torch.cat((k, v), -1)) if self.layout.returns == WITH_CACHE else result


WITH_CACHE = ("tensor", "tensor")
"""What a forward with a cache returns."""
