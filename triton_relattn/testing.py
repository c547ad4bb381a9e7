"""Helpers for tests of this operator and of code that uses it: inputs, a float64 backward by hand, and error budgets.

Tolerances are derived, not chosen. The error of a result may be a small multiple of the error that plain torch makes in the same
precision. A table's gradient is a sum over all queries, in which systematic errors add up, so its error is compared with that of
the one rounding that cannot be avoided. A check that could not fail (golden result all zero, reference without error) fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ._core.arguments import Arguments
from ._core.dropout import draw_seed, keep_mask, keep_scale
from ._core.spec import DIFFERENTIABLE, TABLES, AttentionSpec, AttentionTensors
from ._core.validation import resolve
from .positions import RelativePositions

SHARP_FACTOR = 8.0
"""Factor of the queries for sharp attention, which gives logits of about +-30."""
SHARP_SHIFT = 4.0
"""Number added to value and d_out for sharp attention: rowsum(out * d_out) is then large against its difference from dP."""


class Inputs(NamedTuple):
    """The tensors of one call and the gradients that reach its results."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rel_key: torch.Tensor | None
    d_out: torch.Tensor
    d_lse: torch.Tensor
    rel_query: torch.Tensor | None = None
    rel_value: torch.Tensor | None = None
    rel_bias: torch.Tensor | None = None
    rel_p2c: torch.Tensor | None = None

    def terms(self) -> dict[str, Any]:
        """Return those of rel_query, rel_value, rel_bias and rel_p2c that are not None, which a call takes by keyword."""
        return {name: tensor for name, tensor in list(self._asdict().items())[6:] if tensor is not None}

    def to(self, dtype: torch.dtype, device: torch.device | str | None = None) -> Inputs:
        """Convert all tensors to dtype; d_lse to the dtype of lse, which is at least float32."""
        moved = (None if tensor is None else tensor.to(device, dtype) for tensor in self)
        d_lse = self.d_lse.to(device, torch.promote_types(dtype, torch.float32))
        return Inputs(*moved)._replace(d_lse=d_lse)  # type: ignore[arg-type]


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
    key_heads: int | None = None,
    rel_width: int | None = None,
    rel_key: bool = True,
    rel_value: bool = False,
    rel_bias: bool = False,
    rel_p2c: bool = False,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int,
    sharp: bool = False,
) -> Inputs:
    """Draw normally distributed inputs in float64, from ``seed`` alone, and round them to ``dtype``.

    ``inputs.to(torch.float64)`` holds the rounded numbers, so that a golden result sees what the implementation saw.

    Args:
        num_rows: rows of all tables, which are (num_rows, width) or with ``per_head`` (heads, num_rows, width), rel_bias
            without the width; None for no table.
        key_heads: heads of key and value, which are shared (``enable_gqa=True``) if they are fewer than ``heads``.
        rel_width: width of rel_query and of rel_key; None for no rel_query.
        rel_key, rel_value, rel_bias, rel_p2c: whether to make each table.
        sharp: make attention look at few keys, where errors of the backward show: query and rel_query times
            ``SHARP_FACTOR``, value and d_out shifted by ``SHARP_SHIFT``.
    """
    if rel_width is not None and (num_rows is None or not rel_key):
        raise ValueError(f"a rel_query (rel_width={rel_width}) needs a rel_key")
    generator = torch.Generator().manual_seed(seed)
    value_width = width if value_width is None else value_width
    key_heads = heads if key_heads is None else key_heads

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def table(wanted: bool, *tail: int) -> torch.Tensor | None:
        return normal(*(heads,) * per_head, num_rows, *tail) if wanted and num_rows is not None else None

    # Optional tensors are drawn last, so that calls without them keep their numbers.
    query = normal(batch, heads, num_queries, width)
    key = normal(batch, key_heads, num_keys, width)
    value = normal(batch, key_heads, num_keys, value_width)
    d_out = normal(batch, heads, num_queries, value_width)
    d_lse = normal(batch, heads, num_queries)
    key_table = table(rel_key, width if rel_width is None else rel_width)
    rel_query = None if rel_width is None else normal(batch, heads, num_queries, rel_width)
    value_table, bias, p2c_table = table(rel_value, value_width), table(rel_bias), table(rel_p2c, width)
    if sharp:
        query, value, d_out = query * SHARP_FACTOR, value + SHARP_SHIFT, d_out + SHARP_SHIFT
        rel_query = None if rel_query is None else rel_query * SHARP_FACTOR
    return Inputs(query, key, value, key_table, d_out, d_lse, rel_query, value_table, bias, p2c_table).to(dtype, device)


def in_memory_order(tensor: torch.Tensor, *order: int, step: int = 1) -> torch.Tensor:
    """Copy a tensor to other memory: dimensions in the given order (outermost first), elements of the last one ``step`` apart,
    every dimension padded in front with NaN, which no implementation may read."""
    padded = tensor.new_full([tensor.shape[dim] + 1 for dim in order] + [step], math.nan)
    view = padded[..., 0]
    for dim in range(tensor.dim()):
        view = view.narrow(dim, 1, view.shape[dim] - 1)
    return view.permute([order.index(dim) for dim in range(tensor.dim())]).copy_(tensor)


def with_different_strides(inputs: Inputs) -> Inputs:
    """Copy inputs so that every tensor has strides, a storage offset and padding of its own."""

    def reordered(tensor: torch.Tensor | None, *orders: tuple[int, ...], step: int = 3) -> torch.Tensor | None:
        return None if tensor is None else in_memory_order(tensor, *next(o for o in orders if len(o) == tensor.dim()), step=step)

    return Inputs(
        in_memory_order(inputs.query, 0, 2, 1, 3),
        in_memory_order(inputs.key, 0, 1, 3, 2),
        in_memory_order(inputs.value, 1, 0, 2, 3, step=2),
        reordered(inputs.rel_key, (1, 0), (2, 0, 1), step=1),
        in_memory_order(inputs.d_out, 2, 1, 0, 3),
        in_memory_order(inputs.d_lse, 2, 0, 1),
        reordered(inputs.rel_query, (1, 2, 0, 3), step=1),
        reordered(inputs.rel_value, (0, 1), (1, 0, 2)),
        reordered(inputs.rel_bias, (0,), (1, 0)),
        reordered(inputs.rel_p2c, (1, 0), (1, 2, 0)),
    )


def forward_backward(
    function: Callable[..., tuple[torch.Tensor, torch.Tensor]], inputs: Inputs, **arguments: Any
) -> dict[str, torch.Tensor]:
    """Return out, lse, d_query, d_key, d_value and the gradients of further tensors (d_rel_key, d_rel_query, ...), by name.

    The call is ``function(query, key, value, rel_key, **inputs.terms(), **arguments)``. It must return out and lse, as
    ``fused_relative_attention`` does with ``return_lse=True``. Strides of the inputs are kept.
    """
    tensors = {name: getattr(inputs, name) for name in DIFFERENTIABLE}
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items() if tensor is not None}
    terms = {name: leaves[name] for name in inputs.terms()}
    out, lse = function(*(leaves.get(name) for name in Inputs._fields[:4]), **terms, **arguments)
    gradients = torch.autograd.grad((out, lse), list(leaves.values()), (inputs.d_out, inputs.d_lse))
    results = {"out": out.detach(), "lse": lse.detach()}
    return results | {f"d_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}


def dropout_mask(
    batch: int, heads: int, num_queries: int, num_keys: int, dropout_p: float, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return the mask of what dropout keeps, bool, (batch, heads, num_queries, num_keys).

    It draws from torch's generator as a call of the operator does: after the same ``torch.manual_seed`` both drop the same.

    Raises:
        ValueError: dropout_p outside [0, 1].
    """
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p must lie in [0, 1], got {dropout_p}")
    if dropout_p == 0:
        return torch.ones(batch, heads, num_queries, num_keys, dtype=torch.bool, device=device)
    sequence, head, query = (torch.arange(size, device=device) for size in (batch, heads, num_queries))
    indices = sequence.view(-1, 1, 1, 1), head.view(-1, 1, 1), query.view(-1, 1)
    return keep_mask(draw_seed(device), dropout_p, *indices, slice(0, num_keys))


class DenseGradients(NamedTuple):
    """Results of :func:`dense_gradients`, all in float64; None for the gradient of a tensor that is not there."""

    out: torch.Tensor
    lse: torch.Tensor
    d_query: torch.Tensor
    d_key: torch.Tensor
    d_value: torch.Tensor
    d_rel_key: torch.Tensor | None
    d_scores: torch.Tensor
    """Gradient of the logits before softcap, (B, Hq, Nq, Nk). Times scale it is that of q.k, times rel_scale of p.E and k.F."""
    d_rel_query: torch.Tensor | None
    d_rel_value: torch.Tensor | None
    d_rel_bias: torch.Tensor | None
    d_rel_p2c: torch.Tensor | None
    probs: torch.Tensor
    """Probabilities after dropout, (B, Hq, Nq, Nk)."""


def _resolved(inputs: Inputs, arguments: dict[str, Any]) -> tuple[AttentionTensors, AttentionSpec]:
    """Return the call as implementations get it. Key and value are shared if they have fewer heads than query."""
    given: dict[str, Any] = {name: getattr(inputs, name) for name in DIFFERENTIABLE}
    return resolve(Arguments(**given, **arguments)._replace(enable_gqa=True))


def _rows_of_pairs(tensors: AttentionTensors, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return relative position, table row, and whether relative terms apply, each (Nq, Nk) or (B, 1, Nq, Nk)."""
    device, offsets = tensors.query.device, tensors.query_offsets
    i = torch.arange(tensors.query.shape[2], device=device)[:, None]
    j = torch.arange(tensors.key.shape[2], device=device)
    relative_position = j - i - (spec.query_offset if offsets is None else offsets.view(-1, 1, 1, 1))
    if not tensors.has_table:
        return relative_position, torch.zeros_like(relative_position), torch.zeros_like(relative_position, dtype=torch.bool)
    positions = RelativePositions(spec.first, spec.last, "clamp" if spec.clamp else "zero")
    return relative_position, *positions.rows(relative_position)


def _by_pair(by_row: torch.Tensor, row: torch.Tensor, applies: torch.Tensor) -> torch.Tensor:
    """Gather numbers by query and table row, (B, H, Nq, R), for each pair, (B, H, Nq, Nk): 0 where the terms do not apply."""
    return torch.where(applies, by_row.gather(-1, row.expand(*by_row.shape[:3], -1)), 0)


def _by_row(by_pair: torch.Tensor, row: torch.Tensor, applies: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Sum by_pair (B, H, Nq, Nk) for each query over the keys of each table row: the transpose of _by_pair."""
    zeros = by_pair.new_zeros(*by_pair.shape[:3], num_rows)
    return zeros.scatter_add_(-1, row.expand_as(by_pair), torch.where(applies, by_pair, 0))


def _table_gradient(by_row: torch.Tensor, factor: torch.Tensor, per_head: bool) -> torch.Tensor:
    """Sum by_row^T factor over batch and queries and, for a shared table, heads; factor is (B, H, Nq, width)."""
    return torch.einsum("bhir,bhid->hrd" if per_head else "bhir,bhid->rd", by_row, factor)


def dense_gradients(
    inputs: Inputs,
    *,
    keep: torch.Tensor | None = None,
    **arguments: Any,
) -> DenseGradients:
    """Compute forward and backward by hand, dense and in float64; arguments as of ``fused_relative_attention``.

    .. code-block:: text

        Z = scale Q K^T + rel_scale (p E[row]^T + K F[row]^T) + b[row]
        Z' = c tanh(Z / c)    P = exp(Z' + mask - lse)    Pd = P keep / (1 - p)
        dPd = dO (V + A[row])^T    dP = dPd keep / (1 - p)    dS = P (dP - rowsum(P dP) + dlse) (1 - (Z' / c)^2)
        dQ = scale dS K    dK = scale dS^T Q    dV = Pd^T dO    dp_i = rel_scale sum_j dS[i,j] E[row]    (dQ += dp if p is Q)
        dE[row] = rel_scale sum dS[i,j] p_i    dA[row] = sum Pd[i,j] dO_i    db[row] = sum dS[i,j]
        dF[row] = rel_scale sum dS[i,j] k_j    dK_j += rel_scale sum_i dS[i,j] F[row]

    Args:
        keep: the mask of what dropout keeps, see :func:`dropout_mask`; needed if dropout_p is not 0.
        arguments: as of the function. enable_gqa changes nothing: key and value are shared if they have fewer heads.
    """
    tensors, spec = _resolved(inputs, arguments)
    if spec.dropout_p > 0 and keep is None:
        raise ValueError(f"dropout_p = {spec.dropout_p} needs keep, the mask of what is not dropped")
    query, key, value, rel_key, d_out, d_lse, rel_query, rel_value, rel_bias, rel_p2c = inputs.to(torch.float64)
    scale, rel_scale, softcap = spec.scale, spec.rel_scale, spec.softcap
    p = query if rel_query is None else rel_query
    group = query.shape[1] // key.shape[1] if key.shape[1] else 1
    keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    relative_position, row, applies = _rows_of_pairs(tensors, spec)

    scores = scale * (query @ keys.mT)
    if rel_key is not None:
        scores = scores + rel_scale * _by_pair(p @ rel_key.mT, row, applies)
    if rel_bias is not None:
        scores = scores + _by_pair(rel_bias[..., None, :].expand(*query.shape[:3], -1), row, applies)
    if rel_p2c is not None:
        scores = scores + rel_scale * _by_pair(keys @ rel_p2c.mT, row.mT, applies.mT).mT
    slope: torch.Tensor | float = 1.0
    if softcap is not None:
        limited = torch.tanh(scores / softcap)
        scores, slope = softcap * limited, 1 - limited.square()
    left, right, attn_mask = spec.window_left, spec.window_right, tensors.attn_mask
    hidden = ((relative_position < -left) & (left >= 0)) | ((relative_position > right) & (right >= 0))
    if tensors.key_lengths is not None:
        hidden = hidden | (torch.arange(key.shape[2], device=query.device) >= tensors.key_lengths.view(-1, 1, 1, 1))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = hidden | ~attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask.double()
    logits = scores.masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(logits, -1)
    probs = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0)[..., None])
    probs = probs / probs.sum(-1, keepdim=True).clamp_min(0.5)  # lse was rounded at its own magnitude
    kept = 1.0 if keep is None else keep.double() * keep_scale(spec.dropout_p)
    dropped_probs = probs * kept
    out, d_probs = dropped_probs @ values, d_out @ values.mT
    d_rel_query = d_rel_key = d_rel_value = d_rel_bias = d_rel_p2c = None
    if rel_value is not None:
        probs_by_row = _by_row(dropped_probs, row, applies, rel_value.shape[-2])
        out = out + probs_by_row @ rel_value
        d_probs = d_probs + _by_pair(d_out @ rel_value.mT, row, applies)
        d_rel_value = _table_gradient(probs_by_row, d_out, rel_value.dim() == 3)

    d_probs = d_probs * kept
    d_scores = probs * (d_probs - (probs * d_probs).sum(-1, keepdim=True) + d_lse[..., None]) * slope
    d_query, d_keys = scale * d_scores @ keys, scale * d_scores.mT @ query
    if rel_key is not None:
        by_row = _by_row(d_scores, row, applies, rel_key.shape[-2])
        d_p = rel_scale * by_row @ rel_key
        d_query, d_rel_query = (d_query + d_p, None) if rel_query is None else (d_query, d_p)
        d_rel_key = rel_scale * _table_gradient(by_row, p, rel_key.dim() == 3)
    if rel_bias is not None:
        d_rel_bias = _by_row(d_scores, row, applies, rel_bias.shape[-1]).sum((0, 2) if rel_bias.dim() == 2 else (0, 1, 2))
    if rel_p2c is not None:
        by_row = _by_row(d_scores.mT, row.mT, applies.mT, rel_p2c.shape[-2])
        d_keys = d_keys + rel_scale * by_row @ rel_p2c
        d_rel_p2c = rel_scale * _table_gradient(by_row, keys, rel_p2c.dim() == 3)
    d_key, d_value = (
        each.unflatten(1, (-1, group)).sum(2) if each.numel() else torch.zeros_like(tensor)
        for each, tensor in ((d_keys, key), (dropped_probs.mT @ d_out, value))
    )
    return DenseGradients(
        out, lse, d_query, d_key, d_value, d_rel_key, d_scores, d_rel_query, d_rel_value, d_rel_bias, d_rel_p2c, dropped_probs
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _finite_errors(name: str, actual: torch.Tensor, golden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return |actual - golden| and golden in float64, both zero where golden is -inf: actual must be -inf there, else finite."""
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
    """Return one unit in the last place of numbers as large as ``value`` in dtype."""
    info = torch.finfo(dtype)
    return info.eps * 2.0 ** math.floor(math.log2(max(abs(value), info.tiny)))


def _require_errors_below(name: str, actual: torch.Tensor, golden: torch.Tensor, budget: float, explanation: str) -> None:
    errors, _ = _finite_errors(name, actual, golden)
    if not bool((errors <= budget).all()):
        where = tuple(int(index) for index in torch.unravel_index(errors.argmax(), errors.shape))
        raise AssertionError(
            f"{name}: error {errors.max().item():.3e} exceeds the budget {budget:.3e} ({explanation}); worst at {where}: got "
            f"{actual[where].item():.9g}, expected {golden[where].item():.9g}; "
            f"{int((errors > budget).sum())} of {errors.numel()} elements exceed it"
        )


def error_budget(golden: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype, *, factor: float) -> float:
    """Return the error that a result in dtype may have: ``factor`` times that of plain torch, plus two units in the last place.

    Args:
        golden: the float64 result. Where it is -inf, the reference must be, too.
        reference: the result of the dense reference in dtype.
    """
    errors, finite_golden = _finite_errors("reference", reference, golden)
    return factor * float(errors.max()) + 2 * last_place(float(finite_golden.abs().max()), dtype)


def assert_within_budget(
    name: str,
    actual: torch.Tensor,
    golden: torch.Tensor,
    reference: torch.Tensor,
    *,
    factor: float,
    exact_reference: bool = False,
) -> None:
    """Assert that the error of ``actual`` is at most ``factor`` times that of plain torch, plus two units in the last place.

    Args:
        golden: the float64 result for the same (rounded) inputs. Where it is -inf, all three must be.
        reference: the result of the dense reference in the precision of ``actual``.
        factor: 2 for out and lse, 3 for gradients.
        exact_reference: allow the reference's error to be zero (float64, or few elements). The whole budget is then the units
            in the last place of the largest golden magnitude, in actual's dtype.

    Raises:
        AssertionError: the error is larger, something is not finite, or the check would be vacuous.
    """
    reference_errors, finite_golden = _finite_errors(f"{name} (reference)", reference, golden)
    _require(golden.numel() > 0, f"{name}: nothing to compare, shape {tuple(golden.shape)}")
    largest, reference_error = float(finite_golden.abs().max()), float(reference_errors.max())
    _require(largest > 0, f"{name}: the golden result is all zero, the check would be vacuous")
    _require(exact_reference or reference_error > 0, f"{name}: the reference has no error, the check would be vacuous")
    budget = error_budget(golden, reference, actual.dtype, factor=factor)
    rounding = budget - factor * reference_error
    explanation = f"{factor} * {reference_error:.3e} of the reference + {rounding:.3e} for two units in the last place"
    _require_errors_below(name, actual, golden, budget, explanation)


def table_gradient_budget(
    inputs: Inputs, *, table: str = "rel_key", factor: float = 1.5, **arguments: Any
) -> tuple[torch.Tensor, float]:
    """Return the golden gradient of a table and the largest error it may have.

    The budget is ``factor`` times an error that cannot be avoided: the float64 dS (for rel_value: P after dropout) is rounded
    once to the inputs' dtype and summed exactly, and the result is rounded to the table's dtype. Which way numbers are rounded is
    a matter of luck, so this error is at least what the largest of so many sums exceeds once in a thousand tables. A
    low-precision reference is no yardstick: it is so far off that an implementation with the delta of a rounded out would pass.

    Args:
        table: "rel_key", "rel_value", "rel_bias" or "rel_p2c".
        arguments: as of :func:`dense_gradients`.
    """
    given: torch.Tensor | None = {name: getattr(inputs, name) for name in TABLES}[table]
    if given is None:
        raise ValueError(f"the inputs have no table {table}")
    dense = dense_gradients(inputs, **arguments)
    golden: torch.Tensor = dense._asdict()[f"d_{table}"]
    tensors, spec = _resolved(inputs, {name: value for name, value in arguments.items() if name != "keep"})
    _, row, applies = _rows_of_pairs(tensors, spec)
    exact, dtype = dense.probs if table == "rel_value" else dense.d_scores, inputs.query.dtype
    keys = inputs.key.repeat_interleave(inputs.query.shape[1] // max(inputs.key.shape[1], 1), 1)
    vectors = {"rel_value": inputs.d_out, "rel_key": inputs.rel_query, "rel_p2c": keys, "rel_bias": None}[table]
    vectors = (inputs.query if vectors is None else vectors).double()
    scale = 1.0 if table in ("rel_value", "rel_bias") else spec.rel_scale

    def sums(by_pair: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        where = (by_pair.mT, row.mT, applies.mT) if table == "rel_p2c" else (by_pair, row, applies)
        by_row = _by_row(*where, given.shape[-1 - (table != "rel_bias")])
        if table == "rel_bias":
            return by_row.sum((0, 2) if given.dim() == 2 else (0, 1, 2))
        return _table_gradient(by_row, factors, given.dim() == 3)

    error = float((scale * sums(exact.to(dtype).double() - exact, vectors)).abs().max())
    # Rounding errors are spread evenly over a unit in the last place, so their variance is its square / 12; sums of many are
    # normally distributed, and sqrt(2 log n) deviations are exceeded once in n draws. None exceeds half a unit of every term.
    info = torch.finfo(dtype)
    units = info.eps * exact.abs().clamp_min(info.tiny).log2().floor().exp2() * (exact != 0)
    deviation = float(sums(units.square() / 12, vectors.square()).max().sqrt())
    luck = min(deviation * math.sqrt(2 * math.log(1000 * max(golden.numel(), 1))), float(sums(units / 2, vectors.abs()).max()))
    unavoidable = max(error, abs(scale) * luck) + last_place(float(golden.abs().max()), given.dtype) / 2
    return golden, factor * unavoidable


def assert_table_gradient(
    name: str, actual: torch.Tensor, inputs: Inputs, *, table: str = "rel_key", factor: float = 1.5, **arguments: Any
) -> None:
    """Assert that a table's gradient, ``actual``, is as good as dS rounded once to the inputs' dtype and summed exactly.

    For rel_value, P after dropout takes the place of dS.

    Args:
        table: "rel_key", "rel_value", "rel_bias" or "rel_p2c".
        arguments: of the call that was differentiated, as of :func:`dense_gradients`.

    Raises:
        AssertionError: the error is larger, something is not finite, or the check would be vacuous.
    """
    golden, budget = table_gradient_budget(inputs, table=table, factor=factor, **arguments)
    rounded = "P" if table == "rel_value" else "dS"
    _require(bool(golden.any()), f"{name}: the golden table gradient is all zero, the check would be vacuous")
    _require(budget > 0, f"{name}: rounding {rounded} changes nothing, the check would be vacuous")
    explanation = f"{factor} times that of {rounded} rounded once to {inputs.query.dtype} and summed exactly"
    _require_errors_below(name, actual, golden, budget, explanation)


def _largest_rms(gradients: Iterable[torch.Tensor]) -> float:
    return max((float(each.double().square().mean().sqrt()) for each in gradients if each.numel()), default=0.0)


FLOAT32_NORM = 2e-4
"""Error of a float32 gradient relative to its norm. P = exp(logit - lse) is off by two units of float32, 2.4e-7, times the size
of logits, which is about 40 in sharp attention; a gradient is what is left of terms twenty times as large: 2.4e-7 * 40 * 20."""


def float32_gradient_budget(golden: torch.Tensor, all_golden: Iterable[torch.Tensor]) -> float:
    """Return the largest norm that a float32 gradient's error may have, see :func:`assert_gradients_close_fp32`."""
    return FLOAT32_NORM * max(float(golden.double().norm()), 0.05 * _largest_rms(all_golden) * math.sqrt(golden.numel()))


def assert_gradients_close_fp32(
    name: str, actual: torch.Tensor, golden: torch.Tensor, all_golden: Iterable[torch.Tensor]
) -> None:
    """Assert that a float32 gradient is within 2e-4 of the golden one, in norm.

    Some gradients cancel to nothing. So 2e-4 is relative to the larger of two norms: golden's, and that of as many elements of
    5 % of the largest RMS among all gradients of the call.

    Raises:
        AssertionError: the error is larger, something is not finite, or all golden gradients are zero.
    """
    errors, golden = _finite_errors(name, actual, golden)
    all_golden = list(all_golden)
    largest_rms = _largest_rms(all_golden)
    _require(largest_rms > 0, f"{name}: all golden gradients are zero, the check would be vacuous")
    error, norm = float(errors.norm()), float(golden.norm())
    budget = float32_gradient_budget(golden, all_golden)
    _require(
        error <= budget,
        f"{name}: norm of the error {error:.3e} exceeds the budget {budget:.3e} (2e-4 of the larger of the gradient's norm "
        f"{norm:.3e} and 5% of the largest gradient's RMS {largest_rms:.3e} times sqrt({golden.numel()})); largest element error "
        f"{max(errors.flatten().tolist(), default=0.0):.3e}",
    )
