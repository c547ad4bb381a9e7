"""Time of every method, checked before it is timed; runs are interleaved in one process.

``--list`` shows cases and methods instead. ``--new-lengths COUNT`` times so many lengths that a process has never met, each once
and then all of them again: some libraries prepare a product of new sizes, and keep that.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from triton_relattn._peaks import limit_memory, resident

from ..cases import attention as cases
from ..cases.attention import Case
from ..cases.methods import METHODS, OUR_METHODS, OURS
from ..measure import processes, timing
from ..report import summary
from ..report.rows import ROOT, Table, stamp
from ..report.text import interruptible, progress
from ..report.text import table as text_table
from .options import add_list, add_measured, chosen_cases, positive, seconds

COLUMNS = (
    *("verb", "group", "case", "method", "direction", "status", "batch", "heads", "key_heads", "seqlen", "head_dim", "rel_dim"),
    *("table", "is_causal", "dtype", "p20_ms", "p50_ms", "p80_ms", "rounds", "tflops", "useful_tflops", "peak_bytes"),
    *("error", "checked_against", "verified", "config"),
)
"""Columns of speed and of memory. tflops: as FlashAttention counts; useful_tflops: with the products of the table."""
NEW_LENGTHS_COLUMNS = ("verb", "case", "method", "status", "lengths", "first_ms", "again_ms", "kept_bytes")
"""first_ms, again_ms: of all lengths. kept_bytes: by how much the process has grown after the first time."""
ROUNDS = 40
BASELINES = "tests/cpu/test_bench.py::test_baselines_equal_the_reference"
TESTS = ["tests/operator/test_papers.py", "tests/cpu/test_blockwise.py", BASELINES]
"""Tests of the implementation that a CPU has, against the reference, and of the baselines."""
SHORTEST, LONGEST = 150, 900  # of new lengths
UNIT = "ms"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_measured(parser)
    add_list(parser, "directions", timing.DIRECTIONS, None, "default: all, on a CPU without backward")
    parser.add_argument("--seconds", type=seconds, default=15.0, help="timing of one case (%(default)s)")
    parser.add_argument("--list", action="store_true", help="list cases and methods, and measure nothing")
    what = f"so many lengths from {SHORTEST} to {LONGEST} instead, each new to its process, on the CPU"
    parser.add_argument("--new-lengths", type=positive, metavar="COUNT", help=what)


def tests_pass(device: str) -> bool:
    """Run the tests of what is measured on "cpu" or "cuda", and print their output if they fail."""
    if device == "cuda":
        what = "the kernels against float64"
        command = [sys.executable, "-m", "bench.gpu", "--parts", "correctness", "--seconds", "300", "--results"]
    elif importlib.util.find_spec("pytest") is None:
        print("The tests need pytest: pip install pytest hypothesis. --no-verify measures without them; the rows then say so.")
        return False
    else:
        what = ", ".join(TESTS)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", *TESTS, "-p", "no:cacheprovider", "--basetemp"]
    print(f"verifying: {what}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*command, folder], cwd=ROOT, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).strip().splitlines()
    print("\n".join(lines[-1:] if done.returncode == 0 else [*lines[-40:], "The tests fail: nothing is measured."]), flush=True)
    return done.returncode == 0


def new_row(verb: str, case: Case, method: str, direction: str, options: argparse.Namespace) -> dict[str, Any]:
    row = {"verb": verb, **case.columns(), "method": method, "direction": direction}
    row["verified"] = "no" if options.no_verify else "yes"
    if method in OUR_METHODS:
        row["config"] = configurations(METHODS[method].case(case), direction, options.device)
    return row


def configurations(case: Case, direction: str, device: str) -> str:
    """Tiles of our kernels, first to last; "blockwise" where none run, as on a CPU or without triton."""
    if device == "cpu" or importlib.util.find_spec("triton") is None:
        return "blockwise"
    from ..compiled import configurations

    return configurations(case, direction, device)


def measure(case: Case, options: argparse.Namespace, not_tried: dict[str, str]) -> list[dict[str, Any]]:
    """A row for every method and direction."""
    prepared = timing.prepare(case, options.methods, options.directions, options.device, not_tried)
    timing.time_in_turn(prepared, options.device, options.seconds, ROUNDS, drops=True)
    return make_rows(case, prepared, options)


def make_rows(case: Case, prepared: Sequence[timing.Timed], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of what was timed, and of what could not be."""
    rows = []
    for timed in prepared:
        row = new_row("speed", case, timed.method, timed.direction, options)
        row |= timed.found | timing.times(timed, options.device)
        if timed.milliseconds:
            plain, useful = METHODS[timed.method].case(case).flops(timed.direction)
            row |= {"tflops": plain / row["p50_ms"] / 1e9, "useful_tflops": useful / row["p50_ms"] / 1e9}
        rows.append(row)
    return rows


class Failures:
    """Methods that ran out of memory: they are not tried at longer lengths of the same kind."""

    def __init__(self) -> None:
        self._reasons: dict[Case, dict[str, str]] = {}

    def reasons(self, case: Case) -> dict[str, str]:
        """By method, why it is not tried. Cases of a kind differ in length and in the number of sequences and heads."""
        return self._reasons.setdefault(case.resized(1, batch=1, heads=1, group=""), {})

    def remember(self, case: Case, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            if row["status"].startswith(timing.OUT_OF_MEMORY):
                self.reasons(case)[row["method"]] = f"not tried: {row['status']} at {case.length}"


def run(options: argparse.Namespace) -> int:
    if options.list:
        for name, group in cases.GROUPS.items():
            print(f"{name}{' (default here)' * (name in cases.default_groups(options.device))}")
            print("".join(f"  {case}\n" for case in group))
        probe = cases.GROUPS["cpu"][0]
        body = [
            (name, method.kind, method.what, method.why_not(probe, options.device) or "yes") for name, method in METHODS.items()
        ]
        print(text_table(("method", "kind", "what", "runs here"), body))
        return 0
    if options.new_lengths:
        return run_new_lengths(options)
    chosen = chosen_cases(options, cases.default_groups(options.device))
    options.directions = options.directions or default_directions(options.device)
    if not options.no_verify and not tests_pass(options.device):
        return 1
    if options.device == "cpu":
        limit_memory(options.memory_limit)
    columns = (*COLUMNS, *timing.GPU_COLUMNS) if options.device == "cuda" else COLUMNS
    table = Table(columns, stamp(options.device), options.csv)
    failures = Failures()
    with interruptible():
        for case in progress(chosen):
            rows = measure(case, options, failures.reasons(case))
            failures.remember(case, rows)
            for row in rows:
                table.add(row)
    print(summary.of_verb("speed", table.rows))
    return 1 if any(row["status"].startswith(("wrong", "failed")) for row in table.rows) else 0


def default_directions(device: str) -> list[str]:
    return [direction for direction in timing.DIRECTIONS if device == "cuda" or direction != "backward"]


def timers(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """For compare: each case with its table and without, and a function that times our operator once, in milliseconds."""
    for case in chosen_cases(options, cases.default_groups(options.device)):
        inputs = case.inputs(options.device)
        for method in [name for name in OUR_METHODS if name in options.methods]:
            computed = METHODS[method].case(case)
            steps = timing.steps(computed, METHODS[method].make(computed), inputs)
            directions = options.directions or default_directions(options.device)
            timed = [timing.Timed(OURS, direction, step=steps[direction]) for direction in directions]
            yield f"{case}{', no table' * (method != OURS)}", partial(timing.time_once, timed, options.device)


def new_lengths(count: int) -> list[int]:
    """Lengths in random order, which repeat only once all have occurred."""
    shuffled = list(range(SHORTEST, LONGEST + 1))
    random.Random(0).shuffle(shuffled)
    return [shuffled[number % len(shuffled)] for number in range(count)]


def measure_new_lengths(method: str, count: int) -> dict[str, Any]:
    """Compute sequences of so many lengths, each once, forward and backward, and then all of them again."""

    def milliseconds(chosen: list[int]) -> float:
        spent = 0.0
        for length in chosen:
            case = METHODS[method].case(Case(1, 4, length, 64, dtype="fp32"))
            step = timing.steps(case, METHODS[method].make(case), case.inputs("cpu"))["forward+backward"]
            started = time.perf_counter()
            step.run()
            spent += time.perf_counter() - started
        return 1e3 * spent

    milliseconds([LONGEST + 1] * 3)
    before, chosen = resident(), new_lengths(count)
    first = milliseconds(chosen)
    return {"status": "ok", "first_ms": first, "kept_bytes": resident() - before, "again_ms": milliseconds(chosen)}


def run_new_lengths(options: argparse.Namespace) -> int:
    table = Table(NEW_LENGTHS_COLUMNS, stamp("cpu"), options.csv)
    chosen = [name for name in (*OUR_METHODS, "sdpa", "dense_bias") if name in options.methods]
    case = f"b1 h4 n{SHORTEST}-{LONGEST} d64 full fp32"
    for method in progress(chosen):
        found = processes.in_own_process(measure_new_lengths, (method, options.new_lengths), None)
        table.add({"verb": "lengths", "case": case, "method": method, "lengths": options.new_lengths, **found})
    print(summary.new_lengths(table.rows))
    return 1 if any(row["status"] != "ok" for row in table.rows) else 0
