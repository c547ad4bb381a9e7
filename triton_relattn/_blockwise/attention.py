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

import torch

from .._core.dtypes import compute_dtype, gradient_like, new_like
from .._core.spec import DIFFERENTIABLE, TABLES, AttentionSpec, AttentionTensors
from .bands import cast
from .cut import Block, Call, Group, Rows
from .masks import dropout, mask
from .products import has_fast_fused_attention


def logits(block: Block, place: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the masked logits, as matrices, and the derivative of softcap, None without softcap. place: memory for them."""
    group, call = block.group, block.call
    place = block.scores("scores", call.dtype) if place is None else place
    scores = group.products.scaled(group.query.operand(block.number), block.across(group.key_across), call.spec.scale, place)
    pairs = scores.view(block.shape)
    add_terms(block, pairs)
    slope = None
    if (softcap := call.spec.softcap) is not None:
        limited = scores.div_(softcap).tanh_()
        slope = 1 - limited.square()
        limited.mul_(softcap)
    mask(block, pairs)
    return scores, slope


def add_terms(block: Block, pairs: torch.Tensor) -> None:
    """Add the terms of the tables to the scores of the pairs."""
    group, rel_scale = block.group, block.call.spec.rel_scale
    for name, table in group.tables.items():
        if name == "rel_key":
            table.add_terms(group.setting, pairs, block.base, group.rel_query.vectors(block.number), rel_scale)
        elif name == "rel_bias":
            table.add_terms(group.setting, pairs, block.base)
        elif name == "rel_p2c":
            for columns, keys in group.panels(block):
                table.add_terms(group.setting, pairs.mT[:, :, columns], -block.base - columns.start, keys, rel_scale)


def softmax(scores: torch.Tensor, may_be_blind: bool, lse: torch.Tensor | None = None) -> torch.Tensor:
    """Compute the probabilities in place of the scores. Each row sums to one, whatever the logits, or is zero if all its logits
    are -inf.

    Args:
        may_be_blind: whether there may be such rows.
        lse: memory for the log-sum-exp of the rows, in their order; None: it is not computed, which saves passes.
    """
    blind = largest = None
    if lse is not None or may_be_blind:
        largest = scores.amax(-1, keepdim=True)
        blind = (largest == -math.inf).flatten().nonzero()[:, 0]  # their softmax is NaN
    # A CPU reads all of a row before it writes any of it; elsewhere that is not certain.
    probs = torch.softmax(scores, -1, out=scores if scores.device.type == "cpu" else None)
    if lse is not None and largest is not None and blind is not None:
        log_sum = probs.amax(-1, keepdim=True).log_().neg_()  # the largest probability is exp(0) / total
        lse.copy_(log_sum.add_(largest).view(-1).index_fill_(0, blind, -math.inf).view(lse.shape))
    if blind is not None and len(blind) > 0:
        probs.view(-1, probs.shape[-1]).index_fill_(0, blind, 0)
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


def clear_rows(block: Block, probs: torch.Tensor) -> None:
    """Set the probabilities of rows of no query to zero."""
    if block.num_real < block.num_rows:
        probs.view(block.shape)[:, :, block.num_real :] = 0


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
    probs = block.scores("scores", block.call.dtype)
    pairs = probs.view(block.shape)
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out (B, Hq, Nq, Dv) in the inputs' dtype, and lse, see new_lse().

    kept: memory for the probabilities, before dropout, for the backward; None: they are not kept.
    """
    out, lse = new_like(tensors.query, tensors.value.shape[-1]), new_lse(tensors, spec)
    call = Call(tensors, spec, rounds_terms=kept is None)  # what is kept must fit the logits of the backward
    fuses = can_fuse(call, kept)
    for run in call.unseeing:
        for one in (run.part(number, number + 1) for number in range(run.count)):
            queries = (one.entry, slice(None), slice(one.query, one.query + one.num_queries))
            out[queries] = 0
            if spec.with_lse:
                lse[queries] = -math.inf
    for group in call.groups():
        rows = Rows(group, group.new_rows(out))
        logsumexp = Rows(group, group.new_rows(lse[..., None])) if spec.with_lse else None
        for block in group.blocks():
            if block.num_seen == 0:
                rows.parts[block.number].zero_()
                if logsumexp is not None:
                    logsumexp.parts[block.number].fill_(-math.inf)
            else:
                place = None if logsumexp is None else logsumexp.parts[block.number]
                (fused if fuses else by_steps)(block, rows, kept, place)
        group.put_rows(out, rows.all)
        if logsumexp is not None:
            group.put_rows(lse[..., None], logsumexp.all)
    return out, lse


def by_steps(block: Block, rows: Rows, kept: torch.Tensor | None, lse: torch.Tensor | None) -> None:
    """Compute a block's rows of out; kept as of forward(), lse of softmax()."""
    group, call = block.group, block.call
    place = None if kept is None else kept_part(block, kept)
    scores, _ = logits(block, place.view(block.matrix_shape) if place is not None and is_block(place, block) else None)
    probs = softmax(scores, block.may_be_blind, lse)
    clear_rows(block, probs)
    if place is not None and place.data_ptr() != probs.data_ptr():
        place.copy_(probs.view(block.shape)[:, :, : block.num_real, : block.num_seen])
    if (factors := dropout(block)) is not None:
        probs = torch.mul(probs, factors, out=None if kept is not None else probs)
    block.write(rows, cast(probs, call.product_dtype), block.columns(group.value_operand))
    if "rel_value" in group.tables:
        group.tables["rel_value"].add_products(group.setting, probs.view(block.shape), block.base, None, rows.parts[block.number])


def can_fuse(call: Call, kept: torch.Tensor | None) -> bool:
    """Return whether torch's fused attention on a CPU computes a forward, with the terms of the tables as a mask that it adds."""
    tensors, spec = call.tensors, call.spec
    query, key, value, given = tensors.query, tensors.key, tensors.value, tensors.attn_mask
    if not call.is_cpu or query.dtype != torch.bfloat16 or call.product_dtype != query.dtype or not has_fast_fused_attention():
        return False
    if kept is not None or spec.softcap is not None or spec.dropout_p > 0 or tensors.rel_value is not None:
        return False
    is_plain = given is None or given.dtype == torch.bool  # numbers may be too large for bfloat16
    is_finite = bool((key.sum(dtype=call.dtype) + value.sum(dtype=call.dtype)).isfinite())  # NaN of a hidden key would reach all
    return is_plain and is_finite and key.shape[3] == value.shape[3] and query.shape[2] >= call.sizes.fewest_rows


def fused(block: Block, rows: Rows, _kept: torch.Tensor | None, lse: torch.Tensor | None) -> None:
    """Compute a block's rows of out by torch's fused attention; lse as of softmax()."""
    group, dtype = block.group, block.call.product_dtype
    terms = block.scores("terms of tables", dtype).zero_()
    pairs = terms.view(block.shape)
    add_terms(block, pairs)
    mask(block, pairs)
    key, value = block.columns(group.key_operand), block.columns(group.value_operand)
    operands = [each.unflatten(-2, (1, -1)) for each in (cast(group.query.operand(block.number), dtype), key, value, terms)]
    q, k, v, scores = (each if each.dim() == 4 else each[None] for each in operands)
    found, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=scores, scale=block.call.spec.scale
    )
    out = rows.parts[block.number]
    out.copy_(found.reshape(out.shape))
    if lse is not None:
        lse.copy_(log_sums.view(lse.shape))
        if block.may_be_blind:  # there it is 0
            lse.masked_fill_((terms.amax(-1, keepdim=True) == -math.inf).view(lse.shape), -math.inf)


def backward(
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    tensors: AttentionTensors,
    spec: AttentionSpec,
    wanted: Iterable[bool] = (True,) * len(DIFFERENTIABLE),
    kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the tensors that spec.DIFFERENTIABLE names; None for those that are not wanted or not there.

    kept: the probabilities that the forward has kept; None: they are computed again.
    """
    call = Call(tensors, spec)
    named = wanted_by_name(tensors, wanted)
    call.gradients = {name: gradient_like(each) for name, each in named.items() if name not in TABLES}
    for name, total in call.gradients.items():
        if call.unseeing or (name in ("key", "value") and not call.has_all_keys):
            total.zero_()
    for group in call.groups():
        sums = Sums(group, call.gradients, named.keys(), d_out, d_lse)
        for block in group.blocks():
            if block.num_seen > 0:
                add_block(sums, block, kept)
            elif sums.query is not None:
                sums.query.parts[block.number].zero_()
        sums.put()
    call.memory.clear()  # before more is allocated
    call.add_up()
    return in_order(call.gradients, named)


def wanted_by_name(tensors: AttentionTensors, wanted: Iterable[bool]) -> dict[str, torch.Tensor]:
    """Return the tensors whose gradients are wanted."""
    found = zip(DIFFERENTIABLE, wanted, tensors, strict=False)
    return {name: tensor for name, want, tensor in found if want and tensor is not None}


def in_order(gradients: dict[str, torch.Tensor], named: dict[str, torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients in the order of spec.DIFFERENTIABLE, of tables in their shape and dtype; zeros where there is none."""
    found: list[torch.Tensor | None] = []
    for name in DIFFERENTIABLE:
        tensor, gradient = named.get(name), gradients.get(name)
        if tensor is not None and gradient is None:
            gradient = gradient_like(tensor).zero_()
        elif tensor is not None and gradient is not None and name in TABLES:
            gradient = cast(gradient.view(tensor.shape), tensor.dtype)
        found.append(gradient)
    return tuple(found)


class Sums:
    """What the gradients of a group are computed from, its rows, and where they are added up."""

    def __init__(
        self,
        group: Group,
        gradients: dict[str, torch.Tensor],
        wanted: Set[str],
        d_out: torch.Tensor,
        d_lse: torch.Tensor | None,
    ) -> None:
        self.group, self.gradients, self.wanted = group, gradients, wanted
        self.d_out = Rows(group, group.rows(d_out))
        self.d_lse = None if d_lse is None else Rows(group, group.rows(d_lse[..., None]))
        self.key, self.value = (group.new_columns(gradients[n], n) if n in wanted else None for n in ("key", "value"))
        self.query = Rows(group, group.new_rows(gradients["query"])) if "query" in wanted else None
        self.rel_query = None
        if "rel_query" in wanted:
            self.rel_query = Rows(group, group.new_rows(gradients["rel_query"]).zero_())
        self.mirrored_keys = None
        if "rel_p2c" in group.tables and "key" in wanted:
            self.mirrored_keys = torch.zeros_like(group.mirrored_keys)
        self.beta = 0
        """0 as long as no block has written to key and value."""

    def put(self) -> None:
        """Write what is complete to the gradients of the call's tensors."""
        group = self.group
        if not self.beta:  # no block sees a key
            self.clear()
        if self.mirrored_keys is not None and self.key is not None:
            found = self.mirrored_keys.unflatten(1, (-1, group.call.sharing)).sum(2)
            self.key.add_(found.view(self.key.mT.shape).mT)
        for name, rows in (("query", self.query), ("rel_query", self.rel_query)):
            if rows is not None:
                group.put_rows(self.gradients[name], rows.all)
        for name, columns in (("key", self.key), ("value", self.value)):
            if columns is not None:
                group.put_columns(self.gradients[name], columns)

    def clear(self) -> None:
        """Set the gradients of keys and values to zero."""
        for each in (self.key, self.value):
            if each is not None:
                each.zero_()
        self.beta = 1


def add_block(sums: Sums, block: Block, kept: torch.Tensor | None) -> None:
    """Add a block's part to all gradients."""
    group, call, wanted, number = block.group, block.call, sums.wanted, block.number
    products, tables, dtype, scale = group.products, group.tables, call.product_dtype, call.spec.scale
    if not (sums.beta or block.has_all):
        sums.clear()
    beta, sums.beta = sums.beta, 1
    slope = None
    if kept is not None:
        probs = read_kept(block, kept)
    else:
        scores, slope = logits(block)
        probs = softmax(scores, block.may_be_blind)
        clear_rows(block, probs)
    factors = dropout(block)
    dropped = probs if factors is None else probs * factors
    d_out = sums.d_out.operand(number)
    if sums.value is not None:  # dV += P^T dO
        products.add(block.across(sums.value), cast(d_out, dtype).mT, cast(dropped, dtype), beta=beta)
    if "rel_value" in wanted:
        tables["rel_value"].add_products(group.setting, dropped.view(block.shape), block.base, sums.d_out.vectors(number), None)
    if wanted <= {"value", "rel_value"}:
        return
    # Terms are added by now, but for those of rel_value, which are added to these.
    place = block.scores("d_scores" if "rel_value" in tables else "terms", call.dtype)
    d_scores = products.scaled(d_out, block.across(group.value_across), 1.0, place)
    pairs = d_scores.view(block.shape)
    if "rel_value" in tables:
        tables["rel_value"].add_terms(group.setting, pairs, block.base, sums.d_out.vectors(number))
    if factors is not None:
        d_scores.mul_(factors)
    softmax_backward(probs, d_scores)  # dS = P (dP - delta)
    if sums.d_lse is not None:
        d_scores.addcmul_(probs, sums.d_lse.operand(number))
    if slope is not None:
        d_scores.mul_(slope)
    operand = cast(d_scores, dtype)
    if sums.key is not None:  # dK += scale dS^T Q
        products.add(block.across(sums.key), cast(group.query.operand(number), dtype).mT, operand, scale, beta)
    if sums.query is not None:  # dQ = scale dS K
        block.write(sums.query, operand, block.columns(group.key_operand), scale)
    add_gradients(sums, block, pairs)


def add_gradients(sums: Sums, block: Block, pairs: torch.Tensor) -> None:
    """Add what the gradients of the logits give to those of the tables, and of what the tables meet."""
    group, wanted, rel_scale = block.group, sums.wanted, block.call.spec.rel_scale
    for name, table in group.tables.items():
        if name == "rel_key":
            sum_of_rows = sums.query if block.call.tensors.rel_query is None else sums.rel_query
            total = None if sum_of_rows is None else sum_of_rows.parts[block.number]
            vectors = group.rel_query.vectors(block.number) if name in wanted else None
            if total is not None or vectors is not None:
                table.add_products(group.setting, pairs, block.base, vectors, total, rel_scale)
        elif name == "rel_bias" and name in wanted:
            table.add_products(group.setting, pairs, block.base, None, None)
        elif name == "rel_p2c" and wanted & {"key", "rel_p2c"}:
            d_keys = None if sums.mirrored_keys is None else block.columns(sums.mirrored_keys)
            for columns, keys in group.panels(block):
                vectors = keys if name in wanted else None
                total = None if d_keys is None else d_keys[:, :, columns]
                table.add_products(group.setting, pairs.mT[:, :, columns], -block.base - columns.start, vectors, total, rel_scale)
