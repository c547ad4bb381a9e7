"""Attention of short sequences on a CPU, with all scores at once: the formulas of attention.py without its blocks.

On few scores a step takes as long as torch takes to start it, and the cut of a call into blocks takes longer than all steps. So a
call of the common kinds that has few scores is one block of all heads and sequences, (B * Hk, sharing * Nq, Nk).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from .._core.dtypes import compute_dtype, gradient_like, new_like
from .._core.spec import TABLES, AttentionSpec, AttentionTensors
from . import cut
from .attention import in_order, new_lse, softmax, softmax_backward, wanted_by_name
from .bands import Setting, Table, as_rows, cast, up
from .masks import hide, limits
from .products import LINE, Memory, Products, product_dtype, transposed

ELSEWHERE = ("rel_value", "rel_p2c", "key_lengths", "query_offsets", "cu_seqlens_q", "dropout_seed")
"""Tensors of calls that are computed in blocks."""

FEWEST_ALIGNED = 1 << 16
"""Elements of a query from which bands have a multiple of LINE columns: with fewer, to pad the table costs more."""


def serves(tensors: AttentionTensors, spec: AttentionSpec) -> bool:
    """Return whether a call is computed here: it has few queries and scores, and a window hides no key from all of them."""
    query, num_keys, sizes = tensors.query, tensors.key.shape[2], cut.SIZES
    batch, heads, num_queries, _ = query.shape
    num_pairs = batch * heads * num_queries * num_keys
    most_rows = sizes.short_rows * (1 if tensors.rel_key is not None else 2)
    if num_queries > most_rows or not 0 < num_pairs <= sizes.elements or query.device.type != "cpu":
        return False
    if heads // tensors.key.shape[1] * num_queries * num_keys >= sizes.few_scores * 3 // 8:
        return False
    if spec.softcap is not None or any(getattr(tensors, name) is not None for name in ELSEWHERE):
        return False
    sees_first = spec.window_left < 0 or spec.query_offset <= spec.window_left
    sees_last = spec.window_right < 0 or spec.query_offset + num_queries + spec.window_right >= num_keys
    return sees_first and sees_last and product_dtype(query, num_pairs) == compute_dtype(query.dtype)


class Short:
    """The operands of a call as matrices, one for each head of the keys, and its tables."""

    def __init__(self, tensors: AttentionTensors, spec: AttentionSpec) -> None:
        query, key = tensors.query, tensors.key
        (batch, heads, num_queries, _), num_keys = query.shape, key.shape[2]
        self.tensors, self.spec, self.dtype = tensors, spec, compute_dtype(query.dtype)
        self.shape, self.num_matrices = (batch, heads, num_queries, num_keys), batch * key.shape[1]
        self.query, self.key, self.value = self.matrices(query), self.matrices(key), self.matrices(tensors.value)
        self.vectors = self.query.view(query.shape)
        if tensors.rel_query is not None:
            self.vectors = cast(tensors.rel_query, self.dtype)
        self.products, self.memory = Products(by_onednn=False), Memory(query)
        self.setting = Setting(slice(0, heads), self.products, self.memory, self.dtype, self.dtype)
        self.base = -spec.query_offset
        """The position of query 0 and key 0."""
        low, high = self.base - num_queries + 1, self.base + num_keys
        count = high - low if self.query.numel() < FEWEST_ALIGNED else up(high - low, LINE)
        positions = range(low, low + count)
        low = max(low, -spec.window_left) if spec.window_left >= 0 else low
        high = min(high, spec.window_right + 1) if spec.window_right >= 0 else high
        self.hides_row = tensors.attn_mask is not None or low > self.base + num_keys - num_queries or high <= self.base
        """Whether a mask may hide all keys from a query, or it stands so far beyond their ends that the window does."""
        self.tables: list[Table] = []
        for name in TABLES:
            if (table := getattr(tensors, name)) is not None:
                rows = as_rows(name, table, self.dtype)
                self.tables.append(Table(name, rows, spec.first, spec.clamp, positions, ((low, high),)))

    def matrices(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return (B, heads, N, width) as (B * Hk, sharing * N, width) in the dtype of scores."""
        return cast(tensor, self.dtype).reshape(self.num_matrices, -1, tensor.shape[3])

    def probs(self, place: torch.Tensor | None, lse: torch.Tensor | None = None) -> torch.Tensor:
        """Return the probabilities, in memory that is given or new; lse as of softmax()."""
        matrices = (*self.query.shape[:2], self.shape[3])
        scores = self.memory("scores", matrices, self.dtype) if place is None else place.view(matrices)
        key = transposed(self.key, self.query.shape[1])
        self.products.scaled(self.query, key, self.spec.scale, scores)
        pairs, given = scores.view(self.shape), self.tensors.attn_mask
        for table in self.tables:
            if table.is_bias:
                table.add_terms(self.setting, pairs, self.base)
            else:
                table.add_terms(self.setting, pairs, self.base, self.vectors, self.spec.rel_scale)
        if given is not None and given.dtype != torch.bool:
            pairs.add_(given)
        if (visible := self.visible()) is not None:
            hide(pairs, *limits(visible, self.dtype))
        # A bias of -inf may hide all keys, too.
        return softmax(scores, self.hides_row or not all(math.isfinite(each.table.sum()) for each in self.tables), lse)

    def visible(self) -> torch.Tensor | None:
        """Return the boolean mask of visible pairs, which broadcasts to them; None if all are."""
        given, spec = self.tensors.attn_mask, self.spec
        visible = given if given is not None and given.dtype == torch.bool else None
        if spec.window_left < 0 and spec.window_right < 0:
            return visible
        window = torch.ones(self.shape[2:], dtype=torch.bool, device=self.query.device)
        if spec.window_right >= 0:  # n - m <= right - base
            window.tril_(spec.window_right - self.base)
        if spec.window_left >= 0:
            window.triu_(-spec.window_left - self.base)
        return window if visible is None else visible & window

    def write(self, result: torch.Tensor, left: torch.Tensor, right: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
        """Write alpha times a product of matrices to (B, heads, N, width), and return it."""
        shape = (*left.shape[:2], right.shape[2])
        if result.is_contiguous() and result.dtype == left.dtype:
            self.products.scaled(left, right, alpha, result.view(shape))
            return result
        found = self.products.scaled(left, right, alpha, self.memory("rows", shape, left.dtype))
        return result.copy_(found.view(result.shape))


def forward(
    tensors: AttentionTensors, spec: AttentionSpec, kept: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out, lse, and the probabilities if they are kept, as attention.forward() does."""
    call, lse = Short(tensors, spec), new_lse(tensors, spec)
    probs = call.probs(kept, lse if spec.with_lse else None)
    return call.write(new_like(tensors.query, tensors.value.shape[3]), probs, call.value), lse


def backward(
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    tensors: AttentionTensors,
    spec: AttentionSpec,
    wanted: Iterable[bool],
    kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients, as attention.backward() does."""
    call, named = Short(tensors, spec), wanted_by_name(tensors, wanted)
    gradients: dict[str, torch.Tensor] = {}
    probs = call.probs(None) if kept is None else kept.view(*call.query.shape[:2], -1)
    rows = call.matrices(d_out)
    if "value" in named:  # dV = P^T dO
        gradients["value"] = call.write(gradient_like(tensors.value), probs.mT, rows)
    if named.keys() <= {"value"}:
        return in_order(gradients, named)
    d_scores = call.products(rows, transposed(call.value, rows.shape[1]), call.memory("d_scores", tuple(probs.shape), call.dtype))
    softmax_backward(probs, d_scores)  # dS = P (dP - delta)
    if d_lse is not None:
        d_scores.addcmul_(probs, call.matrices(d_lse[..., None]))
    if "key" in named:  # dK = scale dS^T Q
        gradients["key"] = call.write(gradient_like(tensors.key), d_scores.mT, call.query, spec.scale)
    totals: dict[str, torch.Tensor] = {}
    if "query" in named:  # dQ = scale dS K
        totals["query"] = call.write(call.query.new_empty(tensors.query.shape), d_scores, call.key, spec.scale)
    if "rel_query" in named:
        totals["rel_query"] = call.vectors.new_zeros(call.vectors.shape)
    total = totals.get("query" if tensors.rel_query is None else "rel_query")
    pairs = d_scores.view(call.shape)
    for table in call.tables:
        is_wanted = table.name in named
        if table.is_bias and is_wanted:
            table.add_products(call.setting, pairs, call.base, None, None)
        elif not table.is_bias and (is_wanted or total is not None):
            vectors = call.vectors if is_wanted else None
            table.add_products(call.setting, pairs, call.base, vectors, total, spec.rel_scale)
        if is_wanted and (found := table.gradient()) is not None:
            gradients[table.name] = found
    for name, total in totals.items():
        place = gradient_like(named[name])
        gradients[name] = total if place.stride() == total.stride() and place.dtype == total.dtype else place.copy_(total)
    return in_order(gradients, named)
