"""The open questions of the kernels' design, answered in the first minutes on a GPU: what may go, and what has to stay.

Each answer is a ratio of times measured in turn, a limit for it, and the file or row that the answer decides on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from bench.cases.attention import Case
from bench.cases.configurations import shown
from bench.cases.methods import METHODS, OURS
from bench.measure import timing
from bench.report.text import table as text_table
from triton_relattn.kernels.introspect import TileConfig, launching

from .kernels import TINY, measure_group
from .measurements import host_time
from .report import Report
from .variants import Group, case_of, selected
from .workers import Lost, spread

Q = "registers"
SPILLS, NONE = TileConfig(64, 64, 4, 1, "scores", Q, 128), TileConfig(64, 64, 4, 2, "scores", Q, 168)
ROTATES, GATHERS = TileConfig(128, 64, 8, 2, "scores", Q), TileConfig(128, 64, 8, 2, "scores", "gather")
SPEECH = Case(32, 8, 200, 64)

Times = Mapping[tuple[str, str], float]
"""Milliseconds by kernel and configuration, and those of the host by what was measured."""


@dataclass(frozen=True)
class Question:
    """ratio: of the times, or None if they are not there. limit: above it the answer is the first, else the second."""

    text: str
    ratio: Callable[[Times], float]
    what: str
    limit: float
    above: str
    below: str


def questions(dq: str, from_ds: str) -> list[Question]:
    """All of them. dq, from_ds: the selected configurations of the two kernels that make the query's gradient."""
    return [
        Question(
            "Do spills hit L1?",
            lambda times: times["forward", shown(SPILLS)] / times["forward", shown(NONE)],
            "forward, width 64, with 224 bytes of spills by without",
            1.0,  # by the model of cycles 0.93 if they do, 1.41 if not
            "no: 64x64 w4 s2 r168 stays the forward's default in kernels/config/defaults.csv",
            "yes: 64x64 w4 s1 r128 takes its place in kernels/config/defaults.csv",
        ),
        Question(
            "Is the rotation in registers worth its lines?",
            lambda times: times["forward", shown(GATHERS)] / times["forward", shown(ROTATES)],
            "forward, width 64, by a gather as in minimal.py by in registers",
            1.1,
            "yes: kernels/tile/registers.py and band_registers.py stay",
            "no: kernels/tile/registers.py and band_registers.py go",
        ),
        Question(
            "Does the query's gradient from dS pay at width 64?",
            lambda times: times["dq", dq] / times["dq_from_ds", from_ds],
            "the dq kernel by dq_from_ds",
            1.1,
            "yes: kernels/bwd_dq_from_ds.py, delta.py and _core/residual.py stay",
            "no: kernels/bwd_dq_from_ds.py, delta.py and _core/residual.py go",
        ),
        Question(
            "Is the launch cache needed?",
            lambda times: times["host", "Triton's search"] / times["host", "launch cache"],
            "the host's time, forward and backward of speech of 200 frames, without by with",
            1.1,
            "yes: kernels/launching.py stays",
            "no: the cache in kernels/launching.py goes",
        ),
        Question(
            "Does the host decide for speech of 200 frames?",
            lambda times: times["host", "launch cache"] / times["gpu", "speech"],
            "the host's time by the GPU's, forward and backward",
            1.0,
            "yes: capture a CUDA graph (docs/torch.md)",
            "no",
        ),
    ]


def groups(arch: str, tiny: bool) -> Iterator[Group]:
    """The kernels and configurations that are timed."""
    case = TINY if tiny else case_of(64, "full")
    yield Group("forward", case, True, (SPILLS, NONE, ROTATES, GATHERS))
    for kernel in ("dq", "dq_from_ds"):
        yield Group(kernel, case, True, (selected(kernel, case_of(64, "full"), True, arch),))


def of_the_host(options: argparse.Namespace) -> dict[tuple[str, str], float]:
    """Milliseconds of a short call: of the host with and without the launch cache, and of the GPU."""
    case = replace(TINY, head_dim=64, dtype="bf16") if options.tiny else SPEECH
    inputs, d_out = case.inputs(options.device)
    step = timing.steps(METHODS[OURS].make(case), inputs, d_out, True)["forward+backward"]
    number, times = (1, 1) if options.tiny else (100, 3)
    found = {("host", "launch cache"): host_time(step, number, times, options.device)}
    with mock.patch.object(launching, "_run", None):  # JITFunction.run seems to be another: Triton searches
        found["host", "Triton's search"] = host_time(step, number, times, options.device)
    if options.device == "cuda":
        timed = timing.Timed(OURS, "forward+backward", step=step)
        timing.time_in_turn([timed], options.device, 0.0 if options.tiny else 0.3, 10)
        found["gpu", "speech"] = timing.percentiles(timed.milliseconds)["p50_ms"]
    return found


def measure_questions(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Time what the questions need, print the table, and keep a row for each."""
    arch = "sm_90" if options.tiny else options.arch
    times: dict[tuple[str, str], float] = {}
    every = list(groups(arch, options.tiny))

    def measured(group: Group) -> list[dict[str, Any]]:
        return measure_group(group, options.device, 0.0 if options.tiny else 0.6)

    for group, rows in spread(measured, every, 0, deadline):
        if isinstance(rows, Lost):
            report.fail(f"{group.kernel} kernel: {rows.reason}")
            continue
        for tile, row in zip(group.tiles, rows, strict=True):
            report.add_measured(row, f", {row['config']}")
            if row.get("p50_ms"):
                times[group.kernel, shown(tile)] = row["p50_ms"]
    times |= of_the_host(options)
    chosen = [shown(group.tiles[0]) for group in every[1:]]
    report.say(answers(questions(*chosen), times, report))


def answers(every: Sequence[Question], times: Times, report: Report) -> str:
    """The table of questions and answers; one that cannot be answered here says what is missing."""
    body = []
    for question in every:
        row = {"part": "questions", "case": question.text, "variant": question.what, "unit": "ratio", "status": "ok"}
        try:
            ratio = question.ratio(times)
            answer = question.above if ratio > question.limit else question.below
            row |= {"value": f"{ratio:.3f}", "message": answer}
        except KeyError as error:
            row |= {"message": f"not answered: there is no time of {', '.join(error.args[0])}"}
        report.add("checks.csv", row)
        body.append((question.text, question.what, row.get("value", "-"), f"{question.limit}", row["message"]))
    return text_table(("question", "time of", "ratio", "limit", "answer"), body)
