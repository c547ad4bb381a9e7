"""The open questions of the kernels' design, answered by whole steps: what may go, and what has to stay.

Each answer is a ratio of two times that were measured in turn, a limit for it, and what it decides on. Both ways of a question
are compared with each other first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

from bench.cases.attention import Case
from bench.cases.configurations import shown
from bench.cases.methods import METHODS, OURS, Function
from bench.measure import timing
from bench.report.rows import in_one_line
from triton_relattn.kernels.introspect import TileConfig, selection

from .kernels import Group, case_of, measure_groups, selected
from .report import Report

ROUNDS = 10
SPLITS = "triton_relattn.kernels.forward.number_of_splits"
Change = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Way:
    """One way to compute a case: what is different within, and who computes it, if not the operator."""

    name: str
    within: Change = nullcontext
    make: Callable[[Case], Function] = METHODS[OURS].make


@dataclass(frozen=True)
class Question:
    """The ratio is the time of the first way by that of the second; from limit on, the answer is ``above``."""

    text: str
    case: Case
    first: Way
    second: Way
    limit: float
    above: str
    below: str
    direction: str = "forward+backward"


def of_decoding() -> Iterator[Question]:
    """One query and many keys, by several programs per head or by one."""
    for length in (4096, 16384):
        case = Case(1, 8, length, 64, num_queries=1)
        alone = Way("one program", lambda: mock.patch(SPLITS, lambda *_, **__: 1))
        text = f"Do splits of the keys pay for decoding? N {length}"
        yield Question(text, case, alone, Way("splits"), 1.3, "yes: splits.py stays", "no: splits.py goes (144 lines)", "forward")


def of_rotation(best: dict[tuple[int, str], dict[str, TileConfig]]) -> Iterator[Question]:
    """Rows rotated in registers, or by a gather, each in the best configurations that were found."""
    for width, limit in ((64, 1.08), (128, 1.05)):
        gather, registers = (Way(name, _with_tiles(best.get((width, name), {}))) for name in ("gather", "registers"))
        for direction in ("forward", "forward+backward"):
            text = f"Is the rotation in registers worth its lines? width {width}, {direction}"
            above = "yes: tile/registers.py and band_registers.py stay"
            yield Question(text, case_of(width), gather, registers, limit, above, "no: they go (320 lines)", direction)


def _with_tiles(tiles: dict[str, TileConfig]) -> Change:
    select = selection.select

    def chosen(kernel: str, *call: Any, **others: Any) -> TileConfig:
        return tiles.get(kernel) or select(kernel, *call, **others)

    return lambda: mock.patch.object(selection, "select", chosen)


Q = "registers"
CANDIDATES: dict[tuple[str, int], tuple[TileConfig, ...]] = {
    ("forward", 64): (
        TileConfig(64, 64, 4, 1, "scores", Q, 128),
        TileConfig(128, 64, 8, 3, "scores", Q),
        *(TileConfig(64, 64, 4, stages, "scores", "gather") for stages in (1, 2)),
        TileConfig(128, 64, 8, 2, "scores", "gather"),
    ),
    ("forward", 128): (
        TileConfig(128, 64, 8, 2, "scores", Q),
        *(TileConfig(128, 64, 8, stages, "scores", "gather") for stages in (1, 2)),
        TileConfig(64, 64, 4, 1, "scores", "gather"),
    ),
    ("dkv", 64): (
        TileConfig(64, 64, 4, 2, "scores", Q),
        *(TileConfig(64, 64, 4, stages, "scores", "gather") for stages in (1, 2)),
    ),
    ("dkv", 128): (
        TileConfig(64, 64, 4, 1, "scores", Q),
        *(TileConfig(64, block_n, 4, 1, "scores", "gather") for block_n in (32, 64)),
    ),
}
"""Configurations beside the default, of the two kernels with a band of a full table."""


def rotation_groups(arch: str) -> list[Group]:
    every = []
    for (kernel, width), tiles in CANDIDATES.items():
        first = selected(kernel, case_of(width), True, arch)
        valid = [tile for tile in tiles if tile != first and tile.why_invalid(arch, True, kernel) is None]
        every.append(Group(kernel, case_of(width), True, (first, *valid)))
    return every


def best_of(group: Group, rows: Sequence[dict[str, Any]]) -> dict[str, TileConfig]:
    """Return the fastest configuration of each rotation."""
    timed = [(row["p50_ms"], tile) for tile, row in zip(group.tiles, rows, strict=True) if row.get("p50_ms")]
    found: dict[str, TileConfig] = {}
    for _, tile in sorted(timed, key=lambda each: each[0]):
        found.setdefault(tile.rotation, tile)
    return found


def under(change: Change, step: timing.Step) -> timing.Step:
    """The step within a change."""

    def run(function: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*given: Any) -> Any:
            with change():
                return function(*given)

        return changed

    return timing.Step(run(step.before), run(step.call))


def ask(question: Question) -> dict[str, Any]:
    """Time both ways in turn, and answer; a row."""
    inputs, d_out = question.case.inputs("cuda")
    every = []
    for way in (question.first, question.second):
        step = timing.steps(way.make(question.case), inputs, d_out, True)[question.direction]
        every.append(timing.Timed(way.name, question.direction, step=under(way.within, step)))
    first, second = (timed.step.run() for timed in every)
    apart = timing.distance(first, second)
    if not apart <= 2 * timing.TOLERANCE[question.case.dtype]:
        return {"status": "failed", "message": f"the two ways differ by {apart:.3g}"}
    timing.time_in_turn(every, "cuda", 0.0, ROUNDS, fewest=ROUNDS)
    times = [timing.percentiles(timed.milliseconds)["p50_ms"] for timed in every]
    ratio = times[0] / times[1]
    row = answer(question.text, question.direction, f"{every[0].method} by {every[1].method}", ratio, question.limit)
    message = question.above if ratio >= question.limit else question.below
    return {**row, "message": f"{message}; {times[0]:.3f} and {times[1]:.3f} ms"}


def answer(text: str, direction: str, what: str, ratio: float, limit: float) -> dict[str, Any]:
    return {
        "case": text,
        "direction": direction,
        "variant": what,
        "value": f"{ratio:.3f}",
        "unit": f"ratio, limit {limit}",
        "status": "ok",
    }


def measure_questions(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Ask all, the ones that decide most first; one that cannot be asked has failed."""
    _ask_all([partial(ask, each) for each in list(of_decoding())[: options.most]], report, deadline)
    best: dict[tuple[int, str], dict[str, TileConfig]] = {}
    for group, rows in measure_groups(rotation_groups(options.arch)[: options.most], options, report, deadline):
        for rotation, tile in best_of(group, rows).items():
            best.setdefault((group.case.head_dim, rotation), {})[group.kernel] = tile
            report.say(f"  best by {rotation}: {group.kernel}, width {group.case.head_dim}: {shown(tile)}")
    _ask_all([partial(ask, each) for each in list(of_rotation(best))[: options.most]], report, deadline)
    report.done()


def _ask_all(asked: Sequence[Callable[[], dict[str, Any]]], report: Report, deadline: float) -> None:
    for number, each in enumerate(asked):
        if time.monotonic() > deadline:
            report.left(len(asked) - number)
            return
        try:
            row = each()
        except Exception as error:
            row = {"case": str(getattr(each, "args", ["?"])[0])[:80], "status": "failed", "message": in_one_line(error)}
        report.add(**row)
        report.say(f"  {row['case']}: {row.get('value', '-')} ({row.get('variant', '')}): {row.get('message', '')}")
