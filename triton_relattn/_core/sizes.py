"""Sizes of a call in words, for command lines: ``b4,h12,n1500,d80`` and a table of 33 rows."""

from __future__ import annotations

import argparse
import re

SIZES = {"b": "batch", "h": "heads", "n": "length", "d": "head_dim", "kv": "key_heads", "q": "num_queries"}


def sizes(text: str) -> dict[str, int]:
    """A parser of ``b4,h12,n1500,d80``; kv: heads of key and value, q: queries at the end of n keys."""
    found = {"batch": 1, "heads": 8, "head_dim": 64}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(b|h|n|d|kv|q)(\d+)\s*", part)
        if match is None or int(match[2]) < 1:
            known = ", ".join(f"{letter}: {name}" for letter, name in SIZES.items())
            raise argparse.ArgumentTypeError(
                f"{part!r} is no size; there are {known}, each with a number behind, as in b4,h12,n1500,d80"
            )
        found[SIZES[match[1]]] = int(match[2])
    if "length" not in found:
        raise argparse.ArgumentTypeError(f"{text!r} has no length: b4,h12,n1500,d80")
    return found


def rows(text: str) -> int | None:
    """A parser of the rows of a table, or "full"."""
    if text == "full":
        return None
    if not text.isdigit() or int(text) % 2 == 0:
        raise argparse.ArgumentTypeError(f'must be an odd number of rows, as 33 for distances up to 16, or "full", got {text!r}')
    return int(text)
