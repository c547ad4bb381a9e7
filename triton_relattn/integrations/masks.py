"""Lengths, windows and chunks in place of the masks (B, Nq, Nk) that libraries make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

QUERIES = 512
"""Queries of one call where chunks are short. A mask says which of them sees which of the keys that any of them sees."""


class ChunkedWindow:
    """Real keys, in a window or in chunks: what stands in place of a mask, in memory linear in the length.

    .. code-block:: text

        c = i // chunk                                           the chunk of the query at position i
        c * chunk - left <= j < (c + 1) * chunk + right          positions j of keys that it sees, if they are real

    lengths (B,) counts real keys, or real (B, Nk), bool, shows them; left and right -1: without end; chunk 1: a window; first:
    the position of the first query, counted as the keys' are; make: returns the mask of the library.
    """

    def __init__(
        self,
        lengths: torch.Tensor | None = None,
        real: torch.Tensor | None = None,
        *,
        left: int = -1,
        right: int = -1,
        chunk: int = 1,
        first: int = 0,
        make: Callable[[], Any] | None = None,
    ) -> None:
        self.make = make
        self.lengths, self.real = lengths, real
        self.left, self.right, self.chunk, self.first = left, right, chunk, first

    def dense(self) -> Any:
        """Return the mask that stock attention takes."""
        assert self.make is not None
        return self.make()

    @property
    def window(self) -> tuple[int, int]:
        """How far behind itself and ahead a query may see; -1: without end."""
        left, right = (-1 if reach < 0 else reach + self.chunk - 1 for reach in (self.left, self.right))
        return left, right

    def attend(
        self, operator: Callable[..., torch.Tensor], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Call operator once for a window, and for chunks once per part of the queries, with the keys that it sees."""
        outs = []
        for queries, keys in self._parts(query.shape[2], key.shape[2]):
            outs.append(
                operator(
                    query[:, :, queries],
                    key[:, :, keys],
                    value[:, :, keys],
                    window_size=self.window,
                    query_offset=self.first + queries.start - keys.start,
                    **self._masks(queries, keys, query.device),
                )
            )
        return torch.cat(outs, 2) if len(outs) > 1 else outs[0]

    def _parts(self, queries: int, keys: int) -> Iterator[tuple[slice, slice]]:
        """Queries, and the keys that any of them sees. Both as numbers of the tensors, whose first query is at first."""
        if self.chunk == 1:
            yield slice(0, queries), slice(0, keys)
            return
        endless = not (0 <= self.left < keys and 0 <= self.right < keys)
        # Of many queries that see all of the past, masks would have a number for all pairs: then a chunk a call, without.
        size = self.chunk if endless and queries > QUERIES else max(1, QUERIES // self.chunk) * self.chunk
        for start in range(-(self.first % self.chunk), queries, size):  # the first chunk may have begun before
            first, end = self.first + start, self.first + min(start + size, queries)
            end = -(-end // self.chunk) * self.chunk
            visible = slice(
                0 if self.left < 0 else max(0, first - self.left), keys if self.right < 0 else min(keys, end + self.right)
            )
            yield slice(max(0, start), min(start + size, queries)), visible

    def _masks(self, queries: slice, keys: slice, device: torch.device) -> dict[str, Any]:
        """The operator's masks for a part, but for the window."""
        masks: dict[str, Any] = {}
        if self.lengths is not None:
            masks["key_lengths"] = (self.lengths - keys.start).clamp(0, keys.stop - keys.start)
        elif self.real is not None:
            masks["attn_mask"] = self.real[:, None, None, keys]
        first, last = self.first + queries.start, self.first + queries.stop - 1
        if self.chunk > 1 and first // self.chunk < last // self.chunk:
            begin = torch.arange(first, last + 1, device=device)[:, None] // self.chunk * self.chunk
            position = torch.arange(keys.start, keys.stop, device=device)
            left, right = (last + keys.stop if reach < 0 else reach for reach in (self.left, self.right))
            visible = (position >= begin - left) & (position < begin + self.chunk + right)
            masks["attn_mask"] = masks.get("attn_mask", True) & visible
        return masks
