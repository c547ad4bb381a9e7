"""Time and memory of lengths that a process has never met: some libraries prepare a product of new sizes, and keep that.

In a process of its own each method computes sequences of COUNT different lengths, each once, forward and backward, and then
all of them again.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

from triton_relattn._peaks import resident

from ..cases.attention import Case
from ..cases.methods import METHODS, OF_OURS
from ..measure import point, timing
from ..report.progress import progress
from ..report.rows import Table, stamp
from ..report.text import short_bytes, short_time
from .options import add_files, add_list, positive

METHODS_HERE = (*OF_OURS, "sdpa", "dense_bias")
COLUMNS = ("verb", "case", "method", "status", "lengths", "first_ms", "again_ms", "kept_bytes")
"""first_ms, again_ms: of all lengths. kept_bytes: by how much the process has grown after the first time."""
SHORTEST, LONGEST, COUNT = 150, 900, 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_list(parser, "methods", METHODS_HERE, METHODS_HERE)
    parser.add_argument("--count", type=positive, default=COUNT, help=f"lengths, from {SHORTEST} to {LONGEST} (%(default)s)")
    add_files(parser)


def case_of(length: int) -> Case:
    return Case(1, 4, length, 64, dtype="fp32")


def lengths(count: int) -> list[int]:
    """Lengths, no two the same as long as there are so many, in an order of no meaning."""
    every = list(range(SHORTEST, LONGEST + 1))
    random.Random(0).shuffle(every)
    return [every[number % len(every)] for number in range(count)]


def measure(method: str, count: int) -> dict[str, Any]:
    """The columns of a row."""
    function, has_table = METHODS[method].make, METHODS[method].has_table

    def milliseconds(chosen: list[int]) -> float:
        spent = 0.0
        for length in chosen:
            case = case_of(length)
            step = timing.steps(function(case), *case.inputs("cpu"), has_table)["forward+backward"]
            started = time.perf_counter()
            step.run()
            spent += time.perf_counter() - started
        return 1e3 * spent

    milliseconds([LONGEST + 1] * 3)
    before, chosen = resident(), lengths(count)
    first = milliseconds(chosen)
    kept = resident() - before
    return {"status": "ok", "first_ms": first, "again_ms": milliseconds(chosen), "kept_bytes": kept}


def run(options: argparse.Namespace) -> int:
    rows = Table(COLUMNS, stamp("cpu"), options.csv, options.json)
    for method in progress(options.methods, str):
        found = point.in_own_process(measure, (method, options.count), None)
        row = {
            "verb": "lengths",
            "case": f"b1 h4 n{SHORTEST}-{LONGEST} d64 full fp32",
            "method": method,
            "lengths": options.count,
        }
        rows.add(row | found)
    print(markdown(rows.rows))
    return 1 if any(row["status"] != "ok" for row in rows.rows) else 0


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table of the rows."""
    head = ("method", "lengths", "each once", "again", "memory kept")
    cells = [
        (row["method"], str(row["lengths"]), short_time(float(row["first_ms"])), short_time(float(row["again_ms"])), kept(row))
        for row in rows
        if row["status"] == "ok"
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ("---",) * len(head), *cells)) + "\n"


def kept(row: dict[str, Any]) -> str:
    return short_bytes(max(float(row["kept_bytes"]), 0))
