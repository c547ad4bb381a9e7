"""Parse PTX: a kernel's parameters, and the statements and labels of its body."""

from __future__ import annotations

import re
from dataclasses import dataclass

BITS = {f"{kind}{bits}": bits for kind in "busf" for bits in (8, 16, 32, 64)} | {"pred": 1}
"""Bits of PTX's types."""


class UnknownPTX(Exception):
    """PTX that the emulator does not know; the message names it."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel, by the bytes of the parameter memory that it has."""

    name: str
    type: str
    offset: int

    @property
    def size(self) -> int:
        return BITS[self.type] // 8


@dataclass(frozen=True)
class Statement:
    """A declaration or an instruction, and the place in Python that it comes from, "forward.py:154:55"."""

    text: str
    place: str


@dataclass(frozen=True)
class Label:
    name: str


@dataclass(frozen=True)
class Source:
    """A kernel and the number of threads of its programs."""

    name: str
    threads: int
    parameters: tuple[Parameter, ...]
    body: tuple[Statement | Label, ...]

    @property
    def parameter_bytes(self) -> int:
        return max((parameter.offset + parameter.size for parameter in self.parameters), default=0)


_ENTRY = re.compile(
    r"\.visible \.entry (?P<name>\w+)\s*\((?P<parameters>.*?)\)(?P<attributes>.*?)\n\{\n(?P<body>.*?)\n\}", re.DOTALL
)
_LABEL = re.compile(r"(\$?[\w$]+):\s*")


def read(ptx: str) -> Source:
    """Parse the only kernel of a PTX file.

    Raises:
        UnknownPTX: there is none, or its number of threads is missing.
    """
    entry = _ENTRY.search(re.sub(r"/\*.*?\*/", "", ptx, flags=re.DOTALL))
    threads = entry and re.search(r"\.reqntid (\d+)", entry["attributes"])
    if not entry or not threads:
        raise UnknownPTX("there is no kernel (.visible .entry with .reqntid)")
    return Source(entry["name"], int(threads[1]), _parameters(entry["parameters"]), tuple(_body(entry["body"])))


def _parameters(text: str) -> tuple[Parameter, ...]:
    found: list[Parameter] = []
    offset = 0
    for line in filter(str.strip, text.split(",")):
        words = line.split()
        kind, name = words[1].removeprefix("."), words[-1]
        size = BITS[kind] // 8
        offset = -(-offset // size) * size
        found.append(Parameter(name, kind, offset))
        offset += size
    return tuple(found)


def _body(text: str) -> list[Statement | Label]:
    found: list[Statement | Label] = []
    place = unfinished = ""
    for line in text.split("\n"):
        code, _, comment = line.partition("//")
        if code.strip().startswith(".loc"):
            place = comment.strip() or code.strip()
            continue
        unfinished = f"{unfinished} {code}".strip()
        while unfinished:
            if unfinished[0] in "{}":  # scopes of inline assembly: names that are declared again there stay what they are then
                unfinished = unfinished[1:].strip()
            elif label := _LABEL.match(unfinished):
                found.append(Label(label[1]))
                unfinished = unfinished[label.end() :]
            elif ";" in unfinished:
                statement, _, unfinished = unfinished.partition(";")
                found.append(Statement(" ".join(statement.split()), place))
                unfinished = unfinished.strip()
            else:
                break
    return found


def split(text: str) -> list[str]:
    """Split operands at commas: "{a, b}, [c+4], 1" has three."""
    parts = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text)
    return [part.strip() for part in parts if part.strip()]
