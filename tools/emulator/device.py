"""Run launches of Triton kernels, compiled for a GPU that this machine lacks, on CPU tensors.

with emulated("sm_90") as launches:
    kernel[grid](...)  # any Triton kernel, or a function that launches some
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from ..absent_gpu import Launch, recorded_launches
from . import machine
from .decode import decode
from .machine import Report

TARGETS = {"sm_80": 166_912, "sm_86": 101_376, "sm_89": 101_376, "sm_90": 232_448, "sm_120": 101_376}
"""GPUs whose PTX the emulator knows, and the bytes of shared memory that a program may have there."""


@dataclass(frozen=True)
class Emulated:
    """A launch that was run, and the PTX that it ran."""

    name: str
    grid: tuple[int, int, int]
    ptx: str
    report: Report


def _leaves(value: Any, signature: Any) -> list[Any]:
    """Return the parameters of an argument: one for each member of a tuple, none for constants."""
    if isinstance(signature, tuple):
        return [leaf for member, kind in zip(value, signature, strict=True) for leaf in _leaves(member, kind)]
    return [] if signature == "constexpr" else [value]


@contextmanager
def emulated(target: str, seed: int = 0, change: Callable[[str, str], str] | None = None) -> Iterator[list[Emulated]]:
    """Compile and run launched kernels; yields the launches.

    Args:
        seed: of the order in which warps take turns.
        change: a function of a kernel's name and PTX that returns the PTX to run.
    """
    done: list[Emulated] = []

    def run(launch: Launch, arguments: tuple[Any, ...]) -> None:
        shared = launch.kernel.metadata.shared
        if shared > TARGETS[target]:  # as the driver would say
            raise OutOfResources(shared, TARGETS[target], "shared memory")
        ptx: str = launch.kernel.asm["ptx"]
        if change is not None:
            ptx = change(launch.name, ptx)
        values = _leaves(arguments, tuple(launch.kernel.src.signature.values()))
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        scratch = [0, 0]  # Triton's last two parameters, for memory that no kernel here asks for
        program = decode(ptx)
        report = machine.run(program, launch.grid, shared, [*values, *scratch], tensors, seed)
        done.append(Emulated(launch.name, launch.grid, ptx, report))

    if target not in TARGETS:
        raise ValueError(f"the emulator does not know the PTX of {target}, only of {', '.join(TARGETS)}")
    with recorded_launches(target, run=run, assembled=False):
        yield done
