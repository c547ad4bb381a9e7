"""Linear-memory attention in plain torch, forward and hand-written backward, for any device.

A block of M queries needs the table rows of the relative positions ``r = r_start .. r_start + num_keys + M - 2``: a *band*.
``band[m, c] = p_m . E[row(r_start + c)]`` is one matrix product, and the relative score of query m and key n is
``band[m, n - m + M - 1]``. Read with a row stride that is one shorter, the same memory *is* the score block:

    address(m, n) = m * width + n - m + M - 1 = m * (width - 1) + n + M - 1

So ``Q K^T`` is accumulated straight into that view, softmax runs in it, and in the backward dS written into it is at once
the band gradient that multiplies the table: no gather, no copy, no scatter. In band coordinates a mask on the relative
position (causal) is a range of columns. The working set is one band buffer per chunk of heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .spec import AttentionSpec

BLOCK_QUERIES = 128
# Elements of a band buffer per thread: one to two megabytes, what a core keeps in its own cache.
BAND_ELEMENTS_PER_THREAD = 1 << 18


def new_like(query: torch.Tensor, width: int) -> torch.Tensor:
    """Empty (B, H, N, width) tensor in query's memory order: (B, N, H, width) if query is such a view."""
    batch, heads, length, _ = query.shape
    if query.stride(1) < query.stride(2):
        return query.new_empty(batch, length, heads, width).transpose(1, 2)
    return query.new_empty(batch, heads, length, width)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and accumulators: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Block:
    """Some heads of one batch entry, a block of their queries, and the keys those can see."""

    batch: int
    heads: slice
    queries: slice
    num_keys: int
    spec: AttentionSpec

    @property
    def num_queries(self) -> int:
        return self.queries.stop - self.queries.start

    @property
    def width(self) -> int:
        """Columns of the band: relative positions that any of the queries has to any of the keys."""
        return self.num_keys + self.num_queries - 1

    def column(self, relative_position: int) -> int:
        """Band column of a relative position, limited to 0 .. width."""
        first = -(self.queries.stop - 1) - self.spec.query_offset
        return min(max(relative_position - first, 0), self.width)

    @property
    def visible_width(self) -> int:
        """Columns up to the last relative position that is not hidden. Table rows beyond it are not read."""
        return self.column(1) if self.spec.is_causal else self.width

    def near_columns(self) -> slice:
        """Visible band columns with a table row of their own."""
        first, stop = self.column(self.spec.first), self.column(self.spec.last + 1)
        return slice(min(first, self.visible_width), min(stop, self.visible_width))

    def near_rows(self) -> slice:
        """The table rows of the near columns."""
        near = self.near_columns()
        row = near.start - (self.queries.stop - 1) - self.spec.query_offset - self.spec.first
        return slice(row, row + near.stop - near.start)

    def far_columns(self, near: slice) -> Iterator[tuple[slice, int]]:
        """Visible band columns beyond the table, past and future, each with the table row that clamping gives them."""
        if near.start > 0:
            yield slice(0, near.start), 0
        if near.stop < self.visible_width:
            yield slice(near.stop, self.visible_width), -1

    def scores_view(self, band: torch.Tensor) -> torch.Tensor:
        """The (heads, num_queries, num_keys) view of a contiguous band in which element (m, n) is band[m, n - m + M - 1]."""
        heads, rows, width = band.shape
        return band.as_strided((heads, rows, self.num_keys), (rows * width, width - 1, 1), rows - 1)

    def clear_corners(self, band: torch.Tensor) -> None:
        """Zero what the scores view does not cover: the first M-1-m and the last m columns of row m."""
        corner = self.num_queries - 1
        m = torch.arange(self.num_queries, device=band.device)[:, None]
        c = torch.arange(corner, device=band.device)[None, :]
        before = c < corner - m
        band[..., :corner].masked_fill_(before, 0)
        band[..., self.num_keys :].masked_fill_(~before, 0)


def chunks(query: torch.Tensor, num_keys: int, key_lengths: torch.Tensor | None) -> Iterator[tuple[int, slice, int]]:
    """Batch entry, range of heads and number of keys of every chunk whose band fits the working set."""
    batch, heads, num_queries, _ = query.shape
    band = min(num_queries, BLOCK_QUERIES) * (num_keys + BLOCK_QUERIES)
    heads_per_chunk = max(1, torch.get_num_threads() * BAND_ELEMENTS_PER_THREAD // max(band, 1))
    lengths = [num_keys] * batch if key_lengths is None else key_lengths.clamp(0, num_keys).tolist()
    for b in range(batch):
        for h in range(0, heads, heads_per_chunk):
            yield b, slice(h, min(h + heads_per_chunk, heads)), lengths[b]


def query_blocks(b: int, heads: slice, length: int, num_queries: int, spec: AttentionSpec) -> Iterator[Block]:
    """The blocks of queries of a chunk, leaving out those that see no key."""
    for start in range(0, num_queries, BLOCK_QUERIES):
        stop = min(start + BLOCK_QUERIES, num_queries)
        num_keys = spec.visible_keys(stop - 1, length)
        if num_keys > 0:
            yield Block(b, heads, slice(start, stop), num_keys, spec)


def matmul_ready(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In dtype, with unit stride along the last dimension; a copy only where that is not so already."""
    tensor = tensor.to(dtype)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def per_head(table: torch.Tensor, heads: slice) -> torch.Tensor:
    """The (heads, R, D) tables of a range of heads; a shared table is expanded without a copy."""
    return table.expand(heads.stop - heads.start, -1, -1) if table.dim() == 2 else table[heads]


def logits(
    block: Block, query: torch.Tensor, key: torch.Tensor, table: torch.Tensor | None, start: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The band buffer (heads, M, width) and its scores view, holding q.k + q.E + start; hidden scores are -inf.

    query (heads, M, D) is already scaled; start is (heads, M, 1), None for zero.
    """
    band = query.new_empty(*query.shape[:2], block.width)
    near = block.near_columns() if table is not None else slice(0, 0)
    if table is not None:
        rows = table[:, block.near_rows()].mT
        beta, start_or_any = (0, band[..., near]) if start is None else (1, start)
        torch.baddbmm(start_or_any, query, rows, beta=beta, out=band[..., near])
    for columns, row in block.far_columns(near):
        far = query @ table[:, row, :, None] if table is not None and block.spec.clamp else query.new_zeros(())
        band[..., columns] = far if start is None else far + start
    band[..., block.visible_width :] = -math.inf
    scores = block.scores_view(band)
    scores.baddbmm_(query, key[:, : block.num_keys].mT)
    return band, scores


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_key: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    spec: AttentionSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (B, H, Nq, Dv) in the inputs' dtype and lse (B, H, Nq) in the compute dtype."""
    dtype = compute_dtype(query.dtype)
    out = new_like(query, value.shape[-1]).zero_()
    lse = query.new_full(query.shape[:3], -math.inf, dtype=dtype)
    table = None if rel_key is None else matmul_ready(rel_key, dtype)

    for b, heads, length in chunks(query, key.shape[2], key_lengths):
        k, v = matmul_ready(key[b, heads], dtype), matmul_ready(value[b, heads], dtype)
        tables = None if table is None else per_head(table, heads)
        for block in query_blocks(b, heads, length, query.shape[2], spec):
            q = query[b, heads, block.queries].to(dtype) * spec.scale
            _, scores = logits(block, q, k, tables)
            row_max = scores.amax(-1, keepdim=True)
            row_max.masked_fill_(row_max == -math.inf, 0)
            probs = scores.sub_(row_max).exp_()
            row_sum = probs.sum(-1, keepdim=True)
            lse[b, heads, block.queries] = (row_max + row_sum.log()).squeeze(-1)
            out[b, heads, block.queries] = (probs @ v[:, : block.num_keys]).div_(row_sum.masked_fill_(row_sum == 0, 1))
    return out, lse


def backward(
    d_out: torch.Tensor,
    d_lse: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_key: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    spec: AttentionSpec,
    wanted: Sequence[bool] = (True, True, True, True),
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of query, key, value and rel_key, None where not wanted or not there.

    delta_i = sum_j P[i, j] dP[i, j] - dlse_i is computed from the block itself. The usual shortcut, rowsum(out * d_out), uses
    an out that was rounded to the input dtype; every dS of the row then carries the same small error, and the table's
    gradient, a sum over all rows, adds these errors up.
    """
    dtype = compute_dtype(query.dtype)
    wants_query, wants_key, wants_value, wants_table = wanted
    d_query = new_like(query, query.shape[-1]).zero_() if wants_query else None
    d_key = new_like(key, key.shape[-1]) if wants_key else None
    d_value = new_like(value, value.shape[-1]) if wants_value else None
    table = None if rel_key is None else matmul_ready(rel_key, dtype)
    d_table = None if table is None or not wants_table else torch.zeros(table.shape, dtype=dtype, device=table.device)

    for b, heads, length in chunks(query, key.shape[2], key_lengths):
        k, v = matmul_ready(key[b, heads], dtype), matmul_ready(value[b, heads], dtype)
        dk, dv = (None if gradient is None else torch.zeros_like(x) for x, gradient in ((k, d_key), (v, d_value)))
        tables = None if table is None else per_head(table, heads)
        for block in query_blocks(b, heads, length, query.shape[2], spec):
            keys = slice(0, block.num_keys)
            q = query[b, heads, block.queries].to(dtype) * spec.scale
            do = d_out[b, heads, block.queries].to(dtype)
            row_lse = lse[b, heads, block.queries, None]
            # exp(-inf) = 0 also for a row that sees nothing, whose lse is -inf too.
            band, scores = logits(block, q, k, tables, start=torch.where(row_lse == -math.inf, row_lse, -row_lse))
            probs = scores.exp_()
            if dv is not None:
                dv[:, keys].baddbmm_(probs.mT, do)
            if d_query is None and dk is None and d_table is None:
                continue
            d_probs = do @ v[:, keys].mT
            # The rounding of lse scales a row of probs; left in delta it would not cancel against dP, which may be large.
            row_sum = probs.sum(-1).clamp_min_(0.5)
            delta = torch.linalg.vecdot(probs, d_probs).div_(row_sum).sub_(d_lse[b, heads, block.queries])
            d_scores = probs.mul_(d_probs.sub_(delta[..., None]))  # in the band: from here on it holds dS
            dq = None if d_query is None else d_scores @ k[:, keys]
            if dk is not None:
                dk[:, keys].baddbmm_(d_scores.mT, q)
            if tables is not None:
                block.clear_corners(band)
                add_table_gradients(block, band, q, tables, dq, d_table)
            if d_query is not None and dq is not None:
                d_query[b, heads, block.queries] = dq.mul_(spec.scale)
        if d_key is not None and dk is not None:
            d_key[b, heads] = dk
        if d_value is not None and dv is not None:
            d_value[b, heads] = dv
    return d_query, d_key, d_value, None if d_table is None else d_table.to(query.dtype)


def add_table_gradients(
    block: Block,
    d_band: torch.Tensor,
    query: torch.Tensor,
    tables: torch.Tensor,
    d_query: torch.Tensor | None,
    d_table: torch.Tensor | None,
) -> None:
    """Add the block's part to d_table, (R, D) or (H, R, D), and the table's part to d_query, (heads, M, D)."""
    parts = [(d_band[..., block.near_columns()], block.near_rows())]
    if block.spec.clamp:
        rows = tables.shape[1]
        for columns, row in block.far_columns(block.near_columns()):
            parts.append((d_band[..., columns].sum(-1, keepdim=True), slice(row % rows, row % rows + 1)))
    for d_part, rows_of_part in parts:
        if d_query is not None:
            d_query.baddbmm_(d_part, tables[:, rows_of_part])
        if d_table is not None and d_table.dim() == 2:
            d_table[rows_of_part].addmm_(d_part.flatten(0, 1).mT, query.flatten(0, 1))
        elif d_table is not None:
            d_table[block.heads, rows_of_part].baddbmm_(d_part.mT, query)
