"""The sequences of a batch, and the sizes of the blocks in which they are computed."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from .._core.spec import AttentionSpec, AttentionTensors


class Sizes(NamedTuple):
    """The sizes of blocks. They are no part of a call's meaning, but for rounding."""

    short_rows: int = 224  # queries up to which a batch of sequences has one block
    rows: int = 128  # queries of a block for each thread, of one head
    min_rows: int = 32
    """The same where heads share keys, or the window is short: most scores of a block much longer than it would be hidden."""
    batch_rows: int = 64
    """Queries of a band of a batch, and of its blocks if they are not short: with more, bands have many unneeded columns."""
    few_scores: int = 1 << 17
    """Scores of a block of one head up to which heads and sequences are computed in batches; see few_for_onednn."""
    elements: int = 1 << 19  # scores of a batch for each thread, two megabytes
    fused_rows: int = 256
    """Queries of a block of fused attention; with a window an eighth of the keys at most, since a block has hidden pairs."""
    fused_elements: int = 1 << 21  # terms of a block of fused attention for each thread

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
        number, count = self.number + start, stop - start
        if count == self.count:
            return self
        if not self.is_packed:
            return self._replace(number=number, count=count, entry=self.entry + start)
        query, key = self.query + start * self.num_queries, self.key + start * self.num_keys
        return self._replace(number=number, count=count, query=query, key=key)

    def rows(self, tensor: torch.Tensor, heads: slice, start: int, stop: int) -> torch.Tensor:
        """Return some queries of (B, Hq, Nq, width), a view (sequences, heads, stop - start, width)."""
        return self._view(tensor, heads, self.query, self.num_queries, start, stop)

    def columns(self, tensor: torch.Tensor, heads: slice, start: int, stop: int) -> torch.Tensor:
        """Return some keys of (B, Hk, Nk, width), a view (sequences, heads, stop - start, width)."""
        return self._view(tensor, heads, self.key, self.num_keys, start, stop)

    def _view(self, tensor: torch.Tensor, heads: slice, first: int, length: int, start: int, stop: int) -> torch.Tensor:
        if tensor.shape[:3] == (self.count, heads.stop - heads.start, stop - start):
            return tensor
        if not self.is_packed or self.count == 1:
            return tensor[self.entry : self.entry + self.count, heads, first + start : first + stop]
        rows = tensor[self.entry, heads, first : first + self.count * length].unflatten(1, (self.count, length))
        return rows.transpose(0, 1)[:, :, start:stop]


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


def up(number: int, step: int) -> int:
    """Round up to a multiple of step."""
    return -(-number // step) * step


def evenly(count: int, limit: int) -> list[slice]:
    """Return slices of 0 .. count of about the same size, at most the given one."""
    parts = -(-count // max(limit, 1))
    return [slice(number * count // parts, (number + 1) * count // parts) for number in range(parts)]


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
