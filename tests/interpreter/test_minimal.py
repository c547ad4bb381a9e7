"""The example kernels, kernels/minimal.py and minimal_backward.py, compute the same as the operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from triton_relattn.kernels.minimal import dense_attention, example, minimal_attention
from triton_relattn.kernels.minimal_backward import minimal_backward
from triton_relattn.testing import assert_within_budget


def expected(tensors: list[torch.Tensor], d_out: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return out and the gradients of dense attention in a dtype."""
    tensors = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    out = dense_attention(*tensors)
    return [out.detach(), *torch.autograd.grad(out, tensors, d_out.to(dtype))]


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_out_and_gradients(length: int, dtype: torch.dtype) -> None:
    """The error rule, for lengths that fill tiles or not; memory beyond the ends of the table is not read."""
    generator = torch.Generator().manual_seed(length)
    query, key, value, d_out = (torch.randn(2, length, 16, generator=generator).to(dtype) for _ in range(4))
    storage = torch.full((2 * length + 1, 16), torch.nan, dtype=dtype)
    tensors = [query, key, value, storage[1:-1].copy_(torch.randn(2 * length - 1, 16, generator=generator))]
    out, lse = minimal_attention(*tensors)
    results = [out, *minimal_backward(d_out, out, lse, *tensors)]
    names = ("out", "d_query", "d_key", "d_value", "d_rel_key")
    budgets = zip(names, results, expected(tensors, d_out, torch.float64), expected(tensors, d_out, dtype), strict=True)
    largest = max(float(result.abs().max()) for result in results)
    for name, result, golden, plain in budgets:
        if golden.abs().max() < 1e-9 * largest:  # with one visible key the gradient of scores is zero
            assert result.abs().max() <= 4 * torch.finfo(dtype).eps * largest, name
        else:
            assert_within_budget(name, result, golden, plain, factor=2 if name == "out" else 3, exact_reference=length == 1)


def test_is_the_operator_of_the_package() -> None:
    """The dense attention that the example is compared with equals the package's reference."""
    from triton_relattn import fused_relative_attention

    query, key, value, table = (tensor.double() for tensor in example(length=37))
    out = fused_relative_attention(query[None], key[None], value[None], table, implementation="reference", return_lse=False)
    torch.testing.assert_close(dense_attention(query, key, value, table), out[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("width", lambda query, key, value, table: (query[..., :24], key[..., :24], value[..., :24], table[:, :24])),
        (r"query must be \(H, N, D\), got \(1, 2, 8, 32\)", lambda query, *others: (query[None], *others)),
        (r"rel_key .* \(15, 32\) and dtype torch.float32; got \(14, 32\), torch", lambda *of: (*of[:3], of[3][1:])),
        ("value .*; got .*, torch.float16", lambda query, key, value, table: (query, key, value.half(), table)),
        ("key", lambda query, key, value, table: (query, key.mT.contiguous().mT, value, table)),
    ],
)
def test_invalid_inputs_are_refused(name: str, change: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=name):
        minimal_attention(*change(*example(length=8)))


def test_tensors_on_a_cpu_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [tensor.cpu() for tensor in example(length=8)]
    monkeypatch.setattr("triton_relattn.kernels.kernels_are_interpreted", lambda: False)
    with pytest.raises(RuntimeError, match="there is no GPU: set TRITON_INTERPRET=1"):
        minimal_attention(*tensors)
