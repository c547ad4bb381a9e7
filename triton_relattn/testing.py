"""Helpers for tests of this operator and of code that uses it: inputs, a float64 backward by hand, and error budgets.

Tolerances are derived, not chosen. A result may be off by a small multiple of what plain torch is off in the same
precision; a table's gradient, a sum over all queries that hides systematic errors, is measured against the one rounding
that cannot be avoided. A check that could not fail (an all-zero golden result, a reference without error) fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from .positions import RelativePositions

SHARP_FACTOR = 8.0
"""Sharp attention: queries times this, which gives logits of about +-30."""
SHARP_SHIFT = 4.0
"""Sharp attention: what is added to value and d_out, so that rowsum(out * d_out) is large against what it cancels with."""


class Inputs(NamedTuple):
    """The tensors of one call and the gradients that reach its results."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rel_key: torch.Tensor | None
    d_out: torch.Tensor
    d_lse: torch.Tensor

    def to(self, dtype: torch.dtype, device: torch.device | str | None = None) -> Inputs:
        """The same numbers in dtype; d_lse in the dtype of lse, which is at least float32."""
        query, key, value, d_out = (t.to(device, dtype) for t in (self.query, self.key, self.value, self.d_out))
        rel_key = None if self.rel_key is None else self.rel_key.to(device, dtype)
        return Inputs(query, key, value, rel_key, d_out, self.d_lse.to(device, torch.promote_types(dtype, torch.float32)))


def make_inputs(
    batch: int,
    heads: int,
    num_queries: int,
    num_keys: int,
    width: int,
    value_width: int | None = None,
    *,
    num_rows: int | None,
    per_head: bool = False,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int,
    sharp: bool = False,
) -> Inputs:
    """Normally distributed inputs: drawn in float64 from ``seed`` alone, then rounded to ``dtype``.

    ``inputs.to(torch.float64)`` holds the rounded numbers, so that a golden result sees what the implementation saw.

    Args:
        num_rows: rows of the table, (num_rows, width) or with ``per_head`` (heads, num_rows, width); None for no table.
        sharp: attention that looks at few keys, where errors of the backward show: queries times ``SHARP_FACTOR``,
            value and d_out shifted by ``SHARP_SHIFT``.
    """
    generator = torch.Generator().manual_seed(seed)
    value_width = width if value_width is None else value_width

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query = normal(batch, heads, num_queries, width)
    key = normal(batch, heads, num_keys, width)
    value = normal(batch, heads, num_keys, value_width)
    d_out = normal(batch, heads, num_queries, value_width)
    d_lse = normal(batch, heads, num_queries)
    rel_key = None if num_rows is None else normal(*(heads,) * per_head, num_rows, width)
    if sharp:
        query, value, d_out = query * SHARP_FACTOR, value + SHARP_SHIFT, d_out + SHARP_SHIFT
    return Inputs(query, key, value, rel_key, d_out, d_lse).to(dtype, device)


def in_memory_order(tensor: torch.Tensor, *order: int, step: int = 1) -> torch.Tensor:
    """The same tensor in other memory: dimensions in the given order (outermost first), elements of the last one ``step``
    apart, every dimension padded in front with NaN, which no implementation may read."""
    padded = tensor.new_full([tensor.shape[dim] + 1 for dim in order] + [step], math.nan)
    view = padded[..., 0]
    for dim in range(tensor.dim()):
        view = view.narrow(dim, 1, view.shape[dim] - 1)
    return view.permute([order.index(dim) for dim in range(tensor.dim())]).copy_(tensor)


def with_different_strides(inputs: Inputs) -> Inputs:
    """The same numbers, every tensor with strides, a storage offset and padding of its own."""
    rel_key = inputs.rel_key
    if rel_key is not None:
        rel_key = in_memory_order(rel_key, *((1, 0) if rel_key.dim() == 2 else (2, 0, 1)))
    return Inputs(
        in_memory_order(inputs.query, 0, 2, 1, 3),
        in_memory_order(inputs.key, 0, 1, 3, 2),
        in_memory_order(inputs.value, 1, 0, 2, 3, step=2),
        rel_key,
        in_memory_order(inputs.d_out, 2, 1, 0, 3),
        in_memory_order(inputs.d_lse, 2, 0, 1),
    )


def forward_backward(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]], inputs: Inputs, **arguments: Any
) -> dict[str, torch.Tensor]:
    """out, lse, d_query, d_key, d_value and, with a table, d_rel_key of ``function(query, key, value, rel_key, **arguments)``.

    ``function`` returns out and lse, as ``fused_relative_attention`` does with ``return_lse=True``. Strides of the inputs
    are kept.
    """
    leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in inputs[:4]]
    out, lse = function(*leaves, **arguments)
    names = [name for name, leaf in zip(inputs._fields, leaves, strict=False) if leaf is not None]
    gradients = torch.autograd.grad((out, lse), [leaf for leaf in leaves if leaf is not None], (inputs.d_out, inputs.d_lse))
    results = {"out": out.detach(), "lse": lse.detach()}
    return results | {f"d_{name}": gradient for name, gradient in zip(names, gradients, strict=True)}


class DenseGradients(NamedTuple):
    """What :func:`dense_gradients` returns, all in float64. d_scores: gradient of q.k + q.E times scale, (B, H, Nq, Nk)."""

    out: torch.Tensor
    lse: torch.Tensor
    d_query: torch.Tensor
    d_key: torch.Tensor
    d_value: torch.Tensor
    d_rel_key: torch.Tensor | None
    d_scores: torch.Tensor


def _sum_by_row(d_scores: torch.Tensor, rel_key: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """(B, H, Nq, R): for each query, d_scores (B, H, Nq, Nk) summed over the keys of each table row."""
    zeros = d_scores.new_zeros(*d_scores.shape[:3], rel_key.shape[-2])
    return zeros.scatter_add_(-1, row.expand_as(d_scores), d_scores)


def _table_gradient(by_row: torch.Tensor, query: torch.Tensor, rel_key: torch.Tensor) -> torch.Tensor:
    """dE without its scale: by_row^T Q, summed over batch and queries and, for a shared table, heads."""
    return torch.einsum("bhir,bhid->hrd" if rel_key.dim() == 3 else "bhir,bhid->rd", by_row, query)


def _rows_of_pairs(
    query: torch.Tensor, num_keys: int, rel_key: torch.Tensor | None, positions: RelativePositions | None, query_offset: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(Nq, Nk) each: relative position, table row, and whether the relative term applies (never without a table)."""
    i = torch.arange(query.shape[2], device=query.device)[:, None]
    j = torch.arange(num_keys, device=query.device)[None, :]
    relative_position = j - i - query_offset
    if rel_key is None:
        return relative_position, torch.zeros_like(relative_position), torch.zeros_like(relative_position, dtype=torch.bool)
    positions = positions or RelativePositions.centred(rel_key.shape[-2])
    return relative_position, *positions.rows(relative_position)


def dense_gradients(
    inputs: Inputs,
    *,
    positions: RelativePositions | None = None,
    key_lengths: torch.Tensor | None = None,
    is_causal: bool = False,
    query_offset: int = 0,
    scale: float | None = None,
) -> DenseGradients:
    """Forward and backward written out by hand, dense and in float64; arguments as of ``fused_relative_attention``.

    .. code-block:: text

        P = exp(logits - lse)    dP = dO V^T    dS = P (dP - rowsum(P dP) + dlse)
        dQ = scale (dS K + sum_j dS[i,j] E[row])    dK = scale dS^T Q    dV = P^T dO    dE[row] = scale sum dS[i,j] q_i
    """
    query, key, value, rel_key, d_out, d_lse = inputs.to(torch.float64)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    relative_position, row, applies = _rows_of_pairs(query, key.shape[2], rel_key, positions, query_offset)

    scores = query @ key.mT
    if rel_key is not None:
        scores = scores + torch.where(applies, (query @ rel_key.mT).gather(-1, row.expand_as(scores)), 0)
    hidden = (relative_position > 0) & is_causal
    if key_lengths is not None:
        hidden = hidden | (torch.arange(key.shape[2], device=query.device) >= key_lengths.view(-1, 1, 1, 1))
    logits = (scale * scores).masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(logits, -1)
    probs = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0)[..., None])
    probs = probs / probs.sum(-1, keepdim=True).clamp_min(0.5)  # lse was rounded at its own magnitude

    d_probs = d_out @ value.mT
    d_scores = probs * (d_probs - (probs * d_probs).sum(-1, keepdim=True) + d_lse[..., None])
    d_query, d_rel_key = d_scores @ key, None
    if rel_key is not None:
        by_row = _sum_by_row(torch.where(applies, d_scores, 0), rel_key, row)
        d_query = d_query + by_row @ rel_key
        d_rel_key = scale * _table_gradient(by_row, query, rel_key)
    return DenseGradients(probs @ value, lse, scale * d_query, scale * d_scores.mT @ query, probs.mT @ d_out, d_rel_key, d_scores)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _finite_errors(name: str, actual: torch.Tensor, golden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """|actual - golden| and golden in float64, both zero where golden is -inf; there actual must be -inf, elsewhere finite."""
    _require(actual.shape == golden.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(golden.shape)}")
    actual, golden = actual.detach().double(), golden.detach().double()
    infinite = golden == -math.inf
    _require(bool((golden.isfinite() | infinite).all()), f"{name}: the golden result has NaN or +inf")
    wrong = torch.where(infinite, actual != golden, ~actual.isfinite())
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are not finite (or not -inf) where they should be, "
            f"first at {where}: got {actual[where].item()}, expected {golden[where].item()}"
        )
    return (actual - golden).masked_fill(infinite, 0).abs(), golden.masked_fill(infinite, 0)


def last_place(value: float, dtype: torch.dtype) -> float:
    """One unit in the last place of numbers as large as ``value`` in dtype."""
    info = torch.finfo(dtype)
    return info.eps * 2.0 ** math.floor(math.log2(max(abs(value), info.tiny)))


def _require_errors_below(name: str, actual: torch.Tensor, golden: torch.Tensor, budget: float, explanation: str) -> None:
    errors, _ = _finite_errors(name, actual, golden)
    if errors.numel() == 0 or float(errors.max()) <= budget:
        return
    where = tuple(int(index) for index in torch.unravel_index(errors.argmax(), errors.shape))
    raise AssertionError(
        f"{name}: error {errors.max().item():.3e} exceeds the budget {budget:.3e} ({explanation}); worst at {where}: got "
        f"{actual[where].item():.9g}, expected {golden[where].item():.9g}; "
        f"{int((errors > budget).sum())} of {errors.numel()} elements exceed it"
    )


def assert_within_budget(
    name: str,
    actual: torch.Tensor,
    golden: torch.Tensor,
    reference: torch.Tensor,
    *,
    factor: float,
    exact_reference: bool = False,
) -> None:
    """The error of ``actual`` is at most ``factor`` times that of plain torch, plus two units in the last place.

    Args:
        golden: the float64 result for the same (rounded) inputs. Where it is -inf, all three must be.
        reference: what the dense reference gives in the precision of ``actual``.
        factor: 2 for out and lse, 3 for gradients.
        exact_reference: the reference's error may be zero (float64, or few elements); the units in the last place, of the
            largest golden magnitude in actual's dtype, are then the whole budget.

    Raises:
        AssertionError: the error is larger, something is not finite, or the check would be vacuous.
    """
    reference_errors, finite_golden = _finite_errors(f"{name} (reference)", reference, golden)
    _require(golden.numel() > 0, f"{name}: nothing to compare, shape {tuple(golden.shape)}")
    largest, reference_error = float(finite_golden.abs().max()), float(reference_errors.max())
    _require(largest > 0, f"{name}: the golden result is all zero, the check would be vacuous")
    _require(exact_reference or reference_error > 0, f"{name}: the reference has no error, the check would be vacuous")
    rounding = 2 * last_place(largest, actual.dtype)
    explanation = f"{factor} * {reference_error:.3e} of the reference + {rounding:.3e} for two units in the last place"
    _require_errors_below(name, actual, golden, factor * reference_error + rounding, explanation)


def table_gradient_budget(inputs: Inputs, *, factor: float = 1.5, **arguments: Any) -> tuple[torch.Tensor, float]:
    """The golden table gradient and the largest error it may have.

    The budget is ``factor`` times what is lost if the float64 dS is rounded once to the inputs' dtype and summed exactly, plus
    the rounding of the result. A low-precision reference is no yardstick here: it is off by so much that an
    implementation whose dS carries the same error along a whole row (delta from a rounded out) would pass.

    Args:
        arguments: as of :func:`dense_gradients`.
    """
    dense = dense_gradients(inputs, **arguments)
    golden, rel_key, query = dense.d_rel_key, inputs.rel_key, inputs.query.double()
    if golden is None or rel_key is None:
        raise ValueError("the inputs have no table")
    _, row, applies = _rows_of_pairs(
        query, inputs.key.shape[2], rel_key, arguments.get("positions"), arguments.get("query_offset", 0)
    )
    scale = arguments.get("scale")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    rounded = torch.where(applies, dense.d_scores.to(inputs.query.dtype).double(), 0)
    summed = scale * _table_gradient(_sum_by_row(rounded, rel_key, row), query, rel_key)
    unavoidable = (summed - golden).abs().max() + (golden.to(inputs.query.dtype).double() - golden).abs().max()
    return golden, factor * float(unavoidable)


def assert_table_gradient(name: str, actual: torch.Tensor, inputs: Inputs, *, factor: float = 1.5, **arguments: Any) -> None:
    """``actual``, a gradient of ``inputs.rel_key``, is as good as dS rounded once to the inputs' dtype and summed exactly.

    Args:
        arguments: of the call that was differentiated, as of :func:`dense_gradients`.

    Raises:
        AssertionError: the error is larger, something is not finite, or the check would be vacuous.
    """
    golden, budget = table_gradient_budget(inputs, factor=factor, **arguments)
    _require(bool(golden.any()), f"{name}: the golden table gradient is all zero, the check would be vacuous")
    _require(budget > 0, f"{name}: rounding dS changes nothing, the check would be vacuous")
    explanation = f"{factor} times that of dS rounded once to {inputs.query.dtype} and summed exactly"
    _require_errors_below(name, actual, golden, budget, explanation)


def assert_gradients_close_fp32(
    name: str, actual: torch.Tensor, golden: torch.Tensor, all_golden: Iterable[torch.Tensor]
) -> None:
    """A float32 gradient is within 2e-4 of the golden one, in norm.

    Some gradients cancel to nothing, so the yardstick is the larger of golden's norm and 5 % of the largest RMS among all
    gradients of the call, spread over golden's elements.

    Raises:
        AssertionError: the error is larger, something is not finite, or all golden gradients are zero.
    """
    errors, golden = _finite_errors(name, actual, golden)
    largest_rms = max((float(other.double().square().mean().sqrt()) for other in all_golden if other.numel()), default=0.0)
    _require(largest_rms > 0, f"{name}: all golden gradients are zero, the check would be vacuous")
    error, norm = float(errors.norm()), float(golden.norm())
    budget = 2e-4 * max(norm, 0.05 * largest_rms * math.sqrt(golden.numel()))
    _require(
        error <= budget,
        f"{name}: norm of the error {error:.3e} exceeds the budget {budget:.3e} (2e-4 of the larger of the gradient's norm "
        f"{norm:.3e} and 5% of the largest gradient's RMS {largest_rms:.3e} times sqrt({golden.numel()})); largest element "
        f"error {float(errors.max()) if errors.numel() else 0.0:.3e}",
    )
