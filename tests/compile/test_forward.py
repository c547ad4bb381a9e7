"""The forward kernel compiled for GPUs that this machine lacks: resources, matrix instructions, and what the relative term costs.

Registers and instruction counts belong to a Triton version: what is asserted here holds for the one in constraints.txt.
"""

from __future__ import annotations

import pytest

from bench.compile import KernelCase, used_by
from bench.compiled import Resources, matrix_instructions
from tests.compile.targets import on_triton_3_7


def case(target: str, width: int, table: str) -> KernelCase:
    return KernelCase("forward", target, "bf16", width, table)


def compiled(target: str, width: int, table: str) -> Resources:
    return used_by(case(target, width, table), case(target, width, table).config)


def per_score(target: str, width: int, table: str) -> float:
    """Instructions of the main loop per score element: warps times instructions over the elements of a tile."""
    config = case(target, width, table).config
    return compiled(target, width, table).main_loop.total() * config.num_warps / (config.block_m * config.block_n)


@on_triton_3_7
@pytest.mark.parametrize(("width", "limit"), [(64, 1.6), (128, 1.6)])
def test_cost_of_the_relative_term(width: int, limit: float) -> None:
    """Instructions of the near loop per score on sm_90, against the plain kernel with its own default configuration."""
    ratio = per_score("sm_90", width, "full") / per_score("sm_90", width, "none")
    assert 1 < ratio <= limit, f"width {width}: {ratio:.2f} times the instructions of the plain kernel, the limit is {limit}"


@on_triton_3_7
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_main_loop(target: str, width: int) -> None:
    """One more product than plain attention on the matrix units, one shuffle for two elements, loads still asynchronous."""
    unit = "HGMMA" if target == "sm_90" else "HMMA"
    full, plain = compiled(target, width, "full").main_loop, compiled(target, width, "none").main_loop
    elements = {
        table: config.block_m * config.block_n / (32 * config.num_warps)
        for table in ("full", "none")
        for config in [case(target, width, table).config]
    }
    assert matrix_instructions(full) == full[unit] and matrix_instructions(plain) == plain[unit]
    if target == "sm_80":  # every product of a tile is as many instructions
        assert full[unit] / elements["full"] == pytest.approx(1.5 * plain[unit] / elements["none"])
    if case(target, width, "full").config.num_stages > 1:
        assert full["LDGSTS"] > 0 and full["LDG"] == 0, "a value carried unchanged turns Triton's loop pipelining off"
    reductions = 8  # shuffles of the row maximum and sum, two rows a thread
    if (target, width) != ("sm_80", 128):  # there a row of scores lies in several warps
        assert full["SHFL"] == elements["full"] / 2 + reductions


def test_far_tiles_cost_no_product() -> None:
    """Beyond a bounded table: as many matrix instructions as without a table, and for "zero" hardly more of anything."""
    configurations = {case("sm_90", 64, table).config for table in ("zero", "clamp")}
    assert len(configurations) == 1
    for table in ("zero", "clamp"):
        near, far = (matrix_instructions(loop) for loop in compiled("sm_90", 64, table).loops if matrix_instructions(loop))
        assert far * 3 == near * 2
