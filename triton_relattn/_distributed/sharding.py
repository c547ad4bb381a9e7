"""Which positions of a sequence each rank has, and what a call is for some of its queries."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from .._core.spec import AttentionSpec, AttentionTensors

LAYOUTS = ("contiguous", "zigzag")


class Piece(NamedTuple):
    """Successive positions that a rank has."""

    row: int
    """The first of them among all that the rank has."""
    positions: range

    def of(self, tensor: torch.Tensor, dim: int = 2) -> torch.Tensor:
        """Return the piece's rows of what the rank has."""
        return tensor if tensor.shape[dim] == len(self.positions) else tensor.narrow(dim, self.row, len(self.positions))


class Sharding(NamedTuple):
    """The pieces that each rank has, in the order in which it has them."""

    pieces: tuple[tuple[Piece, ...], ...]

    @staticmethod
    def of(layout: str, sizes: Sequence[int]) -> Sharding:
        """Return the sharding of a sequence of which the ranks have so many positions.

        "contiguous": one piece of any size each, in the order of the ranks. "zigzag": of 2 * ranks pieces, as equal as can be,
        rank r has number r and number 2 * ranks - 1 - r; with a causal mask all ranks then have as much to compute.

        Raises:
            ValueError: an unknown layout, or sizes that it does not have.
        """
        if layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
        if layout == "contiguous":
            stops = list(accumulate(sizes))
            return Sharding(tuple((Piece(0, range(stop - size, stop)),) for size, stop in zip(sizes, stops, strict=True)))
        found, total = zigzag(sum(sizes), len(sizes)), sum(sizes)
        expected = [sum(len(piece.positions) for piece in pieces) for pieces in found]
        if list(sizes) != expected:
            raise ValueError(f"in a zigzag, the ranks have {expected} of {total} positions, got {list(sizes)}")
        return Sharding(tuple(found))

    @property
    def total(self) -> int:
        """Positions of all ranks."""
        return sum(map(self.size, range(len(self.pieces))))

    def size(self, rank: int) -> int:
        """Positions of a rank."""
        return sum(len(piece.positions) for piece in self.pieces[rank])

    def in_order(self) -> list[tuple[int, Piece]]:
        """All pieces with their ranks, in the order of their positions."""
        every = [(rank, piece) for rank, pieces in enumerate(self.pieces) for piece in pieces]
        return sorted(every, key=lambda each: each[1].positions.start)


def zigzag(total: int, ranks: int) -> list[tuple[Piece, Piece]]:
    """The two pieces of each rank."""
    starts = [number * total // (2 * ranks) for number in range(2 * ranks + 1)]
    parts = [range(start, stop) for start, stop in pairwise(starts)]
    return [(Piece(0, parts[rank]), Piece(len(parts[rank]), parts[-1 - rank])) for rank in range(ranks)]


def visible_keys(tensors: AttentionTensors, spec: AttentionSpec, queries: range) -> range:
    """Return the keys, of all of a call, that any of these queries may see, as far as that is known without reading tensors."""
    first, stop = 0, tensors.key.shape[2]
    starts_q, starts_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    if starts_q is not None and starts_k is not None and starts_q.data_ptr() == starts_k.data_ptr():
        # Alike, so that positions differ in the pack as they do in their sequence.
        first, stop = queries.start - spec.max_seqlen_q + 1, min(stop, queries.stop - 1 + spec.max_seqlen_k)
    if tensors.query_offsets is None and starts_q is None:
        if spec.window_left >= 0:
            first = queries.start + spec.query_offset - spec.window_left
        if spec.window_right >= 0:
            stop = min(stop, queries.stop + spec.query_offset + spec.window_right)
    first = min(max(first, 0), tensors.key.shape[2])
    return range(first, max(first, stop))


def call_of_piece(tensors: AttentionTensors, spec: AttentionSpec, piece: Piece) -> tuple[AttentionTensors, AttentionSpec]:
    """Return the call of some of a rank's queries.

    tensors: of the rank that has the queries, but keys and values are those of all ranks, and lengths, offsets and starts those
    of the whole call. attn_mask has the rank's queries and all keys.
    """
    queries = piece.positions
    keys = visible_keys(tensors, spec, queries)
    between = queries.start - keys.start
    offsets, mask = tensors.query_offsets, tensors.attn_mask
    own = tensors._replace(
        query=piece.of(tensors.query),
        key=tensors.key.narrow(2, keys.start, len(keys)),
        value=tensors.value.narrow(2, keys.start, len(keys)),
        rel_query=None if tensors.rel_query is None else piece.of(tensors.rel_query),
    )
    spec = spec._replace(max_seqlen_q=min(spec.max_seqlen_q, len(queries)), max_seqlen_k=min(spec.max_seqlen_k, len(keys)))
    if tensors.cu_seqlens_q is None or tensors.cu_seqlens_k is None:
        if mask is not None and mask.shape[2] > 1:
            mask = piece.of(mask)
        if mask is not None and mask.shape[3] > 1:
            mask = mask.narrow(3, keys.start, len(keys))
        lengths = tensors.key_lengths
        own = own._replace(
            attn_mask=mask,
            key_lengths=None if lengths is None else (lengths - keys.start).clamp(0, len(keys)),
            query_offsets=None if offsets is None else offsets + between,
        )
        spec = spec._replace(query_offset=spec.query_offset + between if offsets is None else 0)
        first_query, first_key = (torch.full((), each.start, device=own.key.device) for each in (queries, keys))
    else:
        starts_q, starts_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
        # A sequence that starts before the piece is entered in its middle, at range.start - start.
        first_query, first_key = (
            (each.start - starts[:-1]).clamp_min(0).minimum(starts.diff())
            for each, starts in ((queries, starts_q), (keys, starts_k))
        )
        own = own._replace(
            query_offsets=(spec.query_offset if offsets is None else offsets) + first_query - first_key,
            cu_seqlens_q=starts_q.clamp(queries.start, queries.stop) - queries.start,
            cu_seqlens_k=starts_k.clamp(keys.start, keys.stop) - keys.start,
        )
        spec = spec._replace(query_offset=0)
    if tensors.dropout_origins is not None:
        firsts = torch.nn.functional.pad(torch.stack((first_query, first_key), -1), (2, 0))
        own = own._replace(dropout_origins=tensors.dropout_origins + firsts.unsqueeze(-2))
    return own, spec
