"""Which tile a kernel of a call gets: that of the first row that fits the call, of the user's profile and of defaults.csv.

1. ``call.py`` describes the call by its Kind: GPU, dtype, width, what its tables cover, and which terms it has.
2. For each of its kernels ``select`` takes the first row that fits that kind and the call's length: from the user's profile of
   this GPU, which ``python -m triton_relattn tune`` writes, then from defaults.csv. Most defaults were chosen by what the
   compiler reports: spilled registers, shared memory, instructions per score. Three were timed on an H100.
3. Only then is anything compiled. If the driver refuses the launch for lack of shared memory or registers, the next smaller
   configuration takes the place of that one, with a warning, in this call and in all later ones (``until_it_fits``).

A row has the columns of a Kind, of which a blank fits anything, then those of a TileConfig, and in a profile the kernel's times.
Lines that begin with # are comments: where a profile's rows come from. A profile is used whole or not at all.
"""

from __future__ import annotations

import bisect
import csv
import functools
import itertools
import warnings
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from triton.runtime.errors import OutOfResources

from ..._core.cache import cache_folder
from .architectures import architecture_of, input_precision
from .tile_config import KERNELS, TileConfig

DEFAULTS = Path(__file__).parent / "defaults.csv"
COVERAGES = ("no table", "full", "clamp", "zero")  # the pairs that a table has rows for; see AttentionSpec.coverage
LENGTH_BUCKETS = (512, 2048, 8192, 32768)
LEAST_WIDTH = 64  # narrower heads have the configurations of this width


class Kind(NamedTuple):
    """What the choice depends on, as text: every column of a call, or the conditions of a row, where a blank fits any call.

    term_set: "grid" on a grid; else the first of these that the call has: "rel_value", "rel_p2c", "narrow rel_query" (narrower
    than the query), "rel_query", "rel_key and rel_bias", "rel_bias", "none".
    """

    kernel: str = ""  # one of KERNELS
    precision: str = ""  # of products: "16 bits", "ieee" or "tf32"
    unit: str = ""  # the GPU's matrix unit; see Architecture
    width: str = ""  # the largest of query, value and rel_query, padded: 64, 128 or 256
    term_set: str = ""
    coverage: str = ""  # one of COVERAGES
    dtype: str = ""  # kernels for bfloat16 and float16 round differently
    is_causal: str = ""
    length: str = ""  # of the longest sequence, one of LENGTH_BUCKETS; the last one also stands for everything longer


class Row(NamedTuple):
    """A row of a table. milliseconds: of the kernel in this configuration, and in the default one."""

    kind: Kind
    config: TileConfig
    milliseconds: float | None = None
    default_milliseconds: float | None = None

    def fits(self, call: Kind) -> bool:
        """Return whether a call meets the row's conditions."""
        return all(not wanted or wanted == found for wanted, found in zip(self.kind, call, strict=True))

    def cells(self) -> list[str]:
        """Return the text of the columns, as _row reads it."""
        config = asdict(self.config) | {"carry": self.config.carry or "none"}
        values = (*self.kind, *config.values(), self.milliseconds, self.default_milliseconds)
        return ["" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]


TIMES = ("milliseconds", "default_milliseconds")
COLUMNS = (*Kind._fields, *(field.name for field in fields(TileConfig)), *TIMES)
OPTIONAL = {"dtype", "is_causal", "length", *TIMES}
VALUES = {
    "kernel": KERNELS,
    "coverage": COVERAGES,
    "dtype": ("bfloat16", "float16", "float32"),
    "is_causal": ("True", "False"),
    "length": tuple(map(str, LENGTH_BUCKETS)),
}
"""What a column may have besides a blank. A row with anything else would be ignored without a word."""


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
            rows.append(_row(dict.fromkeys(COLUMNS, "") | dict(zip(header, cells, strict=True)), arch))
        return rows
    except (ValueError, csv.Error) as error:
        raise ValueError(f"line {reader.line_num}: {error}"[:500]) from None


def _row(cells: dict[str, str], arch: str | None) -> Row:
    """Return a row; ValueError if no call is of its kind, or if the configuration is not valid for all that are."""
    for name, values in (VALUES if arch is None else VALUES | {"unit": (architecture_of(arch).unit,)}).items():
        if cells[name] and cells[name] not in values:
            raise ValueError(f"{name} must be one of {', '.join(values)}, got {cells[name]!r}")
    kind = Kind(*(cells[name] for name in Kind._fields))
    config = TileConfig(
        *(int(cells[name]) for name in ("block_m", "block_n", "num_warps", "num_stages")),
        carry=None if cells["carry"] == "none" else cells["carry"],
        rotation=cells["rotation"],
        max_registers=int(cells["max_registers"]) if cells["max_registers"] else None,
    )
    if arch and (reason := config.why_invalid(arch, kind.coverage != "no table", kind.kernel or None)):
        raise ValueError(reason)
    return Row(kind, config, *(float(cells[name]) if cells[name] else None for name in TIMES))


def load(path: Path, arch: str) -> list[Row]:
    """Return the rows of a profile. If anything is wrong with it, warn and return none; if it does not exist, return none."""
    try:
        return parse(path.read_bytes(), arch)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} is ignored: {error}", RuntimeWarning, stacklevel=2)
    return []


def profile_path(arch: str) -> Path | None:
    """Return the path of an architecture's profile, one for each minor version of Triton; None for a user without a home."""
    folder, version = cache_folder(), ".".join(triton.__version__.split(".")[:2])
    return None if folder is None else folder / f"profile-{arch}-triton-{version}.csv"


@functools.cache
def profile(arch: str) -> list[Row]:
    """Return the rows of the user's profile."""
    path = profile_path(arch)
    return [] if path is None else load(path, arch)


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


def call_kind(
    arch: str, dtype: torch.dtype, width: int, coverage: str = "no table", is_causal: bool = False, term_set: str = "none"
) -> Kind:
    """Return the kind of a call, without kernel and length. width: the largest width of query, value and rel_query."""
    precision = input_precision(dtype, arch) if dtype == torch.float32 else "16 bits"
    unit, padded, name = architecture_of(arch).unit, str(padded_width(width, LEAST_WIDTH)), str(dtype).removeprefix("torch.")
    return Kind("", precision, unit, padded, term_set, coverage, name, str(is_causal))


def select(kernel: str, arch: str, kind: Kind, length: int | None = None) -> TileConfig:
    """Return the configuration of a kernel for calls of a kind. length: of the longest sequence; None: leave out the profile."""
    kind = kind._replace(kernel=kernel)
    config = _first(arch, kind, "" if length is None else str(length_bucket(length)))
    while _smaller and (arch, kind, config) in _smaller:  # hashing takes longer than asking whether there are any
        config = _smaller[arch, kind, config]
    return config


@functools.cache
def _first(arch: str, kind: Kind, length: str) -> TileConfig:
    rows, call = itertools.chain(profile(arch) if length else (), defaults()), kind._replace(length=length)
    return next(row.config for row in rows if row.fits(call))


def forget() -> None:
    """Forget the profiles that were read: they are read again when they are next needed."""
    profile.cache_clear()
    _first.cache_clear()


# What to do if a choice does not fit the GPU.

Launcher = TypeVar("Launcher", bound=Callable[..., Any])
_smaller: dict[tuple[str, Kind, TileConfig], TileConfig] = {}
"""By architecture, kind and what was selected: what has taken its place."""


class DoesNotFit(Exception):
    """A launch failed, and later calls of its kind have a smaller configuration: to be launched again, from the beginning."""


def take_smaller(kernel: str, arch: str, kind: Kind, config: TileConfig, error: OutOfResources) -> None:
    """Let a smaller configuration take the place of one that does not fit, with a warning, and raise DoesNotFit; else error."""
    smaller = config.smaller()
    if smaller is None:
        raise error
    text = f"{kernel}: {config} does not fit this GPU ({error}); {smaller} is used instead"
    warnings.warn(text, RuntimeWarning, stacklevel=5)
    _smaller[arch, kind._replace(kernel=kernel), config] = smaller
    raise DoesNotFit from None


def until_it_fits(launcher: Launcher) -> Launcher:
    """Wrap a launcher, which starts again whenever a configuration did not fit: sizes of results may depend on it."""

    @functools.wraps(launcher)
    def run(*arguments: Any, **options: Any) -> Any:
        while True:
            try:
                return launcher(*arguments, **options)
            except DoesNotFit:
                continue

    return run  # type: ignore[return-value]
