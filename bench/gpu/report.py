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
MEASURED_COLUMNS = (*MEASURED, *timing.GPU_COLUMNS)
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


class State:
    """Files of the state folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._wrong = folder / "wrong.txt"
        folder.mkdir(parents=True, exist_ok=True)

    def outcome_path(self, part: str) -> Path:
        return self.folder / f"part-{part}.json"

    def outcome(self, part: str, status: int | None, seconds: float) -> Outcome:
        """Judge a part by what its process has written and how it ended; status: as of workers.watch."""
        try:
            outcome = Outcome(**json.loads(self.outcome_path(part).read_text()))
        except (OSError, ValueError, TypeError):
            outcome = Outcome(part)
        outcome.seconds = seconds
        if status is None:
            outcome.ended = f"cut off after {seconds:.0f} s"
        elif not outcome.is_done or status != 0:
            outcome.ended = f"crashed: {ending(status)}"
        return outcome

    def has_checked(self) -> bool:
        return self.outcome_path("correctness").exists()

    def add_wrong(self, kind: str) -> None:
        """Remember that results of calls of a kind are wrong: they are not timed."""
        with self._wrong.open("a") as file:
            file.write(f"{kind}\n")

    def wrong_kinds(self) -> set[str]:
        return set(self._wrong.read_text().splitlines()) if self._wrong.exists() else set()

    def forget(self) -> None:
        self._wrong.unlink(missing_ok=True)


def kind(case: Case) -> str:
    """What calls whose kernels are alike but for lengths have in common."""
    return str(case.resized(1, batch=1, heads=1, key_heads=case.key_heads and 1, num_queries=None))


class Report:
    """The files of one part, and what becomes of it."""

    def __init__(self, options: argparse.Namespace, part: str) -> None:
        self.state, self.outcome = State(options.state), Outcome(part)
        self.stamp = stamp("cuda")
        self.checks = Table(CHECKS, self.stamp, options.results / "checks.csv", append=True)
        self.measured = Table(MEASURED_COLUMNS, self.stamp, options.results / "results.csv", append=True)
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

    def done(self, note: str = "") -> None:
        self.outcome.note, self.outcome.is_done = note, True
        self.save()

    def fail(self, text: str) -> None:
        self._judge("failed", {"": text})

    def run(self, command: Sequence[str], seconds: float, **environment: str) -> tuple[int | None, list[str]]:
        """Run a program and print its lines; return its exit status, as of watch, and the lines."""
        lines: list[str] = []

        def hear(line: str) -> None:
            lines.append(line)
            self.say(f"    {line}")

        return watch(command, seconds, hear, **environment), lines

    def save(self) -> None:
        """Whatever becomes of this process, what it has come to so far is in a file."""
        path = self.state.outcome_path(self.outcome.part)
        path.with_suffix(".new").write_text(json.dumps(asdict(self.outcome)))
        os.replace(path.with_suffix(".new"), path)

    def _judge(self, status: str, row: dict[str, Any]) -> None:
        self.outcome.rows += 1
        if status != "ok":
            text = " ".join(f"{name}={value}".lstrip("=") for name, value in row.items() if value not in ("", None))
            self.outcome.failed += 1
            if len(self.outcome.errors) < MOST_ERRORS:
                self.outcome.errors.append(text[:300])
            self.say(f"  failed: {text}")
        self.save()
