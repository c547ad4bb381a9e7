"""Linear-memory attention in plain torch, forward and hand-written backward, for any device.

A block of M queries needs the table rows of the relative positions ``r = r_start .. r_start + num_keys + M - 2``: a *band*.
``band[m, c] = p_m . E[row(r_start + c)]`` is one matrix product, and the relative score of query m and key n is
``band[m, n - m + M - 1]``. Read with a row stride that is one shorter, the same memory *is* the score block:

    address(m, n) = m * width + n - m + M - 1 = m * (width - 1) + n + M - 1

So ``Q K^T`` is accumulated straight into that view, softmax runs in it, and in the backward dS written into it is at once
the band gradient that multiplies the table: no gather, no copy, no scatter. In band coordinates a mask on the relative
position (causal, window) is a range of columns. The same holds for the table of the values: the probabilities' band times A is
its part of out, and ``dO . (v + A)`` is a band like ``q . k + p . E``. The working set is one band buffer per chunk of heads,
and a few of its size where a feature needs them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from .blocks import Block, Folded, chunks, of_heads, stacked
from .results import compute_dtype, gradient_like, new_like
from .spec import DIFFERENTIABLE, AttentionSpec, AttentionTensors


def banded(
    block: Block,
    left: torch.Tensor,
    right: torch.Tensor,
    table_left: torch.Tensor,
    table: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The band buffer (heads, M, width) and its scores view, holding left_m . right_n + table_left_m . table[row].

    The columns that the window hides hold anything. right (heads, keys, D) is of all keys.
    """
    band = left.new_empty(*left.shape[:2], block.width)
    for columns, rows in block.parts if table is not None else [(block.visible, None)]:
        part = band[..., columns]
        if table is None or rows is None:
            part[...] = 0
        elif rows.stop - rows.start == part.shape[-1]:
            torch.bmm(table_left, table[:, rows].mT, out=part)
        else:
            part[...] = torch.bmm(table_left, table[:, rows].mT)
    scores = block.scores_view(band)
    scores.baddbmm_(left, right[:, block.keys].mT)
    return band, scores


def add_folded_product(total: torch.Tensor, folded: Folded, table: torch.Tensor, factor: float = 1) -> None:
    """total (heads, M, width) += factor * (band @ the rows of the table that its columns stand for)."""
    for part, rows in folded:
        total.baddbmm_(part, table[:, rows], alpha=factor)


def add_transposed_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left^T @ right of each head; summed over the heads if total (1, ...) is shared by them."""
    if total.shape[0] == left.shape[0]:
        total.baddbmm_(left.mT, right)
    else:
        total[0].addmm_(left.flatten(0, 1).mT, right.flatten(0, 1))


def add_table_gradient(total: torch.Tensor, block: Block, folded: Folded, right: torch.Tensor) -> None:
    """total, a stacked table's gradient, += band^T @ right in the rows that the band's columns stand for."""
    for part, rows in folded:
        add_transposed_product(of_heads(total, block.chunk.heads)[:, rows], part, right)


def capped_logits(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """The band buffer and its scores view with the logits, before masks."""
    band, scores = banded(block, block.query, block.chunk.key, block.table_query, block.chunk.table)
    softcap = block.chunk.spec.softcap
    if softcap is not None:
        block.hide(band, 0)
        scores.div_(softcap).tanh_().mul_(softcap)
    return band, scores


def apply_masks(block: Block, band: torch.Tensor, scores: torch.Tensor) -> None:
    """Add a float mask, and make the logits of hidden pairs -inf."""
    mask = block.attn_mask
    if mask is not None and mask.dtype == torch.bool:
        scores.masked_fill_(~mask, -math.inf)
    elif mask is not None:
        scores.add_(mask)
    block.hide(band, -math.inf)


def exponentiate(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """exp(scores - maximum), in place; the maximum of each row, and the sum of the result."""
    row_max = scores.amax(-1, keepdim=True)
    row_max.masked_fill_(row_max == -math.inf, 0)
    return row_max, scores.sub_(row_max).exp_().sum(-1, keepdim=True)


def forward(tensors: AttentionTensors, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """out (B, Hq, Nq, Dv) in the inputs' dtype and lse (B, Hq, Nq) in the compute dtype."""
    query = tensors.query
    out = new_like(query, tensors.value.shape[-1]).zero_()
    lse = query.new_full(query.shape[:3], -math.inf, dtype=compute_dtype(query.dtype))
    for block in (block for chunk in chunks(tensors, spec) for block in chunk.blocks()):
        band, scores = capped_logits(block)
        apply_masks(block, band, scores)
        row_max, row_sum = exponentiate(scores)
        lse[block.query_rows] = (row_max + row_sum.log()).squeeze(-1)
        if block.dropout is not None:
            scores.mul_(block.dropout)
        result = scores @ block.chunk.value[:, block.keys]
        if block.chunk.rel_value is not None:
            add_folded_product(result, block.fold(band), block.chunk.rel_value)
        out[block.query_rows] = result.div_(row_sum.masked_fill_(row_sum == 0, 1))
    return out, lse


def probabilities(block: Block) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The band buffer, its scores view with the probabilities, and the derivative of softcap, None without."""
    softcap = block.chunk.spec.softcap
    band, scores = capped_logits(block)
    slope = None if softcap is None else scores.div(softcap).square_().neg_().add_(1)
    apply_masks(block, band, scores)
    # Not exp(scores - lse): next to large logits, lse has no digits left for the sum.
    _, row_sum = exponentiate(scores)
    scores.div_(row_sum.masked_fill_(row_sum == 0, 1))
    return band, scores, slope


def score_gradients(
    block: Block, probs: torch.Tensor, slope: torch.Tensor | None, d_out: torch.Tensor, d_lse: torch.Tensor
) -> torch.Tensor:
    """The gradient of the logits before softcap, in the place of the probabilities.

    delta_i = sum_j P[i, j] dP[i, j] - dlse_i is computed from the block itself. The usual shortcut, rowsum(out * d_out), uses
    an out that was rounded to the input dtype; every dS of the row then carries the same small error, and the table's
    gradient, a sum over all rows, adds these errors up.
    """
    chunk = block.chunk
    if chunk.rel_value is None:
        d_probs = d_out @ chunk.value[:, block.keys].mT
    else:
        d_band, d_probs = banded(block, d_out, chunk.value, d_out, chunk.rel_value)
        block.hide(d_band, 0)
    if block.dropout is not None:
        d_probs.mul_(block.dropout)
    # A row of probs sums to one but for its rounding; left in delta it would not cancel against dP, which may be large.
    row_sum = probs.sum(-1).clamp_min_(0.5)
    delta = torch.linalg.vecdot(probs, d_probs).div_(row_sum).sub_(d_lse)
    d_scores = probs.mul_(d_probs.sub_(delta[..., None]))
    return d_scores if slope is None else d_scores.mul_(slope)


class Gradients(NamedTuple):
    """Where the gradients are collected, None where not wanted. Rows of query and rel_query are written once, in their dtype;
    the others are sums in the compute dtype, and tables are stacked.
    """

    query: torch.Tensor | None
    key: torch.Tensor | None
    value: torch.Tensor | None
    rel_query: torch.Tensor | None
    rel_key: torch.Tensor | None
    rel_value: torch.Tensor | None
    rel_bias: torch.Tensor | None

    @staticmethod
    def zeros(tensors: AttentionTensors, wanted: Iterable[bool]) -> Gradients:
        dtype = compute_dtype(tensors.query.dtype)

        def zeros(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if name in ("query", "rel_query"):
                return gradient_like(tensor).zero_()
            if name in ("key", "value"):
                return new_like(tensor, tensor.shape[-1], dtype).zero_()
            return stacked(torch.zeros(tensor.shape, dtype=dtype, device=tensor.device), name)

        named = zip(DIFFERENTIABLE, tensors, wanted, strict=False)
        return Gradients(*(zeros(name, tensor) if want and tensor is not None else None for name, tensor, want in named))

    @property
    def need_scores(self) -> bool:
        """Whether any is wanted that depends on the gradient of the scores."""
        return any(getattr(self, name) is not None for name in DIFFERENTIABLE if name not in ("value", "rel_value"))

    def add_values(self, block: Block, band: torch.Tensor, probs: torch.Tensor, d_out: torch.Tensor) -> None:
        """Add a block's part to the gradients of value and rel_value. probs is the scores view of band."""
        if self.value is None and self.rel_value is None:
            return
        if block.dropout is not None:
            band = band.clone()
            probs = block.scores_view(band).mul_(block.dropout)
        if self.value is not None:
            add_transposed_product(self.value[block.key_rows], probs, d_out)
        if self.rel_value is not None:
            add_table_gradient(self.rel_value, block, block.fold(band), d_out)

    def add_scores(self, block: Block, band: torch.Tensor, d_scores: torch.Tensor) -> None:
        """Add a block's part to the other gradients. d_scores is the scores view of band."""
        chunk = block.chunk
        d_query = d_rel_query = None
        if self.query is not None:
            d_query = d_rel_query = (d_scores @ chunk.key[:, block.keys]).mul_(chunk.spec.scale)
        if chunk.tensors.rel_query is not None:
            d_rel_query = None if self.rel_query is None else torch.zeros_like(block.rel_query)
        if self.key is not None:
            add_transposed_product(self.key[block.key_rows], d_scores, block.query)
        folded = block.fold(band) if chunk.table is not None else []
        if chunk.rel_key is not None and d_rel_query is not None:
            add_folded_product(d_rel_query, folded, chunk.rel_key, chunk.spec.rel_scale)
        if self.rel_key is not None:
            add_table_gradient(self.rel_key, block, folded, block.rel_query)
        if self.rel_bias is not None:
            add_table_gradient(self.rel_bias, block, folded, block.ones)
        if self.query is not None and d_query is not None:
            self.query[block.query_rows] = d_query
        if self.rel_query is not None and d_rel_query is not None:
            self.rel_query[block.query_rows] = d_rel_query


def backward(
    d_out: torch.Tensor,
    d_lse: torch.Tensor,
    tensors: AttentionTensors,
    spec: AttentionSpec,
    wanted: Iterable[bool] = (True,) * 7,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the tensors that spec.DIFFERENTIABLE names, None where not wanted or not there."""
    totals = Gradients.zeros(tensors, wanted)
    for block in (block for chunk in chunks(tensors, spec) for block in chunk.blocks()):
        d_out_rows = d_out[block.query_rows].to(d_lse.dtype)
        band, probs, slope = probabilities(block)
        totals.add_values(block, band, probs, d_out_rows)
        if totals.need_scores:
            d_scores = score_gradients(block, probs, slope, d_out_rows, d_lse[block.query_rows])
            totals.add_scores(block, band, d_scores)
    return tuple(
        None if total is None or tensor is None else (total if tensor.dim() == 4 else total.view(tensor.shape)).to(tensor.dtype)
        for total, tensor in zip(totals, tensors, strict=False)
    )
