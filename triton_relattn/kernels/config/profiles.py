"""Tables of launch configurations: defaults.csv, and profiles, whose configurations were timed on a GPU of one architecture.

A row has what a call must be (Conditions), the configuration that such a call gets, and in a profile the times. The first row
that fits a call is used; a blank stands for anything. Lines that begin with # are comments: where a profile's rows come from.
A file is used whole or not at all.
"""

from __future__ import annotations

import bisect
import csv
import io
import os
import warnings
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import NamedTuple

import triton

from ..._core.cache import cache_folder
from .architectures import architecture_of
from .tile_config import COVERAGES, KERNELS, TileConfig

LENGTH_BUCKETS = (512, 2048, 8192, 32768)


class Conditions(NamedTuple):
    """Columns that a call must agree with, as text; selection.conditions makes a call's. The last three are of profiles."""

    kernel: str = ""
    precision: str = ""  # of products: "16 bits", "ieee" or "tf32"
    unit: str = ""  # see Architecture
    width: str = ""  # of the tile: 64, 128 or 256
    term_set: str = ""
    coverage: str = ""
    dtype: str = ""  # kernels for bfloat16 and float16 round differently
    is_causal: str = ""
    length: str = ""  # one of LENGTH_BUCKETS

    def fit(self, call: Conditions) -> bool:
        """Return whether a call meets these conditions."""
        for wanted, found in zip(self, call, strict=True):
            if wanted and wanted != found:
                return False
        return True


class Row(NamedTuple):
    """A row of a table. milliseconds: of the kernel in this configuration, and in the default one."""

    conditions: Conditions
    config: TileConfig
    milliseconds: float | None = None
    default_milliseconds: float | None = None

    def cells(self) -> list[str]:
        """Return the text of the columns, as _row reads it."""
        config = asdict(self.config) | {"carry": self.config.carry or "none"}
        values = (*self.conditions, *config.values(), self.milliseconds, self.default_milliseconds)
        return ["" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]


CONDITIONS, TIMES = Conditions._fields, Row._fields[2:]
COLUMNS = (*CONDITIONS, *(field.name for field in fields(TileConfig)), *TIMES)
REQUIRED = set(COLUMNS) - {"dtype", "is_causal", "length", *TIMES}
VALUES = {
    "kernel": KERNELS,
    "coverage": COVERAGES,
    "dtype": ("bfloat16", "float16", "float32"),
    "is_causal": ("True", "False"),
    "length": tuple(map(str, LENGTH_BUCKETS)),
}
"""What a column may have besides a blank. A row with anything else would be ignored without a word."""


def length_bucket(length: int) -> int:
    """Return the smallest of LENGTH_BUCKETS that is not below a length; the last one also stands for everything longer."""
    return LENGTH_BUCKETS[bisect.bisect_left(LENGTH_BUCKETS[:-1], length)]


def user_profile_path(arch: str) -> Path | None:
    """Return the path of the user's profile of an architecture; None for a user without a home.

    Times depend on the version of Triton, so each minor version has a profile of its own.
    """
    folder, version = cache_folder(), ".".join(triton.__version__.split(".")[:2])
    return None if folder is None else folder / f"profile-{arch}-triton-{version}.csv"


def _row(cells: dict[str, str], arch: str | None) -> Row:
    """Return a row; ValueError if no call has its conditions, or if the configuration is not valid for all that have them."""
    conditions = Conditions(*(cells.get(name, "") for name in CONDITIONS))
    for name, values in (VALUES if arch is None else VALUES | {"unit": (architecture_of(arch).unit,)}).items():
        if cells.get(name) and cells[name] not in values:
            raise ValueError(f"{name} must be one of {', '.join(values)}, got {cells[name]!r}")
    sizes = (int(cells[name]) for name in ("block_m", "block_n", "num_warps", "num_stages"))
    limit = int(cells["max_registers"]) if cells["max_registers"] else None
    config = TileConfig(*sizes, None if cells["carry"] == "none" else cells["carry"], cells["rotation"], limit)
    reason = arch and config.why_invalid(arch, conditions.coverage != "no table", conditions.kernel or None)
    if reason:
        raise ValueError(reason)
    return Row(conditions, config, *(float(cells[name]) if cells.get(name) else None for name in TIMES))


def parse(content: bytes, arch: str | None = None) -> list[Row]:
    """Return the rows of a table; ValueError says in which line something is wrong with it.

    arch: the architecture of a profile. None: defaults.csv, whose rows are for several.
    """
    lines = content.decode("utf-8-sig").splitlines()  # spreadsheets write a mark first
    reader = csv.reader("" if line.startswith("#") else line for line in lines)
    try:
        table = filter(None, reader)
        header = next(table, [])
        if not REQUIRED <= set(header) <= set(COLUMNS):
            raise ValueError(f"the columns must be {','.join(COLUMNS)}")
        rows = []
        for cells in table:
            if len(cells) != len(header):
                raise ValueError(f"{len(cells)} cells for {len(header)} columns")
            rows.append(_row(dict(zip(header, cells, strict=True)), arch))
        return rows
    except (ValueError, csv.Error) as error:
        raise ValueError(f"line {reader.line_num}: {error}"[:500]) from None


def load(path: Path, arch: str) -> list[Row]:
    """Return the rows of a profile. If anything is wrong with it, warn and return none; if it does not exist, return none."""
    try:
        return parse(path.read_bytes(), arch)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        warnings.warn(f"{path} is ignored: {error}", RuntimeWarning, stacklevel=2)
    return []


def save(path: Path, arch: str, rows: Iterable[Row], **provenance: str | None) -> None:
    """Add rows to a profile, above those that it has, in place of those with the same conditions.

    The file is replaced in one step: a process that reads it meanwhile gets the old content or the new. selection.select has
    the rows after selection.forget.

    Args:
        provenance: where these rows come from: device, torch, triton, package, commit, date. It takes the place of all comments.

    Raises:
        OSError: the folder cannot be made or written.
        ValueError: a row is one that load would not take; nothing is written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    merged: dict[Conditions, Row] = {}
    for row in (*rows, *load(path, arch)):
        merged.setdefault(row.conditions, row)
    text = io.StringIO()
    if provenance:
        text.write(f"# {', '.join(f'{name}: {value}' for name, value in provenance.items())}\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(row.cells() for row in merged.values())
    content = text.getvalue().encode()
    parse(content, arch)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
