"""Instruction counts of compiled kernels: matrix products, shuffles, asynchronous loads, and the cost of the relative term.

Counts are those of one version of Triton, the one in constraints.txt.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.compile import KernelCase, used_by
from bench.compiled import Resources, matrix_instructions
from bench.compiled import compiled as compiled_kernel
from tests.compile.targets import on_triton_3_7

BACKWARD = ("dkv", "stored_dq", "dtable")


def case(kernel: str, target: str, width: int, table: str) -> KernelCase:
    return KernelCase(kernel, target, "bf16", width, table)


def compiled(kernel: str, target: str, width: int, table: str) -> Resources:
    """The kernel in its default configuration."""
    return used_by(case(kernel, target, width, table), case(kernel, target, width, table).config)


def per_score(kernel: str, target: str, width: int, table: str) -> list[float]:
    """Instructions of each loop per score, near loop first: warps times instructions over the elements of a tile. Without a limit
    of registers, whose spills are no cost of a term."""
    kernel_case = case(kernel, target, width, table)
    config = replace(kernel_case.config, max_registers=None)
    loops = [loop for loop in used_by(kernel_case, config).loops if matrix_instructions(loop)]
    return [loop.total() * config.num_warps / (config.block_m * config.block_n) for loop in loops]


@on_triton_3_7
@pytest.mark.parametrize("width", [64, 128])
def test_cost_of_the_relative_term_in_the_forward(width: int) -> None:
    """At most 1.6 times the instructions of the kernel without a table, in the near loop on sm_90."""
    plain, near = (per_score("forward", "sm_90", width, table)[0] for table in ("none", "full"))
    assert plain < near <= 1.6 * plain


@pytest.mark.thorough
@on_triton_3_7
def test_cost_of_the_relative_term_in_the_backward() -> None:
    """Instructions per score on sm_90, width 64, against kernels without a table: full tables, and far tiles of clamped ones."""
    (plain_columns,), (plain_rows,) = (per_score(kernel, "sm_90", 64, "none") for kernel in ("dkv", "dq"))
    (columns,), (rows,), (table,) = (per_score(kernel, "sm_90", 64, "full") for kernel in BACKWARD)
    assert plain_columns < columns <= 2 * plain_columns
    assert rows <= plain_rows  # two products beside three
    assert plain_rows + plain_columns < rows + columns + table <= 2 * (plain_rows + plain_columns)
    assert per_score("dkv", "sm_90", 64, "clamp")[1] <= 1.3 * plain_columns  # which does not prefetch
    assert per_score("dq", "sm_90", 64, "clamp")[1] <= 1.4 * plain_rows  # which has no far term, and no sum over far keys


@on_triton_3_7
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_main_loop_of_the_forward(target: str, width: int) -> None:
    """One more product than without a table, and asynchronous loads."""
    unit = "HGMMA" if target == "sm_90" else "HMMA"
    full, plain = (compiled("forward", target, width, table).main_loop for table in ("full", "none"))
    configs = {table: case("forward", target, width, table).config for table in ("full", "none")}
    elements = {table: config.block_m * config.block_n / (32 * config.num_warps) for table, config in configs.items()}
    assert matrix_instructions(full) == full[unit] and matrix_instructions(plain) == plain[unit]
    if target == "sm_80":  # all products of a tile take equally many instructions
        assert full[unit] / elements["full"] == pytest.approx(1.5 * plain[unit] / elements["none"])
    if configs["full"].num_stages > 1:
        assert full["LDGSTS"] > 0 and full["LDG"] == 0, "a value carried unchanged turns Triton's loop pipelining off"


@on_triton_3_7
@pytest.mark.parametrize("kernel", BACKWARD)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_loads_of_the_backward_are_asynchronous(target: str, kernel: str) -> None:
    """With two stages, loads of the next iteration run beside this one. Exceptions in the dtable kernel are the number of a
    sequence's keys and, on sm_80, dS, which has to be transposed."""
    config, loop = case(kernel, target, 64, "full").config, compiled(kernel, target, 64, "full").main_loop
    others = 0
    if kernel == "dtable":
        words = config.block_m * config.block_n * 2 // 16 // (32 * config.num_warps)  # of 16 bytes, loaded by a thread
        others = 1 + words * (target == "sm_80")
    stages = config.num_stages
    assert (loop["LDGSTS"] > 0) == (stages > 1) and (loop["LDG"] > others) == (stages == 1), (stages, loop)


def products(kernel: str, table: str) -> float:
    """Matrix products per score of the main loop on sm_80, in units of one [M, D] @ [D, N]; one HMMA is 16 x 16 by 16 x 8."""
    config, loop = case(kernel, "sm_80", 64, table).config, compiled(kernel, "sm_80", 64, table).main_loop
    return loop["HMMA"] * config.num_warps * 16 * 8 * 16 / (config.block_m * config.block_n * 64)


@on_triton_3_7
def test_products_per_tile_of_the_backward() -> None:
    """As few as the algorithm needs: the table adds two blocks of QE where scores are computed, and one product with dS."""
    assert products("dkv", "none") == 4  # QK, dV, dP, dK
    assert 5 < products("dkv", "full") <= 6  # of the second block, only what the tile uses
    assert products("dq", "none") == 3  # QK, dP, dQ
    assert products("dq", "clamp") == 4  # near the table; one block of QE is carried
    assert products("stored_dq", "full") == 2  # dS with keys, and with rows of the table
    assert products("dtable", "full") == 1  # dE


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_beyond_a_table_nan_is_kept(target: str) -> None:
    """An end row with NaN reaches out: the shift of far scores is a maximum that keeps NaN, unlike fmax. (In the interpreter both
    are numpy's.)"""
    for table in ("full", "clamp"):
        kernel = compiled_kernel("forward", target, *case("forward", target, 64, table).call)
        assert ("max.NaN.f32" in kernel.asm["ptx"]) == (table == "clamp")


def test_far_tiles_cost_no_product() -> None:
    """Tiles beyond a bounded table have the number of matrix instructions that they have without a table."""
    for table in ("zero", "clamp"):
        loops = compiled("forward", "sm_90", 64, table).loops
        near, far = (matrix_instructions(loop) for loop in loops if matrix_instructions(loop))
        assert far * 3 == near * 2
