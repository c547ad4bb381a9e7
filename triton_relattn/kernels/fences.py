"""Fences that Triton before 3.7.1 leaves out on Hopper, between copies to shared memory and the products that read it.

wgmma reads its operands through the async proxy, which sees what cp.async and other stores have written only after a
fence.proxy.async. Where Triton 3.6.0 and 3.7.0 pipeline a loop, many of these fences are missing, as tools/emulator finds.
Here one is put before every wgmma.fence of a kernel's PTX, about as many as 3.7.1 has
(triton-lang/triton#10537).
"""

from __future__ import annotations

import functools
import re
from typing import Any

import triton
from triton import knobs

LACKS_FENCES = tuple(map(int, re.findall(r"\d+", triton.__version__)[:3])) < (3, 7, 1)
MARK = "--warn-on-spills"
"""An option of ptxas that changes no code. It tells add_stages which kernels are this package's, and is part of Triton's keys:
what was compiled without fences is not taken from a cache."""
WGMMA = "wgmma.fence.sync.aligned;"


def with_fences(ptx: str) -> str:
    """Put a fence before the products of a kernel."""
    return ptx.replace(WGMMA, f"fence.proxy.async.shared::cta;\n\t{WGMMA}")


def ptx_options(arch: str) -> str | None:
    """Return options of ptxas to compile kernels with: those that make sure of their fences where Triton does not; else None."""
    if not LACKS_FENCES or arch != "sm_90":
        return None
    _extend_pipeline()
    given = knobs.nvidia.ptxas_options
    return f"{given} {MARK}" if given else MARK


@functools.cache
def _extend_pipeline() -> None:
    """Have Triton's compiler add fences to the PTX of marked kernels, and of no others."""
    from triton.backends.nvidia.compiler import CUDABackend

    add_stages = CUDABackend.add_stages
    if add_stages.__module__ == __name__:
        return

    def add_stages_with_fences(self: Any, stages: dict[str, Any], options: Any, *others: Any) -> None:
        add_stages(self, stages, options, *others)
        if MARK in (options.ptx_options or "").split():
            make_ptx = stages["ptx"]
            stages["ptx"] = lambda source, metadata: with_fences(make_ptx(source, metadata))

    CUDABackend.add_stages = add_stages_with_fences
