"""Correctness by the error rule of the tests: stand-ins for the timed calls, single kernels, calls of every kind, repeats."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from bench.cases.attention import DTYPES, GROUPS, OPERANDS, Case, gpu_cases
from bench.cases.methods import ours
from bench.measure import timing
from bench.report.rows import in_one_line
from triton_relattn import fused_relative_attention, testing
from triton_relattn._core.spec import DIFFERENTIABLE
from triton_relattn.check import judge
from triton_relattn.kernels import tuning
from triton_relattn.kernels.call import Call
from triton_relattn.kernels.config import selection
from triton_relattn.kernels.workspace import planning
from triton_relattn.testing import Inputs

from .report import Report, kind
from .workers import Lost, spread

TABLES = ("full", "clamped", "zero", "none")
SHORT_CHECKED, LONGEST_CHECKED = 512, 1040
"""Queries of calls that stand for longer ones: divisible by 16, as Triton likes it."""


@dataclass(frozen=True)
class Check:
    """A call to check, or one kernel of it.

    kernel: the one that is checked alone. workspace: the limit of the backward's workspace in bytes, if not the usual one.
    kind: of the timed calls that this one stands for, which do not return lse.
    """

    case: Case
    kernel: str = ""
    workspace: str = ""
    kind: str = ""

    def __str__(self) -> str:
        workspace = f", workspace {self.workspace}" * bool(self.workspace)
        return f"{self.case}{workspace}" + f", {self.kernel} alone" * bool(self.kernel)

    def results(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """out, lse and gradients, by name; of one kernel, what it computes."""
        if self.kernel:
            return run_kernel(self.case, self.kernel, inputs)
        if not self.kind:
            attend: Any = partial(fused_relative_attention, return_lse=True, implementation="triton")
            return testing.forward_backward(attend, inputs, **self.case.options(inputs))
        names = ["out", *(f"d_{name}" for name in (*OPERANDS, *self.case.tables(inputs)))]
        step = timing.steps(self.case, ours(self.case, "triton"), inputs)["forward+backward"]
        return dict(zip(names, step.run(), strict=True))

    def run(self, device: str = "cuda") -> list[dict[str, Any]]:
        """A row for normal and one for sharp inputs, whatever goes wrong among them."""
        rows = []
        for sharp in (False, True):
            row: dict[str, Any] = {"case": str(self), "variant": "sharp" * sharp, "direction": self.kernel or "forward+backward"}
            try:
                inputs = self.case.inputs(device, sharp)
                if self.kernel or self.kind:
                    inputs = inputs._replace(d_lse=torch.zeros_like(inputs.d_lse))
                with mock.patch.dict(os.environ, {planning.VARIABLE: self.workspace} if self.workspace else {}):
                    results = self.results(inputs)
                synchronize(device)
                found = judge(results, inputs, self.case.options(inputs))
                row["value"] = ", ".join(f"{name} {found[name]}" for name in results if name in found)
                row |= {"unit": "errors by plain torch's", "status": found["status"], "message": found["message"]}
            except Exception as error:
                row |= {"status": "failed", "message": in_one_line(error)}
            rows.append(row)
        return rows


def run_kernel(case: Case, kernel: str, inputs: Inputs) -> dict[str, torch.Tensor]:
    """What one kernel computes in the selected configuration; those of the backward go on from the forward's results."""
    tensors, spec = case.resolved(inputs)
    tile = Call(tensors, spec).tile(kernel)
    saved = tuning.run_forward(tensors, spec)
    results = tuning.run_kernel(kernel, tensors, spec, inputs.d_out, saved, tile)
    names = [name for name in DIFFERENTIABLE if name in tuning.GRADIENTS[kernel] and getattr(tensors, name) is not None]
    return dict(zip(["out", "lse"] if kernel == "forward" else [f"d_{name}" for name in names], results, strict=True))


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
        half = str(heads * DTYPES[case.dtype].itemsize * length**2)  # of the stored pairs
        calls = [(many, ""), (many, half), (many, "0"), (one, ""), (one, "0")]
        for call, workspace in calls if case.terms else calls[:1]:
            yield Check(call, workspace=workspace, kind=kind(case))
        if case.terms:
            yield Check(many, kernel="forward", kind=kind(case))


def timed_checks(cases: Iterable[Case]) -> list[Check]:
    """Checks that stand for all cases, with their tables and without, none of them twice."""
    checks = [check for case in cases for computed in (case, case.without_table()) for check in stand_ins(computed)]
    return list({str(check): check for check in checks}.values())


def kernels_alone() -> list[Check]:
    """Each kernel of a call with a full table."""
    cases = [Case(2, 2, LONGEST_CHECKED, width) for width in (64, 128)]
    return [Check(case, kernel=name) for name in selection.KERNELS if name != "dp2c" for case in cases]


def small_case(table: str, is_causal: bool = False, dtype: str = "bf16", head_dim: int = 64, **sizes: Any) -> Case:
    """A call with one of TABLES, of 301 positions unless sizes say otherwise."""
    case = Case(**{"batch": 2, "heads": 2, "length": 301, **sizes}, head_dim=head_dim, is_causal=is_causal, dtype=dtype)
    if table == "none":
        return case.without_table()
    queries = case.num_queries or case.length
    offset = case.length - queries if case.query_offset is None else case.query_offset
    span, last = case.length // 5, case.length - 1 - offset
    full = (1 - queries - offset, min(last, 0) if is_causal else last)
    extent = {"full": full, "clamped": (-span, span), "zero": (-2 * span, span // 2)}[table]
    return replace(case, extent=extent, outside="zero" if table == "zero" else "clamp")


def all_kinds() -> list[Check]:
    """Calls of every kind: tables, masks, widths, lengths, dtypes."""
    alternating = list(zip(TABLES, (True, False, True, False), strict=True))
    padded: dict[str, Any] = {"batch": 3, "padding": (1.0, 0.0, 1 / 3)}
    shapes: list[dict[str, Any]] = [
        padded,
        {"num_queries": 129, "length": 523},
        {"num_queries": 523, "length": 129, "query_offset": -60, "head_dim": 128},
        {"per_head": True, "length": 512},
        *({"head_dim": width} for width in (16, 40, 80, 256)),
        {"value_dim": 96, "per_head": True},
        {"batch": 1, "heads": 1, "length": 2048},
        {**padded, "length": 1100},
        {"num_queries": 1030, "length": 1300, "head_dim": 128, "per_head": True},
        {"batch": 60, "heads": 1, "length": 200},  # its backward in parts
        {"num_queries": 1, "length": 300},
        {"num_queries": 1, "length": 4100},  # its keys are split among programs
        {"num_queries": 300, "length": 1, "query_offset": 0},
    ]
    main = [(table, causal, width) for width in (64, 128) for table in TABLES for causal in (False, True)]
    cases = [small_case(table, causal, "bf16", width) for table, causal, width in main]
    for number, shape in enumerate(shapes):
        cases += [small_case(table, causal ^ (number % 2 == 1), **shape) for table, causal in alternating]
    p2c, values = ("rel_key", "rel_p2c"), ("rel_key", "rel_value")
    cases += [small_case("full", causal, "bf16", width, terms=p2c) for causal in (False, True) for width in (64, 128)]
    cases += [small_case("clamped", **padded, per_head=True, terms=p2c), small_case("zero", terms=(*values, "rel_bias"))]
    cases += [small_case("clamped", True, terms=values, per_head=True)]
    cases += [small_case(table, causal, "fp32") for table, causal in alternating]
    cases += [small_case(table, causal, "fp16", width) for table, causal, width in main]
    cases += [small_case("full", True, "fp32", 128), small_case("clamped", False, "fp32", 256)]
    return [Check(case, workspace=str(4 << 20) if case.batch == 60 else "") for case in cases]


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
            if check.kind and any(row["status"] != "ok" for row in rows):
                report.add_wrong(check.kind)
        pending = lacking
    report.skip(len(checks) - done)
    return done


def correctness(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Calls that stand for the timed ones, then calls of every kind."""
    timed = [case for cases in (gpu_cases(), GROUPS["dense"], GROUPS["flex"]) for case in cases[: options.most]]
    checks = [*timed_checks(timed), *all_kinds()[: options.most]]
    (report.state / "wrong.txt").touch()
    report.done(f"{check_all(checks, options, report, deadline)} of {len(checks)} calls")


def repeats(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Many runs of one call are equal bit for bit; the first again is in torch's deterministic mode, which fills new memory with
    NaN. A call that the time did not allow to run again is "not run", neither passed nor failed."""
    calls = [(table, *sizes) for sizes in ((4, 64, 51), (60, 64, 251), (8, 128, 101)) for table in ("full", "clamped")]
    for table, batch, width, runs in calls[: options.most]:
        check = Check(small_case(table, batch == 4, head_dim=width, batch=batch, heads=8, length=1024))
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
    report.done()


def differences(results: Any, runs: int, deadline: float) -> tuple[int, str]:
    """How many runs there were, and what was not equal to the first run's."""
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


def marked_tests(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """pytest of the tests that are marked gpu, as far as it comes."""
    if importlib.util.find_spec("pytest") is None:
        report.done("there is no pytest")
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
    report.done(message)


def sanitizer(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Small calls under compute-sanitizer's memcheck: addresses that are not the kernels' own. Without it that is said."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        report.done("there is no compute-sanitizer")
        return
    # Each tensor is an allocation of its own: else what lies beyond its end is torch's, and no error.
    command = [program, "--error-exitcode", "86", "--report-api-errors", "no", sys.executable, "-m", "bench.gpu.checks"]
    status, lines = report.run(command, deadline - time.monotonic(), PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    calls = sum("call: " in line for line in lines)
    summary = next((line for line in reversed(lines) if "SUMMARY" in line), lines[-1] if lines else "")
    if status == 86 or calls:
        verdict = "ok" if status in (0, None) and calls else "FAILED"
        report.add(case="memcheck", value=calls, unit="calls", status=verdict, message=summary)
    report.done(f"{calls} calls; {summary}")


def synchronize(device: str = "cuda") -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """A few calls of every kind, for compute-sanitizer."""
    wrong = 0
    for check in (*timed_checks([Case(1, 2, 512, 64)]), *all_kinds()[::5]):
        problems = [row["message"] for row in check.run() if row["status"] != "ok"]
        wrong += bool(problems)
        print(f"call: {check}: {problems or 'ok'}", flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
