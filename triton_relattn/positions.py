"""The relative positions that the rows of a table stand for."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Literal

import torch

LARGEST_POSITION = 2**29  # largest position or distance. Sums of a few of them fit the 32 bits in which kernels count.


def integer(name: str, value: Any) -> int:
    """Return an integer of any library as Python's."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r}") from None


@dataclass(frozen=True)
class RelativePositions:
    """The relative positions that a table has rows for, and what happens beyond them.

    The relative position of key ``j`` as query ``i`` sees it is ``r = j - i - query_offset``: negative in the past,
    positive in the future. Row 0 of a table stands for ``r = first``, its last row for ``r = last``.

    Args:
        first: relative position of the first row.
        last: relative position of the last row; a table has ``last - first + 1`` rows.
        outside: what applies beyond them. ``"clamp"`` uses the nearer end row (Shaw et al. 2018), ``"zero"`` drops the
            relative terms. ``"error"`` refuses calls unless the (longest) lengths, query_offset, window_size and is_causal
            show that no query sees a key there; other masks are not looked at.

    Raises:
        TypeError: ``first`` or ``last`` is not an integer.
        ValueError: ``last < first``, a position beyond +-2**29, or an unknown ``outside``.

    Example:
        >>> RelativePositions(-3, 3).rows(torch.arange(10))[0].tolist()
        [3, 4, 5, 6, 6, 6, 6, 6, 6, 6]
    """

    first: int
    last: int = None  # type: ignore[assignment]  # left out, it gets an error that says what to write
    outside: Literal["clamp", "zero", "error"] = "clamp"

    def __post_init__(self) -> None:
        if self.last is None:
            raise TypeError(
                "RelativePositions needs first and last, the relative positions of a table's first and last row; "
                f"got {self.first!r} alone; RelativePositions.centred(num_rows) takes the number of rows"
            )
        for name in ("first", "last"):
            value = getattr(self, name)
            if not isinstance(value, (int, torch.SymInt)):  # operator.index would fix the value of a symbolic one
                object.__setattr__(self, name, integer(name, value))
            elif isinstance(value, bool):
                raise TypeError(f"{name} must be an int, got {value!r}")
            if abs(getattr(self, name)) > LARGEST_POSITION:
                raise ValueError(f"{name} must lie within +-2**29, got {getattr(self, name)}")
        if self.last < self.first:
            raise ValueError(f"last must not be smaller than first, got first={self.first}, last={self.last}")
        if self.outside not in ("clamp", "zero", "error"):
            raise ValueError(f'outside must be "clamp", "zero" or "error", got {self.outside!r}')

    @classmethod
    def centred(cls, num_rows: int, outside: Literal["clamp", "zero", "error"] = "clamp") -> RelativePositions:
        """Return positions from ``-(num_rows - 1) / 2`` to ``(num_rows - 1) / 2``, as in Shaw et al.; num_rows must be odd."""
        if not isinstance(num_rows, (int, torch.SymInt)):
            num_rows = integer("num_rows", num_rows)
        if num_rows % 2 == 0:
            raise ValueError(
                f"positions must be given for a table with an even number of rows ({num_rows}), which has no middle row: "
                "positions=RelativePositions(first, last) says which relative positions its rows stand for"
            )
        return cls(-(num_rows // 2), num_rows // 2, outside)

    @property
    def num_rows(self) -> int:
        """The number of rows of a table with these positions."""
        return self.last - self.first + 1

    def rows(self, relative_position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row of each relative position, and whether the relative terms apply there (always true with clamp)."""
        row = relative_position.clamp(self.first, self.last) - self.first
        if self.outside == "clamp":
            return row, torch.ones_like(row, dtype=torch.bool)
        return row, (relative_position >= self.first) & (relative_position <= self.last)
