"""Tables for the terminal and the CSV file, from rows alone."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from . import agreement, sweep
from .methods import METHODS


def table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be, the first one to the left, the others to the right."""
    widths = [max(len(line[column]) for line in (header, *body)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = (
            f"{cell:<{width}}" if column == 0 else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(("", first, *others)).rstrip()

    return "\n".join((line(header), line(["-" * width for width in widths]), *map(line, body)))


def agreement_table(rows: Sequence[agreement.Row]) -> str:
    """One line per tensor: how large it is, how far off, and what is allowed."""
    body = [
        (
            row.name,
            f"{row.size:.2e}",
            f"{row.reference_error:.1e}",
            f"{row.error:.1e}",
            f"{row.allowed:.1e}",
            "ok" if row.problem is None else "FAILED",
        )
        for row in rows
    ]
    return table(("", "largest value", "reference's error", "error", "allowed", ""), body)


def short_bytes(count: float) -> str:
    """Three digits and MiB or GiB."""
    mebibytes = count / 2**20
    return f"{mebibytes / 1024:.3g} GiB" if mebibytes >= 1000 else f"{mebibytes:.3g} MiB"


def short_time(milliseconds: float) -> str:
    """Three digits and ms or s."""
    return f"{milliseconds / 1e3:.3g} s" if milliseconds >= 1000 else f"{milliseconds:.3g} ms"


def measured(rows: Sequence[sweep.Row], method: str, column: str) -> list[tuple[int, float]]:
    """Length and value of the points of a method that were measured, shortest first; column is a field of Row."""
    points = ((row.length, getattr(row, column)) for row in rows if row.method == method)
    return [(length, value) for length, value in points if value is not None and value > 0]


def exponent(points: Sequence[tuple[int, float]]) -> float | None:
    """The p of value ~ length^p between the two longest lengths; None for fewer than two points."""
    if len(points) < 2:
        return None
    (n0, v0), (n1, v1) = points[-2:]
    return math.log(v1 / v0) / math.log(n1 / n0)


def summary(rows: Sequence[sweep.Row]) -> str:
    """Peak memory and time, lengths down and methods across, the exponents of memory, and what is missing and why."""
    methods = [method for method in METHODS if any(row.method == method for row in rows)]
    lengths = sorted({row.length for row in rows})
    parts = []
    for title, column, show in (("peak memory", "peak_bytes", short_bytes), ("time", "milliseconds", short_time)):
        values = {method: dict(measured(rows, method, column)) for method in methods}
        body = [
            (str(length), *(show(values[method][length]) if length in values[method] else "-" for method in methods))
            for length in lengths
        ]
        powers = [exponent(measured(rows, method, column)) for method in methods]
        body.append(("grows with", *("-" if power is None else f"n^{power:.2f}" for power in powers)))
        parts.append(table((title, *methods), body))
    parts.append("  The last lines: exponent of the length n between a method's two longest lengths.")
    parts += [f"  {row.method} at {row.length}: {row.status}" for row in rows if row.status != "ok"]
    return "\n\n".join(parts[:3]) + "\n" + "\n".join(parts[3:])


def write_csv(rows: Sequence[sweep.Row], path: Path) -> None:
    """One line per row, one column per field; what was not measured is empty."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(sweep.Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
