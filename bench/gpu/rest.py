"""What comes after speed: memory, sizes of the workspace, CUDA graphs, the host's time; the tests, and compute-sanitizer."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from bench.cases.attention import CLIPPED, Case, choose
from bench.cases.methods import METHODS, OF_OURS, OURS
from bench.measure import timing
from bench.report import summary
from bench.report.rows import in_one_line
from bench.verbs import memory, speed
from triton_relattn.kernels.introspect import planning

from .checks import further_cases, run_case, standing_for_all
from .questions import host_time
from .report import Report, synchronize

PEAKS = (*OF_OURS, "gather", "dense_bias")
WORKSPACES = (256 << 20, 512 << 20, 1 << 30)
GRAPHED = (200, 500)  # lengths of speech, where the host takes longer than the GPU


def measure_memory(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Peaks against the length, until the methods fail, and past that."""
    cases = choose(["memory"])
    every = sorted([*cases, *(replace(case, rows=CLIPPED) for case in cases)], key=lambda case: case.length)[: options.most]
    failures = {direction: speed.Failures() for direction in memory.DIRECTIONS}
    known = argparse.Namespace(device="cuda", no_verify=False, memory_limit=4 << 30)
    for case, method, direction in itertools.product(every, PEAKS, memory.DIRECTIONS):
        if time.monotonic() > deadline:
            report.left(1)
            continue
        row = memory.measure(case, method, direction, known, failures[direction].of(case))
        failures[direction].remember(case, [row])
        report.add_measured(row)
    report.say(summary.memory(report.measured.rows))
    report.done()


def time_of(case: Case, direction: str, change: dict[str, str] | None = None) -> float:
    """Milliseconds of a direction of ours, with other variables in the environment."""
    with mock.patch.dict(os.environ, change or {}):
        inputs, d_out = case.inputs("cuda")
        timed = timing.Timed(OURS, direction, step=timing.steps(METHODS[OURS].make(case), inputs, d_out, True)[direction])
        timed.step.run()
        timing.time_in_turn([timed], "cuda", 0.7, 10)
    return float(timing.percentiles(timed.milliseconds)["p50_ms"])


def attempt(report: Report, deadline: float, work: Any, **row: Any) -> None:
    """Add a row with the value that work returns, or with what it raises."""
    if time.monotonic() > deadline:
        report.left(1)
        return
    try:
        row |= {"value": work(), "status": "ok"}
    except Exception as error:
        row |= {"status": "failed", "message": in_one_line(error)}
    report.add(**row)
    report.say(f"  {row['case']}, {row['variant']}, {row['direction']}: {row.get('value', '-')} {row['unit']}")


def measure_workspaces(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """The backward of long calls with workspaces of several sizes: larger ones have fewer parts."""
    cases = [Case(1, 32, 8192, 64), Case(1, 32, 16384, 64), Case(1, 16, 16384, 128)]
    for case, size in list(itertools.product(cases, WORKSPACES))[: options.most]:

        def work(case: Case = case, size: int = size) -> float:
            return time_of(case, "backward", {planning.VARIABLE: str(size)})

        name = f"workspace of {size >> 20} MiB"
        attempt(report, deadline, work, case=str(case), variant=name, direction="backward", unit="ms")
    report.done()


def replayed(case: Case) -> float:
    """Milliseconds of forward and backward, captured in a CUDA graph and replayed."""
    inputs, d_out = case.inputs("cuda")
    step = timing.steps(METHODS[OURS].make(case), inputs, d_out, True)["forward+backward"]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # as torch asks for: warm up beside the default stream
        for _ in range(3):
            step.run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step.run()
    eager = [each.clone() for each in step.run()]
    graph.replay()
    synchronize()
    if not all(torch.equal(one, other) for one, other in zip(captured, eager, strict=True)):
        raise AssertionError("the graph gives other bits")
    timed = timing.Timed(OURS, "replay", step=timing.Step(lambda: None, lambda _: (graph.replay(), ())[1]))  # type: ignore[func-returns-value]
    timing.time_in_turn([timed], "cuda", 0.5, 20)
    return float(timing.percentiles(timed.milliseconds)["p50_ms"])


def graphs(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Short calls in a CUDA graph: what is left without the host's time."""
    for case in [case for case in choose(["speech"]) if case.length in GRAPHED][: options.most]:

        def work(case: Case = case) -> float:
            return replayed(case)

        attempt(report, deadline, work, case=str(case), variant=OURS, direction="forward+backward", unit="ms")
    report.done()


def host(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Microseconds of the host for a call whose work is nothing: the best of three times many calls in a row."""
    case = Case(1, 1, 60, 64, rows=9)
    inputs, d_out = case.inputs("cuda")
    for method, direction in list(itertools.product((*OF_OURS, "sdpa"), memory.DIRECTIONS))[: options.most]:
        step = timing.steps(METHODS[method].make(case), inputs, d_out, METHODS[method].has_table)[direction]

        def work(step: timing.Step = step) -> float:
            return host_time(step, options.most or 200)

        attempt(report, deadline, work, case=str(case), variant=method, direction=direction, unit="us")
    report.done()


def marked_tests(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """pytest of the tests that are marked gpu, those of random calls, graphs and packed ones first; as far as it comes."""
    if importlib.util.find_spec("pytest") is None:
        report.done("there is no pytest")
        return
    command = [sys.executable, "-m", "pytest", "-rfE", "--tb=short", "-m", "gpu", "tests/gpu", "-p", "no:cacheprovider", "-v"]
    if options.jobs > 1 and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(options.jobs)]
    status, lines = report.run(command, deadline - time.monotonic())
    report.add(**verdict_of_tests(status, lines))
    report.left(status is None)
    report.done(report.checks.rows[-1]["message"])


def verdict_of_tests(status: int | None, lines: Sequence[str]) -> dict[str, Any]:
    """Judge pytest by its exit status (5: no test was for this machine), and if it was cut off by the verdicts it had come to."""
    verdicts = [found[1] for line in lines if (found := re.search(r"(?:^|::\S+|\]) (PASSED|FAILED|ERROR)\b", line))]
    passed = verdicts.count("PASSED")
    is_right = status in (0, 5) or (status is None and passed == len(verdicts))
    message = f"{passed} passed, {len(verdicts) - passed} did not; {lines[-1] if lines else ''}"
    row = {"case": "pytest -m gpu", "value": passed, "unit": "tests", "message": message}
    return {**row, "status": "ok" if is_right else "FAILED"}


def sanitizer(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Small calls under compute-sanitizer's memcheck: addresses that are not the kernels' own. Without it that is said."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        report.done("there is no compute-sanitizer")
        return
    # Each tensor is an allocation of its own: else what lies beyond its end is torch's, and no error.
    command = [program, "--error-exitcode", "86", "--report-api-errors", "no", sys.executable, "-m", "bench.gpu.rest"]
    status, lines = report.run(command, deadline - time.monotonic(), PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    calls = sum("call: " in line for line in lines)
    summary_line = next((line for line in reversed(lines) if "SUMMARY" in line), lines[-1] if lines else "")
    if status == 86 or calls:
        verdict = "ok" if status in (0, None) and calls else "FAILED"
        report.add(case="memcheck", value=calls, unit="calls", status=verdict, message=summary_line)
    report.done(f"{calls} calls; {summary_line}")


def main() -> None:
    """A few calls of every kind, for compute-sanitizer."""
    wrong = 0
    for case in (*standing_for_all([Case(1, 2, 512, 64)]), *further_cases()[::5]):
        rows, _ = run_case(case)
        problems = [row["message"] for row in rows if row["status"] != "ok"]
        wrong += bool(problems)
        print(f"call: {case.name}: {problems or 'ok'}", flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
