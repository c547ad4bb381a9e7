"""Peak memory of every method against the sequence length, up to and beyond the length at which methods run out of memory."""

from __future__ import annotations

import argparse
from typing import Any

from ..cases.attention import Case
from ..cases.methods import METHODS
from ..measure import processes
from ..report import summary
from ..report.progress import interruptible, progress
from ..report.rows import Table, stamp
from . import speed
from .options import add_measured, chosen_cases

DIRECTIONS = ("forward", "forward+backward")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_measured(parser, None)


def measure(case: Case, method: str, direction: str, options: argparse.Namespace, not_tried: dict[str, str]) -> dict[str, Any]:
    row = speed.new_row("memory", case, method, direction, options)
    if reason := METHODS[method].why_not(case, options.device):
        return row | {"status": f"does not apply: {reason}"}
    if method in not_tried:
        return row | {"status": not_tried[method]}
    if options.device == "cuda":
        return row | processes.measure(case, method, direction, options.device)
    return row | processes.measure_in_own_process(case, method, direction, options.memory_limit)


def run(options: argparse.Namespace) -> int:
    chosen = chosen_cases(options, ["cpu" if options.device == "cpu" else "memory"])
    if not options.no_verify and not speed.tests_pass(options.device):
        return 1
    table = Table(speed.COLUMNS, stamp(options.device), options.csv)
    failures = {direction: speed.Failures() for direction in DIRECTIONS}
    by_length = sorted(chosen, key=lambda case: case.length)
    points = [(case, method, direction) for case in by_length for method in options.methods for direction in DIRECTIONS]
    skipped: dict[Any, str] = {}
    with interruptible():
        for case, method, direction in progress(
            points,
            outcome=lambda point: skipped.get(point, ""),
            label=lambda point: f"{point[1]}, {point[0].length}, {point[2]}",
            work=lambda point: 0 if METHODS[point[1]].why_not(point[0], options.device) else 4096**2 + point[0].length ** 2,
        ):
            row = measure(case, method, direction, options, failures[direction].reasons(case))
            if row["status"].startswith(("not tried", "does not apply")):
                skipped[case, method, direction] = row["status"]
            failures[direction].remember(case, [row])
            table.add(row)
    print(summary.memory(table.rows))
    return 1 if any(row["status"].startswith("failed") for row in table.rows) else 0
