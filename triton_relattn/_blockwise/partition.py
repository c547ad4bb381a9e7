"""The cut of a call for attention.py: groups of sequences and heads, and blocks of their queries with the keys that these see.

A block is a batch of matrices, one for each sequence and head, whose scores fit the working set: many short sequences, or some
queries of a few heads of a long one. Which sequences are computed together is the matter of stacks.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch

from .._core.dropout import keep_mask, keep_scale
from .._core.dtypes import compute_dtype
from .._core.spec import TABLES, AttentionSpec, AttentionTensors
from .bands import Band, Bias, mirrored_bands
from .frame import Buffers, Frame, bounds, hide
from .products import product_dtype
from .stacks import Places, Stack, cut, members, stacks

BLOCK_QUERIES = 128
"""Queries of a block, or more if their scores fit the working set: products with few rows are slow."""
FUSED_QUERIES = 256
"""The same where scores are terms alone, for torch's fused attention, which has blocks of its own."""
FEWEST_QUERIES = 32
"""Queries of a block whose window is shorter."""
ELEMENTS_PER_THREAD = 1 << 19
"""Scores of a block for each thread, two megabytes. One megabyte, the L2 cache of a core, took 10 to 25 % longer at lengths from
700 to 2,048, because every step of a block takes time to start."""
FEWEST_THREADS = 2
"""Threads whose scores a block may have in any case. With more threads its scores take no more memory than the call's tensors and
their gradients: 64 threads would have all scores at once up to a length of 2,000."""
THREADS_ELSEWHERE = 64
"""Number of threads assumed for a device other than a CPU: its blocks must be so large that starting their steps does not take
most of the time."""

Terms = tuple[Band | None, Band | None, Bias | None, list[tuple[slice, Band]]]
"""The terms of rel_key, rel_value and rel_bias, and those of rel_p2c with the keys that each is for; None or empty without."""


class BlockwiseCall:
    """One call: its tensors, its tables as (1 or Hq, R, width), and memory that its blocks share.

    dtype: that of scores and sums. product_dtype: that of what is multiplied, tables too, but for the table of numbers.
    """

    def __init__(self, tensors: AttentionTensors, spec: AttentionSpec, rounds_terms: bool = False, fuses: bool = False) -> None:
        """Cut the call.

        Args:
            rounds_terms: whether terms of tables are computed in product_dtype, not in dtype.
            fuses: whether terms are all that scores have, in product_dtype, and torch's fused attention takes them as a mask.
        """
        self.tensors, self.spec = tensors, spec
        left, right = spec.window_left, spec.window_right
        window = left + right + 1 if left >= 0 and right >= 0 else FUSED_QUERIES
        self.most_queries = min(FUSED_QUERIES if fuses else BLOCK_QUERIES, max(window, FEWEST_QUERIES))
        """The largest number of queries of a block: most scores of one much longer than the window would be hidden."""
        self.stacks = list(stacks(tensors, spec, self.most_queries))
        num_pairs = tensors.query.shape[1] * sum(len(each.batch) * each.num_queries * each.num_keys for each in self.stacks)
        self.dtype, self.product_dtype = compute_dtype(tensors.query.dtype), product_dtype(tensors.query, num_pairs)
        self.term_dtype = self.product_dtype if rounds_terms else self.dtype
        self.fuses = fuses and self.product_dtype == tensors.query.dtype
        self.tables: dict[str, torch.Tensor] = {}
        for name in TABLES:
            table = getattr(tensors, name)
            if table is not None:
                self.tables[name] = stacked(table.to(self.dtype if name == "rel_bias" else self.product_dtype).contiguous(), name)
        if "rel_p2c" in self.tables:
            self.tables["rel_p2c"] = self.tables["rel_p2c"].flip(1)  # see bands.py
        self.buffers = Buffers(tensors.query, self.dtype)
        self.has_tables_of_heads = any(table.shape[0] > 1 for table in self.tables.values())

    @cached_property
    def has_infinite_table(self) -> bool:
        """Whether a table may make all logits of a query -inf. Elsewhere than on a CPU, to ask would be to wait."""
        for name, table in self.tables.items():
            if name != "rel_value" and (table.device.type != "cpu" or not math.isfinite(table.sum().item())):
                return True
        return False

    @cached_property
    def has_keys_once(self) -> bool:
        """Whether each key and head of it is in one block, and none is in no block: gradients are written there, not added."""
        tensors, spec = self.tensors, self.spec
        alike = tensors.key_lengths is tensors.query_offsets is tensors.cu_seqlens_q is tensors.dropout_origins is None
        if not alike or max(spec.window_left, spec.window_right) >= 0:
            return False
        (stack,) = self.stacks
        num_queries, num_heads = self._block_size(stack)
        heads, key_heads = tensors.query.shape[1], tensors.key.shape[1]
        return 0 < stack.num_queries <= num_queries and 0 < heads <= num_heads * key_heads

    def blocks(self) -> Iterator[Block]:
        """Yield blocks that together have all queries of all sequences and heads."""
        block = None
        for stack in self.stacks:
            num_queries, num_heads = self._block_size(stack)
            for sequences, heads, key_heads in self._groups(stack, num_heads):
                group = Group(self, sequences, heads, key_heads)
                # From the end: with a causal mask the last queries see the most keys, and need the largest buffers.
                for start in reversed(range(0, sequences.num_queries, max(num_queries, 1))):
                    block = Block(group, slice(start, min(start + num_queries, sequences.num_queries)), block)
                    yield block

    def terms(self, frame: Frame, heads: slice) -> Terms:
        """Return the terms of the tables of some heads, for the pairs of a frame."""
        tables = self.tables
        if self.has_tables_of_heads:
            tables = {name: of_heads(table, heads) for name, table in tables.items()}
        scale, memory, dtype = self.spec.rel_scale, "band" if "rel_value" in tables else "probs", self.term_dtype
        return (
            Band(frame, tables["rel_key"], scale, "rel_key", memory, dtype) if "rel_key" in tables else None,
            Band(frame, tables["rel_value"], 1.0, "rel_value", memory, dtype) if "rel_value" in tables else None,
            Bias(frame, tables["rel_bias"]) if "rel_bias" in tables else None,
            mirrored_bands(frame, tables["rel_p2c"], scale, memory, dtype) if "rel_p2c" in tables else [],
        )

    def _block_size(self, stack: Stack) -> tuple[int, int]:
        """Return the number of queries of a block, and its number of heads, counted over all its sequences."""
        num_threads = threads_of(self.tensors.query.device)
        elements, num_heads = num_threads * ELEMENTS_PER_THREAD, len(stack.batch) * self.tensors.query.shape[1]
        fewest = FEWEST_THREADS * ELEMENTS_PER_THREAD
        if elements > fewest and self.tensors.query.device.type == "cpu":
            elements = min(elements, max(fewest, self._num_elements()))
        num_keys, left, right = max(stack.num_keys, 1), self.spec.window_left, self.spec.window_right
        fewest_heads = max(min(num_heads, num_threads), 1)  # a product for each thread
        most = self.most_queries
        if left < 0 and right < 0:  # else more queries of a block see more keys
            most = max(most, elements // (fewest_heads * num_keys))
        num_queries = -(-stack.num_queries // max(-(-stack.num_queries // most), 1))  # in blocks of about the same size
        if stack.is_mixed:
            num_queries, num_keys = stack.num_queries, num_keys + stack.extra
        elif left >= 0 and right >= 0:
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

    def __init__(self, call: BlockwiseCall, sequences: Stack, heads: slice, key_heads: slice) -> None:
        self.call, self.sequences, self.heads, self.key_heads = call, sequences, heads, key_heads
        self.num_heads = heads.stop - heads.start
        self.sharing = self.num_heads // (key_heads.stop - key_heads.start)
        """Number of heads of the query that share one of the key."""
        query, key, value = call.tensors[:3]
        self.places = Places(sequences, 0, query.shape[2], query.device)
        self.places_of_keys = Places(sequences, 1, key.shape[2], key.device)
        keys = slice(0, sequences.num_keys)
        self.key = matrices(self.places_of_keys.rows(key, key_heads, keys), 1, call.product_dtype)
        self.value = matrices(self.places_of_keys.rows(value, key_heads, keys), 1, call.product_dtype)
        self.is_fused = call.fuses and bool((self.key.sum(dtype=call.dtype) + self.value.sum(dtype=call.dtype)).isfinite())
        """Whether its blocks are for torch's fused attention, in which NaN of a hidden key would reach all."""
        self.is_clean = sequences.keys is None
        """Whether there are zeros where a sequence has no keys, or none that its queries see; else there may be NaN."""

    @cached_property
    def wide_key(self) -> torch.Tensor:
        """The keys in the dtype of the scores."""
        return self.key.to(self.call.dtype)

    @cached_property
    def wide_value(self) -> torch.Tensor:
        """The values in the dtype of the scores."""
        return self.value.to(self.call.dtype)

    def clean(self) -> None:
        """Set keys and values that do not exist, or that no query of their sequence sees, to zero."""
        if self.is_clean:
            return
        missing = self.places_of_keys.missing(self.key_heads.stop - self.key_heads.start, slice(0, self.sequences.num_keys))
        if missing is not None:
            for name in ("wide_key", "wide_value"):
                self.__dict__.pop(name, None)
            self.key, self.value = (
                each.clone().flatten(0, 1).index_fill_(0, missing, 0).view(each.shape) for each in (self.key, self.value)
            )
        self.is_clean = True

    @cached_property
    def no_queries(self) -> torch.Tensor | None:
        """The numbers of rows that are of no query, counted over sequences, heads and queries; None if all are."""
        return self.places.missing(self.num_heads, slice(0, self.sequences.num_queries))


class Block:
    """Some queries of a group, and the keys that they can see.

    Scores are (sequences * key heads, sharing * queries, keys) as matrices and (sequences, heads, queries, keys) by pair.
    """

    def __init__(self, group: Group, queries: slice, previous: Block | None) -> None:
        """previous: the block before, whose frame and terms this one takes over if they fit."""
        call, sequences, spec = group.call, group.sequences, group.call.spec
        self.group, self.call, self.queries = group, call, queries
        count, num_queries = len(sequences.batch), queries.stop - queries.start
        position = queries.start + sequences.query_offset  # of the first query among the keys
        first, stop, is_mixed = 0, sequences.num_keys, sequences.is_mixed
        if is_mixed:
            if sequences.keys is not None:
                first = min((start for start, end in sequences.keys if start < end), default=stop)
        elif spec.window_left >= 0:
            first = min(max(position - spec.window_left, 0), stop)
        if spec.window_right >= 0 and not is_mixed:
            stop = min(position + num_queries + spec.window_right, stop)
        self.keys = slice(first, max(stop, first))
        self.num_keys = self.keys.stop - first
        first_position, heads = first - position, group.heads.start if call.has_tables_of_heads else None
        self.scores: torch.Tensor
        self.frame: Frame
        self.terms: Terms
        self.kind: tuple[Any, ...] = (count, group.num_heads, group.sharing, heads, num_queries, self.num_keys, first_position)
        self.kind += (group.is_fused,)
        if is_mixed:
            self.kind += (sequences.keys, sequences.queries, sequences.shifts)
        if previous is not None and previous.kind == self.kind:
            self.scores, self.frame, self.terms = previous.scores, previous.frame, previous.terms
        else:
            num_matrices = count * group.num_heads // group.sharing
            dtype = call.product_dtype if group.is_fused else call.dtype
            self.scores = call.buffers("scores", (num_matrices, group.sharing * num_queries, self.num_keys), dtype)
            seen = members(sequences, first) if is_mixed else {(0, num_queries, 0, self.num_keys, 0)}
            pairs = self.scores.view(count, group.num_heads, num_queries, self.num_keys)
            self.frame = Frame(spec, call.buffers, pairs, first_position, seen, sequences.shifts)
            self.terms = call.terms(self.frame, group.heads)
        self.rel_key, self.rel_value, self.rel_bias, self.rel_p2c = self.terms

    @property
    def probs(self) -> torch.Tensor:
        """Memory for the probabilities."""
        return self.call.buffers("probs", self.scores.shape)

    @property
    def probs_in_place(self) -> torch.Tensor:
        """Memory for the probabilities if the scores are not needed any more: the scores' own, which is faster, where softmax
        reads all of a row before it writes any of it."""
        return self.scores if self.scores.device.type == "cpu" else self.probs

    def by_pair(self, matrices: torch.Tensor) -> torch.Tensor:
        """Return a view of matrices by sequence, head, query, and key or column."""
        return matrices.view(*self.frame.pairs.shape[:3], matrices.shape[-1])

    @property
    def key(self) -> torch.Tensor:
        """The keys as matrices, see Group.is_clean."""
        return self._seen(self.group.key)

    @property
    def value(self) -> torch.Tensor:
        """The values as matrices, see Group.is_clean."""
        return self._seen(self.group.value)

    @property
    def wide_key(self) -> torch.Tensor:
        """The keys as matrices in the dtype of the scores."""
        return self._seen(self.group.wide_key)

    @property
    def wide_value(self) -> torch.Tensor:
        """The values as matrices in the dtype of the scores."""
        return self._seen(self.group.wide_value)

    def _seen(self, of_group: torch.Tensor) -> torch.Tensor:
        """Return the part of the group's keys, or values, that the queries can see."""
        return of_group if self.num_keys == self.group.sequences.num_keys else of_group[:, self.keys]

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the queries' part of a (B, Hq, Nq, ...) tensor, (sequences, heads, queries, ...)."""
        rows, missing = self.group.places.rows(tensor, self.group.heads, self.queries), self.group.no_queries
        return rows if missing is None else rows.flatten(0, 2).index_fill_(0, missing, 0).view(rows.shape)

    def place(self, tensor: torch.Tensor, name: str = "place") -> torch.Tensor:
        """Return where to write rows(tensor) before put(): the place itself, or the named buffer."""
        if self.group.places.index is None:
            return self.rows(tensor)
        return self.call.buffers(name, (*self.frame.pairs.shape[:3], tensor.shape[3]))

    def put(self, tensor: torch.Tensor, place: torch.Tensor) -> None:
        """Write what is in place() to the tensor, if it is not there."""
        if self.group.places.index is not None:
            self.group.places.put(tensor, self.group.heads, self.queries, place)

    def rows_of_keys(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the keys' part of a (B, Hk, Nk, width) tensor, (sequences, key heads, keys, width): a view, or a copy for
        put_keys()."""
        return self.group.places_of_keys.rows(tensor, self.group.key_heads, self.keys)

    @property
    def has_keys_once(self) -> bool:
        """Whether no other block has a key of this one."""
        if self.call.has_keys_once:
            return True
        places = self.group.places  # gathered sequences have all their heads in a block
        return places.index is not None and self.frame.num_queries == places.length

    def place_of_keys(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return rows_of_keys(), or memory in its place if what is there does not matter."""
        places, key_heads = self.group.places_of_keys, self.group.key_heads
        if places.index is None or not self.has_keys_once:
            return places.rows(tensor, key_heads, self.keys)
        shape = (self.frame.num_sequences, key_heads.stop - key_heads.start, self.num_keys, tensor.shape[3])
        return self.call.buffers("keys", shape)

    def put_keys(self, tensor: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows_of_keys() back to the tensor, if it is a copy."""
        if self.group.places_of_keys.index is not None:
            self.group.places_of_keys.put(tensor, self.group.key_heads, self.keys, rows)

    def matrices(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the queries' part of a (B, Hq, Nq, width) tensor as matrices, for products with key or value, or in a dtype."""
        return matrices(self.rows(tensor), self.group.sharing, dtype or self.call.product_dtype)

    def operand(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return probabilities or gradients of scores in the dtype of products: themselves, or a copy until the next one."""
        dtype = self.call.product_dtype
        return numbers if numbers.dtype == dtype else self.call.buffers("operand", tuple(numbers.shape), dtype).copy_(numbers)

    @property
    def has_blind(self) -> bool:
        """Whether a query may see none of the keys."""
        keys, spec = self.group.sequences.keys, self.call.spec
        if self.call.tensors.attn_mask is not None or self.frame.has_blind or self.call.has_infinite_table:
            return True
        return keys is not None and (max(spec.window_left, spec.window_right) >= 0 or any(first == stop for first, stop in keys))

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
            assert isinstance(sequences.batch, range)
            wanted: tuple[slice | range, ...] = (sequences.batch, self.group.heads, self.queries, self.keys)
            mask = cut(mask, *(slice(0, 1) if size == 1 else places for size, places in zip(mask.shape, wanted, strict=True)))
            if mask.dtype == torch.bool:
                hide(pairs, bounds(mask, pairs.dtype))
            else:
                pairs.add_(mask)
        for keys, limits in self.frame.window_bounds:
            hide(pairs[..., keys], limits)
        exists = self.group.places_of_keys.exists
        if exists is not None:
            hide(pairs, bounds(exists[:, None, None, self.keys], pairs.dtype))

    @cached_property
    def dropout(self) -> torch.Tensor | None:
        """Dropout's factors of the probabilities, as matrices; None without dropout."""
        seed, dropout_p, sequences = self.call.tensors.dropout_seed, self.call.spec.dropout_p, self.group.sequences
        if seed is None:
            return None
        head, query = (torch.arange(part.start, part.stop, device=seed.device) for part in (self.group.heads, self.queries))
        first_sequence, first_head, first_query, first_key = sequences.origin
        sequence = torch.tensor(list(sequences.batch), device=seed.device) + first_sequence
        indices = sequence[:, None, None, None], head[:, None, None] + first_head, query[:, None] + first_query
        keep = keep_mask(seed, dropout_p, *indices, slice(self.keys.start + first_key, self.keys.stop + first_key))
        return matrices(keep, self.group.sharing, self.call.dtype).mul_(keep_scale(dropout_p))

    def destination(self, place: torch.Tensor, name: str = "rows", dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return matrices in which to compute rows of queries in a dtype, that of sums unless given: their place itself if it is
        contiguous, else the named buffer."""
        shape, dtype = (*self.scores.shape[:2], place.shape[3]), dtype or self.call.dtype
        return place.view(shape) if place.dtype == dtype and place.is_contiguous() else self.call.buffers(name, shape, dtype)

    def store(self, place: torch.Tensor, result: torch.Tensor) -> None:
        """Copy a result from its destination to its place, unless these are the same."""
        if result.data_ptr() != place.data_ptr():
            place.copy_(self.by_pair(result))


def threads_of(device: torch.device) -> int:
    """Return the number of threads that a block is made for."""
    return torch.get_num_threads() if device.type == "cpu" else THREADS_ELSEWHERE


def evenly(count: int, most: int) -> list[slice]:
    """Return slices of 0 .. count of about the same size, at most the given one."""
    parts = -(-count // most)
    return [slice(number * count // parts, (number + 1) * count // parts) for number in range(parts)]


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
