"""Fingerprints of the source that a class is made of: proofs are remembered for it."""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from pathlib import Path

from torch import nn

from ..known import fingerprint_of


@functools.cache
def of_class(stock: type[nn.Module]) -> str | None:
    """Return a fingerprint of the files of a class, of its bases and of the functions that its methods call by name.

    None if one of the files is out of reach, as of a class that was typed into a notebook.
    """
    if "<locals>" in stock.__qualname__:  # the same source can make another class
        return None
    modules: set[str] = set()
    for each in stock.__mro__:
        if each.__module__.partition(".")[0] in ("torch", "builtins", "typing", "abc"):
            continue
        modules.add(each.__module__)
        for method in vars(each).values():
            function = getattr(method, "__func__", method)
            if isinstance(function, types.FunctionType):
                called = (function.__globals__.get(name) for name in function.__code__.co_names)
                modules |= {
                    str(getattr(one, "__module__", None) or getattr(one, "__name__", "")) for one in called if one is not None
                }
    own = {each.partition(".")[0] for each in (base.__module__ for base in stock.__mro__)} - {
        "torch",
        "builtins",
        "typing",
        "abc",
    }
    found = []
    for name in sorted(modules):
        if name.partition(".")[0] not in own:
            continue
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None or not Path(file).is_file():
            return None
        found.append((name, fingerprint_of(Path(file).read_bytes())))
    return hashlib.sha256(repr((stock.__qualname__, found)).encode()).hexdigest() if found else None


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.cache
def of_ours() -> str:
    """Return a fingerprint of the files here that act in place of stock classes, and of what they compute with."""
    here = Path(__file__).parent
    files = [*sorted(here.glob("*.py")), *sorted(here.parent.glob("*.py")), *sorted(here.parents[1].glob("*.py"))]
    return hashlib.sha256(repr([fingerprint_of(each.read_bytes()) for each in files]).encode()).hexdigest()
