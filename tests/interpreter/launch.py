"""Calls of the forward kernel with a chosen configuration, and what it is measured against."""

from __future__ import annotations

from typing import Any

import torch

from triton_relattn import validation
from triton_relattn.kernels.configs import TileConfig
from triton_relattn.kernels.forward import forward
from triton_relattn.reference import reference_attention
from triton_relattn.testing import Inputs, assert_within_budget

DEFAULT_ARGUMENTS = {"positions": None, "key_lengths": None, "is_causal": False, "query_offset": 0, "scale": None}


def run(inputs: Inputs, config: TileConfig | None = None, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of the forward kernel; the call is validated as the public function validates it."""
    query, key, value, rel_key = inputs[:4]
    arguments = DEFAULT_ARGUMENTS | arguments
    spec = validation.resolve(query, key, value, rel_key, **arguments)
    out, lse = forward(query, key, value, rel_key, arguments["key_lengths"], spec, config=config)
    return out, lse


def check(inputs: Inputs, config: TileConfig | None = None, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run and apply the error rule to out and lse: at most twice the error of plain torch in the same precision.

    In float32 at most four times: the kernel scales logits to base 2, a rounding that plain torch does not have and that the
    interpreter, which has no fused multiply-add, makes where a GPU does not.
    """
    results = run(inputs, config, **arguments)
    golden = reference_attention(*inputs.to(torch.float64)[:4], **arguments)
    reference = reference_attention(*inputs[:4], **arguments)
    factor = 4 if inputs.query.dtype == torch.float32 else 2
    for name, result, exact, plain in zip(("out", "lse"), results, golden, reference, strict=True):
        if bool((exact.isfinite() & (exact != 0)).any()):
            # Rows that see a single key copy its value: plain torch may be exact.
            assert_within_budget(name, result, exact, plain, factor=factor, exact_reference=True)
        else:  # nobody sees anything
            assert torch.equal(result.double(), exact)
    return results
