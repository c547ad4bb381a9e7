"""The file of default configurations: each row serves some call, and each call gets a configuration that its GPUs allow."""

from __future__ import annotations

import itertools

import torch

from triton_relattn.kernels import configs
from triton_relattn.kernels.architectures import ARCHITECTURES, architecture_of
from triton_relattn.kernels.tile_config import COVERAGES, KERNELS, OF_TABLES

SPECIALS = (None, "rel_value", "rel_p2c", "rel_query", "narrow rel_query", "rel_key and rel_bias", "rel_bias", "grid")
ARCHS = (*ARCHITECTURES, "interpreter", "sm_70")
CALLS = tuple(itertools.product(KERNELS, ("16 bits", "ieee", "tf32"), ARCHS, (64, 128, 256), SPECIALS, COVERAGES))


def test_calls_are_served() -> None:
    """By a configuration that the architecture allows; without a table, there are grids, and no kernels of tables."""
    for kernel, precision, arch, width, term_set, coverage in CALLS:
        unit = architecture_of(arch).unit
        config = configs._default(kernel, precision, unit, width, term_set, coverage)
        has_table = coverage != "no table"
        is_call = term_set != "grid" if has_table else term_set in (None, "grid") and kernel not in OF_TABLES
        if is_call and unit != "interpreter":
            reason = config.why_invalid(arch, has_table, kernel)
            assert reason is None, (kernel, precision, arch, width, term_set, coverage, config)
            assert config.rotation == "gather" or architecture_of(arch).rotates_in_registers, (arch, config)


def test_rows_are_reached() -> None:
    """A row that none comes to is a mistake: a row above it takes its calls."""
    rows = configs._defaults()
    reached = set()
    for kernel, precision, unit, width, term_set, coverage in {
        (*call[:2], architecture_of(call[2]).unit, *call[3:]) for call in CALLS
    }:
        call = dict(zip(configs.CALL_COLUMNS, (kernel, precision, unit, str(width), term_set or "none", coverage), strict=True))
        reached.add(next(number for number, (wanted, _) in enumerate(rows) if wanted.items() <= call.items()))
    assert [rows[number] for number in range(len(rows)) if number not in reached] == []


def test_first_row_wins() -> None:
    """Rows that say more stand above rows that say less, as the docs say; select follows them."""
    assert configs.select("forward", "sm_90", torch.bfloat16, 64, "full", term_set="rel_value").num_stages == 2
    assert configs.select("forward", "sm_90", torch.bfloat16, 40, "full").max_registers == 128
    assert configs.select("forward", "sm_90", torch.bfloat16, 64).block_m == 128
