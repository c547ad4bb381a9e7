"""Which configurations the kernels of a case run in."""

from __future__ import annotations

from dataclasses import fields

import torch

from triton_relattn import can_run_triton
from triton_relattn._core.spec import AttentionTensors
from triton_relattn.kernels.introspect import Call, program_rows, query_step, selection, tuning

from .attention import Case

shown = tuning.shown
TILE_COLUMNS = tuple(field.name for field in fields(selection.TileConfig))
"""Columns of a configuration."""
OF_DIRECTION = {
    "forward": selection.KERNELS[:1],
    "backward": selection.KERNELS[1:],
    "forward+backward": selection.KERNELS,
}


def own_tile(kernel: str, config: selection.TileConfig, dtype: torch.dtype = torch.bfloat16) -> tuple[int, int]:
    """Return how many queries by how many keys or rows of a table a program adds to its sums in a turn of its loop."""
    if kernel != "dtable":
        return config.block_m, config.block_n
    return config.block_m, program_rows(config.block_n, query_step(8 * dtype.itemsize))


def kernels_of(direction: str, tensors: AttentionTensors) -> list[str]:
    """Return the kernels that a direction of a call launches, first to last. rel_value's gradient takes the dtable kernel once
    more, if there is a table for the scores, too."""
    every = tuning.kernels_of(tensors)
    if tensors.rel_value is not None and (tensors.rel_key is not None or tensors.rel_bias is not None):
        every.insert(every.index("dtable"), "dtable")
    return [kernel for kernel in every if kernel in OF_DIRECTION[direction]]


def used_configurations(case: Case, direction: str, device: str, has_table: bool) -> str:
    """Return the configurations of the kernels that run, first to last; "blockwise" where no kernels do."""
    inputs = case.empty(device)
    if not can_run_triton(inputs.query, inputs.value):
        return "blockwise"
    tensors, spec = case.resolved(inputs, has_table)
    call = Call(tensors, spec)
    tiles = {kernel: call.tile(kernel) for kernel in selection.KERNELS}
    names = kernels_of(direction, tensors)
    return ", ".join(f"{kernel} {shown(tiles[kernel])}" for kernel in names)
