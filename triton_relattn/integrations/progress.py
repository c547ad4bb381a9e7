"""A bar on the terminal for what takes longer than a moment."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
SECONDS = 2.0
"""How long nothing is shown."""
WIDTH = 30


def progress(items: Sequence[T], label: str) -> Iterator[T]:
    """Yield items; from SECONDS on a bar shows how many are done, if the errors go to a terminal."""
    start, shown = time.monotonic(), False
    for number, each in enumerate(items, 1):
        yield each
        if sys.stderr.isatty() and time.monotonic() - start > SECONDS:
            shown, done = True, WIDTH * number // len(items)
            print(f"\r{label} [{'#' * done:{WIDTH}}] {number}/{len(items)}", end="", file=sys.stderr, flush=True)
    if shown:
        print(file=sys.stderr)
