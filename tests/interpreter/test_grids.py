"""Decomposed relative positions by the kernels, in Triton's interpreter: further columns of query and key."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from triton_relattn import decomposed_relative_attention
from triton_relattn.testing import assert_gradients_close_fp32

call: Any = decomposed_relative_attention
CASES: dict[str, dict[str, Any]] = {
    "rectangular": {"grid": (3, 7)},
    "class token": {"grid": (4, 3), "prefix": 1},
    "pooled keys": {"grid": (4, 6), "key_grid": (2, 3), "prefix": 1},
}


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("name", CASES)
def test_as_the_reference(name: str, dropout_p: float) -> None:
    arguments = dict(CASES[name])
    prefix, grid = arguments.pop("prefix", 0), arguments["grid"]
    keys = arguments.get("key_grid", grid)
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    given = [made(2, 2, prefix + height * width, 8) for height, width in (grid, keys, keys)]
    given += [made(2 * max(sides) - 1, 8) for sides in zip(grid, keys, strict=True)]
    d_out = torch.randn(given[0].shape, generator=generator)

    def results(implementation: str, dtype: torch.dtype) -> list[torch.Tensor]:
        torch.manual_seed(3)
        tensors = [each.detach().to(dtype).requires_grad_() for each in given]
        out = call(*tensors, **arguments, dropout_p=dropout_p, implementation=implementation)
        return [out.detach(), *torch.autograd.grad(out, tensors, d_out.to(dtype))]

    ours, golden = results("triton", torch.float32), results("reference", torch.float64)
    torch.testing.assert_close(ours[0].double(), golden[0], rtol=0, atol=1e-5)
    for number, (actual, expected) in enumerate(zip(ours[1:], golden[1:], strict=True)):
        assert_gradients_close_fp32(f"gradient {number}", actual, expected, golden[1:])
