"""Text for the terminal and for pages: tables, bytes and times, and a line on stderr for every finished step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")


def table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be, the first one to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]

    def line(cells: Sequence[str]) -> str:
        aligned = [f"{cells[0]:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(cells[1:], widths[1:], strict=True))]
        return "  ".join(("", *aligned)).rstrip()

    return "\n".join((line(header), line(["-" * width for width in widths]), *map(line, body)))


def markdown_table(header: Sequence[str], body: Sequence[Sequence[str]], others: str = "---:") -> str:
    """A table in Markdown, its first column to the left, the others to the right or as their rule says."""
    rule = ["---", *[others] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *body))


def digits(value: float) -> str:
    """Three digits: 0.574, 12.0, 26,700."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:#.3g}"


def spread(numbers: Iterable[float]) -> str:
    """The smallest and the largest number, one if they are the same: 1.1 to 75."""
    ordered = sorted(numbers)
    ends = (f"{number:.0f}" if number >= 10 else f"{number:.1f}" for number in (ordered[0], ordered[-1]))
    return " to ".join(dict.fromkeys(ends))


def short_bytes(count: float) -> str:
    """Three digits and MiB or GiB."""
    mebibytes = count / 2**20
    return f"{mebibytes / 1024:.3g} GiB" if mebibytes >= 1000 else f"{mebibytes:.3g} MiB"


def short_time(milliseconds: float) -> str:
    """Three digits and ms or s."""
    return f"{milliseconds / 1e3:.3g} s" if milliseconds >= 1000 else f"{milliseconds:.3g} ms"


def progress(items: Iterable[Item], label: Callable[[Item], str] = str) -> Iterator[Item]:
    """Yield the items; once the work on one is done, a line has its number, its label and its time."""
    items = list(items)
    for number, item in enumerate(items, 1):
        started = time.monotonic()
        yield item
        print(f"[{number}/{len(items)}] {label(item)}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end the measurements, but not the report that follows."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted; what has been measured is kept")
