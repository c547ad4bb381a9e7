"""Tests that were missing: faults of tests/mutants had survived without them."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import cut_blocks
from tests.cpu.oracle import attend
from triton_relattn._blockwise import attention as blockwise
from triton_relattn._core import validation
from triton_relattn._core.arguments import Arguments
from triton_relattn._core.within import within
from triton_relattn._reference import resolved_reference
from triton_relattn.testing import dense_gradients, forward_backward, make_inputs


@pytest.mark.parametrize("num_rows", [None, 9])
@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_lengths_beyond_the_keys_are_limited(implementation: str, num_rows: int | None, block_size: None) -> None:
    """Elsewhere than on a CPU key_lengths are not checked: they are limited to [0, Nk]."""
    inputs = make_inputs(2, 1, 40, 21, 8, num_rows=num_rows, dtype=torch.float64, seed=4)
    tensors, spec = validation.resolve(Arguments.of(inputs.query, inputs.key, inputs.value, inputs.rel_key))

    def results(*lengths: int) -> list[torch.Tensor | None]:
        limited = tensors._replace(key_lengths=torch.tensor(lengths))
        if implementation == "reference":
            return list(resolved_reference(limited, spec))
        out, lse = blockwise.forward(limited, spec)
        return [out, lse, *blockwise.backward(inputs.d_out, None, limited, spec)]

    for result, expected in zip(results(1000, -7), results(21, 0), strict=True):
        assert (result is None) == (expected is None)
        assert result is None or expected is None or torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_are_rounded_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that sum over many blocks of queries have, in norm, hardly more error than rounding the result alone makes."""
    cut_blocks(monkeypatch, 128, 1, 64)
    inputs = make_inputs(1, 1, 3000, 24, 16, num_rows=41, dtype=dtype, seed=3)
    golden = dense_gradients(inputs)._asdict()
    results = forward_backward(attend, inputs)
    for name in ("d_key", "d_value", "d_rel_key"):
        unavoidable = (golden[name].to(dtype).double() - golden[name]).norm()
        assert unavoidable > 0
        # To round twice would add as much again, in squares. Half of that is allowed.
        beyond = (results[name].double() - golden[name]).norm() - unavoidable
        within(f"{name}, beyond rounding", beyond.clamp_min(0), (2**0.5 - 1) / 2 * unavoidable)
