"""Compiled rotations in registers: no shared memory, no barrier, few shuffles, and asynchronous loads.

That holds for Triton 3.6 to 3.9. If a test fails with a new version, it no longer keeps the accumulator's layout, see
kernels/tile/registers.py, and "gather" is faster. Numbers of instructions and bytes of stack are checked for one version only.
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
"""Whether the numbers of instructions and bytes of stack below are for this version of Triton."""
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
"""Allowed instructions in the dkv kernel's loop that move values between threads, for statistics and stores of dS."""
STACK = {("sm_80", 64, (128, 64, 8)): 16}
"""Most bytes on the stack; 0 for other tiles."""


def check(used: Resources, allowed: dict[str, tuple[int, int]]) -> None:
    """Assert that all counts are in their limits; the error has a table of them."""
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
    """Assert allowed moves of values, and for one version of Triton the numbers of instructions and bytes of stack."""
    if HAS_FIGURES:
        allowed = allowed | {"stack bytes": (0, stack), "instructions": (0, instructions)}
    check(used_by(case, config), allowed)


@pytest.mark.parametrize(("target", "head_dim", "tile"), FORWARD)
def test_forward(target: str, head_dim: int, tile: tuple[int, int, int]) -> None:
    """A word of two elements takes one shuffle; other moves are those of the kernel without a table."""
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
    config = replace(case.config, max_registers=None)  # which would spill, and add instructions that are no rotations
    assert (config.block_m, config.block_n, config.num_warps, config.rotation) == (64, 64, 4, "registers")
    loads = {"LDGSTS" if config.num_stages > 1 else "LDG": (1, ANY)}
    check_all(case, config, BACKWARD | loads, 890, 0)


def test_a_gather_fails_the_check() -> None:
    """The check fails for a gather, which uses shared memory in the loop."""
    used = used_by(KernelCase("forward", "sm_90", "bf16", 64, "full"), TileConfig(64, 64, 4, 2, rotation="gather"))
    with pytest.raises(AssertionError, match=r"LDS +16 +0 to 0 +X"):
        check(used, {"SHFL": (40, 40), "LDS": (0, 0)})
