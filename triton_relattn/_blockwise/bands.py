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
"""

from __future__ import annotations

import weakref
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from .mirror import Mirror
    from .partition import Frame

FEWEST_ROWS = 64
"""Fewest rows of a product with a window: with fewer it is slow."""
PANEL_ROWS, WIDER_SHARE = 192, 12
"""Rows that it should have, for fewer windows to copy, as long as its band is no more than a twelfth wider than the keys."""
PANEL_SHARE = 64
"""A panel has at least as many queries as keys divided by this: a band that is wider by so little costs less than more panels."""
PANEL_COLUMNS = 12
"""Fewest columns of a band: products with fewer are slow."""
OVERLAPPED = 4
"""Gradients of windows are each padded with zeros to the length of all together and summed in one step, if that is at most so
many times the length of one. Else they are added piece by piece."""

TableRows = slice | None
"""The table rows of some positions: one row each, one row for all, or None."""


class Reach:
    """The relative positions of a frame's queries and keys, and their table rows."""

    def __init__(self, frame: Frame | Mirror, num_tables: int, num_queries: int) -> None:
        """num_queries: number of queries of the frame, or more if the last panel goes beyond them."""
        self.frame: Frame | Mirror = weakref.proxy(frame)  # a cycle would keep its memory until the next garbage collection
        self.num_tables, self.sharing = num_tables, frame.num_heads // num_tables
        spec, first = frame.spec, frame.first_position

        # Near keys: those that some query sees at a position from spec.first to spec.last.
        start = min(max(spec.first - first - frame.extra, 0), frame.num_keys)
        stop = min(max(spec.last - first + frame.num_queries, start), frame.num_keys)
        self.near, self.num_near = slice(start, stop), stop - start
        ends = ((slice(0, start), slice(0, 1)), (slice(stop, frame.num_keys), slice(-1, None)))
        # An end row that no visible pair has is not read: it may hold NaN.
        self.far = [(keys, row) for keys, row in ends if spec.clamp and keys.start < keys.stop and self._visible(keys)]

        # Positions of near keys. Only those from low to high belong to visible pairs.
        self.positions = range(first + start - num_queries + 1, first + stop + frame.extra)
        visible = self._visible(self.near) or range(self.positions.start, self.positions.start)
        self.low, self.high = visible.start, visible.stop - 1

    def _visible(self, keys: slice) -> range:
        """Return the relative positions of all queries and some keys, as far as pairs with them are visible."""
        low, high = self.frame.visible(slice(0, self.frame.num_queries), keys)
        return range(low, high + 1)

    @cached_property
    def index(self) -> torch.Tensor:
        """Where the near pairs of sequences that are shifted find their position: (sequences, 1, queries, keys)."""
        return self.frame.shifted(self.near)  # type: ignore[union-attr]  # mirrors have no shifts

    @cached_property
    def parts(self) -> list[tuple[slice, TableRows]]:
        """Ranges of near positions, counted from the first, with their table rows; None for positions of no pair."""
        spec = self.frame.spec
        start, stop = (min(max(position, self.low), self.high + 1) for position in (spec.first, spec.last + 1))
        last = spec.last - spec.first
        before, after = (slice(0, 1), slice(last, last + 1)) if spec.clamp else (None, None)
        rows = (None, before, slice(start - spec.first, stop - spec.first), after, None)
        borders = (self.positions.start, self.low, start, stop, self.high + 1, self.positions.stop)
        parts = [slice(start - borders[0], stop - borders[0]) for start, stop in pairwise(borders)]
        return [(part, row) for part, row in zip(parts, rows, strict=True) if part.start < part.stop]

    def window(self, table: torch.Tensor) -> torch.Tensor:
        """Return the table rows of the near positions, (tables, positions, width). Rows that no pair uses are not read: they may
        hold NaN."""
        pieces = []
        for part, rows in self.parts:
            size = (table.shape[0], part.stop - part.start, table.shape[2])
            pieces.append(table.new_zeros(size) if rows is None else table[:, rows].expand(size))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)

    def add_to_table(self, total: torch.Tensor, of_window: torch.Tensor) -> None:
        """Add the gradient of a window to total, the gradient of the table."""
        for part, rows in self.parts:
            if rows is not None:
                piece = of_window[:, part]
                is_end = rows.stop - rows.start < part.stop - part.start
                total[:, rows] += piece.sum(1, keepdim=True) if is_end else piece


class Packed(NamedTuple):
    """A vector for each query."""

    rows: torch.Tensor  # (sequences, heads, queries, width)
    panels: torch.Tensor  # the same as (tables * panels, rows of a panel, width), for products with windows


class Folded(NamedTuple):
    """Sums over the keys of each query and table row: a band for near keys, one number for the far keys of an end row."""

    band: torch.Tensor | None  # (tables * panels, rows, width)
    far: list[torch.Tensor]  # (sequences, heads, queries, 1), for each of Reach.far


class Band(Reach):
    """A table of vectors, (tables, R, width), and its products for the pairs of a frame."""

    def __init__(self, frame: Frame | Mirror, table: torch.Tensor, scale: float, name: str) -> None:
        """name: names its memory among the call's buffers."""
        num_tables = table.shape[0]
        rows = frame.num_sequences * (frame.num_heads // num_tables)
        wider = min(-(-PANEL_ROWS // rows), frame.num_keys // WIDER_SHARE)
        fewest = max(wider, -(-FEWEST_ROWS // rows), PANEL_COLUMNS - frame.num_keys, frame.num_keys // PANEL_SHARE)
        self.panel = frame.num_queries  # queries of each panel; the last may have fewer
        if fewest < frame.num_queries and frame.shifts is None:
            sizes = range(fewest, 2 * fewest)
            self.panel = next((size for size in sizes if frame.num_queries % size == 0), fewest)
        self.num_panels = -(-frame.num_queries // self.panel)
        super().__init__(frame, num_tables, self.num_panels * self.panel)
        self.table, self.scale, self.name, self.width = table, scale, name, self.num_near + self.panel - 1 + frame.extra
        self.num_full = frame.num_queries // self.panel
        self._of_windows: torch.Tensor | None = None
        self._of_ends: dict[int, torch.Tensor] = {}

    @cached_property
    def windows(self) -> torch.Tensor:
        """The window of each panel, (tables * panels, width of the table, self.width)."""
        window = self.window(self.table)
        if self.num_panels > 1:
            window = window.unfold(1, self.width, self.panel).mT.flip(1).flatten(0, 1)  # copied row by row
        return window.mT

    def panels(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return views of (sequences, heads, queries, ...) as (tables, panels, sequences, sharing, queries, ...): one of the full
        panels, and one of the rest if there is one."""
        if self.num_tables == self.num_panels == 1:
            return [rows[None, None]]
        sequences, _, num_queries, width = rows.shape
        sizes, full = (sequences, self.num_tables, self.sharing), self.num_full * self.panel
        if full == num_queries:
            pieces = [rows.view(*sizes, self.num_full, self.panel, width)]
        else:
            pieces = [rows[:, :, :full].view(*sizes, self.num_full, self.panel, width)]
            pieces.append(rows[:, :, full:].view(*sizes, 1, num_queries - full, width))
        return [piece.permute(1, 3, 0, 2, 4, 5) for piece in pieces]

    def in_panels(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return views of (tables, panels, sequences, sharing, self.panel, ...) that match those of panels()."""
        if self.num_full == self.num_panels:
            return [packed]
        rest = packed[:, self.num_full :, :, :, : self.frame.num_queries - self.num_full * self.panel]
        return [packed[:, : self.num_full], rest]

    def shape(self, width: int) -> tuple[int, int, int, int, int, int]:
        return self.num_tables, self.num_panels, self.frame.num_sequences, self.sharing, self.panel, width

    def pack(self, rows: torch.Tensor) -> Packed:
        """Put (sequences, heads, queries, width) in panels, with zeros where the last panel has fewer queries."""
        pieces = self.panels(rows)
        packed = pieces[0]
        if len(pieces) > 1:
            packed = rows.new_zeros(self.shape(rows.shape[-1]))
            for place, piece in zip(self.in_panels(packed), pieces, strict=True):
                place.copy_(piece)
        return Packed(rows, packed.reshape(self.num_tables * self.num_panels, -1, rows.shape[-1]))

    @cached_property
    def band(self) -> torch.Tensor:
        """Memory for a band, (tables * panels, rows of a panel, self.width). Without rel_value it is that of the probabilities,
        which are then not needed at the same time."""
        name = "band" if "rel_value" in self.frame.call.tables else "probs"
        return self.frame.call.buffer(name, self.shape(self.width)).view(self.num_tables * self.num_panels, -1, self.width)

    @cached_property
    def skewed(self) -> list[torch.Tensor]:
        """The band in the order of the scores, as views that match those of panels(), if no sequence is shifted."""
        strides = *self.band.view(self.shape(self.width)).stride()[:4], self.width - 1, 1
        return self.in_panels(self.band.as_strided(self.shape(self.num_near), strides, self.panel - 1))

    @cached_property
    def scores(self) -> list[torch.Tensor]:
        """The near keys' part of the frame's scores as panels() returns them."""
        return self.panels(self.frame.pairs[..., self.near])

    def add_terms(self, packed: Packed) -> None:
        """Add scale * rows . table to the frame's scores."""
        pairs, is_shifted = self.frame.pairs, self.frame.shifts is not None
        if (
            not is_shifted
            and pairs.shape[2] == self.num_tables == 1
            and self.num_near == pairs.shape[3] > 0
            and pairs.is_contiguous()
        ):
            # With one query, as in decoding, the band has the order of the scores.
            pairs.view(-1, self.num_near).addmm_(packed.panels[0], self.windows[0], alpha=self.scale)
        elif self.num_near:
            self.band.baddbmm_(packed.panels, self.windows, beta=0, alpha=self.scale)
            if is_shifted:
                band = self.band.view(self.shape(self.width))
                self.scores[0].add_(band.gather(-1, self.index.expand(self.shape(self.num_near))))
            else:
                for place, terms in zip(self.scores, self.skewed, strict=True):
                    place.add_(terms)
        for keys, row in self.far:
            self.frame.pairs[..., keys].add_(packed.rows @ self.table[:, row].mT, alpha=self.scale)

    def fold(self, pairs: torch.Tensor) -> Folded:
        """Sum numbers by pair over the keys of each query and table row."""
        if self.num_near:
            if self.width > self.num_near:
                self.band.zero_()
            pieces = self.scores if pairs is self.frame.pairs else self.panels(pairs[..., self.near])
            if self.frame.shifts is not None:
                self.band.view(self.shape(self.width)).scatter_(-1, self.index.expand(self.shape(self.num_near)), pieces[0])
            else:
                for place, piece in zip(self.skewed, pieces, strict=True):
                    place.copy_(piece)
        return Folded(self.band if self.num_near else None, [pairs[..., keys].sum(-1, keepdim=True) for keys, _ in self.far])

    def add_rows(self, total: torch.Tensor, folded: Folded) -> None:
        """Add scale * folded @ table to total (sequences, heads, queries, width)."""
        if folded.band is not None:
            product = self.frame.call.buffer("products", self.shape(self.table.shape[2]))
            torch.bmm(folded.band, self.windows.mT, out=product.view(*folded.band.shape[:2], -1))
            for place, piece in zip(self.panels(total), self.in_panels(product), strict=True):
                place.add_(piece, alpha=self.scale)
        for sums, (_, row) in zip(folded.far, self.far, strict=True):
            total.add_(sums * self.table[:, row], alpha=self.scale)

    def collect(self, folded: Folded, packed: Packed) -> None:
        """Add folded^T @ rows to the sums that add_gradient() will add to the gradient of the table."""
        if folded.band is not None:
            beta = 0 if self._of_windows is None else 1
            if self._of_windows is None:
                shape = folded.band.shape[0], self.width, packed.panels.shape[2]
                self._of_windows = self.frame.call.buffer(f"gradient of windows of {self.name}", shape)
            self._of_windows.baddbmm_(folded.band.mT, packed.panels, beta=beta)
        for number, sums in enumerate(folded.far):
            of_end = (sums * packed.rows).sum((0, 2)).unflatten(0, (self.num_tables, self.sharing)).sum(1, keepdim=True)
            self._of_ends[number] = of_end if number not in self._of_ends else self._of_ends[number].add_(of_end)

    def add_gradient(self, total: torch.Tensor) -> None:
        """Add the collected sums to total, the gradient of the table. Call it once."""
        if self._of_windows is not None:
            self.add_to_table(total, self._overlapped(self._of_windows).mul_(self.scale))
        for number, of_end in self._of_ends.items():
            total[:, self.far[number][1]] += of_end.mul_(self.scale)

    def _overlapped(self, of_windows: torch.Tensor) -> torch.Tensor:
        """Sum the gradients of the panels' windows, which overlap, to that of the window of all near positions."""
        count, panel, length = self.num_panels, self.panel, len(self.positions)
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


class Bias(Reach):
    """A table of numbers, (tables, R, 1), for the pairs of a frame."""

    def __init__(self, frame: Frame, table: torch.Tensor) -> None:
        super().__init__(frame, table.shape[0], frame.num_queries)
        self.table = table

    @cached_property
    def by_query(self) -> torch.Tensor:
        """The numbers of near keys, (1 or sequences, tables, 1, queries, keys)."""
        window = self.window(self.table)[..., 0]
        if self.frame.shifts is not None:
            return window[:, self.index[:, 0]].transpose(0, 1)[:, :, None]
        return window.unfold(1, self.num_near, 1).flip(1)[None, :, None]

    def add_terms(self) -> None:
        """Add the number of each pair to the frame's scores."""
        pairs = self.frame.pairs.unflatten(1, (self.num_tables, self.sharing))
        if self.num_near:
            pairs[..., self.near].add_(self.by_query)
        for keys, row in self.far:
            pairs[..., keys].add_(self.table[:, row, None])

    def add_gradient(self, total: torch.Tensor) -> None:
        """Add the frame's scores, summed over the pairs of each row, to total, the gradient of the table."""
        pairs, width = self.frame.pairs.unflatten(1, (self.num_tables, self.sharing)), len(self.positions)
        if self.frame.shifts is not None:
            pairs = pairs.sum(2)
            if self.num_near:
                band = pairs.new_zeros(*pairs.shape[:3], width)
                band.scatter_(-1, self.index.expand(*pairs.shape[:3], -1), pairs[..., self.near])
                self.add_to_table(total, band.sum((0, 2))[..., None])
            pairs = pairs.sum(0)
        else:
            pairs = pairs.sum((0, 2))
        if self.num_near and self.frame.shifts is None:
            num_queries = self.frame.num_queries
            band = pairs.new_zeros(self.num_tables, num_queries, width)
            strides = (num_queries * width, width - 1, 1)
            band.as_strided((self.num_tables, num_queries, self.num_near), strides, num_queries - 1).copy_(pairs[..., self.near])
            self.add_to_table(total, band.sum(1)[..., None])
        for keys, row in self.far:
            total[:, row] += pairs[..., keys].sum((1, 2)).view(-1, 1, 1)
