"""The cases that ``make test`` always has, beside a share of the others: each has noticed a fault (witnesses.txt)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

FILE = Path(__file__).with_suffix(".txt")


def read_witnesses() -> set[str]:
    """Return the names of the cases, as pytest gives them."""
    return set(FILE.read_text().split("\n")) - {""}


def write_witnesses(tests: Iterable[str]) -> None:
    FILE.write_text("".join(f"{test}\n" for test in sorted(set(tests))))
