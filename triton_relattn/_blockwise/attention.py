"""Linear-memory attention in plain torch, forward and hand-written backward, for any device.

A call is cut into blocks of some queries with all keys that they see (blocks.py), so that every step is one call of torch on a
matrix of scores, and softmax is torch's own. Terms of tables are views of bands (tables.py, terms.py). With the gradients dO of
out and dlse of lse:

    P  = softmax(scale * Q K^T + terms of other tables)              out = P V + term of rel_value
    dP = dO V^T + term of rel_value                                  dS  = P * (dP - rowsum(P * dP) + dlse)

dV and the gradient of rel_value are products with P, all other gradients products with dS. On a CPU most forwards are torch's
fused attention, which takes the view of a band as a mask that it adds, and gives lse as well. The backward has whole rows, and
computes their softmax again: P sums to one however large the logits are, where exp(logits - lse) would not. If P takes no more
memory than query, key, value and out, as with short sequences, the forward computes it and saves it for the backward. The working
set is SCORES blocks of scores, each of Sizes.elements for a thread, or of Sizes.rows rows, which is linear in the number of keys.

Shapes in comments: S sequences, H heads, M rows (queries) and N columns (keys) of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set

import torch

from .._core.dropout import keep_mask, keep_scale
from .._core.dtypes import compute_dtype, gradient_like, new_like
from .._core.spec import DIFFERENTIABLE, TABLES, AttentionSpec, AttentionTensors
from .blocks import Block, Call, Part
from .products import has_fast_fused_attention, select_rows
from .tables import cast
from .terms import Terms

fused_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def forward(
    tensors: AttentionTensors, spec: AttentionSpec, saved_probs: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute out (B, Hq, Nq, Dv) in the inputs' dtype, and lse, see new_lse(). saved_probs: memory for the probabilities before
    dropout, for the backward."""
    out, lse = new_like(tensors.query, tensors.value.shape[-1]), new_lse(tensors, spec)
    call = Call(tensors, spec, rounds_terms=saved_probs is None)  # what is saved must fit the logits of the backward
    all_heads = slice(0, tensors.query.shape[1])
    for run in call.runs_without_keys:
        run.rows(out, all_heads, 0, run.num_queries).zero_()
        if lse is not None:
            run.rows(lse, all_heads, 0, run.num_queries).fill_(-math.inf)
    is_fused = saved_probs is None and can_fuse(call)
    for part in call.parts(is_fused):
        terms = Terms(part)
        for block in part.blocks():
            out_rows, lse_rows = block.view(out), None if lse is None else block.view(lse)
            if block.num_keys == 0:
                out_rows.zero_()
                if lse_rows is not None:
                    lse_rows.fill_(-math.inf)
            elif is_fused:
                fused_block(block, terms, out_rows, lse_rows)
            else:
                block_by_steps(block, terms, out_rows, lse_rows, saved_probs)
    return out, lse


def new_lse(tensors: AttentionTensors, spec: AttentionSpec) -> torch.Tensor | None:
    """Allocate lse, (B, Hq, Nq) in the compute dtype; None if it is not wanted."""
    query = tensors.query
    return query.new_empty(query.shape[:3], dtype=compute_dtype(query.dtype)) if spec.with_lse else None


def can_fuse(call: Call) -> bool:
    """Return whether torch's fused attention on a CPU computes a forward: without dropout, softcap and rel_value, in a dtype in
    which it is not slower than steps, with values as wide as keys, if -inf can be added to the logits of hidden pairs, and if the
    backward has no use for the probabilities."""
    tensors, spec = call.tensors, call.spec
    if not call.is_cpu or spec.softcap is not None or spec.dropout_p > 0 or tensors.rel_value is not None:
        return False
    is_rounded = call.product_dtype != call.dtype  # then a mask of numbers, which may be too large for it, is not
    if not is_rounded and keeps_probs(tensors, spec):  # with a gradient and without, results have the same bits
        return False
    has_numbers = tensors.attn_mask is not None and tensors.attn_mask.dtype != torch.bool
    if is_rounded and (call.product_dtype != torch.bfloat16 or not has_fast_fused_attention() or has_numbers):
        return False
    return tensors.key.shape[3] == tensors.value.shape[3] and call.can_add_hidden


def fused_block(block: Block, terms: Terms, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Compute a block's rows of out and lse by torch's fused attention."""
    call, part, query = block.call, block.part, cast(block.query, block.call.product_dtype)
    is_reversed = terms.is_by_position and terms.has_lines
    bias, query = (terms.reversed(block), query.flip(2)) if is_reversed else (terms.of(block), query)
    result, log_sums = fused_attention(
        query, block.seen(part.key), block.seen(part.value), 0.0, False, attn_mask=bias, scale=call.spec.scale
    )
    if bias is not None and block.may_hide_rows and (lse is not None or call.has_nan_queries):  # else out is 0 there
        hidden = bias.amax(-1) == -math.inf
        result, log_sums = result.masked_fill_(hidden[..., None], 0), log_sums.masked_fill_(hidden, -math.inf)
    out.copy_(result.flip(2) if is_reversed else result)
    if lse is not None:
        lse.copy_(log_sums.flip(2) if is_reversed else log_sums)


def block_by_steps(
    block: Block, terms: Terms, out: torch.Tensor, lse: torch.Tensor | None, saved_probs: torch.Tensor | None
) -> None:
    """Compute a block's rows of out and lse; saved_probs of forward()."""
    call, part = block.call, block.part
    saved = None if saved_probs is None else saved_part(block, saved_probs)
    memory = saved.view(block.matrix_shape) if saved is not None and is_view(saved, block) else None
    lse_rows = lse if lse is None or block.rows == block.num_rows else lse.new_empty(block.shape[:3])
    probs, _ = probabilities(block, terms, memory, lse_rows)
    if lse is not None and lse_rows is not None and lse_rows is not lse:
        lse.copy_(lse_rows[:, :, : block.num_rows])
    if saved is not None and memory is None:
        saved.copy_(probs.view(block.shape)[:, :, : block.num_rows, : block.num_keys])
    if (factors := dropout(block)) is not None:
        probs = torch.mul(probs, factors, out=None if saved_probs is not None else probs)
    # P V: [heads_per_key * M, N] @ [N, Dv]
    rows = new_rows(block, out, cast(probs, call.product_dtype), block.seen(part.value_operand))
    if "rel_value" in call.tables:
        rows = cast(rows, call.dtype)
        call.tables["rel_value"].add_products(part.products, probs.view(block.shape), None, rows, part.heads, block.base)
    write_rows(block, out, rows)


def probabilities(
    block: Block, terms: Terms, out: torch.Tensor | None = None, lse: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a block's probabilities, as matrices, in memory that is given or new, and the derivative of softcap or None."""
    call, part = block.call, block.part
    out = block.scores("scores") if out is None else out
    # scale * Q K^T: [heads_per_key * M, D] @ [D, N]
    scores = part.products.scaled(block.matrices(block.query), block.seen(part.key).mT, call.spec.scale, out)
    pairs = scores.view(block.shape)  # [S, H, M, N]
    terms.add_to(pairs, block)
    slope = None
    if (softcap := call.spec.softcap) is not None:
        limited = scores.div_(softcap).tanh_()
        slope = 1 - limited.square()
        limited.mul_(softcap)
    terms.hide(pairs, block)
    probs = softmax(scores, block.may_hide_rows, lse)
    if block.num_rows < block.rows:  # rows of no query, which may see nothing
        probs.view(block.shape)[:, :, block.num_rows :] = 0
    return probs, slope


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


def dropout(block: Block) -> torch.Tensor | None:
    """Return dropout's factors of the probabilities, as matrices; None without dropout."""
    call, run = block.call, block.part.run
    seed, origins, dropout_p = call.tensors.dropout_seed, call.tensors.dropout_origins, call.spec.dropout_p
    if seed is None:
        return None
    origin = [[number, 0, 0, 0] for number in range(run.number, run.number + run.count)]
    if origins is not None:  # as what dropout counts sequence, head, first query and first key
        origin = origins[run.number : run.number + run.count, 0].tolist()
    heads = torch.arange(block.part.heads.start, block.part.heads.stop, device=seed.device)[:, None, None]
    queries = torch.arange(block.row, block.row + block.rows, device=seed.device)[:, None]
    keeps = []
    for first_key in {first: None for *_, first in origin}:  # one, but in a part of a call
        counts = torch.tensor([counts[:3] for counts in origin if counts[3] == first_key], device=seed.device)
        sequence, head, query = counts[:, :, None, None, None].unbind(1)
        keys = slice(block.key + first_key, block.key + first_key + block.columns)
        keeps.append(keep_mask(seed, dropout_p, sequence, head + heads, query + queries, keys))
    return torch.cat(keeps).to(call.dtype).mul_(keep_scale(dropout_p)).reshape(block.matrix_shape)


# Memory for results of a block: a view of a tensor, or rows that are copied to it at last.


def new_rows(block: Block, view: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return scale times a product of matrices by row, [S, H, M, width], in the memory of the view if it can be."""
    is_direct = view.dtype == left.dtype and view.shape[2] == block.rows and (block.is_matrix or view.is_contiguous())
    shape = *left.shape[:-1], right.shape[-1]
    out = block.matrices(view) if is_direct else block.call.memory("rows", shape, left.dtype)
    result = block.part.products.scaled(left, right, scale, out)
    if not is_direct:
        return result.view(*block.shape[:3], shape[-1])
    if result is not out:
        out.copy_(result)
    return view


def write_rows(block: Block, view: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows to a view, if they are not its memory."""
    if view.data_ptr() != rows.data_ptr():
        view.copy_(rows[:, :, : block.num_rows])


def keeps_probs(tensors: AttentionTensors, spec: AttentionSpec) -> bool:
    """Return whether the forward should save the probabilities for the backward: whether they take no more memory than query,
    key, value and out would if all had as many rows and heads as the query."""
    query, value = tensors.query, tensors.value
    size = value.shape[2] * compute_dtype(query.dtype).itemsize
    input_bytes = 2 * (query.shape[3] + value.shape[3]) * query.dtype.itemsize
    is_uniform = tensors.cu_seqlens_q is None and tensors.key_lengths is None and tensors.query_offsets is None
    return size <= input_bytes and spec.softcap is None and is_uniform


def saved_part(block: Block, saved_probs: torch.Tensor) -> torch.Tensor:
    """Return the block's part of the probabilities that are saved, (B, Hq, Nq, Nk)."""
    return block.view(saved_probs)[..., block.key : block.key + block.num_keys]


def is_view(part: torch.Tensor, block: Block) -> bool:
    """Return whether a part of what is saved is memory for the scores of a block, without a copy."""
    return part.is_contiguous() and part.shape == block.shape


def read_probs(block: Block, saved_probs: torch.Tensor) -> torch.Tensor:
    """Return the block's part of the probabilities that are saved as matrices."""
    part = saved_part(block, saved_probs)
    if is_view(part, block):
        return part.view(block.matrix_shape)
    probs = block.scores("scores")
    pairs = probs.view(block.shape)
    if part.shape != pairs.shape:
        pairs.zero_()
    pairs[:, :, : block.num_rows, : block.num_keys] = part
    return probs


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
    given = zip(DIFFERENTIABLE, needs_grad, tensors, strict=False)
    inputs = {name: tensor for name, needed, tensor in given if needed and tensor is not None}
    call, gradients = Call(tensors, spec), {name: gradient_like(inputs[name]) for name in inputs if name not in TABLES}
    if not call.sees_all:
        for gradient in gradients.values():
            gradient.zero_()
    for part in call.parts():
        terms, collected = Terms(part), Gradients(part, inputs.keys(), gradients)
        for block in part.blocks():
            if block.num_keys > 0:
                probs, slope = probabilities(block, terms) if saved_probs is None else (read_probs(block, saved_probs), None)
                backward_block(block, collected, probs, slope, d_out, d_lse)
        collected.write()
    call.memory.clear()  # before more is allocated
    for name in inputs.keys() & set(TABLES):
        total, table = call.tables[name].gradient() if name in call.tables else None, inputs[name]
        total = table.new_zeros(table.shape) if total is None else total.to(table.dtype)
        gradients[name] = total.reshape(table.shape).contiguous()
    return tuple(gradients.get(name) for name in DIFFERENTIABLE)


class Gradients:
    """The gradients that are wanted of a part's blocks: of rows, which each block writes, and sums of columns."""

    def __init__(self, part: Part, needs_grad: Set[str], totals: dict[str, torch.Tensor]) -> None:
        self.part, self.needs_grad, self.totals = part, needs_grad, totals
        self.sums = {name: part.new_sums(totals[name], name) for name in totals if name in ("key", "value")}
        self.keys_by_head: torch.Tensor | None = None
        if "rel_p2c" in part.call.tables and "key" in needs_grad:
            self.keys_by_head = torch.zeros_like(part.keys_by_head)
        self.beta = 0  # 0 until a block has written the sums

    def sum_of(self, name: str, block: Block) -> torch.Tensor:
        """Return a block's columns of the sum of key or value, in which is something, or which the block writes."""
        if not self.beta and block.columns < self.part.num_columns:
            for columns in self.sums.values():
                columns.zero_()
            self.beta = 1
        return block.seen(self.sums[name])

    def write(self) -> None:
        """Write what is complete to the gradients of the call."""
        part = self.part
        if self.keys_by_head is not None:
            self.sums["key"] += self.keys_by_head.unflatten(1, (-1, part.call.group)).sum(2).view(self.sums["key"].shape)
        for name, columns in self.sums.items():
            part.write_sums(self.totals[name], columns)


def softmax_backward(probs: torch.Tensor, d_probs: torch.Tensor) -> torch.Tensor:
    """Compute probs * (d_probs - delta) in place of d_probs.

    delta_i = sum_j P[i, j] dP[i, j] is computed from the block itself. The usual shortcut, rowsum(out * d_out), uses an out that
    was rounded to the input dtype. With it, all dS of a row would share one small error, and the table's gradient, a sum over all
    rows, would add these errors up.
    """
    if probs.device.type == "cpu":  # elsewhere a row may be written before all of it is read
        return torch._softmax_backward_data(d_probs, probs, -1, probs.dtype, grad_input=d_probs)
    return d_probs.sub_((probs * d_probs).sum(-1, keepdim=True)).mul_(probs)


def backward_block(
    block: Block,
    gradients: Gradients,
    probs: torch.Tensor,
    slope: torch.Tensor | None,
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
) -> None:
    """Add a block's part to all gradients."""
    part, call, tables, needs_grad = block.part, block.call, block.call.tables, gradients.needs_grad
    products, dtype, scale = part.products, call.product_dtype, call.spec.scale
    factors = dropout(block)
    dropped = probs if factors is None else probs * factors
    d_out_rows = block.vectors(d_out)  # [S, H, M, Dv]
    d_rows = block.matrices(d_out_rows)
    if "value" in needs_grad:  # dV += P^T dO: [N, heads_per_key * M] @ [heads_per_key * M, Dv]
        products.add(gradients.sum_of("value", block), cast(dropped, dtype).mT, cast(d_rows, dtype), beta=gradients.beta)
    if "rel_value" in needs_grad:
        tables["rel_value"].add_products(products, dropped.view(block.shape), d_out_rows, None, part.heads, block.base)
    if not needs_grad <= {"value", "rel_value"}:
        # dP = dO V^T: [heads_per_key * M, Dv] @ [Dv, N]
        d_scores = products.scaled(d_rows, block.seen(part.value).mT, 1.0, block.scores("band"))  # which is needed no more
        pairs = d_scores.view(block.shape)  # [S, H, M, N]
        if "rel_value" in tables:
            tables["rel_value"].add_terms(products, pairs, d_out_rows, part.heads, block.base)
        if factors is not None:
            d_scores.mul_(factors)
        softmax_backward(probs, d_scores)  # dS = P (dP - delta)
        if d_lse is not None:
            d_scores.addcmul_(probs, block.matrices(block.vectors(d_lse[..., None])))
        if slope is not None:
            d_scores.mul_(slope)
        operand = cast(d_scores, dtype)
        if "key" in needs_grad:  # dK += scale dS^T Q: [N, heads_per_key * M] @ [heads_per_key * M, D]
            query = cast(block.matrices(block.query), dtype)
            products.add(gradients.sum_of("key", block), operand.mT, query, scale, gradients.beta)
        rows: dict[str, torch.Tensor] = {}
        views = {name: block.view(gradients.totals[name]) for name in ("query", "rel_query") if name in needs_grad}
        if "query" in needs_grad:  # dQ = scale dS K: [heads_per_key * M, N] @ [N, D]
            rows["query"] = cast(new_rows(block, views["query"], operand, block.seen(part.key_operand), scale), call.dtype)
        if "rel_query" in needs_grad:
            rows["rel_query"] = pairs.new_zeros(*block.shape[:3], views["rel_query"].shape[3])
        add_gradients(block, gradients, pairs, rows)
        for name, view in views.items():
            write_rows(block, view, rows[name])
    gradients.beta = 1


def add_gradients(block: Block, gradients: Gradients, pairs: torch.Tensor, rows: dict[str, torch.Tensor]) -> None:
    """Add what the gradients of the logits, [S, H, M, N], give to those of the tables, and of what the tables meet."""
    part, tables, needs_grad, rel_scale = block.part, block.call.tables, gradients.needs_grad, block.call.spec.rel_scale
    total = rows.get("query" if block.call.tensors.rel_query is None else "rel_query")
    if "rel_key" in tables and (total is not None or "rel_key" in needs_grad):
        for some in block.bands():
            vectors = select_rows(block.rel_query, some) if "rel_key" in needs_grad else None
            own, base = None if total is None else select_rows(total, some), block.base - some.start
            tables["rel_key"].add_products(part.products, select_rows(pairs, some), vectors, own, part.heads, base, rel_scale)
    if "rel_bias" in needs_grad:
        tables["rel_bias"].add_products(part.products, pairs, None, None, part.heads, block.base)
    if "rel_p2c" in tables and needs_grad & {"key", "rel_p2c"}:
        d_keys = None if gradients.keys_by_head is None else block.seen(gradients.keys_by_head)
        for columns, keys in block.panels():
            d_panel, vectors = None if d_keys is None else d_keys[:, :, columns], keys if "rel_p2c" in needs_grad else None
            base = -block.base - columns.start
            tables["rel_p2c"].add_products(part.products, pairs.mT[:, :, columns], vectors, d_panel, part.heads, base, rel_scale)
