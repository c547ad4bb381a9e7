"""Rotations in registers, compiled: no shared memory, no barrier, few shuffles, and loads that stay asynchronous."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.compile import KernelCase, used_by
from tests.compile.test_forward import on_triton_3_7
from triton_relattn.kernels.configs import TileConfig

LIMITS = {
    # target, head dim, tile: instructions of the forward's loop
    ("sm_90", 64, (64, 64, 4)): 620,
    ("sm_90", 64, (128, 64, 8)): 600,
    ("sm_90", 128, (128, 64, 8)): 700,
    ("sm_80", 64, (128, 64, 8)): 760,
}


@on_triton_3_7
@pytest.mark.parametrize(("target", "head_dim", "tile"), LIMITS)
def test_forward(target: str, head_dim: int, tile: tuple[int, int, int]) -> None:
    """A word, two elements, takes one shuffle; nothing else is added to what the kernel without a term has of these.

    If this fails with a new Triton, it no longer keeps the accumulator's layout, see kernels/quads.py.
    """
    config = TileConfig(*tile, 2, rotation="packed")
    case = KernelCase("forward", target, "bf16", head_dim, "full")
    used, plain = used_by(case, config), used_by(case.plain, replace(config, rotation="gather")).main_loop
    loop = used.main_loop
    shown = {name: (loop[name], plain[name]) for name in ("SHFL", "LDS", "STS", "BAR", "LDGSTS")}
    block_m, block_n, warps = tile
    assert loop["SHFL"] - plain["SHFL"] == block_m * block_n // (64 * warps), shown
    # On sm_80 the statistics of a row go through shared memory once.
    assert all(loop[name] - plain[name] <= (4 if target == "sm_80" else 0) for name in ("LDS", "STS", "BAR")), shown
    assert loop["LDGSTS"] > 0 and used.stack_bytes <= (16 if target == "sm_80" else 0), (shown, used)
    assert loop.total() <= LIMITS[target, head_dim, tile], loop.total()


@on_triton_3_7
@pytest.mark.parametrize(("kernel", "limit"), [("rows", 760), ("columns", 700), ("table", 1050)])
def test_backward(kernel: str, limit: int) -> None:
    """The default configurations, 64 x 64: rotations there and, but for the columns kernel, back; no shared memory for them."""
    case = KernelCase(kernel, "sm_90", "bf16", 64, "full")
    config = case.config
    assert (config.block_m, config.block_n, config.num_warps, config.rotation) == (64, 64, 4, "packed")
    used = used_by(case, config)
    # Loads of shared memory: none in the rows kernel; statistics of the rows in the columns kernel.
    shown = {name: used.main_loop[name] for name in ("SHFL", "LDS", "BAR")}
    rotations = 1 if kernel == "columns" else 2
    of_sums = 4 if kernel == "rows" else 0  # over the keys of a row
    assert shown["SHFL"] == rotations * 64 * 64 // (64 * 4) + of_sums, shown
    assert shown["LDS"] <= (4 if kernel == "columns" else 0), shown
    assert (used.spill_bytes, used.stack_bytes) == (0, 0), used
    assert used.main_loop.total() <= limit, used.main_loop.total()
