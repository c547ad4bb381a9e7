"""Kernels compiled without a GPU: their resources, and the instructions of their loops.

The real host code runs (launchers, specialisation, grids); the compiled kernel is recorded instead of launched.
Not usable in a process with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from triton.compiler.compiler import CompiledKernel

from tools import absent_gpu
from tools.absent_gpu import Launch, disassembled
from triton_relattn import can_run_triton
from triton_relattn._core.dtypes import keeps_residual
from triton_relattn._core.spec import AttentionTensors, GridTensors
from triton_relattn.kernels import tuning
from triton_relattn.kernels.backward import backward
from triton_relattn.kernels.call import call_of
from triton_relattn.kernels.config import architectures
from triton_relattn.kernels.config.architectures import architecture_of
from triton_relattn.kernels.config.tile_config import KERNELS, TileConfig
from triton_relattn.kernels.draft import described
from triton_relattn.kernels.forward import forward
from triton_relattn.kernels.grid.backward import backward as grid_backward
from triton_relattn.kernels.grid.call import GridCall
from triton_relattn.kernels.grid.forward import forward as grid_forward

from .cases.attention import Case

DIRECTIONS = {"forward": KERNELS[:1], "backward": KERNELS[1:], "forward+backward": KERNELS}
"""The kernels that may run."""


@contextmanager
def selected_for(target: str) -> Iterator[None]:
    """Let launchers choose configurations for the target."""
    answers = {"architecture": lambda _: target, "multiprocessors": lambda _: architecture_of(target).multiprocessors}
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(architectures, name, answer))
        yield


@contextmanager
def recorded_launches(
    target: str,
    only: str | None = None,
    run: Callable[[Launch, tuple[Any, ...]], None] | None = None,
    assembled: bool = True,
) -> Iterator[list[Launch]]:
    """absent_gpu.recorded_launches of launchers that choose configurations for the target."""
    with selected_for(target), absent_gpu.recorded_launches(target, only, run, assembled) as launches:
        yield launches


def selected(kernel: str, target: str, tensors: AttentionTensors | GridTensors, spec: Any) -> TileConfig:
    """The configuration of one of KERNELS that a call gets on the target; its tensors may be on "meta"."""
    if isinstance(tensors, GridTensors):
        plan = described(tensors, target)
        return GridCall(plan, GridTensors(*plan.given), *spec).tile(kernel)
    return call_of(tensors, spec, target).tile(kernel)


def launched(tensors: AttentionTensors | GridTensors, spec: Any) -> list[str]:
    """The kernels of KERNELS that a call, all of whose gradients are wanted, launches; its tensors may be on "meta".

    rel_value's gradient takes the dtable kernel again where there is a table for the scores as well.
    """
    if isinstance(tensors, GridTensors):
        return ["forward", "dq", "dkv"]
    names = tuning.kernels_of(tensors, call_of(tensors, spec, "sm_90").coverage)  # of any GPU
    if tensors.rel_value is not None and (tensors.rel_key is not None or tensors.rel_bias is not None):
        names.insert(names.index("dtable"), "dtable")
    return names


def configurations(case: Case, direction: str, device: str) -> str:
    """The tiles of the kernels that run, first to last; "blockwise" where no kernels do."""
    inputs = case.empty(device)
    if not can_run_triton(inputs.query, inputs.value):
        return "blockwise"
    tensors, spec = case.resolved(inputs)
    call = call_of(tensors, spec)
    names = [name for name in launched(tensors, spec) if name in DIRECTIONS[direction]]
    return ", ".join(f"{name} {tuning.shown(call.tile(name))}" for name in names)


def compiled(
    kernel: str,
    target: str,
    tensors: AttentionTensors | GridTensors,
    spec: Any,
    config: TileConfig | None = None,
) -> CompiledKernel:
    """One of KERNELS as a call, all of whose gradients are wanted, launches it; config: instead of the selected one.

    tensors, spec: as cases.features.call returns them.
    """
    is_grid = isinstance(tensors, GridTensors)
    tiles = None if config is None else {kernel: config}
    with recorded_launches(target, only=f"grid_{kernel}" if is_grid else kernel) as launches:
        out, softmax_stats = tensors.query, torch.empty(*tensors.query.shape[:2], 2, tensors.query.shape[2])
        if kernel == "forward":
            grid_forward(tensors, *spec, config) if is_grid else forward(tensors, spec, config)
        elif is_grid:
            grid_backward(out, out, softmax_stats, tensors, *spec, tiles=tiles)
        else:
            assert isinstance(tensors, AttentionTensors)
            residual = out if keeps_residual(tensors) else None
            backward(out, None, out, softmax_stats, tensors, spec, tiles=tiles, residual=residual)
    return launches[0].kernel


@dataclass
class Resources:
    """Resources of a kernel, and the instructions of its innermost loops, the one with most of them first.

    Attributes:
        registers: per thread; on AMD's GPUs vector registers, accumulators among them.
        spill_bytes: per thread, stored and loaded; on AMD's GPUs what the spilled vector registers hold (scalar ones are spilled
            to vector registers, which takes instructions but no memory).
        stack_bytes: of local memory, per thread.
        tensor_memory: columns of it; sm_100 alone has any.
        loops: counts by mnemonic.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    tensor_memory: int
    loops: list[Counter[str]] = field(repr=False)

    @property
    def main_loop(self) -> Counter[str]:
        """The largest loop with matrix instructions; where no loop has any, the largest."""
        return next((loop for loop in self.loops if matrix_instructions(loop)), self.loops[0] if self.loops else Counter())

    def fits(self, target: str) -> bool:
        """Whether a program can run on the target at all."""
        limits = architecture_of(target)
        fits = self.shared_bytes <= limits.shared_memory and self.registers <= limits.most_registers
        return fits and self.tensor_memory <= 512


def matrix_instructions(loop: Counter[str]) -> int:
    """How many of a loop's instructions multiply matrices: HMMA, HGMMA, UTCHMMA, v_mfma_..."""
    return sum(count for name, count in loop.items() if "MMA" in name or "mfma" in name)


def shuffles(loop: Counter[str]) -> int:
    """How many of a loop's instructions move values between the threads of a warp."""
    kinds = ("SHFL", "permute", "swizzle", "permlane", "_dpp")
    return sum(count for name, count in loop.items() if any(kind in name for kind in kinds))


def _innermost(names: list[str], jumps: list[tuple[int, int]]) -> list[Counter[str]]:
    """Counts of the loops that hold no other, largest first. jumps: (from, to), indices of instructions."""
    spans = [(target, source) for source, target in jumps if target < source]
    innermost = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    return sorted((Counter(names[low : high + 1]) for low, high in innermost), key=lambda loop: -sum(loop.values()))


_SASS = re.compile(r"/\*([0-9a-f]{4,})\*/\s+((?:@!?U?P\d+ )?)([A-Z0-9_.]+)([^;]*);")


def resources(kernel: CompiledKernel) -> Resources:
    """Registers, spills, stack, shared memory and loops of a compiled kernel."""
    return _amd_resources(kernel) if kernel.metadata.target.backend == "hip" else _nvidia_resources(kernel)


def _amd_resources(kernel: CompiledKernel) -> Resources:
    assembly = kernel.asm["amdgcn"]
    numbers = {name: int(value) for name, value in re.findall(r"^\s+(?:- )?\.(\w+):\s+(\d+)$", assembly, re.MULTILINE)}
    spilled, stack = 4 * numbers["vgpr_spill_count"], numbers["private_segment_fixed_size"]
    names, labels, branches = list[str](), dict[str, int](), list[tuple[int, str]]()
    for line in assembly.splitlines():
        if label := re.match(r"(\.LBB\w+):", line):
            labels[label[1]] = len(names)
        elif instruction := re.match(r"\s+([a-z]\w+)\s*(\S*)", line):
            if instruction[1].startswith(("s_branch", "s_cbranch")):
                branches.append((len(names), instruction[2]))
            names.append(instruction[1])
    loops = _innermost(names, [(source, labels[label]) for source, label in branches if label in labels])
    return Resources(numbers["vgpr_count"], spilled, stack, kernel.metadata.shared, 0, loops)


def _nvidia_resources(kernel: CompiledKernel) -> Resources:
    sass = disassembled(kernel)
    registers, stack = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", sass)[0])
    local = re.findall(r"\b(?:LDL|STL)[A-Z0-9.]*", sass)  # accesses of local memory: STL, LDL.64, LDL.LU.128
    spilled = sum(16 if name.endswith("128") else 8 if name.endswith("64") else 4 for name in local)
    instructions = [(int(address, 16), name.split(".")[0], rest) for address, _, name, rest in _SASS.findall(sass)]
    index = {address: i for i, (address, _, _) in enumerate(instructions)}
    branches = [(i, re.search(r"0x([0-9a-f]+)", rest)) for i, (_, name, rest) in enumerate(instructions) if name == "BRA"]
    jumps = [(i, index.get(int(target[1], 16), i)) for i, target in branches if target]
    loops, tensor_memory = _innermost([name for _, name, _ in instructions], jumps), getattr(kernel.metadata, "tmem_size", 0)
    return Resources(registers, spilled, stack, kernel.metadata.shared, tensor_memory, loops)
