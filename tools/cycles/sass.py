"""Machine code of NVIDIA's GPUs as ``cuobjdump -sass`` prints it, with the control code that every instruction carries.

The compiler decides when an instruction may be issued, and writes it down: how many cycles the warp pauses after it, which of the
warp's six scoreboards are busy until its result is there or its operands are read, and for which ones it waits. The bits have
their places since Volta: Jia et al., Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking, arXiv 1804.06826.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+((?:@!?U?P\w+\s+)?)(\S+?)(?:\s+([^;]*))?\s*;\s+/\* 0x[0-9a-f]{16} \*/")
_SECOND_WORD = re.compile(r"\s+/\* 0x([0-9a-f]{16}) \*/")
_CONTROL_BITS = 41  # where the control code begins in the second word
_NO_SCOREBOARD = 7


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: the mnemonic with its modifiers: "HGMMA.64x64x16.F32.BF16".
        stall: cycles that the warp pauses before its next instruction.
        sets: the scoreboard that is busy until the result is there; None: stalls see to that.
        reads: the scoreboard that is busy until the operands are read.
        waits: the scoreboards that must be free before the instruction is issued.
    """

    address: int
    predicate: str
    name: str
    operands: str
    stall: int = 1
    sets: int | None = None
    reads: int | None = None
    waits: tuple[int, ...] = ()

    @property
    def base(self) -> str:
        """The mnemonic alone: "HGMMA"."""
        return self.name.partition(".")[0]

    @property
    def runs(self) -> bool:
        """Whether it does anything: before some fences the compiler puts loads that never run."""
        return self.predicate != "@!PT"


def parse(sass: str) -> list[Instruction]:
    """Return the instructions of a kernel, in order."""
    instructions, first = list[Instruction](), None
    for line in sass.splitlines():
        if match := _INSTRUCTION.match(line):
            first = match
        elif first is not None and (match := _SECOND_WORD.match(line)):
            address, predicate, name, operands = first.groups(default="")
            control = int(match[1], 16) >> _CONTROL_BITS
            sets, reads, waits = control >> 5 & 7, control >> 8 & 7, control >> 11 & 63
            instructions.append(
                Instruction(
                    *(int(address, 16), predicate.strip(), name, operands.strip()),
                    stall=max(1, control & 15),
                    sets=None if sets == _NO_SCOREBOARD else sets,
                    reads=None if reads == _NO_SCOREBOARD else reads,
                    waits=tuple(number for number in range(6) if waits >> number & 1),
                )
            )
            first = None
    return instructions


def loops(instructions: list[Instruction]) -> list[list[Instruction]]:
    """Return the loops that hold no other, in order: each from where a branch jumps back to, up to that branch."""
    index = {instruction.address: number for number, instruction in enumerate(instructions)}
    spans = []
    for number, instruction in enumerate(instructions):
        target = re.search(r"0x([0-9a-f]+)", instruction.operands) if instruction.base == "BRA" else None
        start = index.get(int(target[1], 16), number) if target else number
        if start < number:
            spans.append((start, number))
    innermost = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    return [instructions[start : end + 1] for start, end in sorted(innermost)]
