"""Times and peaks: calls beside lower bounds and beside what people use today, the host's time, layers, memory, CUDA graphs."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.cases.attention import BIAS, CLIPPED, DTYPES, GROUPS, Case, choose, gpu_cases
from bench.cases.methods import METHODS, OUR_METHODS, OURS
from bench.measure import timing
from bench.report import summary
from bench.report.rows import ROOT, in_one_line
from bench.verbs import memory, speed
from triton_relattn.kernels.tuning import Tuned, shown, tune
from triton_relattn.testing import Inputs

from .report import Report, kind, wrong_kinds
from .workers import Lost, spread

OURS_AND_BOUNDS = (*OUR_METHODS, "sdpa_flash", "sdpa_cudnn")
DENSE = (OURS, "shaw_gather", "gather", "skewing", "dense_bias", "sdpa_bias_cudnn", "sdpa_bias_efficient")
PEAKS = (*OUR_METHODS, "sdpa_flash", "gather", "dense_bias")
ROUNDS, LONG_ROUNDS, BASELINE_ROUNDS, LONG = 12, 6, 5, 8192
PATIENCE = 60.0  # seconds that a case may take
IN_A_LAYER = (OURS, "sdpa_flash", "sdpa_cudnn", "skewing")
LAYERS, LAYER_ROUNDS, HOST_ROUNDS = 4, 20, 100
TUNED, TRIED = 16, 8  # cases, and configurations of a kernel
HOST = Case(1, 2, 64, 64)
HOST_CASES = (HOST, HOST.without_table(), replace(HOST, rows=17), replace(HOST, terms=BIAS))
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
    left = [case for case in cases if not report.has_measured(str(case), methods)]
    report.say(f"  {len(cases) - len(left)} cases were measured before" * (len(left) < len(cases)))
    cases, rounds = left[: options.most], options.most or rounds
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
    report.say(f"\n{summary.of_verb('speed', report.measured.rows)}\n{done} of {len(cases)} cases")


measure_speed = partial(measure_all, gpu_cases(), OURS_AND_BOUNDS)
measure_baselines = partial(measure_all, choose(["dense"]), DENSE, rounds=BASELINE_ROUNDS)
measure_flex = partial(measure_all, GROUPS["flex"], (OURS, "flex_attention"), rounds=BASELINE_ROUNDS)


def measure_host(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """The least microseconds in which the host queues a small call, ours beside SDPA's."""
    for case in HOST_CASES[: options.most]:
        if time.monotonic() > deadline:
            report.skip(1)
            continue
        prepared = timing.prepare(case, (OURS, "sdpa_flash"), timing.DIRECTIONS, "cuda", {})
        timing.time_in_turn(prepared, "cuda", 0.0, options.most or HOST_ROUNDS, fewest=options.most or HOST_ROUNDS)
        for timed in prepared:
            value = 1e3 * min(timed.queued) if timed.queued else None
            report.add_figure(str(case), timed.direction, value, "us", timed.found["status"], variant=timed.method)


class Layer(torch.nn.Module):
    """A FastConformer's layer as Parakeet has it: half a feed-forward part, attention, convolution, half a feed-forward part."""

    def __init__(self, case: Case, attention: Callable[[Inputs], torch.Tensor], inputs: Inputs) -> None:
        super().__init__()
        self.case, self.attention, self.inputs = case, attention, inputs
        width, nn = case.heads * case.head_dim, torch.nn
        self.feed_forward = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
            for _ in range(2)
        )
        self.norm, self.project, self.merge = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.tables = nn.ParameterDict({name: nn.Parameter(table) for name, table in case.tables(inputs).items()})
        self.before = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GLU())
        self.convolution = nn.Conv1d(width, width, 9, padding=4, groups=width)
        self.after = nn.Sequential(nn.BatchNorm1d(width), nn.SiLU(), nn.Conv1d(width, width, 1))
        self.last_norm = nn.LayerNorm(width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(B, N, heads * head_dim), the same."""
        hidden = hidden + 0.5 * self.feed_forward[0](hidden)
        heads = self.project(self.norm(hidden)).unflatten(-1, (3, self.case.heads, self.case.head_dim)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        attended = self.attention(self.inputs._replace(query=query, key=key, value=value, **self.tables))
        hidden = hidden + self.merge(attended.transpose(1, 2).flatten(2))
        hidden = hidden + self.after(self.convolution(self.before(hidden).mT)).mT
        hidden = hidden + 0.5 * self.feed_forward[1](hidden)
        return self.last_norm(hidden)


def measure_layers(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """A training step of some of a Conformer's layers, forward and backward, with each way to compute its attention. Without
    relative positions SDPA does less, and pad, reshape and slice know tables that heads share alone."""
    (case,) = GROUPS["conformer"]
    case = replace(case, batch=1, heads=1) if options.stub else case
    shared = replace(case, terms=("rel_key",), per_head=False)
    timed = list[timing.Timed]()
    for name in IN_A_LAYER:
        computed = METHODS[name].case(shared if name == "skewing" else case)
        one = timing.Timed(name, "forward+backward", {"status": "ok"})
        timing.attempt(partial(_prepare_layers, one, computed), one.found)
        timed.append(one)
    timing.time_in_turn(timed, "cuda", max(0.0, deadline - time.monotonic()), options.most or LAYER_ROUNDS)
    for one in timed:
        value = timing.percentiles(one.milliseconds).get("p50_ms")
        report.add_figure(f"{LAYERS} layers, {case}", one.direction, value, "ms", one.found["status"], variant=one.method)


def _prepare_layers(timed: timing.Timed, case: Case) -> None:
    """Make the layers, and run a step, which warms up."""
    inputs = case.inputs("cuda")
    layers = [Layer(case, METHODS[timed.method].make(case), inputs) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers).to(inputs.query)
    hidden = torch.randn(case.batch, case.length, case.heads * case.head_dim, device="cuda", dtype=DTYPES[case.dtype])
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def run() -> None:
        torch.autograd.grad(model(hidden).square().mean(), parameters)

    timed.step = timing.step(run)
    timed.step.run()


def measure_tuned(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """The fastest tile sizes, kernel by kernel while there is time: rows of tuned.csv, a profile that nothing here reads."""

    class Late(Exception):
        """The time is over."""

    def hear(found: Tuned) -> None:
        report.add_figure(str(case), found.kernel, found.milliseconds, "ms", "ok", variant=shown(found.best), message=str(found))
        if time.monotonic() > deadline:
            raise Late

    for case in gpu_cases()[: options.most or TUNED]:
        inputs = case.inputs("cuda")
        arguments = case.tables(inputs) | case.options(inputs)
        try:
            most, path = options.most or TRIED, options.results / "tuned.csv"
            tune(*inputs[:3], **arguments, most=most, profile=path, report=hear)
        except Late:
            report.skip(1)
            return


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
    report.say(f"\n{summary.of_verb('memory', report.measured.rows)}\n{done} of {len(points)} peaks")


def measure_graphs(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Short calls in a CUDA graph: what is left without the host's time."""
    for case in [case for case in choose(["speech"]) if case.length in GRAPHED][: options.most]:
        if time.monotonic() > deadline:
            report.skip(1)
            continue
        try:
            report.add_figure(str(case), "forward+backward", replay_time(case), "ms", "ok", variant=OURS)
        except Exception as error:
            report.add_figure(str(case), "forward+backward", None, "ms", f"failed: {in_one_line(error)}", variant=OURS)


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
