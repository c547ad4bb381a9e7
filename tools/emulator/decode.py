"""Decode PTX for the core: the operation and the registers of each instruction.

Instructions either compute one result per lane and are listed in core/lanewise.def, or belong to one of the families below, each
a method with a pattern of opcodes. All others raise UnknownPTX.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from .ptx import BITS, Label, Parameter, Statement, UnknownPTX, read, split

CORE = Path(__file__).parent / "core"
SHARED_BASE = 1024
"""Address of the first byte of shared memory: not zero, so that what forgets to add it goes out of bounds."""

REGISTER, NEGATED, IMMEDIATE, SPECIAL, SINK = range(5)  # kinds of operands, as in core/emulator.h
SPECIALS = ("%tid.x", "%ntid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z", "%laneid")
ZEROS = ("%tid.y", "%tid.z", "%cluster_ctarank", "%cluster_ctaid.x")


class Operand(ctypes.Structure):
    """A source or target of a value, as in core/emulator.h."""

    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32), ("value", ctypes.c_uint64))


class Instruction(ctypes.Structure):
    """One decoded instruction, as in core/emulator.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("operation", "guard", "guard_negated", "operands", "operand_count", "results")),
        ("target", ctypes.c_int32),
        ("detail", ctypes.c_int32 * 4),
    )


class Lanewise(NamedTuple):
    """A line of core/lanewise.def: the operation, and types of result and operands."""

    operation: int
    types: tuple[str, ...]


def _expanded(opcodes: str) -> list[str]:
    """Expand alternatives in braces: "add{,.rn}.f32" is two opcodes."""
    parts = re.split(r"\{([^}]*)\}", opcodes)
    choices = [part.split(",") if index % 2 else [part] for index, part in enumerate(parts)]
    return ["".join(choice) for choice in itertools.product(*choices)]


@functools.cache
def operations() -> dict[str, int]:
    """Return the core's numbers of all operations, by name."""
    names = [
        name
        for file in ("lanewise.def", "operations.def")
        for name in re.findall(r"^(?:UNARY|BINARY|TERNARY|QUATERNARY|OPERATION)\((\w+)", (CORE / file).read_text(), re.MULTILINE)
    ]
    return {name: number for number, name in enumerate(names)}


@functools.cache
def lanewise() -> dict[tuple[str, int], Lanewise]:
    """Return the instructions of core/lanewise.def, by opcode and number of operands."""
    found: dict[tuple[str, int], Lanewise] = {}
    sizes = {"UNARY": 2, "BINARY": 3, "TERNARY": 4, "QUATERNARY": 5}
    for line in (CORE / "lanewise.def").read_text().splitlines():
        if entry := re.match(r'(UNARY|BINARY|TERNARY|QUATERNARY)\((\w+), "([^"]+)", (.*)\)$', line):
            kind, name, opcodes, rest = entry.groups()
            types = tuple(name.strip() for name in rest.split(",")[: sizes[kind]])
            found |= {(opcode, len(types)): Lanewise(operations()[name], types) for opcode in _expanded(opcodes)}
    return found


class Decoded(NamedTuple):
    """An operation and its operands, results first."""

    operation: str | int
    operands: Sequence[Operand]
    results: int = 0
    detail: Sequence[int] = ()


@dataclass
class Program:
    """A decoded kernel, with the text and the place of each instruction for reports."""

    name: str
    threads: int
    parameters: tuple[Parameter, ...]
    parameter_bytes: int
    instructions: ctypes.Array[Instruction]
    operands: ctypes.Array[Operand]
    register_count: int
    texts: list[str]
    places: list[str]
    uses_wgmma: bool


Handler = Callable[["Decoder", "re.Match[str]", list[str]], Decoded]
_FAMILIES: list[tuple[re.Pattern[str], Handler]] = []


def family(pattern: str) -> Callable[[Handler], Handler]:
    """Let a method of Decoder decode the opcodes of a pattern."""

    def remember(handler: Handler) -> Handler:
        _FAMILIES.append((re.compile(pattern), handler))
        return handler

    return remember


@dataclass
class Decoder:
    """Decode statement after statement, and number registers as they are declared."""

    parameters: dict[str, int]
    registers: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Number and bits, by name."""
    count: int = 0
    instructions: list[Instruction] = field(default_factory=list)
    operands: list[Operand] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    branches: list[tuple[Instruction, str]] = field(default_factory=list)

    def add(self, statement: Statement) -> None:
        """Decode a declaration or an instruction.

        Raises:
            UnknownPTX: it is not known, or an operand is invalid.
        """
        text = statement.text
        if text.startswith(".reg "):
            self.declare(text)
        elif not text.startswith("."):
            try:
                self.instruction(text)
            except UnknownPTX as error:
                raise UnknownPTX(f"{error} in {text!r} ({statement.place})") from None
            self.texts.append(text)
            self.places.append(statement.place)

    def declare(self, text: str) -> None:
        """Number registers: ".reg .b32 %r<10>" has ten, ".reg .pred p" one."""
        _, kind, names = text.split(None, 2)
        for name in (declared.strip() for declared in names.split(",")):
            several = re.fullmatch(r"(\S+)<(\d+)>", name)
            for register in [f"{several[1]}{number}" for number in range(int(several[2]))] if several else [name]:
                self.registers[register] = (self.count, BITS[kind[1:]])
                self.count += 1

    def instruction(self, text: str) -> None:
        guard, negated = -1, False
        if guarded := re.match(r"@(!?)(\S+)\s+(.*)", text):
            text, negated = guarded[3], guarded[1] == "!"
            guard, _ = self.register(guarded[2])
        opcode, _, rest = text.partition(" ")
        decoded = self.decode(opcode, split(rest))
        operation = decoded.operation if isinstance(decoded.operation, int) else operations()[decoded.operation]
        first, count = len(self.operands), len(decoded.operands)
        target = -1
        made = Instruction(operation, guard, negated, first, count, decoded.results, target, tuple(decoded.detail))
        if opcode.startswith("bra"):
            self.branches.append((made, rest.strip()))
        self.operands.extend(decoded.operands)
        self.instructions.append(made)

    def decode(self, opcode: str, operands: list[str]) -> Decoded:
        """Decode an instruction by its opcode.

        Raises:
            UnknownPTX: the emulator does not know it.
        """
        if opcode in ("mov.b32", "mov.b64") and operands[0].startswith("{"):
            return Decoded("UNPACK", self.all(operands), 2, (int(opcode[-2:]) // 2,))
        if opcode in ("mov.b32", "mov.b64") and operands[1].startswith("{"):
            opcode, operands = opcode.replace("mov", "pack"), [operands[0], *split(operands[1].strip("{}"))]
        if listed := lanewise().get((opcode, len(operands))):
            return self.lanes(listed, operands, converts=opcode.startswith("cvt"))
        for pattern, handler in _FAMILIES:
            if match := pattern.fullmatch(opcode):
                return handler(self, match, operands)
        raise UnknownPTX(f"unknown instruction {opcode} with {len(operands)} operands")

    def lanes(self, listed: Lanewise, operands: list[str], converts: bool) -> Decoded:
        """Decode an instruction that computes one result per lane."""
        decoded = [self.operand(text) for text in operands]
        for place, (text, kind) in enumerate(zip(operands, listed.types, strict=True)):
            _, bits = self.registers.get(text.removeprefix("!"), (0, BITS[kind]))
            takes_wider = place > 0 and converts  # the lower bits of a wider register
            if bits < BITS[kind] or (bits > BITS[kind] and not takes_wider):
                raise UnknownPTX(f"{text} has {bits} bits instead of {BITS[kind]}")
        return Decoded(listed.operation, decoded, 1)

    # ---- operands

    def register(self, name: str) -> tuple[int, int]:
        try:
            return self.registers[name]
        except KeyError:
            raise UnknownPTX(f"unknown operand {name}") from None

    def operand(self, text: str) -> Operand:
        """Decode a register, a negated predicate, "_" for no result, or a number."""
        if text == "_":
            return Operand(SINK)
        if text.startswith("!"):
            return Operand(NEGATED, self.register(text[1:])[0])
        if text in self.registers:
            return Operand(REGISTER, self.registers[text][0])
        if text in SPECIALS or text in ZEROS:
            return Operand(SPECIAL, SPECIALS.index(text) if text in SPECIALS else len(SPECIALS))
        if text == "global_smem":
            return Operand(IMMEDIATE, 0, SHARED_BASE)
        if bits := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", text):
            return Operand(IMMEDIATE, 0, int(bits[1] or bits[2], 16))
        if re.fullmatch(r"-?\d+|-?0x[0-9a-fA-F]+U?", text):
            return Operand(IMMEDIATE, 0, int(text.rstrip("U"), 0) & (2**64 - 1))
        raise UnknownPTX(f"unknown operand {text}")

    def group(self, text: str) -> list[Operand]:
        """Decode one operand, or those of a group in braces."""
        return [self.operand(part) for part in split(text.strip("{}"))]

    def all(self, operands: Sequence[str]) -> list[Operand]:
        return [register for text in operands for register in self.group(text)]

    def address(self, text: str) -> Operand:
        """Decode "[%r1+4]": a register, a parameter or a number, and an offset."""
        inner = re.fullmatch(r"\[\s*([^\s+]+?)\s*(?:\+\s*(-?\w+)\s*)?\]", text)
        if not inner:
            raise UnknownPTX(f"unknown address {text}")
        base, offset = inner[1], int(inner[2] or "0", 0)
        if base in self.parameters:
            return Operand(IMMEDIATE, 0, self.parameters[base] + offset)
        found = self.operand(base)
        found.value = (found.value + offset) & (2**64 - 1)
        return found

    # ---- families of instructions; core/step.c, matrix.c and wgmma.c say what their details are

    @family(r"bra(\.uni)?")
    def branch(self, match: re.Match[str], operands: list[str]) -> Decoded:
        return Decoded("BRANCH", [])

    @family(r"ret|exit")
    def leave(self, match: re.Match[str], operands: list[str]) -> Decoded:
        return Decoded("RETURN", [])

    @family(r"bar\.warp\.sync|griddepcontrol\.\w+|nanosleep\.u32")
    def nothing(self, match: re.Match[str], operands: list[str]) -> Decoded:
        return Decoded("NOTHING", [])

    @family(r"(bar|barrier)\.(cta\.)?sync(\.aligned)?")
    def barrier(self, match: re.Match[str], operands: list[str]) -> Decoded:
        return Decoded("BARRIER", self.all(operands))

    @family(r"setp\.(\w+)(?:\.(and|or|xor))?(?:\.ftz)?\.([bsuf])(16|32|64)")
    def set_predicate(self, match: re.Match[str], operands: list[str]) -> Decoded:
        comparisons = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
        types = ("s16", "u16", "s32", "u32", "s64", "u64", "f32", "f64")
        compare, combine, kind, bits = match.groups()
        name = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(compare, compare)
        kind = {"b": "u"}.get(kind, kind) + bits
        if name not in comparisons or kind not in types:
            raise UnknownPTX(f"unknown instruction {match[0]}")
        results = operands[0].split("|")
        detail = (comparisons.index(name), types.index(kind), (None, "and", "or", "xor").index(combine))
        return Decoded("SET_PREDICATE", self.all([*results, *operands[1:]]), len(results), detail)

    @family(r"shfl\.sync\.(idx|bfly|up|down)\.b32")
    def shuffle(self, match: re.Match[str], operands: list[str]) -> Decoded:
        results = operands[0].split("|")
        detail = (("idx", "bfly", "up", "down").index(match[1]),)
        return Decoded("SHUFFLE", self.all([*results, *operands[1:]]), len(results), detail)

    @family(r"redux\.sync\.(add|min|max|and|or|xor)\.([bsu])32")
    def reduce(self, match: re.Match[str], operands: list[str]) -> Decoded:
        detail = (("add", "min", "max", "and", "or", "xor").index(match[1]), int(match[2] == "s"))
        return Decoded("REDUCE", self.all(operands), 1, detail)

    @family(r"ld\.(global|shared|shared::cta|param)((?:\.(?:ca|cg|nc|L1::\w+|L2::\w+))*)(?:\.v([248]))?\.([bsuf])(8|16|32|64)")
    def load(self, match: re.Match[str], operands: list[str]) -> Decoded:
        space = {"global": 0, "shared": 1, "shared::cta": 1, "param": 2}[match[1]]
        targets = split(operands[0].strip("{}"))
        extended = self.register(targets[0])[1] if match[4] == "s" else 0
        detail = (space, int(match[3] or 1), int(match[5]) // 8, extended)
        if "cache_hint" in match[2] or len(targets) != detail[1]:
            raise UnknownPTX(f"unknown instruction {match[0]}")
        return Decoded("LOAD", [*self.group(operands[0]), self.address(operands[1])], len(targets), detail)

    @family(r"st\.(global|shared|shared::cta)(?:\.v([248]))?\.([bsuf])(8|16|32|64)")
    def store(self, match: re.Match[str], operands: list[str]) -> Decoded:
        detail = (int(match[1] != "global"), int(match[2] or 1), int(match[4]) // 8)
        return Decoded("STORE", [self.address(operands[0]), *self.group(operands[1])], 0, detail)

    @family(r"cp\.async\.(ca|cg)\.shared\.global((?:\.L2::128B|\.L2::256B|\.L2::64B)?)")
    def copy_async(self, match: re.Match[str], operands: list[str]) -> Decoded:
        return Decoded("COPY_ASYNC", [self.address(operands[0]), self.address(operands[1]), *self.all(operands[2:])])

    @family(r"cp\.async\.commit_group")
    def copy_commit(self, match: re.Match[str], operands: list[str]) -> Decoded:
        return Decoded("COPY_COMMIT", [])

    @family(r"cp\.async\.wait_group")
    def copy_wait(self, match: re.Match[str], operands: list[str]) -> Decoded:
        return Decoded("COPY_WAIT", self.all(operands))

    @family(r"(ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(::cta)?\.b16")
    def move_matrices(self, match: re.Match[str], operands: list[str]) -> Decoded:
        detail = (int(match[2]), int(match[3] is not None))
        if match[1] == "st":
            return Decoded("STORE_MATRICES", [self.address(operands[0]), *self.group(operands[1])], 0, detail)
        return Decoded("LOAD_MATRICES", [*self.group(operands[0]), self.address(operands[1])], detail[0], detail)

    @family(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(f16|bf16)\.\1\.f32")
    def multiply_16_bits(self, match: re.Match[str], operands: list[str]) -> Decoded:
        return Decoded("MMA_16_BITS", self.all(operands), 4, (("f16", "bf16").index(match[1]),))

    @family(r"mma\.sync\.aligned\.m16n8k8\.row\.col\.f32\.tf32\.tf32\.f32")
    def multiply_tf32(self, match: re.Match[str], operands: list[str]) -> Decoded:
        return Decoded("MMA_TF32", self.all(operands), 4)

    @family(r"fence\.proxy\.async(\.shared::cta)?")
    def proxy_fence(self, match: re.Match[str], operands: list[str]) -> Decoded:
        return Decoded("PROXY_FENCE", [])

    @family(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(?:8|16)\.f32\.(f16|bf16|tf32)\.\2")
    def wgmma(self, match: re.Match[str], operands: list[str]) -> Decoded:
        sums = int(match[1]) // 2
        detail = (int(match[1]), ("f16", "bf16", "tf32").index(match[2]), int(operands[1].startswith("{")))
        return Decoded("WGMMA", self.all(operands), sums, detail)

    @family(r"wgmma\.(fence|commit_group|wait_group)\.sync\.aligned")
    def wgmma_order(self, match: re.Match[str], operands: list[str]) -> Decoded:
        name = {"fence": "WGMMA_FENCE", "commit_group": "WGMMA_COMMIT", "wait_group": "WGMMA_WAIT"}[match[1]]
        return Decoded(name, self.all(operands))


@functools.lru_cache(maxsize=256)
def decode(ptx: str) -> Program:
    """Decode a kernel.

    Raises:
        UnknownPTX: it has an instruction that the emulator does not know.
    """
    source = read(ptx)
    decoder = Decoder({parameter.name: parameter.offset for parameter in source.parameters})
    for statement in source.body:
        if isinstance(statement, Label):
            decoder.labels[statement.name] = len(decoder.instructions)
        else:
            decoder.add(statement)
    for instruction, label in decoder.branches:
        if label not in decoder.labels:
            raise UnknownPTX(f"there is no label {label}")
        instruction.target = decoder.labels[label]
    return Program(
        *(source.name, source.threads, source.parameters, source.parameter_bytes),
        (Instruction * len(decoder.instructions))(*decoder.instructions),
        (Operand * len(decoder.operands))(*decoder.operands),
        *(decoder.count, decoder.texts, decoder.places),
        uses_wgmma=any("wgmma.mma_async" in text for text in decoder.texts),
    )
