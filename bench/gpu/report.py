"""Files, printed lines and the processes that produce them."""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from bench.rows import ROOT, STAMP, Table, output_of, stamp
from bench.speed import COLUMNS as MEASURED

RESULTS = ("out", "lse", "d_query", "d_key", "d_value", "d_rel_key")
STALLED = 120.0  # seconds without a result, after which a process must have crashed
CASE_COLUMNS = [
    *"part table is_causal dtype width value_width batch heads num_queries num_keys per_head query_offset padded".split(),
    *("kernel", "config", "sharp", "status", "seconds", *RESULTS, "message"),
]
COLUMNS = {
    "correctness.csv": CASE_COLUMNS,
    "configs.csv": CASE_COLUMNS,
    "checks.csv": ["part", "case", "variant", "direction", "value", "unit", "status", "message", *STAMP],
}
"""Of the files that are packed in the end; what is measured goes into results.csv."""
PACKED = "raw.tar.gz"
Item = TypeVar("Item")
Result = TypeVar("Result")


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
    """The folder of the files, and how many rows failed. Files of earlier parts are added to."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.folder, self.failed = options.results, 0
        self.raw = self.folder / "raw"
        interrupted = self.raw.exists()  # before it was packed: nothing newer is in the packed file
        self.raw.mkdir(parents=True, exist_ok=True)
        if (self.folder / PACKED).exists() and not interrupted:
            with tarfile.open(self.folder / PACKED) as packed:
                packed.extractall(self.raw, filter="data")
        on_gpu = options.device == "cuda"
        self.stamp = stamp("cuda" if on_gpu else f"CPU, {platform.machine()}, interpreter")
        self.measured = Table(MEASURED, self.stamp, self.folder / "results.csv", append=True)
        environment = {**self.stamp, "python": platform.python_version(), "arguments": vars(options)}
        text = json.dumps(environment | (gpu_properties() if on_gpu else {}), indent=2, default=str)
        (self.raw / "environment.json").write_text(text + "\n")

    def say(self, text: str) -> None:
        print(text, flush=True)
        with (self.folder / "log.txt").open("a") as log:
            log.write(text + "\n")

    def add(self, name: str, row: dict[str, Any]) -> None:
        """Append to one of the files of COLUMNS at once; a row that did not pass is also printed."""
        row = {**self.stamp, **row}
        with (self.raw / name).open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS[name], extrasaction="ignore")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)
        self._judge(row)

    def add_measured(self, row: dict[str, Any]) -> None:
        """A row of speed or memory. What cannot run here, or lacks the memory, has not failed."""
        self.measured.add(row)
        if str(row["status"]).startswith(("wrong", "failed")):
            self._judge({name: row[name] for name in ("verb", "case", "method", "direction", "status")})

    def run(self, name: str, command: Sequence[str], seconds: float, **environment: str) -> tuple[int, list[str]]:
        """Exit status (0 if it was still running after the seconds) and lines of a program; they are kept in the file name."""
        path = self.raw / name
        try:
            with path.open("w") as output:
                status = subprocess.run(
                    command,
                    cwd=ROOT,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **environment},
                    check=False,
                    timeout=max(1.0, seconds),
                ).returncode
        except subprocess.TimeoutExpired:
            status = 0
        return status, path.read_text().strip().splitlines()

    def _judge(self, row: dict[str, Any]) -> None:
        if row["status"] != "ok":
            self.failed += 1
            hidden = (*STAMP, *RESULTS)
            self.say("  failed: " + " ".join(f"{k}={v}" for k, v in row.items() if k not in hidden and v not in ("", None)))

    def pack(self) -> None:
        """The raw files in one."""
        with tarfile.open(self.folder / PACKED, "w:gz") as packed:
            for path in sorted(self.raw.iterdir()):
                packed.add(path, path.name)
        shutil.rmtree(self.raw)
        (self.folder / "profile.json.lock").unlink(missing_ok=True)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def pair(function: Callable[[Item], Result], item: Item) -> tuple[Item, Result]:
    return item, function(item)


def spread(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int, deadline: float
) -> Iterator[tuple[Item, Result]]:
    """Items and their results as they come, until the deadline; from several processes, since most of the time is compiling."""
    if jobs < 2:
        for item in items:
            if time.monotonic() > deadline:
                return
            yield pair(function, item)
        return
    ignore_interrupt = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    with multiprocessing.get_context("spawn").Pool(jobs, ignore_interrupt, maxtasksperchild=6) as pool:
        results = pool.imap_unordered(partial(pair, function), items)
        for _ in items:
            try:
                yield results.next(timeout=max(0.1, min(deadline - time.monotonic(), STALLED)))
            except multiprocessing.TimeoutError:
                return
