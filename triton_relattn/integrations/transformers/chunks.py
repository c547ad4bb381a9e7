"""Sequences cut into chunks, each of which is a batch entry."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from .heads import InPlace, first_position


def in_blocks(states: torch.Tensor, size: int) -> torch.Tensor:
    """Cut (B, N, ...) into (B * blocks, size, ...), with zeros after the end."""
    missing = -states.shape[1] % size
    return pad(states, (*(0, 0) * (states.dim() - 2), 0, missing)).unflatten(1, (-1, size)).flatten(0, 1)


def from_blocks(states: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """Join (B * blocks, size, ...) to (B, length, ...)."""
    return states.unflatten(0, (batch, -1)).flatten(1, 2)[:, :length]


class InChunks(InPlace):
    """Mixin: the stock forward computes chunks of queries, or blocks, with ``context_size`` keys each."""

    def keys_of_a_query(self: Any, keys: int) -> int:
        return min(keys, self.context_size)  # type: ignore[no-any-return]


class Chunks:
    """Queries in chunks that are counted from position 0, each with the keys of its own and of some chunks before it.

    A cache may have forgotten the first of these keys, and the first chunk may have begun before the first query.
    """

    def __init__(self, sizes: tuple[int, int] | None, cache: Any, layer: int, queries: int) -> None:
        """Call this before the cache is updated.

        sizes: length of a chunk, and number of chunks that are seen before a query's own; None: there is one chunk.
        """
        first = int(first_position(cache, layer))
        self.first_key = 0 if cache is None else cache.get_mask_sizes(queries, layer)[1]
        self.size, self.left = sizes or (first + queries, 0)
        self.queries, self.before = queries, first % self.size
        self.count = -(-(self.before + queries) // self.size)
        self.start = first - self.before - self.left * self.size
        self.seen = (self.left + 1) * self.size

    def of_keys(self, states: torch.Tensor) -> torch.Tensor:
        """Cut (B, H, Nk, D) into (B, chunks, H, seen, D), with zeros for keys that do not exist."""
        missing = self.first_key - self.start
        after = (self.left + self.count) * self.size - missing - states.shape[2]
        return pad(states, (0, 0, missing, after)).unfold(2, self.seen, self.size).permute(0, 2, 1, 4, 3)

    def of_queries(self, states: torch.Tensor) -> torch.Tensor:
        """Cut (B, H, Nq, D) into (B, chunks, H, size, D)."""
        after = self.count * self.size - self.before - self.queries
        return pad(states, (0, 0, self.before, after)).unflatten(2, (self.count, self.size)).transpose(1, 2)

    def joined(self, out: torch.Tensor) -> torch.Tensor:
        """Join (B * chunks, H, size, D) to (B, H, Nq, D)."""
        out = out.unflatten(0, (-1, self.count)).transpose(1, 2).flatten(2, 3)
        return out[:, :, self.before : self.before + self.queries]
