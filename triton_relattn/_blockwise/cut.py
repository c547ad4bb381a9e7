"""The cut of a call into groups of sequences and heads, whose scores are computed together.

A long sequence is computed head by head, some queries at a time, so that the scores of a block stay in the processor's cache.
Short ones are computed in batches of heads and sequences, since every step takes time to start. Sequences of different lengths
are padded to one shape as long as that costs less than starting another batch, and aligned: in all of them row m and column n
have the relative position ``base + n - m``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from .._core.dtypes import compute_dtype
from .._core.spec import AttentionSpec, AttentionTensors
from .bands import up
from .products import Products, takes_onednn


class Sizes(NamedTuple):
    """The sizes of blocks. They are no part of a call's meaning, but for rounding."""

    short_rows: int = 224
    """Queries up to which whole sequences are computed at once (short.py): with more, bands have many columns that are not
    needed."""
    rows: int = 128  # queries of a block for each thread, of one head
    min_rows: int = 32
    """The same where heads share keys, or the window is short: most scores of a block much longer than it would be hidden."""
    batch_rows: int = 64  # queries of a block of a batch: with more, bands have many columns that are not needed
    few_scores: int = 1 << 17
    """Scores of a block of one head up to which heads and sequences are computed in batches; see few_for_onednn."""
    elements: int = 1 << 19  # scores of a batch for each thread, two megabytes
    block_cost: int = 1 << 13
    """Scores that take as long as the start of a block: sequences are padded to one length rather than that."""

    @property
    def few_for_onednn(self) -> int:
        """few_scores where oneDNN computes the products of a head."""
        return self.few_scores * 3 // 8


SIZES = Sizes()
THREADS_ELSEWHERE = 64
"""Threads assumed for a device other than a CPU: its blocks must be large enough that launches do not take most of the
time."""
MIN_THREADS = 2
"""Threads whose scores a block may have in any case. With more its scores take no more memory than the call's tensors and their
gradients."""
SCORES = 6
"""How many times the scores of a block are in memory: probabilities, gradients, and bands of both, up to twice as wide."""


class Run(NamedTuple):
    """Successive sequences of a batch with the same lengths, offset and visible keys."""

    number: int  # of the first sequence, as dropout and attn_mask count
    entry: int  # its batch entry of the tensors
    query: int  # its first query in that entry
    key: int  # its first key
    num_queries: int
    num_keys: int
    offset: int  # the position of the first query among the keys
    start: int  # start .. stop: the keys that some query sees
    stop: int
    is_packed: bool  # all in one entry, one after the other
    count: int = 1  # type: ignore[assignment]  # shadows tuple.count

    def part(self, start: int, stop: int) -> Run:
        """Return some of the sequences."""
        moved = self._replace(number=self.number + start, count=stop - start)
        if not self.is_packed:
            return moved._replace(entry=self.entry + start)
        return moved._replace(query=self.query + start * self.num_queries, key=self.key + start * self.num_keys)

    def sequences(self) -> list[Run]:
        """Return one run per sequence."""
        return [self.part(number, number + 1) for number in range(self.count)]


def find_runs(tensors: AttentionTensors, spec: AttentionSpec) -> tuple[list[Run], list[Run]]:
    """Return the sequences with queries that see keys, and those whose queries see none. This waits for a GPU."""
    query, key, is_packed = tensors.query, tensors.key, tensors.cu_seqlens_q is not None
    count, num_queries, num_keys = tensors.num_sequences, query.shape[2], key.shape[2]
    lengths = [num_keys] * count if tensors.key_lengths is None else tensors.key_lengths.clamp(0, num_keys).tolist()
    offsets = [spec.query_offset] * count if tensors.query_offsets is None else tensors.query_offsets.tolist()
    starts, sizes = [(0, 0)] * count, [(num_queries, length) for length in lengths]
    if tensors.cu_seqlens_q is not None and tensors.cu_seqlens_k is not None:
        starts = list(zip(tensors.cu_seqlens_q.tolist(), tensors.cu_seqlens_k.tolist(), strict=True))
        sizes = [(q - first_q, k - first_k) for (first_q, first_k), (q, k) in pairwise(starts)]
    runs, first = [], 0
    for stop in range(1, count + 1):
        if stop < count and (sizes[stop], offsets[stop]) == (sizes[first], offsets[first]):
            continue
        (query_start, key_start), (size, length), offset = starts[first], sizes[first], offsets[first]
        low = max(offset - spec.window_left, 0) if spec.window_left >= 0 else 0
        high = min(offset + size + spec.window_right, length) if spec.window_right >= 0 else length
        entry = 0 if is_packed else first
        if size > 0:
            runs.append(Run(first, entry, query_start, key_start, size, length, offset, low, high, is_packed, stop - first))
        first = stop
    return [run for run in runs if run.start < run.stop], [run for run in runs if run.start >= run.stop]


def aligned_shape(runs: list[Run]) -> tuple[int, int]:
    """Return the number of rows and columns of sequences that are aligned."""
    columns = max(run.stop - run.offset for run in runs) - min(run.start - run.offset for run in runs)
    return max(run.num_queries for run in runs), columns


def threads_on(device: torch.device) -> int:
    """Return the number of threads to size a block for."""
    return torch.get_num_threads() if device.type == "cpu" else THREADS_ELSEWHERE


def threads_for(tensors: AttentionTensors, elements: int) -> int:
    """Return the number of threads to size blocks for, if a block has this many scores per thread."""
    threads = threads_on(tensors.query.device)
    if tensors.query.device.type != "cpu" or threads <= MIN_THREADS:
        return threads
    query, key, value, *_ = tensors
    room = 2 * (query.numel() + key.numel() + value.numel() + query.shape[:3].numel() * value.shape[3])
    return min(threads, max(MIN_THREADS, room // (SCORES * elements)))


def evenly(count: int, limit: int) -> list[slice]:
    """Return slices of 0 .. count of about the same size, at most the given one."""
    parts = -(-count // limit)
    return [slice(number * count // parts, (number + 1) * count // parts) for number in range(parts)]


class Cut:
    """The limits by which the sequences of a call are cut into groups."""

    def __init__(self, tensors: AttentionTensors, spec: AttentionSpec) -> None:
        self.tensors, self.sizes = tensors, SIZES
        self.heads, self.key_heads = tensors.query.shape[1], tensors.key.shape[1]
        self.window = spec.window_left + spec.window_right if min(spec.window_left, spec.window_right) >= 0 else None
        # The fewest queries of a block of a batch. The bands of rel_p2c have keys as rows: they need as many.
        self.batch_rows = self.sizes.batch_rows * (1 if tensors.rel_p2c is None else 2)
        self.elements = self.sizes.elements * threads_for(tensors, self.sizes.elements)

    def groups(self, runs: list[Run]) -> Iterator[tuple[list[Run], slice, int, Products]]:
        """Yield sequences, heads, the most queries of a block, and the products of groups, which have all heads of all runs."""
        is_cpu, dtype = self.tensors.query.device.type == "cpu", compute_dtype(self.tensors.query.dtype)
        heads_per_key, short = self.heads // max(self.key_heads, 1), []
        for run in runs if self.heads else ():
            num_keys = run.stop - run.start
            threads = threads_for(self.tensors, self.sizes.rows * num_keys)
            rows = min(run.num_queries, self._limit_rows(self.sizes.rows * threads // heads_per_key))
            scores = heads_per_key * rows * self._columns(rows, num_keys)
            is_long = is_cpu and run.num_queries > 1
            by_onednn = is_long and scores >= self.sizes.few_for_onednn * threads and takes_onednn(dtype)
            if is_long and (by_onednn or scores >= self.sizes.few_scores * threads):
                products = Products(by_onednn)
                for sequence in run.sequences():
                    for heads in evenly(self.heads, heads_per_key):
                        yield [sequence], heads, up(rows, products.step), products
            else:
                short.append(run)
        threads = threads_for(self.tensors, self.sizes.elements)
        for stack in self._stacks(short):
            (num_queries, num_keys), count = aligned_shape(stack), sum(run.count for run in stack)
            rows = self.elements // (count * self.heads * self._columns(num_queries, num_keys))
            rows = min(num_queries, max(rows, self.batch_rows), max(self._limit_rows(self.sizes.rows * threads), self.batch_rows))
            limit = self.elements // (count * heads_per_key * rows * self._columns(rows, num_keys))
            for keys in evenly(self.key_heads, max(limit, 1)):
                yield stack, slice(keys.start * heads_per_key, keys.stop * heads_per_key), rows, Products(by_onednn=False)

    def _columns(self, rows: int, num_keys: int) -> int:
        """Return the number of columns of a block with this many rows."""
        return num_keys if self.window is None else min(num_keys, rows + self.window)

    def _limit_rows(self, rows: int) -> int:
        """Return rows, the queries of a block, limited by a short window from above and by min_rows from below."""
        if self.window is not None:
            rows = min(rows, up(self.window + 1, self.sizes.min_rows))
        return max(rows, self.sizes.min_rows)

    def _stacks(self, runs: list[Run]) -> Iterator[list[Run]]:
        """Yield runs that are computed together, padded to one shape, with at most so many elements in a block."""
        has_mask = self.tensors.attn_mask is not None
        stack: list[Run] = []
        low = high = count = 0  # of the stack: keys from the position of the first query, and sequences
        for run in sorted(runs, key=lambda run: (run.num_queries, run.stop - run.start, run.offset), reverse=True):
            start, stop = run.start - run.offset, run.stop - run.offset
            if stack:
                rows = stack[0].num_queries  # the most: they are sorted
                lowest, highest = min(low, start), max(high, stop)
                scores = rows * (high - low) * count + run.num_queries * (stop - start) * run.count
                padded = rows * (highest - lowest) * (count + run.count)
                fits = count + run.count <= self._max_sequences(rows, highest - lowest)
                pays = self.heads * (padded - scores) <= self.sizes.block_cost
                if fits and pays and not (has_mask and run.offset != stack[0].offset):
                    stack.append(run)
                    low, high, count = lowest, highest, count + run.count
                    continue
                yield from self._parts(stack)
            stack, low, high, count = [run], start, stop, run.count
        if stack:
            yield from self._parts(stack)

    def _max_sequences(self, rows: int, columns: int) -> int:
        """Return how many sequences of a shape fit into a block."""
        rows = min(rows, self.batch_rows)
        return max(self.elements // (self.heads * rows * self._columns(rows, columns)), 1)

    def _parts(self, stack: list[Run]) -> Iterator[list[Run]]:
        """Yield a stack; one run that has too many scores in parts."""
        if len(stack) > 1:
            yield stack
            return
        for some in evenly(stack[0].count, self._max_sequences(*aligned_shape(stack))):
            yield [stack[0].part(some.start, some.stop)]
