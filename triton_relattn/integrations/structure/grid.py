"""Decomposed relative positions on a grid, as in SAM and ViTDet: segment-anything, cellpose, MedSAM, timm, mmdet, detectron2.

Source: Li et al., "Exploring Plain Vision Transformer Backbones for Object Detection", 2022; Kirillov et al., "Segment
Anything", 2023.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..comparison import Sample
from ..operators import decomposed_relative_attention
from ..shadow import projections
from .kind import Kind, Reading, Refused
from .roles import own_parameters, split_words

AXES = {"rel_pos_h": {"h", "height", "y", "vertical"}, "rel_pos_w": {"w", "width", "x", "horizontal"}}


class DecomposedPositions(Kind):
    """q_i . k_j / sqrt(D) + q_i . R_h[y_i - y_j] + q_i . R_w[x_i - x_j], of states (B, height, width, C), in windows or
    as a whole.
    """

    title = "decomposed positions on a grid (SAM)"
    fewest = 1 << 22
    meanings = ()

    @classmethod
    def read(cls, module: nn.Module) -> Reading | None:
        sizes, own = projections(module), own_parameters(module)
        joint = [name for name, (taken, given) in sizes.items() if given % 3 == 0 and given > taken]
        tables = [name for name, table in own.items() if table.dim() == 2 and {"rel", "relative"} & set(split_words(name))]
        if len(sizes) != 2 or len(joint) != 1 or len(tables) != 2:
            return None
        axes = {role: next((name for name in tables if axis & set(split_words(name))), None) for role, axis in AXES.items()}
        width = own[tables[0]].shape[1]
        if None in axes.values() or own[tables[1]].shape[1] != width or sizes[joint[0]][1] // 3 % width:
            return None
        if any(name.startswith(("pool", "conv_q", "conv_k")) for name, _ in module.named_children()):
            raise Refused("it pools queries and keys: decomposed_relative_attention computes it (key_grid), in your own forward")
        norms = tuple(name if hasattr(module, name) else None for name in ("q_norm", "k_norm"))
        roles: Any = {"qkv": joint[0], "out": next(name for name in sizes if name != joint[0]), **axes}
        return roles, {"width": (width,), "norms": (norms,)}

    def samples(self, module: Any, is_light: bool) -> Iterator[Sample]:
        own = tuple(min((len(self.part(module, role)) + 1) // 2, 14) for role in AXES)
        for batch, grid in ((2, (3, 5)), (1, own), (3, (7, 4))):
            given = {self.layout.argument("states"): torch.randn(batch, *grid, self.layout.channels)}
            yield Sample(f"{batch} grids of {grid[0]} x {grid[1]}", given, (math.prod(grid),) * 2)  # type: ignore[arg-type]

    def at_length(self, module: Any, length: int, parent: Any) -> dict[str, Any]:
        window = getattr(parent, "window_size", 0)
        side = max(window) if isinstance(window, (tuple, list)) else int(window)
        windows = -(-length // side**2) if side else 1
        side = side or round(length**0.5)
        states = torch.empty(windows, side, side, self.layout.channels, device="meta")
        return {self.layout.argument("states"): states}  # type: ignore[dict-item]

    def accepts(self, module: Any, states: torch.Tensor) -> bool:
        return states.dim() == 4

    def compute(self, module: Any, states: torch.Tensor) -> torch.Tensor:
        batch, height, width, _ = states.shape
        qkv = self.part(module, "qkv")(states).view(batch, height * width, 3, -1, self.options["width"])
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q_norm, k_norm = (getattr(module, name) if name else None for name in self.options["norms"])
        query, key = query if q_norm is None else q_norm(query), key if k_norm is None else k_norm(key)
        out: torch.Tensor = decomposed_relative_attention(
            query,
            key,
            value,
            self.part(module, "rel_pos_h"),
            self.part(module, "rel_pos_w"),
            (height, width),
            dropout_p=self.dropout_p(module),
        )
        return self.output(module, out.transpose(1, 2).reshape(batch, height, width, -1))
