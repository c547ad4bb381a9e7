"""Linear-memory attention in plain torch, forward and hand-written backward, for any device.

A call is cut into blocks (partition.py): batches of matrices of scores, one for each sequence and head. A block has few queries
or many, but always all keys that they see. So every step is one call of torch on a contiguous batch, and softmax is torch's own.
The terms of the tables are added from bands (bands.py). With the gradients dO of out and dlse of lse:

    P  = softmax(scale * Q K^T + terms of other tables)              out = P V + term of rel_value
    dP = dO V^T + term of rel_value                                  dS  = P * (dP - rowsum(P * dP) + dlse)

dV and the gradient of rel_value are products with P, all other gradients products with dS. The backward has whole rows, too, so
it does not need lse. P sums to one however large the logits are, where exp(logits - lse) would not. If P takes no more memory
than query, key, value and out, as with short sequences, the forward keeps it for the backward. The working set is a few times
ELEMENTS_PER_THREAD numbers a thread; with long sequences BLOCK_QUERIES rows a thread, which is linear in the number of keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import torch

from .._core.dtypes import compute_dtype, gradient_like, new_like
from .._core.spec import DIFFERENTIABLE, AttentionSpec, AttentionTensors
from .bands import Packed
from .partition import FEWEST_QUERIES, Block, BlockwiseCall, matrices, of_heads, stacked
from .products import has_fast_fused_attention, multiply, product_into

SHORT_ROW = 16
"""Number of keys below which torch's softmax, and its derivative, is slower than the same written out: it is made for rows that
fill the CPU's vectors."""


def pack_query(block: Block, query: torch.Tensor) -> Packed | None:
    """Pack the vectors that rel_key is multiplied with: rel_query, or else query, given as matrices for products."""
    tensors, band = block.call.tensors, block.rel_key
    if band is None:
        return None
    return band.pack(block.by_pair(query) if tensors.rel_query is None else block.rows(tensors.rel_query).to(query.dtype))


def logits(block: Block, query: torch.Tensor, packed: Packed | None) -> torch.Tensor | None:
    """Compute the masked logits, in place of the block's scores; return the derivative of softcap, None without softcap."""
    spec = block.call.spec
    product_into(block.scores, query.to(block.call.dtype), block.wide_key.mT, spec.scale)
    add_terms(block, packed)
    slope = None
    if spec.softcap is not None:
        limited = block.scores.div_(spec.softcap).tanh_()
        slope = 1 - limited.square()
        limited.mul_(spec.softcap)
    block.mask()
    return slope


def add_terms(block: Block, packed: Packed | None) -> None:
    """Add the terms of all tables to the block's scores."""
    if block.rel_key is not None and packed is not None:
        block.rel_key.add_terms(packed)
    if block.rel_bias is not None:
        block.rel_bias.add_terms()
    if block.rel_p2c:
        vectors = block.keys_of_pairs()
        for keys, band in block.rel_p2c:
            band.add_terms(band.pack(vectors[:, :, keys]))


def can_fuse(tensors: AttentionTensors, spec: AttentionSpec, kept: torch.Tensor | None, dtype: torch.dtype | None) -> bool:
    """Return whether torch's fused attention on a CPU computes a forward, with the terms of the tables as a mask that it adds."""
    query, key, value, mask = tensors.query, tensors.key, tensors.value, tensors.attn_mask
    if query.device.type != "cpu" or query.dtype != torch.bfloat16 or not has_fast_fused_attention():
        return False
    if kept is not None or dtype is not None or spec.softcap is not None or spec.dropout_p > 0 or tensors.rel_value is not None:
        return False
    is_plain = mask is None or mask.dtype == torch.bool  # numbers may be too large for bfloat16
    return is_plain and key.shape[3] == value.shape[3] and query.shape[2] >= FEWEST_QUERIES


def fused(block: Block, lse: torch.Tensor | None) -> torch.Tensor:
    """Compute a block's part of out by torch's fused attention; lse: memory for it, or None."""
    block.group.clean()
    query = block.matrices(block.call.tensors.query)
    block.scores.zero_()
    add_terms(block, pack_query(block, query))
    block.mask()
    operands = (each[:, None] for each in (query, block.key, block.value))
    out, found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *operands, 0.0, False, attn_mask=block.scores[:, None], scale=block.call.spec.scale
    )
    if lse is not None:
        lse.copy_(found.view(lse.shape))
        if block.has_blind:  # there it is 0
            lse.masked_fill_((block.scores.amax(-1) == -math.inf).view(lse.shape), -math.inf)
    result: torch.Tensor = out[:, 0]
    return result


def softmax(
    block: Block, probs: torch.Tensor, lse: torch.Tensor | None = None, largest_logits: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the probabilities of the block's scores. Each row sums to one, whatever the logits, or is zero if it sees nothing:
    if all its logits are -inf.

    Args:
        probs: memory for the probabilities; on a CPU it may be that of the scores.
        lse: memory for the log-sum-exp of each row, as many numbers; None: it is not computed, which saves passes.
        largest_logits: memory for the largest logit of each row; then lse is that of the logits without it.
    """
    scores, total = block.scores, None
    is_short, has_blind = scores.shape[-1] < SHORT_ROW, block.has_blind
    if lse is None and not has_blind and not is_short:
        return torch.softmax(scores, -1, out=probs)
    largest = scores.amax(-1, keepdim=True)  # first: the probabilities may take the scores' place
    if is_short:
        total = torch.sub(scores, largest, out=probs).exp_().sum(-1, keepdim=True)
        probs.div_(total)
    else:
        torch.softmax(scores, -1, out=probs)
    blind = largest == -math.inf if has_blind else None
    if blind is not None and blind.device.type == "cpu" and not blind.any():  # elsewhere, to ask would be to wait
        blind = None
    if blind is not None:
        probs.masked_fill_(blind, 0)
    if lse is not None:
        total = (
            probs.amax(-1, keepdim=True).reciprocal_() if total is None else total
        )  # the largest probability is exp(0) / total
        log_sum = total.log_()
        if largest_logits is None:
            log_sum.add_(largest)
        else:
            largest_logits.copy_(largest.view(largest_logits.shape))
        lse.copy_(log_sum.view(lse.shape))
        if blind is not None:
            lse.masked_fill_(blind.view(lse.shape), -math.inf)
    return probs


def softmax_backward(probs: torch.Tensor, d_probs: torch.Tensor) -> torch.Tensor:
    """Compute probs * (d_probs - delta) in place of d_probs.

    delta_i = sum_j P[i, j] dP[i, j] is computed from the block itself. The usual shortcut, rowsum(out * d_out), uses an out that
    was rounded to the input dtype. With it, all dS of a row would share one small error, and the table's gradient, a sum over all
    rows, would add these errors up.
    """
    if probs.shape[-1] < SHORT_ROW or probs.device.type != "cpu":  # elsewhere a row may be written before all of it is read
        return d_probs.sub_((probs * d_probs).sum(-1, keepdim=True)).mul_(probs)
    return torch._softmax_backward_data(d_probs, probs, -1, probs.dtype, grad_input=d_probs)


def keeps_probs(tensors: AttentionTensors, spec: AttentionSpec) -> bool:
    """Return whether the forward should keep the probabilities for the backward: whether they take no more memory than query,
    key, value and out would if all had as many rows and heads as the query."""
    query, value = tensors.query, tensors.value
    size = value.shape[2] * compute_dtype(query.dtype).itemsize
    of_inputs = 2 * (query.shape[3] + value.shape[3]) * query.dtype.itemsize
    return size <= of_inputs and spec.softcap is None and tensors.cu_seqlens_q is None


def new_lse(tensors: AttentionTensors, spec: AttentionSpec) -> torch.Tensor:
    """Return memory for lse, (B, Hq, Nq) in the compute dtype; (B, Hq, 0) if it is not wanted."""
    query = tensors.query
    return query.new_empty((*query.shape[:2], query.shape[2] if spec.with_lse else 0), dtype=compute_dtype(query.dtype))


def forward(
    tensors: AttentionTensors,
    spec: AttentionSpec,
    kept: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    largest_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out (B, Hq, Nq, Dv) in the inputs' dtype, or the one given, and lse, see new_lse().

    Args:
        kept: memory for the probabilities, before dropout, for the backward; None: they are not kept.
        largest_logits: memory for the largest logit of each query, which lse is without then; it is left alone without keys.
    """
    out = new_like(tensors.query, tensors.value.shape[-1], dtype)
    lse = new_lse(tensors, spec)
    fuses = can_fuse(tensors, spec, kept, dtype)
    # What is kept, and a softmax over parts of the keys, must fit the logits of the backward.
    rounds_terms = kept is None and largest_logits is None
    for block in BlockwiseCall(tensors, spec, rounds_terms=rounds_terms, fuses=fuses).blocks():
        place, lse_place = block.place(out), block.place(lse[..., None], "lse") if spec.with_lse else None
        if block.num_keys == 0:
            block.put(out, place.zero_())
            if lse_place is not None:
                block.put(lse[..., None], lse_place.fill_(-math.inf))
            continue
        if block.group.is_fused:
            result = fused(block, lse_place)
        else:
            result = by_steps(block, place, lse_place, kept, largest_logits)
        block.store(place, result)
        block.put(out, place)
        if lse_place is not None:
            block.put(lse[..., None], lse_place)
    return out, lse


def by_steps(
    block: Block,
    place: torch.Tensor,
    lse: torch.Tensor | None,
    kept: torch.Tensor | None,
    largest_logits: torch.Tensor | None,
) -> torch.Tensor:
    """Compute a block's part of out, in its place if that can be; the others as of forward(), lse that of the block."""
    query = block.matrices(block.call.tensors.query)
    place_of_probs = None if kept is None else block.pairs_of(kept)
    memory = block.probs_in_place if place_of_probs is None else block.destination(place_of_probs, "probs")
    logits(block, query, pack_query(block, query))
    largest = None if largest_logits is None else block.place(largest_logits[..., None], "largest")
    probs = softmax(block, memory, lse, largest)
    if largest_logits is not None and largest is not None:
        block.put(largest_logits[..., None], largest)
    if place_of_probs is not None:
        block.store(place_of_probs, probs)
    if block.dropout is not None:
        probs = torch.mul(probs, block.dropout, out=block.scores)
    is_sum = block.rel_value is not None or place.dtype != block.call.product_dtype
    result = block.destination(place, dtype=None if is_sum else place.dtype)
    operand = block.operand(probs)
    weighted_values(block, operand, result)
    if block.rel_value is not None:
        block.rel_value.add_products(block.by_pair(probs), block.by_pair(result), None, block.by_pair(operand))
    return result


def weighted_values(block: Block, probs: torch.Tensor, out: torch.Tensor) -> None:
    """Compute probs @ value into out.

    What is in the place of values that a sequence does not have matters only if it is not finite: then the result is not, either,
    and is computed again without it. That saves a copy of all values.
    """
    group = block.group
    if group.is_clean or out.device.type == "cpu":
        multiply(block.call.buffers, probs, block.value, out)
        if group.is_clean or out.sum().isfinite():
            return
    group.clean()
    multiply(block.call.buffers, probs, block.value, out)


class Whole(NamedTuple):
    """All keys that the queries see, where a call has a part of them: dS = P (dP - delta) is then that of the part.

    P = exp(logits - largest - log_sum): in one number, lse, a large logit would leave no digits for the logarithm.
    """

    largest: torch.Tensor  # (B, Hq, Nq), the largest logit; 0 if a query sees nothing
    log_sum: torch.Tensor  # (B, Hq, Nq), the logarithm of the sum of exp(logits - largest)
    delta: torch.Tensor  # (B, Hq, Nq): rowsum(out * d_out) - d_lse

    def probs(self, block: Block) -> torch.Tensor:
        """Return the probabilities of the block's scores, which sum to one over all keys."""
        largest, log_sum = (block.matrices(each[..., None], each.dtype) for each in (self.largest, self.log_sum))
        # Logits that are rounded in another way than the forward's may be larger: by 1 if they are 1e7.
        exponents = torch.minimum(block.scores, largest, out=block.probs).sub_(largest)
        return exponents.sub_(log_sum).exp_()

    def d_scores(self, block: Block, probs: torch.Tensor, d_probs: torch.Tensor) -> torch.Tensor:
        """Compute the gradient of the scores, in the place of d_probs."""
        return d_probs.sub_(block.matrices(self.delta[..., None], d_probs.dtype)).mul_(probs)


def new_totals(call: BlockwiseCall, wanted: Iterable[bool]) -> dict[str, torch.Tensor]:
    """Allocate memory in which the gradients that are wanted are collected, by their names.

    Rows of query and rel_query are written once, in their dtype. The others are sums in the compute dtype; tables are stacked,
    and rel_p2c has its last row first.
    """
    totals: dict[str, torch.Tensor] = {}
    for name, tensor, want in zip(DIFFERENTIABLE, call.tensors, wanted, strict=False):
        if not want or tensor is None:
            continue
        if name in ("query", "rel_query"):
            totals[name] = gradient_like(tensor)
        elif name in ("key", "value"):
            total = new_like(tensor, tensor.shape[-1], call.dtype)
            totals[name] = total if call.has_keys_once else total.zero_()
        else:
            totals[name] = stacked(torch.zeros(tensor.shape, dtype=call.dtype, device=tensor.device), name)
    return totals


def add_values(
    totals: dict[str, torch.Tensor], block: Block, probs: torch.Tensor, d_out: torch.Tensor, packed: Packed | None
) -> None:
    """Add a block's part to the gradients of value and rel_value."""
    operand = block.operand(probs)
    if "value" in totals:
        add_transposed_product(block, totals["value"], operand, d_out)
    if "rel_value" in totals and block.rel_value is not None:
        block.rel_value.add_products(block.by_pair(probs), None, packed, block.by_pair(operand))


def add_scores(
    totals: dict[str, torch.Tensor], block: Block, query: torch.Tensor, packed: Packed | None, d_scores: torch.Tensor
) -> None:
    """Add a block's part to the gradients that depend on that of the scores."""
    spec, band, pairs = block.call.spec, block.rel_key, block.frame.pairs
    shares_query, for_table = block.call.tensors.rel_query is None, packed if "rel_key" in totals else None
    operand = block.operand(d_scores)
    if "key" in totals:
        add_transposed_product(block, totals["key"], operand, query, spec.scale)
    if "rel_bias" in totals and block.rel_bias is not None:
        block.rel_bias.add_gradient(of_heads(totals["rel_bias"], block.group.heads))
    if block.rel_p2c and ("key" in totals or "rel_p2c" in totals):
        add_mirrored(totals, block)
    if band is not None and packed is not None and not shares_query:
        result = torch.zeros_like(packed[0], dtype=block.call.dtype) if "rel_query" in totals else None
        band.add_products(pairs, result, for_table, block.by_pair(operand))
        if result is not None:
            block.put(totals["rel_query"], block.place(totals["rel_query"]).copy_(result))
    result = place = None
    if "query" in totals:
        place = block.place(totals["query"])
        is_sum = (band is not None and shares_query) or place.dtype != operand.dtype
        result = block.destination(place, dtype=None if is_sum else place.dtype)
        multiply(block.call.buffers, operand, block.key, result, spec.scale)
    if band is not None and shares_query:
        band.add_products(pairs, None if result is None else block.by_pair(result), for_table, block.by_pair(operand))
    if result is not None and place is not None:
        block.store(place, result)
        block.put(totals["query"], place)


def add_mirrored(totals: dict[str, torch.Tensor], block: Block) -> None:
    """Add what a block's term of rel_p2c gives to the gradients of the key and of the table."""
    vectors, of_keys = block.keys_of_pairs(), block.rows_of_keys(totals["key"]) if "key" in totals else None
    sharing = block.group.sharing
    d_key = of_keys if of_keys is None or sharing == 1 else torch.zeros_like(vectors)
    for keys, band in block.rel_p2c:
        packed = band.pack(vectors[:, :, keys]) if "rel_p2c" in totals else None
        band.add_products(band.frame.pairs, None if d_key is None else d_key[:, :, keys], packed)
    if of_keys is not None and d_key is not None:
        if sharing > 1:
            of_keys.add_(d_key.unflatten(1, (-1, sharing)).sum(2))
        block.put_keys(totals["key"], of_keys)


def add_tables(totals: dict[str, torch.Tensor], block: Block) -> None:
    """Add the sums that the bands of a frame have collected to the gradients of rel_key, rel_value and rel_p2c."""
    heads = block.group.heads
    if "rel_key" in totals and block.rel_key is not None:
        block.rel_key.add_gradient(of_heads(totals["rel_key"], heads))
    if "rel_value" in totals and block.rel_value is not None:
        block.rel_value.add_gradient(of_heads(totals["rel_value"], heads))
    if "rel_p2c" in totals:
        for _, band in block.rel_p2c:
            band.add_gradient(of_heads(totals["rel_p2c"], heads))


def add_transposed_product(block: Block, totals: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float = 1) -> None:
    """Add scale * left^T @ right to the block's part of totals, (B, Hk, Nk, width)."""
    total = block.place_of_keys(totals)
    multiply(block.call.buffers, left.mT, right, total, scale, beta=0 if block.has_keys_once else 1)
    block.put_keys(totals, total)


def backward(
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    tensors: AttentionTensors,
    spec: AttentionSpec,
    wanted: Iterable[bool] = (True,) * len(DIFFERENTIABLE),
    kept: torch.Tensor | None = None,
    whole: Whole | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the tensors that spec.DIFFERENTIABLE names; None for those that are not wanted or not there.

    Args:
        kept: the probabilities that the forward has kept; None: they are computed again.
        whole: given if the keys are a part of those that the queries see; d_lse, which it stands for, is None then.
    """
    call = BlockwiseCall(tensors, spec)
    totals = new_totals(call, wanted)
    for _, blocks in groupby(call.blocks(), attrgetter("frame")):
        for block in blocks:
            add_block(totals, block, d_out, d_lse, kept, whole)
        add_tables(totals, block)
    if "rel_p2c" in totals:
        totals["rel_p2c"] = totals["rel_p2c"].flip(1)
    gradients: list[torch.Tensor | None] = []
    for name, tensor in zip(DIFFERENTIABLE, tensors, strict=False):
        total = totals.get(name)
        if total is not None and tensor is not None:
            total = (total if tensor.dim() == 4 else total.view(tensor.shape)).to(tensor.dtype)
        gradients.append(total)
    return tuple(gradients)


def add_block(
    totals: dict[str, torch.Tensor],
    block: Block,
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    kept: torch.Tensor | None,
    whole: Whole | None,
) -> None:
    """Add a block's part to all gradients."""
    if block.num_keys == 0:
        for name in ("query", "rel_query"):
            if name in totals:
                block.put(totals[name], block.place(totals[name]).zero_())
        return
    block.group.clean()
    band, slope, missing = block.rel_value, None, block.group.no_queries
    query, rows = block.matrices(block.call.tensors.query), block.matrices(d_out)
    packed_query = pack_query(block, query)
    packed = None if band is None else band.pack(block.by_pair(rows))
    if kept is None:
        slope = logits(block, query, packed_query)
        probs = softmax(block, block.probs) if whole is None else whole.probs(block)
        if missing is not None:
            probs.flatten(0, 1).index_fill_(0, missing, 0)
    else:
        probs = matrices(block.pairs_of(kept), block.group.sharing, block.scores.dtype)
    add_values(totals, block, probs if block.dropout is None else probs * block.dropout, rows, packed)
    if totals.keys() <= {"value", "rel_value"}:
        return
    d_probs = torch.bmm(rows.to(block.call.dtype), block.wide_value.mT, out=block.scores)
    if band is not None and packed is not None:
        band.add_terms(packed)
    if block.dropout is not None:
        d_probs.mul_(block.dropout)
    d_scores = softmax_backward(probs, d_probs) if whole is None else whole.d_scores(block, probs, d_probs)
    if d_lse is not None:
        d_scores.addcmul_(probs, block.matrices(d_lse[..., None], d_scores.dtype))
    if slope is not None:
        d_scores.mul_(slope)
    if missing is not None:
        d_scores.flatten(0, 1).index_fill_(0, missing, 0)
    add_scores(totals, block, query, packed_query, d_scores)
