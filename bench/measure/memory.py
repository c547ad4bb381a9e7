"""Time and peak memory of one method at one length, forward and backward.

On a CPU every point runs in a process of its own, ``python -m triton_relattn.demo.measure``, which prints one JSON object:
only so is the peak of the process the peak of this one computation. On a GPU torch keeps the books, and one process serves.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .methods import METHODS, Method, forward_backward, make_inputs

OUT_OF_MEMORY = "out of memory"
WARM_UP_LENGTH = 64  # tiny, so that what it leaves behind does not matter beside the smallest length measured
MAX_REPEATS = 15  # enough for a median; short lengths would repeat hundreds of times in the time they are given
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
PAGE = 4 << 10
LARGEST_MMAP_THRESHOLD = 32 << 20  # as far as glibc raises it by itself; its trim threshold is then twice that
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Measurement:
    """Milliseconds (median) and bytes above what was there before, or None with a status that says why."""

    milliseconds: float | None
    peak_bytes: int | None
    status: str = "ok"


def _proc_status(field: str) -> int:
    """A memory field of this process, in bytes."""
    match = re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"{STATUS} has no field {field}")
    return int(match[1]) * 1024


def _max_resident() -> int:
    """Largest resident memory this process ever had, in bytes, where there is no /proc."""
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
    """Bytes by which the peak of the resident memory during work exceeds what was resident just before."""
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
    """Bytes by which the peak of the allocated GPU memory during work exceeds what was allocated just before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is lacking: torch's CPU allocator raises a plain RuntimeError."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _milliseconds(work: Callable[[], object], device: str) -> float:
    """How long work takes."""
    if device == "cuda":
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop)
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)


def _measure(method: Method, length: int, dtype: torch.dtype, device: str, seconds: float) -> Measurement:
    for _ in range(2):
        forward_backward(method, *make_inputs(WARM_UP_LENGTH, dtype, device))
    inputs, d_out = make_inputs(length, dtype, device)

    def work() -> None:
        forward_backward(method, inputs, d_out)

    if device == "cuda":
        peak = peak_cuda(work)
    else:
        # Memory comes first, while the heap has no holes: glibc fills holes before it maps, whatever the threshold, and the peak
        # would be the heap's, at short lengths twice that of the tensors. The clock then runs with glibc's usual settings.
        map_blocks_from(PAGE)
        peak = peak_cpu(work)
        map_blocks_from(LARGEST_MMAP_THRESHOLD)
    times: list[float] = []
    while not times or (sum(times) < 1e3 * seconds and len(times) < MAX_REPEATS):
        times.append(_milliseconds(work, device))
    return Measurement(statistics.median(times), peak)


def measure(method: str, length: int, dtype: torch.dtype, device: str, seconds: float) -> Measurement:
    """The peak memory of one pass; then the median time of passes that take about ``seconds`` together, at least one.

    What torch and its libraries set up once has been set up before, by a tiny call.
    """
    try:
        return _measure(METHODS[method], length, dtype, device, seconds)
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            return Measurement(None, None, OUT_OF_MEMORY)
        raise


def main() -> None:
    """One point on the CPU; the result as JSON on stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", required=True, choices=METHODS)
    parser.add_argument("--length", required=True, type=int)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--seconds", required=True, type=float)
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    print(json.dumps(asdict(measure(arguments.method, arguments.length, dtype, "cpu", arguments.seconds))))


if __name__ == "__main__":
    main()
