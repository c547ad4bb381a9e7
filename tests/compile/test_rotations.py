"""Rotations in registers, compiled: no shared memory, no barrier, few shuffles, and loads that stay asynchronous.

For any version of Triton; they hold for 3.6 to 3.9. If a test fails with a new one, that one no longer keeps the accumulator's
layout, see kernels/tile/registers.py: "gather" is then the better form.

What moves values between threads is the same with any version. Numbers of instructions and bytes of stack are figures of one
version: 3.9 computes addresses otherwise and spills more.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import triton

from bench.compile import KernelCase, used_by
from bench.compiled import Resources
from bench.report.text import table
from triton_relattn.kernels.config.tile_config import TileConfig

VERSION = ".".join(triton.__version__.split(".")[:2])
HAS_FIGURES = VERSION == "3.7"
"""Whether the numbers of instructions and bytes of stack below are of this version of Triton."""
MOVES = ("SHFL", "LDS", "STS", "BAR")
ANY = 10**6

FORWARD = {
    # target, head dim, tile: most instructions of the forward's loop
    ("sm_90", 64, (64, 64, 4)): 620,
    ("sm_90", 64, (128, 64, 8)): 620,
    ("sm_90", 128, (128, 64, 8)): 710,
    ("sm_80", 64, (128, 64, 8)): 760,
}
BACKWARD = {"SHFL": (16, 16), "LDS": (0, 6), "STS": (0, 20), "BAR": (0, 11)}
"""Allowed numbers of what moves values between threads in the dkv kernel's loop: statistics; stores of dS."""
STACK = {("sm_80", 64, (128, 64, 8)): 16}
"""Bytes that are kept on the stack, at most, with a tile that is not the default there; of all others none."""


def check(used: Resources, allowed: dict[str, tuple[int, int]]) -> None:
    """Each count within its limits, or a table of all that were looked at."""
    counts = {**used.main_loop, "instructions": used.main_loop.total(), "stack bytes": used.stack_bytes}
    found = {name: counts.get(name, 0) for name in allowed}
    rows = [
        (
            name,
            str(found[name]),
            f"{low} to {high}" if high < ANY else f"at least {low}",
            "" if low <= found[name] <= high else "X",
        )
        for name, (low, high) in allowed.items()
    ]
    assert not any(row[-1] for row in rows), f"\n{table((f'Triton {VERSION}', 'compiled', 'allowed', 'wrong'), rows)}"


def check_all(case: KernelCase, config: TileConfig, allowed: dict[str, tuple[int, int]], instructions: int, stack: int) -> None:
    """Values are moved as allowed, and figures hold if they are of this version."""
    if HAS_FIGURES:
        allowed = allowed | {"stack bytes": (0, stack), "instructions": (0, instructions)}
    check(used_by(case, config), allowed)


@pytest.mark.parametrize(("target", "head_dim", "tile"), FORWARD)
def test_forward(target: str, head_dim: int, tile: tuple[int, int, int]) -> None:
    """A word, two elements, takes one shuffle; nothing else is added to what the kernel without a term has of these."""
    config = TileConfig(*tile, 2, rotation="registers")
    case = KernelCase("forward", target, "bf16", head_dim, "full")
    plain = used_by(case.plain, replace(config, rotation="gather")).main_loop
    block_m, block_n, warps = tile
    words = block_m * block_n // (64 * warps)
    # On sm_80 the statistics of a row go through shared memory once. Triton 3.9 has a barrier more for a third wgmma.
    slack = 4 if target == "sm_80" else 0
    allowed = {name: (0, plain[name] + slack) for name in MOVES}
    allowed["SHFL"] = (words, plain["SHFL"] + words)
    allowed["BAR"] = (0, plain["BAR"] + max(slack, VERSION == "3.9"))
    allowed["LDGSTS"] = (1, ANY)
    check_all(case, config, allowed, FORWARD[target, head_dim, tile], STACK.get((target, head_dim, tile), 0))


def test_backward() -> None:
    """The default configuration of the dkv kernel, 64 x 64: no shared memory for rotations."""
    case = KernelCase("dkv", "sm_90", "bf16", 64, "full")
    config = case.config
    assert (config.block_m, config.block_n, config.num_warps, config.rotation) == (64, 64, 4, "registers")
    loads = {"LDGSTS" if config.num_stages > 1 else "LDG": (1, ANY)}
    check_all(case, config, BACKWARD | loads, 890, 0)


def test_a_gather_is_told_apart() -> None:
    """The limits are no formality: with shared memory in the loop the check fails, and says so."""
    used = used_by(KernelCase("forward", "sm_90", "bf16", 64, "full"), TileConfig(64, 64, 4, 2, rotation="gather"))
    with pytest.raises(AssertionError, match=r"LDS +16 +0 to 0 +X"):
        check(used, {"SHFL": (40, 40), "LDS": (0, 0)})
