"""The table that meets the keys, rel_p2c: bands.py with queries and keys exchanged.

Key n and query m of a block need the row of ``first_position + n - m``. Seen from the keys that is a band of rel_key's kind: take
them for queries, the queries for keys, turn the sign of all positions, and with it the order of the table's rows. So a block of
queries and keys has a *mirror*, whose scores are the same memory, transposed, and the term of the keys is that of its queries.
"""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from .bands import Band, Packed, Reach

if TYPE_CHECKING:
    from .partition import Frame


class Mirror:
    """Some keys of a frame as queries of a frame of their own, whose keys are the queries."""

    def __init__(self, frame: Frame, keys: slice) -> None:
        spec = frame.spec
        self.call, self.num_sequences, self.num_heads = frame.call, frame.num_sequences, frame.num_heads
        self.keys, self.num_queries, self.num_keys = keys, keys.stop - keys.start, frame.num_queries
        self.first_position, self.shifts, self.extra = -(frame.first_position + keys.start), None, 0  # with this table none are
        self._frame: Frame = weakref.proxy(frame)  # which keeps its mirrors
        self.spec = spec._replace(
            first=-spec.last, last=-spec.first, window_left=spec.window_right, window_right=spec.window_left
        )
        self.pairs = frame.pairs[..., keys].mT

    def visible(self, queries: slice, keys: slice) -> tuple[int, int]:
        """Return the lowest and the highest relative position of visible pairs, as Frame.visible() does."""
        start = self.keys.start
        low, high = self._frame.visible(keys, slice(start + queries.start, start + queries.stop))
        return -high, -low


class MirroredBand:
    """A table of vectors that the keys of a frame are multiplied with, (tables, R, width), its last row first.

    Keys that are far for all queries are mirrors of their own: for them a key's product with an end row is enough.
    """

    def __init__(self, frame: Frame, table: torch.Tensor, scale: float) -> None:
        near = Reach(frame, table.shape[0], frame.num_queries).near
        borders = (0, near.start, near.stop, frame.num_keys)
        self.mirrors = [Mirror(frame, slice(start, stop)) for start, stop in pairwise(borders) if start < stop]
        self.bands = [Band(mirror, table, scale, f"rel_p2c {number}") for number, mirror in enumerate(self.mirrors)]

    def pack(self, keys: torch.Tensor) -> list[Packed]:
        """Put keys, (sequences, heads, keys, width), in panels."""
        return [band.pack(keys[:, :, mirror.keys]) for mirror, band in zip(self.mirrors, self.bands, strict=True)]

    def add_terms(self, packed: list[Packed]) -> None:
        """The frame's scores += scale * keys . table."""
        for band, keys in zip(self.bands, packed, strict=True):
            band.add_terms(keys)

    def add_gradients(self, packed: list[Packed], d_key: torch.Tensor | None, of_table: bool) -> None:
        """From the gradients in the frame's scores, add to d_key, (sequences, heads, keys, width), and, if of_table, to what
        add_gradient() will add to the gradient of the table."""
        for mirror, band, keys in zip(self.mirrors, self.bands, packed, strict=True):
            folded = band.fold(mirror.pairs)
            if of_table:
                band.collect(folded, keys)
            if d_key is not None:
                band.add_rows(d_key[:, :, mirror.keys], folded)

    def add_gradient(self, total: torch.Tensor) -> None:
        """total, the gradient of the table, its last row first, += what has been collected, once."""
        for band in self.bands:
            band.add_gradient(total)
