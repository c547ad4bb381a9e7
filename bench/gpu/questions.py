"""The open questions of the kernels' design, answered by whole steps: what may go, and what has to stay.

Each answer is a ratio of two times that were measured in turn, a limit for it, and what it decides on. Both ways of a question
are compared with each other first.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from bench.cases.attention import CLIPPED, Case, CaseTensors
from bench.cases.configurations import shown
from bench.cases.methods import METHODS, OURS, Function
from bench.measure import timing
from bench.report.rows import in_one_line
from triton_relattn import fused_relative_attention_varlen
from triton_relattn._core import residual
from triton_relattn.kernels.introspect import TileConfig, launching, selection

from .kernels import Group, case_of, measure_groups, selected
from .report import Report
from .rest import host_time

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


def from_ds(queries: int) -> Change:
    """Let calls with so many queries and more have their query's gradient from stored dS."""
    return lambda: mock.patch.object(residual, "FEWEST_QUERIES", queries)


def written_out(case: Case) -> Function:
    """The same with a clipped table that is written out, one row per distance, as the way from dS needs it so far."""
    full = replace(case, rows=None)

    def run(inputs: CaseTensors) -> torch.Tensor:
        beyond = case.length - 1 - case.num_rows // 2
        ends = [inputs.table[..., :1, :].expand(beyond, -1), inputs.table, inputs.table[..., -1:, :].expand(beyond, -1)]
        return METHODS[OURS].make(full)(inputs._replace(table=torch.cat(ends)))

    return run


def packed(case: Case) -> Function:
    """The same sequences one after the other, as the operator for packed ones takes them."""

    def run(inputs: CaseTensors) -> torch.Tensor:
        query, key, value = (each.transpose(1, 2).flatten(0, 1) for each in inputs[:3])
        starts = torch.arange(case.batch + 1, dtype=torch.int32, device=query.device) * case.length
        sizes: dict[str, Any] = {"max_seqlen_q": case.length, "max_seqlen_k": case.length, "positions": case.positions}
        out = fused_relative_attention_varlen(
            query, key, value, inputs.table, cu_seqlens_q=starts, cu_seqlens_k=starts, is_causal=case.is_causal, **sizes
        )
        return out.unflatten(0, (case.batch, case.length)).transpose(1, 2)

    return run


def of_the_query() -> Iterator[Question]:
    """The query's gradient by its own kernel, or from stored dS, with the residual and delta that this takes."""
    by_kernel, by_ds = Way("dq kernel", from_ds(1 << 30)), Way("from dS", from_ds(1))
    out_of, packs = Way("from dS, table written out", from_ds(1), written_out), Way("dq kernel, packed", make=packed)
    kinds: dict[str, tuple[dict[str, Any], Way, Way]] = {
        "full": ({}, by_kernel, by_ds),
        "T5": ({"bias": True}, by_kernel, by_ds),
        "clipped": ({"rows": CLIPPED}, Way("dq kernel"), out_of),
        "packed": ({}, packs, by_ds),
    }
    for length in (4096, 1024, 200):
        for name, (changes, first, second) in kinds.items():
            for width in (64, 128) if name != "T5" else (64,):
                if (name, length) != ("packed", 4096):
                    case = Case(max(4, 16384 // length // (1 if length > 200 else 2)), 2048 // width, length, width, **changes)
                    text = f"Does the query's gradient from dS pay? {name}, N {length}, width {width}"
                    above = "yes: one backward, and bwd_dq.py, margins and far sums go"
                    below = "no: bwd_dq.py stays for such calls; if for all, dq_from_ds, delta and the residual go (310 lines)"
                    yield Question(text, case, first, second, 1.0 if name in ("clipped", "packed") else 1.06, above, below)


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


def ask_for_the_cache(number: int) -> dict[str, Any]:
    """The host's time with the launch cache, and with Triton's own search for a compiled kernel."""
    case = Case(32, 8, 200, 64)
    inputs, d_out = case.inputs("cuda")
    step = timing.steps(METHODS[OURS].make(case), inputs, d_out, True)["forward+backward"]
    cached = host_time(step, number)
    with mock.patch.object(launching, "_run", None):  # JITFunction.run seems to be another: Triton searches
        searched = host_time(step, number)
    saved = searched - cached
    row = answer(
        "Is the launch cache needed?", "forward+backward", "us of the host without it, and with", searched / cached, 15.0
    )
    verdict = "yes: it stays" if saved >= 15 else "no: launching.py's cache, descriptions and classes go (150 lines)"
    return {**row, "unit": "ratio; limit 15 us", "message": f"{verdict}; {searched:.0f} and {cached:.0f} us"}


def measure_questions(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Ask all, the ones that decide most first; one that cannot be asked has failed."""
    asked: list[Callable[[], dict[str, Any]]] = [partial(ask, each) for each in (*of_the_query(), *of_decoding())]
    asked = [*asked[: options.most], partial(ask_for_the_cache, options.most or 100)]
    _ask_all(asked, report, deadline)
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
