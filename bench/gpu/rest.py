"""Single figures (rates, sizes of the workspace, CUDA graphs, the host), memory, the tests, compute-sanitizer."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl

from bench.cases.attention import CLIPPED, Case, choose
from bench.cases.methods import METHODS, OF_OURS, OURS
from bench.measure import timing
from bench.report import summary
from bench.report.rows import in_one_line
from bench.verbs import memory, speed
from triton_relattn.kernels.introspect import planning, selection

from .checks import further_cases, run_case, standing_for_all
from .report import Report, synchronize

PEAKS = (*OF_OURS, "sdpa_flash", "gather", "dense_bias")
WORKSPACES = (256 << 20, 512 << 20, 1 << 30)
GRAPHED = (200, 500)  # lengths of speech, where the host takes longer than the GPU
PRODUCTS = "products in bfloat16"
SIDE, L2_BYTES, MEMORY_BYTES, PASSES, BLOCK = 8192, 16 << 20, 512 << 20, 32, 1024


@dataclass
class Figure:
    """Something to measure, in a unit."""

    case: str
    variant: str
    direction: str
    unit: str
    work: Callable[[], float]


def measure(figures: Callable[[bool], Iterator[Figure]], options: argparse.Namespace, report: Report, deadline: float) -> None:
    """A row per figure of a function, whose argument says whether this is only a try."""
    for figure in list(figures(options.most is not None))[: options.most]:
        row: dict[str, Any] = {name: getattr(figure, name) for name in ("case", "variant", "direction", "unit")}
        if time.monotonic() > deadline:
            report.left(1)
            continue
        try:
            row |= {"value": figure.work(), "status": "ok"}
        except Exception as error:
            row |= {"status": "failed", "message": in_one_line(error)}
        report.add(**row)
        report.say(f"  {row['case']}, {row['variant']} {row['direction']}: {row.get('value', '-')} {row['unit']}")
    report.done()


def time_of(step: timing.Step, rounds: int = 20) -> float:
    """The median of a step, in milliseconds."""
    step.run()
    timed = timing.Timed("", "", step=step)
    timing.time_in_turn([timed], "cuda", 0.5, rounds)
    return float(timing.percentiles(timed.milliseconds)["p50_ms"])


def step_of(case: Case, direction: str, method: str = OURS) -> timing.Step:
    inputs, d_out = case.inputs("cuda")
    return timing.steps(METHODS[method].make(case), inputs, d_out, METHODS[method].has_table)[direction]


@triton.jit
def read_kernel(source, sums, blocks, passes, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up blocks of float32, a program each so many apart; all of it several times."""
    place = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(passes):
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            total += tl.load(source + block * BLOCK + place, cache_modifier=".cg")
    tl.store(sums + tl.program_id(0) * BLOCK + place, total)


def measure_roofs(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Rates of the GPU; that of products is kept, for shares of it."""
    measure(roofs, options, report, deadline)
    for row in report.checks.rows:
        if (row["case"], row["status"]) == (PRODUCTS, "ok"):
            report.state.put("matrix_peak", float(row["value"]))


def roofs(is_try: bool) -> Iterator[Figure]:
    """What bounds the kernels. Numbers are random: products of zeros take less power, and are faster."""
    side, size = (64, BLOCK * 64) if is_try else (SIDE, MEMORY_BYTES)
    programs = 8 * selection.multiprocessors(torch.device("cuda"))
    source, sums = torch.randn(size // 4, device="cuda"), torch.empty(programs * BLOCK, device="cuda")
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    in_l2 = min(size, L2_BYTES)

    def rate(work: float, call: Callable[[], object]) -> float:
        return work / 1e12 / (1e-3 * time_of(timing.Step(lambda: None, lambda _: (call(), ())[1])))  # type: ignore[arg-type, return-value]

    def read() -> object:
        return read_kernel[(programs,)](source, sums, in_l2 // 4 // BLOCK, PASSES, BLOCK)

    yield Figure(PRODUCTS, "torch", "", "TFLOP/s", lambda: rate(2 * side**3, lambda: left @ right))
    yield Figure("a copy", "torch", "", "TB/s", lambda: rate(2 * size, source.clone))
    yield Figure("reads from L2", "triton", "", "TB/s", lambda: rate(PASSES * in_l2, read))


def workspaces(_: bool) -> Iterator[Figure]:
    """The backward of long calls with workspaces of several sizes: larger ones have fewer parts."""
    cases = [Case(1, 32, 8192, 64), Case(1, 32, 16384, 64), Case(1, 16, 16384, 128)]
    for case, size in itertools.product(cases, WORKSPACES):

        def work(case: Case = case, size: int = size) -> float:
            with mock.patch.dict(os.environ, {planning.VARIABLE: str(size)}):
                return time_of(step_of(case, "backward"), 10)

        yield Figure(str(case), f"workspace of {size >> 20} MiB", "backward", "ms", work)


def graphs(_: bool) -> Iterator[Figure]:
    """Short calls in a CUDA graph: what is left without the host's time."""
    for case in choose(["speech"]):
        if case.length in GRAPHED:
            yield Figure(str(case), "CUDA graph", "forward+backward", "ms", partial(replayed, case))


def replayed(case: Case) -> float:
    """Capture a call, compare the replay with it, and time the replay."""
    step = step_of(case, "forward+backward")
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
    return time_of(timing.Step(lambda: None, lambda _: (graph.replay(), ())[1]))  # type: ignore[func-returns-value]


def host_time(step: timing.Step, number: int = 200, times: int = 3) -> float:
    """Microseconds of the host for a step: the best of some times many in a row, which the GPU may still be at."""
    step.run()
    seconds = []
    for _ in range(times):
        synchronize()
        started = time.perf_counter()
        for _ in range(number):
            step.run()
        seconds.append((time.perf_counter() - started) / number)
    return 1e6 * min(seconds)


def host(is_try: bool) -> Iterator[Figure]:
    """What a call costs the host whose work is nothing."""
    case = Case(1, 1, 60, 64, rows=9)
    for method, direction in itertools.product((*OF_OURS, "sdpa"), memory.DIRECTIONS):

        def work(method: str = method, direction: str = direction) -> float:
            return host_time(step_of(case, direction, method), 1 if is_try else 200)

        yield Figure(str(case), method, direction, "us", work)


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


def marked_tests(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """pytest of the tests that are marked gpu, as far as it comes."""
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
    said = next((line for line in reversed(lines) if "SUMMARY" in line), lines[-1] if lines else "")
    if status == 86 or calls:
        verdict = "ok" if status in (0, None) and calls else "FAILED"
        report.add(case="memcheck", value=calls, unit="calls", status=verdict, message=said)
    report.done(f"{calls} calls; {said}")


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
