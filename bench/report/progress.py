"""Progress on stderr: a bar in a terminal that has tqdm, a short line per finished step elsewhere; and an early end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TypeVar

Item = TypeVar("Item")


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C end the measurements, but not the report that follows."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted; what has been measured is kept")


def progress(
    items: Iterable[Item],
    label: Callable[[Item], str],
    work: Callable[[Item], float] = lambda _: 1.0,
    outcome: Callable[[Item], str] = lambda _: "",
) -> Iterator[Item]:
    """Yield the items and show which one is at work; a bar also shows the time left, if time goes with ``work``.

    outcome: asked for a finished item; what it says stands in a log in place of the time: that it was skipped.
    """
    items = list(items)
    return _bar(items, label, work) if sys.stderr.isatty() and find_spec("tqdm") else _lines(items, label, outcome)


def _bar(items: Sequence[Item], label: Callable[[Item], str], work: Callable[[Item], float]) -> Iterator[Item]:
    from tqdm import tqdm

    form = "{desc:<40.40}{percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
    with tqdm(total=sum(map(work, items)), bar_format=form, dynamic_ncols=True, leave=False) as bar:
        for item in items:
            bar.set_description_str(label(item))
            yield item
            bar.update(work(item))


def _lines(items: Sequence[Item], label: Callable[[Item], str], outcome: Callable[[Item], str]) -> Iterator[Item]:
    for number, item in enumerate(items, 1):
        started = time.monotonic()
        yield item
        said = outcome(item) or f"{time.monotonic() - started:.1f} s"
        print(f"[{number}/{len(items)}] {label(item)}: {said}", file=sys.stderr, flush=True)
