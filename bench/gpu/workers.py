"""Processes that may crash or hang: who waits for them gets an answer in time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import torch

from bench.report.rows import ROOT, in_one_line

PATIENCE = 120.0  # seconds that one item may take
GRACE = 5.0  # seconds between asking a process to end and killing it
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Lost:
    """The reason why there is no result."""

    reason: str


def ending(status: int | None) -> str:
    """How a process ended, in words: "signal SIGSEGV", "exit status 3"."""
    return f"signal {signal.Signals(-status).name}" if status is not None and status < 0 else f"exit status {status}"


def _end(process: subprocess.Popen[str]) -> None:
    """Ask the group of a process to end, and a little later end it, with all that it has started."""
    for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def watch(command: Sequence[str], seconds: float, hear: Callable[[str], None], **environment: str) -> int | None:
    """Run a program and pass its lines on, until the seconds are over; nothing that it has started stays behind.

    Return its exit status, negative if a signal ended it, None if the time was over.
    """
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    variables = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
    # A group of its own, but no session: who ends everything of a session ends it as well.
    process = subprocess.Popen(command, cwd=ROOT, text=True, errors="replace", env=variables, preexec_fn=os.setpgrp, **pipes)
    is_late = threading.Event()

    def supervise() -> None:
        try:
            process.wait(max(0.1, seconds))
        except subprocess.TimeoutExpired:
            is_late.set()
        _end(process)

    supervisor = threading.Thread(target=supervise, daemon=True)
    supervisor.start()
    try:
        for line in process.stdout or ():
            hear(line.rstrip("\n"))
        supervisor.join()
    finally:
        _end(process)
    return None if is_late.is_set() else process.returncode


def _work(connection: Connection, function: Callable[[Any], Any]) -> None:
    """The loop of a worker: items come, results go, until there are no more items or the GPU is in an error that lasts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that keeps the rows
    torch.set_num_threads(1)
    is_usable = True
    while is_usable:
        try:
            item = connection.recv()
        except EOFError:
            return
        try:
            result = function(item)
        except Exception as error:
            result = Lost(in_one_line(error))
        try:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        except Exception:
            is_usable = False
        connection.send((result, is_usable))
    sys.stdout.flush()
    os._exit(1)


class Worker(Generic[Item, Result]):
    """A process that answers one item after the other."""

    def __init__(self, function: Callable[[Item], Result]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, function), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, item: Item, seconds: float) -> tuple[Result | Lost, bool]:
        """The result of an item, and whether the worker can go on."""
        try:
            self.connection.send(item)
            if not self.connection.poll(seconds):
                return Lost(f"no result after {seconds:.0f} s"), False
            result, is_usable = self.connection.recv()
            return result, is_usable
        except (EOFError, OSError):
            self.process.join(GRACE)
            return Lost(f"crashed: {ending(self.process.exitcode)}"), False

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def spread(
    function: Callable[[Item], Result], items: Iterable[Item], jobs: int, deadline: float, patience: float = PATIENCE
) -> Iterator[tuple[Item, Result | Lost]]:
    """Items and their results as they come, until the deadline, at which what is at work is ended.

    Args:
        function: what it raises becomes a Lost, and so does an item whose worker crashes, or takes longer than ``patience``
            seconds; another worker goes on with the next item, also after an error of the GPU that lasts.
        items: each is taken when a worker is free for it.
        jobs: workers; 0: this process does it all.
    """
    source = iter(items)
    if jobs == 0:
        for item in source:
            if time.monotonic() > deadline:
                return
            yield item, function(item)
        return
    workers, own = list[Worker[Item, Result]](), threading.local()

    def answer(item: Item) -> Result | Lost:
        """Let the worker of this thread do an item."""
        if getattr(own, "worker", None) is None:
            own.worker = Worker(function)
            workers.append(own.worker)
        result, is_usable = own.worker.ask(item, min(patience, max(0.0, deadline - time.monotonic())))
        if not is_usable:
            own.worker.end()
            own.worker = None
        return result

    running: dict[Future[Result | Lost], Item] = {}
    with ThreadPoolExecutor(jobs) as threads:
        try:
            while True:
                while len(running) < jobs and time.monotonic() < deadline:
                    try:
                        item = next(source)
                    except StopIteration:
                        break
                    running[threads.submit(answer, item)] = item
                done, _ = wait(running, max(0.0, deadline - time.monotonic()), FIRST_COMPLETED)
                if not running or time.monotonic() > deadline:
                    return
                for future in done:
                    yield running.pop(future), future.result()
        finally:
            for worker in workers:
                worker.end()
