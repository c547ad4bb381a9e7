"""The choice of a launch configuration for a call: a timed one, if a profile has it (profiles.py), or else a default.

Defaults are the rows of defaults.csv. The first row that fits a call is used; a blank stands for anything. A model of the cycles
of compiled kernels chose the rows that rotate in registers, and those for sm_80 and sm_90 without a table (bench/cycles,
bfloat16; float16 agrees); tests/compile holds the kernels to its cycles. The others were chosen by compiling, so that no
registers are spilled. None was timed.
"""

from __future__ import annotations

import csv
import functools
import itertools
from pathlib import Path
from typing import NamedTuple

import torch

from . import profiles
from .architectures import architecture_of
from .tile_config import COVERAGES, MAX_BLOCK, TileConfig
from .tile_config import KERNELS as KERNELS
from .tile_config import OF_WORDS as OF_WORDS

DEFAULTS = Path(__file__).parent / "defaults.csv"
CALL_COLUMNS = ("kernel", "precision", "unit", "width", "term_set", "coverage")
"""Columns of defaults.csv that describe a call. The others have the fields of a TileConfig."""
LARGEST_TERM = 2000.0  # of a logit, that float16 must hold if terms are rounded; with the usual scale widths up to 1,024 do
LEAST_WIDTH = 64  # narrower heads have the configurations of this width
PROGRAMS_PER_MULTIPROCESSOR = 4  # of the dtable kernel, whose walks differ in length: several balance each other


@functools.cache
def architecture(device: torch.device) -> str:
    """Return the name of a device's architecture: "sm_90", "gfx942", ...; "interpreter" on the CPU."""
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def padded_width(width: int, least: int = 16) -> int:
    """Return the width of a tile that holds so many columns: a power of two, and at least the 16 that matrix units need."""
    return max(least, 1 << (width - 1).bit_length())


def input_precision(dtype: torch.dtype, arch: str) -> str:
    """Return "ieee" or "tf32", the precision of float32 products, as torch.set_float32_matmul_precision says. It does not matter
    for 16-bit inputs."""
    if dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest":
        return "ieee"
    return "tf32" if architecture_of(arch).has_tf32 else "ieee"


def needs_wide_index(tensor: torch.Tensor, rows: int = MAX_BLOCK) -> bool:
    """Return whether offsets within so many rows of the tensor's (length, width) matrices exceed 31 bits.

    A tile is addressed from its first row, whose own offset has 64 bits anyway; only a clamped table is addressed from row 0.
    """
    row_stride, column_stride = tensor.stride()[-2:]
    return rows * row_stride + (tensor.shape[-1] + MAX_BLOCK) * column_stride >= 2**31


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors (compute units) the device has; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def table_splits(device: torch.device, programs: int, units: int) -> int:
    """Return how many programs share each block of a table's rows: as few as keep the device busy, since each has its own sum.

    Args:
        programs: the number of blocks of rows, of all tables.
        units: the number of things that the programs of a block share out: batch entries, times heads if those share the table.
    """
    return max(1, min(units, PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device) // programs))


class Kind(NamedTuple):
    """Properties of a call that ``select`` depends on besides kernel and length; ``select`` explains them."""

    arch: str
    dtype: torch.dtype
    width: int
    coverage: str
    is_causal: bool
    term_set: str | None


def profile_key(
    kernel: str,
    arch: str,
    dtype: torch.dtype,
    width: int,
    coverage: str,
    is_causal: bool,
    term_set: str | None,
    length: int,
) -> profiles.Key:
    """Return the properties that select depends on, as a profile stores them. Arguments as of select."""
    precision = input_precision(dtype, arch)
    dtype_name = str(dtype).removeprefix("torch.") if precision == "ieee" else precision
    bucket = profiles.length_bucket(length)
    return profiles.Key(kernel, arch, dtype_name, padded_width(width, LEAST_WIDTH), coverage, is_causal, term_set, bucket)


def rounds_terms(arch: str, dtype: torch.dtype) -> bool:
    """Return whether terms, q.E with a bias, are rounded to float16 before they are added to the scores, if float16 holds them.

    All kernels of a call must agree, whatever their tiles and rotations, so this depends on nothing else. If a backward kernel
    had other terms than the forward, its probabilities would not sum to one, and an error that all keys of a query share adds up
    in the gradient of a table. Terms in float16 obey the error rule for bfloat16 inputs. With float16 inputs, the gradient of a
    table would be off by several times the error that rounding the inputs costs.
    """
    return dtype == torch.bfloat16 and architecture_of(arch).rotates_in_registers


def float16_holds_terms(scale: float) -> bool:
    """Return whether float16 can hold the terms of a call, which are divided by its scale.

    It must not limit a term of a logit up to LARGEST_TERM. And what is left of small terms, where float16 has no normal numbers,
    must change a logit by no more than rounding a term of 1 does. A scale of 0, for attention by position alone, fails the first.
    """
    info = torch.finfo(torch.float16)
    return LARGEST_TERM <= info.max * scale and info.smallest_normal * scale <= 1


def candidates(kernel: str, arch: str, has_table: bool) -> list[TileConfig]:
    """Return every configuration that a search for the best one looks at. All are valid; only compiling tells which fit."""
    carries = {"forward": ("scores", None), "dq": ("both", "scores", None)} if has_table else {}
    rotations = ("gather", "registers") if has_table and architecture_of(arch).rotates_in_registers else ("gather",)
    # 128 registers: two programs of eight warps, or four of four, share a multiprocessor. 168: three of four warps.
    limits = (None, 128, 168) if architecture_of(arch).is_nvidia else (None,)
    blocks, warps, stages = (16, 32, 64, 128), (2, 4, 8), (1, 2, 3)
    every = itertools.product(blocks, blocks, warps, stages, carries.get(kernel, ("scores",)), rotations, limits)
    return [config for config in itertools.starmap(TileConfig, every) if config.why_invalid(arch, has_table, kernel) is None]


def select(
    kernel: str,
    arch: str,
    dtype: torch.dtype,
    width: int,
    coverage: str = "no table",
    is_causal: bool = False,
    term_set: str | None = None,
    length: int | None = None,
) -> TileConfig:
    """Return the configuration of one of KERNELS for a call.

    Args:
        width: the largest width of a head: of query, value or rel_query.
        coverage: see AttentionSpec.coverage; "no table" if there is none.
        term_set: "grid" on a grid; else "rel_value" with a table for the values; else "rel_p2c" with a table for the keys; else
            "rel_query" if the call has one ("narrow rel_query" if it is narrower than the query); else "rel_key and rel_bias", or
            "rel_bias" if that is the only term; else None.
        length: length of the longest sequence, of queries or keys. None: return the default, whatever the profiles say.
    """
    if length is not None and profiles.exist(arch):
        tuned = profiles.find(profile_key(kernel, arch, dtype, width, coverage, is_causal, term_set, length))
        if tuned is not None:
            return tuned
    precision = input_precision(dtype, arch) if dtype == torch.float32 else "16 bits"
    return _default(kernel, precision, architecture_of(arch).unit, width, term_set, coverage)


@functools.cache
def _default(kernel: str, precision: str, unit: str, width: int, term_set: str | None, coverage: str) -> TileConfig:
    """Return the configuration of the first row of defaults.csv that fits a call."""
    if coverage not in COVERAGES:
        raise ValueError(f"coverage must be one of {COVERAGES}, got {coverage!r}")
    padded = str(padded_width(width, LEAST_WIDTH))
    call = dict(zip(CALL_COLUMNS, (kernel, precision, unit, padded, term_set or "none", coverage), strict=True))
    return next(config for wanted, config in _defaults() if wanted.items() <= call.items())


@functools.cache
def _defaults() -> list[tuple[dict[str, str], TileConfig]]:
    """Load the rows of defaults.csv: by its columns what a call must have, and the configuration that it gets then."""
    rows = []
    with open(DEFAULTS, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            sizes = (int(row[name]) for name in ("block_m", "block_n", "num_warps", "num_stages"))
            carry = None if row["carry"] == "none" else row["carry"]
            limit = int(row["max_registers"]) if row["max_registers"] else None
            config = TileConfig(*sizes, carry, row["rotation"], limit)
            rows.append(({name: row[name] for name in CALL_COLUMNS if row[name]}, config))
    return rows
