"""Helpers of the tests: a typed call of the operator, results by hand, and a float64 comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.cases import unlucky
from tests.tolerance import assert_near
from triton_relattn import fused_relative_attention, fused_relative_attention_varlen
from triton_relattn.testing import Inputs, dense_gradients, dropout_mask, forward_backward


def assert_same(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to float64 rounding, relative to the largest magnitude (at least 1); -inf where -inf is expected."""
    assert actual.dtype == expected.dtype == torch.float64, f"{name}: {actual.dtype}, {expected.dtype}"
    assert_near(name, actual, expected, smallest=1.0)


def attend(*tensors: torch.Tensor | None, **arguments: Any) -> Any:
    """out and lse of the operator; blockwise unless said otherwise."""
    return fused_relative_attention(*tensors, **{"implementation": "blockwise", "return_lse": True, **arguments})  # type: ignore[arg-type]


def attend_varlen(*tensors: torch.Tensor | None, **arguments: Any) -> Any:
    """out and lse of the packed operator; blockwise unless said otherwise."""
    return fused_relative_attention_varlen(*tensors, **{"implementation": "blockwise", "return_lse": True, **arguments})  # type: ignore[arg-type]


def with_keep(inputs: Inputs, arguments: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """The arguments, and what dropout keeps in a call after torch.manual_seed(seed)."""
    dropout_p = arguments.get("dropout_p", 0.0)
    if dropout_p == 0:
        return arguments
    torch.manual_seed(seed)
    batch, heads, num_queries, _ = inputs.query.shape
    return {**arguments, "keep": dropout_mask(batch, heads, num_queries, inputs.key.shape[2], dropout_p)}


def results_of(
    implementation: str, inputs: Inputs, function: Callable[..., Any] = attend, seed: int = 0, **arguments: Any
) -> dict[str, torch.Tensor]:
    """out, lse and all gradients of an implementation, after torch.manual_seed(seed)."""
    torch.manual_seed(seed)
    return forward_backward(function, inputs, implementation=implementation, **arguments)


def by_hand(inputs: Inputs, **arguments: Any) -> dict[str, torch.Tensor]:
    """out, lse and all gradients by dense_gradients, in float64, with the dropout of results_of."""
    return dense_gradients(inputs, **with_keep(inputs, arguments))._asdict()


def unlucky_reference(inputs: Inputs, **arguments: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Results by hand, and results of the reference that are as far off as in the worst of three draws."""
    return unlucky(inputs, lambda each: by_hand(each, **arguments), lambda each: results_of("reference", each, **arguments))
