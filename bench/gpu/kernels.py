"""Kernels timed alone: the first figures of a GPU, and configurations beside the selected one."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bench.cases.attention import Case
from bench.cases.configurations import shown
from bench.cases.methods import OURS
from bench.measure import timing
from bench.report.rows import in_one_line
from triton_relattn._core.residual import keeps_residual
from triton_relattn._core.spec import AttentionSpec, AttentionTensors
from triton_relattn.kernels.introspect import Call, TileConfig, backward, forward

from .checks import Checked, run_case
from .report import Report, synchronize
from .variants import Group, case_of, groups, selected
from .workers import Lost, spread

ROUNDS = 12
ALLOWED = 0.02  # distance in norm between what two configurations compute
LEAST_TO_TIME = 15.0  # seconds of the first part that are for timing: what is not compiled by then is compiled when it is timed
IN_TWO_PARTS = str(2 * 2 * 1088 * 1088)  # bytes of a workspace for two of the four heads of a call of 1,040
TINY = Case(1, 1, 64, 16, dtype="fp16")


@dataclass
class Launch:
    """A kernel of a call that has run, and can again; where the call launches it several times, all of these."""

    name: str
    config: TileConfig
    again: Callable[[], object]


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
    keeps = keeps_residual(tensors, spec) and "dq" not in tiles
    out, _, softmax_stats, residual = forward(tensors, spec, tiles.get("forward"), keeps_residual=keeps)
    of_backward = {name: tile for name, tile in tiles.items() if name != "forward"}
    gradients = backward(d_out, None, out, softmax_stats, tensors, spec, tiles=of_backward, residual=residual)
    return [out, *(gradient for gradient in gradients if gradient is not None)]


def row_of(case: Case, has_table: bool, kernel: str, config: TileConfig) -> dict[str, Any]:
    """Columns of results.csv."""
    method = OURS if has_table else "plain"
    row = {"verb": "kernels", **case.columns(), "method": method, "direction": f"{kernel} kernel"}
    return {**row, "config": f"{kernel} {shown(config)}", "status": "ok"}


def time_launches(
    rows: Sequence[dict[str, Any]], launches: Sequence[Launch], device: str, seconds: float, rounds: int = ROUNDS
) -> None:
    """Time launches in turn; the rows that are "ok" get times."""
    every = []
    for row, launch in zip(rows, launches, strict=True):
        again = launch.again
        step = timing.Step(lambda: None, lambda _, again=again: (again(), ())[1])  # type: ignore[misc]
        every.append(timing.Timed(str(row["method"]), str(row["direction"]), row, step=step))
    timing.time_in_turn(every, device, seconds, rounds)
    for row, timed in zip(rows, every, strict=True):
        row |= timing.times_of(timed, device)


def smoke(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """One call, checked; then each kernel of one call, plain and full. Every line is printed as soon as it is known."""
    started = time.monotonic()
    report.say(f"  {report.stamp['device']}, torch {torch.__version__}, triton {report.stamp['triton']}, {options.arch}")
    calls = [(TINY if options.tiny else case_of(head_dim, "full"), has) for head_dim in (64, 128) for has in (False, True)]
    calls = calls[: 2 if options.tiny else 4]
    compiling = threading.Thread(target=_compile_calls, args=(calls, options, deadline), daemon=True)
    compiling.start()
    # The same machine code as of the calls that are timed, the query's gradient from the workspace's parts among it.
    for heads, length, workspace in ((1, 50, ""),) if options.tiny else ((16, 304, ""), (2, 1040, IN_TWO_PARTS)):
        sizes = {"heads": heads, "num_queries": length, "num_keys": length, "workspace": workspace}
        for row in run_case(Checked("full", False, options.dtype, **sizes), options.device):  # type: ignore[arg-type]
            report.add("correctness.csv", {"part": "smoke", **row})
            report.say(f"  one call of {length}{', sharp' * row['sharp']}: {row['status']}, {row['seconds']} s")
    compiling.join(max(0.0, deadline - LEAST_TO_TIME - time.monotonic()))
    report.say(f"  compiled after {time.monotonic() - started:.0f} s")
    for case, has_table in calls:
        if time.monotonic() > deadline - 2:
            report.left(1)
            continue
        try:
            for row in kernels_of(case, has_table, options):
                report.add_measured(row)
        except Exception as error:
            report.fail(f"{case}, {OURS if has_table else 'plain'}: {in_one_line(error)}")
    report.done(f"{time.monotonic() - started:.0f} s after torch was there")


def _compile_calls(calls: Sequence[tuple[Case, bool]], options: argparse.Namespace, deadline: float) -> None:
    """Compile the kernels of calls in as many processes as there may be, for this one to find them on disk."""
    if options.jobs < 2:
        return
    items = [
        (Group(kernel, case, has_table, (tile := selected(kernel, case, has_table, options.arch),)), tile)
        for case, has_table in calls
        for kernel in (("forward", "dkv", "dtable", "dq_from_ds") if has_table else ("forward", "dq", "dkv"))
    ]
    for _ in spread(partial(_compile, device=options.device), items, options.jobs, deadline):
        pass


def kernels_of(case: Case, has_table: bool, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each kernel of a call, timed alone, in the selected configurations."""
    inputs, d_out = case.inputs(options.device)
    tensors, spec = case.resolved(inputs, has_table)
    with recorded() as launches:
        results = run_kernels(tensors, spec, d_out, {})
    synchronize(options.device)
    rows = [row_of(case, has_table, launch.name, launch.config) for launch in launches]
    if not all(bool(result.isfinite().all()) for result in results):
        rows = [{**row, "status": "wrong: results are not finite"} for row in rows]
    time_launches(rows, launches, options.device, 0.0 if options.tiny else 1.0, 1 if options.tiny else ROUNDS)
    return rows


def _compile(item: tuple[Group, TileConfig], device: str) -> str:
    """Launch one kernel in one configuration, on numbers that mean nothing: what is compiled is then on disk."""
    group, tile = item
    inputs, d_out = group.case.inputs(device)
    tensors, spec = group.case.resolved(inputs, group.has_table)
    with recorded(group.kernel):
        run_kernels(tensors, spec, d_out, {group.kernel: tile})
    synchronize(device)
    return ""


def measure_group(group: Group, device: str, seconds: float) -> list[dict[str, Any]]:
    """Rows of a kernel's configurations: each runs, must agree with the first one, and is timed, all in turn."""
    inputs, d_out = group.case.inputs(device)
    tensors, spec = group.case.resolved(inputs, group.has_table)
    rows, launches, expected = [], [], list[torch.Tensor]()
    for tile in group.tiles:
        row = row_of(group.case, group.has_table, group.kernel, tile)
        try:
            with recorded() as every:
                results = run_kernels(tensors, spec, d_out, {group.kernel: tile})
            synchronize(device)
            expected = expected or results
            row["error"] = timing.distance(results, expected)
            row["checked_against"] = "the selected configuration"
            if not row["error"] <= ALLOWED:
                row["status"] = f"wrong: differs from the selected configuration by {row['error']:.3g}"
            launches.append(next(launch for launch in every if launch.name == group.kernel))
        except Exception as error:
            row["status"] = f"cannot run: {in_one_line(error)}"
            launches.append(Launch(group.kernel, tile, lambda: None))
        rows.append(row)
    time_launches(rows, launches, device, seconds, ROUNDS if seconds else 1)
    return rows


def variants(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Compile in parallel, then time, the variants that save most first; those that crash are rows."""
    started, arch = time.monotonic(), "sm_90" if options.tiny else options.arch
    every = list(groups(arch))
    if options.tiny:
        every = [replace(group, case=TINY) for group in every if group.case.head_dim == 64 and group.case.rows is None][:3]
    if options.jobs > 1:
        items = [(group, tile) for group in every for tile in group.tiles]
        for (group, tile), problem in spread(
            partial(_compile, device=options.device), items, options.jobs, (started + deadline) / 2
        ):
            if problem:
                reason = problem.reason if isinstance(problem, Lost) else problem
                report.say(f"  {group.kernel} {shown(tile)}, {group.case}: {reason}")
        report.say(f"variants: {time.monotonic() - started:.0f} s to compile")
    measure = partial(measure_group, device=options.device, seconds=0.0 if options.tiny else 0.6)
    done = 0
    for group, rows in spread(measure, every, min(1, options.jobs), deadline):
        done += 1
        if isinstance(rows, Lost):
            report.fail(f"{group.kernel} kernel, {group.case}: {rows.reason}")
            continue
        selected_ms = rows[0].get("p50_ms")
        for row in rows:
            ratio = ""
            if selected_ms and row.get("p50_ms") and row is not rows[0]:
                ratio = f", {row['p50_ms'] / selected_ms:.2f} of the selected"
            report.add_measured(row, f", {row['config']}{ratio}")
    report.left(len(every) - done)
    report.done(f"{done} of {len(every)} kernels")
