"""Default configurations: each row of the file serves some call, and each call gets a configuration that its GPU allows."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from triton_relattn.kernels.config.architectures import ARCHITECTURES, architecture_of, rounds_terms
from triton_relattn.kernels.config.selection import COVERAGES, Row, conditions, config_of, defaults, fits, tables
from triton_relattn.kernels.config.tile_config import KERNELS, TileConfig

TERM_SETS = ("none", "rel_value", "rel_p2c", "rel_query", "narrow rel_query", "rel_key and rel_bias", "rel_bias", "grid")
ARCHS = (*ARCHITECTURES, "interpreter", "sm_70")
CALLS = tuple(
    (arch, (kernel, precision, architecture_of(arch).unit, width, terms, coverage))
    for kernel, precision, arch, width, terms, coverage in itertools.product(
        KERNELS, ("16 bits", "ieee", "tf32"), ARCHS, ("64", "128", "256"), TERM_SETS, COVERAGES
    )
)
"""Architectures and the first of selection.CONDITIONS."""


@functools.cache
def first_row(call: tuple[str, ...]) -> int:
    """Return the number of the row that serves a call."""
    return next(number for number, row in enumerate(defaults()) if fits(row, call))


def select(kernel: str, arch: str, call: Row) -> TileConfig:
    return tables(arch).select(kernel, call, with_profile=False)


def test_calls_are_served() -> None:
    """Each call gets a valid configuration; calls without a table, and on a grid, exist only for some kernels."""
    for arch, call in CALLS:
        kernel, _, unit, _, term_set, coverage = call
        config, has_table = config_of(defaults()[first_row(call)]), coverage != "no table"
        exists = term_set != "grid"
        if not has_table:
            exists = term_set in ("none", "grid") and kernel in ("forward", "dq", "dkv")
        if exists and unit != "interpreter":
            assert config.why_invalid(arch, has_table, kernel) is None, (arch, call, config)
            assert config.rotation == "gather" or architecture_of(arch).rotates_in_registers, (arch, config)


def test_rows_are_reached() -> None:
    """No row is hidden by rows above it."""
    reached = {first_row(call) for _, call in CALLS}
    assert [row for number, row in enumerate(defaults()) if number not in reached] == []


def test_first_row_wins() -> None:
    """select takes the first row that fits: specific rows stand above general ones."""
    call = conditions("sm_90", torch.bfloat16, "highest", 40, "full")
    assert select("forward", "sm_90", {**call, "term_set": "rel_value"}).num_stages == 2
    assert select("forward", "sm_90", call).max_registers == 168
    assert select("forward", "sm_90", {**call, "coverage": "no table"}).block_m == 128


def test_rounded_terms() -> None:
    """Terms are rounded to float16 only for bfloat16: in float16 the error of a table's gradient would exceed the error rule."""
    assert rounds_terms("sm_90", torch.bfloat16)
    assert not any(rounds_terms("sm_90", dtype) for dtype in (torch.float16, torch.float32))


def test_unknown_architectures(caplog: pytest.LogCaptureFixture) -> None:
    """Unknown GPUs get small tiles that fit anywhere, and a line in the log."""
    for arch in ("sm_75", "sm_130", "gfx1201"):
        caplog.clear()
        for kernel in KERNELS:
            for width in (64, 128, 256):
                config = select(kernel, arch, conditions(arch, torch.bfloat16, "highest", width, "full"))
                assert max(config.block_m, config.block_n) <= 64 and config.rotation == "gather"
                assert config.why_invalid(arch, True, kernel) is None
        assert [record.getMessage() for record in caplog.records] == [
            f"the kernels have no configurations for {arch}; small tiles are used, which are slow"
        ]


def test_smaller_configurations_are_valid() -> None:
    """Halving a configuration gives valid ones, down to the smallest."""
    in_registers = TileConfig(128, 64, 8, 2, rotation="registers")  # whose warps have at least 16 rows
    for config in (TileConfig(128, 64, 8, 3), TileConfig(64, 64, 4, 1), TileConfig(32, 16, 4, 2, None), in_registers):
        steps = 0
        smaller: TileConfig | None = config
        while smaller is not None:
            assert smaller.why_invalid("sm_90", True) is None
            assert (smaller.carry, smaller.rotation) == (config.carry, config.rotation)
            assert smaller.num_warps == config.num_warps or smaller.num_warps * 16 == smaller.block_m
            last, smaller, steps = smaller, smaller.smaller(), steps + 1
        assert (last.block_m, last.block_n, last.num_stages) == (16, 16, 1) and steps < 9
