"""Rows of results: the columns that all of them have, and the files that they go to as they are measured."""

from __future__ import annotations

import csv
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from triton_relattn import __version__

ROOT = Path(__file__).parents[2]
STAMP = ("commit", "date", "device", "threads", "torch", "triton", "package")
"""Columns of every row, its last ones: where it comes from."""


def command_output(*command: str) -> str:
    """Return what a command prints, nothing if it cannot run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20, cwd=ROOT).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def commit() -> str:
    """Return the commit of the code that is measured, with a "+" if files differ from it; RELATTN_COMMIT says it of a copy."""
    found = command_output("git", "rev-parse", "--short=12", "HEAD") + "+" * bool(command_output("git", "status", "--porcelain"))
    return found or os.environ.get("RELATTN_COMMIT", "")


def device_name(device: str) -> str:
    """Return the name of the device "cuda" or "cpu"."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    models = [line.split(":")[1].strip() for line in command_output("cat", "/proc/cpuinfo").splitlines() if "model name" in line]
    return f"CPU, {(models or [platform.processor() or platform.machine()])[0]}"


def stamp(device: str) -> dict[str, str]:
    """The columns of STAMP, for "cuda", "cpu", or a device that is not there, by its name."""
    triton = next(iter(importlib.metadata.distributions(name="triton")), None)
    return {
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name(device) if device in ("cuda", "cpu") else device,
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "triton": "" if triton is None else triton.version,
        "package": __version__,
    }


class Table:
    """Rows with the same columns, kept and appended to a CSV file as they come, so that an interrupted run has them."""

    def __init__(self, columns: Sequence[str], stamp: dict[str, str], csv_path: Path | None = None, append: bool = False) -> None:
        """append: what the CSV file has already stays."""
        self.columns, self.rows = [*columns, *STAMP], list[dict[str, Any]]()
        self.stamp, self.csv_path = stamp, csv_path
        if csv_path is not None:
            csv_path.parent.mkdir(parents=True, exist_ok=True)
            if not append:
                csv_path.unlink(missing_ok=True)

    def add(self, row: dict[str, Any]) -> None:
        """Floats get four digits. Raises ValueError for a column that there is not."""
        shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()}
        row = {**dict.fromkeys(self.columns), **shown, **self.stamp}
        self.rows.append(row)
        if self.csv_path is not None:
            with self.csv_path.open("a", newline="") as file:
                writer = csv.DictWriter(file, self.columns)
                if file.tell() == 0:
                    writer.writeheader()
                writer.writerow(row)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


STALLED = 1.1
"""A median over the 20th percentile that is larger means that the host stalled the GPU in most rounds."""


def is_stalled(row: Mapping[str, Any]) -> bool:
    """Return whether a median is the host's: queueing takes longer than its head start, and a fifth of the rounds is faster."""
    has_both = row.get("waits_for_host") == "yes" and row.get("p20_ms") and row["p50_ms"]
    return bool(has_both) and float(row["p50_ms"]) / float(row["p20_ms"]) > STALLED


def number(row: Mapping[str, Any], column: str) -> float:
    """Return a number of a row. The time of a call (p50_ms) is the median, or the 20th percentile of the rounds where the host
    stalled the GPU in most of them."""
    return float(row["p20_ms" if column == "p50_ms" and is_stalled(row) else column])


def pivot(rows: Iterable[Mapping[str, Any]], names: Sequence[str], column: str) -> dict[tuple[str, ...], dict[str, float]]:
    """By the values of the named columns, the numbers of a column by method."""
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for row in rows:
        if row[column]:
            found.setdefault(tuple(str(row[name]) for name in names), {})[row["method"]] = number(row, column)
    return found


def in_one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
