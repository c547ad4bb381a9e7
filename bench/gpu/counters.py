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
from .kernels import TINY, run_kernels
from .report import Report
from .variants import case_of

KERNELS = ("forward", "dkv", "dtable", "dq_from_ds")
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
}
"""What is asked for, and what it is called here."""


def counters(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Each main kernel once, of a call of width 64 and of 128. Without ncu, or where it cannot work, that is said."""
    program = shutil.which("ncu")
    if program is None:
        report.done("there is no ncu")
        return
    known = output_of(program, "--query-metrics")  # another GPU may not have one, and ncu then does nothing at all
    metrics = [name for name in METRICS if not known or name.partition(".")[0] in known]
    command = [program, "--clock-control", "none", "--csv", "--print-units", "base", "--metrics", ",".join(metrics)]
    command += ["--kernel-name", f"regex:^({'|'.join(KERNELS)})_kernel", "--profile-from-start", "off"]
    command += [sys.executable, "-m", "bench.gpu.counters", *["--tiny"] * options.tiny, *["--stub"] * options.stub]
    status, lines = report.run("counters.txt", command, deadline - time.monotonic())
    found = list(rows_of(lines))
    if not found:
        report.say(f"counters: ncu cannot work here: {lines[-1] if lines else f'exit status {status}'}")
        return
    for kernel, metric, value, unit in found:
        row = {"part": "counters", "case": kernel, "variant": METRICS[metric], "unit": unit, "value": value, "status": "ok"}
        report.add("checks.csv", row)
        report.say(f"counters: {kernel}, {METRICS[metric]}: {value} {unit}")
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--stub", action="store_true")
    options = parser.parse_args()
    with stub.without_a_gpu() if options.stub else nullcontext():
        for width in (64, 128):
            case = TINY if options.tiny else case_of(width, "full")
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
