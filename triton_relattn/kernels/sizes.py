"""Sizes of a call as symbols, so that what is decided for one length serves others.

While a call is planned each size is a ``Size``, an integer that notes what is computed from it and how every question about it is
answered. From the notes comes a function that computes the same from other sizes, or finds that a question has another answer:

    notes = Notes((200, 64))
    length, width = notes.sizes
    structure = (-(-length // 64), length * width) if length <= 512 else ...
    other = notes.function(structure)       # other((300, 64)) = (5, 19200), other((600, 64)) = None
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

OPERATIONS = ("+", "add"), ("-", "sub"), ("*", "mul"), ("//", "floordiv"), ("%", "mod")
COMPARISONS = ("==", "eq"), ("!=", "ne"), ("<", "lt"), ("<=", "le"), (">", "gt"), (">=", "ge")
"""Of sizes, as Python writes them, and their names in operator."""


class Size:
    """An integer, and its name in the notes."""

    __slots__ = ("name", "notes", "value")

    def __init__(self, notes: Notes, name: str, value: Any) -> None:
        self.notes, self.name, self.value = notes, name, value

    def __neg__(self) -> Any:
        return self.notes.computed("-", operator.sub, 0, self)

    def __bool__(self) -> bool:
        return self != 0

    def __index__(self) -> int:
        """Return the integer: a decision for it alone."""
        self.notes.answered("==", operator.eq, self, self.value)
        return int(self.value)

    __int__ = __index__

    def __hash__(self) -> int:
        return hash(int(self))

    def __repr__(self) -> str:
        return f"Size({self.value})"


class Notes:
    """What is computed from sizes, as lines of Python, and under which conditions."""

    def __init__(self, values: Sequence[int]) -> None:
        self.sizes = [Size(self, f"s{at}", value) for at, value in enumerate(values)]
        self.lines: list[str] = []
        self.known: dict[str, Any] = {}  # by the expressions that were met
        self.functions: dict[str, Callable[..., int]] = {}  # by their names in the lines

    def computed(self, symbol: str, compute: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        """Return the result of an operation, a Size of its own."""
        return self._result(f"{_name(left)} {symbol} {_name(right)}", compute, (left, right))

    def called(self, function: Callable[..., int], arguments: tuple[Any, ...]) -> Any:
        """Return the result of a function, a Size of its own."""
        name = f"f{id(function)}"
        self.functions[name] = function
        return self._result(f"{name}({', '.join(map(_name, arguments))})", function, arguments)

    def _result(self, expression: str, compute: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
        if expression not in self.known:
            found = Size(self, f"v{len(self.lines)}", compute(*plain(operands)))
            self.lines.append(f"{found.name} = {expression}")
            self.known[expression] = found
        return self.known[expression]

    def answered(self, symbol: str, compare: Callable[[Any, Any], bool], left: Any, right: Any) -> bool:
        """Return the result of a comparison, which becomes a condition."""
        expression = f"{_name(left)} {symbol} {_name(right)}"
        if expression not in self.known:
            answer = self.known[expression] = compare(plain(left), plain(right))
            self.lines.append(f"if {'not ' if answer else ''}({expression}): return None")
        return bool(self.known[expression])

    def function(self, structure: Any) -> Callable[[Sequence[int]], Any]:
        """Return a function of sizes: a structure, tuples and lists of anything, with what was computed from them; None if they
        lead to other answers."""
        constants: dict[str, Any] = dict(self.functions)
        result = _source(structure, constants)
        unpacked = "".join(f"{size.name}, " for size in self.sizes)
        lines = [f"({unpacked}) = sizes"] * bool(self.sizes) + [*self.lines, f"return {result}"]
        exec("def function(sizes):\n    " + "\n    ".join(lines), constants)
        return constants["function"]  # type: ignore[no-any-return]


def _name(operand: Any) -> str:
    return operand.name if isinstance(operand, Size) else f"({operand!r})"


def one_step(function: Callable[..., int]) -> Callable[..., Any]:
    """Let the notes have a function of integers as a single step, and not what it does."""

    @functools.wraps(function)
    def step(*arguments: Any) -> Any:
        notes = next((argument.notes for argument in arguments if isinstance(argument, Size)), None)
        return function(*arguments) if notes is None else notes.called(function, arguments)

    return step


def plain(structure: Any) -> Any:
    """Return a structure with the values of sizes."""
    if isinstance(structure, Size):
        return structure.value
    if isinstance(structure, list):
        return list(map(plain, structure))
    if isinstance(structure, tuple):
        return getattr(structure, "_make", tuple)(map(plain, structure))
    return structure


def fixed(structure: Any) -> Any:
    """Return a structure with integers in place of sizes: a decision for these alone."""
    if isinstance(structure, tuple):
        return getattr(structure, "_make", tuple)(map(fixed, structure))
    return int(structure) if isinstance(structure, Size) else structure


def _source(structure: Any, constants: dict[str, Any]) -> str:
    """Return an expression of a structure. constants: what is neither a size nor an integer, by its name in the expression."""
    if isinstance(structure, Size):
        return structure.name
    if type(structure) in (int, bool, type(None)):
        return repr(structure)
    if isinstance(structure, list):
        return f"[{', '.join(_source(part, constants) for part in structure)}]"
    if isinstance(structure, tuple) and _has_sizes(structure):
        parts = f"({''.join(f'{_source(part, constants)}, ' for part in structure)})"
        make = getattr(structure, "_make", None)
        return parts if make is None else f"{_source(make, constants)}({parts})"
    name = f"c{len(constants)}"
    constants[name] = structure
    return name


def _has_sizes(structure: Any) -> bool:
    return isinstance(structure, Size) or (isinstance(structure, (tuple, list)) and any(map(_has_sizes, structure)))


def _operation(symbol: str, name: str) -> None:
    compute = getattr(operator, name)

    def method(self: Size, other: Any) -> Any:
        return self.notes.computed(symbol, compute, self, other) if isinstance(other, (int, float, Size)) else NotImplemented

    def reflected(self: Size, other: Any) -> Any:
        return self.notes.computed(symbol, compute, other, self) if isinstance(other, (int, float)) else NotImplemented

    setattr(Size, f"__{name}__", method)
    setattr(Size, f"__r{name}__", reflected)


def _comparison(symbol: str, name: str) -> None:
    compare = getattr(operator, name)

    def method(self: Size, other: Any) -> Any:
        return self.notes.answered(symbol, compare, self, other) if isinstance(other, (int, float, Size)) else NotImplemented

    setattr(Size, f"__{name}__", method)


for _pair in OPERATIONS:
    _operation(*_pair)
for _pair in COMPARISONS:
    _comparison(*_pair)
