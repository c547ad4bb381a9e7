"""Correctness by the error rule of the tests: calls that stand for the timed ones, repeats, and the checks of others."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from bench.cases.attention import BIAS, CLIPPED, DTYPES, GROUPS, P2C, Case, gpu_cases
from bench.cases.methods import ours
from bench.measure import timing
from bench.report.rows import in_one_line
from triton_relattn.check import judge
from triton_relattn.check import main as check_every_kind
from triton_relattn.kernels.workspace import planning
from triton_relattn.testing import Inputs

from .report import Report, kind
from .workers import Lost, spread

INKLING = {"is_causal": True, "rows": 65, "outside": "zero", "rel_dim": 16}
SHORT_CHECKED, LONGEST_CHECKED = 512, 1040
"""Queries of calls that stand for longer ones: divisible by 16, as Triton likes it."""


@dataclass(frozen=True)
class Check:
    """A call that stands for timed ones; workspace: the limit of the backward's in bytes, if not the usual one."""

    case: Case
    workspace: str = ""
    direction: str = "forward+backward"

    def __str__(self) -> str:
        workspace = f", workspace {self.workspace}" * bool(self.workspace)
        return f"{self.case}{workspace}" + f", {self.direction} alone" * (self.direction == "forward")

    def results(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """out and gradients, by name."""
        names = ["out", *(f"d_{name}" for name in self.case.learned(inputs))]
        results = timing.steps(self.case, ours(self.case, "triton"), inputs)[self.direction].run()
        return dict(zip(names, results, strict=False))

    def run(self, device: str = "cuda") -> list[dict[str, Any]]:
        """A row for normal and one for sharp inputs, whatever goes wrong among them."""
        rows = []
        for sharp in (False, True):
            row: dict[str, Any] = {"case": str(self), "variant": "sharp" * sharp, "direction": self.direction}
            try:
                inputs = self.case.inputs(device, sharp)
                inputs = inputs._replace(d_lse=torch.zeros_like(inputs.d_lse))
                with mock.patch.dict(os.environ, {planning.VARIABLE: self.workspace} if self.workspace else {}):
                    results = self.results(inputs)
                if device == "cuda":
                    torch.cuda.synchronize()
                found = judge(results, inputs, self.case.options(inputs))
                row["value"] = ", ".join(f"{name} {found[name]}" for name in results if name in found)
                row |= {"unit": "errors by plain torch's", "status": found["status"], "message": found["message"]}
            except Exception as error:
                row |= {"status": "failed", "message": in_one_line(error)}
            rows.append(row)
        return rows


def stand_ins(case: Case) -> Iterator[Check]:
    """Short calls that launch every kernel that a timed case may launch at any length.

    With a workspace of all pairs, in parts of whole heads, whose sums are added up, and in parts of a head; with several programs
    that share sums of a table, and with one; and the forward alone, which keeps no residual.
    """
    group = case.heads // (case.key_heads or case.heads)
    heads = group * math.gcd(case.heads // group, 16)  # whose strides are multiples of 16 where those of all heads are
    # A table that is shorter than the call by far has a workspace of its own shape.
    longest = LONGEST_CHECKED if case.rows is None else max(LONGEST_CHECKED, (case.rows + 700) // 16 * 16)
    for length in dict.fromkeys(min(case.length, checked) for checked in (SHORT_CHECKED, longest)):
        key_heads = None if case.key_heads is None else heads // group
        many = case.resized(length, batch=2, heads=heads, key_heads=key_heads, num_queries=None, group="")
        one = replace(many, batch=1, heads=group, key_heads=None if key_heads is None else 1)
        stored_keys = min(length, (case.rows or length) + 128)  # of each query: those of a short table and of a tile
        half = str(heads * DTYPES[case.dtype].itemsize * length * stored_keys)  # of the stored pairs
        calls = [(many, ""), (many, half), (many, "0"), (one, ""), (one, "0")]
        for call, workspace in calls if case.terms else calls[:1]:
            yield Check(call, workspace)
        if case.terms:
            yield Check(many, direction="forward")


def timed_checks(cases: Iterable[Case]) -> list[Check]:
    """Checks that stand for all cases, with their tables and without, none of them twice."""
    checks = [check for case in cases for computed in (case, case.without_table()) for check in stand_ins(computed)]
    return list({str(check): check for check in checks}.values())


def check_all(checks: Sequence[Check], options: argparse.Namespace, report: Report, deadline: float) -> int:
    """Check calls, many at once, until the deadline, and those that lacked memory beside others again, alone; return how many."""
    done, pending = 0, checks
    for jobs in (options.jobs, 1):
        lacking = list[Check]()
        for check, found in spread(Check.run, pending, jobs, deadline):
            if jobs > 1 and "out of memory" in str(found):
                lacking.append(check)
                continue
            done += 1
            rows = [{"case": str(check), "status": "failed", "message": found.reason}] if isinstance(found, Lost) else found
            for row in rows:
                report.add(**row)
            if any(row["status"] != "ok" for row in rows):
                with (report.state / "wrong.txt").open("a") as file:
                    file.write(f"{kind(check.case)}\n")
        pending = lacking
    report.skip(len(checks) - done)
    return done


def correctness(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Calls that stand for the timed ones."""
    timed = [case for cases in (gpu_cases(), GROUPS["dense"], GROUPS["flex"]) for case in cases[: options.most]]
    checks = timed_checks(timed)
    (report.state / "wrong.txt").touch()
    report.say(f"{check_all(checks, options, report, deadline)} of {len(checks)} calls")


def repeats(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Many runs of one call are equal bit for bit. One that the time did not allow to run again neither passed nor failed."""
    calls = [(rows, *sizes) for sizes in ((4, 64, 51), (60, 64, 251), (8, 128, 101)) for rows in (None, CLIPPED)]
    for table_rows, batch, width, runs in calls[: options.most]:
        check = Check(Case(batch, 8, 1024, width, batch == 4, table_rows))
        row: dict[str, Any] = {"case": str(check), "direction": "forward+backward", "unit": "runs"}
        try:
            inputs, runs = check.case.inputs("cuda"), options.most or runs
            run, different = differences(partial(check.results, inputs), runs, deadline)
            report.skip(run < runs)
            row |= {"value": run, "status": "FAILED" if different else "ok" if run else "not run", "message": different[:500]}
        except Exception as error:
            row |= {"status": "failed", "message": in_one_line(error)}
        report.add(**row)
        report.say(f"  {check}: {row.get('value', '-')} runs, {row['status']}")


def differences(results: Callable[[], dict[str, torch.Tensor]], runs: int, deadline: float) -> tuple[int, str]:
    """How many runs there were, and what was not equal to the first run's.

    The first again is in torch's deterministic mode, which fills new memory with NaN.
    """
    first, different, run = results(), list[str](), 0
    while run < runs and time.monotonic() < deadline:
        torch.use_deterministic_algorithms(run == 0)
        try:
            again = results()
        finally:
            torch.use_deterministic_algorithms(False)
        run += 1
        different += [f"run {run}: {name}" for name in first if not torch.equal(first[name], again[name])]
    return run, ", ".join(different)


def kinds(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Calls of every kind, by the package's own check: in a process of its own, or in this one if that has the stub of a GPU."""
    if options.stub:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            status: int | None = check_every_kind()
        lines = printed.getvalue().splitlines()
        report.say("\n".join(lines))
    else:
        command = [sys.executable, "-m", "triton_relattn", "check"]
        status, lines = report.run(command, deadline - time.monotonic())
    last = "".join(lines[-1:]).strip()
    if status == 2:
        report.leave_out(last)
        return
    report.skip(status is None)
    is_right = status in (0, None) and not any("FAILED" in line for line in lines)
    report.add(case="python -m triton_relattn check", status="ok" if is_right else "FAILED", message=last)


def marked_tests(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """pytest of the tests that are marked gpu, as far as it comes."""
    if importlib.util.find_spec("pytest") is None:
        report.leave_out("there is no pytest")
        return
    command = [sys.executable, "-m", "pytest", "-rfE", "--tb=short", "-m", "gpu", "tests/gpu", "-p", "no:cacheprovider", "-v"]
    if options.jobs > 1 and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(options.jobs)]
    status, lines = report.run(command, deadline - time.monotonic())
    verdicts = [found[1] for line in lines if (found := re.search(r"(?:^|::\S+|\]) (PASSED|FAILED|ERROR)\b", line))]
    passed = verdicts.count("PASSED")
    # pytest's exit status 5: no test was for this machine. One that was cut off is judged by its verdicts so far.
    is_right = status in (0, 5) or (status is None and passed == len(verdicts))
    message = f"{passed} passed, {len(verdicts) - passed} did not; {lines[-1] if lines else ''}"
    report.add(case="pytest -m gpu", value=passed, unit="tests", message=message, status="ok" if is_right else "FAILED")
    report.skip(status is None)
    report.say(message)


def sanitizer(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Small calls under compute-sanitizer's memcheck: addresses that are not the kernels' own."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        report.leave_out("there is no compute-sanitizer")
        return
    # Each tensor is an allocation of its own: else what lies beyond its end is torch's, and no error.
    command = [program, "--error-exitcode", "86", "--report-api-errors", "no", sys.executable, "-m", "bench.gpu.checks"]
    status, lines = report.run(command, deadline - time.monotonic(), PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    calls = sum("call: " in line for line in lines)
    summary = next((line for line in reversed(lines) if "SUMMARY" in line), lines[-1] if lines else "")
    if status != 86 and not calls:
        report.leave_out(summary)
        return
    verdict = "ok" if status in (0, None) and calls else "FAILED"
    report.add(case="memcheck", value=calls, unit="calls", status=verdict, message=summary)
    report.say(f"{calls} calls; {summary}")


def main() -> None:
    """A few calls of every kind, for compute-sanitizer."""
    wrong = 0
    tables: tuple[dict[str, Any], ...] = ({}, {"rows": 33, "is_causal": True}, {"terms": BIAS}, {"terms": P2C}, INKLING)
    for check in timed_checks([Case(1, 2, 512, 64, **options) for options in tables]):
        problems = [row["message"] for row in check.run() if row["status"] != "ok"]
        wrong += bool(problems)
        print(f"call: {check}: {problems or 'ok'}", flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
