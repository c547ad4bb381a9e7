"""Helpers for tests of this operator and of code that uses it: inputs, results with gradients, and an error budget.

The budget is derived, not chosen: the error of a result may be a small multiple of the error that plain torch makes in the same
precision. ``implementation="reference"`` is plain torch, and with float64 inputs the golden result. A check that could not fail
(golden result all zero, reference without error) fails.

>>> from triton_relattn import fused_relative_attention
>>> inputs = make_inputs(2, 4, 100, 100, 64, num_rows=199, dtype=torch.bfloat16, seed=0)
>>> def results(inputs, implementation=None):
...     return forward_backward(fused_relative_attention, inputs, return_lse=True, implementation=implementation)
>>> ours, plain = results(inputs), results(inputs, "reference")
>>> for name, golden in results(inputs.to(torch.float64), "reference").items():
...     assert_within_budget(name, ours[name], golden, plain[name], factor=3 if name.startswith("d_") else 2)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ._core.dropout import draw_seed, keep_mask
from ._core.spec import DIFFERENTIABLE

SHARP_FACTOR = 8.0  # factor of the queries for sharp attention, which gives logits of about +-30
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
    return by_name(out, lse, leaves, gradients)


def by_name(
    out: torch.Tensor, lse: torch.Tensor, leaves: Iterable[str], gradients: Iterable[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return results with gradients in the order of the leaves' names."""
    named = {f"d_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **named}


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


def error_budget(golden: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype, *, factor: float) -> float:
    """Return the error that a result in dtype may have: ``factor`` times that of plain torch, plus two units in the last place.

    Args:
        golden: the float64 result. Where it is -inf, the reference must be -inf as well.
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
    errors, _ = _finite_errors(name, actual, golden)
    budget = error_budget(golden, reference, actual.dtype, factor=factor)
    if not bool((errors <= budget).all()):
        where = tuple(int(index) for index in torch.unravel_index(errors.argmax(), errors.shape))
        raise AssertionError(
            f"{name}: error {errors.max().item():.3e} exceeds the budget {budget:.3e} ({factor} * {reference_error:.3e} of the "
            f"reference + {budget - factor * reference_error:.3e} for two units in the last place); worst at {where}: got "
            f"{actual[where].item():.9g}, expected {golden[where].item():.9g}; "
            f"{int((errors > budget).sum())} of {errors.numel()} elements exceed it"
        )
