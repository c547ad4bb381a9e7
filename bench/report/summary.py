"""Tables for the terminal and for pages, from rows of speed or memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..cases.methods import METHODS, OURS
from .rows import number, pivot
from .text import digits, markdown_table, short_bytes, short_time
from .text import table as text_table

Row = dict[str, Any]
DIRECTIONS = ("forward", "forward+backward")
NO_REMARK = ("ok", "does not apply", "not tried")
SIZES = ("batch", "heads", "seqlen", "head_dim")
DENSE = ("shaw_gather", "gather", "skewing", "dense_bias")

FITTED = 8
"""The factor between the longest and the shortest length that a law is fitted to: over less, constant parts bend it."""


def exponent(points: Sequence[tuple[int, float]]) -> float | None:
    """Return the p of value ~ length^p, by least squares of the logarithms over the longer half of the points, or more of them
    if that is needed for a factor of FITTED between its lengths. None if all span less."""
    half = sorted(points)[-max(2, math.ceil(len(points) / 2)) :]
    longest = [point for point in points if point in half or FITTED * point[0] >= half[-1][0]]
    logs = [(math.log(length), math.log(value)) for length, value in longest if value > 0]
    if not logs or max(logs)[0] - min(logs)[0] < math.log(FITTED) - 1e-9:
        return None
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)


def describe_table(row: Row) -> str:
    """A call's tables in words: full table, 129 rows, a bias of 33 rows, two full tables."""
    words = row["table"].removeprefix("clamp ").removeprefix("zero ").split()
    size = "" if words[0] == "full" else f"{words[0]} rows"
    if words[-1] in ("none", "alibi"):
        return "no table" if words[-1] == "none" else "ALiBi"
    if words[-1] == "bias":
        return f"a bias of {size}" if size else "a bias"
    if words[-1] == "p2c":
        return f"two tables of {int(words[0]):,} rows" if size else "two full tables"
    return size or "full table"


def points(rows: Sequence[Row], method: str, direction: str, column: str) -> list[tuple[int, float]]:
    """Length and value of what was measured, shortest first; without peaks so small that they drown in other memory."""
    measured = (row for row in rows if (row["method"], row["direction"]) == (method, direction) and row[column])
    values = ((int(row["seqlen"]), number(row, column)) for row in measured)
    return sorted((length, number) for length, number in values if number > 0)


def across_methods(rows: Sequence[Row], direction: str, column: str, show: Callable[[float, float | None], str]) -> str:
    """Cases down, methods across. ``show`` makes a cell of a value and of ours."""
    rows = [row for row in rows if row["direction"] == direction]
    values = pivot(rows, ["case"], column)
    methods = [name for name in METHODS if any(name in by_method for by_method in values.values())]
    body = []
    for case in dict.fromkeys(row["case"] for row in rows):
        by_method = values.get((case,), {})
        shown = (show(by_method[name], by_method.get(OURS)) if name in by_method else "-" for name in methods)
        body.append((case, *shown))
    if column == "peak_bytes":
        powers = [exponent(points(rows, name, direction, column)) for name in methods]
        if any(power is not None for power in powers):
            body.append(("grows with", *("-" if power is None else f"n^{power:.2f}" for power in powers)))
    return text_table((direction, *methods), body)


def remarks(rows: Sequence[Row]) -> str:
    """A line for all that failed, without what was not tried."""
    lines = (f"{row['method']}, {row['direction']}, {row['case']}: {row['status']}" for row in rows)
    wanted = [line for line, row in zip(lines, rows, strict=True) if not row["status"].startswith(NO_REMARK)]
    return "".join(f"  {line}\n" for line in dict.fromkeys(wanted))


def markdown(rows: Sequence[Row]) -> str:
    """Time and memory of one kind of case, a table per direction: lengths down, methods across."""
    parts = []
    for column, unit, scale in (("p50_ms", "ms", 1.0), ("peak_bytes", "MiB", 2**20)):
        for direction in DIRECTIONS:
            found = {method: dict(values) for method in METHODS if (values := points(rows, method, direction, column))}
            body = [
                [f"{n:,}", *(digits(values[n] / scale) if n in values else "-" for values in found.values())]
                for n in sorted(set[int]().union(*found.values()))
            ]
            if body:
                parts.append(markdown_table([f"{direction}, {unit}", *found], body))
    return "\n\n".join(parts) + "\n"


def show_time(milliseconds: float, ours: float | None) -> str:
    return short_time(milliseconds) + (f" ({milliseconds / ours:.2g}x)" if ours else "")


def show_bytes(count: float, _ours: float | None) -> str:
    return short_bytes(count)


def of_verb(verb: str, rows: Sequence[Row]) -> str:
    """What the verb prints: of speed medians and their ratio to ours, of memory peaks and how they grow."""
    column, show, note = {
        "speed": ("p50_ms", show_time, "Medians; in brackets, time over ours: above 1x ours is faster."),
        "memory": ("peak_bytes", show_bytes, "Peak above the inputs; last lines: fitted to the longer half of the lengths."),
    }[verb]
    tables = [across_methods(rows, direction, column, show) for direction in dict.fromkeys(row["direction"] for row in rows)]
    return "\n\n".join([*tables, f"{note}\n{remarks(rows)}"])


def new_lengths(rows: Sequence[Row]) -> str:
    """Time and memory of lengths that are new to a process, as Markdown."""
    body = []
    for row in (row for row in rows if row["status"] == "ok"):
        times = (short_time(float(row[name])) for name in ("first_ms", "again_ms"))
        body.append((row["method"], str(row["lengths"]), *times, short_bytes(max(0.0, float(row["kept_bytes"])))))
    head = ("method", "lengths", "each once", "again", "memory kept")
    return markdown_table(head, body, "---") + "\n"


def beside_dense(rows: Sequence[Row]) -> str:
    """Ours, beside SDPA without a term and the fastest dense method, as Markdown, a table per direction; ratios are to ours."""
    parts = []
    times = pivot((row for row in rows if row["status"] == "ok"), ["direction", "group", *SIZES, "case"], "p50_ms")
    for direction in (name for name in DIRECTIONS if any(row["direction"] == name for row in rows)):
        body = []
        for by_method, size in ((found, key[2:-1]) for key, found in times.items() if key[0] == direction):
            ours, dense = by_method[OURS], min((name for name in DENSE if name in by_method), key=by_method.__getitem__)
            fastest = (f"{digits(by_method[dense])} ({dense})", f"{by_method[dense] / ours:.2f}")
            body.append([", ".join(size), digits(ours), f"{by_method['sdpa'] / ours:.2f}", *fastest])
        head = [f"{direction}: batch, heads, length, width", "ours, ms", "SDPA's", "fastest dense, ms", "ratio"]
        parts.append(markdown_table(head, body))
    return "\n\n".join(parts) + "\n"
