"""How blockwise.py cuts a call: chunks of heads, blocks of queries with the keys they see, bands of relative positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from .dropout import keep_mask, keep_scale
from .results import compute_dtype
from .spec import AttentionSpec, AttentionTensors, Sequence, sequences

BLOCK_QUERIES = 128
# Elements of a band buffer per thread: one to two megabytes, what a core keeps in its own cache.
BAND_ELEMENTS_PER_THREAD = 1 << 18

Folded = list[tuple[torch.Tensor, slice]]
"""Parts of a band (heads, M, columns), each with the table rows that its columns stand for."""


@dataclass(frozen=True)
class Chunk:
    """Some heads of one sequence whose band fits the working set, with keys, values and tables ready for matrix products."""

    tensors: AttentionTensors
    spec: AttentionSpec
    sequence: Sequence
    heads: slice
    key_heads: slice
    key: torch.Tensor  # (heads, keys, D)
    value: torch.Tensor  # (heads, keys, Dv)
    rel_key: torch.Tensor | None  # (heads, R, Dr)
    rel_value: torch.Tensor | None  # (heads, R, Dv)
    table: torch.Tensor | None  # (heads, R, Dr + 1): rel_key and rel_bias side by side, or the one that is there

    def blocks(self) -> Iterator[Block]:
        """The blocks of queries, leaving out those that see no key."""
        num_queries, num_keys = (part.stop - part.start for part in (self.sequence.queries, self.sequence.keys))
        left, right, offset = self.spec.window_left, self.spec.window_right, self.sequence.query_offset
        for start in range(0, num_queries, BLOCK_QUERIES):
            stop = min(start + BLOCK_QUERIES, num_queries)
            first_key = max(start + offset - left, 0) if left >= 0 else 0
            stop_key = min(stop + offset + right, num_keys) if right >= 0 else num_keys
            if first_key < stop_key:
                yield Block(self, slice(start, stop), slice(first_key, stop_key))


@dataclass(frozen=True)
class Block:
    """A block of a chunk's queries, and the keys those can see, both counted within the sequence."""

    chunk: Chunk
    queries: slice
    keys: slice

    @cached_property
    def num_queries(self) -> int:
        return self.queries.stop - self.queries.start

    @cached_property
    def num_keys(self) -> int:
        return self.keys.stop - self.keys.start

    @cached_property
    def query_rows(self) -> tuple[int, slice, slice]:
        """Where the queries lie in a (B, Hq, Nq, ...) tensor."""
        return self.chunk.sequence.entry, self.chunk.heads, shifted(self.queries, self.chunk.sequence.queries.start)

    @cached_property
    def key_rows(self) -> tuple[int, slice, slice]:
        """Where the keys lie in a (B, Hk, Nk, ...) tensor."""
        return self.chunk.sequence.entry, self.chunk.key_heads, shifted(self.keys, self.chunk.sequence.keys.start)

    @cached_property
    def width(self) -> int:
        """Columns of the band: relative positions that any of the queries has to any of the keys."""
        return self.num_keys + self.num_queries - 1

    @cached_property
    def first_position(self) -> int:
        """Relative position of the band's first column."""
        return self.keys.start - (self.queries.stop - 1) - self.chunk.sequence.query_offset

    def column(self, relative_position: int, limits: slice) -> int:
        """Band column of a relative position, limited to limits.start .. limits.stop."""
        return min(max(relative_position - self.first_position, limits.start), limits.stop)

    @cached_property
    def visible(self) -> slice:
        """Band columns that the window does not hide. Table rows of the others are not read."""
        left, right, everything = self.chunk.spec.window_left, self.chunk.spec.window_right, slice(0, self.width)
        start = self.column(-left, everything) if left >= 0 else 0
        return slice(start, self.column(right + 1, everything) if right >= 0 else self.width)

    @cached_property
    def parts(self) -> list[tuple[slice, slice | None]]:
        """Visible band columns with the table rows they use: one row each, one row for all, or None.

        In the middle each column has a row of its own. Beyond the table it is the end row with clamp, else None.
        """
        visible, spec = self.visible, self.chunk.spec
        start, stop = self.column(spec.first, visible), self.column(spec.last + 1, visible)
        row, last_row = start + self.first_position - spec.first, spec.last - spec.first
        parts = [
            (slice(visible.start, start), slice(0, 1) if spec.clamp else None),
            (slice(start, stop), slice(row, row + stop - start)),
            (slice(stop, visible.stop), slice(last_row, last_row + 1) if spec.clamp else None),
        ]
        return [(columns, rows) for columns, rows in parts if columns.start < columns.stop]

    @cached_property
    def query(self) -> torch.Tensor:
        """scale * q, (heads, M, D)."""
        return self.chunk.tensors.query[self.query_rows].to(self.chunk.key.dtype) * self.chunk.spec.scale

    @cached_property
    def rel_query(self) -> torch.Tensor:
        """rel_scale * p, (heads, M, Dr)."""
        tensors, spec = self.chunk.tensors, self.chunk.spec
        if tensors.rel_query is None and spec.rel_scale == spec.scale:
            return self.query
        rel_query = tensors.query if tensors.rel_query is None else tensors.rel_query
        return rel_query[self.query_rows].to(self.chunk.key.dtype) * spec.rel_scale

    @cached_property
    def ones(self) -> torch.Tensor:
        """What rel_bias is multiplied with, (heads, M, 1)."""
        return self.query.new_ones(*self.query.shape[:2], 1)

    @cached_property
    def table_query(self) -> torch.Tensor:
        """What the chunk's table is multiplied with."""
        if self.chunk.tensors.rel_bias is None:
            return self.rel_query
        return self.ones if self.chunk.rel_key is None else torch.cat((self.rel_query, self.ones), -1)

    @cached_property
    def attn_mask(self) -> torch.Tensor | None:
        """The block's part of the mask, three-dimensional; a size of 1 stays."""
        mask, sequence = self.chunk.tensors.attn_mask, self.chunk.sequence
        if mask is None:
            return None
        wanted = (slice(sequence.entry, sequence.entry + 1), self.chunk.heads, self.queries, self.keys)
        return mask[tuple(slice(0, 1) if size == 1 else part for size, part in zip(mask.shape, wanted, strict=True))][0]

    @cached_property
    def dropout(self) -> torch.Tensor | None:
        """What the probabilities are multiplied by, (heads, M, num_keys); None without dropout."""
        seed, dropout_p = self.chunk.tensors.dropout_seed, self.chunk.spec.dropout_p
        if seed is None:
            return None
        head, query = (torch.arange(part.start, part.stop, device=seed.device) for part in (self.chunk.heads, self.queries))
        sequence = torch.tensor(self.chunk.sequence.batch, device=seed.device)
        keep = keep_mask(seed, dropout_p, sequence, head[:, None, None], query[:, None], self.keys)
        return keep.to(self.chunk.key.dtype).mul_(keep_scale(dropout_p))

    def scores_view(self, band: torch.Tensor) -> torch.Tensor:
        """The (heads, num_queries, num_keys) view of a contiguous band in which element (m, n) is band[m, n - m + M - 1]."""
        heads, rows, width = band.shape
        return band.as_strided((heads, rows, self.num_keys), (rows * width, width - 1, 1), rows - 1)

    def hide(self, band: torch.Tensor, value: float) -> None:
        """Fill the columns that the window hides."""
        band[..., : self.visible.start] = value
        band[..., self.visible.stop :] = value

    def fold(self, band: torch.Tensor) -> Folded:
        """A band by table rows: columns that clamp to the same row are summed, those without a row left out.

        First zeroes what the scores view does not cover: the first M-1-m and the last m columns of row m.
        """
        corner = self.num_queries - 1
        m = torch.arange(self.num_queries, device=band.device)[:, None]
        c = torch.arange(corner, device=band.device)[None, :]
        before = c < corner - m
        band[..., :corner].masked_fill_(before, 0)
        band[..., self.num_keys :].masked_fill_(~before, 0)
        folded = ((band[..., columns], rows) for columns, rows in self.parts if rows is not None)
        return [(part if part.shape[-1] == rows.stop - rows.start else part.sum(-1, keepdim=True), rows) for part, rows in folded]


def shifted(part: slice, distance: int) -> slice:
    """The slice, distance further on."""
    return slice(part.start + distance, part.stop + distance)


def matmul_ready(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In dtype, with unit stride along the last dimension; a copy only where that is not so already."""
    tensor = tensor.to(dtype)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def stacked(table: torch.Tensor, name: str) -> torch.Tensor:
    """A table as (Hq, R, width), or (1, R, width) if the heads share it; rel_bias has width 1."""
    table = table[..., None] if name == "rel_bias" else table
    return table if table.dim() == 3 else table[None]


def of_heads(table: torch.Tensor, heads: slice) -> torch.Tensor:
    """The stacked tables of a range of heads: (1, R, width) if all share it."""
    return table if table.shape[0] == 1 else table[heads]


def head_ranges(num_heads: int, num_key_heads: int, size: int) -> Iterator[tuple[slice, slice]]:
    """All heads in ranges of at most size, with their key heads: one each, or one for all of the range."""
    group = max(num_heads // max(num_key_heads, 1), 1)
    span = num_heads if group == 1 else group
    for first in range(0, num_heads, max(span, 1)):
        for start in range(first, first + span, size):
            heads = slice(start, min(start + size, first + span))
            yield heads, heads if group == 1 else slice(first // group, first // group + 1)


def chunks(tensors: AttentionTensors, spec: AttentionSpec) -> Iterator[Chunk]:
    """All heads of all sequences."""
    dtype = compute_dtype(tensors.query.dtype)
    tables = [
        None if table is None else stacked(matmul_ready(table, dtype), name)
        for name, table in zip(AttentionTensors._fields[4:7], tensors[4:7], strict=True)
    ]
    for sequence in sequences(tensors, spec):
        num_queries, num_keys = (part.stop - part.start for part in (sequence.queries, sequence.keys))
        num_queries = min(num_queries, BLOCK_QUERIES)
        if spec.window_left >= 0 and spec.window_right >= 0:
            num_keys = min(num_keys, num_queries + spec.window_left + spec.window_right)
        size = torch.get_num_threads() * BAND_ELEMENTS_PER_THREAD // max(num_queries * (num_keys + BLOCK_QUERIES), 1)
        for heads, key_heads in head_ranges(tensors.query.shape[1], tensors.key.shape[1], max(size, 1)):
            shared = (heads.stop - heads.start, -1, -1)  # without a copy
            key, value = (
                matmul_ready(tensor[sequence.entry, key_heads, sequence.keys], dtype).expand(shared)
                for tensor in (tensors.key, tensors.value)
            )
            rel_key, rel_value, rel_bias = (None if t is None else of_heads(t, heads).expand(shared) for t in tables)
            table = rel_key if rel_bias is None else rel_bias
            if rel_key is not None and rel_bias is not None:
                table = torch.cat((rel_key, rel_bias), -1)
            yield Chunk(tensors, spec, sequence, heads, key_heads, key, value, rel_key, rel_value, table)
