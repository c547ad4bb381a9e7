"""What a run on a GPU writes: lines, rows of two files, and the kinds of calls that are wrong.

In the results folder there are log.txt, environment.json, checks.csv (verdicts and single figures) and results.csv (times and
memory). The state folder outlasts a run: its wrong.txt has the kinds of calls whose results are wrong.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.cases.attention import Case
from bench.cases.methods import OUR_METHODS
from bench.measure import timing
from bench.report.rows import Table, command_output, read, stamp
from bench.verbs.speed import COLUMNS as MEASURED

from .workers import ending, watch

CHECKS = ("part", "case", "variant", "direction", "value", "unit", "status", "message")
ERROR = "  failed: "
"""The beginning of a part's line about a row that failed."""
MOST_ERRORS = 5
OK, FAILED, CUT_OFF, LEFT_OUT = 0, 1, 3, 4
"""Exit statuses of a part's process; any other one is a crash."""


@dataclass
class Outcome:
    """What became of a part: by its lines, and by how its process ended, or None if that was interrupted."""

    part: str
    ended: str = "interrupted"
    failed: int = 0
    errors: list[str] = field(default_factory=list)
    note: str = ""

    def hear(self, line: str) -> None:
        """Read a line of the part; the last one is a note for the summary."""
        self.note = line.strip()
        if line.startswith(ERROR):
            self.failed += 1
            self.errors += [line.removeprefix(ERROR)[:300]] * (len(self.errors) < MOST_ERRORS)

    def end(self, status: int | None, seconds: float) -> None:
        """Judge how the process ended; status: as of workers.watch."""
        if status is None or status == CUT_OFF:
            self.ended = f"cut off after {seconds:.0f} s"
        elif status in (OK, LEFT_OUT) or (status == FAILED and self.failed):
            self.ended = f"{'left out' if status == LEFT_OUT else 'ended'} in {seconds:.0f} s"
        else:
            self.ended = f"crashed: {ending(status)}"

    @property
    def has_failed(self) -> bool:
        return self.failed > 0 or self.ended.startswith("crashed")

    def __str__(self) -> str:
        failed = f"FAILED, {self.failed} row{'s' * (self.failed != 1)}, " * bool(self.failed)
        return f"{failed}{self.ended}; {self.note}"


def kind(case: Case) -> str:
    """The kind of a call: calls of the same kind have the same kernels, at any length."""
    return str(case.resized(1, batch=1, heads=1, key_heads=case.key_heads and 1, num_queries=None))


def wrong_kinds(state: Path) -> set[str] | None:
    """Kinds of calls whose results are wrong: they are not timed. None if nothing was checked."""
    path = state / "wrong.txt"
    return set(path.read_text().splitlines()) if path.exists() else None


class Report:
    """The lines and rows of one part, in its process. status: its exit status as things stand."""

    def __init__(self, options: argparse.Namespace, part: str) -> None:
        self.part, self.state, self.stamp, self.status = part, options.state, stamp("cuda"), OK
        self.earlier: set[tuple[str, str]] | None = None
        self.checks = Table(CHECKS, self.stamp, options.results / "checks.csv", append=True)
        self.measured = Table((*MEASURED, *timing.GPU_COLUMNS), self.stamp, options.results / "results.csv", append=True)
        path = options.results / "environment.json"
        if not path.exists():
            gpu = torch.cuda.get_device_properties(0)
            environment = {
                **self.stamp,
                "python": platform.python_version(),
                "arguments": vars(options),
                "capability": f"{gpu.major}.{gpu.minor}",
                "multiprocessors": gpu.multi_processor_count,
                "memory_bytes": gpu.total_memory,
                "cuda": torch.version.cuda,
                "cudnn": torch.backends.cudnn.version(),
                "nvidia-smi": command_output("nvidia-smi", "-q", "-d", "CLOCK,POWER,PERFORMANCE")[:8000],
                "driver": command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            }
            path.write_text(json.dumps(environment, indent=1, default=str) + "\n")

    def say(self, text: str) -> None:
        print(text, flush=True)

    def add(self, **row: Any) -> None:
        """Append a row of checks.csv at once; one that did not pass is also printed. "not run" is neither passed nor failed."""
        self.checks.add({"part": self.part, **row})
        if row["status"] not in ("ok", "not run"):
            self.fail(row)

    def add_figure(
        self, case: str, direction: str, value: float | None, unit: str, status: str, variant: str = "", message: str = ""
    ) -> None:
        """Append a figure to checks.csv and print it. Others' methods that cannot run, or raise, have not failed."""
        is_bad = value is None and (variant in OUR_METHODS or status.startswith("wrong"))
        row = {"case": case, "variant": variant, "direction": direction, "value": value, "unit": unit, "message": message}
        self.add(**row, status=status if is_bad or value is not None else "not run")
        number = status if value is None else f"{value:.4g} {unit}"
        self.say(f"  {', '.join(filter(None, (direction, variant, case)))}: {number}")

    def has_measured(self, case: str, methods: Sequence[str]) -> bool:
        """Whether an earlier run of this commit on this device left the rows of a case, by all methods, in this folder."""
        if self.earlier is None:
            path = self.measured.csv_path
            rows = read(path) if path is not None and path.exists() else []
            own = [row for row in rows if all(row[name] == self.stamp[name] for name in ("commit", "device", "torch", "triton"))]
            self.earlier = {(row["case"], row["method"]) for row in own if row["verb"] == "speed"}
        return all((case, method) in self.earlier for method in methods)

    def add_measured(self, row: dict[str, Any]) -> None:
        """Append a row of results.csv and print its time.

        What cannot run here, or lacks the memory, has not failed; nor have we if a method of others raises.
        """
        self.measured.add(row)
        name = f"  {row['direction']}, {row['method']}, {row['case']}"
        if row.get("p50_ms"):
            stalled = ", waits for the host" * (row.get("waits_for_host") == "yes")
            self.say(f"{name}: {row['p50_ms']:.3f} ms{stalled}")
        elif row["status"] != "ok" and not row["status"].startswith("does not apply"):
            self.say(f"{name}: {row['status']}")
        if row["status"].startswith(("wrong", "failed") if row["method"] in OUR_METHODS else "wrong"):
            self.fail({name: row.get(name) for name in ("verb", "case", "method", "direction", "config", "status")})

    def fail(self, row: dict[str, Any]) -> None:
        self.status = FAILED
        self.say(ERROR + " ".join(f"{name}={value}" for name, value in row.items() if value not in ("", None)))

    def skip(self, count: int) -> None:
        """There was no time for so many items."""
        if count > 0 and self.status == OK:
            self.status = CUT_OFF

    def leave_out(self, reason: str) -> None:
        """Nothing of the part can run here."""
        self.status = LEFT_OUT
        self.say(reason)

    def run(self, command: Sequence[str], seconds: float, **environment: str) -> tuple[int | None, list[str]]:
        """Run a program and print its lines; return its exit status, as of watch, and the lines."""
        lines: list[str] = []

        def hear(line: str) -> None:
            lines.append(line)
            self.say(f"    {line}")

        return watch(command, seconds, hear, **environment), lines
