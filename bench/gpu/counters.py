"""Counters of the main kernels by NVIDIA's ncu: where they read from, what misses, which pipes are busy. As a program, the calls.

ncu is part of the CUDA toolkit (Nsight Compute). Some virtual machines hide the counters; it then says so.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch

from bench.report.rows import output_of

from . import stub
from .kernels import case_of, run_kernels
from .report import Report

KERNELS = ("forward", "dkv", "dq", "dtable")
METRICS = {
    "gpu__time_duration.sum": "time",
    "lts__t_bytes.sum": "bytes of L2",
    "dram__bytes_read.sum": "bytes read from memory",
    "dram__bytes_write.sum": "bytes written to memory",
    "l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum": "sectors of spills read",
    "l1tex__t_sectors_pipe_lsu_mem_local_op_ld_lookup_miss.sum": "of them not in L1",
    "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active": "ALU, share of its peak",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": "exponentials, share of their peak",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": "products, share of their peak",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "resident warps, share of the most",
    **{
        f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio": f"warps that wait: {reason}"
        for reason in ("long_scoreboard", "short_scoreboard", "barrier", "math_pipe_throttle", "gmma")
    },
}
"""What is asked for, and what it is called here."""
FEWEST = 4
"""The first of them, time and bytes, are asked for alone if ncu cannot have all."""


def counters(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Each main kernel once, of a call of width 64 and of 128. Without ncu, or where it cannot work, that is said."""
    program = shutil.which("ncu")
    if program is None:
        report.done("there is no ncu")
        return
    # Another GPU may not have one of them, and ncu then does nothing at all.
    known = {line.split()[0] for line in output_of(program, "--query-metrics").splitlines() if line.strip()}
    metrics = [name for name in METRICS if not known or name.partition(".")[0] in known]
    found: list[tuple[str, str, str, str]] = []
    for asked in (metrics, metrics[:FEWEST]):
        command = [program, "--clock-control", "none", "--csv", "--print-units", "base", "--metrics", ",".join(asked)]
        command += ["--kernel-name", f"regex:^({'|'.join(KERNELS)})_kernel", "--profile-from-start", "off"]
        command += [sys.executable, "-m", "bench.gpu.counters", *["--stub"] * options.stub]
        status, lines = report.run(command, deadline - time.monotonic())
        found = list(rows_of(lines))
        if found or time.monotonic() > deadline:
            break
    if not found:
        report.done(f"ncu cannot work here: {lines[-1] if lines else f'exit status {status}'}")
        return
    for kernel, metric, value, unit in found:
        report.add(case=kernel, variant=METRICS[metric], unit=unit, value=value, status="ok")
    report.done(f"{len(found)} counters")


def rows_of(lines: Sequence[str]) -> Iterator[tuple[str, str, str, str]]:
    """Kernel, metric, value and unit, from what ncu prints beside other things."""
    table = [line for line in lines if line.startswith('"')]
    for row in csv.DictReader(io.StringIO("\n".join(table))):
        if row.get("Metric Name") in METRICS:
            kernel, value = row["Kernel Name"].partition("(")[0], row["Metric Value"].replace(",", "")
            yield kernel, row["Metric Name"], value, row["Metric Unit"]


def main() -> int:
    """Run forward and backward of each call twice; ncu looks at the second time, when all is compiled."""
    with stub.without_a_gpu() if "--stub" in sys.argv else nullcontext():
        for width in (64, 128):
            case = case_of(width)
            inputs, d_out = case.inputs("cuda")
            tensors, spec = case.resolved(inputs)
            run_kernels(tensors, spec, d_out, {})
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            run_kernels(tensors, spec, d_out, {})
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
