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


def skewed(band: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Return the view (..., M, num_columns) of a band (..., M, width) in which pair (m, n) is column n - m + M - 1 of row m."""
    *others, row, one = band.stride()
    num_rows = band.shape[-2]
    strides = (*others, row - one, one)
    return band.as_strided((*band.shape[:-1], num_columns), strides, band.storage_offset() + (num_rows - 1) * one)


def of_heads(table: torch.Tensor, heads: slice) -> torch.Tensor:
    """Return the tables of some heads: (1, ...) if all heads share one."""
    return table if table.shape[0] == 1 else narrow(table, 0, heads.start, heads.stop)


def stacked(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Return rows (S, H, M, width) as the left operand of a product: (S * H * M, width), or, where each head has its table, with
    three dimensions, (H, S * M, width)."""
    if dim == 2:
        return rows.reshape(-1, rows.shape[3])
    return rows.transpose(0, 1).reshape(rows.shape[1], -1, rows.shape[3])


def by_pair(band: torch.Tensor, sizes: torch.Size, num_columns: int) -> torch.Tensor:
    """Return the view (S, H, M, num_columns) of a band in the order of stacked() by pair; see skewed(). sizes: S, H, M, ..."""
    s, h, m = sizes[:3]
    width = band.shape[-1]
    sequence, head = (h, 1) if band.dim() == 2 else (1, s)
    strides = (sequence * m * width, head * m * width, width - 1, 1)
    return band.as_strided((s, h, m, num_columns), strides, band.storage_offset() + m - 1)


def as_rows(name: str, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a table of a call as (1 or Hq, R, width); of a bias the width is 1."""
    table = table[..., None] if name == "rel_bias" else table
    return cast(table if table.dim() == 3 else table[None], dtype)


class Setting(NamedTuple):
    """Heads of some sequences whose terms are computed together."""

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
        self, name: str, table: torch.Tensor, first: int, clamp: bool, positions: range, seen: Sequence[tuple[int, int]]
    ) -> None:
        """Take the rows from a table.

        Args:
            table: (1 or Hq, R, width); of a bias, whose rows meet no vectors, the width is 1.
            first: the position of its first row. clamp: whether beyond its ends the end rows apply.
            seen: ranges of positions that pairs have, in their order.
        """
        self.name, self.table, self.is_bias = name, table, name == "rel_bias"
        self.first, self.last, self.low = first, first + table.shape[1] - 1, positions.start
        start, stop = (min(max(each, positions.start), positions.stop) for each in (first, self.last + 1))
        self.own = slice(start - first, stop - first) if start < stop else slice(0, 0)
        self.inside = slice(start - self.low, stop - self.low)
        """Rows of the table, and their place."""
        lowest, highest = seen[0][0], max(high for _, high in seen)
        self.has_far = (clamp and lowest < first, clamp and highest > self.last + 1)
        """Whether pairs are before the table's first row, and behind its last one, and have its term."""
        self.beyond = (slice(self.inside.start), slice(self.inside.stop, None))
        rows, is_view = narrow(table, 1, self.own.start, self.own.stop), len(positions) == stop - start
        if not is_view:
            rows = torch.constant_pad_nd(rows, (0, 0, self.inside.start, len(positions) - self.inside.stop))
        for end, has_far in enumerate(self.has_far):
            if has_far:
                rows[:, self.beyond[end]] = table[:, -end, None]
        stop = positions.start
        for low, high in (*seen, (positions.stop, positions.stop)):
            if stop < low and self._has(stop, low):
                rows, is_view = rows.clone() if is_view else rows, False
                rows[:, max(stop - self.low, 0) : max(low - self.low, 0)] = 0
            stop = max(stop, high)
        self.rows = rows
        self.operands: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self.row_sums: torch.Tensor | None = None
        self.end_sums: torch.Tensor | None = None
        self._lines: tuple[slice, torch.Tensor] | None = None

    def _has(self, low: int, high: int) -> bool:
        """Return whether the table, or an end row, is what a range of positions has."""
        return self.has_far[0] or self.has_far[1] or (low <= self.last and high > self.first)

    def operand(self, heads: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows as the transposed operand of a product in a dtype: (width, positions) if the heads share them, else
        (H, width, positions)."""
        kind = heads.start, heads.stop, dtype
        if kind not in self.operands:
            rows = cast(of_heads(self.rows, heads), dtype).mT
            self.operands[kind] = rows[0] if len(rows) == 1 else rows
        return self.operands[kind]

    def near(self, base: int, num_rows: int, num_columns: int) -> tuple[int, int]:
        """Return the first and the end of the columns in which some row has a position of the table."""
        start = min(max(self.first - base, 0), num_columns)
        return start, max(min(self.last - base + num_rows, num_columns), start)

    def window(self, position: int, num_rows: int, num_columns: int, products: Products) -> tuple[int, int]:
        """Return the first of the rows that a block needs whose row 0 and first column have that position, and their number: a
        multiple of a step if there are that many."""
        first = position - num_rows + 1 - self.low
        width = up(num_rows + num_columns - 1, products.band_step)
        return first, min(width, self.rows.shape[1] - first)

    def far(self, near: tuple[int, int], num_columns: int) -> list[tuple[int, slice]]:
        """Return the columns beyond the table that have a term, with the number of the end row."""
        if near == (0, num_columns):
            return []
        sides = ((0, slice(0, near[0])), (1, slice(near[1], num_columns)))
        return [(end, columns) for end, columns in sides if self.has_far[end] and columns.start < columns.stop]

    def add_terms(
        self, setting: Setting, pairs: torch.Tensor, base: int, vectors: torch.Tensor | None = None, alpha: float = 1.0
    ) -> None:
        """Add alpha * vectors . table to the pairs (S, H, M, N) of a block; of a bias, its rows.

        Args:
            base: the position of row 0 and column 0.
            vectors: the rows, (S, H, M, width).
        """
        m, n = pairs.shape[2:]
        near = start, stop = self.near(base, m, n)
        if start < stop and vectors is None:
            lines = self.lines(setting.heads)
            for row in range(0, m, LINES):
                count = min(LINES, m - row)
                first, width = self.window(base + start - row, count, stop - start, setting.products)
                band = lines[:, :count].narrow(2, first, width)
                narrow(narrow(pairs, 2, row, row + count), 3, start, stop).add_(skewed(band, stop - start))
        elif start < stop and vectors is not None:
            first, width = self.window(base + start, m, stop - start, setting.products)
            rows = self.operand(setting.heads, setting.term_dtype).narrow(-1, first, width)
            left = stacked(cast(vectors, setting.term_dtype), rows.dim())
            place = setting.memory("terms", (*left.shape[:-1], width), setting.term_dtype)
            band = setting.products(left, rows, place)
            narrow(pairs, 3, start, stop).add_(by_pair(band, pairs.shape, stop - start), alpha=alpha)
        for end, columns in self.far(near, n):
            end_row = of_heads(self.table, setting.heads)[:, -end, :, None]
            terms = end_row if vectors is None else vectors @ end_row
            pairs[..., columns].add_(terms, alpha=alpha)

    def lines(self, heads: slice) -> torch.Tensor:
        """Return the rows of a bias as a band of a few rows, (1 or H, LINES, positions), each of which has all of them."""
        if self._lines is None or self._lines[0] != heads:
            self._lines = heads, of_heads(self.rows, heads).mT.expand(-1, LINES, -1).contiguous()
        return self._lines[1]

    def add_products(
        self,
        setting: Setting,
        pairs: torch.Tensor,
        base: int,
        vectors: torch.Tensor | None,
        total: torch.Tensor | None,
        alpha: float = 1.0,
    ) -> None:
        """Add alpha * pairs . table to total, (S, H, M, width), and alpha * pairs^T . vectors to the gradient of the table, where
        they are not None. Of a bias the gradient is the sum of the pairs of each position."""
        m, n = pairs.shape[2:]
        near = start, stop = self.near(base, m, n)
        if start < stop:
            first, width = self.window(base + start, m, stop - start, setting.products)
            inner = narrow(pairs, 3, start, stop)
            if self.is_bias:
                self._add_bias(setting, inner, first, width)
            else:
                self._add_band(setting, inner, first, width, vectors, total, alpha)
        for end, columns in self.far(near, n):
            found = pairs[..., columns].sum(-1, keepdim=True)
            if total is not None:
                total.addcmul_(found, of_heads(self.table, setting.heads)[:, -end, None], value=alpha)
            if self.is_bias or vectors is not None:
                found = found if vectors is None else found * vectors
                found = found.sum((0, 2)) if len(self.table) > 1 else found.sum((0, 1, 2))[None]
                of_heads(self.sums_of_ends(), setting.heads)[:, end].add_(found, alpha=alpha)

    def _add_band(
        self,
        setting: Setting,
        pairs: torch.Tensor,
        first: int,
        width: int,
        vectors: torch.Tensor | None,
        total: torch.Tensor | None,
        alpha: float,
    ) -> None:
        """Do what add_products() does for pairs whose rows of the table are those from first on."""
        heads, products, memory, _, dtype = setting
        rows = self.operand(heads, dtype).narrow(-1, first, width)
        s, h, m, n = pairs.shape
        shape = (s * h * m, width) if rows.dim() == 2 else (h, s * m, width)
        band = memory.zeros(self.name, shape, dtype, pairs.shape)  # around the pairs it stays zero
        by_pair(band, pairs.shape, n).copy_(pairs)
        if total is not None and s == h == 1:
            products.add(total[0, 0], band, rows.mT, alpha)
        elif total is not None and rows.dim() == 2 and total.is_contiguous():
            products.add(total.view(-1, total.shape[3]), band, rows.mT, alpha)
        elif total is not None:
            found = products(band, rows.mT).view(*((s, h) if rows.dim() == 2 else (h, s)), m, -1)
            total.add_(found if rows.dim() == 2 else found.transpose(0, 1), alpha=alpha)
        if vectors is not None:
            sums = of_heads(self.sums(), heads).narrow(2, first, width)
            left = stacked(cast(vectors, dtype), rows.dim())
            products.add(sums if rows.dim() == 3 else sums[0], left.mT, band, alpha)

    def _add_bias(self, setting: Setting, pairs: torch.Tensor, first: int, width: int) -> None:
        """Add the sums of the pairs of each position to the gradient of a bias."""
        is_shared, (s, h, m, n) = len(self.table) == 1, pairs.shape
        if s > 1 or (is_shared and h > 1):
            pairs = pairs.sum((0, 1) if is_shared else 0, keepdim=True)
        h = pairs.shape[1]
        band = setting.memory.zeros(self.name, (h, m, up(width, LINE)), pairs.dtype, pairs.shape)
        skewed(band, n).copy_(pairs[0])
        of_heads(self.sums(), setting.heads)[:, 0].narrow(1, first, width).add_(band.sum(1)[:, :width])

    def sums(self) -> torch.Tensor:
        """Return what is added up for the gradient of the rows, transposed: (1 or Hq, width, positions)."""
        if self.row_sums is None:
            self.row_sums = self.rows.new_zeros(self.rows.shape[0], self.rows.shape[2], self.rows.shape[1])
        return self.row_sums

    def sums_of_ends(self) -> torch.Tensor:
        """Return what is added up for the gradient of the two end rows, (1 or Hq, 2, width)."""
        if self.end_sums is None:
            self.end_sums = self.table.new_zeros(self.table.shape[0], 2, self.table.shape[2])
        return self.end_sums

    def gradient(self) -> torch.Tensor | None:
        """Return the gradient of the table, (1 or Hq, R, width); None if nothing was added to it."""
        if self.row_sums is None and self.end_sums is None:
            return None
        if self.row_sums is not None and not any(self.has_far) and self.own == slice(0, self.table.shape[1]):
            return self.row_sums[:, :, self.inside].mT.contiguous()
        result = self.table.new_zeros(self.table.shape)
        if self.row_sums is not None:
            row_sums = self.row_sums.mT
            result[:, self.own] = row_sums[:, self.inside]
            for end, has_far in enumerate(self.has_far):
                if has_far:
                    result[:, -end] += row_sums[:, self.beyond[end]].sum(1)
        if self.end_sums is not None:
            for end in (0, 1):
                result[:, -end] += self.end_sums[:, end]
        return result
