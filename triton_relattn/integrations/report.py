"""What :func:`triton_relattn.enable` has replaced and left, as a table."""

from __future__ import annotations

import re
import textwrap
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .calls import Compared as Compared
from .compact import Compact
from .isolation import in_own_thread
from .replacement import Replacement
from .shadow import shadow, with_random_weights

IN_PLACE = "enable changes the model in place and returns a report of it; use the model itself"


@dataclass(frozen=True)
class Row:
    """A module that has relative attention.

    name: as ``named_modules()`` has it. stock: its class. kind: what it computes. found: "library" or "structure". error: the
    largest difference that was found, as a share of the largest number; None: of a module that only passes on masks and
    positions. memory: bytes of the tensors of the stock forward and of ours, for one sequence in float32, for each of the
    report's lengths. reason: why it was left as it was; empty: it is replaced.
    """

    name: str
    stock: str
    kind: str
    found: str
    error: float | None = None
    memory: tuple[tuple[int | None, int | None], ...] = ()
    reason: str = ""


class Report(dict[str, str]):
    """The replaced modules: their names, as ``model.named_modules()`` has them, and those of their classes.

    rows: a :class:`Row` per module with relative attention, replaced or left. lengths: those that memory is counted for.
    packed: of encoders, by name, the difference between packed and padded, or why one stays padded. As text it is a table.
    """

    def __init__(self, rows: list[Row], lengths: tuple[int, ...]) -> None:
        super().__init__({row.name: row.stock for row in rows if not row.reason})
        self.rows, self.lengths, self._compared = rows, lengths, Compared()
        self.packed: dict[str, float | str] = {}

    def calls(self) -> Compared:
        """Return which calls were compared with the stock forward up to now."""
        return self._compared

    @property
    def left(self) -> dict[str, str]:
        """The modules that stay stock, and why."""
        return {row.name: row.reason for row in self.rows if row.reason}

    @property
    def packs(self) -> bool:
        """Whether an encoder leaves padding out."""
        return any(isinstance(found, float) for found in self.packed.values())

    def reasons(self) -> list[str]:
        """Return a text per group of modules that stay stock."""
        groups = _grouped([row for row in self.rows if row.reason])
        return [f"{names} ({row.stock}, {row.kind}): {row.reason}" for names, row in groups]

    def __call__(self, *_: Any, **__: Any) -> None:
        raise TypeError(IN_PLACE)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a report has no {name!r}: {IN_PLACE}")

    def __str__(self) -> str:
        head = ["module", "kind", "found by", "difference", *(f"memory at {length:,}" for length in self.lengths)]
        body = []
        for names, row in _grouped([row for row in self.rows if not row.reason]):
            error = "-" if row.error is None else f"{row.error:.0e}"
            sizes = [f"{_size(stock)} -> {_size(ours)}" for stock, ours in row.memory]
            body.append([names, row.kind, row.found, error, *sizes])
        lines = _table([head, *body]) if body else []
        if any(row.memory for row in self.rows):
            lines += ["", *textwrap.wrap(MEMORY, 118)]
        if reasons := self.reasons():
            lines += ["", "left unchanged:"] if lines else ["left unchanged:"]
            for text in reasons:
                lines += textwrap.wrap(text, 118, initial_indent="  ", subsequent_indent="    ")
        if self.packed:
            lines += ["", "without padding:"]
        for name, found in self.packed.items():
            is_packed = isinstance(found, float)
            text = f"packs batches of padded sequences, difference {found:.0e}" if is_packed else f"stays padded: {found}"
            lines.append(f"  {name or 'the model itself'} {text}")
        if self.packs:
            lines += textwrap.wrap(PADDED, 118, initial_indent="  ", subsequent_indent="  ")
        calls = self.calls()
        if calls.compared or calls.not_compared:
            lines += ["", f"calls compared with the stock forward: {calls.compared}"]
            lines += [f"  not compared: {count}, {reason}" for reason, count in calls.not_compared.items()]
            lines += [f"  stock again: {name}, {text}" for name, text in calls.differing.items()]
        return "\n".join(lines) or "all relative attention was enabled before"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)!r})"


def _size(count: int | None) -> str:
    return "?" if count is None else f"{count / 2**20:,.0f} MiB" if count >= 10 * 2**20 else f"{count / 2**20:.1f} MiB"


MEMORY = (
    "memory: all tensors in one layer's forward, one sequence, float32, stock -> enabled. On a CPU add the operator's blocks, "
    "some MiB at any length."
)


PADDED = (
    "Batches stay padded with more than 9 tenths real tokens, masks with holes or of three or four dimensions, attention weights "
    "that are asked for, caches, and under torch.compile."
)


def _grouped(rows: list[Row]) -> list[tuple[str, Row]]:
    """Rows that differ by numbers in their names alone, as one, with how many they are."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        key = (re.sub(r"\d+", "*", row.name), row.stock, row.kind, row.found, row.error is None, row.memory, row.reason)
        groups.setdefault(key, []).append(row)
    return [
        (
            group[0].name or "the model itself" if len(group) == 1 else f"{key[0]} ({len(group)})",
            max(group, key=lambda row: row.error or 0.0),
        )
        for key, group in groups.items()
    ]


def _table(lines: list[list[str]]) -> list[str]:
    count = max(map(len, lines))
    padded = [[*line, *[""] * (count - len(line))] for line in lines]
    widths = [max(map(len, column)) for column in zip(*padded, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in padded]


class _Counter(TorchDispatchMode):
    """Counts the bytes of tensors that operators make, and their largest sum at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.counted: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in inputs and storage._cdata not in self.counted:
                    self.counted.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def _freed(self, key: int, size: int) -> None:
        self.counted.discard(key)
        self.now -= size


def count_bytes(
    replacement: Replacement, module: nn.Module, lengths: tuple[int, ...], parent: nn.Module | None
) -> tuple[tuple[int | None, int | None], ...]:
    """Return, for each length, the peak bytes of the tensors of both forwards, without weights; None if one needs values."""

    def count(model: Any, length: int, is_ours: bool) -> int | None:
        try:
            run = shadow(model, lambda tensor: tensor)  # a forward may keep what it makes
            replacement.ours.prepare_model(run)
            given = replacement.ours.at_length(run, length, parent)
            given = {name: value.cast(torch.float32) if isinstance(value, Compact) else value for name, value in given.items()}
            with torch.no_grad(), _Counter() as counter:
                replacement.by_ours(run, given) if is_ours else replacement.by_stock(run, (), given)
            return counter.peak
        except Exception:  # a stock forward may raise anything
            return None

    def count_all() -> tuple[tuple[int | None, int | None], ...]:
        model = with_random_weights(module, "meta").eval()
        with torch.device("meta"):
            return tuple((count(model, length, False), count(model, length, True)) for length in lengths)

    return in_own_thread(count_all)
