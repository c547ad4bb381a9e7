"""The cut of a call into parts, heads of sequences, and of a part into blocks, some queries with the keys that they see.

A long sequence is computed head by head, so that the scores of a block stay in the processor's cache. Short ones are computed in
batches of heads and sequences, since every step takes time to start. Scores are matrices for all heads of a key, (heads_per_key *
rows, columns), or batches of them, (sequences * key heads, ..., ...), and by pair (sequences, heads, rows, columns).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch

from .._core.dtypes import compute_dtype
from .._core.spec import TABLES, AttentionSpec, AttentionTensors
from .products import LINE, Memory, OneDNN, Products, evenly, padded, product_dtype, takes_onednn, up, with_rows
from .tables import Table, cast

MIN_ALIGNED = 1 << 16  # elements of a query from which bands have a multiple of products.LINE columns
EVERYWHERE = 2**31  # farther than all positions
MIN_KEYS = 32  # keys of a band of rel_p2c: products with fewer are slow


class Sizes(NamedTuple):
    """The sizes of blocks. They are no part of a call's meaning, but for rounding."""

    short_rows: int = 224  # queries up to which a batch of sequences has one block
    rows: int = 128  # queries of a block per thread, of one head
    min_rows: int = 32
    """The same where heads share keys, or the window is short: most scores of a block much longer than it would be hidden."""
    batch_rows: int = 64
    """Queries of a band of a batch, and of its blocks if they are not short: with more, bands have many unneeded columns."""
    few_scores: int = 1 << 17  # of a block of one head, up to which heads and sequences are computed in batches
    elements: int = 1 << 19  # scores of a batch per thread, two megabytes
    fused_rows: int = 256
    """Queries of a block of fused attention; with a window an eighth of the keys at most, since a block has hidden pairs."""
    fused_elements: int = 1 << 21  # terms of a block of fused attention per thread


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


def visible(spec: AttentionSpec, run: Run | None = None) -> tuple[int, int]:
    """Return the lowest and the highest relative position that a window shows, and that pairs of a run have."""
    low = -spec.window_left if spec.window_left >= 0 else -EVERYWHERE
    high = spec.window_right if spec.window_right >= 0 else EVERYWHERE
    if run is not None:
        low = max(low, run.start - run.offset - run.num_queries + 1)
        high = min(high, run.stop - run.offset - 1)
    return low, high


class Call:
    """What the parts of a call share.

    dtype: that of scores and sums. product_dtype: that of what is multiplied. term_dtype: that of products for terms.
    """

    def __init__(self, tensors: AttentionTensors, spec: AttentionSpec, rounds_terms: bool = False) -> None:
        """rounds_terms: whether terms of tables are computed in product_dtype, not in dtype."""
        self.tensors, self.spec = tensors, spec
        self.dtype, self.is_cpu = compute_dtype(tensors.query.dtype), tensors.query.device.type == "cpu"
        self.key_heads = tensors.key.shape[1]
        self.group = tensors.query.shape[1] // max(self.key_heads, 1)
        self.runs, self.runs_without_keys = find_runs(tensors, spec)
        num_pairs = sum(run.count * run.num_queries * (run.stop - run.start) for run in self.runs)
        self.product_dtype = product_dtype(tensors.query, num_pairs * tensors.query.shape[1])
        self.term_dtype = self.product_dtype if rounds_terms else self.dtype
        self.memory = Memory(tensors.query)
        self.has_window = max(spec.window_left, spec.window_right) >= 0
        self.has_hidden = self.has_window or tensors.attn_mask is not None
        self.window = spec.window_left + spec.window_right if min(spec.window_left, spec.window_right) >= 0 else None
        self.term_mask = None if spec.softcap is not None else tensors.attn_mask  # softcap does not limit a mask: no term
        # Whether all pairs of a head at the same position have the same terms.
        self.is_by_position = tensors.rel_key is None and tensors.rel_p2c is None and self.term_mask is None
        self.tables: dict[str, Table] = {}
        if self.runs and tensors.has_table:
            ranges, dtypes = {visible(spec, run) for run in self.runs}, (self.dtype, self.term_dtype, self.product_dtype)
            given = {name: table for name in TABLES if (table := getattr(tensors, name)) is not None}
            self.tables = {name: Table(name, table, spec, ranges, *dtypes) for name, table in given.items()}

    @cached_property
    def may_be_infinite(self) -> bool:
        """Whether a table may make all logits of a query -inf. Elsewhere than on a CPU, to ask would be to wait."""
        tables = [table.rows for name, table in self.tables.items() if name != "rel_value"]
        return not all(table.device.type == "cpu" and math.isfinite(table.sum()) for table in tables)

    @cached_property
    def has_nan_queries(self) -> bool:
        """Whether a query is NaN, or it is not known."""
        return not self.is_cpu or math.isnan(largest(self.tensors.query))

    @cached_property
    def can_add_hidden(self) -> bool:
        """Whether -inf can be added to the logits of hidden pairs, with the terms: if these are finite, but for queries that are
        NaN. Elsewhere than on a CPU, to ask would be to wait."""
        if not self.has_hidden:
            return True
        if not self.is_cpu or self.spec.softcap is not None or self.may_be_infinite:
            return False
        query, key, *_ = self.tensors
        query = query.nan_to_num(nan=0.0) if self.has_nan_queries else query
        product = largest(query) * largest(key) * query.shape[3] * max(abs(self.spec.scale), 1.0)
        return product < torch.finfo(self.dtype).max / 2

    @property
    def sees_all(self) -> bool:
        """Whether every query sees a key, and every key is seen."""
        batch, _, num_keys, _ = self.tensors.key.shape
        visible = sum(run.count * (run.stop - run.start) for run in self.runs)
        return self.group > 0 and visible == batch * num_keys and not (self.runs_without_keys or self.has_window)

    def parts(self, is_fused: bool = False) -> Iterator[Part]:
        """Yield parts that together have all heads of all sequences with queries that see a key."""
        for run in self.runs if self.group else ():
            rows, matrices, by_onednn = self._fused_sizes(run) if is_fused else self._sizes(run)
            keys = max(matrices // self.group, 1)
            for some in evenly(run.count, keys // self.key_heads):
                sequences = run.part(some.start, some.stop)
                for heads in evenly(self.key_heads, keys // sequences.count):
                    yield Part(self, sequences, heads, rows, by_onednn, is_fused)

    def _sizes(self, run: Run) -> tuple[int, int, bool]:
        """Return how many queries a block has, how many sequences times heads a part, and whether oneDNN multiplies."""
        sizes, num_keys, rows = SIZES, run.stop - run.start, run.num_queries
        if self.is_cpu and rows > 1:
            long_rows, is_long, by_onednn = self._long_rows(run)
            if is_long or by_onednn:
                return long_rows, 1, by_onednn
        threads = threads_for(self.tensors, sizes.elements)
        if rows > sizes.short_rows or self.window is not None:
            # The fewest queries of a block. The bands of rel_p2c have keys as rows: they need as many.
            least = sizes.batch_rows * (2 if "rel_p2c" in self.tables else 1)
            all_scores = run.count * self.key_heads * self.group * self._columns(rows, num_keys)
            most = max(self._limit_rows(sizes.rows * threads), least)
            rows = min(rows, max(sizes.elements * threads // all_scores, least), most)
        return rows, sizes.elements * threads // (rows * self._columns(rows, num_keys)), False

    def _fused_sizes(self, run: Run) -> tuple[int, int, bool]:
        """Return the same for fused attention. Terms by position take no memory."""
        sizes, num_keys = SIZES, run.stop - run.start
        rows = min(sizes.fused_rows, num_keys // 8) if self.has_window else sizes.fused_rows
        rows = min(run.num_queries, self._limit_rows(rows))
        if self.is_by_position:
            return rows if self.has_window else run.num_queries, run.count * self.key_heads * self.group, False
        elements = sizes.fused_elements * threads_for(self.tensors, sizes.fused_elements)
        return rows, elements // (rows * (self._columns(rows, num_keys) + rows)), self._long_rows(run)[2]

    def _long_rows(self, run: Run) -> tuple[int, bool, bool]:
        """Return the queries of a block of a head alone, whether that is large enough, and whether oneDNN multiplies."""
        sizes, num_keys = SIZES, run.stop - run.start
        threads = threads_for(self.tensors, sizes.rows * num_keys)
        rows = min(run.num_queries, self._limit_rows(sizes.rows * threads // self.group))
        scores = self.group * rows * self._columns(rows, num_keys)
        few = sizes.few_scores * threads  # for oneDNN, whose products of a head are faster, three eighths
        return rows, scores >= few, scores >= few * 3 // 8 and takes_onednn(self.dtype)

    def _columns(self, rows: int, num_keys: int) -> int:
        """Return the number of columns of a block with this many rows."""
        return num_keys if self.window is None else min(num_keys, rows + self.window)

    def _limit_rows(self, rows: int) -> int:
        """Return rows, the queries of a block, limited by a short window from above and by min_rows from below."""
        if self.window is not None:
            rows = min(rows, up(self.window + 1, SIZES.min_rows))
        return max(rows, SIZES.min_rows)


def largest(tensor: torch.Tensor) -> float:
    """Return the largest magnitude in a tensor, NaN if there is one."""
    low, high = tensor.aminmax() if tensor.numel() else (0.0, 0.0)
    return max(abs(float(low)), abs(float(high)))


class Part:
    """Heads of sequences of equal lengths, whose scores are computed together."""

    def __init__(self, call: Call, run: Run, key_heads: slice, rows: int, by_onednn: bool, is_fused: bool) -> None:
        """rows: of a block, at most."""
        self.call, self.run, self.key_heads = call, run, key_heads
        self.heads = slice(key_heads.start * call.group, key_heads.stop * call.group)
        # To pad the tables of a small call takes longer than it saves.
        band_step = 1 if call.tensors.query.numel() < MIN_ALIGNED else LINE
        self.products = OneDNN(call.memory, OneDNN.step) if by_onednn else Products(call.memory, band_step)
        self.sizes = run.count, self.heads.stop - self.heads.start
        self.num_matrices = run.count * (key_heads.stop - key_heads.start)
        self.is_fused, self.step = is_fused, 1 if is_fused else self.products.step
        self.num_columns = up(run.stop - run.start, self.step)
        if self.step > 1 and call.spec.window_left >= 0:  # blocks begin anywhere
            self.num_columns += self.step
        self.rows = up(-(-run.num_queries // -(-run.num_queries // rows)), self.step)
        self._panels: tuple[tuple[int, int], list[tuple[slice, torch.Tensor]]] | None = None
        # The keys that some query sees, and their values: as fused attention reads them, (sequences, key heads, columns, width);
        # or as matrices, (columns, width), or batches of them, with zeros after the last one.
        key, value = self.columns(call.tensors.key), self.columns(call.tensors.value)
        if is_fused:
            self.key, self.value = with_rows(cast(key, call.product_dtype)), with_rows(cast(value, call.product_dtype))
        else:
            self.key, self.value = self._matrices(key), self._matrices(value)
            self.key_operand, self.value_operand = cast(self.key, call.product_dtype), cast(self.value, call.product_dtype)

    def blocks(self) -> Iterator[Block]:
        """Yield blocks of about equally many queries."""
        run, spec = self.run, self.call.spec
        for row in range(0, run.num_queries, self.rows):
            stop_row, key, stop = min(row + self.rows, run.num_queries), run.start, run.stop
            if spec.window_left >= 0:
                key = min(max(row + run.offset - spec.window_left, key), stop)
            if spec.window_right >= 0:
                stop = max(min(stop_row + run.offset + spec.window_right, stop), key)
            yield Block(self, row, stop_row - row, key, stop - key)

    @cached_property
    def keys_by_head(self) -> torch.Tensor:
        """The keys of each head of the query, (sequences, heads, columns, width): the rows of rel_p2c."""
        keys = padded(cast(self.columns(self.call.tensors.key), self.call.dtype), self.num_columns)
        return keys if self.call.group == 1 else keys.repeat_interleave(self.call.group, 1)

    def _matrices(self, tensor: torch.Tensor) -> torch.Tensor:
        columns = with_rows(padded(cast(tensor, self.call.dtype), self.num_columns))
        return columns[0, 0] if self.num_matrices == 1 else columns.reshape(self.num_matrices, self.num_columns, tensor.shape[3])

    def columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the keys of (B, Hk, Nk, width) that some query sees, (sequences, key heads, columns, width)."""
        return self.run.columns(tensor, self.key_heads, self.run.start, self.run.stop)

    def new_sums(self, gradient: torch.Tensor, name: str) -> torch.Tensor:
        """Return memory for sums of columns: the gradient's if it can be. One matrix is transposed, which is faster."""
        view, width = self.columns(gradient), gradient.shape[3]
        if self.num_matrices == 1:
            return self.call.memory(name, (width, self.num_columns), self.call.dtype).mT
        if view.is_contiguous() and view.dtype == self.call.dtype and view.shape[2] == self.num_columns:
            return view.view(self.num_matrices, self.num_columns, width)
        return self.call.memory(name, (self.num_matrices, self.num_columns, width), self.call.dtype)

    def write_sums(self, gradient: torch.Tensor, sums: torch.Tensor) -> None:
        """Write sums of columns to the gradient, if they are not its memory."""
        view = self.columns(gradient)
        if view.data_ptr() != sums.data_ptr():
            view.copy_(sums.reshape(self.sizes[0], -1, self.num_columns, sums.shape[-1])[:, :, : view.shape[2]])


class Block:
    """Some queries of a part, and the keys that they see. It has rows and columns, some of them padding."""

    def __init__(self, part: Part, row: int, num_rows: int, key: int, num_keys: int) -> None:
        self.part, self.call, self.row, self.num_rows, self.key, self.num_keys = part, part.call, row, num_rows, key, num_keys
        self.base = key - row - part.run.offset  # the position of the first key, relative to that of the first query
        self.rows, self.columns = up(num_rows, part.step), up(num_keys, part.step)
        self.shape = (*part.sizes, self.rows, self.columns)
        self.is_matrix = part.sizes == (1, 1)
        matrix = part.call.group * self.rows, self.columns
        self.matrix_shape = matrix if part.num_matrices == 1 else (part.num_matrices, *matrix)
        tensors = part.call.tensors
        self.query = self.vectors(tensors.query)
        self.rel_query = self.query if tensors.rel_query is None else self.vectors(tensors.rel_query)  # meets rel_key

    @property
    def may_hide_rows(self) -> bool:
        """Whether a row may see none of the columns."""
        if self.call.tensors.attn_mask is not None or self.call.may_be_infinite:
            return True
        # With a window the first row may be before all keys, or the last row beyond them.
        left, right = self.call.spec.window_left, self.call.spec.window_right
        return (left >= 0 and self.base - self.num_rows + self.num_keys < -left) or (right >= 0 and self.base > right)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the block's queries of (B, Hq, Nq, width), (sequences, heads, num_rows, width)."""
        return self.part.run.rows(tensor, self.part.heads, self.row, self.row + self.num_rows)

    def vectors(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same as rows of products, and zeros: contiguous, if they are not one matrix."""
        rows = padded(cast(self.view(tensor), self.call.dtype), self.rows)
        return rows if self.is_matrix and rows.stride(3) == 1 else rows.contiguous()

    def matrices(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows as matrices, (heads_per_key * rows, width), or batches of them."""
        return rows[0, 0] if self.is_matrix else rows.view(*self.matrix_shape[:-1], rows.shape[3])

    def seen(self, matrices: torch.Tensor) -> torch.Tensor:
        """Return the block's columns of a part's, (..., columns, width)."""
        first = self.key - self.part.run.start
        return matrices if self.columns == matrices.shape[-2] else matrices.narrow(-2, first, self.columns)

    def panels(self) -> list[tuple[slice, torch.Tensor]]:
        """Return parts of the columns and their keys, rows of bands of rel_p2c; large parts have many unneeded columns."""
        kind, part = (self.key, self.columns), self.part
        if part._panels is None or part._panels[0] != kind:
            step, keys = max(self.rows // 2, min(self.rows, MIN_KEYS)), self.seen(part.keys_by_head)
            columns = [slice(start, min(start + step, self.columns)) for start in range(0, self.columns, step)]
            part._panels = kind, [(some, keys[:, :, some].contiguous()) for some in columns]
        return part._panels[1]

    def bands(self) -> list[slice]:
        """Return the rows of bands: all of a head alone. With more rows bands have more columns that are not needed."""
        if self.part.num_matrices == 1:
            return [slice(0, self.rows)]
        is_large = self.call.tensors.query.numel() >= SIZES.elements // 2
        return evenly(self.rows, SIZES.batch_rows if is_large else 2 * SIZES.batch_rows)

    def scores(self, name: str) -> torch.Tensor:
        """Return memory for scores as matrices."""
        return self.call.memory(name, self.matrix_shape, self.call.dtype)
