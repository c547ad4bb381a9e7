"""Ways to compute a call, for tests of what holds for all: implementations, each in one block and in small ones.

In a process with TRITON_INTERPRET=1 these are the kernels; in the other one blockwise and the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.conftest import INTERPRETED
from tests.oracle import assert_same, with_keep
from triton_relattn import fused_relative_attention
from triton_relattn.testing import (
    Inputs,
    assert_gradients_close_fp32,
    assert_within_budget,
    dense_gradients,
    forward_backward,
)

Results = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Way:
    """An implementation, and whether it takes small blocks (tiles)."""

    implementation: str
    small: bool = False

    def __str__(self) -> str:
        return f"{self.implementation}_in_{'small' if self.small else 'default'}_blocks"

    @property
    def dtype(self) -> torch.dtype:
        """The most precise dtype that it computes in."""
        return torch.float32 if self.implementation == "triton" else torch.float64

    @property
    def width(self) -> int:
        """A width of heads that costs it little."""
        return 16 if self.implementation == "triton" else 8

    def attend(self, *tensors: Any, **arguments: Any) -> Any:
        """out and lse."""
        return fused_relative_attention(*tensors, return_lse=True, implementation=self.implementation, **arguments)

    def results(self, inputs: Inputs, **arguments: Any) -> Results:
        """out, lse and all gradients, with the same dropout every time."""
        torch.manual_seed(0)
        return forward_backward(self.attend, inputs, **arguments)

    def check(self, results: Results, inputs: Inputs, **arguments: Any) -> None:
        """Apply the error rule: in float64 equal up to rounding; else out and lse within twice the error of plain torch (four
        times in float32, where kernels scale logits to base 2), gradients within three times, in float32 close in norm."""
        golden: Any = dense_gradients(inputs, **with_keep(inputs, arguments))._asdict()
        if inputs.query.dtype == torch.float64:
            for name, result in results.items():
                assert_same(name, result, golden[name])
            return
        plain = Way("reference").results(inputs, **arguments)
        gradients = [name for name in results if name.startswith("d_")]
        is_single = inputs.query.dtype == torch.float32
        for name, result in results.items():
            exact = golden[name]
            if not (exact.isfinite() & (exact != 0)).any():  # nobody sees anything
                assert torch.equal(result.double(), exact), name
            elif name not in gradients:
                assert_within_budget(name, result, exact, plain[name], factor=4 if is_single else 2, exact_reference=True)
            elif is_single:
                assert_gradients_close_fp32(name, result, exact, [golden[other] for other in gradients])
            else:
                assert_within_budget(name, result, exact, plain[name], factor=3, exact_reference=True)


WAYS = (
    (Way("triton"), Way("triton", small=True))
    if INTERPRETED
    else (Way("blockwise"), Way("blockwise", small=True), Way("reference"))
)
