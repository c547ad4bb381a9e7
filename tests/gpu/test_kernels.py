"""The kernels on a GPU: bfloat16, aligned loads and concurrency, which the interpreter does not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.draws import compiled, drawn
from tests.gpu.layouts import LAYOUTS, POSITIONS, check_forward_backward, check_layout, check_packed
from tests.tolerance import assert_gradients_close_fp32, assert_near
from triton_relattn import RelativePositions, decomposed_relative_attention, fused_relative_attention
from triton_relattn.testing import assert_within_budget, make_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here"),
]
DEVICE = "cuda"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_drawn_calls(seed: int, dtype: torch.dtype) -> None:
    """out, lse and all gradients of random calls with any of the terms and arguments."""
    inputs, arguments = drawn(seed, compiled(dtype), is_packed=False).inputs()
    arguments = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    check_forward_backward(inputs.to(dtype, DEVICE), **arguments)


@pytest.mark.parametrize(("dtype", "width"), [*((torch.bfloat16, width) for width in (40, 64, 72)), (torch.float32, 40)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, width: int, dtype: torch.dtype) -> None:
    """Strided and unaligned tensors, and odd widths."""
    for outside in POSITIONS:
        check_layout(layout, width, outside, dtype, DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_packed(seed: int, dtype: torch.dtype) -> None:
    check_packed(seed, compiled(dtype)._replace(widths=(40, 64, 72)), DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("grid", [(14, 14), (64, 64), (5, 70)])
@pytest.mark.parametrize("prefix", [0, 1])
def test_grid(grid: tuple[int, int], prefix: int, dtype: torch.dtype) -> None:
    """out and all gradients of attention on a grid obey the error rule, and have equal bits in a second run."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, prefix + grid[0] * grid[1], 64)] * 4 + [(2 * side - 1, 64) for side in grid]
    d_out, *tensors = (torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for shape in shapes)

    def results(implementation: str, dtype: torch.dtype) -> list[torch.Tensor]:
        query, key, value, *tables = leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        out = decomposed_relative_attention(query, key, value, tables[0], tables[1], grid, implementation=implementation)
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(dtype))]

    golden, plain = results("reference", torch.float64), results("reference", dtype)
    ours, again = results("triton", dtype), results("triton", dtype)
    for number, triple in enumerate(zip(ours, golden, plain, strict=True)):
        if dtype == torch.float32 and number > 0:
            assert_gradients_close_fp32(f"gradient {number}", ours[number], golden[number], golden[1:])
        else:
            factor = 3 if number else 4 if dtype == torch.float32 else 2
            assert_within_budget(f"result {number}", *triple, factor=factor, exact_reference=True)
    names = ("out", "query", "key", "value", "rel_h", "rel_w")
    assert [name for name, *both in zip(names, ours, again, strict=True) if not torch.equal(*both)] == []


def test_graph_capture() -> None:
    """Replays of a captured step with dropout differ, and repeat from the same state of the generator."""
    inputs = make_inputs(2, 2, 130, 130, 64, num_rows=33, dtype=torch.bfloat16, device=DEVICE, seed=1)
    leaves = [tensor.requires_grad_() for tensor in inputs[:4] if tensor is not None]

    def step() -> tuple[torch.Tensor, ...]:
        out: Any = fused_relative_attention(*leaves, positions=RelativePositions(-16, 16), dropout_p=0.2)
        return (out, *torch.autograd.grad(out, leaves, inputs.d_out))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    results = []
    for _ in range(2):
        torch.cuda.manual_seed(3)
        for _ in range(2):
            graph.replay()
            results.append([tensor.clone() for tensor in captured])
    first, second, again, again_second = results
    for ours, repeated in ((first, again), (second, again_second)):
        assert all(torch.equal(a, b) for a, b in zip(ours, repeated, strict=True))
    assert not torch.equal(first[0], second[0])


def test_all_implementations_have_the_same_dropout() -> None:
    """From the same state of the generator, kernels and plain torch drop the same probabilities."""
    inputs = make_inputs(2, 2, 75, 61, 16, num_rows=9, dtype=torch.float32, device=DEVICE, seed=4)
    results = []
    for implementation in ("triton", "blockwise", "reference"):
        torch.manual_seed(5)
        out: Any = fused_relative_attention(*inputs[:4], dropout_p=0.3, implementation=implementation)
        results.append(out)
    for other in results[1:]:
        assert_near("out", results[0], other)
