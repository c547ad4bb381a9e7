"""Correctness: whole calls, single kernels in their configurations, and repeated runs."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch

from bench.cases.configurations import shown
from bench.report.rows import in_one_line
from triton_relattn import RelativePositions, fused_relative_attention, testing
from triton_relattn._core import residual, validation
from triton_relattn._core.arguments import Arguments
from triton_relattn._core.spec import DIFFERENTIABLE
from triton_relattn.check import judge
from triton_relattn.kernels.introspect import Call, backward, forward, planning, selection, tuning
from triton_relattn.testing import Inputs

from .report import Report, synchronize
from .workers import Lost, spread

TABLES = ("full", "clamped", "zero", "none")
IN_PARTS = str(4 << 20)  # bytes of a workspace that some calls fill twice
OURS: Any = partial(fused_relative_attention, return_lse=True, implementation="triton")


@dataclass(frozen=True)
class Checked:
    """One call; with ``kernel``, that kernel alone."""

    table: str
    is_causal: bool
    dtype: str
    width: int = 64
    value_width: int | None = None
    batch: int = 2
    heads: int = 2
    num_queries: int = 301
    num_keys: int = 301
    per_head: bool = False
    query_offset: int = 0
    padded: bool = False
    kernel: str = ""
    p2c: bool = False
    """Whether the keys have a table, too."""
    workspace: str = ""
    """The limit of the backward's workspace in bytes, if it is not the usual one."""

    def positions(self) -> RelativePositions | None:
        """Return the positions of a table with a row for every visible pair, or with fewer."""
        span = self.num_keys // 5
        if self.table == "full":
            farthest = self.num_keys - 1 - self.query_offset
            first = 1 - self.num_queries - self.query_offset
            return RelativePositions(first, min(farthest, 0) if self.is_causal else farthest)
        if self.table == "clamped":
            return RelativePositions(-span, span)
        return RelativePositions(-2 * span, span // 2, "zero") if self.table == "zero" else None

    def arguments(self, device: str) -> dict[str, Any]:
        lengths = [(self.num_keys, 0, self.num_keys // 3)[entry % 3] for entry in range(self.batch)]
        return {
            "positions": self.positions(),
            "key_lengths": torch.tensor(lengths, dtype=torch.int32, device=device) if self.padded else None,
            "is_causal": self.is_causal,
            "query_offset": self.query_offset,
            "scale": None,
        }

    def inputs(self, device: str, sharp: bool = False) -> Inputs:
        positions = self.positions()
        return testing.make_inputs(
            *(self.batch, self.heads, self.num_queries, self.num_keys, self.width, self.value_width),
            num_rows=None if positions is None else positions.num_rows,
            per_head=self.per_head,
            rel_p2c=self.p2c,
            dtype=getattr(torch, self.dtype),
            device=device,
            seed=1,
            sharp=sharp,
        )


def run_kernel(case: Checked, inputs: Inputs, arguments: dict[str, Any]) -> tuple[str, dict[str, torch.Tensor]]:
    """Return what one kernel computes in the selected configuration; those of the backward go on from the forward's results."""
    query, key, value, rel_key = inputs[:4]
    tensors, spec = validation.resolve(Arguments.of(query, key, value, rel_key, **inputs.terms(), **arguments))
    config = Call(tensors, spec).tile(case.kernel)
    keeps = residual.keeps_residual(tensors, spec) and case.kernel != "dq"
    out, lse, softmax_stats, kept = forward(tensors, spec, keeps_residual=keeps)
    if case.kernel == "forward":
        return shown(config), {"out": out, "lse": lse}
    wanted, tiles = [name in tuning.GRADIENTS[case.kernel] for name in DIFFERENTIABLE], {case.kernel: config}
    gradients = backward(inputs.d_out, inputs.d_lse, out, softmax_stats, tensors, spec, wanted, tiles, residual=kept)
    named = zip(DIFFERENTIABLE, gradients, strict=True)
    return shown(config), {f"d_{name}": gradient for name, gradient in named if gradient is not None}


def run_case(case: Checked, device: str) -> list[dict[str, Any]]:
    """One row for normal and one for sharp inputs; whatever goes wrong is in them."""
    rows = []
    for sharp in (False, True):
        row, started, failure = {**asdict(case), "sharp": sharp}, time.monotonic(), "not run"
        try:
            synchronize(device)  # raises if an earlier case has left the GPU in an error
            failure = "error"
            inputs, arguments = case.inputs(device, sharp), case.arguments(device)
            with mock.patch.dict(os.environ, {planning.VARIABLE: case.workspace} if case.workspace else {}):
                if case.kernel:
                    row["config"], results = run_kernel(case, inputs, arguments)
                else:
                    results = testing.forward_backward(OURS, inputs, **arguments)
            synchronize(device)
            row |= judge(results, inputs, arguments)
        except Exception as error:
            row |= {"status": failure, "message": in_one_line(error)}
        rows.append({**row, "seconds": f"{time.monotonic() - started:.2f}"})
    return rows


def correctness_cases(tiny: bool) -> list[Checked]:
    in_turn = list(zip(TABLES, (True, False, True, False), strict=True))
    if tiny:
        small = partial(Checked, batch=1, heads=1, num_queries=50, num_keys=61)
        uneven = partial(Checked, batch=3, heads=1, num_queries=40, num_keys=70, padded=True, query_offset=30, width=40)
        cases = [small(table, causal, "float16") for table, causal in in_turn]
        small_p2c = small("full", True, "float16", p2c=True)
        return [*cases, uneven("clamped", True, "float16"), small("full", False, "float32", width=16), small_p2c]
    shapes: list[dict[str, Any]] = [
        {"batch": 3, "padded": True},
        {"num_queries": 129, "num_keys": 523, "query_offset": 394},
        {"num_queries": 523, "num_keys": 129, "query_offset": -60, "width": 128},
        {"per_head": True, "num_queries": 512, "num_keys": 512},
        *({"width": width} for width in (16, 40, 80, 256)),
        {"value_width": 96, "per_head": True},
        {"batch": 1, "heads": 1, "num_queries": 2048, "num_keys": 2048},
        {"batch": 3, "num_queries": 1100, "num_keys": 1100, "padded": True},  # the query's gradient from the workspace
        {"num_queries": 1030, "num_keys": 1300, "query_offset": 270, "width": 128, "per_head": True},
        {"batch": 60, "heads": 1, "num_queries": 200, "num_keys": 200},
        {"batch": 60, "heads": 1, "num_queries": 200, "num_keys": 200, "workspace": IN_PARTS},
        {"num_queries": 1, "num_keys": 300, "query_offset": 299},
        {"num_queries": 1, "num_keys": 4100, "query_offset": 4099},  # several programs share the keys
        {"num_queries": 300, "num_keys": 1},
    ]
    main = [(table, causal, width) for width in (64, 128) for table in TABLES for causal in (False, True)]
    cases = [Checked(table, causal, "bfloat16", width) for table, causal, width in main]
    for number, shape in enumerate(shapes):
        cases += [Checked(table, causal ^ (number % 2 == 1), "bfloat16", **shape) for table, causal in in_turn]
    cases += [Checked("full", causal, "bfloat16", width, p2c=True) for causal in (False, True) for width in (64, 128)]
    cases += [Checked("clamped", False, "bfloat16", batch=3, padded=True, per_head=True, p2c=True)]
    cases += [Checked(table, causal, "float32") for table, causal in in_turn]
    cases += [Checked(table, causal, "float16", width) for table, causal, width in main]
    return [*cases, Checked("full", True, "float32", 128), Checked("clamped", False, "float32", 256)]


def config_cases(tiny: bool) -> list[Checked]:
    """Every call that selection.select distinguishes."""
    batch, heads = (1, 1) if tiny else (2, 2)

    def length_of(kernel: str) -> int:
        return max(45 if tiny else 301, residual.FEWEST_QUERIES if kernel == "dq_from_ds" else 0)

    return [
        Checked(table, causal, dtype, width, None, batch, heads, *2 * (length_of(kernel),), kernel=kernel, p2c=p2c)
        for dtype in (("float16",) if tiny else ("bfloat16", "float16"))
        for width in ((64,) if tiny else (64, 128, 256))
        for causal in ((True,) if tiny else (False, True))
        for table in TABLES
        for kernel in selection.KERNELS
        for p2c in (False, True)
        if (table == "full" if p2c else kernel != "dp2c" and (table != "none" or kernel != "dtable"))
        if table == "full" or kernel != "dq_from_ds"
    ]


def check_cases(part: str, cases: Sequence[Checked], options: argparse.Namespace, report: Report, deadline: float) -> None:
    done, failed = 0, report.outcome.failed
    for case, rows in spread(partial(run_case, device=options.device), cases, options.jobs, deadline):
        done += 1
        if isinstance(rows, Lost):
            rows = [{**asdict(case), "status": "lost", "message": rows.reason}]
        for row in rows:
            report.add(f"{part}.csv", {"part": part, **row})
    report.left(len(cases) - done)
    report.done(f"{done} of {len(cases)} cases, {report.outcome.failed - failed} rows failed")


def correctness(options: argparse.Namespace, report: Report, deadline: float) -> None:
    check_cases("correctness", correctness_cases(options.tiny), options, report, deadline)


def every_config(options: argparse.Namespace, report: Report, deadline: float) -> None:
    check_cases("configs", config_cases(options.tiny), options, report, deadline)


def differences(case: Checked, device: str, runs: int, deadline: float) -> tuple[int, str]:
    """How many runs there were, and what was not equal to the first run's; the first again is in torch's deterministic mode."""
    inputs, arguments = case.inputs(device), case.arguments(device)
    first = testing.forward_backward(OURS, inputs, **arguments)
    run, different = 0, []
    while run < runs and time.monotonic() < deadline:
        torch.use_deterministic_algorithms(run == 0)
        try:
            again = testing.forward_backward(OURS, inputs, **arguments)
        finally:
            torch.use_deterministic_algorithms(False)
        run += 1
        different += [f"run {run}: {name}" for name in first if not torch.equal(first[name], again[name])]
    return run, ", ".join(different)


def repeats(options: argparse.Namespace, report: Report, deadline: float) -> None:
    length, heads, batches = (50, 1, {1: 1, 2: 1}) if options.tiny else (1024, 8, {4: 51, 60: 251})
    for table, causal, batch in [(table, batch == min(batches), batch) for batch in batches for table in ("full", "clamped")]:
        name = f"b{batch} h{heads} n{length} d64" + " causal" * causal
        row: dict[str, Any] = {"part": "repeats", "case": name, "variant": table}
        try:
            case = Checked(table, causal, options.dtype, batch=batch, heads=heads, num_queries=length, num_keys=length)
            run, different = differences(case, options.device, batches[batch], deadline)
            status = "FAILED" if different else "ok" if run == batches[batch] else "cut off"
            row |= {"value": run, "status": status, "message": different[:500]}
        except Exception as error:
            row |= {"status": "error", "message": in_one_line(error)}
        report.add("checks.csv", {**row, "direction": "forward+backward", "unit": "runs"})
        report.say(f"repeats: {name} {table}: {row.get('value', '-')} runs, {row['status']}")
