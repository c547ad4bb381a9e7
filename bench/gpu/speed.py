"""Time of whole calls, ours beside lower bounds and beside what people use today; a table and a figure per width."""

from __future__ import annotations

import argparse
import os
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from bench.cases.attention import CLIPPED, Case, choose
from bench.cases.methods import METHODS, OF_OURS, OURS
from bench.measure import timing
from bench.report.text import table as text_table
from bench.verbs import speed

from .checks import launched
from .report import Report, State, kind_of, synchronize
from .workers import Lost, spread

OURS_AND_BOUNDS = (*OF_OURS, "sdpa_flash", "sdpa_cudnn")
DENSE = (OURS, "shaw_gather", "gather", "skewing", "dense_bias", "sdpa_bias_cudnn", "sdpa_bias_efficient")
FLEX = (OURS, "flex_attention")
ROUNDS, ROUNDS_OF_LONG, ROUNDS_OF_BASELINES, LONG = 12, 6, 5, 8192
PATIENCE = 60.0  # seconds that a case may take


def speed_cases() -> list[Case]:
    """The most telling ones first: what time is left for decides how far it goes."""
    long, speech = choose(["long"]), [case for case in choose(["speech"]) if case.length in (200, 500)]
    return [
        *long[:8],
        *speech[:2],
        *choose(["t5"]),
        *long[8:16],
        *speech[2:],
        *long[16:],
        *choose(["deberta"]),
        *choose(["inkling"]),
    ]


def baseline_cases() -> list[Case]:
    """Two lengths. Of 4,096 only two sequences: the dense tensors of four have 2^31 elements, which some backends refuse."""
    sizes = ((16, 1024), (2, 4096))
    every = [Case(batch, 32, length, 64, bias=bias, group="dense") for bias in (False, True) for batch, length in sizes]
    return [every[1], every[3], every[0], every[2], Case(16, 16, 1024, 128, True, group="dense")]


def flex_cases() -> list[Case]:
    """FlexAttention captures Q E^T: of 4,096 positions with a row per distance no more than 64 heads, or it has over 2^31
    elements."""
    return [Case(4, 16, 4096, 128), Case(4, 32, 4096, 64, False, CLIPPED), Case(8, 32, 2048, 64, bias=True)]


@contextmanager
def sampled_clocks() -> Iterator[dict[str, float]]:
    """Sample the clock of the multiprocessors and the power while something is timed; medians, if nvidia-ml-py is there."""
    found: dict[str, float] = {}
    samples: list[tuple[int, int]] = []
    is_over = threading.Event()

    def sample() -> None:
        try:
            while not is_over.wait(0.05):
                samples.append((torch.cuda.clock_rate(), torch.cuda.power_draw()))
        except Exception:  # there is no nvidia-ml-py, or the driver does not tell
            return

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield found
    finally:
        is_over.set()
        sampler.join()
        if samples:
            clocks, powers = zip(*samples, strict=True)
            found |= {"sm_mhz": statistics.median(clocks), "power_w": statistics.median(powers) / 1e3}


def measure_case(item: tuple[Case, dict[str, str]], options: argparse.Namespace) -> tuple[set[str], list[dict[str, Any]]]:
    """The kernels that ran and the rows of a case. Directions of ours that a check found to be wrong are not timed."""
    case, not_tried = item
    state = State(options.state)
    wrong = {name: state.wrong_directions(kind_of(case, METHODS[name].has_table)) for name in OF_OURS}
    peak = state.get("matrix_peak")
    rounds = min(options.rounds, ROUNDS_OF_LONG) if case.length >= LONG else options.rounds
    with launched() as kernels:
        every = timing.prepare(case, options.methods, timing.DIRECTIONS, "cuda", not_tried)
        for timed in every:
            if timed.is_ok and timed.direction in wrong.get(timed.method, ()):
                timed.found["status"] = "wrong: see the checks"
        with sampled_clocks() as clocks:
            timing.time_in_turn(every, "cuda", 0.0, rounds, fewest=rounds)
    rows = speed.rows_of(case, every, options)
    for row in rows:
        is_wrong = row["direction"] in wrong[OURS if METHODS[row["method"]].has_table else "plain"]
        row["verified"] = "no" if is_wrong or row["status"].startswith("wrong") or not state.has_checks else "yes"
        if row.get("p50_ms"):
            row |= clocks | ({"of_peak": row["tflops"] / peak} if peak else {})
    return kernels, rows


def measure_all(
    cases: Sequence[Case],
    methods: Sequence[str],
    options: argparse.Namespace,
    report: Report,
    deadline: float,
    rounds: int = ROUNDS,
    not_tried: Callable[[Case], dict[str, str]] = lambda case: {},
) -> None:
    """Rows of all cases until the deadline, each written when it is there; in a process of their own, which may end."""
    cases, rounds = cases[: options.most], options.most or rounds
    failures, done = speed.Failures(), 0
    known = argparse.Namespace(state=options.state, device="cuda", methods=methods, rounds=rounds, no_verify=False)
    items = ((case, failures.of(case) | not_tried(case)) for case in cases)
    for (case, _), found in spread(partial(measure_case, options=known), items, min(1, options.jobs), deadline, PATIENCE):
        done += 1
        if isinstance(found, Lost):
            report.fail(f"{case}: {found.reason}")
            continue
        kernels, rows = found
        report.state.note_kernels("timed", kernels)
        failures.remember(case, rows)
        for row in rows:
            report.add_measured(row)
    report.left(len(cases) - done)
    report.done(f"{done} of {len(cases)} cases")


def measure_speed(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Ours with the term and without, and SDPA without one by FlashAttention and cuDNN."""
    measure_all(speed_cases(), OURS_AND_BOUNDS, options, report, deadline)
    for width in (64, 128):
        report.say(f"\n{table_of(report.measured.rows, width)}")


def measure_baselines(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """What people write today in plain torch, and SDPA with a dense bias."""

    def not_tried(case: Case) -> dict[str, str]:
        return {"shaw_gather": "not tried: takes N^2 D numbers"} if case.length > 1024 else {}

    measure_all(baseline_cases(), DENSE, options, report, deadline, ROUNDS_OF_BASELINES, not_tried)


def measure_flex(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """FlexAttention, which compiles long and takes gigabytes."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    measure_all(flex_cases(), FLEX, options, report, deadline, ROUNDS_OF_BASELINES)


def compile_flex(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Compile what measure_flex times, while something else needs the time: it is then in inductor's cache."""
    for case, problem in spread(_compile, flex_cases()[: options.most], min(3, options.jobs), deadline, PATIENCE):
        if isinstance(problem, Lost):
            report.say(f"  {case}: {problem.reason}")
    report.done()


def _compile(case: Case) -> str:
    inputs, d_out = case.inputs("cuda")
    timing.steps(METHODS["flex_attention"].make(case), inputs, d_out, True)["forward+backward"].run()
    synchronize()
    return ""


def table_of(rows: Sequence[dict[str, Any]], width: int) -> str:
    """A line per case and direction of a width: time, TFLOP/s as FlashAttention counts them, their share of the measured
    peak of matrix products, and how many times as long ours takes as the lower bounds."""
    times = {
        (row["case"], row["direction"], row["method"]): row
        for row in rows
        if (row["verb"], row["head_dim"]) == ("speed", width) and row.get("p50_ms")
    }
    body = []
    for (case, direction, method), row in times.items():
        if method == OURS:
            milliseconds = [float(row[f"p{percent}_ms"]) for percent in (50, 20, 80)]
            bounds = [times.get((case, direction, bound)) for bound in OURS_AND_BOUNDS[1:]]
            ratios = [f"{milliseconds[0] / float(bound['p50_ms']):.2f}" if bound else "-" for bound in bounds]
            share = f"{float(row['of_peak']):.0%}" if row.get("of_peak") else "-"
            shown = "{:.3g} ({:.3g}-{:.3g})".format(*milliseconds)
            body.append((case, direction, shown, f"{float(row['tflops']):.0f}", share, *ratios))
    head = ("case", "direction", "ms (p20-p80)", "TFLOP/s", "of peak", *(f"by {bound}" for bound in OURS_AND_BOUNDS[1:]))
    return text_table(head, body) if body else ""
