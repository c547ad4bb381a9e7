"""Peak memory of every method against the sequence length, up to and beyond the length at which methods run out of memory."""

from __future__ import annotations

import argparse
from typing import Any

from ..cases.attention import Case
from ..cases.methods import METHODS
from ..measure import point
from ..report import summary
from ..report.progress import progress
from ..report.rows import Table, stamp
from . import verify
from .options import add_measured, chosen_cases
from .speed import COLUMNS, Failures, new_row

DIRECTIONS = ("forward", "forward+backward")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_measured(parser, None)


def measure(case: Case, method: str, direction: str, options: argparse.Namespace, not_tried: dict[str, str]) -> dict[str, Any]:
    row = new_row("memory", case, method, direction, options)
    if reason := METHODS[method].why_not(case, options.device):
        return row | {"status": f"does not apply: {reason}"}
    if method in not_tried:
        return row | {"status": not_tried[method]}
    if options.device == "cuda":
        return row | point.measure(case, method, direction, options.device)
    return row | point.measure_in_own_process(case, method, direction, options.memory_limit)


def run(options: argparse.Namespace) -> int:
    chosen = chosen_cases(options, ["cpu" if options.device == "cpu" else "memory"])
    if not options.no_verify and verify.gate(options.device) != 0:
        print("The tests fail: nothing is measured.")
        return 1
    table = Table(COLUMNS, stamp(options.device), options.csv, options.json)
    failures = {direction: Failures() for direction in DIRECTIONS}
    points = [
        (case, method, direction)
        for case in sorted(chosen, key=lambda case: case.length)
        for method in options.methods
        for direction in DIRECTIONS
    ]
    skipped: dict[Any, str] = {}
    try:
        for case, method, direction in progress(
            points,
            outcome=lambda each: skipped.get(each, ""),
            label=lambda each: f"{each[1]}, {each[0].length}, {each[2]}",
            work=lambda each: 0 if METHODS[each[1]].why_not(each[0], options.device) else 4096**2 + each[0].length ** 2,
        ):
            row = measure(case, method, direction, options, failures[direction].of(case))
            if row["status"].startswith(("not tried", "does not apply")):
                skipped[case, method, direction] = row["status"]
            failures[direction].remember(case, [row])
            table.add(row)
    except KeyboardInterrupt:
        print("interrupted; what has been measured is kept")
    print(summary.memory(table.rows))
    return 1 if any(row["status"].startswith("failed") for row in table.rows) else 0
