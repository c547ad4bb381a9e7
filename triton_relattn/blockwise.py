"""Linear-memory attention in plain torch, forward and hand-written backward, for any device.

TODO
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from .blocks import Block, Call, of_heads, stacked
from .results import compute_dtype, gradient_like, new_like
from .spec import DIFFERENTIABLE, AttentionSpec, AttentionTensors

SHORT_ROW = 16
"""Keys below which torch's softmax, which needs as many for its vectors, is slower than one written out."""


class Queries(NamedTuple):
    """What the scores of a block depend on besides keys and tables."""

    query: torch.Tensor  # (matrices, sharing * queries, D)
    rel_query: torch.Tensor | None  # (sequences, heads, queries, Dr)
    packed: torch.Tensor | None  # rel_query in panels


def queries_of(block: Block) -> Queries:
    tensors = block.call.tensors
    query = block.matrices(tensors.query)
    if block.key_band is None:
        return Queries(query, None, None)
    rel_query = block.by_pair(query) if tensors.rel_query is None else block.rows(tensors.rel_query).to(query.dtype)
    return Queries(query, rel_query, block.key_band.pack(rel_query))


def logits(block: Block, queries: Queries) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The logits, masked, and the derivative of softcap, None without."""
    call, spec = block.call, block.call.spec
    scores = call.buffer("scores", *queries.query.shape[:2], block.num_keys)
    scores.baddbmm_(queries.query, block.key.mT, beta=0, alpha=spec.scale)
    by_pair = block.by_pair(scores)
    if block.key_band is not None:
        block.key_band.add_terms(by_pair, queries.packed, queries.rel_query, block.table("rel_key"), spec.rel_scale)
    if block.bias_band is not None:
        block.bias_band.add_bias(by_pair, block.table("rel_bias"))
    slope = None
    if spec.softcap is not None:
        limited = scores.div_(spec.softcap).tanh_()
        slope = 1 - limited.square()
        scores.mul_(spec.softcap)
    mask = block.attn_mask
    if mask is not None and mask.dtype == torch.bool:
        by_pair.masked_fill_(~mask, -math.inf)
    elif mask is not None:
        by_pair.add_(mask)
    block.hide(by_pair)
    return scores, slope


def softmax(block: Block, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The probabilities, each row of which sums to one (or zero if it sees nothing), and the log-sum-exp of each row."""
    probs, top = block.call.buffer("probs", *scores.shape), scores.amax(-1, keepdim=True)
    if scores.shape[-1] < SHORT_ROW:
        total = torch.sub(scores, top, out=probs).exp_().sum(-1, keepdim=True)
        probs.div_(total)
        lse = top + total.log_()
    else:
        torch.softmax(scores, -1, out=probs)
        lse = top - probs.amax(-1, keepdim=True).log_()  # the largest is exp(0) / sum
    if block.has_blind:
        blind = top == -math.inf
        probs.masked_fill_(blind, 0)
        lse.masked_fill_(blind, -math.inf)
    return probs, lse


def softmax_backward(probs: torch.Tensor, d_probs: torch.Tensor) -> torch.Tensor:
    """probs * (d_probs - delta) in the place of d_probs."""
    if probs.shape[-1] < SHORT_ROW:
        delta = (probs * d_probs).sum(-1, keepdim=True)
        return d_probs.sub_(delta).mul_(probs)
    return torch._softmax_backward_data(d_probs, probs, -1, probs.dtype, grad_input=d_probs)


def forward(tensors: AttentionTensors, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """out (B, Hq, Nq, Dv) in the inputs' dtype and lse (B, Hq, Nq) in the compute dtype."""
    query = tensors.query
    out = new_like(query, tensors.value.shape[-1])
    lse = query.new_empty(query.shape[:3], dtype=compute_dtype(query.dtype))
    for block in Call(tensors, spec).blocks():
        place = block.rows(out)
        if block.num_keys == 0:
            place.zero_()
            block.rows(lse).fill_(-math.inf)
            continue
        scores, _ = logits(block, queries_of(block))
        probs, row_lse = softmax(block, scores)
        block.rows(lse).copy_(block.by_pair(row_lse).squeeze(-1))
        if block.dropout is not None:
            probs.mul_(block.dropout)
        result = block.destination(place)
        torch.bmm(probs, block.value, out=result)
        if block.value_band is not None:
            folded = block.value_band.fold(block.by_pair(probs))
            block.value_band.add_rows(block.by_pair(result), folded, block.table("rel_value"))
        block.store(place, result)
    return out, lse


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
    def new(tensors: AttentionTensors, wanted: Iterable[bool]) -> Gradients:
        dtype = compute_dtype(tensors.query.dtype)

        def new(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if name in ("query", "rel_query"):
                return gradient_like(tensor)
            if name in ("key", "value"):
                return new_like(tensor, tensor.shape[-1], dtype).zero_()
            return stacked(torch.zeros(tensor.shape, dtype=dtype, device=tensor.device), name)

        named = zip(DIFFERENTIABLE, tensors, wanted, strict=False)
        return Gradients(*(new(name, tensor) if want and tensor is not None else None for name, tensor, want in named))

    @property
    def need_scores(self) -> bool:
        """Whether any is wanted that depends on the gradient of the scores."""
        return any(getattr(self, name) is not None for name in DIFFERENTIABLE if name not in ("value", "rel_value"))

    def add_values(self, block: Block, probs: torch.Tensor, d_out: torch.Tensor, packed: torch.Tensor | None) -> None:
        """Add a block's part to the gradients of value and rel_value."""
        if self.value is not None:
            block.add_to_keys(self.value, probs, d_out, 1.0)
        if self.rel_value is not None:
            band = block.value_band
            folded = band.fold(block.by_pair(probs))
            band.add_table_gradient(of_heads(self.rel_value, block.group.heads), folded, packed, block.by_pair(d_out))

    def add_scores(self, block: Block, queries: Queries, d_scores: torch.Tensor) -> None:
        """Add a block's part to the other gradients."""
        spec, band, by_pair = block.call.spec, block.key_band, block.by_pair(d_scores)
        own_query = block.call.tensors.rel_query is not None
        if self.key is not None:
            block.add_to_keys(self.key, d_scores, queries.query, spec.scale)
        d_rel_query = self.rel_query if own_query else self.query
        folded = None
        if band is not None and (d_rel_query is not None or self.rel_key is not None):
            folded = band.fold(by_pair)
        if self.rel_key is not None:
            total = of_heads(self.rel_key, block.group.heads)
            band.add_table_gradient(total, folded, queries.packed, queries.rel_query, spec.rel_scale)
        if self.rel_bias is not None:
            block.bias_band.add_bias_gradient(of_heads(self.rel_bias, block.group.heads), by_pair)
        if self.query is not None:
            place = block.rows(self.query)
            result = block.destination(place)
            result.baddbmm_(d_scores, block.key, beta=0, alpha=spec.scale)
            if band is not None and not own_query:
                band.add_rows(block.by_pair(result), folded, block.table("rel_key"), spec.rel_scale)
            block.store(place, result)
        if self.rel_query is not None:
            result = torch.zeros_like(queries.rel_query)
            band.add_rows(result, folded, block.table("rel_key"), spec.rel_scale)
            block.rows(self.rel_query).copy_(result)


def backward(
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    tensors: AttentionTensors,
    spec: AttentionSpec,
    wanted: Iterable[bool] = (True,) * 7,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the tensors that spec.DIFFERENTIABLE names, None where not wanted or not there."""
    totals = Gradients.new(tensors, wanted)
    for block in Call(tensors, spec).blocks():
        if block.num_keys == 0:
            for rows in (totals.query, totals.rel_query):
                if rows is not None:
                    block.rows(rows).zero_()
            continue
        d_out_rows = block.matrices(d_out)
        packed = None if block.value_band is None else block.value_band.pack(block.by_pair(d_out_rows))
        queries = queries_of(block)
        scores, slope = logits(block, queries)
        probs, _ = softmax(block, scores)
        totals.add_values(block, probs if block.dropout is None else probs * block.dropout, d_out_rows, packed)
        if totals.need_scores:
            d_probs = torch.bmm(d_out_rows, block.value.mT, out=scores)
            if block.value_band is not None:
                block.value_band.add_terms(block.by_pair(d_probs), packed, block.by_pair(d_out_rows), block.table("rel_value"), 1.0)
            if block.dropout is not None:
                d_probs.mul_(block.dropout)
            d_scores = softmax_backward(probs, d_probs)
            if d_lse is not None:
                d_scores.addcmul_(probs, block.matrices(d_lse[..., None]))
            if slope is not None:
                d_scores.mul_(slope)
            totals.add_scores(block, queries, d_scores)
    return tuple(
        None if total is None or tensor is None else (total if tensor.dim() == 4 else total.view(tensor.shape)).to(tensor.dtype)
        for total, tensor in zip(totals, tensors, strict=False)
    )
