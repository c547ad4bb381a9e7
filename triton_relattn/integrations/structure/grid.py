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

from ...grids import decomposed_relative_attention
from ..shadow import projections
from .kind import Kind, Reading, Refused, Sample, taken
from .roles import argument_roles, own_parameters, words_of

TABLES = (("h", "height", "y", "vertical"), ("w", "width", "x", "horizontal"))


class DecomposedPositions(Kind):
    """q_i . k_j / sqrt(D) + q_i . R_h[y_i - y_j] + q_i . R_w[x_i - x_j], of states (B, height, width, C), in windows or
    as a whole.
    """

    title = "decomposed positions on a grid (SAM)"
    fewest = 1 << 22

    @classmethod
    def readings(cls, module: nn.Module) -> Iterator[Reading]:
        made, own = projections(module), own_parameters(module)
        joint = [name for name, (taken, given) in made.items() if given % 3 == 0 and given > taken]
        tables = [name for name, each in own.items() if each.dim() == 2 and {"rel", "relative"} & set(words_of(name))]
        if len(made) != 2 or len(joint) != 1 or len(tables) != 2:
            return
        out = next(name for name in made if name != joint[0])
        of = {axis[0]: next((name for name in tables if set(words_of(name)) & set(axis)), None) for axis in TABLES}
        width = own[tables[0]].shape[1]
        if None in of.values() or own[tables[1]].shape[1] != width or made[joint[0]][1] // 3 % width:
            return
        if any(name.startswith(("pool", "conv_q", "conv_k")) for name, _ in module.named_children()):
            raise Refused("it pools queries and keys: decomposed_relative_attention computes it (key_grid), in your own forward")
        norms = tuple(name if hasattr(module, name) else None for name in ("q_norm", "k_norm"))
        roles = {"qkv": joint[0], "out": out, "rel_pos_h": of["h"], "rel_pos_w": of["w"]}
        for arguments in argument_roles(type(module).forward, ("states",)):
            if set(arguments.values()) == {"states"}:
                yield Reading(tuple(roles.items()), tuple(arguments.items()), (("width", width), ("norms", norms)))  # type: ignore[arg-type]

    @classmethod
    def examples(cls, module: Any, reading: Reading) -> Iterator[Sample]:
        channels = taken(module, reading, "qkv")
        sides = [(each.shape[0] + 1) // 2 for each in (getattr(module, reading.role(f"rel_pos_{axis}")) for axis in "hw")]
        own = min(sides[0], 14), min(sides[1], 14)
        for batch, grid in ((2, (3, 5)), (1, own), (3, (7, 4))):
            states = torch.randn(batch, *grid, channels)
            yield Sample(f"{batch} grids of {grid[0]} x {grid[1]}", {reading.argument("states"): states}, (math.prod(grid),) * 2)  # type: ignore[dict-item]

    def at_length(self, module: Any, length: int, parent: Any) -> dict[str, Any]:
        reading = self.reading
        channels = taken(module, reading, "qkv")
        window = getattr(parent, "window_size", 0)
        side = max(window) if isinstance(window, (tuple, list)) else int(window)
        windows = -(-length // side**2) if side else 1
        side = side or round(length**0.5)
        return {reading.argument("states"): torch.empty(windows, side, side, channels, device="meta")}  # type: ignore[dict-item]

    def serves(self, module: Any, states: torch.Tensor) -> bool:
        return states.dim() == 4

    def compute(self, module: Any, states: torch.Tensor) -> torch.Tensor:
        batch, height, width, _ = states.shape
        qkv = self.child(module, "qkv", states).view(batch, height * width, 3, -1, self.options["width"])
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        of_query, of_key = (getattr(module, name) if name else None for name in self.options["norms"])
        query, key = query if of_query is None else of_query(query), key if of_key is None else of_key(key)
        out = decomposed_relative_attention(
            query,
            key,
            value,
            self.part(module, "rel_pos_h"),
            self.part(module, "rel_pos_w"),
            (height, width),
            dropout_p=self.weights_dropout(module),
        )
        return self.output(module, out.transpose(1, 2).reshape(batch, height, width, -1))
