"""The terms of tables for all pairs of a block, without a gather.

Row m and column n of a block have the relative position base + n - m. The M rows of a block need the table rows of M + N - 1
successive positions, a *window* of the table. The product of both is a *band*: pair (m, n) finds its term in column n - m + M - 1
of row m. If the same memory is read with a row stride that is shorter by one, it holds the terms in the order of the scores:

    address(m, n) = m * width + n - m + M - 1 = m * (width - 1) + n + M - 1

In the backward gradients of scores are copied into that view, with zeros around them. That is the gradient of the band, which is
multiplied with the table for the gradient of the rows, and with the rows for that of the table. The table of the values works
alike: the band of the probabilities times the table is its part of out, and dO . A is added to dO . v as p . E is to q . k.

Columns in which all rows are beyond the table are *far*: their term is that of an end row, one number per row, or nothing.

The table that meets the keys, rel_p2c, has bands of the same kind. In transposed scores keys are the rows, and the position
counts the other way: the *mirror* of a table has its rows in reverse order.

Shapes in comments: S sequences, H heads, M rows and N columns of a block, a width W of the vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .products import LINE, Memory, Products

LINES = 32
"""Rows of a band of a bias, whose lines are the same: with more it takes memory, with fewer there are more additions."""


def up(number: int, step: int) -> int:
    """Round up to a multiple of step."""
    return -(-number // step) * step


def narrow(tensor: torch.Tensor, dim: int, start: int, stop: int) -> torch.Tensor:
    """Return the part of a tensor from start to stop: itself if that is all."""
    return tensor if stop - start == tensor.shape[dim] else tensor.narrow(dim, start, stop - start)


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return tensor.to(dtype), at once if it has that dtype."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def select_heads(table: torch.Tensor, heads: slice) -> torch.Tensor:
    """Return the tables of some heads: (1, ...) if all heads share one."""
    return table if table.shape[0] == 1 else narrow(table, 0, heads.start, heads.stop)


def as_rows(name: str, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a table of a call as (1 or Hq, R, width); of a bias the width is 1."""
    table = table[..., None] if name == "rel_bias" else table
    return cast(table if table.dim() == 3 else table[None], dtype)


def flatten_rows(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Return rows [S, H, M, W] as the left operand of a product: [S * H * M, W], or, where each head has its table, with three
    dimensions, [H, S * M, W]."""
    if dim == 2:
        return rows.reshape(-1, rows.shape[3])
    return rows.transpose(0, 1).reshape(rows.shape[1], -1, rows.shape[3])


def skewed(band: torch.Tensor, sizes: torch.Size, num_columns: int) -> torch.Tensor:
    """Return the view [S, H, M, num_columns] of a band, [S * H * M, width] or [H, S * M, width], in which pair (m, n) is column
    n - m + M - 1 of row m. sizes: S, H, M, ..."""
    s, h, m = sizes[:3]
    width = band.shape[-1]
    sequence, head = (h, 1) if band.dim() == 2 else (1, s)
    strides = (sequence * m * width, head * m * width, width - 1, 1)
    return band.as_strided((s, h, m, num_columns), strides, band.storage_offset() + m - 1)


def skewed_lines(band: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Return the same view of a band of any strides, (..., M, width): (..., M, num_columns)."""
    *others, row, one = band.stride()
    strides = (*others, row - one, one)
    return band.as_strided((*band.shape[:-1], num_columns), strides, band.storage_offset() + (band.shape[-2] - 1) * one)


class Setting(NamedTuple):
    """Heads of some sequences whose terms are computed together, and how."""

    heads: slice
    products: Products
    memory: Memory
    term_dtype: torch.dtype  # of the operands of products for terms
    dtype: torch.dtype  # of those of other products


class Table:
    """A table's rows for successive positions, (1 or Hq, positions, width), and the sums that are its gradient.

    Where no pair has a position its row is zero, whatever the table has: it may be NaN.
    """

    def __init__(
        self, name: str, table: torch.Tensor, first: int, clamp: bool, positions: range, visible: Sequence[tuple[int, int]]
    ) -> None:
        """Take the rows from a table (1 or Hq, R, width), a bias with width 1, whose row 0 is at position first. clamp: end rows
        apply beyond its ends. visible: ranges of positions that pairs have, in their order."""
        self.name, self.table, self.is_bias = name, table, name == "rel_bias"
        self.first, self.last, self.low = first, first + table.shape[1] - 1, positions.start
        start, stop = (min(max(end, positions.start), positions.stop) for end in (first, self.last + 1))
        self.own = slice(start - first, stop - first) if start < stop else slice(0, 0)
        self.inside = slice(start - self.low, stop - self.low)  # rows of the table, and where they are among the positions
        lowest, highest = visible[0][0], max(high for _, high in visible)
        self.has_far = (clamp and lowest < first, clamp and highest > self.last + 1)
        """Whether pairs are before the table's first row, and behind its last one, and have its term."""
        self.beyond = (slice(self.inside.start), slice(self.inside.stop, None))
        rows, is_view = narrow(table, 1, self.own.start, self.own.stop), len(positions) == stop - start
        if not is_view:  # a view has no rows beyond, and even an empty write to it would count as one to the user's table
            rows = torch.constant_pad_nd(rows, (0, 0, self.inside.start, len(positions) - self.inside.stop))
            for end, has_far in enumerate(self.has_far):
                if has_far:
                    rows[:, self.beyond[end]] = table[:, -end, None]
        # Rows between the ranges of visible positions.
        stop = positions.start
        for low, high in (*visible, (positions.stop, positions.stop)):
            if stop < min(low, positions.stop) and (any(self.has_far) or (low > self.first and stop <= self.last)):
                rows, is_view = rows.clone() if is_view else rows, False
                rows[:, stop - self.low : low - self.low] = 0
            stop = max(stop, high)
        self.rows = rows
        self._operands: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._lines: tuple[slice, torch.Tensor] | None = None
        self._row_sums: torch.Tensor | None = None
        self._end_sums: torch.Tensor | None = None

    def operand(self, heads: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows as a product's transposed operand: (width, positions) if the heads share them, else (H, width,
        positions)."""
        kind = heads.start, heads.stop, dtype
        if kind not in self._operands:
            rows = cast(select_heads(self.rows, heads), dtype).mT
            self._operands[kind] = rows[0] if len(rows) == 1 else rows
        return self._operands[kind]

    def lines(self, heads: slice) -> torch.Tensor:
        """Return the rows of a bias as a band of a few rows, (1 or H, LINES, positions), each of which has all of them."""
        if self._lines is None or self._lines[0] != heads:
            self._lines = heads, select_heads(self.rows, heads).mT.expand(-1, LINES, -1).contiguous()
        return self._lines[1]

    def near(self, base: int, num_rows: int, num_columns: int) -> tuple[int, int]:
        """Return the first and the end of the columns in which some row has a position of the table."""
        start = min(max(self.first - base, 0), num_columns)
        return start, max(min(self.last - base + num_rows, num_columns), start)

    def far(self, near: tuple[int, int], num_columns: int) -> list[tuple[int, slice]]:
        """Return the columns beyond the table that have a term, with the number of the end row."""
        columns = ((0, slice(0, near[0])), (1, slice(near[1], num_columns)))
        return [(end, part) for end, part in columns if self.has_far[end] and part.start < part.stop]

    def window(self, position: int, num_rows: int, num_columns: int, products: Products) -> tuple[int, int]:
        """Return the first row that a block needs whose row 0 and first column have that position, and their number."""
        first = position - num_rows + 1 - self.low
        width = up(num_rows + num_columns - 1, products.band_step)
        return first, min(width, self.rows.shape[1] - first)

    def add_terms(
        self, setting: Setting, pairs: torch.Tensor, base: int, vectors: torch.Tensor | None = None, alpha: float = 1.0
    ) -> None:
        """Add alpha * vectors . table, vectors [S, H, M, W], to the pairs [S, H, M, N] of a block whose row 0 and column 0 have
        the position base; of a bias, its rows."""
        m, n = pairs.shape[2:]
        near = start, stop = self.near(base, m, n)
        if start < stop and vectors is None:
            lines = self.lines(setting.heads)
            for row in range(0, m, LINES):
                count = min(LINES, m - row)
                first, width = self.window(base + start - row, count, stop - start, setting.products)
                band = lines[:, :count].narrow(2, first, width)
                narrow(narrow(pairs, 2, row, row + count), 3, start, stop).add_(skewed_lines(band, stop - start))
        elif start < stop and vectors is not None:
            first, width = self.window(base + start, m, stop - start, setting.products)
            rows = self.operand(setting.heads, setting.term_dtype).narrow(-1, first, width)
            left = flatten_rows(cast(vectors, setting.term_dtype), rows.dim())
            # The band: [S * H * M, W] @ [W, M + N - 1].
            out = setting.memory("terms", (*left.shape[:-1], width), setting.term_dtype)
            band = setting.products(left, rows, out)
            narrow(pairs, 3, start, stop).add_(skewed(band, pairs.shape, stop - start), alpha=alpha)
        for end, columns in self.far(near, n):
            end_row = select_heads(self.table, setting.heads)[:, -end, :, None]
            terms = end_row if vectors is None else vectors @ end_row
            pairs[..., columns].add_(terms, alpha=alpha)

    def add_products(
        self,
        setting: Setting,
        pairs: torch.Tensor,
        base: int,
        vectors: torch.Tensor | None,
        total: torch.Tensor | None,
        alpha: float = 1.0,
    ) -> None:
        """Add alpha * pairs . table to total, [S, H, M, W], and alpha * pairs^T . vectors to the gradient of the table, where
        they are not None. Of a bias the gradient is the sum of the pairs of each position."""
        m, n = pairs.shape[2:]
        near = start, stop = self.near(base, m, n)
        if start < stop:
            first, width = self.window(base + start, m, stop - start, setting.products)
            inner = narrow(pairs, 3, start, stop)
            if self.is_bias:
                self._add_bias(setting, inner, first, width)
            else:
                rows = self.operand(setting.heads, setting.dtype).narrow(-1, first, width)
                band = self._band(setting, inner, rows)
                if total is not None:
                    self._add_rows(setting, band, rows, total, alpha)
                if vectors is not None:  # the table's: [W, S * H * M] @ [S * H * M, M + N - 1]
                    sums = select_heads(self.row_sums(), setting.heads).narrow(2, first, width)
                    left = flatten_rows(cast(vectors, setting.dtype), rows.dim())
                    setting.products.add(sums if rows.dim() == 3 else sums[0], left.mT, band, alpha)
        for end, columns in self.far(near, n):
            sums = pairs[..., columns].sum(-1, keepdim=True)
            if total is not None:
                total.addcmul_(sums, select_heads(self.table, setting.heads)[:, -end, None], value=alpha)
            if self.is_bias or vectors is not None:
                sums = sums if vectors is None else sums * vectors
                sums = sums.sum((0, 2)) if len(self.table) > 1 else sums.sum((0, 1, 2))[None]
                select_heads(self.end_sums(), setting.heads)[:, end].add_(sums, alpha=alpha)

    def _band(self, setting: Setting, pairs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the band of the pairs, with zeros around them. rows: the operand that it is multiplied with."""
        s, h, m, n = pairs.shape
        shape = (s * h * m, rows.shape[-1]) if rows.dim() == 2 else (h, s * m, rows.shape[-1])
        band = setting.memory.zeros(self.name, shape, setting.dtype, pairs.shape)  # around the pairs it stays zero
        skewed(band, pairs.shape, n).copy_(pairs)
        return band

    def _add_rows(self, setting: Setting, band: torch.Tensor, rows: torch.Tensor, total: torch.Tensor, alpha: float) -> None:
        """Add alpha * band . rows, [S * H * M, M + N - 1] @ [M + N - 1, W], to total, [S, H, M, W]."""
        (s, h, m, width), products = total.shape, setting.products
        if s == h == 1:
            products.add(total[0, 0], band, rows.mT, alpha)
        elif rows.dim() == 2 and total.is_contiguous():
            products.add(total.view(-1, width), band, rows.mT, alpha)
        elif rows.dim() == 2:
            total.add_(products(band, rows.mT).view(total.shape), alpha=alpha)
        else:  # a table of each head: [H, S * M, ...]
            total.add_(products(band, rows.mT).view(h, s, m, width).transpose(0, 1), alpha=alpha)

    def _add_bias(self, setting: Setting, pairs: torch.Tensor, first: int, width: int) -> None:
        """Add the sums of the pairs of each position to the gradient of a bias."""
        is_shared, (s, h, m, n) = len(self.table) == 1, pairs.shape
        if s > 1 or (is_shared and h > 1):
            pairs = pairs.sum((0, 1) if is_shared else 0, keepdim=True)
        h = pairs.shape[1]
        band = setting.memory.zeros(self.name, (h, m, up(width, LINE)), pairs.dtype, pairs.shape)
        skewed_lines(band, n).copy_(pairs[0])
        select_heads(self.row_sums(), setting.heads)[:, 0].narrow(1, first, width).add_(band.sum(1)[:, :width])

    def row_sums(self) -> torch.Tensor:
        """Return what is added up for the gradient of the rows, transposed: (1 or Hq, width, positions)."""
        if self._row_sums is None:
            self._row_sums = self.rows.new_zeros(self.rows.shape[0], self.rows.shape[2], self.rows.shape[1])
        return self._row_sums

    def end_sums(self) -> torch.Tensor:
        """Return what is added up for the gradient of the two end rows, (1 or Hq, 2, width)."""
        if self._end_sums is None:
            self._end_sums = self.table.new_zeros(self.table.shape[0], 2, self.table.shape[2])
        return self._end_sums

    def gradient(self) -> torch.Tensor | None:
        """Return the gradient of the table, (1 or Hq, R, width); None if nothing was added to it."""
        if self._row_sums is None and self._end_sums is None:
            return None
        if self._row_sums is not None and not any(self.has_far) and self.own == slice(0, self.table.shape[1]):
            return self._row_sums[:, :, self.inside].mT.contiguous()
        gradient = self.table.new_zeros(self.table.shape)
        if self._row_sums is not None:
            row_sums = self._row_sums.mT
            gradient[:, self.own] = row_sums[:, self.inside]
            for end, has_far in enumerate(self.has_far):
                if has_far:
                    gradient[:, -end] += row_sums[:, self.beyond[end]].sum(1)
        if self._end_sums is not None:
            gradient[:, 0] += self._end_sums[:, 0]
            gradient[:, -1] += self._end_sums[:, 1]
        return gradient
