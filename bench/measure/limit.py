"""A limit for this process, so that what needs too much memory is an error of its own and not the end of the machine."""

from __future__ import annotations

import os
from pathlib import Path

SHARE = 0.85  # of the memory that is free


def available_bytes() -> int:
    """Memory that can be had without swapping."""
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
