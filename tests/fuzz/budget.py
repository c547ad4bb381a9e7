"""The results that a call should give, in float64, and how far rounding may move each of their elements.

The rules of the other tests compare with what plain torch is off in the same precision, over many elements. Of any call at all
(a single key, terms that cancel, 16 bits) that says too little: the budget here is first-order error analysis, element by
element. It grows with the magnitude of what is summed, so that it never fails for rounding, and a wrong term never fits in it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from tests.cases import unpacked
from tests.tolerance import within
from triton_relattn import RelativePositions
from triton_relattn._core.dropout import keep_scale
from triton_relattn._core.spec import DIFFERENTIABLE
from triton_relattn.testing import Inputs, dense_gradients

UNITS = 16
"""Rounding errors, in units in the last place, that a number goes through one after the other."""
SMALLEST_SCALE = 2.0**-59
"""Largest difference between a scale near 0 and the smallest one, which the kernels compute with instead."""
SCALES_THAT_ROUND = 0.03, 16384.0
"""Beyond these, terms stay float32 even where others are rounded to float16: docs/numerics.md."""
ARGUMENTS = (
    *("positions", "attn_mask", "key_lengths", "is_causal", "window_size", "query_offset"),
    *("dropout_p", "scale", "rel_scale", "softcap", "enable_gqa"),
)


class Precision(NamedTuple):
    """Errors of one implementation, to first order."""

    sums: float
    """Relative error of logits, probabilities and sums."""
    products: float
    """Relative error of probabilities and dS where they are operands of products."""
    smallest: float
    """Absolute error of those operands."""
    out: float
    """Relative error of the out that delta is computed from; 0 if it is not."""
    terms: bool = False
    """Whether products with tables are rounded to float16, at scales at which it holds them; a bias is with rel_key's."""


def precision_of(implementation: str | None, dtype: torch.dtype, rounds_terms: bool = False) -> Precision:
    sums = UNITS * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    if implementation != "triton":
        return Precision(sums, 0.0, 0.0, 0.0)
    info = torch.finfo(dtype)
    low = info.eps if info.bits < 32 else 0.0
    return Precision(sums, low, info.tiny * info.eps if low else 0.0, info.eps, rounds_terms)


def magnitudes(
    inputs: Inputs,
    precision: Precision,
    keep: torch.Tensor | None,
    *,
    positions: RelativePositions | None = None,
    attn_mask: torch.Tensor | None = None,
    key_lengths: torch.Tensor | None = None,
    is_causal: bool = False,
    window_size: tuple[int, int] | None = None,
    query_offset: int | torch.Tensor = 0,
    dropout_p: float = 0.0,
    scale: float | None = None,
    rel_scale: float | None = None,
    softcap: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, torch.Tensor]:
    """The budget of out, lse and each gradient of a dense call, before the rounding of the results themselves."""
    exact = inputs.to(torch.float64)
    sizes = Inputs(*(None if tensor is None else tensor.abs() for tensor in exact))  # type: ignore[arg-type]
    batch, heads, num_queries, width = exact.query.shape
    num_keys, key_heads = exact.key.shape[2], exact.key.shape[1]
    group = heads // max(key_heads, 1)
    scale = width**-0.5 if scale is None else scale
    rel_scale = scale if rel_scale is None else rel_scale
    i, j = torch.arange(num_queries)[:, None], torch.arange(num_keys)
    offset = query_offset.view(-1, 1, 1, 1) if isinstance(query_offset, torch.Tensor) else query_offset
    relative = (j - i - offset).expand(batch, heads, num_queries, num_keys)
    tables = ((exact.rel_key, -2), (exact.rel_value, -2), (exact.rel_bias, -1), (exact.rel_p2c, -2))
    num_rows = next((table.shape[dim] for table, dim in tables if table is not None), 1)
    row, applies = (positions or RelativePositions(-(num_rows // 2), -(num_rows // 2) + num_rows - 1)).rows(relative)

    def by_pair(by_row: torch.Tensor) -> torch.Tensor:
        return by_row.expand(batch, heads, num_queries, num_rows).gather(-1, row) * applies

    def by_row(by_pair: torch.Tensor) -> torch.Tensor:
        return by_pair.new_zeros(batch, heads, num_queries, num_rows).scatter_add(-1, row, by_pair * applies)

    def of_keys(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat_interleave(group, 1)

    def logits(of: Inputs, scale: float, rel_scale: float) -> torch.Tensor:
        total = scale * (of.query @ of_keys(of.key).mT)
        if of.rel_key is not None:
            total = total + rel_scale * by_pair((of.query if of.rel_query is None else of.rel_query) @ of.rel_key.mT)
        if of.rel_p2c is not None:
            total = total + rel_scale * (of_keys(of.key) @ of.rel_p2c.mT).gather(-1, row.mT).mT * applies
        return total if of.rel_bias is None else total + by_pair(of.rel_bias[..., None, :])

    unit = precision.sums
    z, z_error = logits(exact, scale, rel_scale), unit * logits(sizes, abs(scale) + SMALLEST_SCALE, abs(rel_scale))
    if precision.terms and SCALES_THAT_ROUND[0] <= abs(scale) <= SCALES_THAT_ROUND[1]:
        half = torch.finfo(torch.float16)
        of_products = sizes if sizes.rel_key is not None else sizes._replace(rel_bias=None)
        if of_products.rel_key is not None or of_products.rel_p2c is not None:
            z_error = z_error + half.eps * logits(of_products, 0.0, abs(rel_scale)) + half.tiny * half.eps * abs(scale)
    slope, slope_error = torch.ones_like(z), torch.zeros_like(z)
    if softcap is not None:
        limited = torch.tanh(z / softcap)
        slope = 1 - limited.square()
        limited_error = (slope * z_error / softcap + unit * (1 + limited.abs())).clamp_max(2)
        slope_error = (2 * limited.abs() + limited_error) * limited_error
        z, z_error = softcap * limited, softcap * limited_error
    left, right = window_size or (-1, -1)
    visible = torch.ones_like(z, dtype=torch.bool)
    for hides, hidden in ((is_causal, relative > 0), (left >= 0, relative < -left), (right >= 0, relative > right)):
        visible &= ~hidden if hides else visible
    if key_lengths is not None:
        visible &= j < key_lengths.view(-1, 1, 1, 1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        visible &= attn_mask
    elif attn_mask is not None:
        visible &= attn_mask != -math.inf
        added = attn_mask.double().masked_fill(attn_mask == -math.inf, 0)
        z, z_error = z + added, z_error + unit * (z.abs() + added.abs())

    z, z_error = z.masked_fill(~visible, -math.inf), z_error.masked_fill(~visible, 0)
    lse = torch.logsumexp(z, -1, keepdim=True)
    blind = lse == -math.inf
    shifts = ((torch.logsumexp(z + sign * z_error, -1, keepdim=True) - lse).abs() for sign in (1, -1))
    lse_error = (torch.maximum(*shifts) + unit * (1 + lse.abs())).masked_fill(blind, 0)
    log_probs = (z - lse).masked_fill(~visible, -math.inf)
    probs = log_probs.exp()
    relative_error = (z_error + lse_error + unit).masked_fill(~visible, 0)
    raised = torch.where(visible, (log_probs + relative_error).clamp_max(0).exp(), 0)
    # Of a row whose logits say nothing anymore, lse being so large, the probabilities are anything.
    probs_error = (raised - probs).clamp_min(0) + probs * relative_error.clamp_max(1)
    probs_error = visible * (probs_error + torch.finfo(torch.float32).tiny)
    probs_error = torch.where(relative_error > 0.5, visible * torch.maximum(probs_error, raised), probs_error)

    kept = torch.ones_like(z) if keep is None else keep.double() * keep_scale(dropout_p)
    operand_error = (probs_error + (precision.products + unit) * probs + precision.smallest * visible) * kept
    values = of_keys(sizes.value)
    out_error = operand_error @ values
    out_size = (probs * kept) @ values
    d_probs = sizes.d_out @ values.mT
    if sizes.rel_value is not None:
        out_error = out_error + by_row(operand_error) @ sizes.rel_value
        out_size = out_size + by_row(probs * kept) @ sizes.rel_value
        d_probs = d_probs + by_pair(sizes.d_out @ sizes.rel_value.mT)
    d_probs = d_probs * kept
    delta = (probs * d_probs).sum(-1, keepdim=True)
    delta_error = (probs_error * d_probs).sum(-1, keepdim=True) + 2 * unit * delta
    if precision.out:
        delta_error = delta_error + ((out_error + precision.out * out_size) * sizes.d_out).sum(-1, keepdim=True)
    inner = d_probs + delta + sizes.d_lse[..., None]
    d_scores = probs * inner * slope
    d_scores_error = slope * (probs_error * inner + probs * (delta_error + 2 * unit * inner)) + slope_error * inner * raised
    d_scores_error = d_scores_error + (precision.products + unit) * d_scores + precision.smallest * visible

    largest_scale = max(abs(scale), abs(rel_scale)) if precision.smallest else 0.0
    scale_error = (
        abs(scale) * d_scores_error + SMALLEST_SCALE * (d_scores + d_scores_error) + largest_scale * precision.smallest * visible
    )
    pair_error = abs(rel_scale) * d_scores_error + largest_scale * precision.smallest * visible
    rel_scale_error = by_row(pair_error)
    p = sizes.query if sizes.rel_query is None else sizes.rel_query
    budgets = {"out": out_error, "lse": lse_error[..., 0], "d_query": scale_error @ of_keys(sizes.key)}
    of_tables = {
        "d_rel_key": (sizes.rel_key, rel_scale_error, p),
        "d_rel_value": (sizes.rel_value, by_row(operand_error), sizes.d_out),
        "d_rel_bias": (sizes.rel_bias, by_row(d_scores_error), torch.ones_like(p[..., :1])),
    }
    if sizes.rel_key is not None:
        d_p = rel_scale_error @ sizes.rel_key
        if sizes.rel_query is None:
            budgets["d_query"] = budgets["d_query"] + d_p
        else:
            budgets["d_rel_query"] = d_p
    d_key_error, d_value_error = scale_error.mT @ sizes.query, operand_error.mT @ sizes.d_out
    if sizes.rel_p2c is not None:
        of_key_rows = pair_error.new_zeros(batch, heads, num_keys, num_rows).scatter_add(-1, row.mT, (pair_error * applies).mT)
        d_key_error = d_key_error + of_key_rows @ sizes.rel_p2c
        of_tables["d_rel_p2c"] = (sizes.rel_p2c, of_key_rows, of_keys(sizes.key))
    for name, product in (("d_key", d_key_error), ("d_value", d_value_error)):
        budgets[name] = product.unflatten(1, (key_heads, group)).sum(2) if key_heads else product
    for name, (given, of_rows, factor) in of_tables.items():
        if given is not None:
            gradient = torch.einsum("bhir,bhid->hrd", of_rows, factor)
            gradient = gradient[..., 0] if name == "d_rel_bias" else gradient
            budgets[name] = gradient if given.dim() == gradient.dim() else gradient.sum(0)
    return budgets


class Expected(NamedTuple):
    golden: torch.Tensor
    budget: torch.Tensor


def dense(inputs: Inputs, arguments: dict[str, Any], keep: torch.Tensor | None, precision: Precision) -> dict[str, Expected]:
    golden = dense_gradients(inputs, **arguments, keep=keep)._asdict()
    budgets = magnitudes(inputs, precision, keep, **arguments)
    return {name: Expected(golden[name], budget.expand_as(golden[name])) for name, budget in budgets.items()}


def expected(
    call: dict[str, Any], d_out: torch.Tensor, d_lse: torch.Tensor, keep: torch.Tensor | None, rounds_terms: bool = False
) -> dict[str, Expected]:
    """out, lse and the gradients of all tensors of a call, by "d_" and their names."""
    given = {name: None if call.get(name) is None else call[name].detach() for name in DIFFERENTIABLE}
    inputs = Inputs(**given, d_out=d_out, d_lse=d_lse)  # type: ignore[arg-type]
    precision = precision_of(call.get("implementation"), inputs.query.dtype, rounds_terms)
    arguments = {name: call[name] for name in ARGUMENTS if call.get(name) is not None}
    if call.get("cu_seqlens_q") is None:
        return dense(inputs, arguments, keep, precision)
    packing = {name: call[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")}
    shapes = {f"d_{name}": tensor.shape for name, tensor in given.items() if tensor is not None}
    shapes |= {"out": d_out.shape, "lse": d_lse.shape}
    totals = {
        name: Expected(torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64))
        for name, shape in shapes.items()
    }
    for index, part in enumerate(unpacked(inputs, {"query_offset": 0, **arguments, **packing})):
        num_queries, num_keys = part.inputs.query.shape[2], part.inputs.key.shape[2]
        of_part = None if keep is None else keep[index : index + 1, :, :num_queries, :num_keys]
        for name, results in dense(part.inputs, part.arguments, of_part, precision).items():
            for total, result in zip(totals[name], results, strict=True):
                if name == "lse":
                    total[:, part.queries] = result[0]
                elif name in ("out", "d_query", "d_rel_query", "d_key", "d_value"):
                    place = part.keys if name in ("d_key", "d_value") else part.queries
                    total[place] = result[0].transpose(0, 1)
                else:
                    total += result
    return totals


def assert_within(name: str, actual: torch.Tensor, golden: torch.Tensor, budget: torch.Tensor) -> None:
    """Each element is off by no more than its budget and the rounding to its dtype; what is beyond the dtype may be anything."""
    info = torch.finfo(actual.dtype)
    assert actual.shape == golden.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(golden.shape)}"
    assert not budget.isnan().any(), f"{name}: the budget is NaN"
    infinite = golden == -math.inf
    golden = golden.masked_fill(infinite, 0)
    budget = budget + info.eps * golden.abs() + info.tiny * (1 if info.bits >= 32 else info.eps)
    result = actual.detach().double().masked_fill(infinite & (actual == -math.inf), 0)
    representable = golden.abs() + budget <= info.max

    def message() -> str:
        wrong = ~((result - golden).abs() <= budget) & representable
        where = tuple(wrong.nonzero()[0].tolist())
        exact = -math.inf if infinite[where] else golden[where].item()
        return (
            f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, first at {where}: "
            f"got {actual[where].item():.9g}, expected {exact:.9g} to within {budget[where].item():.3g}"
        )

    within(name, (result - golden).abs()[representable], budget[representable], message)
