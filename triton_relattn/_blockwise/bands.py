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
from functools import cached_property

import torch

from .products import LINE, Memory, Products

ALL = (slice(None),) * 3
"""Sequences, heads and rows of pairs."""


def up(number: int, step: int) -> int:
    """Round up to a multiple of step."""
    return -(-number // step) * step


def part(tensor: torch.Tensor, *ranges: slice) -> torch.Tensor:
    """Return the part of a tensor that lies in ranges of its first dimensions: itself if that is all."""
    for dim, (place, size) in enumerate(zip(ranges, tensor.shape, strict=False)):
        start, stop, _ = place.indices(size)
        if stop - start != size:
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return tensor.to(dtype), at once if it has that dtype."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def split(tensor: torch.Tensor, size: int, dim: int) -> list[torch.Tensor]:
    """Return views of successive parts of a tensor: itself if that is all."""
    return [tensor] if tensor.shape[dim] <= size else list(tensor.split(size, dim))


def skewed(band: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Return the view (..., M, num_columns) of a band (..., M, width) in which pair (m, n) is column n - m + M - 1 of row m."""
    *others, row, one = band.stride()
    num_rows = band.shape[-2]
    strides = (*others, row - one, one)
    return band.as_strided((*band.shape[:-1], num_columns), strides, band.storage_offset() + (num_rows - 1) * one)


def select_heads(table: torch.Tensor, heads: slice) -> torch.Tensor:
    """Return the stacked tables of some heads: (1, ...) if all heads share one."""
    return table if table.shape[0] == 1 else part(table, heads)


class Table:
    """A table's rows for successive positions, (1 or Hq, positions, width), and the sums that are its gradient.

    Where no pair has a position its row is zero, whatever the table has: it may be NaN.
    """

    def __init__(
        self, table: torch.Tensor, first: int, clamp: bool, positions: range, seen: Sequence[tuple[int, int]], memory: Memory
    ) -> None:
        """Take the rows from a table.

        Args:
            table: (1 or Hq, R, width).
            first: the position of its first row. clamp: whether beyond its ends the end rows apply.
            seen: ranges of positions that pairs have, in their order.
        """
        self.table, self.memory = table, memory
        self.first, self.last, self.low = first, first + table.shape[1] - 1, positions.start
        start, stop = (min(max(each, positions.start), positions.stop) for each in (first, self.last + 1))
        self.own, self.inside = slice(start - first, stop - first), slice(start - self.low, stop - self.low)
        """Rows of the table, and their place."""
        lowest, highest = seen[0][0], max(high for _, high in seen)
        self.has_far = (clamp and lowest < first, clamp and highest > self.last + 1)
        """Whether pairs are before the table's first row, and behind its last one, and have its term."""
        self.beyond = (slice(self.inside.start), slice(self.inside.stop, None))
        rows, is_view = part(table, slice(None), self.own), len(positions) == stop - start
        if not is_view:
            rows = torch.constant_pad_nd(rows, (0, 0, self.inside.start, len(positions) - self.inside.stop))
        for end, has_far in enumerate(self.has_far):
            if has_far:
                rows[:, self.beyond[end]] = self.ends[:, end, None]
        stop = positions.start
        for low, high in (*seen, (positions.stop, positions.stop)):
            if stop < low and self._has(stop, low):
                rows, is_view = rows.clone() if is_view else rows, False
                rows[:, max(stop - self.low, 0) : max(low - self.low, 0)] = 0
            stop = max(stop, high)
        self.rows = rows
        self.casts: dict[torch.dtype, torch.Tensor] = {rows.dtype: rows}
        self.row_sums: torch.Tensor | None = None
        self.end_sums: torch.Tensor | None = None
        self.bands: dict[str, tuple[tuple[int, ...], torch.Tensor, torch.Tensor]] = {}
        """Memory for bands of a shape, with the view of their pairs."""

    def _has(self, low: int, high: int) -> bool:
        """Return whether the table, or an end row, is what a range of positions has."""
        return self.has_far[0] or self.has_far[1] or (low <= self.last and high > self.first)

    @cached_property
    def ends(self) -> torch.Tensor:
        """The end rows where pairs have them, (1 or Hq, 2, width)."""
        ends = self.table.new_zeros(self.table.shape[0], 2, self.table.shape[2])
        for end, has_far in enumerate(self.has_far):
            if has_far:
                ends[:, end] = self.table[:, -end]
        return ends

    def in_dtype(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows in a dtype."""
        if dtype not in self.casts:
            self.casts[dtype] = self.rows.to(dtype)
        return self.casts[dtype]

    def sums(self) -> torch.Tensor:
        """Return what is added up for the gradient of the rows, transposed: (1 or Hq, width, positions)."""
        if self.row_sums is None:
            self.row_sums = self.rows.new_zeros(self.rows.shape[0], self.rows.shape[2], self.rows.shape[1])
        return self.row_sums

    def add_to_ends(self, heads: slice, found: torch.Tensor) -> None:
        """Add to the gradient of the end rows what each of some heads gives, (H, 2, width)."""
        if self.end_sums is None:
            self.end_sums = self.table.new_zeros(self.table.shape[0], 2, self.table.shape[2])
        select_heads(self.end_sums, heads).add_(found if self.table.shape[0] > 1 else found.sum(0))

    def near(self, base: int, num_rows: int, num_columns: int) -> tuple[int, int]:
        """Return the first and the end of the columns in which some row has a position of the table."""
        start = min(max(self.first - base, 0), num_columns)
        return start, max(min(self.last - base + num_rows, num_columns), start)

    def window(self, position: int, num_rows: int) -> int:
        """Return the first of the rows that a block needs whose row 0 and first column have that position."""
        return position - num_rows + 1 - self.low

    def far(self, near: tuple[int, int], num_columns: int) -> list[tuple[int, slice]]:
        """Return the columns beyond the table that have a term, with the number of the end row."""
        if near == (0, num_columns):
            return []
        sides = ((0, slice(0, near[0])), (1, slice(near[1], num_columns)))
        return [(end, columns) for end, columns in sides if self.has_far[end] and columns.start < columns.stop]

    def gradient(self) -> torch.Tensor | None:
        """Return the gradient of the table, (1 or Hq, R, width); None if nothing was added to it."""
        if self.row_sums is None and self.end_sums is None:
            return None
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


class Bias:
    """The terms of rel_bias for the pairs of some heads."""

    def __init__(self, table: Table, heads: slice, num_rows: int) -> None:
        """num_rows: of a block. Its band is the bias of all positions, repeated in each row."""
        self.table, self.heads, self.num_rows = table, heads, num_rows
        lines = select_heads(table.rows, heads).mT
        self.band = lines.expand(-1, num_rows, -1).contiguous()

    def add_terms(self, pairs: torch.Tensor, base: int) -> None:
        """Add the terms to the pairs (S, H, M, N)."""
        m, n = pairs.shape[2:]
        near = start, stop = self.table.near(base, m, n)
        if start < stop:
            band = self.band[:, :m].narrow(2, self.table.window(base + start, m), m + stop - start - 1)
            part(pairs, *ALL, slice(start, stop)).add_(skewed(band, stop - start))
        for end, columns in self.table.far(near, n):
            pairs[..., columns].add_(select_heads(self.table.ends, self.heads)[:, end : end + 1])

    def add_gradient(self, pairs: torch.Tensor, base: int) -> None:
        """Add the sums of the pairs of each position to the gradient of the table."""
        pairs = pairs.sum(0) if pairs.shape[0] > 1 else pairs[0]
        h, m, n = pairs.shape
        near = start, stop = self.table.near(base, m, n)
        if start < stop:
            width = m + stop - start - 1
            band = pairs.new_zeros(h, m, up(width, LINE))
            skewed(band, stop - start).copy_(pairs[..., start:stop])
            found = band.sum(1) if self.table.rows.shape[0] > 1 else band.sum((0, 1))[None]
            sums = select_heads(self.table.sums(), self.heads)[:, 0]
            sums.narrow(1, self.table.window(base + start, m), width).add_(found[:, :width])
        for end, columns in self.table.far(near, n):
            found = pairs.new_zeros(h, 2, 1)
            found[:, end, 0] = pairs[..., columns].sum((1, 2))
            self.table.add_to_ends(self.heads, found)


class Band:
    """The terms of a table of vectors for the pairs of some heads, and its products.

    It has all rows of a group, (S, H, rows, width), and computes a block of scores at a time, (S, H, M, N).
    """

    def __init__(
        self,
        table: Table,
        heads: slice,
        vectors: torch.Tensor,
        num_rows: int,
        alpha: float,
        products: Products,
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> None:
        """Prepare the terms, alpha * vectors . table.

        Args:
            vectors: the rows, in the dtype of scores.
            num_rows: of a block; the last one may have fewer.
            dtypes: that of the operands of terms, and of other products.
        """
        self.table, self.heads, self.vectors, self.num_rows = table, heads, vectors, num_rows
        self.alpha, self.products, (self.term_dtype, self.dtype) = alpha, products, dtypes
        self.is_flat = table.rows.shape[0] == 1 or vectors.shape[1] == 1
        """Whether all rows of a block are multiplied with the same table."""
        self.windows = {dtype: self._select(table.in_dtype(dtype)) for dtype in dtypes}
        self.is_started = False

    @property
    def ends(self) -> torch.Tensor:
        """The end rows, (1 or H, 2, width)."""
        return select_heads(self.table.ends, self.heads)

    @cached_property
    def left(self) -> list[torch.Tensor]:
        """The rows of each block as operands of terms."""
        return self._in_order(cast(self.vectors, self.term_dtype))

    @cached_property
    def far_terms(self) -> torch.Tensor:
        """The terms of the rows and the two end rows, (S, H, rows, 2)."""
        return self.vectors @ self.ends.mT

    def _select(self, table: torch.Tensor) -> torch.Tensor:
        """Return the part of a stacked table, (rows, width) or (H, rows, width)."""
        table = select_heads(table, self.heads)
        return table[0] if self.is_flat else table

    def _in_order(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows of each block, (S * H * M, width), or (H, S * M, width) if each head has its table; copies or views."""
        if rows.shape[0] == rows.shape[1] == 1:
            return split(rows[0, 0], self.num_rows, 0)
        blocks = split(rows, self.num_rows, 2)
        if self.is_flat:
            return [each.reshape(-1, rows.shape[3]) for each in blocks]
        return [each.transpose(0, 1).reshape(rows.shape[1], -1, rows.shape[3]) for each in blocks]

    def _by_pair(self, band: torch.Tensor, num_rows: int, num_columns: int) -> torch.Tensor:
        """Return the view (S, H, num_rows, num_columns) of a band in that order, (..., width), by pair."""
        s, h = self.vectors.shape[:2]
        shape = (s, h, num_rows, -1) if self.is_flat else (h, s, num_rows, -1)
        band = band.view(shape) if self.is_flat else band.view(shape).transpose(0, 1)
        return skewed(band, num_columns)

    def _memory(self, name: str, num_rows: int, num_columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for a band of these sizes and the view of its pairs: the last of that name if it fits, else zeros."""
        bands, (s, h), width = self.table.bands, self.vectors.shape[:2], up(num_rows + num_columns - 1, self.products.band_step)
        shape = s, h, num_rows, num_columns
        if name not in bands or bands[name][0] != shape:
            sizes = (s * h * num_rows, width) if self.is_flat else (h, s * num_rows, width)
            band = self.table.memory(f"band of {name}", sizes, dtype)
            bands[name] = shape, band if name == "terms" else band.zero_(), self._by_pair(band, num_rows, num_columns)
        return bands[name][1:]

    def add_terms(self, number: int, pairs: torch.Tensor, base: int) -> None:
        """Add the terms of a block's rows, the one of that number, to its pairs."""
        m, n = pairs.shape[2:]
        near = start, stop = self.table.near(base, m, n)
        if start < stop:
            band, terms = self._memory("terms", m, stop - start, self.term_dtype)
            window = self.windows[self.term_dtype].narrow(-2, self.table.window(base + start, m), band.shape[-1])
            found = self.products(self.left[number], window.mT, band)
            if found is not band:
                terms = self._by_pair(found, m, stop - start)
            part(pairs, *ALL, slice(start, stop)).add_(terms, alpha=self.alpha)
        for end, columns in self.table.far(near, n):
            terms = self.far_terms.narrow(2, number * self.num_rows, m)[..., end : end + 1]
            pairs[..., columns].add_(terms, alpha=self.alpha)

    def start(self, total: torch.Tensor | None, for_table: bool) -> None:
        """Prepare the products.

        Args:
            total: alpha * pairs . table will be added to it, (S, H, rows, width).
            for_table: whether alpha * pairs^T . vectors will be added to the gradient of the table.
        """
        self.is_started, self.total = True, total
        self.sums = self._select(self.table.sums()) if for_table else None
        self.right: list[torch.Tensor] = []
        if for_table:
            operands = self.left if self.dtype == self.term_dtype else self._in_order(cast(self.vectors, self.dtype))
            self.right = [each.mT for each in operands]
        self.totals = [] if total is None else split(total, self.num_rows, 2)
        self.far_sums = self.vectors.new_zeros(*self.vectors.shape[:3], 2) if any(self.table.has_far) else None

    def add_products(self, number: int, pairs: torch.Tensor, base: int) -> None:
        """Add those of a block's pairs to total and to the gradient of the table."""
        m, n = pairs.shape[2:]
        near = start, stop = self.table.near(base, m, n)
        if start < stop:
            band, place = self._memory("pairs", m, stop - start, self.dtype)  # around the pairs it stays zero
            place.copy_(part(pairs, *ALL, slice(start, stop)))
            position, width = self.table.window(base + start, m), band.shape[-1]
            if self.total is not None:
                window = self.windows[self.dtype].narrow(-2, position, width)
                self._add_to_rows(self.totals[number], band, window)
            if self.sums is not None:
                self.products.add(self.sums.narrow(-1, position, width), self.right[number], band, self.alpha)
        for end, columns in self.table.far(near, n):
            assert self.far_sums is not None
            self.far_sums.narrow(2, number * self.num_rows, m)[..., end].add_(pairs[..., columns].sum(-1))

    def _add_to_rows(self, rows: torch.Tensor, band: torch.Tensor, window: torch.Tensor) -> None:
        """Add a product of a band to (S, H, M, width)."""
        s, h, m, width = rows.shape
        if s == h == 1:
            self.products.add(rows[0, 0], band, window, self.alpha)
        elif self.is_flat:
            rows.add_(self.products(band, window).view(rows.shape), alpha=self.alpha)
        else:
            rows.add_(self.products(band, window).view(h, s, m, width).transpose(0, 1), alpha=self.alpha)

    def finish(self) -> None:
        """Add what the far pairs give."""
        if self.far_sums is None:
            return
        if self.total is not None:
            self.total.add_(self.far_sums @ self.ends, alpha=self.alpha)
        if self.sums is not None:
            found = torch.einsum("shme,shmw->hew", self.far_sums, self.vectors)
            self.table.add_to_ends(self.heads, found.mul_(self.alpha))
