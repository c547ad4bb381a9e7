"""Time of every method, checked before it is timed; runs are interleaved in one process."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

from triton_relattn._peaks import limit_memory

from ..cases import attention as cases
from ..cases.attention import Case
from ..cases.methods import METHODS, OF_OURS
from ..measure import timing
from ..report import summary
from ..report.progress import progress
from ..report.rows import Table, stamp
from . import verify
from .options import add_list, add_measured, chosen_cases, seconds

COLUMNS = (
    *("verb", "group", "case", "method", "direction", "status", "batch", "heads", "key_heads", "seqlen", "head_dim", "rel_dim"),
    *("table", "is_causal", "dtype", "p20_ms", "p50_ms", "p80_ms", "rounds", "tflops", "useful_tflops", "peak_bytes"),
    *("error", "checked_against", "verified", "config"),
)
"""Columns of speed and of memory. tflops: as FlashAttention counts; useful_tflops: with the products of the table."""
SECONDS_A_CASE, ROUNDS = 15.0, 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_measured(parser, None)
    usual = f"default: {', '.join(timing.DIRECTIONS)}, on a CPU without backward"
    add_list(parser, "directions", timing.DIRECTIONS, None, usual)
    parser.add_argument("--seconds", type=seconds, default=SECONDS_A_CASE, help="timing of one case (%(default)s)")


def new_row(verb: str, case: Case, method: str, direction: str, options: argparse.Namespace) -> dict[str, Any]:
    row = {"verb": verb, **case.columns(), "method": method, "direction": direction}
    row["verified"] = "no" if options.no_verify else "yes"
    if method in OF_OURS:
        row["config"] = config_of(case, direction, options.device, METHODS[method].has_table)
    return row


def config_of(case: Case, direction: str, device: str, has_table: bool) -> str:
    """Return the configurations of our kernels; "blockwise" where none run, as on a CPU or without triton."""
    if device == "cpu" or find_spec("triton") is None:
        return "blockwise"
    from ..cases.configurations import used_configurations

    return used_configurations(case, direction, device, has_table)


def measure(case: Case, options: argparse.Namespace, not_tried: dict[str, str]) -> list[dict[str, Any]]:
    """A row for every method and direction."""
    every = timing.prepare(case, options.methods, options.directions, options.device, not_tried)
    timing.time_in_turn(every, options.device, options.seconds, ROUNDS)
    return rows_of(case, every, options)


def rows_of(case: Case, every: Sequence[timing.Timed], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of what was timed, and of what could not be."""
    rows = []
    for timed in every:
        row = new_row("speed", case, timed.method, timed.direction, options)
        row |= timed.found | timing.times_of(timed, options.device)
        if timed.milliseconds:
            plain, useful = case.flops(timed.direction, METHODS[timed.method].has_table)
            row |= {"tflops": plain / row["p50_ms"] / 1e9, "useful_tflops": useful / row["p50_ms"] / 1e9}
        rows.append(row)
    return rows


class Failures:
    """Methods that ran out of memory: they are not tried at longer lengths of the same kind."""

    def __init__(self) -> None:
        self._of_kind: dict[Case, dict[str, str]] = {}

    def of(self, case: Case) -> dict[str, str]:
        """By method, why it is not tried. Cases that differ in length and in the number of sequences and heads are of a kind."""
        return self._of_kind.setdefault(case.resized(1, batch=1, heads=1, group=""), {})

    def remember(self, case: Case, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            if row["status"].startswith(timing.OUT_OF_MEMORY):
                self.of(case)[row["method"]] = f"not tried: {row['status']} at {case.length}"


def run(options: argparse.Namespace) -> int:
    chosen = chosen_cases(options, cases.default_groups(options.device))
    default = [direction for direction in timing.DIRECTIONS if options.device == "cuda" or direction != "backward"]
    options.directions = options.directions or default
    if not options.no_verify and verify.gate(options.device) != 0:
        print("The tests fail: nothing is timed.")
        return 1
    if options.device == "cpu":
        limit_memory(options.memory_limit)
    columns = (*COLUMNS, *timing.OF_GPU) if options.device == "cuda" else COLUMNS
    table = Table(columns, stamp(options.device), options.csv, options.json)
    failures = Failures()
    try:
        for case in progress(chosen, str, work=lambda case: 1e8 + case.batch * case.heads * case.length**2):
            rows = measure(case, options, failures.of(case))
            failures.remember(case, rows)
            for row in rows:
                table.add(row)
    except KeyboardInterrupt:
        print("interrupted; what has been measured is kept")
    print(summary.speed(table.rows))
    return 1 if any(row["status"].startswith(("wrong", "failed")) for row in table.rows) else 0
