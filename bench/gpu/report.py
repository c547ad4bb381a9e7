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
from bench.report.rows import Table, command_output, stamp
from bench.verbs.speed import COLUMNS as MEASURED

from .workers import ending, watch

CHECKS = ("part", "case", "variant", "direction", "value", "unit", "status", "message")
MOST_ERRORS = 5
FAILED, DONE = "  failed: ", "done: "
"""Beginnings of a part's lines that Outcome.hear reads: of a row that failed, and of the last line."""


@dataclass
class Outcome:
    """What became of a part, by the lines of its process and how that ended.

    skipped: items that there was no time for. ended: how its process ended, if not by itself.
    """

    part: str
    rows: int = 0
    failed: int = 0
    skipped: int = 0
    errors: list[str] = field(default_factory=list)
    note: str = ""
    is_done: bool = False
    seconds: float = 0.0
    ended: str = ""

    def hear(self, line: str) -> bool:
        """Read a line of the part; return whether it is for the log."""
        if line.startswith(DONE):
            self.rows, self.skipped, self.note = json.loads(line.removeprefix(DONE))
            self.is_done = True
            return False
        if line.startswith(FAILED):
            self.failed += 1
            self.errors += [line.removeprefix(FAILED)[:300]] * (len(self.errors) < MOST_ERRORS)
        return True

    def end(self, status: int | None, seconds: float) -> None:
        """Judge how the process ended; status: as of workers.watch."""
        self.seconds, self.ended = seconds, ""
        if status is None:
            self.ended = f"cut off after {seconds:.0f} s"
        elif not self.is_done or status != 0:
            self.ended = f"crashed: {ending(status)}"

    @property
    def status(self) -> str:
        """ "ok", "left out", "FAILED, 2 rows", "crashed: ..." or "cut off after 40 s", or what of these comes together."""
        parts = [f"FAILED, {self.failed} row{'s' * (self.failed != 1)}"] if self.failed else []
        if self.ended or self.skipped:
            parts.append(self.ended or f"cut off after {self.seconds:.0f} s")
        return ", ".join(parts) or ("ok" if self.rows else "left out")

    @property
    def has_failed(self) -> bool:
        return self.failed > 0 or self.ended.startswith("crashed")

    def line(self) -> str:
        return f"{self.status} in {self.seconds:.0f} s" + f"; {self.note}" * bool(self.note)


def kind(case: Case) -> str:
    """The kind of a call: calls of the same kind have the same kernels, at any length."""
    return str(case.resized(1, batch=1, heads=1, key_heads=case.key_heads and 1, num_queries=None))


def wrong_kinds(state: Path) -> set[str] | None:
    """Kinds of calls whose results are wrong: they are not timed. None if nothing was checked."""
    path = state / "wrong.txt"
    return set(path.read_text().splitlines()) if path.exists() else None


def describe_environment(options: argparse.Namespace) -> dict[str, Any]:
    """What environment.json has besides the stamp of the rows."""
    gpu = torch.cuda.get_device_properties(0)
    return {
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


class Report:
    """The lines and rows of one part, in its process."""

    def __init__(self, options: argparse.Namespace, part: str) -> None:
        self.part, self.state, self.stamp = part, options.state, stamp("cuda")
        self.rows = self.skipped = 0
        self.checks = Table(CHECKS, self.stamp, options.results / "checks.csv", append=True)
        self.measured = Table((*MEASURED, *timing.GPU_COLUMNS), self.stamp, options.results / "results.csv", append=True)
        path = options.results / "environment.json"
        if not path.exists():
            path.write_text(json.dumps(self.stamp | describe_environment(options), indent=1, default=str) + "\n")

    def say(self, text: str) -> None:
        print(text, flush=True)

    def add(self, **row: Any) -> None:
        """Append a row of checks.csv at once; one that did not pass is also printed. "not run" is neither passed nor failed."""
        self.checks.add({"part": self.part, **row})
        if row["status"] != "not run":
            self._judge(row["status"] == "ok", row)

    def add_wrong(self, kind: str) -> None:
        with (self.state / "wrong.txt").open("a") as file:
            file.write(f"{kind}\n")

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
        failed = row["status"].startswith(("wrong", "failed") if row["method"] in OUR_METHODS else "wrong")
        self._judge(not failed, {name: row.get(name) for name in ("verb", "case", "method", "direction", "config", "status")})

    def skip(self, count: int) -> None:
        """There was no time for so many items."""
        self.skipped += max(0, count)

    def fail(self, text: str) -> None:
        self._judge(False, {"": text})

    def done(self, note: str = "") -> None:
        self.say(DONE + json.dumps([self.rows, self.skipped, note]))

    def run(self, command: Sequence[str], seconds: float, **environment: str) -> tuple[int | None, list[str]]:
        """Run a program and print its lines; return its exit status, as of watch, and the lines."""
        lines: list[str] = []

        def hear(line: str) -> None:
            lines.append(line)
            self.say(f"    {line}")

        return watch(command, seconds, hear, **environment), lines

    def _judge(self, is_right: bool, row: dict[str, Any]) -> None:
        self.rows += 1
        if not is_right:
            self.say(FAILED + " ".join(f"{name}={value}".lstrip("=") for name, value in row.items() if value not in ("", None)))
