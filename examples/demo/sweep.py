"""All methods over all lengths, within limits of memory and time; what is left out says why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .environment import Environment
from .measure import OUT_OF_MEMORY, Measurement, measure
from .methods import BATCH, HEAD_DIM, HEADS, METHODS, OURS

# An 8 GiB machine that does other things too has this much to spare.
CPU_MEMORY_LIMIT = 4 << 30
# Timing of one point: a few passes at 1024, the longest length where a pass takes about 0.2 s on two cores.
SECONDS_PER_POINT = 0.5
# Importing torch in a process of its own.
START_SECONDS = 1.5
# Threads that wait for others spin for microseconds, longer than the gap between two steps, and then sleep. By default GNU OpenMP
# has them spin for milliseconds: as soon as anything else runs on the machine, they spin in the place of the thread they wait
# for, and what has many short parallel steps takes many times as long.
THREADS = {"GOMP_SPINCOUNT": "1000"}


@dataclass(frozen=True)
class Row:
    """One line of the CSV file."""

    method: str
    implementation: str
    device: str
    dtype: str
    batch: int
    heads: int
    head_dim: int
    length: int
    milliseconds: float | None
    peak_bytes: int | None
    status: str
    torch: str
    triton: str


def _in_own_process(method: str, length: int, dtype: str, timeout: float) -> Measurement:
    """One point on the CPU, in a process of its own that is stopped after ``timeout`` seconds."""
    command = [sys.executable, "-m", "triton_relattn.demo.measure", "--method", method, "--length", str(length)]
    command += ["--dtype", dtype, "--seconds", str(SECONDS_PER_POINT)]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=os.environ | THREADS)
    except subprocess.TimeoutExpired:
        return Measurement(None, None, f"stopped: no result after {timeout:.0f} s")
    if child.returncode == -signal.SIGKILL:
        return Measurement(None, None, f"{OUT_OF_MEMORY}: ended by the system")
    if child.returncode != 0:
        return Measurement(None, None, f"failed: {(child.stderr.strip() or 'no message').splitlines()[-1]}")
    return Measurement(**json.loads(child.stdout))


def _why_skip(last: Row | None, length: int, memory_limit: float, seconds_left: float) -> str | None:
    """Why a point is not measured, predicted from the last one of its method; None if it is.

    Time grows with the square of the length, and so does the memory of the baselines; for ours that overestimates it.
    """
    if last is None or last.peak_bytes is None or last.milliseconds is None:
        return "skipped: no time left" if seconds_left <= 0 else None
    growth = (length / last.length) ** 2
    needed, pass_seconds = growth * last.peak_bytes, growth * last.milliseconds / 1e3
    if needed > memory_limit:
        return f"skipped: would need about {needed / 2**30:.0f} GiB"
    # Those that are timed, and one for the memory.
    seconds = START_SECONDS + max(pass_seconds, SECONDS_PER_POINT) + pass_seconds
    if seconds > seconds_left:
        return f"skipped: would take about {seconds:.0f} s, {max(seconds_left, 0):.0f} s are left"
    return None


def sweep(environment: Environment, lengths: list[int], dtype: str, budget: float) -> Iterator[Row]:
    """Rows as they are measured, in about ``budget`` seconds: ours, which needs no more than a quarter of it, then the baselines.

    Both from the shortest length on, so that what there is no time for are the longest lengths of the baselines.

    Shows a progress bar. Its unit is the work that is done, which grows with the square of the length, not the number of
    points: only so is the time left worth reading.
    """
    from tqdm import tqdm

    device = environment.device
    memory_limit = torch.cuda.mem_get_info()[0] if device == "cuda" else CPU_MEMORY_LIMIT
    end = time.monotonic() + budget
    last: dict[str, Row] = {}
    # The constant part of a point, its process and its repeats, costs about what the growing part does at 4096.
    work = {length: 4096**2 + length**2 for length in lengths}
    total = len(METHODS) * sum(work.values())
    form = "{desc:<24}{percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
    ours = [(length, OURS) for length in lengths]
    baselines = [(length, method) for length in lengths for method in METHODS if method != OURS]
    with tqdm(total=total, bar_format=form, dynamic_ncols=True, leave=False) as bar:
        for length, method in ours + baselines:
            bar.set_description_str(f"{method}, {length}")
            seconds_left = end - time.monotonic()
            reason = _why_skip(last.get(method), length, memory_limit, seconds_left)
            if reason is not None:
                result = Measurement(None, None, reason)
            elif device == "cuda":
                result = measure(method, length, getattr(torch, dtype), device, SECONDS_PER_POINT)
            else:
                result = _in_own_process(method, length, dtype, seconds_left)
            row = Row(
                method=method,
                implementation=environment.implementation if method == OURS else "torch",
                device=device,
                dtype=dtype,
                batch=BATCH,
                heads=HEADS,
                head_dim=HEAD_DIM,
                length=length,
                milliseconds=result.milliseconds,
                peak_bytes=result.peak_bytes,
                status=result.status,
                torch=environment.torch,
                triton=environment.triton,
            )
            if result.status == "ok":
                last[method] = row
            if reason is None:
                bar.update(work[length])
            else:
                bar.total -= work[length]
            yield row
