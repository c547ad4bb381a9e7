"""Kernels compiled for GPUs that are not there: what they take and what their loops consist of.

The real host code runs (launchers, specialisation, grids); the compiled kernel is recorded instead of launched.
Not usable in a process with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver

from triton_relattn.kernels import configs
from triton_relattn.kernels.arguments import Call
from triton_relattn.spec import AttentionSpec, AttentionTensors

# Shared memory one program can have, bytes. Triton's compiler does not check it; the driver refuses the launch.
SHARED_MEMORY = {
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
    "gfx942": 65_536,
    "gfx950": 163_840,
}


# Multiprocessors of the largest GPU of an architecture, where it matters for a grid.
MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "gfx942": 304}


def gpu_target(name: str) -> GPUTarget:
    """Triton's target for "sm_90", "gfx942", ..."""
    return GPUTarget("cuda", int(name[3:]), 32) if name.startswith("sm_") else GPUTarget("hip", name, 64)


class _AbsentGPU(DriverBase):
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
        return (self.target.backend, self.target.arch)  # keeps the compiled kernels of several targets apart

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
        """Of the kernel, without what all names end with: "forward", "rows", ..."""
        return self.kernel.metadata.name.removesuffix("_kernel")


@contextmanager
def recorded_launches(target: str) -> Iterator[list[Launch]]:
    """Within, launchers choose configurations for the target; its kernels are compiled, their launches recorded, not run."""
    launches: list[Launch] = []

    def record(kernel: CompiledKernel) -> Any:
        def run(grid_0: int, grid_1: int, grid_2: int, *_: Any) -> None:
            launches.append(Launch(kernel, (grid_0, grid_1, grid_2)))

        return run

    replaced = {
        "_init_handles": lambda self: None,
        "run": property(record),
        "launch_metadata": lambda self, *_: None,
        "function": None,
    }
    kept = {name: CompiledKernel.__dict__.get(name) for name in replaced}
    device_questions = {"architecture": lambda _: target, "multiprocessors": lambda _: MULTIPROCESSORS.get(target, 64)}
    answers = {name: getattr(configs, name) for name in device_questions}
    active = driver._active
    driver.set_active(_AbsentGPU(gpu_target(target)))
    for name, answer in device_questions.items():
        setattr(configs, name, answer)
    for name, replacement in replaced.items():
        setattr(CompiledKernel, name, replacement)
    try:
        yield launches
    finally:
        driver._active = active
        for name, answer in answers.items():
            setattr(configs, name, answer)
        for name, original in kept.items():
            if original is None:
                delattr(CompiledKernel, name)
            else:
                setattr(CompiledKernel, name, original)


def selected(kernel: str, target: str, tensors: AttentionTensors, spec: AttentionSpec) -> configs.TileConfig:
    """The configuration of one of configs.KERNELS that a call gets on the target; its tensors may be on "meta"."""
    call = Call(tensors, spec)
    call.arch = target
    return call.tile(kernel)


@dataclass
class Resources:
    """What ptxas says of a kernel, and the instructions of its loops, largest first (NVIDIA only)."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    loops: list[Counter[str]] = field(repr=False)

    @property
    def main_loop(self) -> Counter[str]:
        """The largest loop with matrix instructions; the counts of all its instructions are under their mnemonics."""
        return next(loop for loop in self.loops if matrix_instructions(loop))


def matrix_instructions(loop: Counter[str]) -> int:
    return sum(count for name, count in loop.items() if "MMA" in name)


_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+((?:@!?U?P\d+ )?)([A-Z0-9_.]+)([^;]*);")


def _loops(sass: str) -> list[Counter[str]]:
    """Counts by mnemonic of every innermost loop (a branch back to its own start), largest first."""
    instructions = [(int(address, 16), name.split(".")[0], rest) for address, _, name, rest in _INSTRUCTION.findall(sass)]
    spans = []
    for address, name, rest in instructions:
        target = re.search(r"0x([0-9a-f]+)", rest) if name == "BRA" else None
        if target and int(target[1], 16) < address:
            spans.append((int(target[1], 16), address))
    innermost = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    loops = [Counter(name for address, name, _ in instructions if low <= address <= high) for low, high in innermost]
    return sorted(loops, key=lambda loop: -sum(loop.values()))


def resources(kernel: CompiledKernel) -> Resources:
    """Registers, spills, stack, shared memory and loops of a kernel compiled for an NVIDIA target."""
    arch = kernel.metadata.target.arch
    name = f"sm_{arch}" + ("a" if arch >= 90 else "")
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = os.path.join(folder, "kernel.ptx"), os.path.join(folder, "kernel.cubin")
        with open(ptx, "w") as file:
            file.write(kernel.asm["ptx"])
        with open(cubin, "wb") as file:
            file.write(kernel.asm["cubin"])
        for tool in (triton.knobs.nvidia.ptxas, triton.knobs.nvidia.ptxas_blackwell):
            log = subprocess.run(
                [tool.path, "-v", f"--gpu-name={name}", ptx, "-o", os.devnull], capture_output=True, text=True
            ).stderr
            if "registers" in log:
                break
        sass = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "-sass", cubin], capture_output=True, text=True).stdout
    stack, stores, loads = map(
        int, re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)[0]
    )
    registers = int(re.findall(r"Used (\d+) registers", log)[0])
    return Resources(registers, stores + loads, stack, kernel.metadata.shared, _loops(sass))
