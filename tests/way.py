"""Ways to compute a call, for tests of what holds for all: implementations, each in one block and in small ones.

In a process with TRITON_INTERPRET=1 these are the kernels; in the other one blockwise and the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.conftest import INTERPRETED
from tests.expected import assert_within, dtype_of, expected
from tests.oracle import with_keep
from triton_relattn import fused_relative_attention
from triton_relattn.testing import Inputs, forward_backward

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

    def out(self, inputs: Inputs, **arguments: Any) -> torch.Tensor:
        """out of a call without lse and without gradients, with the same dropout as results()."""
        torch.manual_seed(0)
        arguments = {**inputs.terms(), **arguments, "implementation": self.implementation}
        found: torch.Tensor = fused_relative_attention(*inputs[:4], **arguments)
        return found

    def check(self, results: Results, inputs: Inputs, **arguments: Any) -> None:
        """Apply the error rule of tests/expected.py to each element of out, lse and all gradients.

        Not to the reference in 16 bits: what plain torch rounds there is what others are measured by.
        """
        if self.implementation == "reference" and inputs.query.element_size() == 2:
            return
        call = {**inputs._asdict(), **arguments, "implementation": self.implementation}
        keep = with_keep(inputs, arguments).get("keep")
        golden = expected(call, inputs.d_out, inputs.d_lse, keep)
        for name, result in results.items():
            assert result.dtype == dtype_of(name, call), f"{name}: {result.dtype}"
            assert_within(name, result, *golden[name])


WAYS = (
    (Way("triton"), Way("triton", small=True))
    if INTERPRETED
    else (Way("blockwise"), Way("blockwise", small=True), Way("reference"))
)
