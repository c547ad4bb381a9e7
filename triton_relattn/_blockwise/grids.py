"""Attention with decomposed relative positions on a grid, in plain torch and linear memory, forward and hand-written backward.

    S[i, j] = scale * q_i . k_j + q_i . R_h[y_i, y_j] + q_i . R_w[x_i, x_j]      out = softmax(S) V

A key has two coordinates, so the terms of a query are not N numbers but h + w: one for each row and one for each column of the
grid. They are broadcast into a block of scores, to which the product of queries and keys is then added; in the backward, sums
of the block over its columns and over its rows are their gradients. So a term costs an addition a score, and no product. A
block has some queries, successive in the grid, and all keys; sizes are those of blocks.py.

Shapes in comments: G heads of all sequences, counted through; M queries of a block, h x w of them on the grid; Nk keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from .._core.dropout import keep_mask, keep_scale, whole_origins
from .._core.dtypes import compute_dtype
from .._core.spec import GridTensors
from . import blocks as cut
from .attention import softmax_backward
from .products import Memory, Products, evenly, product_dtype


class Block(NamedTuple):
    """Queries of some heads: rows of the grid, a part of one row, or queries before the grid, of no rows and columns."""

    heads: slice
    queries: slice
    rows: slice
    columns: slice

    @property
    def has_terms(self) -> bool:
        return self.rows.stop > self.rows.start

    def on_grid(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return what belongs to the queries, [G, M, ...], by row and column, [G, h, w, ...]."""
        return vectors.unflatten(1, (self.rows.stop - self.rows.start, self.columns.stop - self.columns.start))


def blocks(tensors: GridTensors) -> Iterator[tuple[slice, list[Block]]]:
    """Yield some heads, and the blocks of their queries."""
    batch, num_heads, _, _ = tensors.query.shape
    num_keys, prefix = tensors.key.shape[2], tensors.prefix
    height, width = tensors.rel_h.shape[0], tensors.rel_w.shape[0]
    threads = cut.threads_on(tensors.query.device)
    fewest, elements = min(batch * num_heads, threads), threads * cut.SIZES.elements
    max_queries = max(cut.SIZES.rows, elements // max(fewest * num_keys, 1))
    columns = evenly(width, min(width, max_queries))
    rows = evenly(height, max(max_queries // max(width, 1), 1))
    largest = (rows[-1].stop - rows[-1].start) * (columns[-1].stop - columns[-1].start)
    for heads in evenly(batch * num_heads, max(elements // max(largest * num_keys, 1), fewest, 1)):
        parts = [Block(heads, queries, slice(0, 0), slice(0, 0)) for queries in evenly(prefix, max_queries)]
        for row in rows:
            for column in columns:
                start = prefix + row.start * width + column.start
                stop = prefix + (row.stop - 1) * width + column.stop
                parts.append(Block(heads, slice(start, stop), row, column))
        yield heads, parts


class GridCall:
    """The tensors of a call as matrices, (B * H, N, width), and memory that its blocks share."""

    def __init__(self, tensors: GridTensors, scale: float, dropout_p: float) -> None:
        self.tensors, self.scale, self.dropout_p = tensors, scale, dropout_p
        batch, heads, num_queries, _ = tensors.query.shape
        self.dtype = compute_dtype(tensors.query.dtype)
        self.product_dtype = product_dtype(tensors.query, batch * heads * num_queries * tensors.key.shape[2])
        if tensors.dropout_seed is not None:
            origins = tensors.dropout_origins
            self.origins = (whole_origins(batch, heads, tensors.query.device) if origins is None else origins).flatten(0, 1)
        self.query, self.key, self.value = (matrices.flatten(0, 1) for matrices in tensors[:3])
        self.rel_h, self.rel_w = tensors.rel_h.to(self.dtype), tensors.rel_w.to(self.dtype)
        self.memory = Memory(tensors.query)
        self.products = Products(self.memory)

    def scores(self, name: str, block: Block) -> torch.Tensor:
        """Return memory of that name for the scores of a block, uninitialised."""
        shape = (block.heads.stop - block.heads.start, block.queries.stop - block.queries.start, self.key.shape[1])
        return self.memory(name, shape, self.dtype)

    def rows(self, tensor: torch.Tensor, block: Block) -> torch.Tensor:
        """Return the block's rows of a tensor of queries, as operands of products."""
        return tensor[block.heads, block.queries].to(self.product_dtype)

    def operand(self, scores: torch.Tensor) -> torch.Tensor:
        """Return probabilities, or gradients of scores, as an operand of a product; see products.py."""
        if scores.dtype == self.product_dtype:
            return scores
        return self.memory("operand", tuple(scores.shape), self.product_dtype).copy_(scores)

    def keys_on_grid(self, scores: torch.Tensor) -> torch.Tensor:
        """Return scores of the keys on the grid, [G, M, key height, key width]."""
        grid = self.rel_h.shape[1], self.rel_w.shape[1]
        return scores[:, :, self.tensors.prefix :].unflatten(2, grid)

    def probs(self, block: Block, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return softmax(S) of a block, [G, M, Nk]."""
        scores = self.scores("scores", block)
        if block.has_terms:
            vectors = block.on_grid(query)  # [G, h, w, D]
            row_terms = torch.einsum("gyxd,ykd->gyxk", vectors, self.rel_h[block.rows]).flatten(1, 2)  # [G, M, key height]
            column_terms = torch.einsum("gyxd,xkd->gyxk", vectors, self.rel_w[block.columns]).flatten(1, 2)  # [G, M, key width]
            scores[:, :, : self.tensors.prefix] = 0
            torch.add(row_terms[..., None], column_terms[:, :, None], out=self.keys_on_grid(scores))
        self.products.add(scores, query, key.mT, self.scale, beta=int(block.has_terms))
        return torch.softmax(scores, -1, out=self.scores("probs", block))

    def dropout(self, block: Block) -> torch.Tensor | None:
        """Return the factors of a block's probabilities, None without dropout."""
        seed = self.tensors.dropout_seed
        if seed is None:
            return None
        queries = torch.arange(block.queries.start, block.queries.stop, device=seed.device)[:, None]
        sequence, head = self.origins[block.heads, :2, None, None].unbind(1)
        keep = keep_mask(seed, self.dropout_p, sequence, head, queries, slice(0, self.key.shape[1]))
        return keep.to(self.dtype).mul_(keep_scale(self.dropout_p))


def new_out(tensors: GridTensors) -> torch.Tensor:
    """Return memory for out, (B, H, Nq, Dv) in the inputs' dtype."""
    return tensors.query.new_empty(*tensors.query.shape[:3], tensors.value.shape[3])


def forward(tensors: GridTensors, scale: float, dropout_p: float) -> torch.Tensor:
    """Return out (B, H, Nq, Dv) in the inputs' dtype."""
    out, call = new_out(tensors), GridCall(tensors, scale, dropout_p)
    for heads, parts in blocks(tensors):
        key, value = call.key[heads].to(call.dtype), call.value[heads].to(call.product_dtype)
        for block in parts:
            probs = call.probs(block, call.rows(call.query, block).to(call.dtype), key)
            if (factors := call.dropout(block)) is not None:
                probs.mul_(factors)
            out.flatten(0, 1)[heads, block.queries] = torch.bmm(call.operand(probs), value).to(out.dtype)
    return out


def backward(
    d_out: torch.Tensor, tensors: GridTensors, scale: float, dropout_p: float, needs_grad: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of query, key, value, rel_h and rel_w, None where not wanted."""
    call, d_out = GridCall(tensors, scale, dropout_p), d_out.flatten(0, 1)
    matrices = (call.query, call.key, call.value, tensors.rel_h, tensors.rel_w)
    totals = [
        tensor.new_zeros(tensor.shape, dtype=None if number == 0 else call.dtype) if needed else None
        for number, (tensor, needed) in enumerate(zip(matrices, needs_grad, strict=True))
    ]
    for heads, parts in blocks(tensors):
        key, value = call.key[heads].to(call.product_dtype), call.value[heads].to(call.dtype)
        wide_key = key.to(call.dtype)
        for block in parts:
            backward_block(totals, call, block, key, wide_key, value, call.rows(d_out, block))
    return tuple(
        None if total is None else total.view(tensor.shape).to(tensor.dtype)  # type: ignore[union-attr]
        for total, tensor in zip(totals, tensors, strict=False)
    )


def backward_block(
    totals: Sequence[torch.Tensor | None],
    call: GridCall,
    block: Block,
    key: torch.Tensor,
    wide_key: torch.Tensor,
    value: torch.Tensor,
    d_out: torch.Tensor,
) -> None:
    """Add a block's part to the gradients. key and d_out are operands of products; the others have the compute dtype."""
    d_query, d_key, d_value, d_rel_h, d_rel_w = totals
    query, factors = call.rows(call.query, block), call.dropout(block)
    wide_query = query.to(call.dtype)
    probs = call.probs(block, wide_query, wide_key)
    if d_value is not None:  # dV += P^T dO
        operand = call.operand(probs if factors is None else probs * factors)
        call.products.add(d_value[block.heads], operand.mT, d_out)
    if d_query is None and d_key is None and d_rel_h is None and d_rel_w is None:
        return
    d_probs = torch.bmm(d_out.to(call.dtype), value.mT, out=call.scores("scores", block))  # dP = dO V^T
    if factors is not None:
        d_probs.mul_(factors)
    d_scores = softmax_backward(probs, d_probs)  # dS = P (dP - delta)
    rows = None
    if d_key is not None or d_query is not None:
        operand = call.operand(d_scores)
        if d_key is not None:  # dK += scale dS^T Q
            call.products.add(d_key[block.heads], operand.mT, query, call.scale)
        if d_query is not None:  # dQ = scale dS K + the gradients of both terms
            rows = torch.bmm(operand, key).to(call.dtype).mul_(call.scale)
    if block.has_terms:
        vectors, on_grid = block.on_grid(wide_query), call.keys_on_grid(d_scores)
        terms = (
            ("y", on_grid.sum(-1), call.rel_h[block.rows], d_rel_h, block.rows),
            ("x", on_grid.sum(-2), call.rel_w[block.columns], d_rel_w, block.columns),
        )
        for letter, sums, table, total, part in terms:
            d_terms = block.on_grid(sums)
            if total is not None:
                total[part] += torch.einsum(f"gyxk,gyxd->{letter}kd", d_terms, vectors)
            if rows is not None:
                block.on_grid(rows).add_(torch.einsum(f"gyxk,{letter}kd->gyxd", d_terms, table))
    if d_query is not None and rows is not None:
        d_query[block.heads, block.queries] = rows.to(d_query.dtype)
