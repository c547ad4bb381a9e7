"""Peak memory of every method against the sequence length, up to and beyond the length at which methods run out of memory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from ..cases.attention import Case
from ..cases.methods import METHODS
from ..measure import processes
from ..report import summary
from ..report.rows import Table, stamp
from ..report.summary import DIRECTIONS
from ..report.text import interruptible, progress
from . import speed
from .options import add_measured, chosen_cases

Point = tuple[Case, str, str]
"""Case, method and direction."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_measured(parser)


def choose_points(cases: Sequence[Case], methods: Sequence[str]) -> list[Point]:
    """Short lengths first."""
    by_length = sorted(cases, key=lambda case: case.length)
    return [(case, method, direction) for case in by_length for method in methods for direction in DIRECTIONS]


def measure(points: Sequence[Point], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The row of each point. What runs out of memory is not tried at longer lengths."""
    failures = {direction: speed.Failures() for direction in DIRECTIONS}
    for case, method, direction in points:
        row = speed.new_row("memory", case, method, direction, options)
        reason, not_tried = METHODS[method].why_not(case, options.device), failures[direction].reasons(case)
        if reason:
            row["status"] = f"does not apply: {reason}"
        elif method in not_tried:
            row["status"] = not_tried[method]
        elif options.device == "cuda":
            row |= processes.measure(case, method, direction, options.device)
        else:
            row |= processes.measure_in_own_process(case, method, direction, options.memory_limit)
        failures[direction].remember(case, [row])
        yield row


def run(options: argparse.Namespace) -> int:
    points = choose_points(chosen_cases(options, ["cpu" if options.device == "cpu" else "memory"]), options.methods)
    if not options.no_verify and not speed.tests_pass(options.device):
        return 1
    table = Table(speed.COLUMNS, stamp(options.device), options.csv)
    named = progress(points, lambda point: f"{point[1]}, {point[0].length}, {point[2]}")
    with interruptible():
        for _, row in zip(named, measure(points, options), strict=False):
            table.add(row)
    print(summary.of_verb("memory", table.rows))
    return 1 if any(row["status"].startswith("failed") for row in table.rows) else 0
