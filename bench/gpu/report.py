"""Files, printed lines and the processes that produce them."""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import platform
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any, TypeVar

import torch
import triton

from triton_relattn.kernels import configs

RESULTS = ("out", "lse", "d_query", "d_key", "d_value", "d_rel_key")
NOT_SUPPORTED = "not supported"
STALLED = 120.0  # seconds without a result, after which a process must have crashed
COMMON_COLUMNS = "commit date device torch triton".split()
CASE_COLUMNS = [
    *"part table is_causal dtype width value_width batch heads num_queries num_keys per_head query_offset padded".split(),
    *("kernel", "config", "sharp", "status", "seconds", *RESULTS, "message"),
]
SPEED_COLUMNS = [
    *"part case variant batch heads num_queries num_keys width num_rows causal dtype direction".split(),
    *"p20_ms p50_ms p80_ms tflops peak_bytes config".split(),
    *COMMON_COLUMNS,
    "status",
]
COLUMNS = {
    "correctness.csv": CASE_COLUMNS,
    "configs.csv": CASE_COLUMNS,
    "checks.csv": ["part", "case", "variant", "direction", "value", "unit", "status", "message", *COMMON_COLUMNS],
    "speed.csv": SPEED_COLUMNS,
}
Item = TypeVar("Item")
Result = TypeVar("Result")


def output_of(*command: str) -> str:
    """What a command prints, nothing if it cannot run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


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
    """The folder of the files, and how many rows failed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.folder, self.failed = options.results, 0
        self.speed: list[dict[str, Any]] = []
        on_gpu = options.device == "cuda"
        self.common = {
            "commit": output_of("git", "rev-parse", "HEAD"),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name() if on_gpu else f"CPU, {platform.machine()}, interpreter",
            "torch": torch.__version__,
            "triton": triton.__version__,
        }
        environment = {**self.common, "python": platform.python_version(), "arguments": vars(options)}
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(environment | (gpu_properties() if on_gpu else {}), indent=2, default=str)
        (self.folder / "environment.json").write_text(text + "\n")

    def say(self, text: str) -> None:
        print(text, flush=True)
        with (self.folder / "log.txt").open("a") as log:
            log.write(text + "\n")

    def add(self, name: str, row: dict[str, Any]) -> None:
        """Append to a CSV file at once; a row that did not pass is also printed."""
        row = {**self.common, **row}
        with (self.folder / name).open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS[name], extrasaction="ignore")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)
        if name == "speed.csv":
            self.speed.append(row)
        if row["status"] != "ok" and not row["status"].startswith(NOT_SUPPORTED):
            self.failed += 1
            hidden = (*self.common, *RESULTS)
            self.say("  failed: " + " ".join(f"{k}={v}" for k, v in row.items() if k not in hidden and v not in ("", None)))


def in_one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def shown(config: configs.TileConfig) -> str:
    return f"{config.block_m}x{config.block_n} w{config.num_warps} s{config.num_stages} carry {config.carry}"


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
