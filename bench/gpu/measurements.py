"""Speed, memory, the host's time and a short search for configurations: the verbs of bench, within a deadline."""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from bench import tune
from bench.cases.attention import CLIPPED, DTYPES, Case, choose
from bench.cases.methods import METHODS, OF_OURS, OURS
from bench.measure import timing
from bench.measure.processes import processes
from bench.report import summary
from bench.report.rows import Table, in_one_line
from bench.verbs import memory, speed
from triton_relattn import testing
from triton_relattn.check import judge
from triton_relattn.kernels.introspect import planning, selection

from .checks import OURS as WITH_LSE
from .report import Report, synchronize
from .workers import Lost, spread

SECONDS_A_CASE = 3.0
SLOW_TO_START = ("flex_attention", "disentangled_flash", "flashdeberta")
PEAKS = (*OF_OURS, "gather", "dense_bias")
TINY = [Case(1, 1, 45, 16, True, dtype="fp16"), Case(1, 1, 60, 16, False, 9, dtype="fp16")]
TINY_SPEED = [*TINY, Case(1, 2, 40, 16, bias=True, dtype="fp16")]
CHECKED_LENGTHS = (1040, 1030)
"""Of calls that stand for longer ones, which the same kernels compute: divisible by 16, as Triton likes it, and not."""
WORKSPACES = (256 << 20, 512 << 20, 1 << 30)
GRAPHED = (200, 500)  # lengths of speech, where the host takes longer than the GPU


def speed_cases() -> list[Case]:
    """The most telling ones first."""
    long, speech = choose(["long"]), choose(["speech"])
    return [*long[:8], *speech[:4], *choose(["inkling"]), *long[8:16], *speech[4:], *choose(["deberta"]), *long[16:]]


def with_biases(cases: Sequence[Case]) -> list[Case]:
    """The cases, and behind the first ones those of a bias alone, for which there is no prediction."""
    return [*cases[:8], *choose(["t5"]), *cases[8:]]


def _options(options: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    """Return the options of the verbs."""
    usual = {"methods": list(METHODS), "directions": [*timing.DIRECTIONS, *timing.PARTS], "seconds": SECONDS_A_CASE}
    usual |= {"no_verify": True, "memory_limit": 4 << 30} | ({"seconds": 0.0} if options.tiny else {})
    return argparse.Namespace(**{**vars(options), **usual, **changes})


def small(case: Case) -> Case:
    """A short call of the same kind, which the same machine code serves."""
    length = CHECKED_LENGTHS[case.length % 16 != 0]
    return case.resized(min(case.length, length), batch=min(2, case.batch), group="")


@functools.cache
def problems_of(case: Case, has_table: bool, device: str) -> str:
    """Return what the error rule of the tests says of a call, forward and backward, normal and sharp; nothing if it holds."""
    problems = []
    arguments: dict[str, Any] = {"is_causal": case.is_causal, "enable_gqa": case.key_heads is not None}
    arguments |= {"positions": case.positions} if has_table else {}
    for sharp in (False, True):
        inputs = testing.make_inputs(
            *(case.batch, case.heads, case.length, case.length, case.head_dim),
            num_rows=case.num_rows if has_table else None,
            key_heads=case.key_heads,
            rel_width=case.rel_dim if has_table else None,
            rel_p2c=case.p2c and has_table,
            rel_key=not case.bias,
            rel_bias=case.bias and has_table,
            per_head=case.bias,
            dtype=DTYPES[case.dtype],
            device=device,
            seed=1,
            sharp=sharp,
        )
        row = judge(testing.forward_backward(WITH_LSE, inputs, **arguments), inputs, arguments)
        problems += [f"{'sharp: ' * sharp}{row['message']}"] if row["status"] != "ok" else []
    return " | ".join(problems)


def verified(case: Case, device: str) -> dict[str, str]:
    """Return what is wrong with a case with the table, and without; nothing of what is right."""
    found = {}
    for name, has_table in ((OURS, True), ("plain", False)):
        try:
            found[name] = problems_of(small(case), has_table, device)
        except Exception as error:
            found[name] = in_one_line(error)
    return {name: problem for name, problem in found.items() if problem}


def _compile(case: Case, device: str) -> str:
    """Run a case in a process that times nothing: what is compiled is then in caches on disk."""
    for name in OF_OURS:
        inputs, d_out = case.inputs(device)
        for step in timing.steps(METHODS[name].make(case), inputs, d_out, METHODS[name].has_table).values():
            step.run()
    verified(case, device)
    synchronize(device)
    return ""


def measure_case(
    item: tuple[Case, Sequence[str], dict[str, str]], options: argparse.Namespace
) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return what is wrong with a case, and its rows, of which each says whether the case is right."""
    case, methods, not_tried = item
    wrong = verified(case, options.device)
    rows = speed.measure(case, _options(options, methods=methods), not_tried)
    for row in rows:
        is_wrong = row["method"] in wrong or (row["method"] not in OF_OURS and OURS in wrong)
        row["verified"] = "no" if is_wrong else "yes"
    return wrong, rows


def _measure_cases(
    part: str, every: Sequence[tuple[Case, Sequence[str]]], options: argparse.Namespace, report: Report, deadline: float
) -> int:
    """Rows of all cases until the deadline; how many there was time for."""
    failures, done, first = speed.Failures(), 0, len(report.measured.rows)

    def items() -> Iterator[tuple[Case, Sequence[str], dict[str, str]]]:
        for case, methods in every:
            yield case, methods, dict(failures.of(case))

    measure = partial(measure_case, options=argparse.Namespace(**{k: v for k, v in vars(options).items() if k != "raw"}))
    for (case, methods, _), found in spread(measure, items(), min(1, options.jobs), deadline):
        done += 1
        if isinstance(found, Lost):
            report.fail(f"{case}, {', '.join(methods)}: {found.reason}")
            continue
        wrong, rows = found
        for name, problem in wrong.items():
            row = {"part": part, "case": str(case), "variant": name, "status": "FAILED", "message": problem[:500]}
            report.add("checks.csv", row)
        failures.remember(case, rows)
        for row in rows:
            report.add_measured(row)
    report.say(summary.speed([row for row in report.measured.rows[first:] if row["direction"] in timing.DIRECTIONS]))
    return done


def measure_speed(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """All methods in turn; of ours also parts of the backward, of which each of its kernels' share can be told."""
    methods = [name for name in METHODS if name not in SLOW_TO_START]
    every = [(case, methods) for case in (TINY_SPEED if options.tiny else with_biases(speed_cases()))]
    if options.jobs > 1:
        started = time.monotonic()
        cases = [case for case, _ in every]
        until = started + 0.4 * (deadline - started)
        for case, problem in spread(partial(_compile, device=options.device), cases, options.jobs, until):
            if isinstance(problem, Lost):
                report.say(f"  compiling for {case}: {problem.reason}")
        report.say(f"speed: {time.monotonic() - started:.0f} s to compile")
    done = _measure_cases("speed", every, options, report, deadline)
    report.left(not done)  # there are always more
    report.done(f"{done} of {len(every)} cases")


def measure_flex(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """FlexAttention and the peers: each case by itself, since it compiles long, takes gigabytes, and may end its process."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    cases = (
        TINY_SPEED[::2]
        if options.tiny
        else [*choose(["long"])[:2], *choose(["t5"])[:1], *choose(["inkling"]), *choose(["deberta"]), *choose(["speech"])[:1]]
    )
    done = sum(_measure_cases("flex", [(case, SLOW_TO_START)], options, report, deadline) for case in cases)
    report.left(not done)
    report.done(f"{done} of {len(cases)} cases")


def measure_memory(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Peaks against the length, until the methods fail, and past that."""
    every = TINY[:1] if options.tiny else [*choose(["memory"]), *(replace(case, rows=CLIPPED) for case in choose(["memory"]))]
    first = len(report.measured.rows)
    failures = {direction: speed.Failures() for direction in memory.DIRECTIONS}
    for case in sorted(every, key=lambda case: case.length):
        for method in PEAKS[:1] if options.tiny else PEAKS:
            for direction in memory.DIRECTIONS:
                if time.monotonic() < deadline:
                    row = memory.measure(case, method, direction, _options(options), failures[direction].of(case))
                    row["verified"] = "no" if verified(case, options.device) else "yes"
                    failures[direction].remember(case, [row])
                    report.add_measured(row)
                else:
                    report.left(1)
    report.say(summary.memory(report.measured.rows[first:]))


def measure_workspaces(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """The backward of long calls with workspaces of several sizes: larger ones have fewer parts."""
    every = TINY[:1] if options.tiny else [Case(1, 32, 8192, 64), Case(1, 32, 16384, 64), Case(1, 16, 16384, 128)]
    for case, size in itertools.product(every, WORKSPACES):
        name = f"workspace of {size >> 20} MiB"
        row = {"part": "workspaces", "case": str(case), "variant": name, "direction": "backward", "unit": "ms"}
        if time.monotonic() > deadline:
            report.left(1)
            continue
        try:
            with mock.patch.dict(os.environ, {planning.VARIABLE: str(size)}):
                inputs, d_out = case.inputs(options.device)
                step = timing.steps(METHODS[OURS].make(case), inputs, d_out, True)["backward"]
                step.run()
                timed = timing.Timed(OURS, "backward", step=step)
                timing.time_in_turn([timed], options.device, 0.0 if options.tiny else 0.7, 10)
            row |= {"value": f"{timing.percentiles(timed.milliseconds)['p50_ms']:.4g}", "status": "ok"}
        except Exception as error:
            row |= {"status": "error", "message": in_one_line(error)}
        report.add("checks.csv", row)
        report.say(f"workspaces: {case}, {name}: {row.get('value', '-')} ms")


def graphs(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Forward and backward of short calls, captured in a CUDA graph and replayed: what is left without the host's time."""
    speech = [] if options.tiny else [case for case in choose(["speech"]) if case.length in GRAPHED]
    for case in TINY[:1] if options.tiny else speech:
        row = {"part": "graphs", "case": str(case), "variant": OURS, "direction": "forward+backward", "unit": "ms"}
        if time.monotonic() > deadline or options.device != "cuda":
            report.left(options.device == "cuda")
            continue
        try:
            inputs, d_out = case.inputs(options.device)
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
            synchronize(options.device)
            wrong = any(not torch.equal(one, other) for one, other in zip(captured, eager, strict=True))
            replay = timing.Step(lambda: None, lambda _, graph=graph: (graph.replay(), ())[1])  # type: ignore[misc]
            timed = timing.Timed(OURS, "forward+backward", step=replay)
            timing.time_in_turn([timed], options.device, 0.0 if options.tiny else 0.5, 20)
            milliseconds = timing.percentiles(timed.milliseconds)["p50_ms"]
            row |= {"value": f"{milliseconds:.4g}", "status": "FAILED" if wrong else "ok", "message": "other bits" * wrong}
        except Exception as error:
            row |= {"status": "error", "message": in_one_line(error)}
        report.add("checks.csv", row)
        report.say(f"graphs: {case}: {row.get('value', '-')} ms replayed")


def host(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Microseconds of the host for a call whose work is nothing: the best of three times many calls in a row."""
    number, times = (1, 1) if options.tiny else (200, 3)
    case = TINY[1] if options.device == "cpu" else replace(TINY[1], head_dim=64, dtype="bf16")
    inputs, d_out = case.inputs(options.device)
    for method in (OURS, "plain", "sdpa"):
        steps = timing.steps(METHODS[method].make(case), inputs, d_out, METHODS[method].has_table)
        for direction in memory.DIRECTIONS:
            row = {"part": "host", "case": str(case), "variant": method, "direction": direction, "unit": "microseconds"}
            if time.monotonic() < deadline:
                row |= _host_row(steps[direction], number, times, options.device)
                report.add("checks.csv", row)
                report.say(f"host: {method} {direction}: {row.get('value', '-')} us a call")
            else:
                report.left(1)


def host_time(step: timing.Step, number: int, times: int, device: str) -> float:
    """Milliseconds of the host for a step: the best of some times many in a row, which the GPU may still be at."""
    step.run()
    seconds = []
    for _ in range(times):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(number):
            step.run()
        seconds.append((time.perf_counter() - started) / number)
    return 1e3 * min(seconds)


def _host_row(step: timing.Step, number: int, times: int, device: str) -> dict[str, str]:
    try:
        return {"value": f"{1e3 * host_time(step, number, times, device):.1f}", "status": "ok"}
    except Exception as error:
        return {"status": "error", "message": in_one_line(error)}


def _as_they_are(_: object, tiles: Sequence[selection.TileConfig]) -> list[dict[str, Any]]:
    """In the interpreter nothing is compiled: all configurations can be timed."""
    return [{"status": "ok", "instructions_per_score": 0.0} for _ in tiles]


def search(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """The best configurations of the main cases, for the profile."""
    every = TINY[:1] if options.tiny else [*choose(["long"])[:4], *choose(["speech"])[:2], *choose(["inkling"])]
    profile, timed = report.folder / "profile.csv", 2 if options.tiny else 6
    of_search = _options(options, timed=timed, seconds=0.0 if options.tiny else 1.0, profile=profile)
    results = Table(tune.COLUMNS, report.stamp, report.raw / "tune.csv", append=True)
    tasks, done = tune.unknown(tune.tasks_of(every, selection.KERNELS, options.arch), of_search.profile), 0
    with processes(max(1, options.jobs)) as compile_all:
        for task in tasks:
            if time.monotonic() < deadline:
                tune.tune(task, of_search, compile_all if options.device == "cuda" else _as_they_are, results)
                report.outcome.rows, done = report.outcome.rows + 1, done + 1
    report.say(tune.summary(results.rows))
    report.left(bool(tasks) and not done)  # there are always more
    report.done(f"{done} of {len(tasks)} kernels")
