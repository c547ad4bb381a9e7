"""The terms of tables for all pairs of a block, without a gather.

Row m and column n of a block have the relative position base + n - m. So its M rows need the table rows of M + N - 1 successive
positions. Their product with M vectors is a *band*, whose columns are positions: pair (m, n) finds its term in row m and column
n - m + M - 1. If the same memory is read with a row stride that is shorter by one, it holds the terms in the order of the scores:

    address(m, n) = m * width + n - m + M - 1 = m * (width - 1) + n + M - 1

In the backward gradients of scores are copied into that view, with zeros around them. That is the gradient of the band, which
is multiplied with the table for the gradient of the vectors, and with the vectors for that of the table. The table of the values
works alike: the band of the probabilities times the table is its part of out, and dO . A is added to dO . v as p . E is to q . k.

Beyond a clamped table all columns are like that of its end row: they are spread from it, and in the backward added to it.

The table that meets the keys, rel_p2c, has bands of the same kind. In transposed scores keys are the rows, and the position
counts the other way: the *mirror* of a table has its rows in reverse order.

Shapes in comments: S sequences, H heads, M rows and N columns of a block, a width W of the vectors.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .._core.spec import AttentionSpec
from .products import STEP, Products, up


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return tensor.to(dtype), at once if it has that dtype."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def skewed(band: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Return the view (..., M, num_columns) of a band (..., M, width) in which pair (m, n) is column n - m + M - 1 of row m."""
    *others, row, one = band.stride()
    start = band.storage_offset() + (band.shape[-2] - 1) * one
    return band.as_strided((*band.shape[:-1], num_columns), (*others, row - one, one), start)


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges (first, last) in their order, those that touch as one."""
    apart: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if apart and low <= apart[-1][1] + 1:
            apart[-1] = apart[-1][0], max(apart[-1][1], high)
        else:
            apart.append((low, high))
    return apart


class Table:
    """A table of a call, (1 or Hq, R, width), a bias with width 1, and the sum of its gradient. Only rows that a pair needs are
    read: others may be NaN."""

    def __init__(
        self, name: str, table: torch.Tensor, spec: AttentionSpec, ranges: set[tuple[int, int]], *dtypes: torch.dtype
    ) -> None:
        """ranges: the lowest and the highest positions that pairs of a run have. dtypes: of sums, of products for terms, and of
        products for gradients and values."""
        table = table[..., None] if name == "rel_bias" else table
        self.name, self.clamp, self.is_mirrored = name, spec.clamp, name == "rel_p2c"
        self.dtype, self.term_dtype, self.product_dtype = dtypes
        self.rows = cast(table if table.dim() == 3 else table[None], self.dtype)
        self.first = spec.first
        if self.is_mirrored:
            self.rows, self.first, ranges = self.rows.flip(1), -spec.last, {(-high, -low) for low, high in ranges}
        self.ranges = merged(ranges)
        """The positions that pairs have, from the lowest to the highest of each range."""
        low, high = self.ranges[0][0], self.ranges[-1][1]
        self.per_head = table.dim() == 3
        self.last = self.first + self.rows.shape[1] - 1
        self.low, self.high = max(self.first, low), min(self.last, high)  # the positions that have a row and are visible
        self.has_far = spec.clamp and low < self.first, spec.clamp and high > self.last
        """Whether pairs are before the first row, and beyond the last one, and have its term."""
        self._operands: dict[object, torch.Tensor] = {}
        self._sums: torch.Tensor | None = None

    def select_heads(self, tensor: torch.Tensor, heads: slice) -> torch.Tensor:
        """Return the part of (1 or Hq, ...) that belongs to some heads."""
        return tensor[heads] if self.per_head and heads.stop - heads.start < tensor.shape[0] else tensor

    def near(self, base: int, num_rows: int, num_columns: int) -> tuple[int, int]:
        """Return the first and the end of the columns in which a row has a position of the table. A clamped table has one at
        least, for the term of all others."""
        if self.low > self.high and not self.clamp:
            return 0, 0
        least = int(self.clamp)
        start = min(max(self.low - base, 0), num_columns - least)
        return start, max(min(self.high - base + num_rows, num_columns), start + least)

    def columns(self, first: int, width: int) -> tuple[int, int, int]:
        """Return the columns (low, high) of a band that are products, from the position of its first one, and the row of the
        table for column low."""
        least = int(self.clamp)
        low = min(max(self.low - first, 0), width - least)
        high = max(min(self.high + 1 - first, width), low + least)
        return low, high, min(max(first + low - self.first, 0), self.last - self.first)

    def operand(self, heads: slice, products: Products, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows of some heads as right operands, (width, R and a step) or, if each has its own, (H, width, ...). Rows
        that no pair needs are zero."""
        kind = (heads.start, heads.stop) if self.per_head else None, dtype, products.band_step
        if kind not in self._operands:
            rows, least = cast(self.select_heads(self.rows, heads), dtype), int(self.clamp)  # an end row stands for others
            if products.band_step == 1:
                self._operands[kind] = rows.mT if self.per_head else rows[0].mT
                return self._operands[kind]
            operand = products.new_operand(rows, rows.shape[1] + STEP, dtype)
            for low, high in self.ranges:
                start = min(max(low - self.first, 0), rows.shape[1] - least)
                needed = slice(start, max(min(high + 1 - self.first, rows.shape[1]), start + least))
                operand[:, :, needed] = rows[:, needed].mT
            self._operands[kind] = operand if self.per_head else operand[0]
        return self._operands[kind]

    def flat(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return vectors [S, H, M, W] as the left operand of a product: [S * H * M, W] or, where each head has its table,
        [H, S * M, W]."""
        if not self.per_head:
            return vectors.reshape(-1, vectors.shape[3])
        return vectors.transpose(0, 1).reshape(vectors.shape[1], -1, vectors.shape[3])

    def split(self, product: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a product of flat vectors as [S, H, M, columns]. shape: S, H, M, ..."""
        s, h, m = shape[:3]
        return product.view(s, h, m, -1) if product.dim() == 2 else product.view(h, s, m, -1).transpose(0, 1)

    def band_sizes(self, products: Products, shape: tuple[int, ...], width: int) -> tuple[int, ...]:
        """Return the shape of memory for the band of a block [S, H, M, ...] that is a product of flat vectors."""
        (s, h, m), width = shape[:3], up(width, products.band_step)
        return (h, s * m, width) if self.per_head else (s * h * m, width)

    def band(
        self, products: Products, name: str, vectors: torch.Tensor, heads: slice, base: int, num_columns: int, alpha: float
    ) -> tuple[torch.Tensor, int, int]:
        """Return the band [S, H, M, at least M + N - 1] of alpha * vectors . table, vectors [S, H, M, W], and its columns that
        are products, of which all others are copies. name: of its memory."""
        shape = tuple(vectors.shape)
        width = shape[2] + num_columns - 1
        low, high, row = self.columns(base - shape[2] + 1, width)
        count = up(high - low, products.band_step)
        band = products.memory(name, self.band_sizes(products, shape, max(width, low + count)), self.term_dtype)
        if low < high:
            rows, out = self.operand(heads, products, self.term_dtype).narrow(-1, row, count), band.narrow(-1, low, count)
            product = products.scaled(self.flat(cast(vectors, self.term_dtype)), rows, alpha, out)
            if product is not out:
                if low == 0 and count >= width:
                    band = product
                else:
                    out.copy_(product)
        logical = self.split(band, shape)
        if low > 0:
            logical[..., :low] = logical[..., low : low + 1] if self.has_far[0] else 0
        if high < width:
            logical[..., high:width] = logical[..., high - 1 : high] if self.has_far[1] else 0
        return logical, low, high

    def add_terms(
        self, products: Products, pairs: torch.Tensor, vectors: torch.Tensor, heads: slice, base: int, alpha: float = 1.0
    ) -> None:
        """Add alpha * vectors . table, vectors [S, H, M, W], to the pairs [S, H, M, N] of a block."""
        m, n = pairs.shape[2:]
        start, stop = self.near(base, m, n)
        if start < stop:
            band, low, high = self.band(products, "terms", vectors, heads, base + start, stop - start, alpha)
            pairs[..., start:stop].add_(skewed(band, stop - start))
            if start > 0 and self.has_far[0]:
                pairs[..., :start].add_(band[..., low : low + 1])
            if stop < n and self.has_far[1]:
                pairs[..., stop:].add_(band[..., high - 1 : high])

    def add_products(
        self,
        products: Products,
        pairs: torch.Tensor,
        vectors: torch.Tensor | None,
        total: torch.Tensor | None,
        heads: slice,
        base: int,
        alpha: float = 1.0,
    ) -> None:
        """Add alpha * pairs . table to total, [S, H, M, W], and alpha * pairs^T . vectors to the gradient of the table, where
        they are not None. Of a bias the gradient is the sum of the pairs of each position."""
        is_bias = self.name == "rel_bias"
        if is_bias and (pairs.shape[0] > 1 or (not self.per_head and pairs.shape[1] > 1)):
            pairs = pairs.sum(0 if self.per_head else (0, 1), keepdim=True)
        m, n = pairs.shape[2:]
        start, stop = self.near(base, m, n)
        if start == stop:
            return
        shape, width = tuple(pairs.shape), m + stop - start - 1
        low, high, row = self.columns(base + start - m + 1, width)
        count = up(high - low, products.band_step)
        sizes, layout = self.band_sizes(products, shape, max(width, low + count)), (*shape[:3], stop - start)
        band = products.memory.zeros(f"pairs of {self.name}", sizes, self.product_dtype, layout)
        logical = self.split(band, shape)
        skewed(logical, stop - start).copy_(pairs[..., start:stop])
        folded = []
        if self.has_far[0] and max(low, start) > 0:  # what is beyond the table belongs to its end rows
            folded.append(fold(logical[..., : low + 1], low, pairs[..., :start]))
        if self.has_far[1] and (high < width or stop < n):
            folded.append(fold(logical[..., high - 1 : width], 0, pairs[..., stop:]))
        near = band.narrow(-1, low, count)
        if is_bias:
            sums = self.select_heads(self.sums(), heads)[:, 0].narrow(-1, row, count)
            sums += near.sum(-2)
        if total is not None:
            self._add_rows(products, near, self.operand(heads, products, self.product_dtype).narrow(-1, row, count), total, alpha)
        if vectors is not None:  # [W, S * H * M] @ [S * H * M, columns]
            sums = self.select_heads(self.sums(), heads).narrow(-1, row, count)
            left = self.flat(cast(vectors, self.product_dtype))
            products.add(sums if near.dim() == 3 else sums[0], left.mT, near, alpha)
        for column in folded:
            column.zero_()

    def _add_rows(self, products: Products, near: torch.Tensor, rows: torch.Tensor, total: torch.Tensor, alpha: float) -> None:
        """Add alpha * near . rows, [S * H * M, columns] @ [columns, W], to total, [S, H, M, W]."""
        if near.dim() == 2 and total.is_contiguous():
            products.add(total.view(-1, total.shape[3]), near, rows.mT, alpha)
        elif near.dim() == 2 and total.shape[:2] == (1, 1):
            products.add(total[0, 0], near, rows.mT, alpha)
        else:
            memory = products.memory("rows of tables", (*near.shape[:-1], total.shape[3]), near.dtype)
            total.add_(self.split(products.scaled(near, rows.mT, alpha, memory), tuple(total.shape)))

    def sums(self) -> torch.Tensor:
        """Return what is added up for the gradient, transposed: (1 or Hq, width, R and a step)."""
        if self._sums is None:
            heads, rows, width = self.rows.shape
            self._sums = self.rows.new_zeros(heads, width, rows + STEP)
        return self._sums

    def gradient(self) -> torch.Tensor | None:
        """Return the gradient of the table, (1 or Hq, R, width); None if nothing was added to it."""
        if self._sums is None:
            return None
        gradient = self._sums[..., : self.rows.shape[1]].mT
        return gradient.flip(1) if self.is_mirrored else gradient

    def bias(self, heads: slice, first: int, width: int) -> torch.Tensor:
        """Return the terms of a bias for successive positions, (1 or H, width)."""
        rows = self.select_heads(self.rows, heads)[..., 0]
        index = torch.arange(first, first + width, device=self.rows.device) - self.first
        terms = rows[:, index.clamp(0, rows.shape[1] - 1)]
        return terms if self.clamp else terms.masked_fill((index < 0) | (index >= rows.shape[1]), 0)


def fold(band: torch.Tensor, column: int, beyond: torch.Tensor) -> torch.Tensor:
    """Add all columns of a band, and the pairs beyond it, to one of its columns, and return that."""
    total = band.sum(-1, dtype=beyond.dtype)
    if beyond.shape[-1] > 0:
        total += beyond.sum(-1)
    return band[..., column].copy_(total)
