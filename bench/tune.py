"""The best configuration of every kernel for this GPU, as a profile that the package reads.

For each kernel of each case: all valid configurations near the default are compiled; those that do not fit are left out; the rest
are ranked by the instructions of their loop for a score; the first of them, and the default, are checked against float64 and
timed in turn. Without a GPU there is only the ranking.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from triton_relattn._core.sizes import bounded
from triton_relattn.kernels.introspect import (
    ARCHITECTURES,
    Call,
    TileConfig,
    kernels_are_interpreted,
    profiles,
    selection,
    tuning,
)

from .cases import attention as cases
from .cases.attention import Case
from .cases.configurations import TILE_COLUMNS, shown
from .compile import counts
from .compiled import compiled, launched, resources
from .measure import timing
from .measure.processes import processes
from .report.progress import progress
from .report.rows import STAMP, Table, in_one_line, stamp
from .report.text import table as text_table
from .verbs import verify
from .verbs.options import add_cases, add_files, add_jobs, add_list, add_no_verify, available_device, new_file, positive, seconds

COLUMNS = (
    *("arch", *profiles.Conditions._fields, "case", "status"),
    *(*TILE_COLUMNS, "is_default", "is_chosen"),
    *("registers", "spill_bytes", "shared_bytes", "loop_instructions", "instructions_per_score"),
    *("error", "p20_ms", "p50_ms", "p80_ms", "rounds", "verified"),
)
CHECKED_LENGTH = 300  # of the call that a configuration is checked with
ERROR_FACTOR, ERROR_FLOOR = 1.5, 1e-5  # of the default configuration's error, relative in norm
ROUNDS, FEWEST_ROUNDS = 30, 7


@dataclass(frozen=True)
class Task:
    """One kernel of one case, with the table or without."""

    case: Case
    has_table: bool
    kernel: str
    arch: str

    @property
    def call(self) -> Call:
        """Return the call, of tensors that take no memory."""
        return Call(*self.case.resolved(self.case.empty(), self.has_table), arch=self.arch)

    @property
    def conditions(self) -> profiles.Conditions:
        call = self.call
        return selection.conditions(self.kernel, call.kind, call.length)

    @property
    def default(self) -> TileConfig:
        """Whatever the profiles say."""
        return selection.select(self.kernel, *self.call.kind)

    def __str__(self) -> str:
        return f"{self.kernel}, {self.case}" + " without table" * (not self.has_table)


def candidates(task: Task, reach: int) -> list[TileConfig]:
    """The default first, then valid configurations at most ``reach`` steps away, the nearest first."""
    default = task.default
    near = tuning.nearest(task.kernel, task.arch, task.has_table, default)
    return [default, *(config for config in near if tuning.steps_apart(default, config) <= reach)]


def compile_one(task: Task, config: TileConfig) -> dict[str, Any]:
    """Return the row of what a configuration takes; its status says why it is left out."""
    row: dict[str, Any] = {"status": "ok"}
    try:
        call_tensors, spec = task.case.resolved(task.case.empty(), task.has_table)
        used = resources(compiled(task.kernel, task.arch, call_tensors, spec, config))
        row |= {name: count for name, count in counts(used).items() if name in COLUMNS}
        row["instructions_per_score"] = used.main_loop.total() * config.num_warps / (config.block_m * config.block_n)
        if not used.fits(task.arch):
            row["status"] = (
                f"does not fit: {used.shared_bytes} of {ARCHITECTURES[task.arch].shared_memory} bytes, {used.registers} registers"
            )
    except Exception as error:
        row["status"] = f"does not compile: {in_one_line(error)}"
    return row


@cache
def _small_call(task: Task, device: str) -> tuple[Any, ...]:
    """A short call of the same kind: its tensors, and the exact results of the kernel."""
    case = task.case.resized(min(CHECKED_LENGTH, task.case.length), batch=min(2, task.case.batch))
    inputs, d_out = case.inputs(device)
    tensors, spec = case.resolved(inputs, task.has_table)
    (out, *gradients), _ = timing.golden(case, inputs, d_out, device, task.has_table)
    names = ("query", "key", "value", "rel_key", "rel_query", "rel_p2c")
    given = [name for name, tensor in zip(names, inputs, strict=True) if tensor is not None]
    exact = [gradient for name, gradient in zip(given, gradients, strict=False) if name in tuning.GRADIENTS[task.kernel]]
    return tensors, spec, d_out, tuning.run_forward(tensors, spec), exact or [out]


def error_of(task: Task, config: TileConfig, device: str) -> float:
    """The largest relative distance in norm from float64."""
    tensors, spec, d_out, saved, exact = _small_call(task, device)
    return timing.distance(tuning.run_kernel(task.kernel, tensors, spec, d_out, saved, config)[: len(exact)], exact)


def check(task: Task, config: TileConfig, row: dict[str, Any], default_error: float, device: str) -> None:
    """Fills in the error; a configuration that is further from float64 than the default one is wrong."""
    row["error"] = error_of(task, config, device)
    allowed = min(ERROR_FACTOR * default_error + ERROR_FLOOR, timing.TOLERANCE[task.case.dtype])
    if not row["error"] <= allowed:
        row["status"] = f"wrong: {row['error']:.3g} from float64, the default configuration {default_error:.3g}"


def time_all(task: Task, rows: list[dict[str, Any]], tiles: Sequence[TileConfig], device: str, seconds: float) -> None:
    """Check and time the configurations whose rows are "ok"; adds error and times to the rows. The first is the default."""
    default_error = error_of(task, tiles[0], device)
    inputs, d_out = task.case.inputs(device)
    tensors, spec = task.case.resolved(inputs, task.has_table)
    saved = tuning.run_forward(tensors, spec)
    every = []
    for row, config in zip(rows, tiles, strict=True):
        timing.attempt(partial(check, task, config, row, default_error, device), row)
        step = timing.Step(lambda config=config: config, partial(tuning.run_kernel, task.kernel, tensors, spec, d_out, saved))  # type: ignore[misc]
        every.append(timing.Timed(task.kernel, shown(config), row, step=step))
    timing.time_in_turn(every, device, seconds, ROUNDS, FEWEST_ROUNDS)
    for timed in every:
        timed.found |= timing.percentiles(timed.milliseconds)


def best_of(rows: Sequence[dict[str, Any]]) -> int | None:
    """Index of the row with the smallest median; the default's, 0, unless another is clearly faster. None: nothing was timed."""
    timed = [index for index, row in enumerate(rows) if row.get("p50_ms") is not None]
    return timed[tuning.fastest([rows[index]["p50_ms"] for index in timed])] if timed else None


def cost(row: dict[str, Any]) -> float:
    """Return the number that configurations are ranked by."""
    return float(row["instructions_per_score"])


def rank(rows: Sequence[dict[str, Any]], count: int) -> list[int]:
    """Indices of the configurations worth timing: the default, then the usable ones that cost least."""
    usable = [index for index, row in enumerate(rows) if row["status"] == "ok" and index > 0]
    return [0, *sorted(usable, key=lambda index: cost(rows[index]))[: count - 1]]


def tune(task: Task, options: argparse.Namespace, compile_all: Any, results: Table) -> None:
    """Rows of all candidates, the ones worth timing first; the choice goes into the profile if anything was timed."""
    tiles = candidates(task, options.reach)
    found = list(compile_all(partial(compile_one, task), tiles))
    can_run = options.device == "cuda" or kernels_are_interpreted()
    order = rank(found, options.timed)
    rows, ranked = [found[index] for index in order], [tiles[index] for index in order]
    if can_run:
        time_all(task, rows, ranked, options.device, options.seconds)
    chosen = best_of(rows)
    others = [index for index in range(len(tiles)) if index not in order]
    for number, index in enumerate([*order, *others]):
        row = {"arch": task.arch, **task.conditions._asdict(), "case": str(task.case), **asdict(tiles[index]), **found[index]}
        row |= {"is_default": index == 0, "is_chosen": number == chosen, "verified": "no" if options.no_verify else "yes"}
        results.add(row)
    if chosen is not None:
        tuned = profiles.Row(task.conditions, ranked[chosen], rows[chosen]["p50_ms"], rows[0].get("p50_ms"))
        provenance = {name: results.stamp[name] for name in STAMP if name != "threads"}
        profiles.save(options.profile, task.arch, [tuned], **provenance)
        selection.forget()


def tasks_of(chosen: Sequence[Case], kernels: Sequence[str], arch: str) -> list[Task]:
    """One for every row that a profile can have; the first case of a row stands for all."""
    tasks: dict[profiles.Conditions, Task] = {}
    for case in chosen:
        for has_table in (True, False):
            for kernel in kernels:
                if kernel in launched(*case.resolved(case.empty(), has_table)):
                    task = Task(case, has_table, kernel, arch)
                    tasks.setdefault(task.conditions, task)
    return list(tasks.values())


def unknown(tasks: Sequence[Task], profile: Path) -> list[Task]:
    """Return the tasks that a profile does not have yet; all are of one architecture."""
    known = {row.conditions for row in profiles.load(profile, tasks[0].arch)} if tasks else set()
    return [task for task in tasks if task.conditions not in known]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cases(parser, ("long", "speech", "inkling"))
    add_list(parser, "kernels", selection.KERNELS, selection.KERNELS)
    parser.add_argument("--target", choices=ARCHITECTURES, help="without a GPU, or instead: what to compile for (default: sm_90)")
    parser.add_argument(
        "--reach", type=bounded(int, 0), default=3, help="how many steps from the default configuration to look (%(default)s)"
    )
    parser.add_argument("--timed", type=positive, default=8, help="how many configurations of a kernel to time (%(default)s)")
    parser.add_argument("--seconds", type=seconds, default=2.0, help="timing of one kernel (%(default)s)")
    parser.add_argument("--total-seconds", type=seconds, help="begin no kernel after so long")
    parser.add_argument("--profile", type=new_file, help="the file to write (default: the user's, which the package reads)")
    parser.add_argument("--again", action="store_true", help="also what the profile has already")
    add_jobs(parser)
    add_no_verify(parser)
    add_files(parser)


def prepare(options: argparse.Namespace) -> list[Task]:
    """Return the tasks that are to be done, without those that the profile has."""
    options.device = available_device() if options.target is None else "cpu"
    arch = selection.architecture(torch.device("cuda")) if options.device == "cuda" else options.target or "sm_90"
    options.profile = options.profile or profiles.user_profile_path(arch)
    tasks = tasks_of(cases.choose(options.cases, options.lengths), options.kernels, arch)
    return unknown(tasks, options.profile) if options.device == "cuda" and not options.again else tasks


def run(options: argparse.Namespace) -> int:
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("kernels are interpreted in this process, not compiled: unset TRITON_INTERPRET")
        return 2
    tasks = prepare(options)
    if not tasks:
        print(f"nothing to do: {options.profile} has all of it (--again does it again)")
        return 0
    if options.device == "cpu":
        options.no_verify = True
        print("No GPU: configurations are ranked by what their compiled code takes; nothing is run, checked or timed.")
    elif not options.no_verify and verify.gate(options.device) != 0:
        print("The tests fail: nothing is timed.")
        return 1
    device = "cuda" if options.device == "cuda" else f"{tasks[0].arch}, compiled, not run"
    results = Table(COLUMNS, stamp(device), options.csv, options.json)
    started = time.monotonic()
    try:
        with processes(options.jobs) as compile_all:
            for task in progress(tasks, str):
                if options.total_seconds is None or time.monotonic() - started < options.total_seconds:
                    tune(task, options, compile_all, results)
    except KeyboardInterrupt:
        print("interrupted; what has been found is kept")
    print(summary(results.rows))
    print(f"profile: {options.profile}" if options.device == "cuda" else "Nothing was timed, so no profile was written.")
    return 0


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each kernel: its default, and the best, by time or else by what it is ranked by."""
    body = []
    by_task: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        by_task.setdefault(tuple(row[name] for name in COLUMNS[: COLUMNS.index("status")]), []).append(row)
    for of_task in by_task.values():
        default = next(row for row in of_task if row["is_default"])
        usable = [row for row in of_task if row["status"] == "ok" and row["instructions_per_score"]]
        best = next((row for row in of_task if row["is_chosen"]), min(usable, key=cost, default=default))
        what = "p50_ms" if best["p50_ms"] else "instructions_per_score"
        tiles = (shown(TileConfig(*(row[field.name] for field in fields(TileConfig)))) for row in (default, best))
        values = (str(row[what] or row["status"]) for row in (default, best))
        body.append((f"{best['kernel']}, {best['case']}, {best['coverage']}", *tiles, *values, what))
    return text_table(("kernel", "default", "best", "default's", "best's", "which is"), body)
