"""Speed, memory, the host's time and a short search for configurations: the verbs of bench, within a deadline."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from bench import memory, speed, summary, timing, tune
from bench.cases import CLIPPED, Case, choose
from bench.methods import METHODS, OURS
from bench.processes import processes
from bench.rows import Table, in_one_line
from triton_relattn.kernels import configs

from .report import Report, spread, synchronize

SECONDS_A_CASE, FIRST_CASES = 3.0, 4
SLOW_TO_START = ("flex_attention", "disentangled_flash", "flashdeberta")
OURS_ALONE = (OURS, "plain")
PEAKS = (*OURS_ALONE, "gather", "dense_bias", "flex_attention")
TINY = [Case(1, 1, 45, 16, True, dtype="fp16"), Case(1, 1, 60, 16, False, 9, dtype="fp16")]


def _speed_cases() -> list[Case]:
    """The most telling ones first."""
    long, speech = choose(["long"]), choose(["speech"])
    return [*long[:8], *speech[:4], *choose(["inkling"]), *long[8:16], *speech[4:], *choose(["deberta"]), *long[16:]]


def _options(options: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    """Those of the verbs. Numbers are verified if the part "correctness" has run before and nothing has failed."""
    usual = {"methods": list(METHODS), "directions": list(timing.DIRECTIONS), "seconds": SECONDS_A_CASE}
    usual |= {"no_verify": not options.verified, "memory_limit": 4 << 30} | ({"seconds": 0.0} if options.tiny else {})
    return argparse.Namespace(**{**vars(options), **usual, **changes})


def _methods_for(case: Case, number: int) -> list[str]:
    """All of them for the first cases and for those that others report; FlexAttention and the peers compile or search long."""
    everyone = number < FIRST_CASES or case.group in ("inkling", "deberta")
    return [name for name in METHODS if everyone or name not in SLOW_TO_START]


def _compile(item: tuple[Case, list[str]], device: str) -> str:
    """Run a case in a process that times nothing: what is compiled is then in caches on disk. Returns what went wrong."""
    case, methods = item
    try:
        for name in (*OURS_ALONE, "flex_attention"):
            if name in methods and METHODS[name].why_not(case, device) is None:
                inputs, d_out = case.inputs(device)
                for step in timing.steps(METHODS[name].make(case), inputs, d_out, METHODS[name].has_table).values():
                    step.run()
        synchronize(device)
    except Exception as error:
        return in_one_line(error)
    return ""


def measure_speed(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """All methods in turn; of ours also parts of the backward, of which each of its kernels' share can be told."""
    every = [(case, _methods_for(case, number)) for number, case in enumerate(TINY if options.tiny else _speed_cases())]
    started, done = time.monotonic(), 0
    if options.jobs > 1:
        for (case, _), problem in spread(partial(_compile, device=options.device), every, options.jobs, (started + deadline) / 2):
            if problem:
                report.say(f"  compiling for {case}: {problem}")
        report.say(f"speed: {time.monotonic() - started:.0f} s to compile")
    failures = speed.Failures()
    first = len(report.measured.rows)
    for case, methods in every:
        if time.monotonic() > deadline:
            break
        rows = speed.measure(case, _options(options, methods=methods), failures.of(case))
        parts = speed.measure(case, _options(options, methods=OURS_ALONE, directions=list(timing.PARTS)), {})
        failures.remember(case, rows)
        for row in rows + parts:
            report.add_measured(row)
        done += 1
    report.say(summary.speed([row for row in report.measured.rows[first:] if row["direction"] in timing.DIRECTIONS]))
    report.say(f"speed: {done} of {len(every)} cases")


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
                    failures[direction].remember(case, [row])
                    report.add_measured(row)
    report.say(summary.memory(report.measured.rows[first:]))


def host(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Microseconds of the host for a call whose work is nothing: the best of three times many calls in a row."""
    number, times = (1, 1) if options.tiny else (200, 3)
    case = replace(TINY[1], dtype="fp16" if options.device == "cpu" else "bf16")
    inputs, d_out = case.inputs(options.device)
    for method in (OURS, "plain", "sdpa"):
        steps = timing.steps(METHODS[method].make(case), inputs, d_out, METHODS[method].has_table)
        for direction in memory.DIRECTIONS:
            row = {"part": "host", "case": str(case), "variant": method, "direction": direction, "unit": "microseconds"}
            if time.monotonic() < deadline:
                row |= _host_time(steps[direction], number, times, options.device)
                report.add("checks.csv", row)
                report.say(f"host: {method} {direction}: {row.get('value', '-')} us a call")


def _host_time(step: timing.Step, number: int, times: int, device: str) -> dict[str, str]:
    try:
        step.run()
        seconds = []
        for _ in range(times):
            synchronize(device)
            started = time.perf_counter()
            for _ in range(number):
                step.run()
            seconds.append((time.perf_counter() - started) / number)
    except Exception as error:
        return {"status": "error", "message": in_one_line(error)}
    return {"value": f"{1e6 * min(seconds):.1f}", "status": "ok"}


def _as_they_are(_: object, tiles: Sequence[configs.TileConfig]) -> list[dict[str, Any]]:
    """In the interpreter nothing is compiled: all configurations can be timed."""
    return [{"status": "ok", "instructions_per_score": 0.0} for _ in tiles]


def search(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """The best configurations of the main cases, for the profile."""
    every = TINY[:1] if options.tiny else [*choose(["long"])[:4], *choose(["speech"])[:2], *choose(["inkling"])]
    profile, timed = report.folder / "profile.json", 2 if options.tiny else 6
    of_search = _options(options, timed=timed, seconds=0.0 if options.tiny else 1.0, profile=profile)
    results = Table(tune.COLUMNS, report.stamp, report.raw / "tune.csv", append=True)
    tasks, done = tune.unknown(tune.tasks_of(every, configs.KERNELS, options.arch), of_search.profile), 0
    with processes(options.jobs) as compile_all:
        for task in tasks:
            if time.monotonic() < deadline:
                tune.tune(task, of_search, compile_all if options.device == "cuda" else _as_they_are, results)
                done += 1
    report.say(tune.summary(results.rows))
    report.say(f"tune: {done} of {len(tasks)} kernels")
