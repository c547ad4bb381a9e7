"""The pairs of a block: their relative positions, which of them are visible, and memory for their scores."""

from __future__ import annotations

import math
from functools import cached_property

import torch

from .._core.spec import AttentionSpec

Bounds = tuple[torch.Tensor, torch.Tensor]
"""The least and the most that logits may be, as the integers that have the same bits: those of -inf where a pair is hidden."""
BITS = {torch.float64: (torch.int64, -1 << 52), torch.float32: (torch.int32, -1 << 23), torch.bfloat16: (torch.int16, -1 << 7)}
"""The integers that are as wide as numbers of a dtype, and the one with the bits of -inf."""
Member = tuple[int, int, int, int, int]
"""First and stop of the queries of some sequences, first and stop of the keys that they see, and their shift, see stacks.py."""


class Buffers:
    """Memory by names, on one device, which blocks use one after the other."""

    def __init__(self, like: torch.Tensor, dtype: torch.dtype) -> None:
        """dtype: that of views for which no other is given."""
        self.like, self.dtype = like, dtype
        self._buffers: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # bytes, and the last view of them

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return memory of that name, uninitialised."""
        dtype = self.dtype if dtype is None else dtype
        memory, view = self._buffers.get(name, (None, None))
        if view is None or view.shape != shape or view.dtype != dtype:
            size = math.prod(shape) * dtype.itemsize
            if memory is None or memory.numel() < size:
                memory = self.like.new_empty(size, dtype=torch.uint8)
            view = memory[:size].view(dtype).view(shape)
            self._buffers[name] = memory, view
        return view


class Frame:
    """The pairs of queries and keys of a block. Blocks of the same shape and relative position share it.

    It knows neither the call nor the tables: bands refer to it, and it refers to nothing that refers to it.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        buffers: Buffers,
        pairs: torch.Tensor,
        first_position: int,
        members: set[Member],
        shifts: list[int] | None = None,
    ) -> None:
        """Describe the pairs.

        Args:
            pairs: memory for the scores, (sequences, heads, queries, keys).
            first_position: the relative position of the first query and key, the lowest of all sequences.
            members: queries and keys of the sequences, counted from the first of the block.
            shifts: by how much the positions of each sequence are higher than the lowest; None: they are not.
        """
        self.spec, self.buffers, self.pairs, self.first_position = spec, buffers, pairs, first_position
        self.members, self.shifts, self.extra = members, shifts, 0 if shifts is None else max(shifts)
        self.num_sequences, self.num_heads, self.num_queries, self.num_keys = pairs.shape
        # Near keys: those that some query sees at a position from spec.first to spec.last.
        start = min(max(spec.first - first_position - self.extra, 0), self.num_keys)
        stop = min(max(spec.last - first_position + self.num_queries, start), self.num_keys)
        self.near, self.num_near = slice(start, stop), stop - start

    def mirror(self, keys: slice) -> Frame:
        """Return the frame whose queries are some keys of this one, and whose keys are its queries: the scores transposed, and
        the sign of all positions turned. Sequences must not be shifted."""
        spec, start = self.spec, keys.start
        turned = spec._replace(first=-spec.last, last=-spec.first, window_left=spec.window_right, window_right=spec.window_left)
        members = {
            (first - start, stop - start, first_query, stop_query, 0) for first_query, stop_query, first, stop, _ in self.members
        }
        return Frame(turned, self.buffers, self.pairs[..., keys].mT, -(self.first_position + start), members)

    @cached_property
    def far(self) -> list[tuple[slice, slice]]:
        """Keys beyond the table, whose term is that of an end row, and this row. A row that no visible pair has is not read: it
        may hold NaN."""
        ends = ((slice(0, self.near.start), slice(0, 1)), (slice(self.near.stop, self.num_keys), slice(-1, None)))
        return [(keys, row) for keys, row in ends if self.spec.clamp and keys.start < keys.stop and self.visible(keys)]

    def visible(self, keys: slice) -> range:
        """Return the relative positions of pairs with some keys, as far as lengths and window show them."""
        left, right = self.spec.window_left, self.spec.window_right
        lowest, highest = 0, -1
        for first_query, stop_query, first, stop, shift in self.members:
            first_query, last = max(first_query, 0), min(stop_query, self.num_queries) - 1
            first, stop = max(keys.start, first), min(keys.stop, stop)
            low, high = self.first_position + shift + first - last, self.first_position + shift + stop - 1 - first_query
            low, high = max(low, -left) if left >= 0 else low, min(high, right) if right >= 0 else high
            if first_query <= last and first < stop and low <= high:
                lowest, highest = (low, high) if lowest > highest else (min(lowest, low), max(highest, high))
        return range(lowest, highest + 1)

    def shifted(self, keys: slice) -> torch.Tensor:
        """Return where queries and keys find their relative position, counted from the last query and the first key of the range:
        (sequences, 1, queries, keys)."""
        device = self.pairs.device
        shifts, keys_of = torch.tensor(self.shifts, device=device), torch.arange(keys.stop - keys.start, device=device)
        queries = torch.arange(self.num_queries - 1, -1, -1, device=device)
        return shifts.view(-1, 1, 1, 1) + queries[:, None] + keys_of

    @cached_property
    def shifted_near(self) -> torch.Tensor:
        """Where the near pairs of sequences that are shifted find their position."""
        return self.shifted(self.near)

    @cached_property
    def window_bounds(self) -> list[tuple[slice, Bounds]]:
        """Ranges of keys that the window hides from some of the queries, with the bounds of their logits, ([sequences, 1,]
        queries, keys)."""
        left, right, first, dtype = self.spec.window_left, self.spec.window_right, self.first_position, self.pairs.dtype
        found = []
        if self.shifts is not None:
            if self.num_queries == 1 or max(left, right) < 0:
                return []  # the padding of keys is all
            every = slice(0, self.num_keys)
            positions = self.shifted(every).add_(first - self.num_queries + 1)
            visible = positions >= (-left if left >= 0 else -(2**31))
            visible &= positions <= (right if right >= 0 else 2**31)
            return [(every, bounds(visible, dtype))]
        if left >= 0:  # key n is visible to query m where first + n - m >= -left
            stop = min(self.num_queries - 1 - left - first, self.num_keys)
            if stop > 0:
                found.append((slice(0, stop), bounds(self._ones(stop).triu_(-left - first), dtype)))
        if right >= 0:  # where first + n - m <= right
            start = max(right + 1 - first, 0)
            if start < self.num_keys:
                visible = self._ones(self.num_keys - start).tril_(right - first - start)
                found.append((slice(start, self.num_keys), bounds(visible, dtype)))
        return found

    def _ones(self, num_keys: int) -> torch.Tensor:
        return self.pairs.new_ones(self.num_queries, num_keys, dtype=torch.bool)

    @property
    def has_blind(self) -> bool:
        """Whether the window hides all keys from some query."""
        left, right, first = self.spec.window_left, self.spec.window_right, self.first_position
        return (right >= 0 and first + self.extra > right) or (left >= 0 and first + self.num_keys - self.num_queries < -left)


def bounds(visible: torch.Tensor, dtype: torch.dtype) -> Bounds:
    """Return the bounds of logits of a dtype from a mask of the pairs that are visible."""
    integers, hidden = BITS[dtype]
    ends, is_visible = torch.iinfo(integers), visible.to(integers).neg_()  # all bits are 1 where a pair is visible
    least = (is_visible & (ends.min ^ hidden)).bitwise_xor_(hidden)
    return least, (is_visible & (ends.max ^ hidden)).bitwise_xor_(hidden)


def hide(logits: torch.Tensor, limits: Bounds) -> None:
    """Set the logits of hidden pairs to -inf.

    clamp_() with floating-point bounds would keep a logit that is NaN. masked_fill_() would not, but on a CPU it takes up to ten
    times as long, more than softmax.
    """
    least, most = limits
    logits.view(least.dtype).clamp_(least, most)
