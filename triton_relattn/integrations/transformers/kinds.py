"""Classes that structure/ computes: FastSpeech2Conformer, and vision encoders that descend from SAM's and ViTDet's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from ..in_place import InPlace
from ..structure.grid import DecomposedPositions
from ..structure.transformer_xl import ProjectedPositions
from .base import wants_weights


class KindOfTransformers:
    """Mixin of kinds that stand for classes of transformers."""

    fewest = property(lambda self: InPlace.fewest)  # as of the other classes of transformers, also on a grid

    def serves(self, module: Any, **given: Any) -> bool:
        return not wants_weights(module) and super().serves(module, **given)  # type: ignore[misc]


class FastSpeech2ConformerAttention(KindOfTransformers, ProjectedPositions):
    """Its mask is one of padding, (B, 1, N)."""

    def masks(self, batch: int, length: int) -> Iterator[tuple[str, torch.Tensor | None]]:
        return itertools.islice(super().masks(batch, length), 2)


class GridAttention(KindOfTransformers, DecomposedPositions):
    """Tokens that pad a window are keys as all others."""

    @staticmethod
    def applies(module: Any) -> bool:
        return hasattr(module, "rel_pos_h")
