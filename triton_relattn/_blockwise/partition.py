"""The cut of a call for attention.py: groups of sequences and heads, and blocks of their queries with the keys that these see.

A block is a batch of matrices, one for each sequence and head, whose scores fit the working set: many short sequences, or some
queries of a few heads of a long one. The sequences of a group have the same number of queries and the same query_offset, so that
relative positions are the same in all its matrices. Their numbers of keys may differ.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch

from .._core.dropout import keep_mask, keep_scale
from .._core.dtypes import compute_dtype
from .._core.spec import TABLES, AttentionSpec, AttentionTensors
from .bands import Band, Bias
from .mirror import MirroredBand

BLOCK_QUERIES = 128
"""Queries of a block, or more if their scores fit the working set: products with few rows are slow."""
FEWEST_QUERIES = 32
"""Queries of a block whose window is shorter."""
ELEMENTS_PER_THREAD = 1 << 19
"""Scores of a block for each thread, two megabytes. A megabyte, as much as each of two cores had for itself beside 32 that they
shared, took 10 to 25 % longer at lengths from 700 to 2,048: to start the steps of a block takes time, too."""
FEWEST_THREADS = 2
"""Threads whose scores a block may have in any case. With more threads its scores take no more memory than the call's tensors and
their gradients: 64 threads would have all scores at once up to a length of 2,000."""
THREADS_ELSEWHERE = 64
"""Threads that a device other than a CPU counts as: the time of its steps is that of starting them, unless they are large."""


class Stack(NamedTuple):
    """Successive sequences of the batch with the same number of queries and the same query_offset."""

    batch: range
    """Indices of the sequences in the batch, by which dropout and attn_mask know them."""
    num_queries: int
    num_keys: int
    """Number of keys of the longest sequence."""
    query_offset: int
    lengths: list[int] | None = None
    """Number of keys of each sequence; None: all have num_keys."""
    starts: tuple[int, int] | None = None
    """The first query and the first key of the first sequence, if the batch is packed."""
    origin: tuple[int, int, int] = (0, 0, 0)
    """Head, query and key that dropout counts the first ones as."""

    def part(self, sequences: slice) -> Stack:
        """Return some of the sequences."""
        if self.lengths is None and sequences == slice(0, len(self.batch)):
            return self
        part = self._replace(batch=self.batch[sequences])
        if self.lengths is not None:
            lengths = self.lengths[sequences]
            longest = max(lengths, default=0)
            part = part._replace(num_keys=longest, lengths=None if min(lengths, default=0) == longest else lengths)
        if self.starts is not None:
            start_q, start_k = self.starts
            part = part._replace(starts=(start_q + sequences.start * self.num_queries, start_k + sequences.start * self.num_keys))
        return part

    def of_queries(self, tensor: torch.Tensor, heads: slice, queries: slice) -> torch.Tensor:
        """Return the sequences' part of a (B, Hq, Nq, ...) tensor: (sequences, heads, queries, ...)."""
        return self._of(tensor, heads, queries, self.num_queries, 0)

    def of_keys(self, tensor: torch.Tensor, heads: slice, keys: slice) -> torch.Tensor:
        """Return the sequences' part of a (B, Hk, Nk, width) tensor: (sequences, heads, keys, width)."""
        return self._of(tensor, heads, keys, self.num_keys, 1)

    def _of(self, tensor: torch.Tensor, heads: slice, rows: slice, length: int, which: int) -> torch.Tensor:
        if self.starts is None:
            return cut(tensor, self.batch, heads, rows)
        start, count = self.starts[which], len(self.batch)
        of_all = cut(tensor[0], heads, slice(start, start + count * length))
        return of_all.unflatten(1, (count, length)).transpose(0, 1)[:, :, rows]


def stacks(tensors: AttentionTensors, spec: AttentionSpec) -> Iterator[Stack]:
    """Yield all sequences of the batch. This reads the tensors of lengths and offsets, and so waits for a GPU."""
    batch, num_queries, num_keys = range(tensors.num_sequences), tensors.query.shape[2], tensors.key.shape[2]
    lengths = None if tensors.key_lengths is None else tensors.key_lengths.clamp(0, num_keys).tolist()
    whole = Stack(batch, num_queries, num_keys, spec.query_offset, lengths).part(slice(0, len(batch)))
    if tensors.query_offsets is None and tensors.cu_seqlens_q is None and tensors.dropout_origins is None:
        yield whole
        return
    offsets = [spec.query_offset] * len(batch) if tensors.query_offsets is None else tensors.query_offsets.tolist()
    origins = [(0, 0, 0)] * len(batch) if tensors.dropout_origins is None else list(map(tuple, tensors.dropout_origins.tolist()))
    starts: list[Any] = [None] * len(batch)
    sizes = [(num_queries, num_keys)] * len(batch)
    if tensors.cu_seqlens_q is not None and tensors.cu_seqlens_k is not None:
        starts = list(zip(tensors.cu_seqlens_q.tolist(), tensors.cu_seqlens_k.tolist(), strict=True))
        sizes = [(stop[0] - start[0], stop[1] - start[1]) for start, stop in pairwise(starts)]
    kinds = list(zip(sizes, offsets, origins, strict=True))
    for ((queries, keys), offset, origin), alike in groupby(batch, kinds.__getitem__):
        first, *others = alike
        run = slice(first, first + 1 + len(others))
        yield Stack(batch, queries, keys, offset, lengths).part(run)._replace(starts=starts[first], origin=origin)


class Buffers:
    """Memory by names, of one dtype and device, which blocks use one after the other."""

    def __init__(self, like: torch.Tensor, dtype: torch.dtype) -> None:
        self.like, self.dtype = like, dtype
        self._buffers: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return memory of that name, uninitialised."""
        size, buffer = math.prod(shape), self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            self._buffers[name] = buffer = self.like.new_empty(size, dtype=self.dtype)
        return buffer[:size].view(shape)


class Call:
    """One call: its tensors, its tables as (1 or Hq, R, width) in the compute dtype, and memory that its blocks share."""

    def __init__(self, tensors: AttentionTensors, spec: AttentionSpec) -> None:
        self.tensors, self.spec = tensors, spec
        self.dtype = compute_dtype(tensors.query.dtype)
        self.tables = {
            name: stacked(getattr(tensors, name).to(self.dtype).contiguous(), name)
            for name in TABLES
            if getattr(tensors, name) is not None
        }
        if "rel_p2c" in self.tables:
            self.tables["rel_p2c"] = self.tables["rel_p2c"].flip(1)  # see mirror.py
        self.buffer = Buffers(tensors.query, self.dtype)
        self._frame: tuple[Any, Frame] | None = None

    @cached_property
    def has_keys_once(self) -> bool:
        """Whether each key and head of it is in one block, and none is in no block: gradients are written there, not added."""
        tensors, spec = self.tensors, self.spec
        varying = (tensors.key_lengths, tensors.query_offsets, tensors.cu_seqlens_q, tensors.dropout_origins)
        if any(tensor is not None for tensor in varying) or max(spec.window_left, spec.window_right) >= 0:
            return False
        (stack,) = stacks(tensors, spec)
        num_queries, num_heads = self._block_size(stack)
        heads, key_heads = tensors.query.shape[1], tensors.key.shape[1]
        return 0 < stack.num_queries <= num_queries and 0 < heads <= num_heads * key_heads

    def frame(self, group: Group, num_queries: int, num_keys: int, first_position: int) -> Frame:
        """Return a frame of this shape and place: that of the block before, if it fits."""
        per_head = any(table.shape[0] > 1 for table in self.tables.values())
        heads = group.heads.start if per_head else None
        kind = (len(group.sequences.batch), group.num_heads, group.sharing, heads, num_queries, num_keys, first_position)
        if self._frame is None or self._frame[0] != kind:
            self._frame = kind, Frame(group, num_queries, num_keys, first_position)
        return self._frame[1]

    def blocks(self) -> Iterator[Block]:
        """Yield blocks that together have all queries of all sequences and heads."""
        for stack in stacks(self.tensors, self.spec):
            num_queries, num_heads = self._block_size(stack)
            for sequences, heads, key_heads in self._groups(stack, num_heads):
                group = Group(self, sequences, heads, key_heads)
                # From the end: with a causal mask the last queries see the most keys, and need the largest buffers.
                for start in reversed(range(0, stack.num_queries, max(num_queries, 1))):
                    yield Block(group, slice(start, min(start + num_queries, stack.num_queries)))

    def _block_size(self, stack: Stack) -> tuple[int, int]:
        """Return the number of queries of a block, and its number of heads, counted over all its sequences."""
        num_threads = threads_of(self.tensors.query.device)
        elements, num_heads = num_threads * ELEMENTS_PER_THREAD, len(stack.batch) * self.tensors.query.shape[1]
        if self.tensors.query.device.type == "cpu":
            elements = min(elements, max(FEWEST_THREADS * ELEMENTS_PER_THREAD, self._num_elements()))
        num_keys, left, right = max(stack.num_keys, 1), self.spec.window_left, self.spec.window_right
        fewest_heads = max(min(num_heads, num_threads), 1)  # a product for each thread
        most = BLOCK_QUERIES
        if left < 0 and right < 0:  # else more queries of a block see more keys
            most = max(most, elements // (fewest_heads * num_keys))
        elif left >= 0 and right >= 0:  # most scores of a block that is much longer than the window would be hidden
            most = min(most, max(left + right + 1, FEWEST_QUERIES))
        num_queries = -(-stack.num_queries // max(-(-stack.num_queries // most), 1))  # in blocks of about the same size
        if left >= 0 and right >= 0:
            num_keys = min(num_keys, num_queries + left + right)
        return num_queries, max(elements // max(num_queries * num_keys, 1), fewest_heads)

    def _num_elements(self) -> int:
        """Count the elements of query, key, value, out, and their gradients."""
        query, key, value, *_ = self.tensors
        return 2 * (query.numel() + key.numel() + value.numel() + query.shape[:3].numel() * value.shape[3])

    def _groups(self, stack: Stack, num_heads: int) -> Iterator[tuple[Stack, slice, slice]]:
        """Yield the stack in parts of at most so many heads: several whole sequences, or some heads of one sequence."""
        heads, key_heads = self.tensors.query.shape[1], self.tensors.key.shape[1]
        if heads == 0:
            return
        if num_heads >= heads:
            for some in evenly(len(stack.batch), num_heads // heads):
                yield stack.part(some), slice(0, heads), slice(0, key_heads)
            return
        sharing = heads // key_heads
        for number in range(len(stack.batch)):
            sequence = stack.part(slice(number, number + 1))
            for keys in evenly(key_heads, max(num_heads // sharing, 1)):
                for some in evenly(sharing * (keys.stop - keys.start), num_heads):
                    yield sequence, slice(sharing * keys.start + some.start, sharing * keys.start + some.stop), keys


class Group:
    """Sequences and heads that are computed together, with keys and values ready for matrix products."""

    def __init__(self, call: Call, sequences: Stack, heads: slice, key_heads: slice) -> None:
        self.call, self.sequences, self.heads, self.key_heads = call, sequences, heads, key_heads
        self.num_heads = heads.stop - heads.start
        self.sharing = self.num_heads // (key_heads.stop - key_heads.start)
        """Number of heads of the query that share one of the key."""
        self.key, self.value = self._of_keys(call.tensors.key), self._of_keys(call.tensors.value)

    def _of_keys(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return key or value as (matrices, keys, width), with zeros after the keys of shorter sequences."""
        keys = slice(0, self.sequences.num_keys)
        rows, padding = self.sequences.of_keys(tensor, self.key_heads, keys), self.padding(keys)
        return matrices(rows if padding is None else rows.masked_fill(padding.mT, 0), 1, self.call.dtype)

    def padding(self, keys: slice) -> torch.Tensor | None:
        """Return the mask of padding among some keys, (sequences, 1, 1, keys); None if all sequences have the same length."""
        lengths = self.sequences.lengths
        if lengths is None:
            return None
        device = self.call.tensors.key.device
        return torch.arange(keys.start, keys.stop, device=device) >= torch.tensor(lengths, device=device).view(-1, 1, 1, 1)


class Frame:
    """State that blocks of the same shape and relative position share: memory for their scores, hidden pairs, and tables.

    Scores are (sequences * key heads, sharing * queries, keys) as matrices and (sequences, heads, queries, keys) by pair.
    """

    def __init__(self, group: Group, num_queries: int, num_keys: int, first_position: int) -> None:
        self.call: Call = weakref.proxy(group.call)  # a proxy, because the call keeps the frame
        self.spec = group.call.spec
        self.num_sequences, self.num_heads, self.sharing = len(group.sequences.batch), group.num_heads, group.sharing
        self.num_queries, self.num_keys, self.first_position = num_queries, num_keys, first_position
        self.shape = (self.num_sequences * self.num_heads // self.sharing, self.sharing * num_queries, num_keys)
        self.scores = group.call.buffer("scores", self.shape)
        self.pairs = self.by_pair(self.scores)
        of_heads = {name: t if t.shape[0] == 1 else t[group.heads] for name, t in group.call.tables.items()}
        self.rel_key = Band(self, of_heads["rel_key"], self.spec.rel_scale, "rel_key") if "rel_key" in of_heads else None
        self.rel_value = Band(self, of_heads["rel_value"], 1.0, "rel_value") if "rel_value" in of_heads else None
        self.rel_bias = Bias(self, of_heads["rel_bias"]) if "rel_bias" in of_heads else None
        self.rel_p2c = MirroredBand(self, of_heads["rel_p2c"], self.spec.rel_scale) if "rel_p2c" in of_heads else None
        self.heads = group.heads

    @cached_property
    def probs(self) -> torch.Tensor:
        """Memory for the probabilities."""
        return self.call.buffer("probs", self.shape)

    @property
    def probs_in_place(self) -> torch.Tensor:
        """Memory for the probabilities if the scores are not needed any more: the scores' own, which is faster, where softmax
        reads all of a row before it writes any of it."""
        return self.scores if self.scores.device.type == "cpu" else self.probs

    def by_pair(self, scores: torch.Tensor) -> torch.Tensor:
        """Return a view of matrices by sequence, head, query, and key or column."""
        return scores.view(self.num_sequences, self.num_heads, self.num_queries, scores.shape[-1])

    @cached_property
    def window_bounds(self) -> list[tuple[slice, Bounds]]:
        """Ranges of keys that the window hides from some of the queries, with the bounds of their logits, (queries, keys)."""
        left, right, first = self.spec.window_left, self.spec.window_right, self.first_position
        found = []
        if left >= 0:  # key n is visible to query m where first + n - m >= -left
            stop = min(self.num_queries - 1 - left - first, self.num_keys)
            if stop > 0:
                found.append((slice(0, stop), self._pairs(stop).triu_(-left - first)))
        if right >= 0:  # where first + n - m <= right
            start = max(right + 1 - first, 0)
            if start < self.num_keys:
                found.append((slice(start, self.num_keys), self._pairs(self.num_keys - start).tril_(right - first - start)))
        return [(keys, Bounds.of(visible, self.scores.dtype)) for keys, visible in found]

    def _pairs(self, num_keys: int) -> torch.Tensor:
        return self.scores.new_ones(self.num_queries, num_keys, dtype=torch.bool)

    @property
    def has_blind(self) -> bool:
        """Whether the window hides all keys from some query."""
        left, right, first = self.spec.window_left, self.spec.window_right, self.first_position
        return (right >= 0 and first > right) or (left >= 0 and first + self.num_keys - self.num_queries < -left)


class Block:
    """Some queries of a group, and the keys that they can see."""

    def __init__(self, group: Group, queries: slice) -> None:
        sequences, spec, num_queries = group.sequences, group.call.spec, queries.stop - queries.start
        self.group, self.call, self.queries = group, group.call, queries
        position = queries.start + sequences.query_offset  # of the first query among the keys
        first, stop = 0, sequences.num_keys
        if spec.window_left >= 0:
            first = min(max(position - spec.window_left, 0), stop)
        if spec.window_right >= 0:
            stop = min(position + num_queries + spec.window_right, stop)
        self.keys = slice(first, max(stop, first))
        self.num_keys = self.keys.stop - first
        self.key, self.value = group.key, group.value
        if self.num_keys < sequences.num_keys:
            self.key, self.value = self.key[:, self.keys], self.value[:, self.keys]
        self.frame = group.call.frame(group, num_queries, self.num_keys, first - position)
        self.by_pair = self.frame.by_pair

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the queries' part of a (B, Hq, Nq, ...) tensor, (sequences, heads, queries, ...)."""
        return self.group.sequences.of_queries(tensor, self.group.heads, self.queries)

    def rows_of_keys(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the keys' part of a (B, Hk, Nk, width) tensor, (sequences, key heads, keys, width)."""
        return self.group.sequences.of_keys(tensor, self.group.key_heads, self.keys)

    def matrices(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the queries' part of a (B, Hq, Nq, width) tensor as matrices, for products with key or value."""
        return matrices(self.rows(tensor), self.group.sharing, self.call.dtype)

    @property
    def has_blind(self) -> bool:
        """Whether a query may see none of the keys."""
        return self.call.tensors.attn_mask is not None or self.group.sequences.lengths is not None or self.frame.has_blind

    def keys_of_pairs(self) -> torch.Tensor:
        """Return the keys as (sequences, heads, keys, width): those that heads share once for each of them."""
        keys = self.key.unflatten(0, (self.frame.num_sequences, -1))
        return keys if self.group.sharing == 1 else keys.repeat_interleave(self.group.sharing, 1)

    def pairs_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the block's part of a (B, Hq, Nq, Nk) tensor, (sequences, heads, queries, keys)."""
        return self.rows(tensor)[..., self.keys]

    def mask(self) -> None:
        """Add a mask of numbers to the logits, and set the logits of hidden pairs to -inf."""
        mask, sequences, pairs = self.call.tensors.attn_mask, self.group.sequences, self.frame.pairs
        if mask is not None:
            wanted: tuple[slice | range, ...] = (sequences.batch, self.group.heads, self.queries, self.keys)
            mask = cut(mask, *(slice(0, 1) if size == 1 else places for size, places in zip(mask.shape, wanted, strict=True)))
            if mask.dtype == torch.bool:
                Bounds.of(mask, pairs.dtype).hide(pairs)
            else:
                pairs.add_(mask)
        for keys, bounds in self.frame.window_bounds:
            bounds.hide(pairs[..., keys])
        padding = self.group.padding(self.keys)
        if padding is not None:
            Bounds.of(~padding, pairs.dtype).hide(pairs)

    @cached_property
    def dropout(self) -> torch.Tensor | None:
        """Dropout's factors of the probabilities, as matrices; None without dropout."""
        seed, dropout_p, sequences = self.call.tensors.dropout_seed, self.call.spec.dropout_p, self.group.sequences
        if seed is None:
            return None
        parts = (sequences.batch, self.group.heads, self.queries)
        sequence, head, query = (torch.arange(part.start, part.stop, device=seed.device) for part in parts)
        first_head, first_query, first_key = sequences.origin
        indices = sequence[:, None, None, None], head[:, None, None] + first_head, query[:, None] + first_query
        keep = keep_mask(seed, dropout_p, *indices, slice(self.keys.start + first_key, self.keys.stop + first_key))
        return matrices(keep, self.group.sharing, self.call.dtype).mul_(keep_scale(dropout_p))

    def destination(self, place: torch.Tensor, name: str = "rows") -> torch.Tensor:
        """Return matrices in which to compute rows of queries: their place itself if it is contiguous, else the named buffer."""
        shape = *self.frame.shape[:2], place.shape[3]
        return place.view(shape) if place.dtype == self.call.dtype and place.is_contiguous() else self.call.buffer(name, shape)

    def store(self, place: torch.Tensor, result: torch.Tensor) -> None:
        """Copy a result from its destination to its place, unless these are the same."""
        if result.data_ptr() != place.data_ptr():
            place.copy_(self.by_pair(result))


def threads_of(device: torch.device) -> int:
    """Return the number of threads that a block is made for."""
    return torch.get_num_threads() if device.type == "cpu" else THREADS_ELSEWHERE


def cut(tensor: torch.Tensor, *ranges: slice | range) -> torch.Tensor:
    """Return the part of a tensor that lies in ranges of its first dimensions."""
    for dim, (rows, size) in enumerate(zip(ranges, tensor.shape, strict=False)):
        if rows.stop - rows.start != size:
            tensor = tensor.narrow(dim, rows.start, rows.stop - rows.start)
    return tensor


class Bounds(NamedTuple):
    """The least and the most that logits may be, as the integers that have the same bits: those of -inf where a pair is hidden.

    clamp_() with floating-point bounds would keep a logit that is NaN. masked_fill_() would not, but on a CPU it takes up to ten
    times as long, more than softmax.
    """

    least: torch.Tensor
    most: torch.Tensor

    @staticmethod
    def of(visible: torch.Tensor, dtype: torch.dtype) -> Bounds:
        """Return the bounds of logits of a dtype, float32 or float64, from a mask of the pairs that are visible."""
        integers, hidden = (torch.int32, -1 << 23) if dtype == torch.float32 else (torch.int64, -1 << 52)
        ends, is_visible = torch.iinfo(integers), visible.to(integers).neg_()  # all bits are 1 where a pair is visible
        return Bounds(*((is_visible & (end ^ hidden)).bitwise_xor_(hidden) for end in (ends.min, ends.max)))

    def hide(self, logits: torch.Tensor) -> None:
        """Set the logits of hidden pairs to -inf."""
        logits.view(self.least.dtype).clamp_(self.least, self.most)


def evenly(count: int, most: int) -> Iterator[slice]:
    """Yield slices of 0 .. count of about the same size, at most the given one."""
    num_parts = -(-count // most)
    for number in range(num_parts):
        yield slice(number * count // num_parts, (number + 1) * count // num_parts)


def stacked(table: torch.Tensor, name: str) -> torch.Tensor:
    """Return a table as (Hq, R, width), or (1, R, width) if the heads share it; rel_bias has width 1."""
    table = table[..., None] if name == "rel_bias" else table
    return table if table.dim() == 3 else table[None]


def of_heads(table: torch.Tensor, heads: slice) -> torch.Tensor:
    """Return the stacked tables of a range of heads: (1, R, width) if all heads share one."""
    return table if table.shape[0] == 1 else table[heads]


def matrices(rows: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """Return (sequences, heads, rows, width) as (sequences * heads / group, group * rows, width): one matrix for the heads that
    share a key."""
    sequences, heads, length, width = rows.shape
    rows = rows.to(dtype).reshape(sequences * heads // group, group * length, width)
    return rows if rows.stride(2) == 1 else rows.contiguous()
