"""What a run writes: lines, rows of two files, and for a later run what was found so far.

In the results folder there are log.txt, environment.json, checks.csv (verdicts and single figures) and results.csv (times and
memory). The state folder outlasts a run: what became of each part, and kinds of calls whose results are wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
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


@dataclass
class Outcome:
    """What became of a part, so far or in the end.

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

    @staticmethod
    def path(state: Path, part: str) -> Path:
        return state / f"part-{part}.json"

    @classmethod
    def judged(cls, state: Path, part: str, status: int | None, seconds: float) -> Outcome:
        """Judge a part by what its process has written and how it ended; status: as of workers.watch."""
        try:
            outcome = cls(**json.loads(cls.path(state, part).read_text()))
        except (OSError, ValueError, TypeError):
            outcome = cls(part)
        outcome.seconds = seconds
        if status is None:
            outcome.ended = f"cut off after {seconds:.0f} s"
        elif not outcome.is_done or status != 0:
            outcome.ended = f"crashed: {ending(status)}"
        return outcome

    def save(self, state: Path) -> None:
        """Replace the file as a whole: whatever becomes of this process, it can be read."""
        path = self.path(state, self.part)
        path.with_suffix(".new").write_text(json.dumps(asdict(self)))
        os.replace(path.with_suffix(".new"), path)

    @property
    def status(self) -> str:
        """ "ok", "left out", "FAILED, 2 of 9", "crashed: ..." or "cut off after 40 s", or what of these comes together."""
        words = [f"FAILED, {self.failed} of {self.rows}"] if self.failed else []
        if self.ended:
            words.append(self.ended)
        elif self.skipped:
            words.append(f"cut off after {self.seconds:.0f} s")
        return ", ".join(words) or ("ok" if self.rows else "left out")

    @property
    def has_failed(self) -> bool:
        return self.failed > 0 or self.ended.startswith("crashed")

    def line(self) -> str:
        return f"{self.status} in {self.seconds:.0f} s" + f"; {self.note}" * bool(self.note)


def kind(case: Case) -> str:
    """What calls whose kernels are alike but for lengths have in common."""
    return str(case.resized(1, batch=1, heads=1, key_heads=case.key_heads and 1, num_queries=None))


def wrong_kinds(state: Path) -> set[str]:
    """Kinds of calls whose results are wrong: they are not timed."""
    path = state / "wrong.txt"
    return set(path.read_text().splitlines()) if path.exists() else set()


class Report:
    """The files of one part, and what becomes of it."""

    def __init__(self, options: argparse.Namespace, part: str) -> None:
        self.state, self.outcome, self.stamp = options.state, Outcome(part), stamp("cuda")
        self.checks = Table(CHECKS, self.stamp, options.results / "checks.csv", append=True)
        self.measured = Table((*MEASURED, *timing.GPU_COLUMNS), self.stamp, options.results / "results.csv", append=True)
        path = options.results / "environment.json"
        if not path.exists():
            gpu = torch.cuda.get_device_properties(0)
            environment: dict[str, Any] = {**self.stamp, "python": platform.python_version(), "arguments": vars(options)}
            environment |= {"capability": f"{gpu.major}.{gpu.minor}", "multiprocessors": gpu.multi_processor_count}
            environment |= {"memory_bytes": gpu.total_memory, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
            environment["nvidia-smi"] = command_output("nvidia-smi", "-q", "-d", "CLOCK,POWER,PERFORMANCE")[:8000]
            environment["driver"] = command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
            path.write_text(json.dumps(environment, indent=1, default=str) + "\n")

    def say(self, text: str) -> None:
        print(text, flush=True)

    def add(self, **row: Any) -> None:
        """Append a row of checks.csv at once; one that did not pass is also printed. "not run" is neither passed nor failed."""
        self.checks.add({"part": self.outcome.part, **row})
        if row["status"] != "not run":
            self._judge(row["status"], row)

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
        names = ("verb", "case", "method", "direction", "config", "status")
        self._judge(row["status"] if failed else "ok", {name: row.get(name) for name in names})

    def skip(self, count: int) -> None:
        """There was no time for so many items."""
        self.outcome.skipped += max(0, count)

    def fail(self, text: str) -> None:
        self._judge("failed", {"": text})

    def done(self, note: str = "") -> None:
        self.outcome.note, self.outcome.is_done = note, True
        self.outcome.save(self.state)

    def run(self, command: Sequence[str], seconds: float, **environment: str) -> tuple[int | None, list[str]]:
        """Run a program and print its lines; return its exit status, as of watch, and the lines."""
        lines: list[str] = []

        def hear(line: str) -> None:
            lines.append(line)
            self.say(f"    {line}")

        return watch(command, seconds, hear, **environment), lines

    def _judge(self, status: str, row: dict[str, Any]) -> None:
        self.outcome.rows += 1
        if status != "ok":
            text = " ".join(f"{name}={value}".lstrip("=") for name, value in row.items() if value not in ("", None))
            self.outcome.failed += 1
            self.outcome.errors += [text[:300]] * (len(self.outcome.errors) < MOST_ERRORS)
            self.say(f"  failed: {text}")
        self.outcome.save(self.state)
