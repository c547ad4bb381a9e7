"""The sequences of a call that are computed together: those that are alike, and short ones padded to the same length.

Where sequences have lengths or a query_offset of their own, a block of each would take as long as its start. So they are put in
*stacks*, and padded, as long as that costs less than blocks of their own. Sequences of a packed batch are sorted by length, and
those of a stack gathered; others stay in their order, as views. A query_offset that is less than the largest of its stack is a
*shift*: positions of all pairs are that much higher (bands.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch

from .._core.spec import AttentionSpec, AttentionTensors
from .frame import Member

BLOCK_COST = 1 << 13
"""How many scores take as long as the start of a block: sequences that differ are padded to one length rather than that."""
QUERIES_PER_KEY = 2
"""How many scores take as long as to read a key and a value."""
COLUMNS_PER_SCORE = 8
"""How many columns of a band take as long as a score."""


class Stack(NamedTuple):
    """Sequences that are computed together, padded to the length of the longest.

    If their numbers of queries or their query_offsets differ, no block has only some of their queries, and no table row is
    between those that they need: a block reads all rows from the first to the last.
    """

    batch: range | list[int]
    """Indices of the sequences in the batch, by which dropout and attn_mask know them; a range unless the batch is packed."""
    num_queries: int
    """Number of queries of the longest sequence."""
    num_keys: int
    """Number of keys of the longest sequence, or of those up to the last that is seen."""
    query_offset: int
    """The largest query_offset."""
    keys: list[tuple[int, int]] | None = None
    """First and stop of the keys of each sequence that its queries may see; None: all have num_keys."""
    queries: list[int] | None = None
    """Number of queries of each sequence; None: all have num_queries."""
    shifts: list[int] | None = None
    """By how much the query_offset of each sequence is less than the largest; None: it is not."""
    starts: list[tuple[int, int]] | None = None
    """The first query and the first key of each sequence, if the batch is packed."""
    origin: tuple[int, ...] = (0, 0, 0, 0)
    """By how much dropout counts sequences, heads, queries and keys from others than the first."""

    @property
    def is_mixed(self) -> bool:
        """Whether numbers of queries or query_offsets differ."""
        return self.queries is not None or self.shifts is not None

    @property
    def extra(self) -> int:
        """Number of relative positions that a query and the keys have together beyond those of one sequence."""
        return 0 if self.shifts is None else max(self.shifts)

    def part(self, sequences: slice) -> Stack:
        """Return some of the sequences."""
        if self.keys is None and sequences == slice(0, len(self.batch)):
            return self
        part = self._replace(batch=self.batch[sequences], starts=None if self.starts is None else self.starts[sequences])
        if self.keys is not None:
            keys = self.keys[sequences]
            longest = max((stop for _, stop in keys), default=0)
            part = part._replace(num_keys=longest, keys=keys if len(keys) > 1 and set(keys) != {(0, longest)} else None)
        if self.queries is not None:
            queries = self.queries[sequences]
            part = part._replace(num_queries=max(queries), queries=queries if min(queries) < max(queries) else None)
        if self.shifts is not None:
            shifts = self.shifts[sequences]
            least, differ = min(shifts), min(shifts) < max(shifts)
            shifts = [shift - least for shift in shifts]
            part = part._replace(query_offset=self.query_offset - least, shifts=shifts if differ else None)
        return part


class Places:
    """Where the queries of a stack, or its keys, are in the call's tensors."""

    def __init__(self, sequences: Stack, which: int, size: int, device: torch.device) -> None:
        """which: 0 for queries, 1 for keys; size: number of them in a tensor."""
        self.batch, self.length = sequences.batch, sequences.num_keys if which else sequences.num_queries
        self.start: int | None = None
        self._numbers: dict[tuple[int, ...], torch.Tensor] = {}
        self.index: torch.Tensor | None = None
        """(sequences, length): where each is in a packed batch; None: they are a view."""
        self.exists: torch.Tensor | None = None
        """(sequences, length): whether a sequence has as many, and keys are seen; None: all are."""
        parts = sequences.keys
        if not which:
            parts = None if sequences.queries is None else [(0, count) for count in sequences.queries]
        if parts is None and sequences.starts is None:
            return
        places = torch.arange(self.length, device=device)
        if parts is not None:
            bounds = torch.tensor(parts, device=device)
            self.exists = (places >= bounds[:, :1]) & (places < bounds[:, 1:])
        if sequences.starts is not None:
            first = [start[which] for start in sequences.starts]
            if parts is None and all(start == first[0] + number * self.length for number, start in enumerate(first)):
                self.start = first[0]
            else:
                self.index = (torch.tensor(first, device=device)[:, None] + places).clamp_(max=size - 1)

    def rows(self, tensor: torch.Tensor, heads: slice, rows: slice) -> torch.Tensor:
        """Return the rows in a (B, H, N, ...) tensor, (sequences, heads, rows, ...): a view, or else a copy, in which rows that
        do not exist are those of any others.
        """
        if self.index is not None:
            flat, steps = by_row(tensor[0])
            index = self._numbers_of(heads, rows, *steps)
            return flat.index_select(0, index.flatten()).view(*index.shape, tensor.shape[-1])
        if self.start is None:
            assert isinstance(self.batch, range)
            return cut(tensor, self.batch, heads, rows)
        count = len(self.batch)
        of_all = cut(tensor[0], heads, slice(self.start, self.start + count * self.length))
        return of_all.unflatten(1, (count, self.length)).transpose(0, 1)[:, :, rows]

    def put(self, tensor: torch.Tensor, heads: slice, rows: slice, values: torch.Tensor) -> None:
        """Write to the places of which rows() has returned a copy."""
        assert self.index is not None
        flat, steps = by_row(tensor[0])
        index, values = self._numbers_of(heads, rows, *steps).flatten(), values.reshape(-1, values.shape[-1])
        if self.exists is not None:
            exist = self.exists[:, None, rows].expand(-1, heads.stop - heads.start, -1).flatten().nonzero()[:, 0]
            index, values = index.index_select(0, exist), values.index_select(0, exist)
        flat.index_copy_(0, index, values.to(flat.dtype))
        if flat.data_ptr() != tensor.data_ptr():
            tensor[0].copy_(flat.view(*tensor.shape[1:]))

    def _numbers_of(self, heads: slice, rows: slice, step_of_heads: int, step: int) -> torch.Tensor:
        """Return numbers of rows, (sequences, heads, rows), if they are this far apart."""
        kind = (heads.start, heads.stop, rows.start, rows.stop, step_of_heads, step)
        if kind not in self._numbers:
            assert self.index is not None
            of_heads = torch.arange(heads.start, heads.stop, device=self.index.device) * step_of_heads
            self._numbers[kind] = self.index[:, None, rows] * step + of_heads[:, None]
        return self._numbers[kind]

    def missing(self, num_heads: int, rows: slice) -> torch.Tensor | None:
        """Return the numbers of the rows that do not exist among those of so many heads; None if all exist."""
        if self.exists is None:
            return None
        exists = self.exists[:, None, rows]
        return (~exists).expand(-1, num_heads, -1).flatten().nonzero()[:, 0]


def stacks(tensors: AttentionTensors, spec: AttentionSpec, most: int) -> Iterator[Stack]:
    """Yield all sequences of the batch. This reads the tensors of lengths and offsets, and so waits for a GPU.

    Args:
        most: number of queries of a block; longer sequences are not padded.
    """
    batch, num_queries, num_keys = range(tensors.num_sequences), tensors.query.shape[2], tensors.key.shape[2]
    lengths = None if tensors.key_lengths is None else tensors.key_lengths.clamp(0, num_keys).tolist()
    if tensors.query_offsets is None and tensors.cu_seqlens_q is None and tensors.dropout_origins is None:
        keys = None if lengths is None else [(0, length) for length in lengths]
        yield Stack(batch, num_queries, num_keys, spec.query_offset, keys).part(slice(0, len(batch)))
        return
    offsets = [spec.query_offset] * len(batch) if tensors.query_offsets is None else tensors.query_offsets.tolist()
    origins: list[tuple[int, ...]] = [(0, 0, 0, 0)] * len(batch)
    if tensors.dropout_origins is not None:
        of_first_heads = tensors.dropout_origins[:, :1].sum(1).tolist()  # zeros if there are no heads
        origins = [(sequence - number, *others) for number, (sequence, *others) in enumerate(of_first_heads)]
    starts: list[Any] = [None] * len(batch)
    counts, lengths = [num_queries] * len(batch), lengths or [num_keys] * len(batch)
    is_packed = tensors.cu_seqlens_q is not None and tensors.cu_seqlens_k is not None
    if is_packed:
        ends = [tensors.cu_seqlens_q.tolist(), tensors.cu_seqlens_k.tolist()]  # type: ignore[union-attr]
        starts = list(zip(*ends, strict=True))[:-1]
        counts, lengths = ([stop - start for start, stop in pairwise(each)] for each in ends)
    sequences = []  # each as a stack of its own, with the keys that its queries see
    left, right = spec.window_left, spec.window_right
    for number, (origin, offset, length, count, start) in enumerate(zip(origins, offsets, lengths, counts, starts, strict=True)):
        batch = range(number, number + 1)
        first = max(offset - left, 0) if left >= 0 else 0
        stop = min(offset + count + right, length) if right >= 0 else length
        seen = (first, stop) if first < stop and count > 0 else (0, 0)
        of_one = Stack(batch, count, length, offset, [seen], starts=[start] if is_packed else None, origin=origin)
        sequences.append(of_one)
    if is_packed:
        sequences.sort(key=kind_of)
    yield from together(sequences, tensors, spec, most)


def kind_of(sequence: Stack) -> tuple[Any, ...]:
    """Return what two sequences have in common if they are computed alike."""
    return sequence.origin, sequence.query_offset, sequence.num_keys, sequence.num_queries


def together(sequences: list[Stack], tensors: AttentionTensors, spec: AttentionSpec, most: int) -> Iterator[Stack]:
    """Yield successive sequences in stacks: as many as, padded, take no more time than in blocks of their own."""
    heads, left, right = tensors.query.shape[1], spec.window_left, spec.window_right
    found: list[Stack] = []
    queries = first = stop = low = high = least = largest = cost = 0  # of found
    for _, run in groupby(sequences, kind_of):
        alike = list(run)
        one, num_found = alike[0], len(found) + len(alike)
        ((first_key, stop_key),) = one.keys or [(0, 0)]
        lowest, highest = first_key - one.query_offset - one.num_queries + 1, stop_key - 1 - one.query_offset
        lowest, highest = max(lowest, -left) if left >= 0 else lowest, min(highest, right) if right >= 0 else highest
        sees = first_key < stop_key
        alone = heads * (one.num_queries + QUERIES_PER_KEY) * (stop_key - first_key) * len(alike) + BLOCK_COST
        longest, start, end = max(queries, one.num_queries), min(first, first_key), max(stop, stop_key)
        nearest, farthest = min(least, one.query_offset), max(largest, one.query_offset)
        of_each = (longest + QUERIES_PER_KEY) * (end - start) + longest * (farthest - nearest) // COLUMNS_PER_SCORE
        of_all = heads * of_each * num_found + BLOCK_COST
        if (
            found
            and one.origin == found[0].origin
            and longest <= most
            and of_all <= cost + alone
            and (tensors.rel_p2c is None or nearest == farthest)
            and (not sees or low > high or (lowest <= high + 1 and highest >= low - 1))
        ):
            found += alike
            queries, first, stop, least, largest, cost = longest, start, end, nearest, farthest, of_all
            if sees:
                low, high = (lowest, highest) if low > high else (min(low, lowest), max(high, highest))
            continue
        if found:
            yield stack_of(found)
        found, queries, first, stop, cost = alike, one.num_queries, first_key, stop_key, alone
        low, high = (lowest, highest) if sees else (0, -1)
        least = largest = one.query_offset
    if found:
        yield stack_of(found)


def stack_of(sequences: list[Stack]) -> Stack:
    """Return sequences as one stack."""
    first, count = sequences[0], len(sequences)
    stack = first._replace(keys=None)
    if count == 1:
        return stack
    if first.starts is None:
        stack = stack._replace(batch=range(first.batch[0], sequences[-1].batch[0] + 1))
    else:
        starts = [start for each in sequences for start in each.starts or []]
        stack = stack._replace(batch=[each.batch[0] for each in sequences], starts=starts)
    if all(kind_of(each) == kind_of(first) for each in sequences):
        return stack
    offset, queries = max(each.query_offset for each in sequences), [each.num_queries for each in sequences]
    shifts = [offset - each.query_offset for each in sequences]
    keys = [seen for each in sequences for seen in each.keys or []]
    if not any(shifts) and min(queries) == max(queries):
        keys = [(0, each.num_keys) for each in sequences]
    return stack._replace(query_offset=offset, keys=keys, queries=queries, shifts=shifts).part(slice(0, count))


def members(stack: Stack, first_key: int) -> set[Member]:
    """Return what differs among sequences: their queries, the keys that they see, counted from first_key, and their shift."""
    count = len(stack.batch)
    keys, shifts = stack.keys or [(0, stack.num_keys)] * count, stack.shifts or [0] * count
    each = zip(stack.queries or [stack.num_queries] * count, keys, shifts, strict=True)
    return {(0, queries, first - first_key, stop - first_key, shift) for queries, (first, stop), shift in each}


def cut(tensor: torch.Tensor, *ranges: slice | range) -> torch.Tensor:
    """Return the part of a tensor that lies in ranges of its first dimensions."""
    for dim, (rows, size) in enumerate(zip(ranges, tensor.shape, strict=False)):
        if rows.stop - rows.start != size:
            tensor = tensor.narrow(dim, rows.start, rows.stop - rows.start)
    return tensor


def by_row(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
    """Return a (H, N, width) tensor as a matrix of rows of its memory, and how many of these lie from head to head and from row
    to row. It is a view, or a copy if the tensor's rows are not such rows.
    """
    heads, length, width = tensor.shape
    step_of_heads, step, one = tensor.stride()
    if (one != 1 and width > 1) or step_of_heads % max(width, 1) or step % max(width, 1) or tensor.numel() == 0:
        return tensor.reshape(heads * length, width), (length, 1)
    steps = step_of_heads // width, step // width
    return tensor.as_strided((1 + (heads - 1) * steps[0] + (length - 1) * steps[1], width), (width, 1)), steps
