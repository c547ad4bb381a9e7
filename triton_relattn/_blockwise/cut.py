"""The cut of a call for attention.py: groups of sequences and heads, and blocks of their queries, the rows, with the keys
that these see, the columns.

A long sequence is computed head by head, some queries at a time, so that the scores of a block stay in the processor's cache.
Short ones are computed in batches of heads and sequences, since every step takes time to start. Those that differ are padded to
one length, as long as that costs less than starting another batch, and aligned: in all of them row m and column c have the
relative position ``base + c - m``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise, product
from typing import NamedTuple

import torch

from .._core.dtypes import compute_dtype
from .._core.spec import TABLES, AttentionSpec, AttentionTensors
from .bands import Setting, Table, as_rows, cast, narrow, up
from .masks import Limits, triangles
from .products import Memory, Products, product_dtype, takes_onednn, transposed


class Sizes(NamedTuple):
    """The sizes of blocks. They are no part of a call's meaning, but for rounding."""

    short_rows: int = 224
    """Queries up to which whole sequences are computed at once (short.py): with more, bands have many columns that are not
    needed."""
    rows: int = 128
    """Queries of a block for each thread, of one head."""
    fewest_rows: int = 32
    """The same where heads share keys, or the window is short: most scores of a block much longer than it would be hidden."""
    batch_rows: int = 64
    """Queries of a block of a batch: with more, bands have many columns that are not needed."""
    few_scores: int = 1 << 17
    """Scores of a block of one head up to which heads and sequences are computed in batches; see few_for_onednn."""
    elements: int = 1 << 19
    """Scores of a batch for each thread, two megabytes."""
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
FEWEST_THREADS = 2
"""Threads whose scores a block may have in any case. With more its scores take no more memory than the call's tensors and their
gradients."""
SCORES = 6
"""How many times the scores of a block are in memory: probabilities, gradients, and bands of both, up to twice as wide."""
FEWEST_VIEWED = 8
"""Blocks from which a table that has all positions is not copied."""
FEWEST_KEYS = 32
"""Keys of a band of rel_p2c: products with fewer are slow."""


class Run(NamedTuple):
    """Successive sequences of the batch that are alike."""

    number: int  # of the first, as dropout and attn_mask know it
    entry: int  # of the tensors
    query: int  # its first query there
    key: int
    num_queries: int
    num_keys: int
    offset: int  # the place of its first query among its keys
    start: int  # first of the keys that its queries see
    stop: int
    is_packed: bool  # in one entry, one after the other
    count: int = 1  # type: ignore[assignment]  # shadows tuple.count

    def part(self, start: int, stop: int) -> Run:
        """Return some of the sequences."""
        moved = self._replace(number=self.number + start, count=stop - start)
        if not self.is_packed:
            return moved._replace(entry=self.entry + start)
        return moved._replace(query=self.query + start * self.num_queries, key=self.key + start * self.num_keys)


class Call:
    """What the blocks of a call share.

    dtype: that of scores and sums. product_dtype: that of what is multiplied, tables too. term_dtype: that of products for terms.
    """

    def __init__(self, tensors: AttentionTensors, spec: AttentionSpec, rounds_terms: bool = False) -> None:
        """rounds_terms: whether terms of tables are computed in product_dtype, not in dtype."""
        self.tensors, self.spec, self.sizes = tensors, spec, SIZES
        self.dtype, self.is_cpu = compute_dtype(tensors.query.dtype), tensors.query.device.type == "cpu"
        self.sharing = tensors.query.shape[1] // max(tensors.key.shape[1], 1)
        self.runs, self.unseeing = find_runs(tensors, spec)
        num_pairs = sum(each.count * each.num_queries * (each.stop - each.start) for each in self.runs)
        self.product_dtype = product_dtype(tensors.query, num_pairs * tensors.query.shape[1])
        self.term_dtype = self.product_dtype if rounds_terms else self.dtype
        self.memory = Memory(tensors.query)
        self.gradients: dict[str, torch.Tensor] = {}
        self.limits: dict[tuple[int, torch.dtype], tuple[Limits, Limits]] = {}
        self._tables: dict[str, Table] = {}
        self._kind: object = None

    @property
    def batch_rows(self) -> int:
        """The fewest queries of a block of a batch. The bands of rel_p2c have keys as rows: they need as many."""
        return self.sizes.batch_rows * (1 if self.tensors.rel_p2c is None else 2)

    @property
    def has_all_keys(self) -> bool:
        """Whether every key is seen."""
        _, heads, _, _ = self.tensors.query.shape
        batch, _, num_keys, _ = self.tensors.key.shape
        return heads > 0 and sum(each.count * (each.stop - each.start) for each in self.runs) == batch * num_keys

    @cached_property
    def has_infinite_table(self) -> bool:
        """See has_infinite_table()."""
        return has_infinite_table(self.tensors)

    def tables(self, group: Group) -> dict[str, Table]:
        """Return the tables' rows for the positions of a group: the last ones if they fit. Only the last ones may be used."""
        spec, margin = self.spec, group.num_rows + group.products.band_step
        positions = range(max(spec.first - margin, group.positions.start), min(spec.last + margin, group.positions.stop))
        kind = (positions, group.seen, group.products.band_step)
        if kind != self._kind:
            self.add_up()
            self._kind = kind
            for name in TABLES:
                table = getattr(self.tensors, name)
                if table is None:
                    continue
                table = as_rows(name, table, self.dtype)
                if name != "rel_p2c":
                    self._tables[name] = Table(name, table, spec.first, spec.clamp, positions, group.seen)
                    continue
                seen = sorted((1 - stop, 1 - start) for start, stop in group.seen)  # see bands.py
                around = range(1 - positions.stop - margin, 1 - positions.start + margin)
                self._tables[name] = Table(name, table.flip(1), -spec.last, spec.clamp, around, seen)
        return self._tables

    def add_up(self) -> None:
        """Add what the tables' rows have collected to the gradients of the tables."""
        for name, table in self._tables.items():
            if (found := table.gradient()) is not None:
                found = found.flip(1) if name == "rel_p2c" else found
                self.gradients[name] = found if name not in self.gradients else self.gradients[name].add_(found)
        self._tables = {}

    def groups(self) -> Iterator[Group]:
        """Yield groups that together have all heads of all sequences with queries that see a key."""
        heads, key_heads, sharing = self.tensors.query.shape[1], self.tensors.key.shape[1], self.sharing
        by_batch, short = Products(by_onednn=False), []
        for each in self.runs if heads else ():
            num_keys = each.stop - each.start
            threads = threads_for(self.tensors, self.sizes.rows * num_keys)
            rows = min(each.num_queries, self._most_rows(self.sizes.rows * threads // sharing))
            scores = sharing * rows * self._columns(rows, num_keys)
            is_long = self.is_cpu and each.num_queries > 1
            by_onednn = is_long and scores >= self.sizes.few_for_onednn * threads and takes_onednn(self.dtype)
            if is_long and (by_onednn or scores >= self.sizes.few_scores * threads):
                by_one = Products(by_onednn)
                for number, head in product(range(each.count), range(key_heads)):
                    some = slice(head * sharing, (head + 1) * sharing)
                    yield Group(self, [each.part(number, number + 1)], some, up(rows, by_one.step), by_one)
            else:
                short.append(each)
        threads = threads_for(self.tensors, self.sizes.elements)
        elements = self.sizes.elements * threads
        for stack in self._stacks(short, elements):
            (num_queries, num_keys), count = padded_shape(stack), sum(each.count for each in stack)
            rows = elements // (count * heads * self._columns(num_queries, num_keys))
            rows = min(num_queries, max(rows, self.batch_rows), max(self._most_rows(self.sizes.rows * threads), self.batch_rows))
            most = elements // (count * sharing * rows * self._columns(rows, num_keys))
            for keys in evenly(key_heads, max(most, 1)):
                yield Group(self, stack, slice(keys.start * sharing, keys.stop * sharing), rows, by_batch)

    def _columns(self, rows: int, num_keys: int) -> int:
        """Return the number of columns of a block with this many rows."""
        left, right = self.spec.window_left, self.spec.window_right
        return min(num_keys, rows + left + right) if left >= 0 and right >= 0 else num_keys

    def _most_rows(self, rows: int) -> int:
        """Return rows, the queries of a block, limited by a short window from above and by fewest_rows from below."""
        left, right = self.spec.window_left, self.spec.window_right
        if left >= 0 and right >= 0:
            rows = min(rows, up(left + right + 1, self.sizes.fewest_rows))
        return max(rows, self.sizes.fewest_rows)

    def _stacks(self, runs: list[Run], elements: int) -> Iterator[list[Run]]:
        """Yield sequences that are computed together, with at most this many scores in a block."""
        heads, has_mask = self.tensors.query.shape[1], self.tensors.attn_mask is not None
        stack: list[Run] = []
        low = high = count = 0  # of the stack: positions of keys from the first query's, and sequences
        for run in sorted(runs, key=lambda run: (run.num_queries, run.stop - run.start, run.offset), reverse=True):
            start, stop = run.start - run.offset, run.stop - run.offset
            if stack:
                lowest, highest, rows = min(low, start), max(high, stop), stack[0].num_queries
                scores = rows * (high - low) * count + run.num_queries * (stop - start) * run.count
                padded = rows * (highest - lowest) * (count + run.count)
                fits = count + run.count <= self._most(rows, highest - lowest, elements)
                pays = heads * (padded - scores) <= self.sizes.block_cost
                if fits and pays and not (has_mask and run.offset != stack[0].offset):
                    stack.append(run)
                    low, high, count = lowest, highest, count + run.count
                    continue
                yield from self._parts(stack, elements)
            stack, low, high, count = [run], start, stop, run.count
        if stack:
            yield from self._parts(stack, elements)

    def _most(self, rows: int, columns: int, elements: int) -> int:
        """Return how many sequences fit this many scores in a block."""
        rows = min(rows, self.batch_rows)
        return max(elements // (self.tensors.query.shape[1] * rows * self._columns(rows, columns)), 1)

    def _parts(self, stack: list[Run], elements: int) -> Iterator[list[Run]]:
        """Yield a stack; one run that has too many scores in parts."""
        if len(stack) > 1:
            yield stack
            return
        for some in evenly(stack[0].count, self._most(*padded_shape(stack), elements)):
            yield [stack[0].part(some.start, some.stop)]


def find_runs(tensors: AttentionTensors, spec: AttentionSpec) -> tuple[list[Run], list[Run]]:
    """Return the sequences with queries that see keys, and those with queries that see none. This reads the tensors of lengths
    and offsets, and so waits for a GPU."""
    query, key, is_packed = tensors.query, tensors.key, tensors.cu_seqlens_q is not None
    count, num_queries, num_keys = tensors.num_sequences, query.shape[2], key.shape[2]
    lengths = [num_keys] * count if tensors.key_lengths is None else tensors.key_lengths.clamp(0, num_keys).tolist()
    offsets = [spec.query_offset] * count if tensors.query_offsets is None else tensors.query_offsets.tolist()
    starts, sizes = [(0, 0)] * count, [(num_queries, length) for length in lengths]
    if tensors.cu_seqlens_q is not None and tensors.cu_seqlens_k is not None:
        starts = list(zip(tensors.cu_seqlens_q.tolist(), tensors.cu_seqlens_k.tolist(), strict=True))
        sizes = [(q - first_q, k - first_k) for (first_q, first_k), (q, k) in pairwise(starts)]
    found, first = [], 0
    for stop in range(1, count + 1):
        if stop < count and (sizes[stop], offsets[stop]) == (sizes[first], offsets[first]):
            continue
        (query_start, key_start), (size, length), offset = starts[first], sizes[first], offsets[first]
        low = max(offset - spec.window_left, 0) if spec.window_left >= 0 else 0
        high = min(offset + size + spec.window_right, length) if spec.window_right >= 0 else length
        place = 0 if is_packed else first, query_start, key_start
        if size > 0:
            found.append(Run(first, *place, size, length, offset, low, high, is_packed, stop - first))
        first = stop
    return [each for each in found if each.start < each.stop], [each for each in found if each.start >= each.stop]


def has_infinite_table(tensors: AttentionTensors) -> bool:
    """Return whether a table may make all logits of a query -inf. Elsewhere than on a CPU, to ask would be to wait."""
    for name in TABLES:
        table = getattr(tensors, name)
        if name != "rel_value" and table is not None and not (table.device.type == "cpu" and math.isfinite(table.sum())):
            return True
    return False


def threads_of(device: torch.device) -> int:
    """Return the number of threads to size a block for."""
    return torch.get_num_threads() if device.type == "cpu" else THREADS_ELSEWHERE


def threads_for(tensors: AttentionTensors, elements: int) -> int:
    """Return the number of threads to size blocks for, if a block has this many scores per thread."""
    threads = threads_of(tensors.query.device)
    if tensors.query.device.type != "cpu" or threads <= FEWEST_THREADS:
        return threads
    query, key, value, *_ = tensors
    room = 2 * (query.numel() + key.numel() + value.numel() + query.shape[:3].numel() * value.shape[3])
    return min(threads, max(FEWEST_THREADS, room // (SCORES * elements)))


def evenly(count: int, most: int) -> list[slice]:
    """Return slices of 0 .. count of about the same size, at most the given one."""
    parts = -(-count // most)
    return [slice(number * count // parts, (number + 1) * count // parts) for number in range(parts)]


def padded_shape(stack: list[Run]) -> tuple[int, int]:
    """Return the number of rows and columns of sequences that are aligned."""
    columns = max(each.stop - each.offset for each in stack) - min(each.start - each.offset for each in stack)
    return max(each.num_queries for each in stack), columns


class Group:
    """Sequences and heads whose scores are computed together, with their rows and columns ready for products.

    Rows are (sequences, heads, rows, width); products take a matrix for each block and the heads that share a key. Columns are
    such matrices. Matrices are batches, (sequences * key heads, ..., ...), if there are several.
    """

    def __init__(self, call: Call, stack: list[Run], heads: slice, most_rows: int, products: Products) -> None:
        """most_rows: of a block."""
        self.call, self.stack, self.heads, self.products = call, stack, heads, products
        spec, tensors, step = call.spec, call.tensors, products.step
        self.key_heads = slice(heads.start // call.sharing, heads.stop // call.sharing)
        self.sizes = sum(each.count for each in stack), heads.stop - heads.start
        self.num_matrices = self.sizes[0] * (self.key_heads.stop - self.key_heads.start)
        self.num_queries, self.num_keys = padded_shape(stack)
        self.base = min(each.start - each.offset for each in stack)
        """The position of row 0 and column 0."""
        self.num_blocks = -(-self.num_queries // most_rows)
        self.num_rows = up(-(-self.num_queries // self.num_blocks), step)
        """Rows of a block, as even as possible; the last one has fewer if products take them."""
        self.all_rows = up(self.num_queries, step)
        self.num_columns = up(self.num_keys, step) + (step if spec.window_left >= 0 and step > 1 else 0)
        self.is_alike = len(stack) == 1
        """Whether its queries and keys are views of the tensors."""
        # With few blocks the last columns of bands are worth a multiple of the step; with many the table need not be padded.
        padding = products.band_step if step > 1 or self.num_blocks < FEWEST_VIEWED else 0
        self.positions = range(self.base - self.all_rows + 1, self.base + self.num_columns + padding)
        """All that a band of its blocks may have."""
        self.seen = tuple(sorted({self._seen(each) for each in stack}))
        """From the lowest to the highest position that the pairs of each sequence have."""
        self.key, self.value = self.columns(tensors.key), self.columns(tensors.value)
        self.query = self.rel_query = Rows(self, self.rows(tensors.query))
        if tensors.rel_query is not None:
            self.rel_query = Rows(self, self.rows(tensors.rel_query))
        self.tables = call.tables(self)
        self._panels: tuple[tuple[int, int], list[tuple[slice, torch.Tensor]]] | None = None
        self.setting = Setting(heads, products, call.memory, call.term_dtype, call.product_dtype)

    @cached_property
    def key_across(self) -> torch.Tensor:
        """The keys transposed, (..., width, columns)."""
        return transposed(self.key, self.call.sharing * self.all_rows) if self.num_blocks == 1 else self.key.mT

    @cached_property
    def value_across(self) -> torch.Tensor:
        """The values transposed."""
        return transposed(self.value, self.call.sharing * self.all_rows) if self.num_blocks == 1 else self.value.mT

    @cached_property
    def key_operand(self) -> torch.Tensor:
        """The keys in the dtype of products."""
        return cast(self.key, self.call.product_dtype)

    @cached_property
    def value_operand(self) -> torch.Tensor:
        """The values in the dtype of products."""
        return cast(self.value, self.call.product_dtype)

    @cached_property
    def mirrored_keys(self) -> torch.Tensor:
        """The keys of each head, (sequences, heads, columns, width): the rows of rel_p2c."""
        keys = self.key.view(self.sizes[0], -1, self.num_columns, self.key.shape[-1])
        return keys if self.call.sharing == 1 else keys.repeat_interleave(self.call.sharing, 1)

    def panels(self, block: Block) -> list[tuple[slice, torch.Tensor]]:
        """Return parts of a block's columns, and their keys, (sequences, heads, columns, width): the rows of bands of rel_p2c, of
        which many columns are not needed if they have many rows."""
        place = block.start, block.num_columns
        if self._panels is None or self._panels[0] != place:
            step, keys = max(self.num_rows // 2, min(self.num_rows, FEWEST_KEYS)), block.columns(self.mirrored_keys)
            parts = [slice(start, min(start + step, block.num_columns)) for start in range(0, block.num_columns, step)]
            self._panels = place, [(each, keys[:, :, each].contiguous()) for each in parts]
        return self._panels[1]

    @cached_property
    def sequences(self) -> list[Run]:
        """Each of its sequences."""
        return [each.part(number, number + 1) for each in self.stack for number in range(each.count)]

    def _seen(self, each: Run) -> tuple[int, int]:
        """Return the lowest position that a pair of a sequence has, and the one after the highest."""
        left, right = self.call.spec.window_left, self.call.spec.window_right
        low, high = each.start - each.offset - each.num_queries + 1, each.stop - each.offset
        return max(low, -left) if left >= 0 else low, min(high, right + 1) if right >= 0 else high

    @cached_property
    def places(self) -> tuple[Places, Places]:
        """Where rows and columns of sequences that differ are in the tensors."""
        table = torch.tensor([each[1:9] for each in self.sequences], device=self.call.tensors.query.device)[..., None]
        entry, query, key, count, _, offset, start, stop = table.unbind(1)
        m = torch.arange(self.all_rows, device=table.device)
        number = torch.arange(self.num_columns, device=table.device) + self.base + offset
        num_key_heads = self.key_heads.stop - self.key_heads.start
        return (
            Places(entry, query + m, m < count, self.sizes[1]),
            Places(entry, key + number, (number >= start) & (number < stop), num_key_heads),
        )

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the queries of a (B, Hq, Nq, width) tensor and zeros, (sequences, heads, rows, width): a view if it can be."""
        if self.is_alike:
            found = cast(self._query_view(tensor), self.call.dtype)
            padding = self.all_rows - self.num_queries
            found = torch.nn.functional.pad(found, (0, 0, 0, padding)) if padding else found
            return found if self.num_matrices == 1 and found.stride(3) == 1 else found.contiguous()
        return cast(self.places[0].read(narrow(tensor, 1, self.heads.start, self.heads.stop)), self.call.dtype)

    def columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the keys of a (B, Hk, Nk, width) tensor that are seen as matrices (columns, width), and zeros."""
        if self.is_alike:
            found = cast(self._key_view(tensor), self.call.dtype)
            padding = self.num_columns - self.num_keys
            found = torch.nn.functional.pad(found, (0, 0, 0, padding)) if padding else found
        else:
            found = cast(self.places[1].read(narrow(tensor, 1, self.key_heads.start, self.key_heads.stop)), self.call.dtype)
        found = found if found.stride(3) == 1 else found.contiguous()
        if self.num_matrices == 1:
            return found[0, 0]
        return found.reshape(self.num_matrices, self.num_columns, tensor.shape[3])

    def _query_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view of a (B, Hq, Nq, ...) tensor that has the queries of sequences that are alike."""
        return self._view(tensor, self.heads, self.stack[0].query, self.num_queries, self.num_queries)

    def _key_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view of a (B, Hk, Nk, width) tensor that has the keys of sequences that are alike."""
        first = self.stack[0]
        return self._view(tensor, self.key_heads, first.key + first.start, self.num_keys, first.num_keys)

    def _view(self, tensor: torch.Tensor, heads: slice, first: int, length: int, step: int) -> torch.Tensor:
        """Return length rows of each sequence, (sequences, heads, length, ...). step: from one to the next in a packed batch."""
        run = self.stack[0]
        if not run.is_packed or run.count == 1:
            found = narrow(narrow(tensor, 0, run.entry, run.entry + run.count), 1, heads.start, heads.stop)
            return narrow(found, 2, first, first + length)
        one = tensor[run.entry, heads, first : first + length]
        return one.as_strided((run.count, *one.shape), (step * tensor.stride(2), *one.stride()), one.storage_offset())

    def new_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory for results of rows: the queries of a (B, Hq, Nq, width) tensor if that is a view in the right dtype."""
        if self.is_alike and tensor.dtype == self.call.dtype and self.all_rows == self.num_queries:
            return self._query_view(tensor)
        return tensor.new_empty(*self.sizes, self.all_rows, tensor.shape[3], dtype=self.call.dtype)

    def put_rows(self, tensor: torch.Tensor, rows: torch.Tensor) -> None:
        """Write what is in new_rows() to the queries of a (B, Hq, Nq, width) tensor."""
        if self.is_alike:
            queries = self._query_view(tensor)
            if queries.data_ptr() != rows.data_ptr():
                queries.copy_(rows[:, :, : self.num_queries])
            return
        self.places[0].write(narrow(tensor, 1, self.heads.start, self.heads.stop), rows)

    def new_columns(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return memory for sums of columns, transposed, (..., width, columns): of batches, a view of the keys of a (B, Hk, Nk,
        width) tensor if they are contiguous."""
        width, dtype = tensor.shape[3], self.call.dtype
        if self.num_matrices == 1:
            return self.call.memory(name, (width, self.num_columns), dtype)
        shape = self.num_matrices, self.num_columns, width
        if self.is_alike and tensor.dtype == dtype and self.num_columns == self.num_keys:
            found = self._key_view(tensor)
            if found.is_contiguous():
                return found.view(shape).mT
        return self.call.memory(name, shape, dtype).mT

    def put_columns(self, tensor: torch.Tensor, columns: torch.Tensor) -> None:
        """Write what is in new_columns() to the keys of a (B, Hk, Nk, width) tensor."""
        found = columns.mT.reshape(self.sizes[0], -1, self.num_columns, tensor.shape[3])
        if self.is_alike:
            keys = self._key_view(tensor)
            if keys.data_ptr() != columns.data_ptr():
                keys.copy_(found[:, :, : self.num_keys])
            return
        self.places[1].write(narrow(tensor, 1, self.key_heads.start, self.key_heads.stop), found)

    def blocks(self) -> Iterator[Block]:
        for number in range(self.num_blocks):
            yield Block(self, number)


class Rows:
    """Rows of a group by block: (sequences, heads, rows, width), and the same as matrices, (sharing * rows, width) or batches of
    them."""

    def __init__(self, group: Group, rows: torch.Tensor) -> None:
        self.all, self.parts = rows, [rows] if group.num_blocks == 1 else list(rows.split(group.num_rows, 2))
        self.shape = (-1, rows.shape[3]) if group.num_matrices == 1 else (group.num_matrices, -1, rows.shape[3])
        self.is_matrix = rows.shape[0] == rows.shape[1] == 1
        self._copy: tuple[int, torch.Tensor] | None = None

    def vectors(self, number: int) -> torch.Tensor:
        """Return the rows of a block that are operands: contiguous, if they are not one matrix; the last copy is held."""
        part = self.parts[number]
        if self.is_matrix or part.is_contiguous():
            return part
        if self._copy is None or self._copy[0] != number:
            self._copy = number, part.contiguous()
        return self._copy[1]

    def operand(self, number: int) -> torch.Tensor:
        """Return the matrices of the rows of a block that are operands."""
        found = self.vectors(number)
        return found[0, 0] if self.is_matrix else found.view(self.shape)

    def place(self, number: int) -> torch.Tensor | None:
        """Return the matrices of a block to write to; None if they are no view."""
        part = self.parts[number]
        return part[0, 0] if self.is_matrix else part.view(self.shape) if part.is_contiguous() else None


class Block:
    """Some rows of a group, and the columns that they see.

    Scores are matrices (sharing * rows, columns), or batches of them, and (sequences, heads, rows, columns) by pair.
    """

    def __init__(self, group: Group, number: int) -> None:
        self.group, self.call, self.number = group, group.call, number
        spec, step = group.call.spec, group.products.step
        row = self.row = number * group.num_rows
        self.num_rows = min(group.num_rows, group.all_rows - row)
        self.num_real = min(self.num_rows, group.num_queries - row)
        """Rows that are of queries; where sequences differ, of some of them."""
        start, stop = 0, group.num_keys
        if spec.window_left >= 0:
            start = max(row - group.base - spec.window_left, 0)
        if spec.window_right >= 0:
            stop = min(row + self.num_real + spec.window_right - group.base, stop)
        self.start, self.num_seen = start, max(stop - start, 0)
        self.num_columns = up(self.num_seen, step)
        self.has_all = self.num_columns == group.num_columns
        self.base = group.base + start - row
        """The position of row 0 and column 0."""
        self.shape = (*group.sizes, self.num_rows, self.num_columns)
        one = group.call.sharing * self.num_rows, self.num_columns
        self.matrix_shape = one if group.num_matrices == 1 else (group.num_matrices, *one)

    @property
    def may_be_blind(self) -> bool:
        """Whether a row may see none of the columns."""
        spec, call = self.call.spec, self.call
        if call.tensors.attn_mask is not None or call.has_infinite_table:
            return True
        if not self.group.is_alike:
            return max(spec.window_left, spec.window_right) >= 0
        # With a window the first row may be before all keys, or the last row beyond them.
        beyond = spec.window_left >= 0 and self.base - self.num_real + self.num_seen < -spec.window_left
        return beyond or (spec.window_right >= 0 and self.base > spec.window_right)

    def columns(self, columns: torch.Tensor) -> torch.Tensor:
        """Return the block's part of (..., columns, width)."""
        return columns if self.has_all else columns.narrow(-2, self.start, self.num_columns)

    def across(self, columns: torch.Tensor) -> torch.Tensor:
        """Return the block's part of (..., width, columns)."""
        return columns if self.has_all else columns.narrow(-1, self.start, self.num_columns)

    def scores(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for scores as matrices."""
        return self.call.memory(name, self.matrix_shape, dtype)

    def write(self, rows: Rows, left: torch.Tensor, right: torch.Tensor, scale: float = 1.0) -> None:
        """Write scale times a product of matrices to the block's rows."""
        part, place = rows.parts[self.number], rows.place(self.number)
        is_place = place is not None and part.dtype == left.dtype
        if place is None or not is_place:
            place = self.call.memory("rows", (*left.shape[:-1], right.shape[-1]), left.dtype)
        found = self.group.products.scaled(left, right, scale, place)
        if found is not place or not is_place:
            part.copy_(found.view(part.shape))

    def triangles(self, dtype: torch.dtype) -> tuple[Limits, Limits]:
        """Return what hides the pairs of a window's left edge, and of its right edge; see masks.py."""
        limits, kind = self.call.limits, (self.num_rows, dtype)
        if kind not in limits:
            limits[kind] = triangles(self.num_rows, dtype, self.call.tensors.query.device)
        return limits[kind]


class Places:
    """Where rows of sequences that differ are in a (B, heads, N, width) tensor."""

    def __init__(self, entry: torch.Tensor, number: torch.Tensor, exists: torch.Tensor, num_heads: int) -> None:
        """entry: of each sequence, (sequences, 1). number: of each row, (sequences, length). exists: whether there is one."""
        self.entry, self.number, self.exists = entry[..., None], number.masked_fill(~exists, 0)[:, None], exists
        self.heads = torch.arange(num_heads, device=entry.device)[:, None]
        by_head = exists[:, None].expand(-1, num_heads, -1).flatten()
        self.existing, self.missing = (each.nonzero()[:, 0] for each in (by_head, ~by_head))

    def _as_rows(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a tensor's memory as rows, or a copy, and the number of each row, (sequences, heads, length)."""
        width = tensor.shape[3]
        if tensor.stride(3) != 1 or any(step % width for step in tensor.stride()[:3]):
            tensor = tensor.contiguous()
        steps = [step // width for step in tensor.stride()[:3]]
        count = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, steps, strict=False))
        rows = tensor.as_strided((count, width), (width, 1), tensor.storage_offset())
        return rows, self.entry * steps[0] + self.heads * steps[1] + self.number * steps[2]

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows, (sequences, heads, length, width), and zeros where there is none."""
        rows, index = self._as_rows(tensor)
        return rows.index_select(0, index.flatten()).index_fill_(0, self.missing, 0).view(*index.shape, -1)

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Write rows (sequences, heads, length, width) to their places."""
        rows, index = self._as_rows(tensor)
        found = values.reshape(-1, values.shape[3]).index_select(0, self.existing)
        rows.index_copy_(0, index.flatten().index_select(0, self.existing), cast(found, tensor.dtype))
        if rows.data_ptr() != tensor.data_ptr():
            tensor.copy_(rows.view(tensor.shape))
