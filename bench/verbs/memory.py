"""Peak memory of every method against the sequence length, until the methods fail, and past that."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from triton_relattn.demo.measure import PAGE, map_blocks_from, peak_cpu, peak_cuda
from triton_relattn.demo.report import short_bytes

from . import cases, summary, timing, verify
from .cases import Case
from .memory_limit import limit_memory
from .methods import METHODS
from .options import add_measured
from .rows import ROOT, Table, progress, stamp
from .speed import COLUMNS, Failures, new_row

DIRECTIONS = ("forward", "forward+backward")
WARM_UP_LENGTH = 64  # what torch and its libraries set up once, they have set up before


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_measured(parser, None)
    parser.add_argument("--point", help=argparse.SUPPRESS)  # one measurement in a process of its own


def peak(case: Case, method: str, direction: str, device: str) -> dict[str, Any]:
    """Columns: peak_bytes, by how much the peak exceeds what the inputs take; or a status that says why not."""
    found: dict[str, Any] = {"status": "ok"}

    def of(sized: Case) -> timing.Step:
        inputs, d_out = sized.inputs(device)
        return timing.steps(METHODS[method].make(sized), inputs, d_out, METHODS[method].has_table)[direction]

    def work() -> None:
        of(case.resized(min(case.length, WARM_UP_LENGTH), rows=None)).run()
        step = of(case)
        if device == "cuda":
            found["peak_bytes"] = peak_cuda(step.run)
        else:
            map_blocks_from(PAGE)
            found["peak_bytes"] = peak_cpu(step.run)

    timing.attempt(work, found)
    return found


def in_own_process(case: Case, method: str, direction: str, memory_limit: int) -> dict[str, Any]:
    """The same on a CPU, where only so the peak of a process is that of one computation."""
    point = json.dumps({"case": asdict(case), "method": method, "direction": direction})
    command = [sys.executable, "-m", "bench", "memory", "--device", "cpu", "--point", point]
    command += ["--memory-limit", str(memory_limit / 2**30)]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if child.returncode == -signal.SIGKILL:
        return {"status": f"{timing.OUT_OF_MEMORY}: ended by the system"}
    if child.returncode != 0:
        return {"status": f"failed: {(child.stderr.strip() or 'no message').splitlines()[-1]}"}
    found: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    if found["status"] == timing.OUT_OF_MEMORY:
        found["status"] += f": more than {short_bytes(memory_limit)}"
    return found


def measure(case: Case, method: str, direction: str, options: argparse.Namespace, not_tried: dict[str, str]) -> dict[str, Any]:
    row = new_row("memory", case, method, direction, options)
    if reason := METHODS[method].why_not(case, options.device):
        return row | {"status": f"does not apply: {reason}"}
    if method in not_tried:
        return row | {"status": not_tried[method]}
    if options.device == "cuda":
        return row | peak(case, method, direction, options.device)
    return row | in_own_process(case, method, direction, options.memory_limit)


def run(options: argparse.Namespace) -> int:
    if options.point:
        limit_memory(options.memory_limit)
        point = json.loads(options.point)
        print(json.dumps(peak(Case(**point["case"]), point["method"], point["direction"], options.device)))
        return 0
    if not options.no_verify and verify.gate(options.device) != 0:
        print("The tests fail: nothing is measured.")
        return 1
    chosen = cases.choose(options.cases or ["cpu" if options.device == "cpu" else "memory"], options.lengths)
    table = Table(COLUMNS, stamp(options.device), options.csv, options.json)
    failures = {direction: Failures() for direction in DIRECTIONS}
    points = [
        (case, method, direction)
        for case in sorted(chosen, key=lambda case: case.length)
        for method in options.methods
        for direction in DIRECTIONS
    ]
    try:
        for case, method, direction in progress(
            points,
            label=lambda point: f"{point[1]}, {point[0].length}, {point[2]}",
            work=lambda point: 0 if METHODS[point[1]].why_not(point[0], options.device) else 4096**2 + point[0].length ** 2,
        ):
            row = measure(case, method, direction, options, failures[direction].of(case))
            failures[direction].remember(case, [row])
            table.add(row)
    except KeyboardInterrupt:
        print("interrupted; what has been measured is kept")
    print(summary.memory(table.rows))
    return 1 if any(row["status"].startswith("failed") for row in table.rows) else 0
