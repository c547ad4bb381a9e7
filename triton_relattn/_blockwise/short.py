"""Attention of short sequences on a CPU, with all scores of a sequence at once: the formulas of attention.py without its blocks.

On few scores a step takes as long as torch takes to start it, and the cut of a call into blocks takes longer than all steps. So
calls of the common kinds are computed some whole sequences at a time, in matrices (S * Hk, heads_per_key * Nq, Nk).
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from functools import cached_property

import torch

from .._core.dtypes import compute_dtype, gradient_like, new_like
from .._core.spec import TABLES, AttentionSpec, AttentionTensors
from . import cut
from .attention import in_order, inputs_that_need_grad, new_lse, softmax, softmax_backward
from .bands import Setting, Table, as_rows, cast, narrow, up
from .blocks import may_be_infinite
from .masks import hide, limits
from .products import LINE, Memory, Products, product_dtype, transposed

ELSEWHERE = ("rel_value", "rel_p2c", "key_lengths", "query_offsets", "cu_seqlens_q", "dropout_seed")
"""Tensors of calls that are computed in blocks."""

MIN_ALIGNED = 1 << 16
"""Elements of a query from which bands have a multiple of LINE columns: with fewer, to pad the table costs more."""


def serves(tensors: AttentionTensors, spec: AttentionSpec) -> bool:
    """Return whether a call is computed here: its sequences have few queries and scores, and a window hides no key from all."""
    query, num_keys, sizes = tensors.query, tensors.key.shape[2], cut.SIZES
    batch, heads, num_queries, _ = query.shape
    num_pairs = heads * num_queries * num_keys
    max_rows = sizes.short_rows * (1 if tensors.rel_key is not None else 2)
    if batch == 0 or num_queries > max_rows or not 0 < num_pairs <= sizes.elements or query.device.type != "cpu":
        return False
    if num_pairs // tensors.key.shape[1] >= sizes.few_for_onednn:
        return False
    if spec.softcap is not None or any(getattr(tensors, name) is not None for name in ELSEWHERE):
        return False
    sees_first = spec.window_left < 0 or spec.query_offset <= spec.window_left
    sees_last = spec.window_right < 0 or spec.query_offset + num_queries + spec.window_right >= num_keys
    return sees_first and sees_last and product_dtype(query, batch * num_pairs) == compute_dtype(query.dtype)


def select_rows(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return some rows of (S, H, M, ...)."""
    return narrow(tensor, 2, rows.start, rows.stop)


class Short:
    """What the sequences of a call share: their tables, positions and masks."""

    def __init__(self, tensors: AttentionTensors, spec: AttentionSpec) -> None:
        query, num_queries, num_keys = tensors.query, tensors.query.shape[2], tensors.key.shape[2]
        self.tensors, self.spec, self.dtype = tensors, spec, compute_dtype(query.dtype)
        self.products, self.memory = Products(by_onednn=False), Memory(query)
        self.setting = Setting(slice(0, query.shape[1]), self.products, self.memory, self.dtype, self.dtype)
        self.base = -spec.query_offset  # the position of query 0 and key 0
        is_large = query.numel() >= cut.SIZES.elements // 2
        self.rows = cut.evenly(num_queries, cut.SIZES.batch_rows if is_large else num_queries)
        """Queries whose band is computed at once: with more, bands have many columns that are not needed; in a small call each
        further step takes longer than these."""
        low, high = self.base - num_queries + 1, self.base + num_keys
        count = high - low if query.numel() < MIN_ALIGNED else up(high - low, LINE)
        positions = range(low, low + count)
        low = max(low, -spec.window_left) if spec.window_left >= 0 else low
        high = min(high, spec.window_right + 1) if spec.window_right >= 0 else high
        self.hides_rows = tensors.attn_mask is not None or low > self.base + num_keys - num_queries or high <= self.base
        """Whether a mask may hide all keys from a query, or it stands so far beyond their ends that the window does."""
        self.tables: list[Table] = []
        for name in TABLES:
            if (table := getattr(tensors, name)) is not None:
                rows = as_rows(name, table, self.dtype)
                self.tables.append(Table(name, rows, spec.first, spec.clamp, positions, ((low, high),)))

    @cached_property
    def may_hide_rows(self) -> bool:
        """Whether a query may see nothing, also by a bias of -inf."""
        return self.hides_rows or may_be_infinite(self.tensors)

    @cached_property
    def window(self) -> torch.Tensor | None:
        """The boolean mask of pairs that a window shows, (Nq, Nk); None without one."""
        spec, query = self.spec, self.tensors.query
        if spec.window_left < 0 and spec.window_right < 0:
            return None
        visible = torch.ones(query.shape[2], self.tensors.key.shape[2], dtype=torch.bool, device=query.device)
        if spec.window_right >= 0:  # n - m <= right - base
            visible.tril_(spec.window_right - self.base)
        if spec.window_left >= 0:
            visible.triu_(-spec.window_left - self.base)
        return visible

    def parts(self) -> list[Part]:
        """Return the sequences, as many at a time as a block has scores for."""
        batch, heads, num_queries, _ = self.tensors.query.shape
        elements = cut.SIZES.elements * cut.threads_for(self.tensors, cut.SIZES.elements)
        limit = max(elements // (heads * num_queries * self.tensors.key.shape[2]), 1)
        return [Part(self, sequences) for sequences in cut.evenly(batch, limit)]


class Part:
    """Some sequences of a call, their operands as matrices, one for each head of the keys."""

    def __init__(self, call: Short, sequences: slice) -> None:
        self.call, self.sequences = call, sequences
        query, key, value, rel_query, *_ = call.tensors
        self.num_matrices = (sequences.stop - sequences.start) * key.shape[1]
        self.shape = (sequences.stop - sequences.start, *query.shape[1:3], key.shape[2])
        self.query, self.key, self.value = self.matrices(query), self.matrices(key), self.matrices(value)
        self.vectors = self.query.view(*self.shape[:3], -1)
        if rel_query is not None:
            self.vectors = cast(self.select(rel_query), call.dtype)

    def select(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sequences' part of a tensor."""
        return narrow(tensor, 0, self.sequences.start, self.sequences.stop)

    def matrices(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return (B, heads, N, width) as (S * Hk, heads_per_key * N, width) in the dtype of scores."""
        return cast(self.select(tensor), self.call.dtype).reshape(self.num_matrices, -1, tensor.shape[3])

    def probs(self, out: torch.Tensor | None, lse: torch.Tensor | None = None) -> torch.Tensor:
        """Return the probabilities, in memory that is given or new; lse as of softmax()."""
        call, matrices = self.call, (*self.query.shape[:2], self.shape[3])
        scores = call.memory("scores", matrices, call.dtype) if out is None else out.view(matrices)
        call.products.scaled(self.query, transposed(self.key, self.query.shape[1]), call.spec.scale, scores)
        pairs = scores.view(self.shape)  # [S, H, Nq, Nk]
        for table in call.tables:
            if table.is_bias:
                table.add_terms(call.setting, pairs, call.base)
            else:
                for rows in call.rows:
                    base, vectors = call.base - rows.start, select_rows(self.vectors, rows)
                    table.add_terms(call.setting, select_rows(pairs, rows), base, vectors, call.spec.rel_scale)
        self.mask(pairs)
        return softmax(scores, call.may_hide_rows, lse)

    def mask(self, pairs: torch.Tensor) -> None:
        """Add a float mask, and set the logits of hidden pairs to -inf."""
        attn_mask, visible = self.call.tensors.attn_mask, self.call.window
        if attn_mask is not None:
            attn_mask = self.select(attn_mask) if attn_mask.shape[0] > 1 else attn_mask
            if attn_mask.dtype == torch.bool:
                visible = attn_mask if visible is None else attn_mask & visible
            else:
                pairs.add_(attn_mask)
        if visible is not None:
            hide(pairs, *limits(visible, pairs.dtype))

    def write(self, tensor: torch.Tensor, left: torch.Tensor, right: torch.Tensor, alpha: float = 1.0) -> None:
        """Write alpha times a product of matrices to the sequences of (B, heads, N, width)."""
        part, shape, call = self.select(tensor), (*left.shape[:2], right.shape[2]), self.call
        if part.is_contiguous() and part.dtype == left.dtype:
            call.products.scaled(left, right, alpha, part.view(shape))
        else:
            result = call.products.scaled(left, right, alpha, call.memory("rows", shape, left.dtype))
            part.copy_(result.view(part.shape))


def forward(
    tensors: AttentionTensors, spec: AttentionSpec, saved_probs: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out, lse, and the probabilities if they are saved, as attention.forward() does."""
    out, lse = new_like(tensors.query, tensors.value.shape[3]), new_lse(tensors, spec)
    for part in Short(tensors, spec).parts():
        saved = None if saved_probs is None else part.select(saved_probs)
        probs = part.probs(saved, part.select(lse) if spec.with_lse else None)
        part.write(out, probs, part.value)
    return out, lse


def backward(
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    tensors: AttentionTensors,
    spec: AttentionSpec,
    needs_grad: Iterable[bool],
    saved_probs: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients, as attention.backward() does."""
    call, inputs = Short(tensors, spec), inputs_that_need_grad(tensors, needs_grad)
    gradients = {name: gradient_like(tensor) for name, tensor in inputs.items() if name not in TABLES}
    for part in call.parts():
        probs = part.probs(None) if saved_probs is None else part.select(saved_probs).view(*part.query.shape[:2], -1)
        rows = part.matrices(d_out)
        if "value" in inputs:  # dV = P^T dO
            part.write(gradients["value"], probs.mT, rows)
        if inputs.keys() <= {"value"}:
            continue
        out = call.memory("d_scores", tuple(probs.shape), call.dtype)
        d_scores = call.products(rows, transposed(part.value, rows.shape[1]), out)  # dP = dO V^T
        softmax_backward(probs, d_scores)  # dS = P (dP - delta)
        if d_lse is not None:
            d_scores.addcmul_(probs, part.matrices(d_lse[..., None]))
        add_gradients(part, gradients, inputs.keys(), d_scores)
    for table in call.tables:
        if table.name in inputs and (gradient := table.gradient()) is not None:
            gradients[table.name] = gradient
    return in_order(gradients, inputs)


def add_gradients(part: Part, gradients: dict[str, torch.Tensor], needs_grad: Set[str], d_scores: torch.Tensor) -> None:
    """Compute the gradients of what makes the logits of a part, and add those of tables."""
    call, spec = part.call, part.call.spec
    if "key" in needs_grad:  # dK = scale dS^T Q
        part.write(gradients["key"], d_scores.mT, part.query, spec.scale)
    totals: dict[str, torch.Tensor] = {}
    for name in needs_grad & {"query", "rel_query"}:
        gradient = part.select(gradients[name])
        is_view = gradient.is_contiguous() and gradient.dtype == call.dtype
        totals[name] = gradient if is_view else gradient.new_empty(gradient.shape, dtype=call.dtype)
    if "query" in totals:  # dQ = scale dS K
        call.products.scaled(d_scores, part.key, spec.scale, totals["query"].view(part.query.shape))
    if "rel_query" in totals:
        totals["rel_query"].zero_()
    total = totals.get("query" if call.tensors.rel_query is None else "rel_query")
    pairs = d_scores.view(part.shape)
    for table in call.tables:
        needed = table.name in needs_grad
        if table.is_bias and needed:
            table.add_products(call.setting, pairs, call.base, None, None)
        elif not table.is_bias and (needed or total is not None):
            for rows in call.rows:
                vectors = select_rows(part.vectors, rows) if needed else None
                own = None if total is None else select_rows(total, rows)
                table.add_products(call.setting, select_rows(pairs, rows), call.base - rows.start, vectors, own, spec.rel_scale)
    for name, total in totals.items():
        gradient = part.select(gradients[name])
        if gradient.data_ptr() != total.data_ptr():
            gradient.copy_(total)
