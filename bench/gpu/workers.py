"""Work in processes that may crash, hang, be slow or print without end: whoever waits for them gets an answer, and goes on."""

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
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch

from bench.report.rows import ROOT, in_one_line

PATIENCE = 120.0  # seconds that one item may take
GRACE = 5.0  # seconds between asking a process to end and ending it
MOST_OUTPUT = 512 << 10  # characters of a program that are passed on
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Lost:
    """The reason why there is no result."""

    reason: str


def ending(status: int | None) -> str:
    """Describe how a process ended: "signal SIGSEGV", "exit status 3"."""
    if status is not None and status < 0:
        try:
            return f"signal {signal.Signals(-status).name}"
        except ValueError:
            return f"signal {-status}"
    return f"exit status {status}"


def _end(process: subprocess.Popen[str]) -> None:
    """Ask the group of a process to end, and a little later end it, with all that it has started."""
    for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def watch(command: Sequence[str], seconds: float, hear: Callable[[str], None], **environment: str) -> int | None:
    """Run a program and hear its lines, as long as they are not too many.

    Return its exit status, negative if a signal ended it; None if it was ended since the seconds had passed. Nothing that it has
    started stays behind.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        preexec_fn=os.setpgrp,  # a group of its own, but no session: who ends everything of a session ends it, too
    )

    def listen() -> None:
        room, output = MOST_OUTPUT, process.stdout
        assert output is not None
        for line in iter(partial(output.readline, 4096), ""):
            if room > 0:
                hear(line.rstrip("\n"))
                if (room := room - len(line)) <= 0:
                    hear(f"... more than {MOST_OUTPUT} characters: the rest is left out")

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    cut_off = False
    try:
        process.wait(max(0.1, seconds))
    except subprocess.TimeoutExpired:
        cut_off = True
    finally:
        _end(process)
        listener.join(GRACE)
    return None if cut_off else process.returncode


def _gpu_is_usable() -> bool:
    """Whether no kernel has left the GPU in an error that lasts as long as the process."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception:
        return False
    return True


def _work(connection: Connection, function: Callable[[Any], Any]) -> None:
    """The life of a worker: items come, results go, until there are no more items or the GPU is in an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that keeps the rows
    torch.set_num_threads(1)
    while True:
        try:
            item = connection.recv()
        except EOFError:
            return
        try:
            result = function(item)
        except Exception as error:
            result = Lost(in_one_line(error))
        is_usable = _gpu_is_usable()
        connection.send((result, is_usable))
        if not is_usable:
            sys.stdout.flush()
            os._exit(1)


@dataclass
class _Worker:
    process: Any
    connection: Connection
    item: Any = None
    since: float = 0.0

    def give(self, item: Any) -> None:
        self.item, self.since = item, time.monotonic()
        self.connection.send(item)

    def dismiss(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()


def _hire(function: Callable[[Any], Any]) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, function), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


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
    free, busy = list[_Worker](), dict[Any, _Worker]()
    try:
        while True:
            while len(busy) < jobs and time.monotonic() < deadline:
                try:
                    item = next(source)
                except StopIteration:
                    break
                worker = free.pop() if free else _hire(function)
                worker.give(item)
                busy[worker.connection] = worker
            if not busy or time.monotonic() > deadline:
                return
            until = min(deadline, *(worker.since + patience for worker in busy.values()))
            done: list[tuple[Any, Any]] = []
            for connection in wait(list(busy), max(0.0, until - time.monotonic())):
                worker = busy.pop(connection)
                try:
                    result, is_usable = worker.connection.recv()
                except (EOFError, OSError):
                    worker.process.join(GRACE)
                    result, is_usable = Lost(f"crashed: {ending(worker.process.exitcode)}"), False
                if is_usable:
                    free.append(worker)
                else:
                    worker.dismiss()
                done.append((worker.item, result))
            for worker in [slow for slow in busy.values() if time.monotonic() > slow.since + patience]:
                busy.pop(worker.connection).dismiss()
                done.append((worker.item, Lost(f"no result after {patience:.0f} s")))
            yield from done
    finally:
        for worker in (*free, *busy.values()):
            worker.dismiss()
