"""Which tile a kernel of a call gets: that of the first row that fits the call, of the user's profile and of defaults.csv.

1. ``call.py`` describes the call by its conditions: GPU, dtype, width, what its tables cover, which terms it has, its length.
2. For each of its kernels ``Tables.select`` takes the first row that fits: from the user's profile of this GPU, which
   ``python -m triton_relattn tune`` writes, then from defaults.csv. Most defaults were chosen by what the compiler reports:
   spilled registers, shared memory, instructions per score. Three were timed on an H100.
3. Only then is anything compiled. If shared memory or registers of the GPU do not do for it, the next smaller configuration takes
   the place of that one, with a warning, in this call and in all later ones (``take_smaller``).

A row has the columns CONDITIONS, of which a blank fits anything, then those of a TileConfig, and in a profile the kernel's times.
Lines that begin with # are comments: where a profile's rows come from. A profile is used whole or not at all.
"""

from __future__ import annotations

import bisect
import csv
import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
import triton

from ..._core.cache import cache_folder
from ..._core.warn import warn
from .architectures import architecture_of, input_precision
from .tile_config import KERNELS, TileConfig

DEFAULTS = Path(__file__).parent / "defaults.csv"
COVERAGES = ("no table", "full", "clamp", "zero")  # the pairs that a table has rows for; see AttentionSpec.coverage
LENGTH_BUCKETS = (512, 2048, 8192, 32768)
LEAST_WIDTH = 64  # narrower heads have the configurations of this width

CONDITIONS = ("kernel", "precision", "unit", "width", "term_set", "coverage", "dtype", "is_causal", "length")
"""What the choice depends on, as text.

kernel: one of KERNELS.
precision: of products: "16 bits", "ieee" or "tf32".
unit: the GPU's matrix unit; see Architecture.
width: the largest of query, value and rel_query, padded: 64, 128 or 256.
term_set: "grid" on a grid; else the first of these that the call has: "rel_value", "rel_p2c", "narrow rel_query" (narrower than
    the query), "rel_query", "rel_key and rel_bias", "rel_bias", "none".
coverage: one of COVERAGES.
dtype: kernels for bfloat16 and float16 round differently.
is_causal.
length: of the longest sequence, one of LENGTH_BUCKETS; the last one also stands for everything longer.
"""
LENGTH = CONDITIONS.index("length")
TIMES = ("milliseconds", "default_milliseconds")  # of the kernel in this configuration, and in the default one
COLUMNS = (*CONDITIONS, *(field.name for field in fields(TileConfig)), *TIMES)
OPTIONAL = {"dtype", "is_causal", "length", *TIMES}
VALUES = {
    "kernel": KERNELS,
    "coverage": COVERAGES,
    "dtype": ("bfloat16", "float16", "float32"),
    "is_causal": ("True", "False"),
    "length": tuple(map(str, LENGTH_BUCKETS)),
}
"""What a column may have besides a blank. A row with anything else would be ignored without a word."""
Row = dict[str, str]  # the cells of a row, by their columns


# The tables.


def parse(content: bytes, arch: str | None = None) -> list[Row]:
    """Return the rows of a table, defaults.csv or the profile of an architecture; ValueError names the line that is wrong."""
    lines = content.decode("utf-8-sig").splitlines()  # spreadsheets write a mark first
    reader = csv.reader("" if line.startswith("#") else line for line in lines)
    try:
        table = filter(None, reader)
        header = next(table, [])
        if not set(COLUMNS) - OPTIONAL <= set(header) <= set(COLUMNS):
            raise ValueError(f"the columns must be {','.join(COLUMNS)}")
        rows = []
        for cells in table:
            if len(cells) != len(header):
                raise ValueError(f"{len(cells)} cells for {len(header)} columns")
            rows.append(dict.fromkeys(COLUMNS, "") | dict(zip(header, cells, strict=True)))
            _check(rows[-1], arch)
        return rows
    except (ValueError, csv.Error) as error:
        raise ValueError(f"line {reader.line_num}: {error}"[:500]) from None


def _check(row: Row, arch: str | None) -> None:
    """Raise a ValueError if no call meets a row's conditions, or if the configuration is not valid for all that do."""
    for name, values in (VALUES if arch is None else VALUES | {"unit": (architecture_of(arch).unit,)}).items():
        if row[name] and row[name] not in values:
            raise ValueError(f"{name} must be one of {', '.join(values)}, got {row[name]!r}")
    config = config_of(row)
    if arch and (reason := config.why_invalid(arch, row["coverage"] != "no table", row["kernel"] or None)):
        raise ValueError(reason)
    for name in TIMES:
        float(row[name] or 0)


def config_of(row: Row) -> TileConfig:
    """Return the configuration that a row has."""
    return TileConfig(
        *(int(row[name]) for name in ("block_m", "block_n", "num_warps", "num_stages")),
        carry=None if row["carry"] == "none" else row["carry"],
        rotation=row["rotation"],
        max_registers=int(row["max_registers"]) if row["max_registers"] else None,
    )


def row_of(conditions: Mapping[str, str], config: TileConfig, *milliseconds: float) -> Row:
    """Return a row of a profile. milliseconds: TIMES."""
    cells = {name: "" if value is None else str(value) for name, value in asdict(config).items()}
    times = {name: f"{value:.4g}" for name, value in zip(TIMES, milliseconds, strict=False)}
    return dict.fromkeys(COLUMNS, "") | dict(conditions) | cells | {"carry": config.carry or "none"} | times


def load(path: Path, arch: str) -> list[Row]:
    """Return the rows of a profile. If anything is wrong with it, warn and return none; if it does not exist, return none."""
    try:
        return parse(path.read_bytes(), arch)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        warn(f"{path} is ignored: {error}", RuntimeWarning)
    return []


def profile_path(arch: str) -> Path | None:
    """Return the path of an architecture's profile, one for each minor version of Triton; None for a user without a home."""
    folder, version = cache_folder(), ".".join(triton.__version__.split(".")[:2])
    return None if folder is None else folder / f"profile-{arch}-triton-{version}.csv"


@functools.cache
def defaults() -> list[Row]:
    """Return the rows of defaults.csv."""
    return parse(DEFAULTS.read_bytes())


# The choice.


def padded_width(width: int, least: int = 16) -> int:
    """Return the width of a tile that holds so many columns: a power of two, and at least the 16 that matrix units need."""
    return max(least, 1 << (width - 1).bit_length())


def length_bucket(length: int) -> int:
    """Return the smallest of LENGTH_BUCKETS that is not below a length, or the last one."""
    return LENGTH_BUCKETS[bisect.bisect_left(LENGTH_BUCKETS[:-1], length)]


def conditions(
    arch: str,
    dtype: torch.dtype,
    float32_precision: str,
    width: int,
    coverage: str = "no table",
    is_causal: bool = False,
    term_set: str = "none",
    length: int = 0,
) -> Row:
    """Return the conditions that a call meets, without the kernel. float32_precision: torch.get_float32_matmul_precision().
    width: the largest width of query, value and rel_query."""
    precision = input_precision(dtype, arch, float32_precision) if dtype == torch.float32 else "16 bits"
    unit, padded, name = architecture_of(arch).unit, str(padded_width(width, LEAST_WIDTH)), str(dtype).removeprefix("torch.")
    bucket = str(length_bucket(length))
    return dict(zip(CONDITIONS[1:], (precision, unit, padded, term_set, coverage, name, str(is_causal), bucket), strict=True))


def fits(row: Row, call: Sequence[str]) -> bool:
    """Return whether a call, whose CONDITIONS these are, meets the conditions of a row."""
    return all(not row[name] or row[name] == found for name, found in zip(CONDITIONS, call, strict=False))


class Tables:
    """The rows for a GPU, of the user's profile and of defaults.csv, and what has taken the place of configurations that do not
    fit. They never change: there are new ones instead."""

    def __init__(self, arch: str, profile: Sequence[Row], smaller: Mapping[tuple[Any, ...], TileConfig]) -> None:
        self.arch, self.profile, self.smaller = arch, profile, smaller
        self._found: dict[tuple[str, ...], TileConfig] = {}

    def select(self, kernel: str, call: Row, with_profile: bool = True) -> TileConfig:
        """Return the configuration of a kernel for calls that meet these conditions."""
        wanted = (kernel, *call.values()) if with_profile else (kernel, *call.values(), "default")
        if (config := self._found.get(wanted)) is None:
            rows = [*self.profile, *defaults()] if with_profile else defaults()
            config = next(config_of(row) for row in rows if fits(row, wanted))
            while (*wanted[:LENGTH], config) in self.smaller:
                config = self.smaller[*wanted[:LENGTH], config]
            self._found[wanted] = config
        return config


_tables: dict[str, Tables] = {}


def tables(arch: str) -> Tables:
    """Return the tables for an architecture; the user's profile is read once."""
    found = _tables.get(arch)
    if found is None:
        path = profile_path(arch)
        found = _tables[arch] = Tables(arch, [] if path is None else load(path, arch), {})
    return found


def forget() -> None:
    """Forget the profiles that were read: they are read again when they are next needed."""
    _tables.clear()


def take_smaller(kernel: str, arch: str, call: Row, error: Exception) -> None:
    """Let a smaller configuration take the place of the one that calls which meet these conditions have, with a warning; or raise
    the error that it does not fit."""
    before = tables(arch)
    config = before.select(kernel, call)
    smaller = config.smaller()
    if smaller is None:
        raise error
    text = f"{kernel}: {config} does not fit this GPU ({error}); {smaller} is used instead"
    warn(text, RuntimeWarning)
    alike = (kernel, *call.values())[:LENGTH]
    _tables[arch] = Tables(arch, before.profile, {**before.smaller, (*alike, config): smaller})
