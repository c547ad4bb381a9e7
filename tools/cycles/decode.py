"""Instructions as a machine executes them: which unit they keep busy for how long, and when their result is there."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from .machine import Machine
from .sass import Instruction

# Mnemonics by the pipe of a scheduler that they keep busy. Those that begin with U are of uniform registers; all others are taken
# for the ALU's, which does most of what there is.
_FMA = ("FFMA", "FADD", "FMUL", "FFMA32I", "FADD32I", "FMUL32I", "HFMA2", "HADD2", "HMUL2", "HFMA2_32I", "HADD2_32I", "HMUL2_32I")
_IMAD = ("IMAD", "IMUL", "IDP")
_MUFU = ("MUFU", "I2F", "F2I", "F2F", "POPC", "BREV", "FRND", "FLO")
_SPECIAL = ("R2UR", "S2R", "S2UR", "VOTE", "VOTEU", "REDUX", "CREDUX", "LDC")
_FENCE = ("MEMBAR", "FENCE", "ERRBAR", "CCTL")
_CONTROL = ("BRA", "EXIT", "BSSY", "BSYNC", "NOP", "BREAK", "CALL", "RET", "YIELD", "NANOSLEEP", "BRX", "WARPGROUP", "WARPSYNC")
_SHARED = ("LDS", "STS", "LDSM", "STSM", "ATOMS")
_LOCAL = ("LDL", "STL")  # spilled registers; they lie in L1, which is the same memory
_GLOBAL = ("LDG", "STG", "LDGSTS", "ATOMG", "ATOM", "RED", "LD", "ST")
_MMA = ("HMMA", "IMMA")
_WGMMA = ("HGMMA", "IGMMA", "QGMMA")
_NOT_MODELLED = ("UTMALDG", "UTMASTG", "UBLKCP", "SYNCS", "UTCHMMA")  # copies of tiles by hardware, tensor memory

PIPES = ("none", "imad", "fma", "alu", "mufu", "uniform", "memory", "tensor")


NOTHING, WGMMA, COPY, END_COPIES, AWAIT_COPIES, AWAIT_WGMMA, BARRIER = range(7)
"""Effects of an instruction besides taking time."""


@dataclass(frozen=True)
class Step:
    """One instruction on one machine, for one warp.

    Attributes:
        unit: what it is counted under, and what others are said to wait for.
        pipe: index in PIPES; other_pipe: of the one that can do it as well.
        busy: cycles of the pipe.
        latency: cycles from when the unit begins until the result is there.
        shared: cycles of shared memory.
        l2_bytes: from or to L2.
        operations: multiplications and additions of a matrix instruction.
        action: WGMMA, ...: what else it does.
        count: of a wait: groups that may be pending; of a wgmma: 1 if it ends its group.
    """

    instruction: Instruction
    unit: str
    pipe: int = 0
    other_pipe: int = 0
    busy: float = 0.0
    latency: float = 0.0
    shared: float = 0.0
    l2_bytes: float = 0.0
    operations: float = 0.0
    action: int = NOTHING
    count: int = 0

    @functools.cached_property
    def counted(self) -> str:
        """Return the name that the pipe's cycles are counted under."""
        return "fma" if self.unit == "fma" else PIPES[self.pipe]


def is_matrix(instruction: Instruction) -> bool:
    """Whether it multiplies matrices."""
    return instruction.base in (*_MMA, *_WGMMA)


def ends_wgmma_group(instruction: Instruction) -> bool:
    """Whether it is a wgmma after which the warp commits a group."""
    return instruction.base in _WGMMA and "gsb0" in instruction.operands


def decode(instruction: Instruction, machine: Machine) -> Step:
    """Return what the machine does for an instruction; ValueError if the model does not know how."""
    base, name = instruction.base, instruction.name
    if base in _NOT_MODELLED:
        raise ValueError(f"the model of cycles does not have {name}: it cannot say how long this kernel takes")
    if not instruction.runs or base in _CONTROL:
        if name.startswith("WARPGROUP.DEPBAR"):
            return Step(instruction, "tensor", action=AWAIT_WGMMA, count=_pending(instruction))
        return Step(instruction, "control")
    if base in _WGMMA:
        return _wgmma(instruction, machine)
    if base in _MMA:
        return _mma(instruction, machine)
    if base == "LDGDEPBAR":
        return Step(instruction, "L2", action=END_COPIES)
    if base == "DEPBAR":
        return Step(instruction, "L2", action=AWAIT_COPIES, count=_pending(instruction))
    if base == "BAR":
        return Step(instruction, "barrier", action=BARRIER)
    if base in _FENCE:
        return Step(instruction, "fence", latency=machine.fence_latency)
    if base in _SPECIAL:
        return Step(instruction, "special", latency=machine.special_latency)
    if base == "SHFL" or base in _SHARED or base in _LOCAL or base in _GLOBAL:
        return _memory(instruction, machine)
    if base in _FMA:
        pipe = "fma" if machine.fma_pipes > 1 else "imad"
        return Step(instruction, "fma", PIPES.index(pipe), PIPES.index("imad"), machine.fma)
    if base in _IMAD:
        return _on("imad", instruction, machine.imad, machine.imad + machine.imad_latency, "fma")
    if base in _MUFU:
        return _on("mufu", instruction, machine.mufu, machine.mufu + machine.mufu_latency)
    if base.startswith("U"):
        return _on("uniform", instruction, machine.uniform, machine.uniform_latency)
    return _on("alu", instruction, machine.alu)


def _on(pipe: str, instruction: Instruction, busy: float, latency: float = 0.0, unit: str = "") -> Step:
    number = PIPES.index(pipe)
    return Step(instruction, unit or pipe, number, number, busy, latency)


def _pending(instruction: Instruction) -> int:
    """How many groups a wait leaves pending; a wait for a scoreboard leaves none."""
    match = re.search(r"(?:SB0|gsb0),\s*0x(\w+)", instruction.operands)
    return int(match[1], 16) if match else 0


def _element_bytes(name: str) -> int:
    return 4 if "TF32" in name else 1 if any(kind in name for kind in (".E4M3", ".E5M2", ".S8", ".U8")) else 2


def _wgmma(instruction: Instruction, machine: Machine) -> Step:
    """Four warps together, 16 of the 64 rows each. B is read from shared memory once for all; so is A, or it is in registers."""
    match = re.search(r"\.(\d+)x(\d+)x(\d+)", instruction.name)
    if match is None:
        raise ValueError(f"no shape in {instruction.name}")
    rows, columns, depth = map(int, match.groups())
    element = _element_bytes(instruction.name)
    busy = machine.wgmma * columns * depth * element / 32
    a_is_shared = instruction.operands.split(",")[1].strip().startswith("gdesc")
    operand_bytes = (columns + a_is_shared * rows) * depth * element
    number = PIPES.index("tensor")
    return Step(
        *(instruction, "tensor", number, number, busy, busy + machine.wgmma_latency),
        shared=operand_bytes / 4 / machine.shared_rate,
        operations=2 * rows * columns * depth / 4,
        action=WGMMA,
        count=int(ends_wgmma_group(instruction)),
    )


def _mma(instruction: Instruction, machine: Machine) -> Step:
    match = re.search(r"\.168(\d+)\.", instruction.name)
    if match is None:
        raise ValueError(f"no shape in {instruction.name}")
    depth = int(match[1])
    busy = machine.mma * depth * _element_bytes(instruction.name) / 32
    number = PIPES.index("tensor")
    return Step(instruction, "tensor", number, number, busy, busy + machine.mma_latency, operations=2 * 16 * 8 * depth)


def _memory(instruction: Instruction, machine: Machine) -> Step:
    base, name = instruction.base, instruction.name
    if base in ("LDSM", "STSM"):
        size = 128 * (4 if name.endswith(".4") else 2 if name.endswith(".2") else 1)
    elif base == "SHFL":
        size = 128
    else:
        widths = (("128", 16), ("64", 8), ("U16", 2), ("S16", 2), ("U8", 1), ("S8", 1))
        size = 32 * next((width for text, width in widths if f".{text}" in name), 4)
    pipe = PIPES.index("memory")
    if base in _GLOBAL:
        is_copy = base == "LDGSTS"
        return Step(
            *(instruction, "L2", pipe, pipe, machine.memory, machine.l2_latency),
            shared=size / machine.shared_rate if is_copy else 0.0,
            l2_bytes=size,
            action=COPY if is_copy else NOTHING,
        )
    latency = machine.shuffle_latency if base == "SHFL" else machine.shared_latency
    return Step(instruction, "shared memory", pipe, pipe, machine.memory, latency, shared=max(size, 128) / machine.shared_rate)
