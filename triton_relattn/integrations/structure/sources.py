"""Fingerprints of the source that a class is made of: proofs are remembered for it."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from ..._core.cache import digest, fingerprint_of, fingerprints

NOT_THE_USERS = ("torch", "builtins", "typing", "abc")
"""Packages whose files a class's fingerprint leaves out."""


def bases_of(stock: type) -> list[type]:
    """Return a class and its bases, but for those of torch and of Python."""
    return [each for each in stock.__mro__ if is_the_users(each)]


def is_the_users(each: type | types.FunctionType) -> bool:
    """Return whether a class or a function is of neither torch nor Python."""
    return str(each.__module__).partition(".")[0] not in NOT_THE_USERS


def function_of(value: Any) -> types.FunctionType | None:
    """Return the function behind an attribute of a class or a module; None if it is none."""
    function = getattr(value, "__func__", value)
    return function if isinstance(function, types.FunctionType) else None


def names_used(code: types.CodeType) -> Iterator[str]:
    """Return the names that code and the functions within it use: of globals, and of attributes."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from names_used(each)


@functools.cache
def of_class(stock: type[nn.Module]) -> str | None:
    """Return a fingerprint of the files of a class, of its bases and of the functions that its methods call by name.

    None if one of the files is out of reach, as of a class that was typed into a notebook.
    """
    if "<locals>" in stock.__qualname__:  # the same source can make another class
        return None
    modules: set[str] = set()
    bases = bases_of(stock)
    for each in bases:
        modules.add(each.__module__)
        for method in vars(each).values():
            if (function := function_of(method)) is not None:
                called = (function.__globals__.get(name) for name in names_used(function.__code__))
                modules |= {
                    str(getattr(one, "__module__", None) or getattr(one, "__name__", "")) for one in called if one is not None
                }
    own = {each.__module__.partition(".")[0] for each in bases}
    found = []
    for name in sorted(modules):
        if name.partition(".")[0] not in own:
            continue
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None or not Path(file).is_file():
            return None
        found.append((name, fingerprint_of(Path(file).read_bytes())))
    return digest(stock.__qualname__, found) if found else None


@functools.cache
def of_ours() -> str:
    """Return a fingerprint of the files here that act in place of stock classes, and of what they compute with."""
    here = Path(__file__).parent
    return digest([fingerprints(folder.glob("*.py")) for folder in (here, here.parent, here.parents[1])])
