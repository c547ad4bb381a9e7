"""The tensors of a call by groups and blocks: rows are queries, columns are keys.

A group is some heads of some sequences, whose scores are computed together. Its rows are (sequences, heads, rows, width).
Products take a matrix for all heads that share a key: (heads_per_key * rows, width) times (width, columns), or a batch of
them, (sequences * key heads, ..., ...), if a group has several. A block is some of its rows with all columns that they see.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

import torch

from .._core.dtypes import compute_dtype
from .._core.spec import TABLES, AttentionSpec, AttentionTensors
from .bands import Setting, Table, as_rows, cast, narrow, up
from .cut import Cut, Run, aligned_shape, find_runs
from .masks import Limits, triangles
from .products import Memory, Products, product_dtype, transposed
from .rows import Gather, Slices

MIN_VIEWED = 8  # blocks from which a table that has all positions is not copied
MIN_KEYS = 32  # keys of a band of rel_p2c: products with fewer are slow


def may_be_infinite(tensors: AttentionTensors) -> bool:
    """Return whether a table may make all logits of a query -inf. Elsewhere than on a CPU, to ask would be to wait."""
    for name in TABLES:
        table = getattr(tensors, name)
        if name != "rel_value" and table is not None and not (table.device.type == "cpu" and math.isfinite(table.sum())):
            return True
    return False


class Call:
    """What the blocks of a call share.

    dtype: that of scores and sums. product_dtype: that of what is multiplied, tables too. term_dtype: that of products for terms.
    """

    def __init__(self, tensors: AttentionTensors, spec: AttentionSpec, rounds_terms: bool = False) -> None:
        """rounds_terms: whether terms of tables are computed in product_dtype, not in dtype."""
        self.tensors, self.spec, self.cut = tensors, spec, Cut(tensors, spec)
        self.dtype, self.is_cpu = compute_dtype(tensors.query.dtype), tensors.query.device.type == "cpu"
        self.heads_per_key = tensors.query.shape[1] // max(tensors.key.shape[1], 1)
        self.runs, self.runs_without_keys = find_runs(tensors, spec)
        num_pairs = sum(run.count * run.num_queries * (run.stop - run.start) for run in self.runs)
        self.product_dtype = product_dtype(tensors.query, num_pairs * tensors.query.shape[1])
        self.term_dtype = self.product_dtype if rounds_terms else self.dtype
        self.memory = Memory(tensors.query)
        self.gradients: dict[str, torch.Tensor] = {}
        self._limits: dict[tuple[int, torch.dtype], tuple[Limits, Limits]] = {}
        self._tables: dict[str, Table] = {}
        self._tables_kind: object = None

    @property
    def sees_all_keys(self) -> bool:
        """Whether every key is seen by a query."""
        batch, _, num_keys, _ = self.tensors.key.shape
        visible = sum(run.count * (run.stop - run.start) for run in self.runs)
        return self.tensors.query.shape[1] > 0 and visible == batch * num_keys

    @cached_property
    def may_be_infinite(self) -> bool:
        """Whether a table may make all logits of a query -inf."""
        return may_be_infinite(self.tensors)

    def groups(self) -> Iterator[Group]:
        """Yield groups that together have all heads of all sequences with queries that see a key."""
        for runs, heads, rows, products in self.cut.groups(self.runs):
            yield Group(self, runs, heads, rows, products)

    def tables(self, group: Group) -> dict[str, Table]:
        """Return the tables' rows for the positions of a group: the last ones if they fit. Only the last ones may be used."""
        spec, margin = self.spec, group.num_rows + group.products.band_step
        positions = range(max(spec.first - margin, group.positions.start), min(spec.last + margin, group.positions.stop))
        kind = (positions, group.visible, group.products.band_step)
        if kind != self._tables_kind:
            self.add_table_gradients()
            self._tables_kind = kind
            for name in TABLES:
                table = getattr(self.tensors, name)
                if table is None:
                    continue
                table = as_rows(name, table, self.dtype)
                if name != "rel_p2c":
                    self._tables[name] = Table(name, table, spec.first, spec.clamp, positions, group.visible)
                    continue
                mirrored = sorted((1 - stop, 1 - start) for start, stop in group.visible)  # see bands.py
                around = range(1 - positions.stop - margin, 1 - positions.start + margin)
                self._tables[name] = Table(name, table.flip(1), -spec.last, spec.clamp, around, mirrored)
        return self._tables

    def add_table_gradients(self) -> None:
        """Add what the tables' rows have collected to the gradients of the tables."""
        for name, table in self._tables.items():
            if (gradient := table.gradient()) is not None:
                gradient = gradient.flip(1) if name == "rel_p2c" else gradient
                self.gradients[name] = gradient if name not in self.gradients else self.gradients[name].add_(gradient)
        self._tables = {}

    def triangles(self, num_rows: int, dtype: torch.dtype) -> tuple[Limits, Limits]:
        """Return what hides the pairs of a window's left edge, and of its right edge; see masks.py."""
        kind = num_rows, dtype
        if kind not in self._limits:
            self._limits[kind] = triangles(num_rows, dtype, self.tensors.query.device)
        return self._limits[kind]


class Group:
    """Sequences and heads whose scores are computed together, with their rows and columns ready for products."""

    def __init__(self, call: Call, runs: list[Run], heads: slice, max_rows: int, products: Products) -> None:
        """max_rows: of a block."""
        self.call, self.heads, self.products = call, heads, products
        spec, tensors, step, first = call.spec, call.tensors, products.step, runs[0]
        key_heads = slice(heads.start // call.heads_per_key, heads.stop // call.heads_per_key)
        self.runs, self.sizes = runs, (sum(run.count for run in runs), heads.stop - heads.start)
        self.num_matrices = self.sizes[0] * (key_heads.stop - key_heads.start)
        self.num_queries, self.num_keys = aligned_shape(runs)
        self.base = min(run.start - run.offset for run in runs)  # the position of row 0 and column 0
        self.num_blocks = -(-self.num_queries // max_rows)
        self.num_rows = up(-(-self.num_queries // self.num_blocks), step)
        """Rows of a block, as even as possible; the last one has fewer if products take them."""
        self.all_rows = up(self.num_queries, step)
        self.num_columns = up(self.num_keys, step) + (step if spec.window_left >= 0 and step > 1 else 0)
        # With few blocks the last columns of bands are worth a multiple of the step; with many the table need not be padded.
        padding = products.band_step if step > 1 or self.num_blocks < MIN_VIEWED else 0
        self.positions = range(self.base - self.all_rows + 1, self.base + self.num_columns + padding)
        """All that a band of its blocks may have."""
        self.visible = tuple(sorted({self._visible(run) for run in runs}))
        """From the lowest to the highest position that the pairs of each sequence have."""
        self.is_uniform = len(runs) == 1  # whether its queries and keys are views of the tensors
        self.query_rows: Slices | Gather
        self.key_rows: Slices | Gather
        if self.is_uniform:
            self.query_rows = Slices(first, heads, first.query, self.num_queries, self.num_queries)
            self.key_rows = Slices(first, key_heads, first.key + first.start, self.num_keys, first.num_keys)
        else:
            self.query_rows, self.key_rows = self._gathers(key_heads)
        self.query, self.key, self.value = self.rows(tensors.query), self.columns(tensors.key), self.columns(tensors.value)
        self.key_operand, self.value_operand = cast(self.key, call.product_dtype), cast(self.value, call.product_dtype)
        self.rel_query = self.query if tensors.rel_query is None else self.rows(tensors.rel_query)
        self.tables = call.tables(self)
        self._panels: tuple[tuple[int, int], list[tuple[slice, torch.Tensor]]] | None = None
        self.setting = Setting(heads, products, call.memory, call.term_dtype, call.product_dtype)

    @cached_property
    def sequences(self) -> list[Run]:
        """Each of its sequences."""
        return [sequence for run in self.runs for sequence in run.sequences()]

    def _visible(self, run: Run) -> tuple[int, int]:
        """Return the lowest position that a pair of a sequence has, and the one after the highest."""
        left, right = self.call.spec.window_left, self.call.spec.window_right
        low, high = run.start - run.offset - run.num_queries + 1, run.stop - run.offset
        return max(low, -left) if left >= 0 else low, min(high, right + 1) if right >= 0 else high

    def _gathers(self, key_heads: slice) -> tuple[Gather, Gather]:
        """Return where the rows and the columns are."""
        device = self.call.tensors.query.device
        fields = [(s.entry, s.query, s.num_queries, s.key, s.offset, s.start, s.stop) for s in self.sequences]
        entry, query, count, key, offset, start, stop = torch.tensor(fields, device=device)[..., None].unbind(1)
        m = torch.arange(self.all_rows, device=device)
        n = torch.arange(self.num_columns, device=device) + self.base + offset  # the key of each column
        return Gather(entry, query + m, m < count, self.heads), Gather(entry, key + n, (n >= start) & (n < stop), key_heads)

    @cached_property
    def keys_by_head(self) -> torch.Tensor:
        """The keys of each head of the query, (sequences, heads, columns, width): the rows of rel_p2c."""
        keys = self.key.view(self.sizes[0], -1, self.num_columns, self.key.shape[-1])
        return keys if self.call.heads_per_key == 1 else keys.repeat_interleave(self.call.heads_per_key, 1)

    def panels(self, block: Block) -> list[tuple[slice, torch.Tensor]]:
        """Return parts of a block's columns and their keys, rows of bands of rel_p2c; large parts have many unneeded columns."""
        kind = block.start, block.num_columns
        if self._panels is None or self._panels[0] != kind:
            step, keys = max(self.num_rows // 2, min(self.num_rows, MIN_KEYS)), block.columns(self.keys_by_head)
            parts = [slice(start, min(start + step, block.num_columns)) for start in range(0, block.num_columns, step)]
            self._panels = kind, [(part, keys[:, :, part].contiguous()) for part in parts]
        return self._panels[1]

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the queries of a (B, Hq, Nq, width) tensor and zeros, (sequences, heads, rows, width): a view if it can be."""
        rows = self.query_rows.read(tensor, self.all_rows, self.call.dtype)
        return rows if self.num_matrices == 1 and rows.stride(3) == 1 else rows.contiguous()

    def columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the keys of a (B, Hk, Nk, width) tensor that are seen as matrices (columns, width), and zeros."""
        columns = self.key_rows.read(tensor, self.num_columns, self.call.dtype)
        columns = columns if columns.stride(3) == 1 else columns.contiguous()
        return columns[0, 0] if self.num_matrices == 1 else columns.reshape(self.num_matrices, self.num_columns, tensor.shape[3])

    def new_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory for results of rows: the queries of a (B, Hq, Nq, width) tensor if that is a view in the right dtype."""
        dtype = self.call.dtype
        if isinstance(self.query_rows, Slices) and tensor.dtype == dtype and self.all_rows == self.num_queries:
            return self.query_rows.view(tensor)
        return tensor.new_empty(*self.sizes, self.all_rows, tensor.shape[3], dtype=dtype)

    def new_columns(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return memory for sums of columns, a view of the tensor if it can be; a single matrix is transposed, to be added to
        faster."""
        width, dtype = tensor.shape[3], self.call.dtype
        if self.num_matrices == 1:
            return self.call.memory(name, (width, self.num_columns), dtype).mT
        shape = self.num_matrices, self.num_columns, width
        if isinstance(self.key_rows, Slices) and tensor.dtype == dtype and self.num_columns == self.num_keys:
            view = self.key_rows.view(tensor)
            if view.is_contiguous():
                return view.view(shape)
        return self.call.memory(name, shape, dtype)

    def blocks(self) -> Iterator[Block]:
        for number in range(self.num_blocks):
            yield Block(self, number)


class Block:
    """Some rows of a group, and the columns that they see.

    Scores are matrices (heads_per_key * rows, columns), or batches of them, and (sequences, heads, rows, columns) by pair.
    """

    def __init__(self, group: Group, number: int) -> None:
        self.group, self.call, self.number = group, group.call, number
        spec, step = group.call.spec, group.products.step
        row = self.row = number * group.num_rows
        self.num_rows = min(group.num_rows, group.all_rows - row)
        self.num_queries = min(self.num_rows, group.num_queries - row)
        """Rows that are of queries; where sequences differ, of some of them."""
        start, stop = 0, group.num_keys
        if spec.window_left >= 0:
            start = max(row - group.base - spec.window_left, 0)
        if spec.window_right >= 0:
            stop = min(row + self.num_queries + spec.window_right - group.base, stop)
        self.start, self.num_keys = start, max(stop - start, 0)
        self.num_columns = up(self.num_keys, step)
        self.has_all_columns = self.num_columns == group.num_columns
        self.base = group.base + start - row  # the position of row 0 and column 0
        self.shape = (*group.sizes, self.num_rows, self.num_columns)
        self.is_matrix = group.sizes == (1, 1)
        matrix = group.call.heads_per_key * self.num_rows, self.num_columns
        self.matrix_shape = matrix if group.num_matrices == 1 else (group.num_matrices, *matrix)

    @property
    def may_hide_rows(self) -> bool:
        """Whether a row may see none of the columns."""
        spec, call = self.call.spec, self.call
        if call.tensors.attn_mask is not None or call.may_be_infinite:
            return True
        if not self.group.is_uniform:
            return max(spec.window_left, spec.window_right) >= 0
        # With a window the first row may be before all keys, or the last row beyond them.
        is_beyond = spec.window_left >= 0 and self.base - self.num_queries + self.num_keys < -spec.window_left
        return is_beyond or (spec.window_right >= 0 and self.base > spec.window_right)

    def rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the block's part of a group's rows, (sequences, heads, rows, width)."""
        return narrow(rows, 2, self.row, self.row + self.num_rows)

    def vectors(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the block's rows as they are multiplied: contiguous, if they are not one matrix."""
        return self.rows(rows) if self.is_matrix else self.rows(rows).contiguous()

    def matrices(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the same as matrices, (heads_per_key * rows, width), or batches of them."""
        return vectors[0, 0] if self.is_matrix else vectors.view(*self.matrix_shape[:-1], vectors.shape[3])

    @cached_property
    def query(self) -> torch.Tensor:
        """The block's queries."""
        return self.vectors(self.group.query)

    @cached_property
    def rel_query(self) -> torch.Tensor:
        """The vectors that meet rel_key."""
        return self.query if self.call.tensors.rel_query is None else self.vectors(self.group.rel_query)

    def columns(self, columns: torch.Tensor) -> torch.Tensor:
        """Return the block's part of (..., columns, width)."""
        return columns if self.has_all_columns else columns.narrow(-2, self.start, self.num_columns)

    def across(self, columns: torch.Tensor) -> torch.Tensor:
        """Return the block's part of (..., columns, width) as the transposed operand of a product."""
        group, columns = self.group, self.columns(columns)
        return transposed(columns, self.call.heads_per_key * group.all_rows) if group.num_blocks == 1 else columns.mT

    def scores(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for scores as matrices."""
        return self.call.memory(name, self.matrix_shape, dtype)

    def write(self, rows: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float = 1.0) -> None:
        """Write scale times a product of matrices to the block's part of a group's rows."""
        part, products = self.rows(rows), self.group.products
        if part.dtype == left.dtype and (self.is_matrix or part.is_contiguous()):
            out = self.matrices(part)
            result = products.scaled(left, right, scale, out)
            if result is not out:
                out.copy_(result)
        else:
            out = self.call.memory("rows", (*left.shape[:-1], right.shape[-1]), left.dtype)
            part.copy_(products.scaled(left, right, scale, out).view(part.shape))
