"""Linear-memory attention in plain torch, forward and hand-written backward, for any device.

A call is cut into blocks of some queries with all keys that they see (cut.py, blocks.py), so that every step is one call of torch
on a matrix of scores, and softmax is torch's own. Terms of tables are views of bands (bands.py). With the gradients dO of out and
dlse of lse:

    P  = softmax(scale * Q K^T + terms of other tables)              out = P V + term of rel_value
    dP = dO V^T + term of rel_value                                  dS  = P * (dP - rowsum(P * dP) + dlse)

dV and the gradient of rel_value are products with P, all other gradients products with dS. The backward has whole rows, as the
forward has, so it does not need lse. P sums to one however large the logits are, where exp(logits - lse) would not. If P takes no
more memory than query, key, value and out, as with short sequences, the forward saves it for the backward. The working set is
cut.SCORES blocks of scores, each of Sizes.elements for a thread, or of Sizes.rows rows, which is linear in the number of keys.

Shapes in comments: S sequences, H heads, M rows (queries) and N columns (keys) of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set

import torch

from .._core.dtypes import compute_dtype, gradient_like, new_like
from .._core.spec import DIFFERENTIABLE, TABLES, AttentionSpec, AttentionTensors
from .bands import cast
from .blocks import Block, Call, Group
from .masks import dropout, mask
from .products import has_fast_fused_attention


def probabilities(
    block: Block, out: torch.Tensor | None = None, lse: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a block's probabilities, as matrices, in memory that is given or new, and the derivative of softcap or None."""
    group, call = block.group, block.call
    out = block.scores("scores", call.dtype) if out is None else out
    # scale * Q K^T: [heads_per_key * M, D] @ [D, N]
    scores = group.products.scaled(block.matrices(block.query), block.across(group.key), call.spec.scale, out)
    pairs = scores.view(block.shape)  # [S, H, M, N]
    add_terms(block, pairs)
    slope = None
    if (softcap := call.spec.softcap) is not None:
        limited = scores.div_(softcap).tanh_()
        slope = 1 - limited.square()
        limited.mul_(softcap)
    mask(block, pairs)
    probs = softmax(scores, block.may_hide_rows, lse)
    if block.num_queries < block.num_rows:  # rows of no query
        probs.view(block.shape)[:, :, block.num_queries :] = 0
    return probs, slope


def add_terms(block: Block, pairs: torch.Tensor) -> None:
    """Add the terms of the tables to the scores of the pairs."""
    group, rel_scale = block.group, block.call.spec.rel_scale
    for name, table in group.tables.items():
        if name == "rel_key":
            table.add_terms(group.setting, pairs, block.base, block.rel_query, rel_scale)
        elif name == "rel_bias":
            table.add_terms(group.setting, pairs, block.base)
        elif name == "rel_p2c":
            for columns, keys in group.panels(block):
                table.add_terms(group.setting, pairs.mT[:, :, columns], -block.base - columns.start, keys, rel_scale)


def softmax(scores: torch.Tensor, may_hide_rows: bool, lse: torch.Tensor | None = None) -> torch.Tensor:
    """Compute the probabilities in place of the scores. A row sums to one, or is zero if all its logits are -inf (may_hide_rows:
    some may be). lse: memory for the log-sum-exp of the rows; None saves passes."""
    hidden = largest = None
    if lse is not None or may_hide_rows:
        largest = scores.amax(-1, keepdim=True)
        hidden = (largest == -math.inf).flatten().nonzero()[:, 0]  # rows whose softmax is NaN
    # A CPU reads all of a row before it writes any of it; elsewhere that is not certain.
    probs = torch.softmax(scores, -1, out=scores if scores.device.type == "cpu" else None)
    if lse is not None and largest is not None and hidden is not None:
        log_sum = probs.amax(-1, keepdim=True).log_().neg_()  # the largest probability is exp(0) / total
        lse.copy_(log_sum.add_(largest).view(-1).index_fill_(0, hidden, -math.inf).view(lse.shape))
    if hidden is not None and len(hidden) > 0:
        probs.view(-1, probs.shape[-1]).index_fill_(0, hidden, 0)
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
    """Return whether the forward should save the probabilities for the backward: whether they take no more memory than query,
    key, value and out would if all had as many rows and heads as the query. Sequences that differ are aligned in another way in
    each group."""
    query, value = tensors.query, tensors.value
    size = value.shape[2] * compute_dtype(query.dtype).itemsize
    input_bytes = 2 * (query.shape[3] + value.shape[3]) * query.dtype.itemsize
    is_uniform = tensors.cu_seqlens_q is None and tensors.key_lengths is None and tensors.query_offsets is None
    return size <= input_bytes and spec.softcap is None and is_uniform


def saved_part(block: Block, saved_probs: torch.Tensor) -> torch.Tensor:
    """Return the block's part of the probabilities that are saved, (B, Hq, Nq, Nk)."""
    group, run = block.group, block.group.runs[0]
    first_key = run.start + block.start
    rows, columns = slice(block.row, block.row + block.num_queries), slice(first_key, first_key + block.num_keys)
    return saved_probs[run.entry : run.entry + run.count, group.heads, rows, columns]


def is_view(part: torch.Tensor, block: Block) -> bool:
    """Return whether a part of what is saved is memory for the scores of a block, without a copy."""
    return part.is_contiguous() and part.shape == block.shape


def read_probs(block: Block, saved_probs: torch.Tensor) -> torch.Tensor:
    """Return the block's part of the probabilities that are saved as matrices."""
    part = saved_part(block, saved_probs)
    if is_view(part, block):
        return part.view(block.matrix_shape)
    probs = block.scores("scores", block.call.dtype)
    pairs = probs.view(block.shape)
    if part.shape != pairs.shape:
        pairs.zero_()
    pairs[:, :, : block.num_queries, : block.num_keys] = part
    return probs


def new_lse(tensors: AttentionTensors, spec: AttentionSpec) -> torch.Tensor:
    """Return memory for lse, (B, Hq, Nq) in the compute dtype; (B, Hq, 0) if it is not wanted."""
    query = tensors.query
    return query.new_empty((*query.shape[:2], query.shape[2] if spec.with_lse else 0), dtype=compute_dtype(query.dtype))


def forward(
    tensors: AttentionTensors, spec: AttentionSpec, saved_probs: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out (B, Hq, Nq, Dv) in the inputs' dtype, and lse, see new_lse(). saved_probs: memory for the probabilities before
    dropout, for the backward."""
    out, lse = new_like(tensors.query, tensors.value.shape[-1]), new_lse(tensors, spec)
    call = Call(tensors, spec, rounds_terms=saved_probs is None)  # what is saved must fit the logits of the backward
    forward_block = fused_block if can_fuse(call, saved_probs) else block_by_steps
    for run in call.runs_without_keys:
        for sequence in run.sequences():
            queries = sequence.entry, slice(None), slice(sequence.query, sequence.query + sequence.num_queries)
            out[queries] = 0
            if spec.with_lse:
                lse[queries] = -math.inf
    for group in call.groups():
        out_rows, lse_rows = group.new_rows(out), group.new_rows(lse[..., None]) if spec.with_lse else None
        for block in group.blocks():
            if block.num_keys > 0:
                forward_block(block, out_rows, None if lse_rows is None else block.rows(lse_rows), saved_probs)
                continue
            block.rows(out_rows).zero_()
            if lse_rows is not None:
                block.rows(lse_rows).fill_(-math.inf)
        group.query_rows.write(out, out_rows)
        if lse_rows is not None:
            group.query_rows.write(lse[..., None], lse_rows)
    return out, lse


def block_by_steps(block: Block, out: torch.Tensor, lse: torch.Tensor | None, saved_probs: torch.Tensor | None) -> None:
    """Compute a block's part of out, a group's rows; lse of softmax(), saved_probs of forward()."""
    group, call = block.group, block.call
    part = None if saved_probs is None else saved_part(block, saved_probs)
    probs, _ = probabilities(block, part.view(block.matrix_shape) if part is not None and is_view(part, block) else None, lse)
    if part is not None and part.data_ptr() != probs.data_ptr():
        part.copy_(probs.view(block.shape)[:, :, : block.num_queries, : block.num_keys])
    if (factors := dropout(block)) is not None:
        probs = torch.mul(probs, factors, out=None if saved_probs is not None else probs)
    # P V: [heads_per_key * M, N] @ [N, Dv]
    block.write(out, cast(probs, call.product_dtype), block.columns(group.value_operand))
    if "rel_value" in group.tables:
        group.tables["rel_value"].add_products(group.setting, probs.view(block.shape), block.base, None, block.rows(out))


def can_fuse(call: Call, saved_probs: torch.Tensor | None) -> bool:
    """Return whether torch's fused attention on a CPU computes a forward, with the terms of the tables as a mask that it adds."""
    tensors, spec = call.tensors, call.spec
    query, key, value, attn_mask = tensors.query, tensors.key, tensors.value, tensors.attn_mask
    if not call.is_cpu or query.dtype != torch.bfloat16 or call.product_dtype != query.dtype or not has_fast_fused_attention():
        return False
    if saved_probs is not None or spec.softcap is not None or spec.dropout_p > 0 or tensors.rel_value is not None:
        return False
    is_boolean = attn_mask is None or attn_mask.dtype == torch.bool  # numbers may be too large for bfloat16
    is_finite = bool((key.sum(dtype=call.dtype) + value.sum(dtype=call.dtype)).isfinite())  # NaN of a hidden key would reach all
    return is_boolean and is_finite and key.shape[3] == value.shape[3] and query.shape[2] >= call.cut.sizes.min_rows


def fused_block(block: Block, out: torch.Tensor, lse: torch.Tensor | None, _: torch.Tensor | None) -> None:
    """Compute a block's part of out, a group's rows, by torch's fused attention; lse of softmax()."""
    group, dtype = block.group, block.call.product_dtype
    terms = block.scores("terms of tables", dtype).zero_()
    pairs = terms.view(block.shape)
    add_terms(block, pairs)
    mask(block, pairs)
    query = cast(block.matrices(block.query), dtype)
    operands = query, block.columns(group.key_operand), block.columns(group.value_operand), terms
    # Matrices as one head of each of a batch: [matrices, 1, rows or columns, ...]
    q, k, v, bias = (matrices.view(-1, 1, *matrices.shape[-2:]) for matrices in operands)
    result, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=bias, scale=block.call.spec.scale
    )
    block.rows(out).copy_(result.reshape(block.rows(out).shape))
    if lse is not None:
        lse.copy_(log_sums.view(lse.shape))
        if block.may_hide_rows:  # there it is 0
            lse.masked_fill_((terms.amax(-1, keepdim=True) == -math.inf).view(lse.shape), -math.inf)


def backward(
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    tensors: AttentionTensors,
    spec: AttentionSpec,
    needs_grad: Iterable[bool] = (True,) * len(DIFFERENTIABLE),
    saved_probs: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the tensors that spec.DIFFERENTIABLE names; None for those that are not wanted or not there.
    saved_probs: the forward's; None: they are computed again."""
    call, inputs = Call(tensors, spec), inputs_that_need_grad(tensors, needs_grad)
    call.gradients = {name: gradient_like(tensor) for name, tensor in inputs.items() if name not in TABLES}
    for name, gradient in call.gradients.items():
        if call.runs_without_keys or (name in ("key", "value") and not call.sees_all_keys):
            gradient.zero_()
    for group in call.groups():
        gradients = Gradients(group, inputs.keys(), d_out, d_lse)
        for block in group.blocks():
            if block.num_keys > 0:
                backward_block(gradients, block, saved_probs)
            elif gradients.query is not None:
                block.rows(gradients.query).zero_()
        gradients.write()
    call.memory.clear()  # before more is allocated
    call.add_table_gradients()
    return in_order(call.gradients, inputs)


def inputs_that_need_grad(tensors: AttentionTensors, needs_grad: Iterable[bool]) -> dict[str, torch.Tensor]:
    """Return the tensors whose gradients are wanted."""
    inputs = zip(DIFFERENTIABLE, needs_grad, tensors, strict=False)
    return {name: tensor for name, needed, tensor in inputs if needed and tensor is not None}


def in_order(gradients: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients in the order of spec.DIFFERENTIABLE, of tables in their shape and dtype; zeros where there is none."""
    ordered: list[torch.Tensor | None] = []
    for name in DIFFERENTIABLE:
        tensor, gradient = inputs.get(name), gradients.get(name)
        if tensor is not None and gradient is None:
            gradient = gradient_like(tensor).zero_()
        elif tensor is not None and gradient is not None and name in TABLES:
            gradient = cast(gradient.view(tensor.shape), tensor.dtype)
        ordered.append(gradient)
    return tuple(ordered)


class Gradients:
    """The gradients of a group's rows and columns, which its blocks write or add to, and those of its results."""

    def __init__(self, group: Group, needs_grad: Set[str], d_out: torch.Tensor, d_lse: torch.Tensor | None) -> None:
        self.group, self.needs_grad = group, needs_grad
        totals = group.call.gradients  # of the call's tensors
        self.d_out, self.d_lse = group.rows(d_out), None if d_lse is None else group.rows(d_lse[..., None])
        self.query = group.new_rows(totals["query"]) if "query" in needs_grad else None
        self.rel_query = group.new_rows(totals["rel_query"]).zero_() if "rel_query" in needs_grad else None
        self.key, self.value = (group.new_columns(totals[n], n) if n in needs_grad else None for n in ("key", "value"))
        self.keys_by_head = None
        if "rel_p2c" in group.tables and "key" in needs_grad:
            self.keys_by_head = torch.zeros_like(group.keys_by_head)
        self.beta = 0  # 0 as long as no block has written to key and value

    def write(self) -> None:
        """Write what is complete to the gradients of the call's tensors."""
        group, totals = self.group, self.group.call.gradients
        if not self.beta:  # no block sees a key
            self.clear()
        if self.keys_by_head is not None and self.key is not None:
            self.key.add_(self.keys_by_head.unflatten(1, (-1, group.call.heads_per_key)).sum(2).view(self.key.shape))
        for name, rows in (("query", self.query), ("rel_query", self.rel_query)):
            if rows is not None:
                group.query_rows.write(totals[name], rows)
        for name, columns in (("key", self.key), ("value", self.value)):
            if columns is not None:
                width = columns.shape[-1]
                group.key_rows.write(totals[name], columns.reshape(group.sizes[0], -1, group.num_columns, width))

    def clear(self) -> None:
        """Set the gradients of keys and values to zero."""
        for columns in (self.key, self.value):
            if columns is not None:
                columns.zero_()
        self.beta = 1


def backward_block(gradients: Gradients, block: Block, saved_probs: torch.Tensor | None) -> None:
    """Add a block's part to all gradients."""
    group, call, needs_grad = block.group, block.call, gradients.needs_grad
    products, tables, dtype, scale = group.products, group.tables, call.product_dtype, call.spec.scale
    if not (gradients.beta or block.has_all_columns):
        gradients.clear()
    beta, gradients.beta = gradients.beta, 1
    probs, slope = probabilities(block) if saved_probs is None else (read_probs(block, saved_probs), None)
    factors = dropout(block)
    dropped = probs if factors is None else probs * factors
    d_out_rows = block.vectors(gradients.d_out)  # [S, H, M, Dv]
    d_out = block.matrices(d_out_rows)
    if gradients.value is not None:  # dV^T += dO^T P: [Dv, heads_per_key * M] @ [heads_per_key * M, N]
        products.add(block.columns(gradients.value).mT, cast(d_out, dtype).mT, cast(dropped, dtype), beta=beta)
    if "rel_value" in needs_grad:
        tables["rel_value"].add_products(group.setting, dropped.view(block.shape), block.base, d_out_rows, None)
    if needs_grad <= {"value", "rel_value"}:
        return
    # dP = dO V^T: [heads_per_key * M, Dv] @ [Dv, N]. All terms are added by now but for those of rel_value, which come next.
    out = block.scores("d_scores" if "rel_value" in tables else "terms", call.dtype)
    d_scores = products.scaled(d_out, block.across(group.value), 1.0, out)
    pairs = d_scores.view(block.shape)  # [S, H, M, N]
    if "rel_value" in tables:
        tables["rel_value"].add_terms(group.setting, pairs, block.base, d_out_rows)
    if factors is not None:
        d_scores.mul_(factors)
    softmax_backward(probs, d_scores)  # dS = P (dP - delta)
    if gradients.d_lse is not None:
        d_scores.addcmul_(probs, block.matrices(block.vectors(gradients.d_lse)))
    if slope is not None:
        d_scores.mul_(slope)
    operand = cast(d_scores, dtype)
    if gradients.key is not None:  # dK^T += scale Q^T dS: [D, heads_per_key * M] @ [heads_per_key * M, N]
        query = cast(block.matrices(block.query), dtype)
        products.add(block.columns(gradients.key).mT, query.mT, operand, scale, beta)
    if gradients.query is not None:  # dQ = scale dS K: [heads_per_key * M, N] @ [N, D]
        block.write(gradients.query, operand, block.columns(group.key_operand), scale)
    add_gradients(gradients, block, pairs)


def add_gradients(gradients: Gradients, block: Block, pairs: torch.Tensor) -> None:
    """Add what the gradients of the logits, [S, H, M, N], give to those of the tables, and of what the tables meet."""
    group, needs_grad, rel_scale = block.group, gradients.needs_grad, block.call.spec.rel_scale
    for name, table in group.tables.items():
        if name == "rel_key":
            rows = gradients.query if block.call.tensors.rel_query is None else gradients.rel_query
            total, vectors = None if rows is None else block.rows(rows), block.rel_query if name in needs_grad else None
            if total is not None or vectors is not None:
                table.add_products(group.setting, pairs, block.base, vectors, total, rel_scale)
        elif name == "rel_bias" and name in needs_grad:
            table.add_products(group.setting, pairs, block.base, None, None)
        elif name == "rel_p2c" and needs_grad & {"key", "rel_p2c"}:
            d_keys = None if gradients.keys_by_head is None else block.columns(gradients.keys_by_head)
            for columns, keys in group.panels(block):
                total, vectors = None if d_keys is None else d_keys[:, :, columns], keys if name in needs_grad else None
                table.add_products(group.setting, pairs.mT[:, :, columns], -block.base - columns.start, vectors, total, rel_scale)
