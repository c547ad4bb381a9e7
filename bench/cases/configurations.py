"""Which configurations the kernels of a case run in."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from unittest import mock

import torch

from triton_relattn import can_run_triton
from triton_relattn._core.spec import AttentionSpec, AttentionTensors
from triton_relattn._core.tails import wants_tail
from triton_relattn.kernels import configs, workspace
from triton_relattn.kernels.arguments import Call
from triton_relattn.kernels.tile_config import OF_P2C, OF_QUERY, OF_TABLES, OF_WORDS
from triton_relattn.kernels.words import queries_apart, rows_of_program

from .attention import Case

TILE_COLUMNS = tuple(field.name for field in fields(configs.TileConfig))
"""Columns of a configuration."""
WANTED = {"forward": (), "dq": ("query",), "dkv": ("key", "value"), "dtable": ("rel_key",), "dtable_words": ("rel_key",)}
WANTED |= {OF_QUERY: ("query",), **dict.fromkeys(OF_P2C, ("rel_p2c",))}
"""Gradients that make the backward launch a kernel, after the dq kernel if that has to come first."""
OF_DIRECTION = {
    "forward": configs.KERNELS[:1],
    "backward": configs.KERNELS[1:],
    "forward+backward": configs.KERNELS,
    "backward of query": ("dq", OF_QUERY),
    "backward of all but the table": ("dq", "dkv", OF_QUERY),
}


def shown(config: configs.TileConfig) -> str:
    """Describe a configuration in a few words: queries x keys, warps, stages, what is carried, rotation, limit of registers."""
    rotation = "" if config.rotation == "gather" else f" {config.rotation}"
    limit = "" if config.max_registers is None else f" r{config.max_registers}"
    return f"{config.block_m}x{config.block_n} w{config.num_warps} s{config.num_stages} carry {config.carry}{rotation}{limit}"


def own_tile(kernel: str, config: configs.TileConfig, dtype: torch.dtype = torch.bfloat16) -> tuple[int, int]:
    """Return how many queries by how many keys or rows of a table a program adds to its sums in a turn of its loop."""
    if kernel != "dtable_words":
        return config.block_m, config.block_n
    return config.block_m, rows_of_program(config.block_n, queries_apart(8 * dtype.itemsize))


@contextmanager
def way_of(kernel: str) -> Iterator[None]:
    """Within, calls use no workspace if this is a kernel that makes a table's gradient without one."""
    with mock.patch.dict(os.environ, {workspace.VARIABLE: "0"} if kernel in OF_TABLES and kernel not in OF_WORDS else {}):
        yield


def has_table_of(kernel: str, tensors: AttentionTensors) -> bool:
    """Whether a call has a table whose gradient one of OF_TABLES computes."""
    names = ("rel_p2c",) if kernel in OF_P2C else ("rel_key", "rel_value", "rel_bias")
    return any(getattr(tensors, name) is not None for name in names)


def kernels_of(
    direction: str,
    call: Call,
    tensors: AttentionTensors,
    spec: AttentionSpec,
    tiles: Mapping[str, configs.TileConfig],
    multiprocessors: int,
) -> list[str]:
    """Return the kernels that a direction of a call launches, first to last."""
    plan = workspace.plan(call, tensors, spec, tiles, multiprocessors)
    is_launched = {kernel: has_table_of(kernel, tensors) and (kernel in OF_WORDS) == (plan is not None) for kernel in OF_TABLES}
    from_words = plan is not None and plan.has_all_keys and wants_tail(tensors, spec)
    is_launched |= {"dq": not from_words, OF_QUERY: from_words}
    kernels = [kernel for kernel in OF_DIRECTION[direction] if is_launched.get(kernel, True)]
    return ["dkv", OF_QUERY] if kernels == [OF_QUERY] else kernels  # which reads what the dkv kernel leaves


def used_configurations(case: Case, direction: str, device: str, has_table: bool) -> str:
    """Return the configurations of the kernels that run, first to last; "blockwise" where no kernels do."""
    inputs = case.empty(device)
    if device != "cuda" or not can_run_triton(inputs.query, inputs.value):
        return "blockwise"
    tensors, spec = case.resolved(inputs, has_table)
    call = Call(tensors, spec)
    tiles = {kernel: call.tile(kernel) for kernel in configs.KERNELS}
    names = kernels_of(direction, call, tensors, spec, tiles, configs.multiprocessors(inputs.query.device))
    return ", ".join(f"{kernel} {shown(tiles[kernel])}" for kernel in names)
