"""Times and peaks: single kernels, whole calls beside lower bounds and beside what people use today, memory, the host."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.cases.attention import CLIPPED, GROUPS, Case, choose, gpu_cases
from bench.cases.methods import METHODS, OUR_METHODS, OURS
from bench.measure import timing
from bench.report import summary
from bench.report.rows import ROOT, in_one_line
from bench.verbs import memory, speed
from triton_relattn._core.dtypes import keeps_residual
from triton_relattn.kernels import tuning
from triton_relattn.kernels.backward import backward
from triton_relattn.kernels.call import Call
from triton_relattn.kernels.config.tile_config import TileConfig
from triton_relattn.kernels.forward import forward

from .checks import check_all, kernels_alone, synchronize, timed_checks
from .report import Report, kind, wrong_kinds
from .workers import Lost, spread

OURS_AND_BOUNDS = (*OUR_METHODS, "sdpa_flash", "sdpa_cudnn")
DENSE = (OURS, "shaw_gather", "gather", "skewing", "dense_bias", "sdpa_bias_cudnn", "sdpa_bias_efficient")
PEAKS = (*OUR_METHODS, "sdpa_flash", "gather", "dense_bias")
ROUNDS, LONG_ROUNDS, BASELINE_ROUNDS, LONG = 12, 6, 5, 8192
PATIENCE = 60.0  # seconds that a case may take
GRAPHED = (200, 500)  # lengths of speech, where the host takes longer than the GPU
BEFORE = Path(os.environ.get("RELATTN_BEFORE", ROOT / ".gpu" / "before"))
"""A checkout of an earlier commit, to compare with."""
BEFORE_WORDS = ("--cases", "long,speech", "--lengths", "4096,1024,500", "--seconds", "1")


def main_case(head_dim: int) -> Case:
    """The call that each kernel is timed in."""
    return choose(["long"], [4096])[0].resized(4096, heads=2048 // head_dim, head_dim=head_dim)


def smoke(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Calls that stand for the main ones, and their kernels alone, checked; then each kernel timed."""
    report.say(f"  {report.stamp['device']}, torch {torch.__version__}, triton {report.stamp['triton']}, {options.arch}")
    cases = [case for width in (64, 128) for case in (main_case(width), main_case(width).without_table())][: options.most]
    checks = [*timed_checks(cases[::2]), *kernels_alone()[: options.most]]
    check_all(checks, options, report, deadline)
    for case in cases:
        try:
            for row in time_kernels(case):
                report.add_measured(row)
        except Exception as error:
            report.fail(f"{case}: {in_one_line(error)}")
    report.done()


@contextmanager
def recorded_launches() -> Iterator[dict[str, tuple[TileConfig, list[Callable[[], None]]]]]:
    """By kernel, its tile and what launches it again: several functions where the call launches it in parts."""
    launches: dict[str, tuple[TileConfig, list[Callable[[], None]]]] = {}
    launch = Call.launch

    def record(call: Call, name: str, kernel: Any, config: TileConfig, *arguments: Any, **options: Any) -> None:
        again = partial(launch, call, name, kernel, config, *arguments, **options)
        again()
        launches.setdefault(name, (config, []))[1].append(again)

    Call.launch = record  # type: ignore[method-assign]
    try:
        yield launches
    finally:
        Call.launch = launch  # type: ignore[method-assign]


def time_kernels(case: Case) -> list[dict[str, Any]]:
    """Each kernel of a call, timed alone, in turn, in the selected configurations."""
    inputs = case.inputs("cuda")
    tensors, spec = case.resolved(inputs)
    with recorded_launches() as launches:
        out, _, softmax_stats, residual = forward(tensors, spec, keeps_residual=keeps_residual(tensors))
        gradients = backward(inputs.d_out, None, out, softmax_stats, tensors, spec, residual=residual)
    synchronize()
    is_finite = all(bool(result.isfinite().all()) for result in (out, *gradients) if result is not None)
    rows, timed = [], []
    for name, (tile, again) in launches.items():
        row = {"verb": "kernels", **case.columns(), "method": OURS if case.terms else "plain", "direction": f"{name} kernel"}
        row |= {"config": f"{name} {tuning.shown(tile)}", "status": "ok" if is_finite else "wrong: results are not finite"}
        step = timing.step(lambda again=again: [launch() for launch in again])  # type: ignore[misc]
        rows.append(row)
        timed.append(timing.Timed(row["method"], row["direction"], row, step=step))
    timing.time_in_turn(timed, "cuda", 0.6, ROUNDS)
    return [row | timing.times(one, "cuda") for row, one in zip(rows, timed, strict=True)]


def measure_case(item: tuple[Case, dict[str, str]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a case. A kind of ours that a check found to be wrong is not timed."""
    case, not_tried = item
    found_wrong = wrong_kinds(options.state)
    wrong = {name for name in OUR_METHODS if kind(METHODS[name].case(case)) in (found_wrong or ())}
    rounds = min(options.rounds, LONG_ROUNDS) if case.length >= LONG else options.rounds
    not_tried = not_tried | dict.fromkeys(wrong, "wrong: see the checks")
    prepared = timing.prepare(case, options.methods, timing.DIRECTIONS, "cuda", not_tried)
    timing.time_in_turn(prepared, "cuda", 0.0, rounds, fewest=rounds)
    rows = speed.make_rows(case, prepared, options)
    for row in rows:
        row["verified"] = "no" if found_wrong is None or row["status"].startswith("wrong") else "yes"
    return rows


def measure_all(
    cases: Sequence[Case],
    methods: Sequence[str],
    options: argparse.Namespace,
    report: Report,
    deadline: float,
    rounds: int = ROUNDS,
) -> None:
    """Rows of all cases until the deadline, each written when it is there; in a process of their own, which may end."""
    cases, rounds = cases[: options.most], options.most or rounds
    failures, done = speed.Failures(), 0
    shared = argparse.Namespace(state=options.state, device="cuda", methods=methods, rounds=rounds, no_verify=False)
    too_large = {"shaw_gather": "not tried: takes N^2 D numbers"}
    items = ((case, failures.reasons(case) | (too_large if case.length > 1024 else {})) for case in cases)
    for (case, _), rows in spread(partial(measure_case, options=shared), items, min(1, options.jobs), deadline, PATIENCE):
        done += 1
        if isinstance(rows, Lost):
            report.fail(f"{case}: {rows.reason}")
            continue
        failures.remember(case, rows)
        for row in rows:
            report.add_measured(row)
    report.skip(len(cases) - done)
    report.done(f"{done} of {len(cases)} cases")


def measure_speed(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Ours with the term and without, and SDPA without one by FlashAttention and cuDNN."""
    measure_all(gpu_cases(), OURS_AND_BOUNDS, options, report, deadline)
    report.say(f"\n{summary.speed(report.measured.rows)}")


def measure_baselines(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """What people write today in plain torch, and SDPA with a dense bias."""
    measure_all(choose(["dense"]), DENSE, options, report, deadline, BASELINE_ROUNDS)


def measure_flex(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """FlexAttention, which compiles long and takes gigabytes."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    for case, problem in spread(_compile_flex, GROUPS["flex"][: options.most], min(3, options.jobs), deadline):
        if isinstance(problem, Lost):  # the case itself then says why
            report.say(f"  {case}: {problem.reason}")
    measure_all(GROUPS["flex"], (OURS, "flex_attention"), options, report, deadline, BASELINE_ROUNDS)


def _compile_flex(case: Case) -> None:
    """Fill inductor's cache."""
    make_step(case, "forward+backward", "flex_attention").run()
    synchronize()


def measure_memory(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Peaks against the length, until the methods fail, and past that."""
    cases = choose(["memory"])
    ladder = sorted([*cases, *(replace(case, rows=CLIPPED) for case in cases)], key=lambda case: case.length)[: options.most]
    failures = {direction: speed.Failures() for direction in memory.DIRECTIONS}
    shared = argparse.Namespace(device="cuda", no_verify=False, memory_limit=4 << 30)
    for case, method, direction in itertools.product(ladder, PEAKS, memory.DIRECTIONS):
        if time.monotonic() > deadline:
            report.skip(1)
            continue
        row = memory.measure(case, method, direction, shared, failures[direction].reasons(case))
        failures[direction].remember(case, [row])
        report.add_measured(row)
    report.say(summary.memory(report.measured.rows))
    report.done()


def make_step(case: Case, direction: str, method: str = OURS) -> timing.Step:
    case = METHODS[method].case(case)
    return timing.steps(case, METHODS[method].make(case), case.inputs("cuda"))[direction]


def measure_host(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """What a call costs the host whose work is nothing; and short calls in a CUDA graph: what is left without the host's time."""
    tiny, number = Case(1, 1, 60, 64, rows=9), options.most or 200
    figures: list[tuple[Case, str, str, str, Callable[[], float]]] = [
        (tiny, method, direction, "us", partial(host_time, tiny, direction, method, number))
        for method, direction in itertools.product((*OUR_METHODS, "sdpa"), memory.DIRECTIONS)
    ]
    graphed = [case for case in choose(["speech"]) if case.length in GRAPHED]
    figures += [(case, "CUDA graph", "forward+backward", "ms", partial(replay_time, case)) for case in graphed]
    for case, variant, direction, unit, work in [*figures[: options.most], *figures[-1:]] if options.most else figures:
        if time.monotonic() > deadline:
            report.skip(1)
            continue
        row: dict[str, Any] = {"case": str(case), "variant": variant, "direction": direction, "unit": unit}
        try:
            row |= {"value": work(), "status": "ok"}
        except Exception as error:
            row |= {"status": "failed", "message": in_one_line(error)}
        report.add(**row)
        report.say(f"  {case}, {variant} {direction}: {row.get('value', '-')} {unit}")
    report.done()


def host_time(case: Case, direction: str, method: str, number: int, times: int = 3) -> float:
    """Microseconds of the host for a step: the best of some times many in a row, which the GPU may still be at."""
    step = make_step(case, direction, method)
    step.run()
    seconds = []
    for _ in range(times):
        synchronize()
        started = time.perf_counter()
        for _ in range(number):
            step.run()
        seconds.append((time.perf_counter() - started) / number)
    return 1e6 * min(seconds)


def replay_time(case: Case) -> float:
    """Capture a call, compare the replay with it, and time the replay."""
    step = make_step(case, "forward+backward")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # as torch asks for: warm up beside the default stream
        for _ in range(3):
            step.run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step.run()
    eager = [result.clone() for result in step.run()]
    graph.replay()
    synchronize()
    if not all(torch.equal(one, other) for one, other in zip(captured, eager, strict=True)):
        raise AssertionError("the graph gives other bits")
    return timing.median(timing.step(graph.replay), "cuda")


def measure_before(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Times beside those of an earlier commit, if there is a checkout of it."""
    if not (BEFORE / "triton_relattn").is_dir():
        report.done(f"there is no {BEFORE}")
        return
    words = ("--shape", "b1,h1,n64", "--dtype", "bf16", "--seconds", "0") if options.most else BEFORE_WORDS
    command = [sys.executable, "-m", "bench", "compare", str(BEFORE), "speed", *words]
    stub = {"RELATTN_STUB": "1"} if options.stub else {}
    status, lines = report.run(command, deadline - time.monotonic(), **stub)
    report.skip(status is None)
    verdict = "ok" if status in (0, None) else "failed"
    report.add(case=f"beside {BEFORE.name}", status=verdict, message=lines[-1] if lines and verdict != "ok" else "")
    report.done()
