"""Which kernel is wrong, and what mends it: each kernel alone, as it is and changed, in a process of its own.

Run when a check has failed. The forward comes first, since the others go on from its results: what mends it is in the profile
when they run. compute-sanitizer then looks at the kernels that nothing mended.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from bench.cases.configurations import shown
from triton_relattn.kernels.introspect import Call, TileConfig, architecture_of, profiles, selection

from . import checks
from .checks import launched, one_kernel, run_kernel
from .report import Report
from .workers import watch

KERNELS = ("forward", "dkv", "dq", "dtable")
WIDTHS = (64, 128)
COVERAGES = ("full", "clamp", "zero", "no table")
CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "one stage": {"num_stages": 1},
    "no register limit": {"max_registers": None},
    "gather": {"rotation": "gather"},
    "no ptxas optimisation": {},
}
"""Changes of a configuration, the likeliest first; the last one is of the assembler."""
MEANS = {
    "one stage": "Triton's pipelining of its loop (or its fences: docs/versions.md)",
    "no register limit": "spilled registers, or ptxas",
    "gather": "the rotation in registers (kernels/tile/registers.py)",
    "no ptxas optimisation": "ptxas (docs/versions.md): a newer one by TRITON_PTXAS_PATH",
}
PATIENCE, LEAST_SECONDS = 30.0, 3.0  # that a process may take, and that are worth beginning
NOT_KNOWN = "there was no time"


def child(kernel: str, width: int, change: str) -> dict[str, Any]:
    """Check one kernel, changed."""
    case = one_kernel(kernel, width)
    inputs, arguments = case.inputs("cuda", False)
    tile = Call.tile

    def changed(call: Call, name: str, config: TileConfig | None = None) -> TileConfig:
        found = tile(call, name, config)
        return replace(found, **CHANGES[change]) if name == kernel else found

    with mock.patch.object(Call, "tile", changed), launched():
        config, results = run_kernel(case, inputs, arguments)
        return {"config": config, **checks.judge(results, inputs, arguments)}


class Diagnosis:
    """Runs children, and keeps what they found."""

    def __init__(self, options: argparse.Namespace, report: Report, deadline: float) -> None:
        self.options, self.report, self.deadline = options, report, deadline
        self.mended: dict[tuple[str, int], str] = {}

    def run(self, kernel: str, width: int, change: str) -> str:
        """Run one child; "ok", or what is wrong."""
        lines: list[str] = []
        environment = {"RELATTN_CHILD": json.dumps((kernel, width, change))}
        if change == "no ptxas optimisation":  # Triton's keys do not know of it
            environment |= {"DISABLE_PTXAS_OPT": "1", "TRITON_CACHE_DIR": str(self.report.state.folder / "not optimised")}
        seconds = min(PATIENCE, self.deadline - time.monotonic())
        if seconds < LEAST_SECONDS:
            return NOT_KNOWN
        status = watch(self._command(), seconds, lines.append, **environment)
        for line in lines:
            if line.startswith("RESULT "):
                found = json.loads(line[7:])
                return str(found["status"] if found["status"] == "ok" else found["message"][:160])
        if status is None:
            return "hangs" if seconds == PATIENCE else NOT_KNOWN
        return f"exit status {status}: {lines[-1][:160] if lines else ''}"

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "bench.gpu.diagnosis", *["--stub"] * self.options.stub]

    def run_all(self, items: Iterable[tuple[str, int, str]]) -> dict[tuple[str, int, str], str]:
        every = list(items)
        with ThreadPoolExecutor(max(2, self.options.jobs)) as pool:
            found = dict(zip(every, pool.map(lambda item: self.run(*item), every), strict=True))
        for (kernel, width, change), result in found.items():
            self.report.checks.add({"part": "diagnosis", "case": f"{kernel} d{width}", "variant": change, "status": result})
            self.report.say(f"  {kernel} d{width}, {change}: {result}")
        return found

    def look(self, kernels: Iterable[str]) -> dict[tuple[str, int], str]:
        """Check kernels as they are, then the wrong ones changed, and write what mends them into the profile. Return those that
        are wrong, and how."""
        found = self.run_all((kernel, width, "as it is") for kernel in kernels for width in WIDTHS)
        wrong = {(kernel, width): result for (kernel, width, _), result in found.items() if result not in ("ok", NOT_KNOWN)}
        changed = self.run_all((*each, change) for change in list(CHANGES)[1:] for each in wrong if self._changes(*each, change))
        for kernel, width in wrong:
            mending = [change for change in CHANGES if changed.get((kernel, width, change)) == "ok"]
            if mending:
                self.mended[kernel, width] = mending[0]
                if CHANGES[mending[0]]:
                    self.write(kernel, width, CHANGES[mending[0]])
        return wrong

    def _changes(self, kernel: str, width: int, change: str) -> bool:
        """Return whether a change is one of this kernel."""
        tile = _default(self.report.arch, kernel, width)
        return not CHANGES[change] or replace(tile, **CHANGES[change]) != tile

    def write(self, kernel: str, width: int, change: dict[str, Any]) -> None:
        """Write a change of every default of a kernel and width into the profile."""
        arch, rows = self.report.arch, []
        for row, coverage in itertools.product(selection.defaults(), COVERAGES):
            conditions = row.conditions._replace(kernel=kernel, precision="16 bits", width=str(width), coverage=coverage, unit="")
            tile = replace(row.config, **change)
            is_of_gpu = row.conditions.fit(conditions._replace(unit=architecture_of(arch).unit))
            if is_of_gpu and tile.why_invalid(arch, coverage != "no table", kernel) is None:
                rows.append(profiles.Row(conditions, tile))
        path = profiles.user_profile_path(arch)
        assert path is not None
        profiles.save(path, arch, rows, why="bench.gpu found the default to be wrong")

    def memcheck(self, kernel: str, width: int) -> str:
        """Return what compute-sanitizer says of a kernel."""
        tool = shutil.which("compute-sanitizer")
        if tool is None or self.deadline - time.monotonic() < 5:
            return "not run"
        command = [tool, "--kernel-regex", f"kns={kernel}_kernel", "--error-exitcode", "86", *self._command()]
        environment = {"RELATTN_CHILD": json.dumps((kernel, width, "as it is")), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        status, lines = self.report.run(command, min(PATIENCE, self.deadline - time.monotonic()), **environment)
        return next((line for line in reversed(lines) if "SUMMARY" in line), f"exit status {status}")


def _default(arch: str, kernel: str, width: int) -> TileConfig:
    return selection.select(kernel, arch, torch.bfloat16, width, "full")


def diagnose(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Say which kernels are wrong and what mends them; the last line is the finding."""
    diagnosis = Diagnosis(options, report, deadline)
    wrong = diagnosis.look(KERNELS[:1])
    wrong |= diagnosis.look(KERNELS[1:])
    findings = []
    for (kernel, width), result in wrong.items():
        change = diagnosis.mended.get((kernel, width))
        if change is None:
            memory = diagnosis.memcheck(kernel, width)
            findings.append(
                f"{kernel} at width {width} is wrong ({result[:80]}); nothing that was tried mends it; memcheck: {memory}"
            )
            continue
        tile = shown(replace(_default(report.arch, kernel, width), **CHANGES[change]))
        profile = f" The profile has {tile} now." if CHANGES[change] else ""
        findings.append(f"{kernel} at width {width} is wrong; mended by {change}: {MEANS[change]}.{profile}")
    finding = (
        " | ".join(findings) or "each kernel alone is right: look at what joins them (splits, parts of the workspace, residual)"
    )
    report.state.put("finding", {"text": finding, "mended": len(diagnosis.mended) == len(wrong) > 0})
    report.outcome.rows = len(wrong) or 1
    report.done(finding)


def main() -> None:
    """What a child does."""
    from . import stub

    with stub.without_a_gpu() if "--stub" in sys.argv else nullcontext():
        print("RESULT " + json.dumps(child(*json.loads(os.environ["RELATTN_CHILD"]))), flush=True)


if __name__ == "__main__":
    main()
