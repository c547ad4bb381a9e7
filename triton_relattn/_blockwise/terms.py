"""What is added to the products of queries and keys: the terms of tables, a float mask, and -inf for hidden pairs.

The terms of a block are a view of a band (tables.py). Its columns are positions: what a window hides is a slice of it. If all
rows have the same terms at the same position, as with a bias alone, one line is enough. In reverse order of its rows, a block of
any size is a view of that line, which fused attention reads. Scores are in order: to them views of a few equal lines are added.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch

from .blocks import Block, Part, visible
from .products import evenly, select_rows
from .tables import cast, skewed

LINES = 32  # rows of a band of equal lines that is added to scores: more take memory, fewer take more additions


class Terms:
    """The terms of a part's blocks."""

    def __init__(self, part: Part) -> None:
        self.part, self.call, self.dtype = part, part.call, part.call.term_dtype
        self.attn_mask, self.is_by_position = part.call.term_mask, part.call.is_by_position
        self.has_tables = bool({"rel_key", "rel_p2c"} & part.call.tables.keys())
        self.has_lines = part.call.has_window or "rel_bias" in part.call.tables
        self.low = part.run.start - part.run.offset - part.run.num_queries - part.step + 1  # the first position of a band
        # NaN of a query that sees nothing must not remain, but is overwritten after fused attention.
        is_safe = part.is_fused or not part.call.has_hidden or not part.call.has_nan_queries
        self.adds_hidden = is_safe and part.call.can_add_hidden
        self._lines: torch.Tensor | None = None

    def reversed(self, block: Block) -> torch.Tensor:
        """Return the terms of a block's rows in reverse order, if they depend on positions alone, [1, 1 or H, M, N]: row r and
        column n of the view are element r + n of a line."""
        heads, width = self.positions.shape
        start = block.base - block.rows + 1 - self.low
        return self.positions.as_strided((1, heads, block.rows, block.columns), (0, width, 1, 1), start)

    def of(self, block: Block, rows: slice | None = None) -> torch.Tensor | None:
        """Return the terms of some rows of a block, a view that broadcasts to the pairs [S, H, M, N]; None if there are none."""
        rows = slice(0, block.rows) if rows is None else rows
        if self.is_by_position:
            return self._by_position(block, rows) if self.has_lines else None
        mask = None if self.attn_mask is None else self._mask(block, rows)
        if not self.has_tables and not self.has_lines:
            return mask
        pairs = skewed(self._band(block, rows), block.columns)
        if "rel_p2c" in self.call.tables:
            table, rel_scale = self.call.tables["rel_p2c"], self.call.spec.rel_scale
            for columns, keys in block.panels():
                base = rows.start - block.base - columns.start
                table.add_terms(self.part.products, pairs.mT[:, :, columns], keys, self.part.heads, base, rel_scale)
        if mask is not None:
            pairs[:, :, : mask.shape[2] if mask.shape[2] > 1 else None, : block.num_keys].add_(mask)
        return pairs

    def add_to(self, pairs: torch.Tensor, block: Block) -> None:
        """Add the terms to the pairs [S, H, M, N] of a block."""
        if not self.has_tables and not self.has_lines:
            if self.attn_mask is not None and (mask := self._mask(block, slice(0, block.rows))) is not None:
                pairs[:, :, : block.num_rows, : block.num_keys].add_(mask)
            return
        for rows in evenly(block.rows, LINES) if self.is_by_position else block.bands():
            if (terms := self.of(block, rows)) is not None:
                select_rows(pairs, rows).add_(terms)

    def hide(self, pairs: torch.Tensor, block: Block) -> None:
        """Set the logits of hidden pairs to -inf, whatever they are, and add a float mask, if the terms lack that."""
        if block.num_keys < block.columns:
            pairs[..., block.num_keys :] = -math.inf
        if self.adds_hidden:
            return
        if self.call.has_window:
            m, n = torch.arange(block.rows, device=pairs.device)[:, None], torch.arange(block.columns, device=pairs.device)
            (low, high), position = visible(self.call.spec), block.base + n - m
            pairs.masked_fill_((position < low) | (position > high), -math.inf)
        if self.call.tensors.attn_mask is not None:
            inner, mask = pairs[:, :, : block.num_rows, : block.num_keys], part_of_mask(self.call.tensors.attn_mask, block)
            if mask.dtype == torch.bool:
                inner.masked_fill_(~mask, -math.inf)
            elif self.attn_mask is None:
                inner.add_(mask)

    @cached_property
    def positions(self) -> torch.Tensor:
        """The terms of a bias, or 0, by position, (1 or H, positions); -inf for those that a window hides, if that is added."""
        run, table, step = self.part.run, self.call.tables.get("rel_bias"), self.part.step
        width = run.stop - run.offset + 2 * step - self.low
        if table is None:
            terms = self.call.tensors.query.new_zeros(1, width, dtype=self.dtype)
        else:
            terms = cast(table.bias(self.part.heads, self.low, width), self.dtype)
        return self._with_window(terms, self.low)

    def _with_window(self, band: torch.Tensor, first: int) -> torch.Tensor:
        """Set columns of positions, from the first one on, that a window hides to -inf, or if that is not added to 0: they may be
        NaN."""
        (low, high), hidden = visible(self.call.spec), -math.inf if self.adds_hidden else 0.0
        if low > first:
            band[..., : low - first] = hidden
        if high + 1 < first + band.shape[-1]:
            band[..., max(high + 1 - first, 0) :] = hidden
        return band

    def _by_position(self, block: Block, rows: slice) -> torch.Tensor:
        """Return the terms of some rows of a block, a view of equal lines [1, 1 or H, rows, N]."""
        if self._lines is None:
            self._lines = self.positions[None, :, None].expand(-1, -1, LINES, -1).contiguous()
        num_rows, start = rows.stop - rows.start, block.base - rows.stop + 1 - self.low
        return skewed(self._lines[:, :, :num_rows].narrow(3, start, num_rows + block.columns - 1), block.columns)

    def _band(self, block: Block, rows: slice) -> torch.Tensor:
        """Return the band of some rows of a block [S, H, M, at least M + N - 1], but for terms of keys."""
        call, part, rel_key, num_rows = self.call, self.part, self.call.tables.get("rel_key"), rows.stop - rows.start
        first, width = block.base - rows.stop + 1, num_rows + block.columns - 1
        if rel_key is None:
            band = call.memory("band", (*part.sizes, num_rows, width), self.dtype)
            return band.copy_(self.positions[:, None].narrow(2, first - self.low, width))
        vectors, base = select_rows(block.rel_query, rows), block.base - rows.start
        band, _, _ = rel_key.band(part.products, "band", vectors, part.heads, base, block.columns, call.spec.rel_scale)
        if "rel_bias" in call.tables:
            band[..., :width].add_(self.positions[:, None].narrow(2, first - self.low, width))
        if call.has_window:
            self._with_window(band[..., :width], first)
        return band

    def _mask(self, block: Block, rows: slice) -> torch.Tensor | None:
        """Return the mask of some rows as numbers that are added; None if a boolean one is not."""
        assert self.attn_mask is not None
        mask = part_of_mask(self.attn_mask, block)
        mask = mask[:, :, rows] if mask.shape[2] > 1 else mask
        if mask.dtype != torch.bool:
            return cast(mask, self.dtype)
        if not self.adds_hidden:
            return None
        return torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, -math.inf)


def part_of_mask(attn_mask: torch.Tensor, block: Block) -> torch.Tensor:
    """Return a block's part of a mask, which broadcasts to its pairs."""
    run, heads = block.part.run, block.part.heads
    parts = (
        (run.entry, run.count),
        (heads.start, heads.stop - heads.start),
        (block.row, block.num_rows),
        (block.key, block.num_keys),
    )
    for dim, (start, length) in enumerate(parts):
        if attn_mask.shape[dim] > 1:
            attn_mask = attn_mask.narrow(dim, start, length)
    return attn_mask
