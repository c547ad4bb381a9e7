"""How blockwise.py cuts a call: groups of sequences and heads, and blocks of their queries with the keys that those can see.

A block is a batch of matrices, one for each sequence and head, whose scores fit the working set: many short sequences, or some
queries of a few heads of a long one. The sequences of a group have as many queries and the same query_offset, so that relative
positions are the same in all its matrices; they may differ in the number of their keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch

from .bands import Band
from .dropout import keep_mask, keep_scale
from .results import compute_dtype
from .spec import AttentionSpec, AttentionTensors

BLOCK_QUERIES = 128
"""Queries of a block, unless the scores of more of them fit the working set: products with few rows are slow."""
ELEMENTS_PER_THREAD = 1 << 18
"""Scores of a block for each thread: a megabyte, about what a core keeps in its own cache."""


class Stack(NamedTuple):
    """Sequences that lie behind one another in the batch and have as many queries and the same query_offset."""

    first: int
    """Number of the first in the batch: what dropout and attn_mask know it by."""
    count: int
    num_queries: int
    num_keys: int
    """Keys of the longest."""
    lengths: list[int] | None
    """Keys of each; None: all have num_keys."""
    query_offset: int
    starts: tuple[int, int] | None
    """Where the queries and the keys of the first begin, if the batch is packed."""

    def part(self, start: int, stop: int) -> Stack:
        """The sequences from start to stop."""
        part = self._replace(first=self.first + start, count=stop - start)
        if self.lengths is not None:
            lengths = self.lengths[start:stop]
            part = part._replace(num_keys=max(lengths), lengths=lengths if min(lengths) < max(lengths) else None)
        if self.starts is not None:
            starts = (self.starts[0] + start * self.num_queries, self.starts[1] + start * self.num_keys)
            part = part._replace(starts=starts)
        return part

    def of_queries(self, tensor: torch.Tensor, heads: slice) -> torch.Tensor:
        """Their part of a (B, Hq, Nq, ...) tensor: (count, heads, num_queries, ...)."""
        return self._of(tensor, heads, self.num_queries, 0)

    def of_keys(self, tensor: torch.Tensor, heads: slice) -> torch.Tensor:
        """Their part of a (B, Hk, Nk, width) tensor: (count, heads, num_keys, width)."""
        return self._of(tensor, heads, self.num_keys, 1)

    def _of(self, tensor: torch.Tensor, heads: slice, length: int, which: int) -> torch.Tensor:
        if self.starts is None:
            return tensor[self.first : self.first + self.count, heads, :length]
        rows = slice(self.starts[which], self.starts[which] + self.count * length)
        return tensor[0, heads, rows].unflatten(1, (self.count, length)).transpose(0, 1)


def stacks(tensors: AttentionTensors, spec: AttentionSpec) -> Iterator[Stack]:
    """All sequences of the batch. Reads the tensors of lengths and offsets: waits for a GPU."""
    count, num_queries, num_keys = tensors.num_sequences, tensors.query.shape[2], tensors.key.shape[2]
    if tensors.cu_seqlens_q is not None and tensors.cu_seqlens_k is not None:
        starts = list(zip(tensors.cu_seqlens_q.tolist(), tensors.cu_seqlens_k.tolist(), strict=True))
        sizes = [(stop[0] - start[0], stop[1] - start[1]) for start, stop in zip(starts, starts[1:], strict=False)]
        offsets = [spec.query_offset] * count if tensors.query_offsets is None else tensors.query_offsets.tolist()
        first = 0
        for ((queries, keys), offset), alike in groupby(zip(sizes, offsets, strict=True)):
            stop = first + sum(1 for _ in alike)
            yield Stack(first, stop - first, queries, keys, None, offset, starts[first])
            first = stop
        return
    lengths = None if tensors.key_lengths is None else tensors.key_lengths.clamp(0, num_keys).tolist()
    whole = Stack(0, count, num_queries, num_keys, lengths, spec.query_offset, None)
    first = 0
    runs = [(spec.query_offset, count)] if tensors.query_offsets is None else [
        (offset, sum(1 for _ in alike)) for offset, alike in groupby(tensors.query_offsets.tolist())
    ]
    for offset, size in runs:
        if size:
            yield whole.part(first, first + size)._replace(query_offset=offset)
        first += size


class Call:
    """One call: its tensors, its tables as (1 or Hq, R, width) in the dtype that is computed in, and memory that its blocks share."""

    def __init__(self, tensors: AttentionTensors, spec: AttentionSpec) -> None:
        self.tensors, self.spec = tensors, spec
        self.dtype = compute_dtype(tensors.query.dtype)
        self.rel_key, self.rel_value, self.rel_bias = (
            None if table is None else stacked(table.to(self.dtype).contiguous(), name)
            for name, table in zip(AttentionTensors._fields[4:7], tensors[4:7], strict=True)
        )
        self._buffers: dict[str, torch.Tensor] = {}

    def buffer(self, name: str, *shape: int) -> torch.Tensor:
        """Memory of that name, which blocks use one after the other; holds anything."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            self._buffers[name] = buffer = self.tensors.query.new_empty(size, dtype=self.dtype)
        return buffer[:size].view(shape)

    def blocks(self) -> Iterator[Block]:
        """All queries of all sequences and heads."""
        for stack in stacks(self.tensors, self.spec):
            num_queries, num_heads = self._block_size(stack)
            for sequences, heads, key_heads in self._groups(stack, num_heads):
                group = Group(self, sequences, heads, key_heads)
                # From the end: with a causal mask the last queries see the most keys, and need the largest buffers.
                for start in reversed(range(0, stack.num_queries, max(num_queries, 1))):
                    yield Block(group, slice(start, min(start + num_queries, stack.num_queries)))

    def _block_size(self, stack: Stack) -> tuple[int, int]:
        """Queries of a block, and heads of all its sequences together."""
        num_keys, left, right = max(stack.num_keys, 1), self.spec.window_left, self.spec.window_right
        elements = torch.get_num_threads() * ELEMENTS_PER_THREAD
        num_matrices = min(stack.count * self.tensors.query.shape[1], torch.get_num_threads())
        num_queries = BLOCK_QUERIES
        if left < 0 and right < 0:
            num_queries = max(num_queries, elements // max(num_matrices * num_keys, 1))
        num_blocks = -(-stack.num_queries // num_queries)
        num_queries = -(-stack.num_queries // max(num_blocks, 1))
        if left >= 0 and right >= 0:
            num_keys = min(num_keys, num_queries + left + right)
        return num_queries, max(elements // max(num_queries * num_keys, 1), num_matrices)

    def _groups(self, stack: Stack, num_heads: int) -> Iterator[tuple[Stack, slice, slice]]:
        """The stack in parts of at most so many heads: several sequences, or one of them and heads that share a key or do not."""
        heads, key_heads = self.tensors.query.shape[1], self.tensors.key.shape[1]
        if heads == 0:
            return
        if num_heads >= heads:
            for part in evenly(stack.count, num_heads // heads):
                yield stack.part(part.start, part.stop), slice(0, heads), slice(0, key_heads)
            return
        group = heads // key_heads
        for number in range(stack.count):
            sequence = stack.part(number, number + 1)
            for keys in evenly(key_heads, max(num_heads // group, 1)):
                for part in evenly(group * (keys.stop - keys.start), max(num_heads, 1)):
                    yield sequence, slice(group * keys.start + part.start, group * keys.start + part.stop), keys


class Group:
    """Sequences and heads that are computed together, with keys and values ready for matrix products."""

    def __init__(self, call: Call, sequences: Stack, heads: slice, key_heads: slice) -> None:
        self.call, self.sequences, self.heads, self.key_heads = call, sequences, heads, key_heads
        self.num_heads = heads.stop - heads.start
        self.sharing = self.num_heads // (key_heads.stop - key_heads.start)
        """Heads that share one of the keys'."""
        self.key = self._visible(call.tensors.key)
        self.value = self._visible(call.tensors.value)

    def _visible(self, tensor: torch.Tensor) -> torch.Tensor:
        """Key or value as (matrices, keys, width); of sequences that are shorter than the longest, the rest is zero."""
        rows = self.sequences.of_keys(tensor, self.key_heads)
        padding = self.padding(slice(0, self.sequences.num_keys))
        return matrices(rows if padding is None else rows.masked_fill(padding.mT, 0), 1, self.call.dtype)

    def padding(self, keys: slice) -> torch.Tensor | None:
        """Which of some keys a sequence has not, (sequences, 1, 1, keys); None if all have the same."""
        lengths = self.sequences.lengths
        if lengths is None:
            return None
        device = self.call.tensors.key.device
        return torch.arange(keys.start, keys.stop, device=device) >= torch.tensor(lengths, device=device).view(-1, 1, 1, 1)


class Block:
    """Some queries of a group, and the keys that they can see.

    Its scores are (sequences * key heads, sharing * queries, keys) as matrices, and (sequences, heads, queries, keys) by pair.
    """

    def __init__(self, group: Group, queries: slice) -> None:
        sequences, spec = group.sequences, group.call.spec
        self.group, self.call, self.queries = group, group.call, queries
        self.position = queries.start + sequences.query_offset
        """Where the first query stands among the keys."""
        first, stop = 0, sequences.num_keys
        if spec.window_left >= 0:
            first = max(self.position - spec.window_left, 0)
        if spec.window_right >= 0:
            stop = min(self.position + self.num_queries + spec.window_right, stop)
        self.keys = slice(first, max(stop, first))
        self.key, self.value = group.key[:, self.keys], group.value[:, self.keys]

    @property
    def num_queries(self) -> int:
        return self.queries.stop - self.queries.start

    @property
    def num_keys(self) -> int:
        return self.keys.stop - self.keys.start

    @property
    def first_position(self) -> int:
        """Relative position of the first key as the first query sees it."""
        return self.keys.start - self.position

    def _band(self, name: str, one_panel: bool = False) -> Band | None:
        table = getattr(self.call, name)
        return None if table is None else Band(self, of_heads(table, self.group.heads).shape[0], one_panel)

    @cached_property
    def key_band(self) -> Band | None:
        return self._band("rel_key")

    @cached_property
    def value_band(self) -> Band | None:
        return self._band("rel_value")

    @cached_property
    def bias_band(self) -> Band | None:
        return self._band("rel_bias", one_panel=True)

    def table(self, name: str) -> torch.Tensor:
        return of_heads(getattr(self.call, name), self.group.heads)

    def destination(self, place: torch.Tensor) -> torch.Tensor:
        """Matrices to compute rows in: their own place if it is contiguous."""
        sequences, heads, queries, width = place.shape
        shape = (sequences * heads // self.group.sharing, self.group.sharing * queries, width)
        if place.dtype == self.call.dtype and place.is_contiguous():
            return place.view(shape)
        return place.new_empty(shape, dtype=self.call.dtype)

    def store(self, place: torch.Tensor, result: torch.Tensor) -> None:
        if place.data_ptr() != result.data_ptr():
            place.copy_(self.by_pair(result))

    def add_to_keys(self, total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float) -> None:
        """The keys' part of total += scale * left^T @ right."""
        place = self.group.sequences.of_keys(total, self.group.key_heads)[:, :, self.keys]
        if place.is_contiguous():
            place.flatten(0, 1).baddbmm_(left.mT, right, alpha=scale)
        else:
            place.add_(torch.bmm(left.mT, right).view(place.shape), alpha=scale)

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The queries' part of a (B, Hq, Nq, ...) tensor, (sequences, heads, queries, ...)."""
        return self.group.sequences.of_queries(tensor, self.group.heads)[:, :, self.queries]

    def matrices(self, tensor: torch.Tensor) -> torch.Tensor:
        """The queries' part of a (B, Hq, Nq, width) tensor for products with key or value."""
        return matrices(self.rows(tensor), self.group.sharing, self.call.dtype)

    def by_pair(self, scores: torch.Tensor) -> torch.Tensor:
        """A view of matrices by sequence, head, query, and key or column."""
        return scores.view(self.group.sequences.count, self.group.num_heads, self.num_queries, scores.shape[-1])

    def hide(self, scores: torch.Tensor) -> None:
        """Make what no mask of numbers says about hidden pairs -inf; scores are by pair."""
        spec, first = self.call.spec, self.first_position
        if spec.window_left >= 0:  # key n is hidden from query m where first + n - m < -left
            stop = self.num_queries - 1 - spec.window_left - first
            if stop > 0:
                hidden = scores.new_ones(self.num_queries, min(stop, self.num_keys), dtype=torch.bool)
                scores[..., :stop].masked_fill_(hidden.tril_(-1 - spec.window_left - first), -math.inf)
        if spec.window_right >= 0:  # where first + n - m > right
            start = max(spec.window_right + 1 - first, 0)
            if start < self.num_keys:
                hidden = scores.new_ones(self.num_queries, self.num_keys - start, dtype=torch.bool)
                scores[..., start:].masked_fill_(hidden.triu_(spec.window_right + 1 - first - start), -math.inf)
        padding = self.group.padding(self.keys)
        if padding is not None:
            scores.masked_fill_(padding, -math.inf)

    @property
    def has_blind(self) -> bool:
        """Whether a query may see none of the keys."""
        left, right, first = self.call.spec.window_left, self.call.spec.window_right, self.first_position
        if self.call.tensors.attn_mask is not None or self.group.sequences.lengths is not None:
            return True
        return (right >= 0 and first > right) or (left >= 0 and first + self.num_keys - self.num_queries < -left)

    @property
    def attn_mask(self) -> torch.Tensor | None:
        """The block's part of the mask by pair; a size of 1 stays."""
        mask, sequences = self.call.tensors.attn_mask, self.group.sequences
        if mask is None:
            return None
        wanted = (slice(sequences.first, sequences.first + sequences.count), self.group.heads, self.queries, self.keys)
        return mask[tuple(slice(0, 1) if size == 1 else part for size, part in zip(mask.shape, wanted, strict=True))]

    @cached_property
    def dropout(self) -> torch.Tensor | None:
        """What the probabilities are multiplied by, as matrices; None without dropout."""
        seed, dropout_p, sequences = self.call.tensors.dropout_seed, self.call.spec.dropout_p, self.group.sequences
        if seed is None:
            return None
        parts = (slice(sequences.first, sequences.first + sequences.count), self.group.heads, self.queries)
        sequence, head, query = (torch.arange(part.start, part.stop, device=seed.device) for part in parts)
        keep = keep_mask(seed, dropout_p, sequence[:, None, None, None], head[:, None, None], query[:, None], self.keys)
        return matrices(keep, self.group.sharing, self.call.dtype).mul_(keep_scale(dropout_p))


def evenly(count: int, most: int) -> Iterator[slice]:
    """0 .. count in slices of about the same size, at most the given one."""
    num_parts = -(-count // most)
    for part in range(num_parts):
        yield slice(part * count // num_parts, (part + 1) * count // num_parts)


def stacked(table: torch.Tensor, name: str) -> torch.Tensor:
    """A table as (Hq, R, width), or (1, R, width) if the heads share it; rel_bias has width 1."""
    table = table[..., None] if name == "rel_bias" else table
    return table if table.dim() == 3 else table[None]


def of_heads(table: torch.Tensor, heads: slice) -> torch.Tensor:
    """The stacked tables of a range of heads: (1, R, width) if all share it."""
    return table if table.shape[0] == 1 else table[heads]


def matrices(rows: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """(sequences, heads, rows, width) as (sequences * heads / group, group * rows, width): matrices of heads that share a key."""
    sequences, heads, length, width = rows.shape
    rows = rows.to(dtype).reshape(sequences * heads // group, group * length, width)
    return rows if rows.stride(2) == 1 else rows.contiguous()
