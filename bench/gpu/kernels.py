"""Kernels timed alone: the first figures of a GPU, and configurations beside the selected one."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.cases.attention import CLIPPED, Case
from bench.cases.configurations import shown
from bench.cases.methods import OURS
from bench.measure import timing
from bench.report.rows import in_one_line
from triton_relattn._core.residual import keeps_residual
from triton_relattn._core.spec import AttentionSpec, AttentionTensors
from triton_relattn.kernels.introspect import Call, TileConfig, backward, forward, selection

from .checks import launched, report_case, run_case, standing_for
from .report import Report, synchronize
from .workers import Lost, spread

ROUNDS = 12
ALLOWED = 0.02  # distance in norm between what two configurations compute
LENGTH, TOKENS, WIDTH = 4096, 16384, 2048


@dataclass
class Launch:
    """A kernel of a call that has run, and can again; where the call launches it several times, all of these."""

    name: str
    config: TileConfig
    again: Callable[[], object]


@dataclass(frozen=True)
class Group:
    """One kernel of one call, and its configurations: the selected one first."""

    kernel: str
    case: Case
    has_table: bool
    tiles: tuple[TileConfig, ...]


def case_of(head_dim: int, rows: int | None = None) -> Case:
    """The call that a kernel is timed in: one of those that ``bench speed`` measures."""
    return Case(TOKENS // LENGTH, WIDTH // head_dim, LENGTH, head_dim, False, rows, group="long")


@contextmanager
def recorded(only: str | None = None) -> Iterator[list[Launch]]:
    """Launches that run within, by the kernels' names; with ``only``, others do not run."""
    launches: list[Launch] = []
    every: dict[str, list[Callable[[], None]]] = {}
    launch = Call.launch

    def record(call: Call, name: str, kernel: Any, config: TileConfig, *arguments: Any, **options: Any) -> None:
        if only is None or name == only:
            again = partial(launch, call, name, kernel, config, *arguments, **options)
            again()
            parts = every.setdefault(name, [])
            parts.append(again)
            if len(parts) == 1:
                launches.append(Launch(name, config, lambda: [part() for part in parts]))

    Call.launch = record  # type: ignore[method-assign]
    try:
        yield launches
    finally:
        Call.launch = launch  # type: ignore[method-assign]


def run_kernels(
    tensors: AttentionTensors, spec: AttentionSpec, d_out: torch.Tensor, tiles: Mapping[str, TileConfig]
) -> list[torch.Tensor]:
    """Forward and backward of a call, some kernels with other configurations; out and the gradients."""
    keeps = keeps_residual(tensors)
    out, _, softmax_stats, residual = forward(tensors, spec, tiles.get("forward"), keeps_residual=keeps)
    of_backward = {name: tile for name, tile in tiles.items() if name != "forward"}
    gradients = backward(d_out, None, out, softmax_stats, tensors, spec, tiles=of_backward, residual=residual)
    return [out, *(gradient for gradient in gradients if gradient is not None)]


def row_of(case: Case, has_table: bool, kernel: str, config: TileConfig) -> dict[str, Any]:
    """Columns of results.csv."""
    method = OURS if has_table else "plain"
    row = {"verb": "kernels", **case.columns(), "method": method, "direction": f"{kernel} kernel"}
    return {**row, "config": f"{kernel} {shown(config)}", "status": "ok"}


def time_launches(rows: Sequence[dict[str, Any]], launches: Sequence[Launch], rounds: int = ROUNDS) -> None:
    """Time launches in turn; the rows that are "ok" get times."""
    every = []
    for row, launch in zip(rows, launches, strict=True):
        again = launch.again
        step = timing.Step(lambda: None, lambda _, again=again: (again(), ())[1])  # type: ignore[misc]
        every.append(timing.Timed(str(row["method"]), str(row["direction"]), row, step=step))
    timing.time_in_turn(every, "cuda", 0.6, rounds)
    for row, timed in zip(rows, every, strict=True):
        row |= timing.times_of(timed, "cuda")


def smoke(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """The calls that stand for the main ones, checked; then each of their kernels timed. Lines are printed as they come."""
    report.say(f"  {report.stamp['device']}, torch {torch.__version__}, triton {report.stamp['triton']}, {options.arch}")
    calls = [(case_of(head_dim), has_table) for head_dim in (64, 128) for has_table in (True, False)][: options.most]
    cases = [each for case, has_table in calls for each in standing_for(case, has_table)]
    for each, found in spread(run_case, cases, options.jobs, deadline):
        report_case(each, found, report, show=True)
    for case, has_table in calls:
        try:
            with launched() as kernels:
                rows = kernels_of(case, has_table)
            report.state.note_kernels("timed", kernels)
            for row in rows:
                report.add_measured(row)
        except Exception as error:
            report.fail(f"{case}, {OURS if has_table else 'plain'}: {in_one_line(error)}")
    report.done()


def kernels_of(case: Case, has_table: bool) -> list[dict[str, Any]]:
    """Each kernel of a call, timed alone, in the selected configurations."""
    inputs, d_out = case.inputs("cuda")
    tensors, spec = case.resolved(inputs, has_table)
    with recorded() as launches:
        results = run_kernels(tensors, spec, d_out, {})
    synchronize()
    rows = [row_of(case, has_table, launch.name, launch.config) for launch in launches]
    if not all(bool(result.isfinite().all()) for result in results):
        rows = [{**row, "status": "wrong: results are not finite"} for row in rows]
    time_launches(rows, launches)
    return rows


def compile_group(item: tuple[Group, TileConfig]) -> str:
    """Launch one kernel in one configuration: what is compiled is then on disk."""
    group, tile = item
    inputs, d_out = group.case.inputs("cuda")
    tensors, spec = group.case.resolved(inputs, group.has_table)
    with recorded(group.kernel):
        run_kernels(tensors, spec, d_out, {group.kernel: tile})
    synchronize()
    return ""


def measure_group(group: Group) -> list[dict[str, Any]]:
    """Rows of a kernel's configurations: each runs, must agree with the first one, and is timed, all in turn."""
    inputs, d_out = group.case.inputs("cuda")
    tensors, spec = group.case.resolved(inputs, group.has_table)
    rows, launches, expected = [], [], list[torch.Tensor]()
    for tile in group.tiles:
        row = row_of(group.case, group.has_table, group.kernel, tile)
        try:
            with recorded() as every:
                results = run_kernels(tensors, spec, d_out, {group.kernel: tile})
            synchronize()
            expected = expected or results
            row |= {"error": timing.distance(results, expected), "checked_against": "the selected configuration"}
            if not row["error"] <= ALLOWED:
                row["status"] = f"wrong: differs from the selected configuration by {row['error']:.3g}"
            launches.append(next(launch for launch in every if launch.name == group.kernel))
        except Exception as error:
            row["status"] = f"cannot run: {in_one_line(error)}"
            launches.append(Launch(group.kernel, tile, lambda: None))
        rows.append(row)
    time_launches(rows, launches)
    return rows


def measure_groups(
    every: Sequence[Group], options: argparse.Namespace, report: Report, deadline: float
) -> Iterator[tuple[Group, list[dict[str, Any]]]]:
    """Compile in parallel, then time, and report; groups and their rows as they come."""
    if options.jobs > 1:
        for _ in spread(compile_group, [(group, tile) for group in every for tile in group.tiles], options.jobs, deadline):
            pass
    done = 0
    for group, rows in spread(measure_group, every, min(1, options.jobs), deadline):
        done += 1
        if isinstance(rows, Lost):
            report.fail(f"{group.kernel} kernel, {group.case}: {rows.reason}")
            continue
        selected_ms = rows[0].get("p50_ms")
        for row in rows:
            is_compared = selected_ms and row.get("p50_ms") and row is not rows[0]
            ratio = f", {row['p50_ms'] / selected_ms:.2f} of the selected" if is_compared else ""
            report.add_measured(row, f", {row['config']}{ratio}")
        yield group, rows
    report.left(len(every) - done)


def selected(kernel: str, case: Case, has_table: bool, arch: str) -> TileConfig:
    """The default configuration, whatever the profiles say."""
    return selection.select(kernel, *Call(*case.resolved(case.empty(), has_table), arch=arch).kind)


Q = "registers"  # rotations in registers; plain attention has none
TABLES = {"plain": None, "full": None, "clamp": CLIPPED}
VARIANTS: dict[tuple[str, int, str], list[TileConfig]] = {
    # More programs a multiprocessor by a limit on registers, more stages, another tile.
    ("forward", 64, "full"): [
        TileConfig(64, 64, 4, 1, "scores", Q, 128),
        *(TileConfig(64, 64, 4, stages, "scores", Q, 168) for stages in (2, 3)),
        *(TileConfig(128, 64, 8, 2, carry, Q) for carry in ("scores", None)),
    ],
    ("forward", 128, "full"): [TileConfig(128, 64, 8, stages, "scores", Q) for stages in (2, 3)],
    ("dkv", 64, "full"): [TileConfig(64, 64, 4, 2, "scores", Q), TileConfig(64, 64, 4, 1, "scores", Q, 168)],
    ("dkv", 128, "full"): [TileConfig(64, 64, 4, 1, "scores", Q), TileConfig(64, 32, 4, 2, "scores", Q)],
    ("dtable", 64, "full"): [TileConfig(64, 128, 4, stages) for stages in (1, 2)],
    ("dtable", 128, "full"): [TileConfig(64, 128, 4, 2), TileConfig(64, 128, 8, 3)],
    ("dq", 64, "full"): [TileConfig(64, 64, 4, 2), TileConfig(128, 64, 8, 2)],
    ("dq", 128, "full"): [TileConfig(128, 64, 8, stages) for stages in (1, 2)],
    ("forward", 64, "clamp"): [TileConfig(64, 64, 4, 2, "scores", Q, 168), TileConfig(128, 64, 8, 2, "scores", Q)],
    ("dkv", 64, "clamp"): [TileConfig(64, 64, 4, 2, "scores", Q), TileConfig(64, 64, 4, 1, "scores", Q, 168)],
    # The lower bound must not be a straw man: more stages hide the loads.
    ("forward", 64, "plain"): [*(TileConfig(128, 64, 8, stages) for stages in (2, 3, 4)), TileConfig(128, 128, 8, 2)],
    ("forward", 128, "plain"): [*(TileConfig(128, 64, 8, stages) for stages in (2, 3)), TileConfig(128, 128, 8, 2)],
    ("dkv", 64, "plain"): [*(TileConfig(64, 64, 4, stages) for stages in (1, 2, 3)), TileConfig(128, 64, 8, 2)],
    ("dkv", 128, "plain"): [TileConfig(64, 64, 4, 1), TileConfig(64, 32, 4, 1)],
    ("dq", 64, "plain"): [TileConfig(128, 64, 8, 2), TileConfig(64, 64, 4, 3)],
    ("dq", 128, "plain"): [TileConfig(128, 64, 8, stages) for stages in (2, 3)],
}
"""Configurations to compare with the selected one, by kernel, width and table; none of attention that is causal."""


def groups(arch: str) -> Iterator[Group]:
    """All of them, for a GPU; without what is not valid there."""
    for (kernel, head_dim, table), tiles in VARIANTS.items():
        case, has_table = case_of(head_dim, TABLES[table]), table != "plain"
        first = selected(kernel, case, has_table, arch)
        others = [tile for tile in tiles if tile != first and tile.why_invalid(arch, has_table, kernel) is None]
        yield Group(kernel, case, has_table, (first, *others))


def variants(options: argparse.Namespace, report: Report, deadline: float) -> None:
    every = list(groups(options.arch))[: options.most]
    done = len(list(measure_groups(every, options, report, deadline)))
    report.done(f"{done} of {len(every)} kernels")
