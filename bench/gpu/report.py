"""What a run writes: lines, rows of two files, and for a later run what was found so far.

In the results folder there are log.txt, environment.json, checks.csv (verdicts, answers, rates, counters) and results.csv (times
and memory), and figures. The state folder outlasts a run: which kernels were checked and which were timed, what is wrong, the
measured peak of matrix products, and a profile of configurations that mend a kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.cases.attention import Case
from bench.cases.methods import OF_OURS
from bench.measure import timing
from bench.report.rows import Table, output_of, stamp
from bench.verbs.speed import COLUMNS as MEASURED

from .workers import ending, watch

CHECKS = ("part", "case", "variant", "direction", "value", "unit", "status", "message")
MEASURED_COLUMNS = (*MEASURED, *timing.OF_GPU, "sm_mhz", "power_w", "of_peak")
MOST_ERRORS = 5


@dataclass
class Outcome:
    """What became of a part, so far or in the end.

    left: items that there was no time for. ended: how its process ended, if not by itself.
    """

    part: str
    rows: int = 0
    failed: int = 0
    left: int = 0
    errors: list[str] = field(default_factory=list)
    note: str = ""
    is_done: bool = False
    seconds: float = 0.0
    ended: str = ""

    @property
    def status(self) -> str:
        """Return "ok", "left out", "FAILED, 2 of 9", "crashed: ..." or "cut off after 40 s", or what of these comes together."""
        words = [f"FAILED, {self.failed} of {self.rows}"] if self.failed else []
        if self.ended:
            words.append(self.ended)
        elif self.left:
            words.append(f"cut off after {self.seconds:.0f} s")
        return ", ".join(words) or ("ok" if self.rows else "left out")

    @property
    def has_failed(self) -> bool:
        return self.failed > 0 or self.ended.startswith("crashed")


class State:
    """Files of the state folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _lines(self, name: str) -> set[str]:
        path = self.folder / name
        return set(path.read_text().splitlines()) if path.exists() else set()

    def _append(self, name: str, lines: Iterable[str]) -> None:
        with (self.folder / name).open("a") as file:
            file.write("".join(f"{line}\n" for line in sorted(lines)))

    def note_kernels(self, role: str, kernels: Iterable[str]) -> None:
        """Remember compiled kernels, by name and key, that were "checked" or "timed"."""
        self._append(f"{role}.txt", kernels)

    @property
    def has_checks(self) -> bool:
        return bool(self._lines("checked.txt"))

    def unchecked(self) -> list[str]:
        """Return kernels that were timed, and no check has run."""
        return sorted(self._lines("timed.txt") - self._lines("checked.txt"))

    def note_wrong(self, kind: str, results: Iterable[str]) -> None:
        """Remember that results of calls of a kind (see kind_of) are wrong."""
        self._append("wrong.txt", {f"{kind}|{result}" for result in results})

    def forget(self, *names: str) -> None:
        """Remove files; all that a check finds, if none are named."""
        for name in names or ("wrong.txt", "checked.txt", "timed.txt", "finding.json", "matrix_peak.json"):
            (self.folder / name).unlink(missing_ok=True)
        if not names:
            shutil.rmtree(self.profiles, ignore_errors=True)

    def wrong_directions(self, kind: str) -> set[str]:
        """Return the directions of calls of a kind that are not worth timing: with a wrong out nothing is."""
        wrong = {line.partition("|")[2] for line in self._lines("wrong.txt") if line.partition("|")[0] == kind}
        every = set(timing.DIRECTIONS)
        return every if wrong & {"out", "lse", "all"} else every - {"forward"} if wrong else set()

    def put(self, name: str, value: Any) -> None:
        (self.folder / f"{name}.json").write_text(json.dumps(value))

    def get(self, name: str) -> Any:
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    @property
    def profiles(self) -> Path:
        """Return the folder of the profile that the package reads as the user's."""
        return self.folder / "profiles"


def kind_of(case: Case, has_table: bool = True) -> str:
    """Return what calls whose kernels are alike but for lengths have in common."""
    one = case.resized(1, batch=1, heads=1, key_heads=case.key_heads and 1, num_queries=None)
    return str(one) if has_table else f"{one.without_table()} plain"


class Report:
    """The files of one part, and what becomes of it."""

    def __init__(self, options: argparse.Namespace, part: str) -> None:
        self.folder, self.state, self.outcome, self.arch = options.results, State(options.state), Outcome(part), options.arch
        self.stamp = stamp("cuda")
        self.checks = Table(CHECKS, self.stamp, self.folder / "checks.csv", append=True)
        self.measured = Table(MEASURED_COLUMNS, self.stamp, self.folder / "results.csv", append=True)
        if not (self.folder / "environment.json").exists():
            gpu = torch.cuda.get_device_properties(0)
            environment: dict[str, Any] = {**self.stamp, "python": platform.python_version(), "arguments": vars(options)}
            environment |= {"capability": f"{gpu.major}.{gpu.minor}", "multiprocessors": gpu.multi_processor_count}
            environment |= {"memory_bytes": gpu.total_memory, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
            environment["nvidia-smi"] = output_of("nvidia-smi", "-q", "-d", "CLOCK,POWER,PERFORMANCE")[:8000]
            environment["driver"] = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
            (self.folder / "environment.json").write_text(json.dumps(environment, indent=1, default=str) + "\n")

    def say(self, text: str) -> None:
        print(text, flush=True)

    def add(self, **row: Any) -> None:
        """Append a row of checks.csv at once; one that did not pass is also printed."""
        row = {"part": self.outcome.part, **row}
        self.checks.add(row)
        self._judge(row["status"], row)

    def add_measured(self, row: dict[str, Any], what_else: str = "") -> None:
        """Append a row of results.csv and print its time.

        What cannot run here, or lacks the memory, has not failed; nor have we if a method of others raises.
        """
        self.measured.add(row)
        waits = ", waits for the host" * (row.get("waits_for_host") == "yes")
        if row.get("p50_ms"):
            self.say(f"  {row['direction']}, {row['method']}, {row['case']}: {row['p50_ms']:.3f} ms{what_else}{waits}")
        elif row["status"] != "ok" and not row["status"].startswith("does not apply"):
            self.say(f"  {row['direction']}, {row['method']}, {row['case']}: {row['status']}{what_else}")
        failed = row["status"].startswith(("wrong", "failed") if row["method"] in OF_OURS else "wrong")
        names = ("verb", "case", "method", "direction", "config", "status")
        self._judge(row["status"] if failed else "ok", {name: row.get(name) for name in names})

    def left(self, count: int) -> None:
        """Say for how many things there was no time."""
        self.outcome.left += max(0, count)

    def done(self, note: str = "") -> None:
        self.outcome.note, self.outcome.is_done = note, True
        self.save()

    def fail(self, text: str) -> None:
        self._judge("failed", {"": text})

    def run(self, command: Sequence[str], seconds: float, **environment: str) -> tuple[int | None, list[str]]:
        """Return the exit status, as of watch, and the lines of a program, and print these."""
        lines: list[str] = []

        def hear(line: str) -> None:
            lines.append(line)
            self.say(f"    {line}")

        return watch(command, seconds, hear, **environment), lines

    def save(self) -> None:
        """Whatever becomes of this process, what it has come to so far is in a file."""
        path = outcome_path(self.state.folder, self.outcome.part)
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


def outcome_path(state: Path, part: str) -> Path:
    return state / f"part-{part}.json"


def outcome_of(state: Path, part: str, status: int | None, seconds: float) -> Outcome:
    """Judge a part by what its process has left behind and how it ended; status: as of workers.watch."""
    try:
        outcome = Outcome(**json.loads(outcome_path(state, part).read_text()))
    except (OSError, ValueError, TypeError):
        outcome = Outcome(part)
    outcome.seconds = seconds
    if status is None:
        outcome.ended = f"cut off after {seconds:.0f} s"
    elif not outcome.is_done or status != 0:
        outcome.ended = f"crashed: {ending(status)}"
    return outcome


def synchronize(device: str = "cuda") -> None:
    if device == "cuda":
        torch.cuda.synchronize()
