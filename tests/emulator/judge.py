"""How far the results of a call are from float64, as parts of what the error rule of triton_relattn.testing allows."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from tests.cases import by_sequence
from triton_relattn import fused_relative_attention, fused_relative_attention_varlen
from triton_relattn.testing import (
    dense_gradients,
    dropout_mask,
    error_budget,
    float32_gradient_budget,
    forward_backward,
    table_gradient_budget,
)

from .calls import DROPOUT_SEED, Call

TABLES = ("rel_key", "rel_value", "rel_bias")
CANCELLED = 1e-9
"""A gradient that is so much smaller than the largest one is what is left where terms cancel."""


def results_of(call: Call, implementation: str | None) -> dict[str, torch.Tensor]:
    """out, lse and all gradients of a call of the public function, by name; dropout is the same every time."""
    function: Any = fused_relative_attention_varlen if "cu_seqlens_q" in call.arguments else fused_relative_attention
    attend = functools.partial(function, return_lse=True, implementation=implementation)
    torch.manual_seed(DROPOUT_SEED)
    return forward_backward(attend, call.inputs, **call.arguments)


class Judge:
    """What is expected of a call, computed once.

    is_tf32: float32 products are computed in TF32. It has as many digits as float16, in which plain torch then makes its errors,
    but matrix units truncate numbers to it instead of rounding them: twice the error.
    """

    def __init__(self, call: Call, is_tf32: bool = False) -> None:
        self.call, self.is_tf32 = call, is_tf32
        self.is_packed = "cu_seqlens_q" in call.arguments
        self.keep = self._kept()
        self.golden: dict[str, torch.Tensor]
        if self.is_packed:
            self.golden = by_sequence(call.inputs, call.arguments, self.keep)
        else:
            self.golden = dense_gradients(call.inputs, **call.arguments, keep=self.keep)._asdict()
        self.dtype = torch.float16 if is_tf32 else call.inputs.query.dtype
        self.reference = results_of(call._replace(inputs=call.inputs.to(self.dtype)), "reference")

    def _kept(self) -> torch.Tensor | None:
        """What dropout keeps."""
        inputs, arguments = self.call
        dropout_p = arguments.get("dropout_p", 0.0)
        if not dropout_p:
            return None
        torch.manual_seed(DROPOUT_SEED)
        if not self.is_packed:
            return dropout_mask(*inputs.query.shape[:3], inputs.key.shape[2], dropout_p)
        longest = (arguments["max_seqlen_q"], arguments["max_seqlen_k"])
        return dropout_mask(len(arguments["cu_seqlens_q"]) - 1, inputs.query.shape[1], *longest, dropout_p)

    def ratios(self, results: dict[str, torch.Tensor]) -> dict[str, float]:
        """Of each result, error / allowance; NaN where something is not finite that should be. Gradients of tables are also
        measured against one rounding of dS (or P), by their names with a star."""
        found = {}
        for name, result in results.items():
            found[name] = self._ratio(name, result)
            table = name.removeprefix("d_")
            rounds_once = self.call.inputs.query.dtype != torch.float32  # else operands are rounded, too, or nothing is
            if table in TABLES and rounds_once and not self.is_packed and not self._is_cancelled(name):
                golden, budget = table_gradient_budget(self.call.inputs, table=table, **self.call.arguments, keep=self.keep)
                if budget > 0:  # else rounding changes nothing
                    found[f"{name}*"] = float((result.double() - golden).abs().max()) / budget
        return found

    def _ratio(self, name: str, result: torch.Tensor) -> float:
        golden = self.golden[name].double()
        infinite = golden == -math.inf
        if bool(torch.where(infinite, result != golden, ~result.isfinite()).any()):
            return math.nan
        errors = (result.double() - golden).masked_fill(infinite, 0)
        if errors.numel() == 0:
            return 0.0
        allowance = self._allowance(name, golden, result.dtype)
        ratio = float(errors.abs().max()) / max(allowance, torch.finfo(torch.float32).tiny)
        if self.dtype == torch.float32 and name.startswith("d_"):
            all_golden = [self.golden[each] for each in self._gradients()]
            ratio = max(ratio, float(errors.norm()) / float32_gradient_budget(golden, all_golden))
        return ratio

    def _allowance(self, name: str, golden: torch.Tensor, dtype: torch.dtype) -> float:
        if self._is_cancelled(name):
            return 10 * torch.finfo(self.dtype).eps * self._largest_gradient()
        factor = 3 if name.startswith("d_") else 4 if self.dtype == torch.float32 else 2
        return error_budget(golden, self.reference[name], dtype, factor=factor * (1 + self.is_tf32))

    def _gradients(self) -> list[str]:
        return [name for name in self.reference if name.startswith("d_")]

    def _largest_gradient(self) -> float:
        return max((float(self.golden[name].abs().max()) for name in self._gradients() if self.golden[name].numel()), default=0.0)

    def _is_cancelled(self, name: str) -> bool:
        golden = self.golden[name]
        if not name.startswith("d_") or golden.numel() == 0:
            return False
        return float(golden.abs().max()) < CANCELLED * self._largest_gradient()
