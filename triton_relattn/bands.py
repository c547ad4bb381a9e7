"""Products of queries and table rows for all pairs of a block, without a gather: the skewed view of a band.

Query m and key n of a block need the table row of the relative position ``first_position + n - m``. A *panel* of some successive
queries needs the rows of successive positions, a *window* of the table: ``band[m, c] = q_m . window[c]`` is one matrix product, and
the term of query m and key n is ``band[m, n - m + M - 1]``. Read with a row stride that is one shorter, the same memory holds
these terms in the order of the scores:

    address(m, n) = m * width + n - m + M - 1 = m * (width - 1) + n + M - 1

So the terms are added to the scores from that view, and gradients of the scores copied into it (zeros around them) are at once
the gradient of the band, which multiplies the table: no gather, no scatter. The queries of all sequences and heads that share a
table are rows of the same product; the more of them there are, the fewer queries a panel needs to make products efficient, and
the fewer columns are computed for nothing.

Keys beyond the table, *far* keys, see one of its end rows or nothing: one number for each query.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from .blocks import Block

PANEL_ROWS = 256
"""Rows of a product with a table: fewer are slow; with more, panels and thereby bands are wider than they need to be."""
PANEL_COLUMNS = 12
"""Columns of a band, at least: products with fewer are slow."""

Rows = slice | None
"""Table rows that some positions have: one each, one for all, or none."""


class Folded(NamedTuple):
    """What each query has for each table row: for near keys a band, for far keys one sum."""

    band: torch.Tensor | None  # (tables * panels, rows, width)
    far: list[torch.Tensor]  # (sequences, heads, queries, 1), for each of Band.far


class Band:
    """The relative positions of a block's queries and keys, for one table that its heads share or a table for each head."""

    def __init__(self, block: Block, num_tables: int, one_panel: bool = False) -> None:
        spec, self.block = block.call.spec, block
        self.num_tables, self.sharing = num_tables, block.group.num_heads // num_tables
        first, num_queries = block.first_position, block.num_queries

        # Near are the keys that some query sees at a position from spec.first to spec.last.
        start = min(max(spec.first - first, 0), block.num_keys)
        stop = min(max(spec.last - first + num_queries, start), block.num_keys)
        self.near, self.num_keys = slice(start, stop), stop - start
        ends = ((slice(0, start), slice(0, 1)), (slice(stop, block.num_keys), slice(-1, None)))
        self.far = [(keys, row) for keys, row in ends if spec.clamp and keys.start < keys.stop]

        rows = block.group.sequences.count * self.sharing
        fewest = max(-(-PANEL_ROWS // rows), PANEL_COLUMNS - self.num_keys)
        self.panel = num_queries  # queries of each; the last may have fewer
        if fewest < num_queries and not one_panel:
            self.panel = next((size for size in range(fewest, 2 * fewest) if num_queries % size == 0), fewest)
        self.num_panels = -(-num_queries // self.panel)
        self.width = self.num_keys + self.panel - 1

        # The windows of all panels lie within these positions, of which some pair has those from low to high.
        self.positions = range(first + start - self.num_panels * self.panel + 1, first + stop)
        low, high = first + start - num_queries + 1, first + stop - 1
        self.low = low if spec.window_left < 0 else max(low, min(-spec.window_left, high + 1))
        self.high = high if spec.window_right < 0 else min(high, max(spec.window_right, self.low - 1))

    def parts(self) -> list[tuple[slice, Rows]]:
        """The positions, counted from the first, with the table rows they have; none where no pair has them."""
        spec = self.block.call.spec
        start, stop = (min(max(position, self.low), self.high + 1) for position in (spec.first, spec.last + 1))
        borders = (self.positions.start, self.low, start, stop, self.high + 1, self.positions.stop)
        last = spec.last - spec.first
        rows = (
            None,
            slice(0, 1) if spec.clamp else None,
            slice(start - spec.first, stop - spec.first),
            slice(last, last + 1) if spec.clamp else None,
            None,
        )
        parts = [slice(border - borders[0], after - borders[0]) for border, after in zip(borders, borders[1:], strict=False)]
        return [(part, row) for part, row in zip(parts, rows, strict=True) if part.start < part.stop]

    def window(self, table: torch.Tensor) -> torch.Tensor:
        """Table rows of all positions, (tables, positions, width). Rows that no pair has are not read: they may hold NaN."""
        pieces = []
        for part, rows in self.parts():
            size = (table.shape[0], part.stop - part.start, table.shape[2])
            pieces.append(table.new_zeros(size) if rows is None else table[:, rows].expand(size))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)

    def windows(self, table: torch.Tensor) -> torch.Tensor:
        """The window of each panel, (tables * panels, width of table, self.width): overlapping views as far as possible."""
        windows = self.window(table).unfold(1, self.width, self.panel)
        return (windows.flip(1) if self.num_panels > 1 else windows).flatten(0, 1)

    def add_window_gradient(self, total: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add the gradient of the windows, (tables * panels, self.width, width of table), to that of their table."""
        count, length, width = self.num_panels, len(self.positions), gradient.shape[2]
        if count == 1:
            of_window = gradient
        else:
            apart = gradient.new_zeros(self.num_tables, count, length, width)
            places = apart.as_strided(
                (self.num_tables, count, self.width, width),
                (count * length * width, (length - self.panel) * width, width, 1),
                (count - 1) * self.panel * width,
            )
            places.copy_(gradient.unflatten(0, (self.num_tables, count)))
            of_window = apart.sum(1)
        for part, rows in self.parts():
            if rows is not None:
                piece = of_window[:, part]
                is_end = rows.stop - rows.start < part.stop - part.start
                total[:, rows] += piece.sum(1, keepdim=True) if is_end else piece

    def panels(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Views of (sequences, heads, queries, ...) as (tables, panels, sequences, sharing, queries, ...): full panels, the rest."""
        rows = rows.unflatten(1, (self.num_tables, self.sharing))
        full = self.block.num_queries // self.panel
        pieces = []
        for part, count, size in (
            (slice(0, full * self.panel), full, self.panel),
            (slice(full * self.panel, None), self.num_panels - full, self.block.num_queries - full * self.panel),
        ):
            if count:
                pieces.append(rows[:, :, :, part].unflatten(3, (count, size)).permute(1, 3, 0, 2, 4, 5))
        return pieces

    def like_panels(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Views of (tables, panels, sequences, sharing, self.panel, ...) as panels() returns them."""
        full = self.block.num_queries // self.panel
        rest = self.block.num_queries - full * self.panel
        return [packed[:, :full], packed[:, full:, :, :, :rest]] if rest else [packed]

    def shape(self, width: int) -> tuple[int, ...]:
        return self.num_tables, self.num_panels, self.block.group.sequences.count, self.sharing, self.panel, width

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """(sequences, heads, queries, width) as (tables * panels, rows of a panel, width); zero where the last panel has none."""
        pieces = self.panels(rows)
        if len(pieces) == 1:
            return pieces[0].reshape(self.num_tables * self.num_panels, -1, rows.shape[-1])
        packed = rows.new_zeros(self.shape(rows.shape[-1]))
        for place, piece in zip(self.like_panels(packed), pieces, strict=True):
            place.copy_(piece)
        return packed.flatten(2, 4).flatten(0, 1)

    def skewed(self, band: torch.Tensor) -> list[torch.Tensor]:
        """The band in the order of the scores, as panels() has them."""
        *sizes, width = self.shape(self.num_keys)
        strides = [self.width * math.prod(sizes[dim + 1 :]) for dim in range(5)]
        strides[4] -= 1
        return self.like_panels(band.as_strided((*sizes, width), (*strides, 1), self.panel - 1))

    def add_terms(self, scores: torch.Tensor, packed: torch.Tensor, rows: torch.Tensor, table: torch.Tensor, scale: float) -> None:
        """scores (by pair) += scale * q . table row. packed is self.pack(rows), (sequences, heads, queries, width)."""
        if self.num_keys:
            band = self.block.call.buffer("band", self.num_tables * self.num_panels, packed.shape[1], self.width)
            band.baddbmm_(packed, self.windows(table), beta=0, alpha=scale)
            for piece, terms in zip(self.panels(scores[..., self.near]), self.skewed(band), strict=True):
                piece.add_(terms)
        for keys, row in self.far:
            scores[..., keys].add_(rows @ table[:, row].mT, alpha=scale)

    def fold(self, scores: torch.Tensor) -> Folded:
        """Sum what is by pair for each query and table row."""
        band = None
        if self.num_keys:
            *sizes, _ = self.shape(0)
            band = self.block.call.buffer("band", *sizes, self.width).zero_()
            for place, piece in zip(self.skewed(band), self.panels(scores[..., self.near]), strict=True):
                place.copy_(piece)
            band = band.flatten(2, 4).flatten(0, 1)
        return Folded(band, [scores[..., keys].sum(-1, keepdim=True) for keys, _ in self.far])

    def add_rows(self, total: torch.Tensor, folded: Folded, table: torch.Tensor, scale: float = 1) -> None:
        """total (sequences, heads, queries, width) += scale * folded @ table."""
        if folded.band is not None:
            product = torch.bmm(folded.band, self.windows(table).mT)
            pieces = self.like_panels(product.view(self.shape(table.shape[2])))
            for place, piece in zip(self.panels(total), pieces, strict=True):
                place.add_(piece, alpha=scale)
        for sums, (_, row) in zip(folded.far, self.far, strict=True):
            total.add_(sums * table[:, row], alpha=scale)

    def add_table_gradient(self, total: torch.Tensor, folded: Folded, packed: torch.Tensor, rows: torch.Tensor, scale: float = 1) -> None:
        """total (tables, R, width) += scale * folded^T @ rows. packed is self.pack(rows)."""
        if folded.band is not None:
            self.add_window_gradient(total, torch.bmm(folded.band.mT, packed).mul_(scale))
        for sums, (_, row) in zip(folded.far, self.far, strict=True):
            of_heads = (sums * rows).sum((0, 2)).unflatten(0, (self.num_tables, self.sharing)).sum(1)
            total[:, row] += scale * of_heads[:, None]

    def add_bias(self, scores: torch.Tensor, bias: torch.Tensor) -> None:
        """scores (by pair) += bias (tables, R, 1) of each pair's row. The band has one panel."""
        scores = scores.unflatten(1, (self.num_tables, self.sharing))
        if self.num_keys:
            by_query = self.window(bias).squeeze(2).unfold(1, self.num_keys, 1).flip(1)
            scores[..., self.near].add_(by_query[:, None])
        for keys, row in self.far:
            scores[..., keys].add_(bias[:, row, None])

    def add_bias_gradient(self, total: torch.Tensor, scores: torch.Tensor) -> None:
        """total (tables, R, 1) += scores (by pair) summed over the pairs of each row. The band has one panel."""
        scores = scores.unflatten(1, (self.num_tables, self.sharing))
        if self.num_keys:
            band = scores.new_zeros(self.num_tables, self.block.num_queries, self.width)
            strides = (self.block.num_queries * self.width, self.width - 1, 1)
            shape = (self.num_tables, self.block.num_queries, self.num_keys)
            band.as_strided(shape, strides, self.panel - 1).copy_(scores[..., self.near].sum((0, 2)))
            self.add_window_gradient(total, band.sum(1)[..., None])
        for keys, row in self.far:
            total[:, row] += scores[..., keys].sum((0, 2, 3, 4)).view(-1, 1, 1)
