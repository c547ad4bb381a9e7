"""A learned table that knows the relative positions of its rows."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from ..positions import RelativePositions


class RelativePositionTable(nn.Module):
    """A learned vector, or number, per relative position.

    Args:
        positions: the relative positions of the rows, and what applies beyond them.
        width: width of the vectors; None for numbers (``rel_bias``).
        num_heads: number of heads, each of which gets a table; None: one table that the heads share.

    ``weight`` is (R, width), (num_heads, R, width), (R,) or (num_heads, R), most distant past first. Vectors are initialised as
    glorot-uniform (each head's table by itself), numbers as 0.

    Raises:
        ValueError: width or num_heads is not positive.

    Example:
        >>> table = RelativePositionTable(RelativePositions.centred(9), 16)
        >>> q, k, v = (torch.randn(1, 2, 10, 16) for _ in range(3))
        >>> fused_relative_attention(q, k, v, table(), positions=table.positions).shape
        torch.Size([1, 2, 10, 16])
    """

    def __init__(
        self,
        positions: RelativePositions,
        width: int | None,
        num_heads: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("width", width), ("num_heads", num_heads)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
        self.positions, self.width, self.num_heads = positions, width, num_heads
        shape = (*((num_heads,) if num_heads else ()), positions.num_rows, *((width,) if width else ()))
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise vectors as glorot-uniform, numbers as zeros."""
        if self.width is None:
            nn.init.zeros_(self.weight)
            return
        with torch.no_grad():
            for table in self.weight if self.num_heads else (self.weight,):
                nn.init.xavier_uniform_(table)

    def forward(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the table, converted to dtype if it is given: parameters often have a higher precision than activations."""
        return self.weight if dtype is None else self.weight.to(dtype)

    @torch.no_grad()
    def resized(self, first: int, last: int, mode: Literal["interpolate", "extend"] = "interpolate") -> RelativePositionTable:
        """Return a table for other relative positions, made from this one, with new parameters.

        Args:
            first, last: relative positions of the new table's first and last row.
            mode: ``"interpolate"``: stretch or shrink past and future, each to its new length, by linear interpolation between
                rows. The vector of r = 0 and those of the ends stay. ``"extend"``: each distance keeps its vector. New distances
                get what applied there before: the end row, or zeros if outside is "zero".

        Raises:
            ValueError: last < first, an unknown mode, or interpolation of a side that only one of the tables has.
        """
        positions = RelativePositions(first, last, self.positions.outside)
        new = RelativePositionTable(positions, self.width, self.num_heads, device=self.weight.device, dtype=self.weight.dtype)
        relative = torch.arange(first, last + 1, device=self.weight.device, dtype=torch.float64)
        dim, factor_shape = 1 if self.num_heads else 0, (-1, *((1,) if self.width else ()))
        if mode == "extend":
            row, applies = self.positions.rows(relative.long())
            if self.positions.outside == "error":
                applies = torch.ones_like(applies)
            new.weight.copy_(self.weight.index_select(dim, row) * applies.view(factor_shape))
        elif mode == "interpolate":
            # Past and future are stretched each by a factor of its own; a row falls between two of the old ones.
            past, future = _stretch(self.positions, positions)
            row = torch.where(relative < 0, relative * past, relative * future) - self.positions.first
            lower = row.floor().long().clamp(0, self.positions.num_rows - 1)
            upper = (lower + 1).clamp(max=self.positions.num_rows - 1)
            share = (row - lower).to(self.weight.dtype).view(factor_shape)
            new.weight.copy_(torch.lerp(self.weight.index_select(dim, lower), self.weight.index_select(dim, upper), share))
        else:
            raise ValueError(f'mode must be "interpolate" or "extend", got {mode!r}')
        return new

    def extra_repr(self) -> str:
        shape = "numbers" if self.width is None else f"width={self.width}"
        heads = "shared" if self.num_heads is None else f"num_heads={self.num_heads}"
        return f'r={self.positions.first}..{self.positions.last}, outside="{self.positions.outside}", {shape}, {heads}'


def _stretch(old: RelativePositions, new: RelativePositions) -> tuple[float, float]:
    """Return the factors that map new relative positions of the past and of the future to old ones."""
    has_zero = all(positions.first <= 0 <= positions.last for positions in (old, new))
    if not has_zero or (old.first < 0) != (new.first < 0) or (old.last > 0) != (new.last > 0):
        raise ValueError(
            f"interpolation needs r = 0 and the same sides in both tables, got {old.first} .. {old.last} "
            f'and {new.first} .. {new.last}; mode="extend" keeps the vector of each distance'
        )
    return old.first / new.first if new.first else 1.0, old.last / new.last if new.last else 1.0
