"""Small calls under compute-sanitizer: memory that is not the kernels' own, races in shared memory. As a program, the calls.

compute-sanitizer is part of the CUDA toolkit. Some virtual machines hide what it needs of the driver; it then says so.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from dataclasses import replace

from .checks import correctness_cases, run_case
from .report import Report

TOOLS = {"memcheck": ("--report-api-errors", "no"), "racecheck": ()}  # torch asks the driver what it may refuse
FOUND = 86
"""Exit status of compute-sanitizer where a tool has found something; the program's own is passed on."""
ALONE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Each tensor is an allocation of its own: else what lies beyond its end is torch's, and no error."""


def sanitizer(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Each tool in turn. Without compute-sanitizer, or where it cannot work, that is said and nothing has failed."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        report.done("there is no compute-sanitizer")
        return
    for number, tool in enumerate(TOOLS):
        calls_of = [sys.executable, "-m", "bench.gpu.sanitizer", "--device", options.device]
        command = [program, "--tool", tool, "--error-exitcode", str(FOUND), *TOOLS[tool], *calls_of]
        row = {"part": "sanitizer", "case": tool, "unit": "calls"}
        seconds = (deadline - time.monotonic()) / (len(TOOLS) - number)
        began = time.monotonic()
        status, lines = report.run(f"{tool}.txt", command, seconds, **ALONE)
        calls = sum(line.startswith("call: ") for line in lines)
        summary = next((line for line in reversed(lines) if "SUMMARY" in line), lines[-1] if lines else "")
        if status not in (None, 0, FOUND) and calls == 0:
            report.say(f"sanitizer: {tool} cannot work here: {summary}")
            continue
        passed = status == 0 and calls > 0
        verdict = f"cut off after {time.monotonic() - began:.0f} s" if status is None else "ok" if passed else "FAILED"
        if status == FOUND and tool == "racecheck":
            verdict = "cut off: it found hazards, which may be none, since it does not see what asynchronous copies wait for"
        report.add("checks.csv", {**row, "value": calls, "status": verdict, "message": summary})
        report.say(f"sanitizer: {tool}, {calls} calls: {summary}")


def main() -> int:
    """Forward and backward of each small case, checked; one line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    failed = 0
    for case in correctness_cases(tiny=True):
        if device == "cuda" and case.dtype == "float16":
            case = replace(case, dtype="bfloat16")
        problems = [row for row in run_case(case, device) if row["status"] != "ok"]
        print(f"call: {case}: {problems or 'ok'}", flush=True)
        failed += bool(problems)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
