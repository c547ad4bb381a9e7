"""Linear-memory attention in plain torch, forward and hand-written backward, for any device.

A call is cut into blocks (cut.py) of some queries with all keys that they see, so that every step is one call of torch on a
matrix of scores, and softmax is torch's own. Terms of tables are views of bands (bands.py). With the gradients dO of out
and dlse of lse:

    P  = softmax(scale * Q K^T + terms of other tables)              out = P V + term of rel_value
    dP = dO V^T + term of rel_value                                  dS  = P * (dP - rowsum(P * dP) + dlse)

dV and the gradient of rel_value are products with P, all other gradients products with dS. The backward has whole rows, too, so
it does not need lse. P sums to one however large the logits are, where exp(logits - lse) would not. If P takes no more memory
than query, key, value and out, as with short sequences, the forward keeps it for the backward. The working set is
cut.SCORES blocks of scores, each of Sizes.elements for a thread, or of Sizes.rows rows, which is linear in the number of keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from typing import NamedTuple

import torch

from .._core.dtypes import compute_dtype, gradient_like, new_like
from .._core.spec import DIFFERENTIABLE, TABLES, AttentionSpec, AttentionTensors
from .bands import Band, cast
from .cut import Block, Call, Group
from .masks import dropout, mask
from .products import has_fast_fused_attention


def logits(block: Block) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the masked logits, as matrices, and the derivative of softcap, None without softcap."""
    group, softcap = block.group, block.call.spec.softcap
    scores, pairs = block.product("scores", group.queries[block.number], group.key.transposed(block), block.call.spec.scale)
    add_terms(block, pairs)
    slope = None
    if softcap is not None:
        limited = scores.div_(softcap).tanh_()
        slope = 1 - limited.square()
        limited.mul_(softcap)
    mask(block, pairs)
    return scores, slope


def add_terms(block: Block, pairs: torch.Tensor) -> None:
    """Add the terms of the tables to the scores of the pairs."""
    group = block.group
    if group.rel_key is not None:
        group.rel_key.add_terms(block.number, pairs, block.base)
    if group.rel_bias is not None:
        group.rel_bias.add_terms(pairs, block.base)
    if "rel_p2c" in group.tables:
        mirror = group.mirrored(block)
        for each in mirror.panels(pairs, block.base):
            mirror.band.add_terms(*each)


def softmax(
    block: Block, scores: torch.Tensor, lse: torch.Tensor | None = None, largest_logits: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the probabilities in place of the scores. Each row sums to one, whatever the logits, or is zero if it sees nothing:
    if all its logits are -inf, or it is of no query.

    Args:
        lse: memory for the log-sum-exp of each row, (sequences, heads, rows, 1); None: it is not computed, which saves passes.
        largest_logits: memory for the largest logit of each row; then lse is that of the logits without it.
    """
    blind = largest = None
    if lse is not None or block.may_be_blind:
        largest = scores.amax(-1, keepdim=True)
        blind = (largest == -math.inf).flatten().nonzero()[:, 0]  # their softmax is NaN
    # A CPU reads all of a row before it writes any of it; elsewhere that is not certain.
    probs = torch.softmax(scores, -1, out=scores if block.call.is_cpu else None)
    if lse is not None and largest is not None and blind is not None:
        log_sum = probs.amax(-1, keepdim=True).log_().neg_()  # the largest probability is exp(0) / total
        if largest_logits is None:
            log_sum.add_(largest)
        else:
            largest_logits.copy_(largest.view(lse.shape))
        lse.copy_(log_sum.view(-1).index_fill_(0, blind, -math.inf).view(lse.shape))
    if blind is not None and len(blind) > 0:
        probs.view(-1, block.num_columns).index_fill_(0, blind, 0)
    if block.num_real < block.num_rows:
        probs.view(block.shape)[:, :, block.num_real :] = 0
    return probs


def softmax_backward(probs: torch.Tensor, d_probs: torch.Tensor) -> torch.Tensor:
    """Compute probs * (d_probs - delta) in place of d_probs.

    delta_i = sum_j P[i, j] dP[i, j] is computed from the block itself. The usual shortcut, rowsum(out * d_out), uses an out that
    was rounded to the input dtype. With it, all dS of a row would share one small error, and the table's gradient, a sum over all
    rows, would add these errors up.
    """
    if probs.device.type == "cpu":  # elsewhere a row may be written before all of it is read
        return torch._softmax_backward_data(d_probs, probs, -1, probs.dtype, grad_input=d_probs)
    return d_probs.sub_((probs * d_probs).sum(-1, keepdim=True)).mul_(probs)


def keeps_probs(tensors: AttentionTensors, spec: AttentionSpec) -> bool:
    """Return whether the forward should keep the probabilities for the backward: whether they take no more memory than query,
    key, value and out would if all had as many rows and heads as the query. Sequences that differ are aligned in another way in
    each group."""
    query, value = tensors.query, tensors.value
    size = value.shape[2] * compute_dtype(query.dtype).itemsize
    input_bytes = 2 * (query.shape[3] + value.shape[3]) * query.dtype.itemsize
    is_alike = tensors.cu_seqlens_q is None and tensors.key_lengths is None and tensors.query_offsets is None
    return size <= input_bytes and spec.softcap is None and is_alike


def kept_part(block: Block, kept: torch.Tensor) -> torch.Tensor:
    """Return the block's part of the probabilities that are kept, (B, Hq, Nq, Nk)."""
    group, first = block.group, block.group.stack[0]
    rows = slice(block.row, block.row + block.num_real)
    columns = slice(first.start + block.start, first.start + block.start + block.num_seen)
    return kept[first.entry : first.entry + first.count, group.heads, rows, columns]


def is_block(part: torch.Tensor, block: Block) -> bool:
    """Return whether a part of what is kept is memory for the scores of a block, without a copy."""
    return part.is_contiguous() and part.shape == block.shape


def read_kept(block: Block, kept: torch.Tensor) -> torch.Tensor:
    """Return the probabilities that are kept as matrices."""
    part = kept_part(block, kept)
    if is_block(part, block):
        return part.view(block.matrix_shape)
    probs, pairs = block.scores("scores")
    if part.shape != pairs.shape:
        pairs.zero_()
    pairs[:, :, : block.num_real, : block.num_seen] = part
    return probs


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
    out, lse = new_like(tensors.query, tensors.value.shape[-1], dtype), new_lse(tensors, spec)
    # What is kept, and a softmax over parts of the keys, must fit the logits of the backward.
    call = Call(tensors, spec, rounds_terms=kept is None and largest_logits is None)
    fuses = can_fuse(call, kept, dtype)
    for run in call.unseeing:
        for one in (run.part(number, number + 1) for number in range(run.count)):
            queries = (one.entry, slice(None), slice(one.query, one.query + one.num_queries))
            out[queries] = 0
            if spec.with_lse:
                lse[queries] = -math.inf
    for group in call.groups():
        rows = group.new_rows(out)
        others = [group.new_rows(each[..., None]) for each in (lse, largest_logits) if each is not None and spec.with_lse]
        band = None if "rel_value" not in group.tables else group.band("rel_value", rows, group.num_rows, 1.0)
        if band is not None:
            band.start(rows, for_table=False)
        for block in group.blocks():
            part = block.rows(rows)
            if block.num_seen == 0:
                part.zero_()
                for each in others:
                    block.rows(each).fill_(-math.inf)
            else:
                (fused if fuses else by_steps)(block, part, band, kept, *map(block.rows, others))
        if band is not None:
            band.finish()
        group.put_rows(out, rows)
        for tensor, found in zip((lse, largest_logits), others, strict=False):
            group.put_rows(tensor[..., None], found)  # type: ignore[index]
    return out, lse


def by_steps(
    block: Block,
    out: torch.Tensor,
    band: Band | None,
    kept: torch.Tensor | None,
    lse: torch.Tensor | None = None,
    largest_logits: torch.Tensor | None = None,
) -> None:
    """Compute a block's part of out, (sequences, heads, rows, Dv). band: of rel_value; kept as of forward(), the others of
    softmax()."""
    group, dtype = block.group, block.call.product_dtype
    place = None if kept is None else kept_part(block, kept)
    if place is not None and is_block(place, block):
        block.take("scores", place)
    scores, _ = logits(block)
    probs = softmax(block, scores, lse, largest_logits)
    if place is not None and place.data_ptr() != probs.data_ptr():
        place.copy_(probs.view(block.shape)[:, :, : block.num_real, : block.num_seen])
    if (factors := dropout(block)) is not None:
        probs = torch.mul(probs, factors, out=None if kept is not None else probs)
    block.write(out, cast(probs, dtype), group.value.operand(block))
    if band is not None:
        band.add_products(block.number, probs.view(block.shape), block.base)


def can_fuse(call: Call, kept: torch.Tensor | None, dtype: torch.dtype | None) -> bool:
    """Return whether torch's fused attention on a CPU computes a forward, with the terms of the tables as a mask that it adds."""
    tensors, spec = call.tensors, call.spec
    query, key, value, given = tensors.query, tensors.key, tensors.value, tensors.attn_mask
    if not call.is_cpu or query.dtype != torch.bfloat16 or call.product_dtype != query.dtype or not has_fast_fused_attention():
        return False
    if kept is not None or dtype is not None or spec.softcap is not None or spec.dropout_p > 0 or tensors.rel_value is not None:
        return False
    is_plain = given is None or given.dtype == torch.bool  # numbers may be too large for bfloat16
    is_finite = bool((key.sum(dtype=call.dtype) + value.sum(dtype=call.dtype)).isfinite())  # NaN of a hidden key would reach all
    return is_plain and is_finite and key.shape[3] == value.shape[3] and query.shape[2] >= call.sizes.fewest_rows


def fused(
    block: Block, out: torch.Tensor, _band: Band | None, _kept: torch.Tensor | None, lse: torch.Tensor | None = None
) -> None:
    """Compute a block's part of out by torch's fused attention; lse as of softmax()."""
    group, dtype = block.group, block.call.product_dtype
    terms, pairs = block.scores("terms", dtype)
    add_terms(block, pairs.zero_())
    mask(block, pairs)
    query = group.queries[block.number].to(dtype)
    operands = [each.unflatten(-2, (1, -1)) for each in (query, group.key.operand(block), group.value.operand(block), terms)]
    q, k, v, scores = (each if each.dim() == 4 else each[None] for each in operands)
    found, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=scores, scale=block.call.spec.scale
    )
    out.copy_(found.reshape(out.shape))
    if lse is not None:
        lse.copy_(log_sums.view(lse.shape))
        if block.may_be_blind:  # there it is 0
            lse.masked_fill_((terms.amax(-1, keepdim=True) == -math.inf).view(lse.shape), -math.inf)


class Whole(NamedTuple):
    """All keys that the queries see, where a call has a part of them: dS = P (dP - delta) is then that of the part.

    P = exp(logits - largest - log_sum): in one number, lse, a large logit would leave no digits for the logarithm.
    """

    largest: torch.Tensor  # (B, Hq, Nq), the largest logit; 0 if a query sees nothing
    log_sum: torch.Tensor  # (B, Hq, Nq), the logarithm of the sum of exp(logits - largest)
    delta: torch.Tensor  # (B, Hq, Nq): rowsum(out * d_out) - d_lse


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
    call = Call(tensors, spec)
    named = {name: each for name, want, each in zip(DIFFERENTIABLE, wanted, tensors, strict=False) if want and each is not None}
    call.gradients = {name: gradient_like(each) for name, each in named.items() if name not in TABLES}
    for name, total in call.gradients.items():
        if call.unseeing or (name in ("key", "value") and not call.has_all_keys):
            total.zero_()
    for group in call.groups():
        sums = Sums(group, call.gradients, named.keys(), d_out, d_lse, whole)
        for block in group.blocks():
            if block.num_seen > 0:
                add_block(sums, block, kept)
            elif sums.query is not None:
                block.rows(sums.query).zero_()
        sums.put()
    call.add_up()
    gradients: list[torch.Tensor | None] = []
    for name in DIFFERENTIABLE:
        found = call.gradients.get(name)
        if found is None and name in named:
            found = gradient_like(named[name]).zero_()
        elif found is not None and name in TABLES:
            found = found.view(named[name].shape).to(named[name].dtype)
        gradients.append(found)
    return tuple(gradients)


class Sums:
    """The gradients of a group's rows and columns, what they are computed from, and the bands that sum up others."""

    def __init__(
        self,
        group: Group,
        gradients: dict[str, torch.Tensor],
        wanted: Set[str],
        d_out: torch.Tensor,
        d_lse: torch.Tensor | None,
        whole: Whole | None,
    ) -> None:
        call, dtype = group.call, group.call.product_dtype
        self.group, self.gradients, self.wanted = group, gradients, wanted
        rows = group.rows(d_out)
        self.d_out = self.operands = group.matrices(rows)
        self.queries = group.queries
        if dtype != call.dtype:
            self.operands, self.queries = group.matrices(rows, dtype), group.matrices(group.query, dtype)
        per_row = (d_lse, *(whole or (None, None, None)))
        found = (None if each is None else group.matrices(group.rows(each[..., None])) for each in per_row)
        self.d_lse, self.largest, self.log_sum, self.delta = found
        self.key, self.value = (group.new_columns(gradients[n], n) if n in wanted else None for n in ("key", "value"))
        self.beta = 0
        """0 as long as no block has written to key and value."""
        self.query = group.new_rows(gradients["query"]) if "query" in wanted else None
        self.rel_query = group.new_rows(gradients["rel_query"]).zero_() if "rel_query" in wanted else None
        if group.rel_key is not None:
            has_own = call.tensors.rel_query is not None
            group.rel_key.start(self.rel_query if has_own else self.query, "rel_key" in wanted)
        self.rel_value = None
        if "rel_value" in group.tables:
            self.rel_value = group.band("rel_value", rows, group.num_rows, 1.0)
            self.rel_value.start(None, "rel_value" in wanted)

    def put(self) -> None:
        """Write what is complete to the gradients of the call's tensors."""
        group = self.group
        for band in (group.rel_key, self.rel_value):
            if band is not None:
                band.finish()
        self.close_mirror()
        if not self.beta:  # no block sees a key
            self.clear()
        for name, found in (("query", self.query), ("rel_query", self.rel_query)):
            if found is not None:
                group.put_rows(self.gradients[name], found)
        for name, found in (("key", self.key), ("value", self.value)):
            if found is not None:
                group.put_columns(self.gradients[name], found)

    def clear(self) -> None:
        """Set the gradients of keys and values to zero."""
        for each in (self.key, self.value):
            if each is not None:
                each.zero_()
        self.beta = 1

    def close_mirror(self) -> None:
        """Add what the band of rel_p2c has summed up to the gradient of the keys."""
        mirror = self.group.mirror
        if mirror is None or not mirror.band.is_started:
            return
        mirror.band.finish()
        if mirror.band.total is not None and self.key is not None:
            d_keys = mirror.band.total.unflatten(1, (-1, self.group.call.sharing)).sum(2).mT
            place = self.key.narrow(-1, mirror.start, mirror.num_columns)
            place.add_(d_keys.reshape(place.shape))
        self.group.mirror = None


def add_block(sums: Sums, block: Block, kept: torch.Tensor | None) -> None:
    """Add a block's part to all gradients."""
    group, call, number = block.group, block.call, block.number
    products, dtype, slope = group.products, call.product_dtype, None
    if group.mirror is not None and not group.mirror.fits(block):
        sums.close_mirror()
    if not (sums.beta or block.has_all):
        sums.clear()
    beta, sums.beta = sums.beta, 1
    if kept is not None:
        probs = read_kept(block, kept)
    else:
        scores, slope = logits(block)
        if sums.largest is None or sums.log_sum is None:
            probs = softmax(block, scores)
        else:  # Logits that are rounded in another way than the forward's may be larger: by 1 if they are 1e7.
            largest = sums.largest[number]
            probs = torch.minimum(scores, largest, out=scores).sub_(largest).sub_(sums.log_sum[number]).exp_()
            probs.view(block.shape)[:, :, block.num_real :] = 0
    factors = dropout(block)
    dropped = probs if factors is None else probs * factors
    if sums.value is not None:
        products.add(block.part(sums.value), sums.operands[number].mT, cast(dropped, dtype), beta=beta)
    if sums.rel_value is not None and "rel_value" in sums.wanted:
        sums.rel_value.add_products(number, dropped.view(block.shape), block.base)
    if sums.wanted <= {"value", "rel_value"}:
        return
    d_scores, pairs = block.product("d_scores", sums.d_out[number], group.value.transposed(block))
    if sums.rel_value is not None:
        sums.rel_value.add_terms(number, pairs, block.base)
    if factors is not None:
        d_scores.mul_(factors)
    if sums.delta is None:
        softmax_backward(probs, d_scores)
    else:
        d_scores.sub_(sums.delta[number]).mul_(probs)
    if sums.d_lse is not None:
        d_scores.addcmul_(probs, sums.d_lse[number])
    if slope is not None:
        d_scores.mul_(slope)
    operand = cast(d_scores, dtype)
    if sums.key is not None:
        products.add(block.part(sums.key), sums.queries[number].mT, operand, call.spec.scale, beta)
    if sums.query is not None:
        block.write(block.rows(sums.query), operand, group.key.operand(block), call.spec.scale)
    if group.rel_key is not None and sums.wanted & {"query", "rel_query", "rel_key"}:
        group.rel_key.add_products(number, pairs, block.base)
    if group.rel_bias is not None and "rel_bias" in sums.wanted:
        group.rel_bias.add_gradient(pairs, block.base)
    if "rel_p2c" in group.tables and sums.wanted & {"key", "rel_p2c"}:
        add_mirrored(sums, block, pairs)


def add_mirrored(sums: Sums, block: Block, pairs: torch.Tensor) -> None:
    """Add what a block's term of rel_p2c gives to the gradients of the key and of the table."""
    mirror = sums.group.mirrored(block)
    band = mirror.band
    if not band.is_started:
        band.start(torch.zeros_like(band.vectors) if "key" in sums.wanted else None, "rel_p2c" in sums.wanted)
    for each in mirror.panels(pairs, block.base):
        band.add_products(*each)
