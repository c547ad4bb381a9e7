"""The file of default configurations: each row serves some call, and each call gets a configuration that its GPUs allow."""

from __future__ import annotations

import functools
import itertools

import torch

from triton_relattn.kernels.config import selection
from triton_relattn.kernels.config.architectures import ARCHITECTURES, architecture_of
from triton_relattn.kernels.config.profiles import Conditions
from triton_relattn.kernels.config.tile_config import COVERAGES, KERNELS

SPECIALS = (None, "rel_value", "rel_p2c", "rel_query", "narrow rel_query", "rel_key and rel_bias", "rel_bias", "grid")
ARCHS = (*ARCHITECTURES, "interpreter", "sm_70")
CALLS = tuple(itertools.product(KERNELS, ("16 bits", "ieee", "tf32"), ARCHS, (64, 128, 256), SPECIALS, COVERAGES))


@functools.cache
def row_of(call: Conditions) -> int:
    """Return the number of the row that serves a call."""
    return next(number for number, row in enumerate(selection.defaults()) if row.conditions.fit(call))


def test_calls_are_served() -> None:
    """By a configuration that the architecture allows; without a table, there are grids, and no kernels of tables."""
    for kernel, precision, arch, width, term_set, coverage in CALLS:
        unit = architecture_of(arch).unit
        call = Conditions(kernel, precision, unit, str(width), term_set or "none", coverage)
        config = selection.defaults()[row_of(call)].config
        has_table = coverage != "no table"
        is_call = term_set != "grid" if has_table else term_set in (None, "grid") and kernel in ("forward", "dq", "dkv")
        if is_call and unit != "interpreter":
            reason = config.why_invalid(arch, has_table, kernel)
            assert reason is None, (arch, call, config)
            assert config.rotation == "gather" or architecture_of(arch).rotates_in_registers, (arch, config)


def test_rows_are_reached() -> None:
    """A row that none comes to is a mistake: a row above it takes its calls."""
    reached = {
        row_of(Conditions(kernel, precision, architecture_of(arch).unit, str(width), term_set or "none", coverage))
        for kernel, precision, arch, width, term_set, coverage in CALLS
    }
    assert [row for number, row in enumerate(selection.defaults()) if number not in reached] == []


def test_first_row_wins() -> None:
    """Rows that say more stand above rows that say less, as the docs say; select follows them."""
    assert selection.select("forward", "sm_90", torch.bfloat16, 64, "full", term_set="rel_value").num_stages == 2
    assert selection.select("forward", "sm_90", torch.bfloat16, 40, "full").max_registers == 168
    assert selection.select("forward", "sm_90", torch.bfloat16, 64).block_m == 128
