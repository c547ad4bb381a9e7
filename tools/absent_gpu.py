"""Compile kernels for GPUs that this machine lacks, and record launches, or pass them to a callback.

The real host code runs (launchers, specialisation, grids), for NVIDIA and AMD GPUs. The emulator runs the recorded kernels.
stub_gpu goes through Triton's launcher down to the driver, for NVIDIA only. Not usable in a process with TRITON_INTERPRET=1.

with recorded_launches("sm_90") as launches:
    kernel[grid](...)  # any Triton kernel, on CPU tensors
launches[0].kernel.asm["ptx"]
"""

from __future__ import annotations

import functools
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

HOOK_IS_IN_KEYS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
"""Whether the keys of Triton's caches contain a hook of its pipeline."""


def gpu_target(name: str) -> GPUTarget:
    """Triton's target for "sm_90", "gfx942", ..."""
    return GPUTarget("cuda", int(name[3:]), 32) if name.startswith("sm_") else GPUTarget("hip", name, 64)


class AbsentGPU(DriverBase):
    """Answers what Triton's launch path asks about the active device."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise RuntimeError("nothing can be timed on a GPU that is not there")

    def get_current_device(self) -> Any:
        return (self.target.backend, self.target.arch)  # separates the compiled kernels of several targets

    def set_current_device(self, device: Any) -> None:
        pass

    def get_current_stream(self, device: Any) -> int:
        return 0


@dataclass
class Launch:
    """One recorded launch."""

    kernel: CompiledKernel
    grid: tuple[int, int, int]

    @property
    def name(self) -> str:
        """Return the kernel's name without its ending: "forward", "dq", ..."""
        return self.kernel.metadata.name.removesuffix("_kernel")


def torch_for(target: str) -> Any:
    """Make torch report a build for the target's GPUs."""
    return mock.patch.object(torch.version, "hip", "6.4" if gpu_target(target).backend == "hip" else None)


def _without_assembler(*pipeline: Any) -> tuple[str, str] | None:
    """End Triton's pipeline at PTX. Triton calls this with a pipeline, and without for what to add to the keys of its caches:
    a kernel that was compiled so is never taken for a whole one."""
    if not pipeline:
        return "without assembler", "without assembler"
    _, stages, *_ = pipeline
    stages["cubin"] = lambda source, metadata: b""
    return None


@contextmanager
def recorded_launches(
    target: str,
    only: str | None = None,
    run: Callable[[Launch, tuple[Any, ...]], None] | None = None,
    assembled: bool = True,
) -> Iterator[list[Launch]]:
    """Record launches for the target: launchers choose its configurations, and kernels are compiled for it.

    Args:
        only: the name, without "_kernel", of the only kernel that is compiled; "": none; None: all.
        run: a function called with each launch and its arguments.
        assembled: whether NVIDIA's kernels are compiled to machine code; False: only to PTX, in an eighth less time, from
            Triton 3.7 on.
    """
    launches: list[Launch] = []
    compile_and_launch = JITFunction.run

    def launch(kernel: JITFunction, *args: Any, **kwargs: Any) -> Any:
        return compile_and_launch(kernel, *args, **kwargs) if kernel.__name__ == f"{only}_kernel" else None

    def record(kernel: CompiledKernel) -> Any:
        def recorded(grid_0: int, grid_1: int, grid_2: int, *others: Any) -> None:
            launches.append(Launch(kernel, (grid_0, grid_1, grid_2)))
            if run is not None:
                run(launches[-1], others[6:])  # the first are stream, function, two of metadata and two hooks

        return recorded

    replaced = {
        "_init_handles": lambda self: None,
        "run": property(record),
        "launch_metadata": lambda self, *_: None,
        "function": None,
    }
    originals = {name: CompiledKernel.__dict__.get(name) for name in replaced}
    pipeline_hook = triton.knobs.runtime.add_stages_inspection_hook
    active = driver._active
    driver.set_active(AbsentGPU(gpu_target(target)))
    for name, replacement in replaced.items():
        setattr(CompiledKernel, name, replacement)
    if only is not None:
        JITFunction.run = launch
    if not assembled and HOOK_IS_IN_KEYS:
        triton.knobs.runtime.add_stages_inspection_hook = _without_assembler
    try:
        with torch_for(target):
            yield launches
    finally:
        JITFunction.run = compile_and_launch
        triton.knobs.runtime.add_stages_inspection_hook = pipeline_hook
        driver._active = active
        for name, original in originals.items():
            if original is None:
                delattr(CompiledKernel, name)
            else:
                setattr(CompiledKernel, name, original)


@functools.lru_cache(maxsize=8)
def _disassembled(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", "-res-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def disassembled(kernel: CompiledKernel) -> str:
    """Resource usage and machine code of a kernel for NVIDIA GPUs, as cuobjdump prints them."""
    return _disassembled(kernel.asm["cubin"])
