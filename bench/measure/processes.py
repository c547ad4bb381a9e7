"""Processes: one per peak of memory, since only so it is that of one computation, and a pool for what is compiled.

Those of peaks are copies of one process that has imported torch and computed nothing. On a GPU torch keeps the books.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from triton_relattn._peaks import (
    LARGEST_MMAP_THRESHOLD,
    OUT_OF_MEMORY,
    PAGE,
    in_own_process,
    limit_memory,
    map_blocks_from,
    peak_cpu,
    peak_cuda,
)

from ..cases.attention import Case
from ..cases.methods import METHODS
from ..report.text import short_bytes
from . import timing

WARM_UP_LENGTH = 64  # tiny: what torch and its libraries set up once, they have set up before
MAX_ROUNDS = 15  # enough for a median
LONG = 2.0  # seconds, at which the blocks of quadratic methods are so large that glibc always maps them


def measure(case: Case, method: str, direction: str, device: str, seconds: float = 0.0) -> dict[str, Any]:
    """A row's columns: peak_bytes, by how much the peak exceeds what the inputs take; or a status that says why not.

    Args:
        seconds: for percentiles of the time as well, of passes that take about so long together. A pass of more than LONG
            seconds is not repeated: it then gives both memory and time.
    """
    found: dict[str, Any] = {"status": "ok"}

    def make_step(sized: Case) -> timing.Step:
        sized = METHODS[method].case(sized)
        return timing.steps(sized, METHODS[method].make(sized), sized.inputs(device))[direction]

    def work() -> None:
        make_step(case.resized(min(case.length, WARM_UP_LENGTH), rows=None)).run()
        timed = timing.Timed(method, direction, step=make_step(case))
        if device == "cuda":
            found["peak_bytes"] = peak_cuda(timed.step.run)
        else:
            # Memory comes first, while the heap has no holes: glibc fills holes before it maps, whatever the threshold, and the
            # peak would be the heap's, at short lengths twice that of the tensors. The clock then runs with its usual settings.
            map_blocks_from(PAGE)
            found["peak_bytes"] = peak_cpu(lambda: timing.time_in_turn([timed], device, 0.0, rounds=1, fewest=1))
            map_blocks_from(LARGEST_MMAP_THRESHOLD)
        if seconds > 0:
            if sum(timed.milliseconds) < 1e3 * LONG:
                timed.milliseconds.clear()
                timing.time_in_turn([timed], device, seconds, MAX_ROUNDS, fewest=1)
            found.update(timing.percentiles(timed.milliseconds))

    timing.attempt(work, found)
    return found


def measure_in_own_process(
    case: Case, method: str, direction: str, memory_limit: int, seconds: float = 0.0, timeout: float | None = None
) -> dict[str, Any]:
    """What :func:`measure` finds on the CPU in a process of its own, which may take ``memory_limit`` bytes."""
    found = in_own_process(_measure_within, (memory_limit, case, method, direction, "cpu", seconds), timeout)
    if found["status"] == OUT_OF_MEMORY:
        found["status"] += f": more than {short_bytes(memory_limit)}"
    return found


def _measure_within(memory_limit: int, *arguments: Any) -> dict[str, Any]:
    limit_memory(memory_limit)
    return measure(*arguments)


def _start() -> None:
    """Ctrl-C is for the process that keeps the rows."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


@contextmanager
def processes(jobs: int) -> Iterator[Callable[..., Iterable]]:  # type: ignore[type-arg]
    """``map`` in so many processes, results in order; in this one if it is only one."""
    if jobs == 1:
        yield map
        return
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _start)
    try:
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)
