"""Attention on a grid, in each way: sides that fill tiles and sides that do not, with and without tokens before the grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.check import Way
from tests.tolerance import assert_gradients_close_fp32, assert_near
from triton_relattn import decomposed_relative_attention

SIDES = [(8, 8), (4, 16), (16, 4), (5, 7)]
"""Three whose rows, or several of them, fill tiles of 16, 32 or 64 positions, and one that does not."""


@pytest.mark.parametrize("sides", SIDES, ids=str)
@pytest.mark.parametrize("prefix", [0, 1, 9])
def test_sides_and_tokens_before_the_grid(sides: tuple[int, int], prefix: int, way: Way) -> None:
    """out and all gradients are right, and no input counts as written to."""
    generator, length = torch.Generator().manual_seed(prefix), prefix + sides[0] * sides[1]
    shapes = [(1, 2, length, 16)] * 3 + [(2 * side - 1, 16) for side in sides]
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    d_out = torch.randn(shapes[0], generator=generator)

    def results(dtype: torch.dtype, implementation: str) -> list[torch.Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in drawn]
        call: Any = decomposed_relative_attention
        out = call(*leaves, sides, implementation=implementation)
        version = out._version
        gradients = torch.autograd.grad(out, leaves, d_out.to(dtype))
        assert not any(leaf._version for leaf in leaves) and out._version == version
        return [out.detach(), *gradients]

    ours, golden = results(way.dtype, way.implementation), results(torch.float64, "reference")
    for name, result, exact in zip(("out", "query", "key", "value", "rel_pos_h", "rel_pos_w"), ours, golden, strict=True):
        if name == "out" or way.dtype == torch.float64:
            assert_near(name, result, exact.to(way.dtype))
        else:
            assert_gradients_close_fp32(name, result, exact, golden[1:])
