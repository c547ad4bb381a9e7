"""Which positions of a sequence each rank has, and what a call is for some queries of one rank and some keys of another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


class Meeting(NamedTuple):
    """Some queries of a rank, and some keys that may be another's."""

    queries: Piece
    keys: Piece

    def is_visible(self, tensors: AttentionTensors, spec: AttentionSpec) -> bool:
        """Whether any of the queries may see any of the keys, as far as that is known without reading tensors."""
        queries, keys = self.queries.positions, self.keys.positions
        if not queries or not keys:
            return False
        lowest, highest = keys[0] - queries[-1], keys[-1] - queries[0]
        starts_q, starts_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
        if starts_q is not None and starts_k is not None:
            if starts_q.data_ptr() != starts_k.data_ptr():
                return True
            # Alike, so that positions differ in the pack as they do in their sequence.
            if lowest >= spec.max_seqlen_k or highest <= -spec.max_seqlen_q:
                return False
        if tensors.query_offsets is not None:
            return True
        left, right = spec.window_left, spec.window_right
        return not (0 <= left < spec.query_offset - highest or 0 <= right < lowest - spec.query_offset)

    def call(
        self, tensors: AttentionTensors, spec: AttentionSpec, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[AttentionTensors, AttentionSpec]:
        """Return the call for these queries and keys.

        Args:
            tensors: of the rank that has the queries. attn_mask has its queries and the keys of all; lengths, offsets and starts
                are those of the whole call.
            key, value: those of the rank that has the keys.
        """
        queries, keys = self.queries.positions, self.keys.positions
        between = queries.start - keys.start
        offsets, mask = tensors.query_offsets, tensors.attn_mask
        parts = AttentionTensors(
            query=self.queries.of(tensors.query),
            key=self.keys.of(key),
            value=self.keys.of(value),
            rel_query=None if tensors.rel_query is None else self.queries.of(tensors.rel_query),
            rel_key=tensors.rel_key,
            rel_value=tensors.rel_value,
            rel_bias=tensors.rel_bias,
            rel_p2c=tensors.rel_p2c,
            dropout_seed=tensors.dropout_seed,
        )
        spec = spec._replace(max_seqlen_q=min(spec.max_seqlen_q, len(queries)), max_seqlen_k=min(spec.max_seqlen_k, len(keys)))
        if tensors.cu_seqlens_q is None or tensors.cu_seqlens_k is None:
            if mask is not None and mask.shape[2] > 1:
                mask = self.queries.of(mask)
            if mask is not None and mask.shape[3] > 1:
                mask = mask.narrow(3, keys.start, len(keys))
            lengths = tensors.key_lengths
            parts = parts._replace(
                attn_mask=mask,
                key_lengths=None if lengths is None else (lengths - keys.start).clamp(0, len(keys)),
                query_offsets=None if offsets is None else offsets + between,
            )
            spec = spec._replace(query_offset=spec.query_offset + between if offsets is None else 0)
            first_query, first_key = (torch.full((), each.start, device=key.device) for each in (queries, keys))
        else:
            starts_q, starts_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
            # A sequence that starts before the piece is entered in its middle, at piece.start - start.
            first_query, first_key = (
                (piece.start - starts[:-1]).clamp_min(0).minimum(starts.diff())
                for piece, starts in ((queries, starts_q), (keys, starts_k))
            )
            parts = parts._replace(
                query_offsets=(spec.query_offset if offsets is None else offsets) + first_query - first_key,
                cu_seqlens_q=starts_q.clamp(queries.start, queries.stop) - queries.start,
                cu_seqlens_k=starts_k.clamp(keys.start, keys.stop) - keys.start,
            )
            spec = spec._replace(query_offset=0)
        if tensors.dropout_origins is not None:
            firsts = torch.nn.functional.pad(torch.stack((first_query, first_key), -1), (2, 0))
            parts = parts._replace(dropout_origins=tensors.dropout_origins + firsts.unsqueeze(-2))
        return parts, spec


def meetings(
    tensors: AttentionTensors, spec: AttentionSpec, queries: Sequence[Piece], keys: Sequence[Piece]
) -> Iterator[Meeting]:
    """The pairs of pieces in which some query may see some key."""
    for of_queries in queries:
        for of_keys in keys:
            meeting = Meeting(of_queries, of_keys)
            if meeting.is_visible(tensors, spec):
                yield meeting
