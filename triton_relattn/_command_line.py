"""Words of command lines: numbers, sizes of a call as in ``b4,h12,n1500,d80``, a table of 33 rows."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch

Number = TypeVar("Number", int, float)

SIZES = {"b": "batch", "h": "heads", "n": "length", "d": "head_dim", "kv": "key_heads", "q": "num_queries"}


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line, without its usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def available_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def bounded(kind: type[Number], least: float, most: float = math.inf) -> Callable[[str], Number]:
    """A parser of a finite number, int or float, from least to most."""
    what = f"{'a whole number' if kind is int else 'a number'} from {least:g} {'on' if most == math.inf else f'to {most:g}'}"

    def parse(text: str) -> Number:
        with contextlib.suppress(ValueError):
            if least <= (found := kind(text)) <= most and found != math.inf:
                return found
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")

    return parse


def sizes(text: str) -> dict[str, int]:
    """A parser of ``b4,h12,n1500,d80``, also without commas; kv: heads of key and value, q: queries at the end of n keys."""
    found = {"batch": 1, "heads": 8, "head_dim": 64}
    for part in re.split(r",|(?<=\d)(?=[a-z])", text):
        match = re.fullmatch(r"\s*(b|h|n|d|kv|q)(\d+)\s*", part)
        if match is None or int(match[2]) < 1:
            known = ", ".join(f"{letter}: {name}" for letter, name in SIZES.items())
            raise argparse.ArgumentTypeError(
                f"{part!r} is not a size; sizes are {known}, each followed by a number, as in b4,h12,n1500,d80"
            )
        found[SIZES[match[1]]] = int(match[2])
    if "length" not in found:
        raise argparse.ArgumentTypeError(f"{text!r} has no length: b4,h12,n1500,d80")
    if found["heads"] % found.get("key_heads", 1):
        raise argparse.ArgumentTypeError(f"{text!r}: kv must divide h, {found['heads']}")
    if found.get("num_queries", 1) > found["length"]:
        raise argparse.ArgumentTypeError(f"{text!r}: q must be at most n, {found['length']}")
    return found


def rows(text: str) -> int | None:
    """A parser of the rows of a table, or "full"."""
    if text == "full":
        return None
    if not text.isdigit() or int(text) % 2 == 0:
        raise argparse.ArgumentTypeError(f'must be an odd number, such as 33 for distances up to 16, or "full", got {text!r}')
    return int(text)
