"""Measure how far the results of a call are from float64, as parts of what they may be off.

Each result obeys several rules; what counts is the one that it comes closest to breaking:

- "plain": 2 times (gradients 3 times) the error of plain torch in the same precision, and two units in the last place;
- "table": of a table's gradient, 1.5 times what rounding dS (or P) once costs;
- "norm": of float32 gradients, instead of "plain", 2e-4 in norm;
- "element": of each element by itself, what rounding may take it off to first order, with room (tests/expected.py). Not with
  bfloat16 inputs and rel_key: the kernels round its terms to float16, after which the first order says too little.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from tests.expected import exact_results, expected, kept, table_gradient_budget
from tests.tolerance import farthest, float32_gradient_budget, tolerance_of
from triton_relattn import fused_relative_attention, fused_relative_attention_varlen
from triton_relattn.testing import Inputs, error_budget, forward_backward

from .calls import DROPOUT_SEED, Call, of_each

TABLES = ("rel_key", "rel_value", "rel_bias", "rel_p2c")
CANCELLED = tolerance_of(torch.float64)
"""Share of the largest gradient below which one is only what is left where terms cancel."""


class Ratio(NamedTuple):
    """Error / allowance by the rule that says most; NaN if something is not finite that should be."""

    value: float
    rule: str

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.rule})"


def ratio(name: str, error: torch.Tensor | float, allowance: torch.Tensor | float, rule: str) -> Ratio:
    return Ratio(farthest(f"{name} ({rule})", error, allowance)[0], rule)


def results_of(call: Call, implementation: str | None) -> dict[str, torch.Tensor]:
    """Return out, lse and all gradients of a call of the public function, by name."""
    function: Any = fused_relative_attention_varlen if "cu_seqlens_q" in call.arguments else fused_relative_attention
    attend = functools.partial(function, return_lse=True, implementation=implementation)
    torch.manual_seed(DROPOUT_SEED)
    return forward_backward(attend, call.inputs, **call.arguments)


def truncated(inputs: Inputs) -> Inputs:
    """Cut float32 inputs as matrix units do for TF32: their last 13 bits are dropped."""
    return of_each(inputs, lambda tensor: (tensor.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32))


class Judge:
    """Expectations of a call, computed once. is_tf32: its float32 products are computed in TF32."""

    def __init__(self, call: Call, is_tf32: bool = False) -> None:
        self.call, self.is_tf32 = call, is_tf32
        self.dtype = call.inputs.query.dtype
        self.keep = kept(call.inputs, seed=DROPOUT_SEED, **call.arguments)
        self.golden = exact_results(call.inputs, **call.arguments, keep=self.keep)
        inputs = truncated(call.inputs) if is_tf32 else call.inputs
        self.reference = results_of(call._replace(inputs=inputs), "reference")
        has_rel_key = call.inputs.rel_key is not None
        self.elements = {} if is_tf32 or (self.dtype == torch.bfloat16 and has_rel_key) else self._elements()
        gradients = (self.golden[name] for name in self.reference if name.startswith("d_"))
        self.gradients = [gradient for gradient in gradients if gradient.numel()]
        self.largest_gradient = max((float(gradient.abs().max()) for gradient in self.gradients), default=0.0)

    def _elements(self) -> dict[str, torch.Tensor]:
        """Compute the largest error that each element may have."""
        inputs, arguments = self.call
        tensors = {name: tensor for name, tensor in inputs._asdict().items() if name not in ("d_out", "d_lse")}
        call = {**tensors, **arguments, "implementation": "triton"}
        found = expected(call, inputs.d_out, inputs.d_lse, self.keep, rounds_terms=self.dtype == torch.bfloat16)
        info = torch.finfo(self.dtype)
        smallest = info.tiny * (1 if info.bits >= 32 else info.eps)
        return {name: each.budget + info.eps * each.golden.abs() + smallest for name, each in found.items()}

    def ratios(self, results: dict[str, torch.Tensor]) -> dict[str, Ratio]:
        """Return the largest ratio of each result."""
        return {name: self._ratio(name, result) for name, result in results.items()}

    def _ratio(self, name: str, result: torch.Tensor) -> Ratio:
        golden = self.golden[name].double()
        infinite = golden == -math.inf
        if bool(torch.where(infinite, result != golden, ~result.isfinite()).any()):
            return Ratio(math.nan, "not finite")
        if result.numel() == 0:
            return Ratio(0.0, "plain")
        errors = (result.double() - golden).masked_fill(infinite, 0).abs()
        return max(self._by_rule(name, result, golden, errors))

    def _by_rule(self, name: str, result: torch.Tensor, golden: torch.Tensor, errors: torch.Tensor) -> Iterator[Ratio]:
        is_gradient = name.startswith("d_")
        largest = float(errors.max())
        is_cancelled = is_gradient and float(golden.abs().max()) < CANCELLED * self.largest_gradient
        if is_gradient and self.dtype == torch.float32 and not self.is_tf32:
            yield ratio(name, float(errors.norm()), float32_gradient_budget(golden, self.gradients), "norm")
        elif is_cancelled:
            yield ratio(name, largest, 10 * torch.finfo(self.dtype).eps * self.largest_gradient, "plain")
        else:
            factor = 3 if is_gradient else 4 if self.dtype == torch.float32 else 2
            allowance = error_budget(golden, self.reference[name], result.dtype, factor=factor)
            yield ratio(name, largest, allowance, "plain")
        table = name.removeprefix("d_")
        if table in TABLES and self.dtype != torch.float32 and not is_cancelled:
            inputs, arguments = self.call
            exact, allowance = table_gradient_budget(inputs, table=table, **arguments, keep=self.keep)
            if allowance > 0:  # else rounding changes nothing
                yield ratio(name, float((result.double() - exact).abs().max()), allowance, "table")
        if name in self.elements:
            yield ratio(name, errors, self.elements[name], "element")
