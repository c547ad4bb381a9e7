"""Predictions of the times of our calls on a GPU, by the model of cycles: bench/predictions.csv.

A row has the milliseconds and TFLOP/s of a kernel or call on an H100 (sm_90) or an A100 (sm_80), the configurations, and the
version of Triton that has compiled them. This writes the file; it takes ten minutes. With ``--target`` only the rows of one GPU
are written again.

In a prediction are: the loops' cycles with as many programs at once as there are; the parts of a workspace, each with its waves
of programs, the last of which may leave multiprocessors idle; tiles that are partly empty; dS, which goes to memory once and
comes back once for each kernel that reads it; L2 of an H100 at 5.5 TB/s, the low end of what is published. Not in it are:
launches and the gaps between them, what comes before and after the loops, loops of different length, spilled registers that
miss L1.
"""

from __future__ import annotations

import argparse
import csv
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import triton

from tools.cycles.machine import MACHINES, Machine
from tools.cycles.predict import SCORES, Prediction, near_share, predict
from triton_relattn.kernels.introspect import Call, TileConfig, cdiv, fitted, planning, queries_apart, rows_of_program, selection

from .cases.attention import CLIPPED, Case, choose
from .cases.configurations import kernels_of, own_tile, shown
from .cases.methods import OURS
from .compiled import compiled
from .cycles.calls import STORED
from .cycles.calls import cycles_of as cycles_for_scores
from .measure import timing
from .measure.processes import processes
from .report.progress import progress
from .report.rows import ROOT, in_one_line, read
from .verbs.options import add_jobs, new_file

GPUS = {"sm_90": replace(MACHINES["sm_90"], l2_terabytes=5.5), "sm_80": MACHINES["sm_80"]}
PATH = ROOT / "bench" / "predictions.csv"
KEYS = ("target", "verb", "case", "method", "direction", "config")
COLUMNS = (*KEYS, "cycles", "far_cycles", "predicted_ms", "tflops", "triton")
"""cycles: for 64 x 64 scores, near and beyond a bounded table, of all kernels together. tflops: as FlashAttention counts."""
REPRESENTATIVE = Case(4, 32, 4096, 64)
"""Sizes of calls whose machine code stands for that of all sizes."""


@dataclass(frozen=True)
class Kernel:
    """One kernel of a call, with a configuration."""

    name: str
    case: Case
    has_table: bool
    config: TileConfig
    target: str = "sm_90"

    @property
    def representative(self) -> Kernel:
        """One that has the same machine code, or almost, and is compiled in its stead."""
        case = replace(self.case, batch=REPRESENTATIVE.batch, length=REPRESENTATIVE.length, group="")
        if case.key_heads is None:
            case = replace(case, heads=REPRESENTATIVE.heads)
        if not self.has_table:
            case = case.without_table()
        elif case.rows is not None and case.outside == "clamp":
            case = replace(case, rows=CLIPPED)
        return replace(self, case=case)

    def __str__(self) -> str:
        return f"{self.name} {shown(self.config)}, {self.case}{', plain' * (not self.has_table)}, {self.target}"


@dataclass(frozen=True)
class Wanted:
    """A time, and the kernels that it is of."""

    verb: str
    case: Case
    has_table: bool
    direction: str
    kernels: tuple[Kernel, ...]

    @property
    def target(self) -> str:
        return self.kernels[0].target

    @property
    def key(self) -> tuple[str, ...]:
        config = ", ".join(f"{kernel.name} {shown(kernel.config)}" for kernel in self.kernels)
        return self.target, self.verb, str(self.case), OURS if self.has_table else "plain", self.direction, config


def default_kernels(case: Case, has_table: bool, direction: str, target: str) -> tuple[Kernel, ...]:
    """The kernels of a direction of a call, first to last, with their default configurations."""
    tensors, spec = case.resolved(case.empty(), has_table)
    call = Call(tensors, spec, arch=target)
    tiles = {name: selection.select(name, *call.kind) for name in selection.KERNELS}
    names = kernels_of(direction, call, tensors, spec, tiles, MACHINES[target].multiprocessors)
    return tuple(Kernel(name, case, has_table, tiles[name], target) for name in names)


def wanted(target: str) -> Iterator[Wanted]:
    """All directions of the calls, with the term and without."""
    for case in choose(["long", "speech", "deberta", "inkling"]):
        for has_table in (True, False):
            for direction in (*timing.DIRECTIONS, *timing.PARTS):
                yield Wanted("speed", case, has_table, direction, default_kernels(case, has_table, direction, target))


def cycles_of(kernel: Kernel, machines: Mapping[str, Machine] = GPUS) -> tuple[list[Prediction], str]:
    """Return what the model says of a kernel, of which a multiprocessor has one program, two, ... as many as fit; if it says
    nothing, why."""
    machine = machines[kernel.target]
    try:
        call = kernel.case.resolved(kernel.case.empty(), kernel.has_table)
        code, tile = compiled(kernel.name, kernel.target, *call, kernel.config), own_tile(kernel.name, kernel.config)
        most = predict(code, *tile, machine)
        assert most is not None, "there is no model"
        fewer = [predict(code, *tile, machine, programs) for programs in range(1, most.programs)]
        return [*(each for each in fewer if each is not None), most], ""
    except Exception as error:
        return [], in_one_line(error)


def seconds_of(kernel: Kernel, found: Sequence[Prediction]) -> float:
    """Return how long a kernel takes. found: as of cycles_of. The module's docstring says what is in it."""
    case, config, machine = kernel.case, kernel.config, found[-1].machine
    length, heads = case.length, case.batch * case.heads
    if kernel.name == "dtable":
        scores = heads * table_scores(case, config)
        cycles = scores / SCORES * found[-1].cycles
        pairs = length * min(length, table_rows(case)) * (0.5 if case.is_causal and case.rows is None else 1.0)
        apart = queries_apart(16)
        overlap = config.block_n / rows_of_program(config.block_n, apart)
        return float(max(cycles, heads * pairs * overlap * STORED / machine.memory_rate) / machine.cycles_per_second)
    # Queries of a block of dq_from_ds are spread; its loop has relative positions beyond those of each of them.
    span = config.block_m * (queries_apart(16) if kernel.name == "dq_from_ds" else 1)
    near = 1.0
    if kernel.has_table and case.rows is not None:
        last = min(case.positions.last, 0) if case.is_causal else case.positions.last
        keys = length // 2 if case.is_causal else length
        near = near_share(case.positions.first, last, keys, config.block_m, config.block_n)
    rows, columns = cdiv(length, span) * span, cdiv(length, config.block_n) * config.block_n
    scores_of_head = length * (length + max(span, config.block_n)) / 2 if case.is_causal else rows * columns
    if kernel.name == "dq_from_ds":
        scores_of_head *= 1 + span / length
    programs_of_head = columns // config.block_n if kernel.name == "dkv" else rows // config.block_m
    parts = [heads * programs_of_head]
    if kernel.name == "dkv" and kernel.has_table:
        tensors, spec = case.resolved(case.empty(), True)
        call = Call(tensors, spec, arch=kernel.target)
        tiles = {"dq": call.tile("dq"), "dkv": config}
        plan = planning.plan(call, tensors, spec, tiles, machine.multiprocessors)
        assert plan is not None
        group = case.heads // (case.key_heads or case.heads)
        parts = [(part.stop_program - part.first_program) * group for part in plan.parts]
    turns = scores_of_head / programs_of_head / SCORES
    cycles = 0.0
    for programs in parts:
        waves, rest = divmod(programs, machine.multiprocessors * len(found))
        cycles += waves * len(found) * turns * loop_cycles(kernel, found[-1], near)
        if rest:
            at_once = cdiv(rest, machine.multiprocessors)
            cycles += at_once * turns * loop_cycles(kernel, found[at_once - 1], near)
    return float(cycles * machine.multiprocessors / machine.cycles_per_second)


def loop_cycles(kernel: Kernel, prediction: Prediction, near: float) -> float:
    """Return the cycles of a multiprocessor for SCORES; reading dS takes as long as it comes from memory."""
    return cycles_for_scores(kernel.name, prediction, near)


def table_rows(case: Case) -> int:
    """Return how many rows of a table are summed, with those of near keys beyond a bounded one."""
    first, last = case.positions.first, case.positions.last
    if case.is_causal:
        last = min(last, 0)
    return last - first + 1


def table_scores(case: Case, config: TileConfig) -> float:
    """Return how many scores the dtable kernel takes of a head, with those of empty places in its tiles."""
    apart, first = queries_apart(16), case.positions.first
    config = fitted(config, case.length, 16)
    step, turns = rows_of_program(config.block_n, apart), 0
    for lowest in range(first, first + table_rows(case), step):
        for relative in range(lowest - apart + 1, lowest + 1):
            start = max(-relative - (config.block_n - 1), 0) // apart * apart
            stop = min(case.length, case.length - relative)
            turns += cdiv(max(stop - start, 0), config.block_m * apart)
    return float(turns * config.block_m * step)


def row_of(what: Wanted, known: Mapping[Kernel, Sequence[Prediction]]) -> dict[str, Any] | None:
    """Columns of the file; None if one of the kernels is not known."""
    found = [known.get(kernel.representative) for kernel in what.kernels]
    every = [each for each in found if each]
    if len(every) < len(found):
        return None
    seconds = sum(seconds_of(kernel, each) for kernel, each in zip(what.kernels, every, strict=True))
    predictions = [each[-1] for each in every]
    far = [each.far_cycles for each in predictions if each.far_cycles is not None]  # the dtable kernel does not go there
    direction = "forward" if what.direction == "forward kernel" else what.direction
    is_whole = direction in timing.DIRECTIONS
    row = dict(zip(KEYS, what.key, strict=True)) | {
        "cycles": round(sum(each.cycles for each in predictions)),
        "far_cycles": round(sum(far)) if far else None,
        "predicted_ms": f"{1e3 * seconds:.4g}",
        "tflops": f"{what.case.flops(direction, what.has_table)[0] / seconds / 1e12:.4g}" if is_whole else None,
    }
    return {**row, "triton": triton.__version__}


def write(rows: Sequence[Mapping[str, Any]], path: Path = PATH) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_jobs(parser)
    parser.add_argument("--target", choices=tuple(GPUS), help="GPU whose rows are written anew (all)")
    parser.add_argument("--out", type=new_file, default=PATH, metavar="FILE", help="file to write (bench/predictions.csv)")


def run(options: argparse.Namespace) -> int:
    """0 if the model knows all kernels, 1 if one does not compile, 2 if none can be compiled."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("kernels are interpreted in this process, not compiled: unset TRITON_INTERPRET")
        return 2
    targets = [options.target] if options.target else [*GPUS]
    every = {what.key: what for target in targets for what in wanted(target)}
    kernels = list(dict.fromkeys(kernel.representative for what in every.values() for kernel in what.kernels))
    known: dict[Kernel, list[Prediction]] = {}
    of_kernel = functools.partial(cycles_of, machines={target: GPUS[target] for target in targets})
    with processes(options.jobs) as map_all:
        for kernel, (found, problem) in zip(progress(kernels, str), map_all(of_kernel, kernels), strict=True):
            if not found:
                print(f"{kernel}: {problem}")
            else:
                known[kernel] = found
    rows = [row for row in (row_of(what, known) for what in every.values()) if row is not None]
    others = [dict(row) for row in read(options.out) if row["target"] not in targets] if options.out.exists() else []
    write([*rows, *others], options.out)
    print(f"{len(rows)} of {len(every)} rows, {len(known)} of {len(kernels)} kernels: {options.out}")
    return int(len(rows) < len(every))
