"""The file of default configurations: each row serves some call, and each call gets a configuration that its GPUs allow."""

from __future__ import annotations

import functools
import itertools

import torch

from triton_relattn.kernels.config.architectures import ARCHITECTURES, architecture_of
from triton_relattn.kernels.config.selection import COVERAGES, Kind, Row, call_kind, defaults, select
from triton_relattn.kernels.config.tile_config import KERNELS

TERM_SETS = ("none", "rel_value", "rel_p2c", "rel_query", "narrow rel_query", "rel_key and rel_bias", "rel_bias", "grid")
ARCHS = (*ARCHITECTURES, "interpreter", "sm_70")
CALLS = tuple(
    (arch, Kind(kernel, precision, architecture_of(arch).unit, width, terms, coverage))
    for kernel, precision, arch, width, terms, coverage in itertools.product(
        KERNELS, ("16 bits", "ieee", "tf32"), ARCHS, ("64", "128", "256"), TERM_SETS, COVERAGES
    )
)


@functools.cache
def first_row(call: Kind) -> Row:
    """Return the row that serves a call."""
    return next(row for row in defaults() if row.fits(call))


def test_calls_are_served() -> None:
    """By a configuration that the architecture allows; without a table, there are grids, and no kernels of tables."""
    for arch, call in CALLS:
        config, has_table = first_row(call).config, call.coverage != "no table"
        exists = call.term_set != "grid"
        if not has_table:
            exists = call.term_set in ("none", "grid") and call.kernel in ("forward", "dq", "dkv")
        if exists and call.unit != "interpreter":
            assert config.why_invalid(arch, has_table, call.kernel) is None, (arch, call, config)
            assert config.rotation == "gather" or architecture_of(arch).rotates_in_registers, (arch, config)


def test_rows_are_reached() -> None:
    """A row that none comes to is a mistake: a row above it takes its calls."""
    reached = {first_row(call) for _, call in CALLS}
    assert [row for row in defaults() if row not in reached] == []


def test_first_row_wins() -> None:
    """Rows that say more stand above rows that say less, as the docs say; select follows them."""
    kind = call_kind("sm_90", torch.bfloat16, 40, "full")
    assert select("forward", "sm_90", kind._replace(term_set="rel_value")).num_stages == 2
    assert select("forward", "sm_90", kind).max_registers == 168
    assert select("forward", "sm_90", kind._replace(coverage="no table")).block_m == 128
