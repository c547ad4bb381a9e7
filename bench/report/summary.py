"""Tables for the terminal, from rows of speed or memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import geometric_mean
from typing import Any

from ..cases.methods import METHODS, OURS
from .text import short_bytes, short_time
from .text import table as text_table

Row = dict[str, Any]
DIRECTIONS = ("forward", "forward+backward")
NO_REMARK = ("ok", "does not apply", "not tried")


FITTED = 8
"""The factor between the longest and the shortest length that a law is fitted to: over less, constant parts bend it."""


def exponent(points: Sequence[tuple[int, float]]) -> float | None:
    """Return the p of value ~ length^p, by least squares of the logarithms over the longer half of the points, or more of them
    if that is needed for a factor of FITTED between its lengths. None if all span less."""
    half = sorted(points)[-max(2, math.ceil(len(points) / 2)) :]
    longest = [each for each in points if each in half or FITTED * each[0] >= half[-1][0]]
    logs = [(math.log(length), math.log(value)) for length, value in longest if value > 0]
    if not logs or max(logs)[0] - min(logs)[0] < math.log(FITTED) - 1e-9:
        return None
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)


def points(rows: Sequence[Row], method: str, direction: str, column: str) -> list[tuple[int, float]]:
    """Length and value of what was measured, shortest first; without peaks so small that they drown in other memory."""
    of_method = (row for row in rows if (row["method"], row["direction"]) == (method, direction) and row[column])
    values = ((int(row["seqlen"]), float(row[column])) for row in of_method)
    return sorted((length, value) for length, value in values if value > 0)


def across_methods(rows: Sequence[Row], direction: str, column: str, show: Callable[[float, float | None], str]) -> str:
    """Cases down, methods across. ``show`` makes a cell of a value and of ours."""
    rows = [row for row in rows if row["direction"] == direction]
    values = {(row["case"], row["method"]): float(row[column]) for row in rows if row[column]}
    methods = [name for name in METHODS if any(name == method for _, method in values)]
    body = []
    for case in dict.fromkeys(row["case"] for row in rows):
        ours = values.get((case, OURS))
        body.append((case, *(show(values[case, name], ours) if (case, name) in values else "-" for name in methods)))
    if column == "peak_bytes":
        powers = [exponent(points(rows, name, direction, column)) for name in methods]
        body.append(("grows with", *("-" if power is None else f"n^{power:.2f}" for power in powers)))
    return text_table((direction, *methods), body)


def remarks(rows: Sequence[Row]) -> str:
    """A line for everything that could not be measured, except what was not even tried."""
    lines = (f"{row['method']}, {row['direction']}, {row['case']}: {row['status']}" for row in rows)
    wanted = [line for line, row in zip(lines, rows, strict=True) if not row["status"].startswith(NO_REMARK)]
    return "".join(f"  {line}\n" for line in dict.fromkeys(wanted))


def markdown(rows: Sequence[Row]) -> str:
    """Time and memory of one kind of case, lengths down and methods across, a table for each direction."""
    methods = [name for name in METHODS if any(row["method"] == name and (row["p50_ms"] or row["peak_bytes"]) for row in rows)]
    shown = {"p50_ms": short_time, "peak_bytes": short_bytes}
    parts = []
    for direction in DIRECTIONS:
        cells: dict[tuple[int, str], list[str]] = {}
        for column, show in shown.items():
            for method in methods:
                for length, value in points(rows, method, direction, column):
                    cells.setdefault((length, method), []).append(show(value))
        lines = [[direction, *methods], ["---"] * (len(methods) + 1)]
        for length in sorted({length for length, _ in cells}):
            lines.append([str(length), *("<br>".join(cells.get((length, method), ["-"])) for method in methods)])
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts) + "\n"


def models(rows: Sequence[Row]) -> str:
    """Single sequences and batches of models, a table for each that there is, as Markdown."""
    single = [row for row in rows if is_single(row)]
    batches = [row for row in rows if row["batch"] and not is_single(row)]
    return "\n".join([longest(single)] * bool(single) + [ratios(batches)] * bool(batches))


def is_single(row: Row) -> bool:
    """Whether a row of models is of one sequence."""
    return str(row["batch"]) == "1"


def longest(rows: Sequence[Row], direction: str = "forward+backward") -> str:
    """Time and memory of every model at its longest length, a line for each, as Markdown."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines = [["model", "length", *methods], ["---"] * (len(methods) + 2)]
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = [row for row in rows if row["case"] == case and row["direction"] == direction]
        length = max((int(row["seqlen"]) for row in of_case if row["method"] == OURS), default=0)
        cells = []
        for method in methods:
            row = next((row for row in of_case if (row["method"], int(row["seqlen"])) == (method, length)), None)
            ok = row is not None and row["status"] == "ok"
            memory = f"<br>{short_bytes(float(row['peak_bytes']))}" if row and row.get("peak_bytes") else ""
            cells.append(f"{short_time(float(row['p50_ms']))}{memory}" if row and ok else "-")
        lines.append([case, str(length), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def ratios(rows: Sequence[Row]) -> str:
    """How many times as long as ours a stock model takes, a line for each model, and their geometric mean, as Markdown."""
    sizes = list(dict.fromkeys((str(row["seqlen"]), str(row["batch"])) for row in rows))
    columns = [(direction, *size) for direction in DIRECTIONS for size in sizes]
    times = {of_column(row, row["case"], row["method"]): float(row["p50_ms"]) for row in rows if row["p50_ms"]}
    heads = [f"{direction}<br>{length} x {batch}" for direction, length, batch in columns]
    lines = [["model", "stock", *heads], ["---"] * (2 + len(columns))]
    every: list[list[float]] = [[] for _ in columns]
    for case, method in dict.fromkeys((row["case"], row["method"]) for row in rows if row["method"] != OURS):
        cells = []
        for column, found in zip(columns, every, strict=True):
            stock, ours = (times.get((*column, case, name)) for name in (method, OURS))
            cells.append(f"{stock / ours:.2f}" if stock and ours else "-")
            found += [stock / ours] if stock and ours else []
        if cells != ["-"] * len(columns):
            lines.append([case, method, *cells])
    means = [f"{geometric_mean(each):.2f}" if each else "-" for each in every]
    lines.append(["geometric mean", "", *means])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n\nTime of the stock model over ours, medians.\n"


def of_column(row: Row, *others: str) -> tuple[str, ...]:
    """Direction, length and batch of a row of models, and others."""
    return row["direction"], str(row["seqlen"]), str(row["batch"]), *others


def show_time(milliseconds: float, ours: float | None) -> str:
    return short_time(milliseconds) + (f" ({milliseconds / ours:.2g})" if ours else "")


def show_bytes(count: float, _ours: float | None) -> str:
    return short_bytes(count)


def directions_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["direction"] for row in rows))


def speed(rows: Sequence[Row]) -> str:
    """Medians and how many times ours."""
    tables = [across_methods(rows, direction, "p50_ms", show_time) for direction in directions_of(rows)]
    return "\n\n".join([*tables, "Medians; in brackets, how many times ours.\n" + remarks(rows)])


DENSE = ("shaw_gather", "gather", "skewing", "dense_bias")


def beside_dense(rows: Sequence[Row]) -> str:
    """Ours, beside SDPA without a term, and the fastest dense method, a line for each case, as Markdown; ratios are to ours."""
    of_direction = ["ours", "SDPA's", "fastest dense", "ratio"]
    directions = [each for each in ("forward", "forward+backward") if any(row["direction"] == each for row in rows)]
    lines = [["batch, heads, length, width", *(f"{direction}: {name}" for direction in directions for name in of_direction)]]
    lines.append(["---"] * len(lines[0]))
    for case in dict.fromkeys((row["group"], row["case"]) for row in rows):
        of_case = [row for row in rows if (row["group"], row["case"]) == case and row["status"] == "ok"]
        cells = [", ".join(str(of_case[0][name]) for name in ("batch", "heads", "seqlen", "head_dim"))]
        for direction in directions:
            times = {str(row["method"]): float(row["p50_ms"]) for row in of_case if row["direction"] == direction}
            ours, dense = times[OURS], min((name for name in DENSE if name in times), key=times.__getitem__)
            cells += [short_time(ours), f"{times['sdpa'] / ours:.2f}", f"{short_time(times[dense])} ({dense})"]
            cells.append(f"{times[dense] / ours:.2f}")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def memory(rows: Sequence[Row]) -> str:
    """Peaks and how they grow."""
    tables = [across_methods(rows, direction, "peak_bytes", show_bytes) for direction in directions_of(rows)]
    note = "Peak above the inputs; the last line of each: fitted to the longer half of the lengths.\n"
    return "\n\n".join([*tables, note + remarks(rows)])
