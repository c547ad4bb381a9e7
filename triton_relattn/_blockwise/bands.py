"""Products of queries with table rows for all pairs of a block, without a gather: the skewed view of a band.

Query m and key n of a block need the table row of the relative position ``first_position + n - m``. M successive queries, a
*panel*, need the rows of successive positions, a *window* of the table. ``band[m, c] = q_m . window[c]`` is one matrix product,
and query m and key n find their term in ``band[m, n - m + M - 1]``. If the same memory is read with a row stride that is shorter
by one, it holds the terms in the order of the scores:

    address(m, n) = m * width + n - m + M - 1 = m * (width - 1) + n + M - 1

So terms are added to scores from that view. In the backward, gradients of scores are copied into the view, with zeros around
them: that is the gradient of the band, which is multiplied with the table. There is no gather and no scatter. The table of the
values works alike: the band of the probabilities times its rows is its part of out, and ``dO . A`` is added to ``dO . v`` as
``p . E`` is to ``q . k``.

A band has M - 1 more columns than the scores, which are computed for nothing. The queries of all sequences and heads that share a
table are rows of one product. The more there are, the fewer queries of each a panel needs to be efficient.

Keys beyond the table are *far*: their term is that of an end row, one number for each query, or nothing.

The table that meets the keys, rel_p2c, has bands of the same kind. Seen from the keys, key n and query m of a block need the row
of ``-first_position + m - n``: take keys for queries and queries for keys, turn the sign of all positions, and with it the order
of the table's rows. That is a frame's *mirror*. Its scores are the same memory, transposed.
"""

from __future__ import annotations

import math
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch

from .frame import Frame
from .products import multiply, product_into

FEWEST_ROWS = 64
"""Fewest rows of a product with a window: with fewer it is slow."""
PANEL_ROWS, WIDER_SHARE = 192, 12
"""Rows that it should have, for fewer windows to copy, as long as its band is no more than a twelfth wider than the keys."""
PANEL_SHARE = 64
"""A panel has at least as many queries as keys divided by this: a band that is wider by so little costs less than more panels."""
PANEL_COLUMNS = 12
"""Fewest columns of a band: products with fewer are slow."""
OVERLAPPED = 4
"""Gradients of windows are padded to the length of all together and summed in one step, if that is at most so many times the
length of one. Else they are added piece by piece."""

TableRows = slice | None
"""The table rows of some positions: one row each, one row for all, or None."""
Packed = tuple[torch.Tensor, torch.Tensor]
"""A vector for each query, (sequences, heads, queries, width), and the same as (tables * panels, rows of a panel, width), for
products with windows."""


def window_parts(frame: Frame, num_queries: int) -> list[tuple[slice, TableRows]]:
    """Return ranges of the relative positions of queries and near keys, counted from the lowest, with their table rows; None for
    positions of no visible pair.

    Args:
        num_queries: number of queries of the frame, or more if the last panel goes beyond them.
    """
    spec, lowest = frame.spec, frame.first_position + frame.near.start - num_queries + 1
    seen = frame.visible(frame.near) or range(lowest, lowest)
    start, stop = min(max(spec.first, seen.start), seen.stop), min(max(spec.last + 1, seen.start), seen.stop)
    last = spec.last - spec.first
    before, after = (slice(0, 1), slice(last, last + 1)) if spec.clamp else (None, None)
    all_rows = (None, before, slice(start - spec.first, stop - spec.first), after, None)
    borders = (lowest, seen.start, start, stop, seen.stop, frame.first_position + frame.near.stop + frame.extra)
    parts = []
    for (begin, end), rows in zip(pairwise(borders), all_rows, strict=True):
        if begin < end:
            parts.append((slice(begin - lowest, end - lowest), rows))
    return parts


def window_of(table: torch.Tensor, parts: list[tuple[slice, TableRows]]) -> torch.Tensor:
    """Return the table rows of successive positions, (tables, positions, width). Rows that no pair uses are not read: they may
    hold NaN."""
    pieces = []
    for part, rows in parts:
        size = (table.shape[0], part.stop - part.start, table.shape[2])
        pieces.append(table.new_zeros(size) if rows is None else table[:, rows].expand(size))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def add_to_table(total: torch.Tensor, parts: list[tuple[slice, TableRows]], of_window: torch.Tensor) -> None:
    """Add the gradient of a window to total, the gradient of the table."""
    for part, rows in parts:
        if rows is not None:
            piece = of_window[:, part]
            is_end = rows.stop - rows.start < part.stop - part.start
            total[:, rows] += piece.sum(1, keepdim=True) if is_end else piece


class _Views(NamedTuple):
    """Memory for a band, (tables * panels, rows of a panel, width), and, if no sequence is shifted, the same in the order of the
    scores, as views that match those of Band.panels()."""

    band: torch.Tensor
    skewed: list[torch.Tensor]


class Band:
    """A table of vectors, (tables, R, width), and its products for the pairs of a frame."""

    def __init__(self, frame: Frame, table: torch.Tensor, scale: float, name: str, memory: str, term_dtype: torch.dtype) -> None:
        """Choose the panels.

        Args:
            table: in the dtype of the products of gradients.
            name: names the memory for the gradient of the windows, which lasts as long as the frame.
            memory: names the memory for a band. Without rel_value it is that of the probabilities, which are then not needed at
                the same time.
            term_dtype: that of the products that are added to scores.
        """
        self.frame, self.table, self.scale, self.name, self.memory = frame, table, scale, name, memory
        self.term_dtype, self._windows, self._bands = term_dtype, dict[torch.dtype, torch.Tensor](), dict[torch.dtype, _Views]()
        self.num_tables, num_queries = table.shape[0], frame.num_queries
        self.sharing = frame.num_heads // self.num_tables
        rows = frame.num_sequences * self.sharing
        wider = min(-(-PANEL_ROWS // rows), frame.num_keys // WIDER_SHARE)
        fewest = max(wider, -(-FEWEST_ROWS // rows), PANEL_COLUMNS - frame.num_keys, frame.num_keys // PANEL_SHARE)
        self.panel = num_queries  # queries of each panel; the last may have fewer
        if fewest < num_queries and frame.shifts is None:
            self.panel = fewest
            for size in range(fewest, 2 * fewest):
                if num_queries % size == 0:
                    self.panel = size
                    break
        self.num_panels, self.num_full = -(-num_queries // self.panel), num_queries // self.panel
        self.sizes = (self.num_tables, self.num_panels, frame.num_sequences, self.sharing, self.panel)
        self.width = frame.num_near + self.panel - 1 + frame.extra
        self.length = frame.num_near + self.num_panels * self.panel - 1 + frame.extra  # of the windows of all panels together
        self.parts = window_parts(frame, self.num_panels * self.panel)
        self._of_windows: torch.Tensor | None = None
        self._of_ends: dict[int, torch.Tensor] = {}

    def windows(self, dtype: torch.dtype) -> torch.Tensor:
        """The window of each panel, (tables * panels, width of the table, self.width)."""
        if dtype not in self._windows:
            window = window_of(self.table, self.parts).to(dtype)
            if self.num_panels > 1:
                window = window.unfold(1, self.width, self.panel).mT.flip(1).flatten(0, 1)  # copied row by row
            self._windows[dtype] = window.mT
        return self._windows[dtype]

    def panels(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return views of (sequences, heads, queries, ...) as (tables, panels, sequences, sharing, queries, ...): one of the full
        panels, and one of the rest if there is one."""
        if self.num_tables == self.num_panels == 1:
            return [rows[None, None]]
        sequences, _, num_queries, width = rows.shape
        full, sizes = self.num_full * self.panel, (sequences, self.num_tables, self.sharing)
        rest = num_queries - full
        whole = rows[:, :, :full] if rest else rows
        pieces = [whole.view(*sizes, self.num_full, self.panel, width).permute(1, 3, 0, 2, 4, 5)]
        if rest:
            pieces.append(rows[:, :, full:].view(*sizes, 1, rest, width).permute(1, 3, 0, 2, 4, 5))
        return pieces

    def in_panels(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return views of (tables, panels, sequences, sharing, self.panel, ...) that match those of panels()."""
        if self.num_full == self.num_panels:
            return [packed]
        rest = packed[:, self.num_full :, :, :, : self.frame.num_queries - self.num_full * self.panel]
        return [packed[:, : self.num_full], rest]

    def pack(self, rows: torch.Tensor) -> Packed:
        """Put (sequences, heads, queries, width) in panels, with zeros where the last panel has fewer queries."""
        pieces = self.panels(rows)
        packed = pieces[0]
        if len(pieces) > 1:
            packed = rows.new_zeros((*self.sizes, rows.shape[-1]))
            for place, piece in zip(self.in_panels(packed), pieces, strict=True):
                place.copy_(piece)
        return rows, packed.reshape(self.num_tables * self.num_panels, -1, rows.shape[-1])

    def views(self, dtype: torch.dtype) -> _Views:
        """Memory for a band."""
        if dtype not in self._bands:
            shape = self.num_tables * self.num_panels, math.prod(self.sizes[2:]), self.width
            band = self.frame.buffers(self.memory, shape, dtype)
            strides = *band.view(*self.sizes, self.width).stride()[:4], self.width - 1, 1
            skewed = band.as_strided((*self.sizes, self.frame.num_near), strides, self.panel - 1)
            self._bands[dtype] = _Views(band, self.in_panels(skewed) if self.frame.shifts is None else [])
        return self._bands[dtype]

    @cached_property
    def scores(self) -> list[torch.Tensor]:
        """The near keys' part of the frame's scores as panels() returns them."""
        return self.panels(self.frame.pairs[..., self.frame.near])

    def add_terms(self, packed: Packed) -> None:
        """Add scale * rows . table to the frame's scores."""
        frame, pairs, (rows, panels) = self.frame, self.frame.pairs, packed
        num_near, is_shifted = frame.num_near, frame.shifts is not None
        panels = panels.to(self.term_dtype)
        if (
            not is_shifted
            and pairs.dtype == panels.dtype
            and frame.num_queries == self.num_tables == 1
            and num_near == frame.num_keys > 0
            and pairs.is_contiguous()
        ):
            # With one query, as in decoding, the band has the order of the scores.
            pairs.view(-1, num_near).addmm_(panels[0], self.windows(panels.dtype)[0], alpha=self.scale)
        elif num_near:
            band, skewed = self.views(panels.dtype)
            product_into(band, panels, self.windows(panels.dtype), self.scale)
            if is_shifted:
                band = band.view(*self.sizes, self.width)
                self.scores[0].add_(band.gather(-1, frame.shifted_near.expand(*self.sizes, num_near)))
            else:
                for place, terms in zip(self.scores, skewed, strict=True):
                    place.add_(terms)
        for keys, row in frame.far:
            pairs[..., keys].add_(rows.to(pairs.dtype) @ self.table[:, row].mT.to(pairs.dtype), alpha=self.scale)

    def add_products(
        self, pairs: torch.Tensor, total: torch.Tensor | None, packed: Packed | None, operand: torch.Tensor | None = None
    ) -> None:
        """Sum numbers by pair over the keys of each query and table row, and multiply the sums with the table or with vectors.

        Args:
            pairs: the numbers, (sequences, heads, queries, keys).
            total: add scale * sums @ table to it, (sequences, heads, queries, width).
            packed: add sums^T @ rows to what add_gradient() will add to the gradient of the table.
            operand: pairs in the dtype of the table, if they are there.
        """
        frame, table = self.frame, self.table
        if total is None and packed is None:
            return
        if frame.num_near:
            band = self._fold(pairs if operand is None else operand)
            if packed is not None:
                self._collect(band, packed[1])
            if total is not None:
                product = frame.buffers("products", (*self.sizes, table.shape[2]), table.dtype)
                torch.bmm(band, self.windows(table.dtype).mT, out=product.view(*band.shape[:2], -1))
                for place, piece in zip(self.panels(total), self.in_panels(product), strict=True):
                    place.add_(piece, alpha=self.scale)
        for number, (keys, row) in enumerate(frame.far):
            sums = pairs[..., keys].sum(-1, keepdim=True)
            if packed is not None:
                of_end = (sums * packed[0]).sum((0, 2)).unflatten(0, (self.num_tables, self.sharing)).sum(1, keepdim=True)
                self._of_ends[number] = of_end if number not in self._of_ends else self._of_ends[number].add_(of_end)
            if total is not None:
                total.add_(sums * table[:, row], alpha=self.scale)

    def _fold(self, pairs: torch.Tensor) -> torch.Tensor:
        """Copy numbers by pair into the band, with zeros around them."""
        frame, (band, skewed) = self.frame, self.views(self.table.dtype)
        if self.width > frame.num_near:
            band.zero_()
        pieces = self.scores if pairs is frame.pairs else self.panels(pairs[..., frame.near])
        if frame.shifts is not None:
            index = frame.shifted_near.expand(*self.sizes, frame.num_near)
            band.view(*self.sizes, self.width).scatter_(-1, index, pieces[0].to(band.dtype))
        else:
            for place, piece in zip(skewed, pieces, strict=True):
                place.copy_(piece)
        return band

    def _collect(self, band: torch.Tensor, panels: torch.Tensor) -> None:
        """Add the gradient of the windows to that of the blocks before."""
        beta = 0 if self._of_windows is None else 1
        if self._of_windows is None:
            shape = band.shape[0], self.width, panels.shape[2]
            self._of_windows = self.frame.buffers(f"gradient of windows of {self.name}", shape)
        multiply(self.frame.buffers, band.mT, panels, self._of_windows, beta=beta)

    def add_gradient(self, total: torch.Tensor) -> None:
        """Add the collected sums to total, the gradient of the table. Call it once."""
        if self._of_windows is not None:
            add_to_table(total, self.parts, self._overlapped(self._of_windows).mul_(self.scale))
        for number, of_end in self._of_ends.items():
            total[:, self.frame.far[number][1]] += of_end.mul_(self.scale)

    def _overlapped(self, of_windows: torch.Tensor) -> torch.Tensor:
        """Sum the gradients of the panels' windows, which overlap, to that of the window of all near positions."""
        count, panel, length = self.num_panels, self.panel, self.length
        if count == 1:
            return of_windows
        depth = of_windows.shape[2]
        of_windows = of_windows.view(self.num_tables, count, self.width, depth)
        # Panels of later queries begin at earlier positions.
        if length <= OVERLAPPED * self.width:
            apart = of_windows.new_zeros(self.num_tables, count, length, depth)
            strides = (count * length * depth, (length - panel) * depth, depth, 1)
            apart.as_strided(of_windows.shape, strides, (count - 1) * panel * depth).copy_(of_windows)
            return apart.sum(1)
        num_pieces = -(-self.width // panel)  # of a window, each as long as windows are apart
        total = of_windows.new_zeros(self.num_tables, num_pieces + count - 1, panel, depth)
        for number, piece in enumerate(of_windows.split(panel, 2)):
            total[:, num_pieces - 1 - number :][:, :count, : piece.shape[2]].add_(piece)
        return total.flip(1).flatten(1, 2)[:, :length]


class Bias:
    """A table of numbers, (tables, R, 1), for the pairs of a frame."""

    def __init__(self, frame: Frame, table: torch.Tensor) -> None:
        self.frame, self.table, self.parts = frame, table, window_parts(frame, frame.num_queries)
        self.tables_and_sharing = table.shape[0], frame.num_heads // table.shape[0]

    @cached_property
    def by_query(self) -> torch.Tensor:
        """The numbers of near keys, (1 or sequences, tables, 1, queries, keys)."""
        window = window_of(self.table, self.parts)[..., 0]
        if self.frame.shifts is not None:
            return window[:, self.frame.shifted_near[:, 0]].transpose(0, 1)[:, :, None]
        return window.unfold(1, self.frame.num_near, 1).flip(1)[None, :, None]

    def add_terms(self) -> None:
        """Add the number of each pair to the frame's scores."""
        pairs = self.frame.pairs.unflatten(1, self.tables_and_sharing)
        if self.frame.num_near:
            pairs[..., self.frame.near].add_(self.by_query)
        for keys, row in self.frame.far:
            pairs[..., keys].add_(self.table[:, row, None])

    def add_gradient(self, total: torch.Tensor) -> None:
        """Add the frame's scores, summed over the pairs of each row, to total, the gradient of the table."""
        frame, width = self.frame, self.frame.num_near + self.frame.num_queries - 1 + self.frame.extra
        pairs = frame.pairs.unflatten(1, self.tables_and_sharing)
        pairs = pairs.sum((0, 2) if frame.shifts is None else 2)
        if frame.num_near:
            band = pairs.new_zeros(*pairs.shape[:-1], width)
            if frame.shifts is None:
                strides = (frame.num_queries * width, width - 1, 1)
                band.as_strided((*pairs.shape[:-1], frame.num_near), strides, frame.num_queries - 1).copy_(pairs[..., frame.near])
                band = band.sum(1)
            else:
                band.scatter_(-1, frame.shifted_near.expand(*pairs.shape[:3], -1), pairs[..., frame.near])
                band = band.sum((0, 2))
            add_to_table(total, self.parts, band[..., None])
        pairs = pairs if frame.shifts is None else pairs.sum(0)
        for keys, row in frame.far:
            total[:, row] += pairs[..., keys].sum((1, 2)).view(-1, 1, 1)


def mirrored_bands(
    frame: Frame, table: torch.Tensor, scale: float, memory: str, term_dtype: torch.dtype
) -> list[tuple[slice, Band]]:
    """Return the keys of a frame with the bands of rel_p2c, (tables, R, width), its last row first, for them.

    Keys that are far for all queries are mirrors of their own: for them a key's product with an end row is enough.
    """
    found: list[tuple[slice, Band]] = []
    for start, stop in pairwise((0, frame.near.start, frame.near.stop, frame.num_keys)):
        if start < stop:
            keys = slice(start, stop)
            found.append((keys, Band(frame.mirror(keys), table, scale, f"rel_p2c {len(found)}", memory, term_dtype)))
    return found
