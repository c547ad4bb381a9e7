"""The GPUs that the kernels have configurations for: one entry per architecture, with what configurations depend on. At the end,
what Triton leaves out on one of them.

To add a GPU, add an entry. ``python -m bench compile --targets NAME`` tells what fits, ``python -m bench tune`` what is fast.
"""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import knobs

logger = logging.getLogger("triton_relattn")


@dataclass(frozen=True)
class Architecture:
    """A kind of GPU.

    Attributes:
        unit: the matrix unit, by which defaults.csv names architectures. "wgmma" multiplies 64 rows of four warps, "tcgen05" is
            its successor, "mma" multiplies 16 rows of one warp, "small mma" is the same with 100 KB of shared memory, "mfma" is
            AMD's. "unknown": small tiles that fit anywhere. "interpreter": Triton's interpreter, whose tiles are large, as its
            time is per operation, whatever the size.
        shared_memory: bytes that one program can have. Triton's compiler does not check this; the driver refuses the launch.
        multiprocessors: number of them on its largest GPU, for use where the GPU itself is not there.
        rotates_in_registers: whether accumulators of matrix products have the layout that registers.py relies on.
        warp: threads of a warp.
        most_registers: registers that a thread can have.
        has_tf32: whether the matrix units compute products in tf32.
        few_stages: whether loops of 4 warps must have one stage: Triton 3.6 and 3.7 miscompile some others.
    """

    unit: str
    shared_memory: int
    multiprocessors: int = 64
    rotates_in_registers: bool = False
    warp: int = 32
    most_registers: int = 255
    has_tf32: bool = True
    few_stages: bool = False

    @property
    def is_nvidia(self) -> bool:
        return self.unit != "mfma"


ARCHITECTURES = {
    "sm_80": Architecture("mma", 166_912, 108, rotates_in_registers=True),
    "sm_86": Architecture("small mma", 101_376, rotates_in_registers=True),
    "sm_87": Architecture("small mma", 166_912, rotates_in_registers=True),
    "sm_89": Architecture("small mma", 101_376, rotates_in_registers=True),
    "sm_90": Architecture("wgmma", 232_448, 132, rotates_in_registers=True),
    "sm_100": Architecture("tcgen05", 232_448, 148, few_stages=True),
    "sm_103": Architecture("tcgen05", 232_448, 148, few_stages=True),
    "sm_120": Architecture("small mma", 101_376, rotates_in_registers=True),
    "sm_121": Architecture("small mma", 101_376, rotates_in_registers=True),
    "gfx90a": Architecture("mfma", 65_536, warp=64, most_registers=512, has_tf32=False),
    "gfx942": Architecture("mfma", 65_536, 304, warp=64, most_registers=512),
    "gfx950": Architecture("mfma", 163_840, warp=64, most_registers=512, has_tf32=False),
}


@functools.cache
def architecture_of(name: str) -> Architecture:
    """Return the entry of "sm_90", "gfx942", ...; for an unknown one an entry that is safe for all, with a line in the log."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    if name == "interpreter":
        return Architecture("interpreter", 65_536)
    logger.warning("the kernels have no configurations for %s; small tiles are used, which are slow", name)
    if name.startswith("gfx"):
        return Architecture("mfma", 65_536, warp=64 if name.startswith("gfx9") else 32, most_registers=512, has_tf32=False)
    return Architecture("unknown", 65_536)


@functools.cache
def architecture(device: torch.device) -> str:
    """Return the name of a device's architecture: "sm_90", "gfx942", ...; "interpreter" on the CPU."""
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors (compute units) the device has; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def input_precision(dtype: torch.dtype, arch: str, float32_precision: str) -> str:
    """Return "ieee" or "tf32", the precision of float32 products, by torch.get_float32_matmul_precision()."""
    if dtype != torch.float32 or float32_precision == "highest":
        return "ieee"
    return "tf32" if architecture_of(arch).has_tf32 else "ieee"


def rounds_terms(arch: str, dtype: torch.dtype) -> bool:
    """Return whether terms, q.E with a bias and k.F, are rounded to float16 before they are added, if float16 holds them.

    All kernels of a call must agree, whatever their tiles and rotations, so this depends on nothing else. If a backward kernel
    had other terms than the forward, its probabilities would not sum to one, and an error that all keys of a query share adds up
    in the gradient of a table. Terms in float16 obey the error rule for bfloat16 inputs. With float16 inputs, the gradient of a
    table would be off by several times the error that rounding the inputs costs.
    """
    return dtype == torch.bfloat16 and architecture_of(arch).rotates_in_registers


# Fences that Triton before 3.7.1 leaves out on Hopper, between copies to shared memory and the products that read it. wgmma reads
# its operands through the async proxy, which sees what cp.async and other stores have written only after a fence.proxy.async.
# Where Triton 3.6.0 and 3.7.0 pipeline a loop, many of these fences are missing, as tools/emulator finds. Here one is put before
# every wgmma.fence of a kernel's PTX, about as many as 3.7.1 has (triton-lang/triton#10537).

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
