"""Times and peaks: calls beside lower bounds and beside what people use today, memory, CUDA graphs."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
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
BEFORE_OPTIONS = ("--cases", "long,speech", "--lengths", "4096,1024,500", "--seconds", "1")


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
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    cases, rounds = cases[: options.most], options.most or rounds
    failures, done = speed.Failures(), 0
    shared = argparse.Namespace(state=options.state, device="cuda", methods=methods, rounds=rounds, no_verify=False)
    too_large = {"shaw_gather": "not tried: takes N^2 D numbers"}
    items = ((case, failures.reasons(case) | (too_large if case.length > 1024 else {})) for case in cases)
    for (case, _), rows in spread(partial(measure_case, options=shared), items, min(1, options.jobs), deadline, PATIENCE):
        done += 1
        if isinstance(rows, Lost):
            report.fail({"case": case, "status": rows.reason})
            continue
        failures.remember(case, rows)
        for row in rows:
            report.add_measured(row)
    report.skip(len(cases) - done)
    report.say(f"\n{summary.speed(report.measured.rows)}\n{done} of {len(cases)} cases")


measure_speed = partial(measure_all, gpu_cases(), OURS_AND_BOUNDS)
measure_baselines = partial(measure_all, choose(["dense"]), DENSE, rounds=BASELINE_ROUNDS)
measure_flex = partial(measure_all, GROUPS["flex"], (OURS, "flex_attention"), rounds=BASELINE_ROUNDS)


def measure_memory(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Peaks against the length, until the methods fail, and past that."""
    cases = choose(["memory"])
    ladder = sorted([*cases, *(replace(case, rows=CLIPPED) for case in cases)], key=lambda case: case.length)[: options.most]
    points, done = memory.choose_points(ladder, PEAKS), 0
    rows = memory.measure(points, argparse.Namespace(device="cuda", no_verify=False))
    while done < len(points) and time.monotonic() < deadline:
        report.add_measured(next(rows))
        done += 1
    report.skip(len(points) - done)
    report.say(f"\n{summary.memory(report.measured.rows)}\n{done} of {len(points)} peaks")


def measure_graphs(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Short calls in a CUDA graph: what is left without the host's time."""
    for case in [case for case in choose(["speech"]) if case.length in GRAPHED][: options.most]:
        if time.monotonic() > deadline:
            report.skip(1)
            continue
        row: dict[str, Any] = {"case": str(case), "direction": "forward+backward", "unit": "ms"}
        try:
            row |= {"value": replay_time(case), "status": "ok"}
        except Exception as error:
            row |= {"status": "failed", "message": in_one_line(error)}
        report.add(**row)
        report.say(f"  {case}: {row.get('value', '-')} ms")


def replay_time(case: Case) -> float:
    """Capture a call, compare the replay with it, and time the replay, in milliseconds."""
    step = timing.steps(case, METHODS[OURS].make(case), case.inputs("cuda"))["forward+backward"]
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
    torch.cuda.synchronize()
    if not all(torch.equal(one, other) for one, other in zip(captured, eager, strict=True)):
        raise AssertionError("the graph gives other bits")
    timed = timing.Timed("", "", step=timing.step(graph.replay))
    timing.time_in_turn([timed], "cuda", 0.5, 20)
    return float(timing.percentiles(timed.milliseconds)["p50_ms"])


def measure_before(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Times beside those of an earlier commit, if there is a checkout of it."""
    if not (BEFORE / "triton_relattn").is_dir():
        report.leave_out(f"there is no {BEFORE}")
        return
    compared = ("--shape", "b1,h1,n64", "--dtype", "bf16", "--seconds", "0") if options.most else BEFORE_OPTIONS
    command = [sys.executable, "-m", "bench", "compare", str(BEFORE), "speed", *compared]
    status, lines = report.run(command, deadline - time.monotonic(), **({"RELATTN_STUB": "1"} if options.stub else {}))
    report.skip(status is None)
    verdict = "ok" if status in (0, None) else "failed"
    report.add(case=f"beside {BEFORE.name}", status=verdict, message=lines[-1] if lines and verdict != "ok" else "")
