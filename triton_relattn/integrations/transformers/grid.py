"""Vision encoders that descend from SAM's and ViTDet's: attention on a grid of tokens, which structure/ computes."""

from __future__ import annotations

from typing import Any

from ..structure.grid import DecomposedPositions
from .attention import KindOfTransformers


class GridAttention(KindOfTransformers, DecomposedPositions):
    """Tokens that pad a window are keys as all others."""

    @staticmethod
    def applies(module: Any) -> bool:
        return hasattr(module, "rel_pos_h")
