"""One point of a curve: peak memory, and on request the time, of one method at one length.

On a CPU each point has a process of its own: only so is the peak of the process that of this one computation. All of them are
copies of one process that has imported torch and computed nothing. On a GPU torch keeps the books, and this process serves.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ..cases.attention import Case
from ..cases.methods import METHODS
from ..report.text import short_bytes
from . import timing
from .memory import LARGEST_MMAP_THRESHOLD, OUT_OF_MEMORY, PAGE, limit_memory, map_blocks_from, peak_cpu, peak_cuda

WARM_UP_LENGTH = 64  # tiny: what torch and its libraries set up once, they have set up before
MAX_ROUNDS = 15  # enough for a median
LONG = 2.0  # seconds, at which the blocks of quadratic methods are so large that glibc always maps them
# Threads that wait for others spin for microseconds, longer than the gap between two steps, and then sleep. By default GNU OpenMP
# has them spin for milliseconds: as soon as anything else runs on the machine, they spin in the place of the thread they wait
# for, and what has many short parallel steps takes many times as long.
THREADS = {"GOMP_SPINCOUNT": "1000"}


def measure(case: Case, method: str, direction: str, device: str, seconds: float = 0.0) -> dict[str, Any]:
    """Return a row's columns: peak_bytes, by how much the peak exceeds what the inputs take; or a status that says why not.

    Args:
        seconds: for percentiles of the time as well, of passes that take about so long together. A pass of more than LONG
            seconds is not repeated: it then gives both memory and time.
    """
    found: dict[str, Any] = {"status": "ok"}

    def step_of(sized: Case) -> timing.Step:
        inputs, d_out = sized.inputs(device)
        return timing.steps(METHODS[method].make(sized), inputs, d_out, METHODS[method].has_table)[direction]

    def work() -> None:
        step_of(case.resized(min(case.length, WARM_UP_LENGTH), rows=None)).run()
        step = step_of(case)
        timed = timing.Timed(method, direction, step=step)
        if device == "cuda":
            found["peak_bytes"] = peak_cuda(step.run)
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
    """Return what :func:`measure` finds on the CPU in a process of its own, which may take ``memory_limit`` bytes."""
    found = in_own_process(_measure_within, (memory_limit, case, method, direction, "cpu", seconds), timeout)
    if found["status"] == OUT_OF_MEMORY:
        found["status"] += f": more than {short_bytes(memory_limit)}"
    return found


def _measure_within(memory_limit: int, *arguments: Any) -> dict[str, Any]:
    limit_memory(memory_limit)
    return measure(*arguments)


def in_own_process(work: Callable[..., dict[str, Any]], arguments: tuple[Any, ...], timeout: float | None) -> dict[str, Any]:
    """Return the columns that ``work(*arguments)`` finds in a process of its own, or a status: how the process ended.

    Args:
        timeout: seconds after which the process is stopped; None: never.
    """
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    context.set_forkserver_preload([__name__])
    os.environ.update({name: os.environ.get(name, value) for name, value in THREADS.items()})  # read when torch is imported
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, work, arguments))
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            return {"status": f"stopped: no result after {timeout:.0f} s"}
        found: dict[str, Any] = receiver.recv()
        return found
    except EOFError:
        process.join()
        return {"status": ended(process.exitcode)}
    finally:
        process.kill()
        process.join()


def _send(sender: Connection, work: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that keeps the rows
    sender.send(work(*arguments))


def ended(exit_code: int | None) -> str:
    """Return the status of a process that has ended without a result."""
    if exit_code == -signal.SIGKILL:
        return f"{OUT_OF_MEMORY}: ended by the system"
    return f"failed: ended with {exit_code}"
