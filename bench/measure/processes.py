"""Work for several processes: most of it is compiling, which takes one core."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import torch


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
