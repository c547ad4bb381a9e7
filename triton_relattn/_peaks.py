"""Peak memory of a computation, a limit for it, and processes of their own, whose peak is that of one computation.

With a limit a lack of memory is an error and not the end of the machine.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

OUT_OF_MEMORY = "out of memory"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
PAGE = 4 << 10
LARGEST_MMAP_THRESHOLD = 32 << 20  # as far as glibc raises it by itself; its trim threshold is then twice that
STATUS = Path("/proc/self/status")
SHARE = 0.85  # of the memory that is free
# Threads that wait for others spin for microseconds, longer than the gap between two steps, and then sleep. By default GNU OpenMP
# has them spin for milliseconds: as soon as anything else runs on the machine, they spin in the place of the thread they wait
# for, and what has many short parallel steps takes many times as long.
THREADS = {"GOMP_SPINCOUNT": "1000"}


def _proc_status(field: str) -> int:
    """Return a memory field of this process, in bytes."""
    match = re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"{STATUS} has no field {field}")
    return int(match[1]) * 1024


def resident() -> int:
    """Return the resident memory of this process, in bytes; the largest that it ever had where there is no /proc."""
    return _proc_status("VmRSS") if STATUS.exists() else _max_resident()


def _max_resident() -> int:
    """Return the largest resident memory that this process ever had, in bytes."""
    import resource

    # Kilobytes, except on macOS, where it is bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def map_blocks_from(size: int) -> None:
    """Have glibc map blocks of ``size`` bytes and more one by one, and return them when freed. Other C libraries: no effect."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, size)
        libc.mallopt(M_TRIM_THRESHOLD, 2 * size)


def peak_cpu(work: Callable[[], object]) -> int:
    """Return the bytes by which the peak of the resident memory during work exceeds what was resident just before."""
    if not STATUS.exists():
        before = _max_resident()
        work()
        return _max_resident() - before
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to VmRSS, see proc(5)
    except OSError:
        pass  # then VmHWM still holds the peak of the imports, which matters only for the shortest lengths
    before = _proc_status("VmRSS")
    work()
    return _proc_status("VmHWM") - before


def peak_cuda(work: Callable[[], object]) -> int:
    """Return the bytes by which the peak of the allocated GPU memory during work exceeds what was allocated just before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory is lacking: torch's CPU allocator raises a plain RuntimeError."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def available_bytes() -> int:
    """Return the memory that can be had without swapping, in bytes."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        kilobytes = next(line.split()[1] for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
        return int(kilobytes) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def limit_memory(limit: int) -> None:
    """Let allocations fail beyond so many bytes. No effect where the system knows no such limit."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    except (ImportError, AttributeError, OSError, ValueError):
        pass


def in_own_process(work: Callable[..., dict[str, Any]], arguments: tuple[Any, ...], timeout: float | None) -> dict[str, Any]:
    """Return what ``work(*arguments)`` finds in a process of its own, or a status: how the process ended. timeout: in seconds."""
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    context.set_forkserver_preload([work.__module__])
    os.environ.update({name: os.environ.get(name, value) for name, value in THREADS.items()})  # read when torch is imported
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, work, arguments))
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            return {"status": f"stopped: no result after {timeout:.0f} s"}
        columns: dict[str, Any] = receiver.recv()
        return columns
    except EOFError:
        process.join()
        is_killed = process.exitcode == -signal.SIGKILL
        return {"status": f"{OUT_OF_MEMORY}: ended by the system" if is_killed else f"failed: ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def _send(sender: Connection, work: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that keeps the rows
    sender.send(work(*arguments))
