"""Files, printed lines, and what became of a part."""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import platform
import tarfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench import predictions
from bench.cases.methods import OF_OURS
from bench.measure import timing
from bench.report.rows import STAMP, Table, output_of, stamp
from bench.verbs.speed import COLUMNS as MEASURED

from .workers import ending, watch

RESULTS = ("out", "lse", "d_query", "d_key", "d_value", "d_rel_key", "d_rel_p2c")
CASE_COLUMNS = [
    *"part table is_causal dtype width value_width batch heads num_queries num_keys".split(),
    *"per_head query_offset padded p2c workspace".split(),
    *("kernel", "config", "sharp", "status", "seconds", *RESULTS, "message"),
]
COLUMNS = {
    "correctness.csv": CASE_COLUMNS,
    "configs.csv": CASE_COLUMNS,
    "checks.csv": ["part", "case", "variant", "direction", "value", "unit", "status", "message", *STAMP],
}
"""Columns of the files that are packed in the end; what is measured goes into results.csv."""
MEASURED_COLUMNS = (*MEASURED, *timing.OF_GPU, "predicted_ms", "measured_by_predicted")
PACKED = "raw.tar.gz"
ENVIRONMENT = "environment.json"
LARGEST_FILE, LARGEST_PACKED = 4 << 20, 8 << 20  # bytes of one file, and of all of them packed
FIRST_ERRORS = 5


@dataclass
class Outcome:
    """The result of a part, so far or in the end."""

    part: str
    rows: int = 0
    failed: int = 0
    cut_off: int = 0
    """Rows that say so: what was too slow."""
    left: int = 0
    """Items that there was no time for."""
    errors: list[str] = field(default_factory=list)
    """The first lines of what went wrong."""
    note: str = ""
    is_done: bool = False
    seconds: float = 0.0
    ended: str = ""
    """How its process ended, if not by itself: "crashed: signal SIGSEGV", "cut off after 40 s"."""

    @property
    def status(self) -> str:
        """Tell "ok", "left out", "FAILED", "crashed: ..." or "cut off after N s", or what of these comes together."""
        words = [f"FAILED, {self.failed} of {self.rows}"] if self.failed else []
        if self.ended:
            words.append(self.ended)
        elif self.left or self.cut_off:
            words.append(f"cut off after {self.seconds:.0f} s")
        return ", ".join(words) or ("ok" if self.rows else "left out")

    @property
    def has_failed(self) -> bool:
        return self.failed > 0 or self.ended.startswith("crashed")

    @property
    def is_cut_off(self) -> bool:
        return "cut off" in self.status


def gpu_properties() -> dict[str, Any]:
    gpu = torch.cuda.get_device_properties(0)
    return {
        "capability": f"{gpu.major}.{gpu.minor}",
        "multiprocessors": gpu.multi_processor_count,
        "memory_bytes": gpu.total_memory,
        "l2_bytes": getattr(gpu, "L2_cache_size", None),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


class Report:
    """The files of one part, and what becomes of it. Files of earlier parts are added to."""

    def __init__(self, options: argparse.Namespace, part: str) -> None:
        self.folder, self.raw, self.outcome = options.results, options.raw, Outcome(part)
        on_gpu = options.device == "cuda"
        self.stamp = stamp("cuda" if on_gpu else f"CPU, {platform.machine()}, interpreter")
        self.measured = Table(MEASURED_COLUMNS, self.stamp, self.folder / "results.csv", append=True)
        self.arch = options.arch
        if not (self.raw / ENVIRONMENT).exists():  # the first part of a run
            environment = {**self.stamp, "python": platform.python_version(), "arguments": vars(options)}
            text = json.dumps(environment | (gpu_properties() if on_gpu else {}), indent=2, default=str)
            (self.raw / ENVIRONMENT).write_text(text + "\n")

    def say(self, text: str) -> None:
        print(text, flush=True)

    def add(self, name: str, row: dict[str, Any]) -> None:
        """Append to one of the files of COLUMNS at once; a row that did not pass is also printed."""
        row = {**self.stamp, **row}
        with (self.raw / name).open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS[name], extrasaction="ignore")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)
        self._judge(row["status"], row)

    def add_measured(self, row: dict[str, Any], what_else: str = "") -> None:
        """Append a row of speed, memory or kernels, with what the model of cycles predicts, and print its time.

        What cannot run here, or lacks the memory, has not failed; nor have we if a method of others raises.
        """
        row = row | predictions.beside(row, self.arch)
        self.measured.add(row)
        names = ("verb", "case", "method", "direction", "config", "status")
        waits = ", waits for the host" * (row.get("waits_for_host") == "yes")
        if row.get("p50_ms") and row.get("predicted_ms"):
            text = f"{row['p50_ms']:.3f} ms, predicted {row['predicted_ms']:.3f} (x{row['measured_by_predicted']:.2f})"
            self.say(f"  {row['direction']}, {row['method']}, {row['case']}: {text}{what_else}{waits}")
        elif row.get("p50_ms") and row["verb"] == "kernels":
            self.say(f"  {row['direction']}, {row['method']}, {row['case']}: {row['p50_ms']:.3f} ms{what_else}{waits}")
        elif row["status"] != "ok" and not row["status"].startswith("does not apply"):
            self.say(f"  {row['direction']}, {row['method']}, {row['case']}: {row['status']}{what_else}")
        failed = row["status"].startswith(("wrong", "failed") if row["method"] in OF_OURS else "wrong")
        self._judge(row["status"] if failed else "ok", {name: row.get(name) for name in names})

    def left(self, count: int) -> None:
        """Say for how many things there was no time."""
        self.outcome.left += max(0, count)

    def done(self, note: str = "") -> None:
        """The part is over."""
        self.outcome.note, self.outcome.is_done = note, True
        self.save()

    def fail(self, text: str) -> None:
        self.outcome.rows += 1
        self._failed(text)

    def run(self, name: str, command: Sequence[str], seconds: float, **environment: str) -> tuple[int | None, list[str]]:
        """Exit status, as of watch, and lines of a program; they are kept in the file name."""
        lines: list[str] = []

        def hear(line: str) -> None:
            lines.append(line)
            with (self.raw / name).open("a") as file:
                file.write(line + "\n")

        return watch(command, seconds, hear, **environment), lines

    def save(self) -> None:
        """Whatever becomes of this process, what it has come to so far is in a file."""
        path = outcome_path(self.raw, self.outcome.part)
        path.with_suffix(".new").write_text(json.dumps(asdict(self.outcome)))
        os.replace(path.with_suffix(".new"), path)

    def _judge(self, status: str, row: dict[str, Any]) -> None:
        self.outcome.rows += 1
        if status == "ok":
            self.save()
            return
        hidden = (*STAMP, *RESULTS)
        text = " ".join(f"{k}={v}" for k, v in row.items() if k not in hidden and v not in ("", None))
        if status.startswith("cut off"):
            self.outcome.cut_off += 1
            self.say(f"  cut off: {text}")
            self.save()
        else:
            self._failed(text)

    def _failed(self, text: str) -> None:
        self.outcome.failed += 1
        if len(self.outcome.errors) < FIRST_ERRORS:
            self.outcome.errors.append(text[:300])
        self.say(f"  failed: {text}")
        self.save()


def outcome_path(raw: Path, part: str) -> Path:
    return raw / f"part-{part}.json"


def outcome_of(raw: Path, part: str, status: int | None, seconds: float) -> Outcome:
    """Judge a part by what its process has left behind and how it ended; status: as of workers.watch."""
    try:
        outcome = Outcome(**json.loads(outcome_path(raw, part).read_text()))
    except (OSError, ValueError, TypeError):
        outcome = Outcome(part)
    outcome.seconds = seconds
    if status is None:
        outcome.ended = f"cut off after {seconds:.0f} s"
    elif not outcome.is_done or status != 0:
        outcome.ended = f"crashed: {ending(status)}"
    return outcome


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text + "\n")


def unpack(folder: Path, raw: Path) -> None:
    """The raw files of earlier runs, but not what became of their parts, nor where they ran."""
    with contextlib.suppress(OSError, tarfile.TarError), tarfile.open(folder / PACKED) as packed:
        packed.extractall(raw, filter="data")
    for path in (*raw.glob("part-*.json"), *raw.glob(ENVIRONMENT)):
        path.unlink()


def pack(folder: Path, raw: Path) -> list[str]:
    """The raw files in one, whole or not at all. Return what had to be shortened or left out for its size."""
    shortened = []
    for path in sorted(raw.iterdir()):
        if (size := path.stat().st_size) > LARGEST_FILE:
            with path.open("rb") as file:
                head = file.read(LARGEST_FILE // 2)
                file.seek(size - LARGEST_FILE // 2)
                tail = file.read()
            path.write_bytes(head + f"\n... {size - LARGEST_FILE} bytes are left out ...\n".encode() + tail)
            shortened.append(f"{path.name} has {size} bytes: its middle is left out")
    paths = sorted((path for path in raw.iterdir() if path.suffix != ".new"), key=lambda path: (path.stat().st_size, path.name))
    new = folder / f".{PACKED}"
    for count in range(len(paths), -1, -1):  # the smallest first
        with tarfile.open(new, "w:gz") as packed:
            for path in paths[:count]:
                packed.add(path, path.name)
        if new.stat().st_size <= LARGEST_PACKED:
            break
        shortened.append(f"{paths[count - 1].name} is left out: together the files are too large")
    os.replace(new, folder / PACKED)
    (folder / "profile.csv.lock").unlink(missing_ok=True)
    return shortened


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
