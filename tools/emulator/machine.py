"""Compile the core with gcc on first use, run launches, and report findings."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import struct
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .decode import CORE, SHARED_BASE, Instruction, Operand, Program

BUILD = Path(__file__).parents[2] / "out" / "emulator"
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-fvisibility=hidden", "-shared")
MAX_FINDINGS = 256
INSTRUCTION_LIMIT = 50_000_000
"""Instructions that the warps of one program may execute together."""


class NoCompiler(Exception):
    """There is no gcc."""


@dataclass(frozen=True)
class Finding:
    """An error (or note) of an instruction, when it first occurred.

    Attributes:
        what: a text of core/findings.def.
        instruction, place: in PTX, and its line in Python.
        other: the conflicting instruction or program.
        address: an address in memory, or the number of a register.
        count: how often it occurred.
    """

    what: str
    is_note: bool
    instruction: str
    place: str
    other: str
    program: int
    warp: int
    lane: int
    address: int
    count: int

    def __str__(self) -> str:
        where = f"program {self.program}, warp {self.warp}, lane {self.lane}, {self.address:#x}"
        times = f", {self.count} times" if self.count > 1 else ""
        clash = f"; the other: {self.other}" if self.other else ""
        return f"{self.what}: {self.instruction[:100]} ({self.place}; {where}{times}){clash}"


@dataclass(frozen=True)
class Report:
    """All findings of a launch; finished if all programs ended."""

    findings: tuple[Finding, ...]
    finished: bool
    instructions: int
    """Executed by all warps."""
    seconds: float

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.is_note]

    @property
    def notes(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.is_note]

    @property
    def names(self) -> set[str]:
        """The texts of the errors."""
        return {finding.what for finding in self.errors}


class _Finding(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "instruction", "program", "warp", "lane", "other", "other_instruction")),
        *((name, ctypes.c_uint64) for name in ("address", "count", "last")),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("instructions", ctypes.POINTER(Instruction)),
        ("operands", ctypes.POINTER(Operand)),
        *((name, ctypes.c_int32) for name in ("instruction_count", "register_count", "warp_count", "uses_wgmma")),
        ("parameters", ctypes.c_char_p),
        ("grid", ctypes.c_int32 * 3),
        ("shared_base", ctypes.c_uint32),
        ("shared_size", ctypes.c_uint32),
        ("buffer_bases", ctypes.POINTER(ctypes.c_uint64)),
        ("buffer_sizes", ctypes.POINTER(ctypes.c_uint64)),
        ("buffer_count", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("instruction_limit", ctypes.c_uint64),
    )


@functools.cache
def kinds() -> list[tuple[str, bool]]:
    """Return the texts of core/findings.def, and whether each is only a note."""
    entries = re.findall(r'^(FINDING|NOTE)\(\w+, "(.*)"\)$', (CORE / "findings.def").read_text(), re.MULTILINE)
    return [(text, macro == "NOTE") for macro, text in entries]


@functools.cache
def core() -> ctypes.CDLL:
    """Load the core, compiled first unless there is a library of the same sources.

    Raises:
        NoCompiler: it is not compiled, and there is no gcc.
    """
    sources = sorted(CORE.glob("*.c"))
    parts = [" ".join(FLAGS), *(path.read_text() for path in sorted(CORE.iterdir()))]
    library = BUILD / f"core-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.so"
    if not library.exists():
        if not shutil.which("gcc"):
            raise NoCompiler("the emulator's core is written in C and needs gcc, which is not on the PATH")
        BUILD.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")  # another process may compile it at the same time
        subprocess.run(["gcc", *FLAGS, *map(str, sources), "-o", str(unfinished), "-lm"], check=True)
        unfinished.replace(library)
    return ctypes.CDLL(str(library))


def parameter_memory(program: Program, values: Sequence[Any]) -> bytes:
    """Lay out a kernel's parameters in memory: numbers, and addresses of tensors."""
    if len(values) != len(program.parameters):
        raise ValueError(f"{program.name} takes {len(program.parameters)} parameters, got {len(values)}")
    memory = bytearray(program.parameter_bytes + 16)
    for parameter, value in zip(program.parameters, values, strict=True):
        if isinstance(value, torch.Tensor):
            value = value.data_ptr()
        if parameter.type in ("f32", "f64"):
            struct.pack_into("<f" if parameter.type == "f32" else "<d", memory, parameter.offset, value)
        else:
            bits = int(value) & (2 ** (8 * parameter.size) - 1)
            memory[parameter.offset : parameter.offset + parameter.size] = bits.to_bytes(parameter.size, "little")
    return bytes(memory)


def storages(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Return the memory that a kernel may touch: address and bytes of each tensor's storage."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def run(
    program: Program,
    grid: tuple[int, int, int],
    shared_bytes: int,
    values: Sequence[Any],
    tensors: Sequence[torch.Tensor],
    seed: int = 0,
    instruction_limit: int = INSTRUCTION_LIMIT,
) -> Report:
    """Run a kernel on CPU tensors.

    Args:
        values: its parameters in order.
        tensors: all that it may access.
        seed: of the order in which warps take turns between barriers.
    """
    memory = storages(tensors)
    addresses = (ctypes.c_uint64 * len(memory))(*memory)
    sizes = (ctypes.c_uint64 * len(memory))(*memory.values())
    launch = _Launch(
        *(program.instructions, program.operands, len(program.instructions), program.register_count),
        *(program.threads // 32, program.uses_wgmma, parameter_memory(program, values), grid),
        *(SHARED_BASE, max(shared_bytes, 16), addresses, sizes, len(memory), seed, instruction_limit),
    )
    found, count, executed = (_Finding * MAX_FINDINGS)(), ctypes.c_int32(), ctypes.c_uint64()
    started = time.perf_counter()
    finished = core().run_launch(ctypes.byref(launch), found, ctypes.byref(count), ctypes.byref(executed))
    seconds = time.perf_counter() - started
    findings = tuple(_finding(program, found[index]) for index in range(count.value))
    return Report(findings, bool(finished), executed.value, seconds)


def _finding(program: Program, found: _Finding) -> Finding:
    what, is_note = kinds()[found.kind]
    other = ""
    if found.other_instruction >= 0:
        place = program.places[found.other_instruction]
        other = f"warp {found.other}, {program.texts[found.other_instruction][:100]} ({place})"
    elif found.other >= 0:
        other = f"program {found.other}"
    instruction, place = program.texts[found.instruction], program.places[found.instruction]
    numbers: tuple[int, ...] = (found.program, found.warp, found.lane, found.address, found.count)
    return Finding(what, is_note, instruction, place, other, *numbers)
