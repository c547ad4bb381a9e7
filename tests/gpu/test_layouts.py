"""The kernels on a GPU with tensors as they come: strided, unaligned, packed, and of odd widths.

tests/interpreter/test_gpu_layouts.py runs the same checks in the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.cases import by_sequence, random_varlen_case
from tests.interpreter.launch import check_every_term
from tests.tolerance import tolerance_of, within
from triton_relattn import RelativePositions, fused_relative_attention_varlen
from triton_relattn.testing import Inputs, forward_backward, in_memory_order, make_inputs, with_different_strides

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here"),
]
DEVICE = "cuda"
POSITIONS = {
    "full": lambda length: RelativePositions(1 - length, length - 1),
    "clamp": lambda length: RelativePositions(-length // 3, length // 4),
    "zero": lambda length: RelativePositions(-length // 3, length // 4, "zero"),
}
LARGEST_DISTANCE = {torch.float32: 10 * tolerance_of(torch.float32)}
LARGEST_DISTANCE |= {dtype: tolerance_of(dtype) for dtype in (torch.bfloat16, torch.float16)}
"""Relative, in norm, between a packed call and its sequences in float64; in float32 gradients cancel to a tenth."""


def of_each(inputs: Inputs, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
    return Inputs(*(None if tensor is None else change(tensor) for tensor in inputs))  # type: ignore[arg-type]


def after_one_element(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that begins with the second element of its storage, where no 16 bytes begin."""
    storage = tensor.new_full((tensor.numel() + 1,), torch.nan)
    return storage[1:].view(tensor.shape).copy_(tensor)


def by_length(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the memory order of (B, N, H, D), as a projection leaves it."""
    return in_memory_order(tensor, 0, 2, 1, 3) if tensor.dim() == 4 else tensor


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose last dimension has a step of two."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


LAYOUTS: dict[str, Callable[[Inputs], Inputs]] = {
    "dense": lambda inputs: inputs,
    "by length": lambda inputs: of_each(inputs, by_length),
    "strided": with_different_strides,
    "every other": lambda inputs: of_each(inputs, every_other),
    "unaligned": lambda inputs: of_each(inputs, after_one_element),
    "one unaligned": lambda inputs: inputs._replace(key=after_one_element(inputs.key)),
    "from the middle": lambda inputs: of_each(inputs, lambda tensor: torch.cat([tensor, tensor])[tensor.shape[0] :]),
}


def check_layout(layout: str, width: int, outside: str, dtype: torch.dtype, device: str, length: int = 150) -> None:
    """A call and its gradients against float64."""
    positions = POSITIONS[outside](length)
    inputs = make_inputs(
        *(2, 2, length, length, width),
        num_rows=positions.num_rows,
        per_head=outside == "zero",
        rel_bias=outside == "clamp",
        dtype=dtype,
        device=device,
        seed=width,
    )
    check_every_term(LAYOUTS[layout](inputs), None, positions=positions, is_causal=outside == "zero")


def check_packed(seed: int, dtype: torch.dtype, device: str, **sizes: Any) -> None:
    """A packed call, some sequences of which are empty, against each of its sequences in float64."""
    inputs, arguments = random_varlen_case(seed, dtype=dtype, **sizes)
    arguments["dropout_p"] = 0.0  # of which a GPU draws other bits than a CPU
    expected = by_sequence(inputs, arguments, None)
    on_device = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}

    def attend(*tensors: Any, **options: Any) -> Any:
        return fused_relative_attention_varlen(*tensors, **options, return_lse=True, implementation="triton")

    results = forward_backward(attend, of_each(inputs, lambda tensor: tensor.to(device)), **on_device)
    assert set(results) == set(expected)
    for name, result in results.items():
        ours, exact = result.double().cpu(), expected[name]
        seen = exact.isfinite()
        assert torch.equal(ours[~seen], exact[~seen]), name
        apart = float((ours[seen] - exact[seen]).norm())
        scale = max(float(exact[seen].norm()), 0.05 * exact[seen].numel() ** 0.5)
        within(name, apart, LARGEST_DISTANCE[dtype] * scale)


@pytest.mark.parametrize("width", [40, 64, 72])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, width: int) -> None:
    for outside in POSITIONS:
        check_layout(layout, width, outside, torch.bfloat16, DEVICE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["strided", "unaligned"])
def test_layouts_of_other_dtypes(layout: str, dtype: torch.dtype) -> None:
    check_layout(layout, 40, "clamp", dtype, DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_packed(seed: int, dtype: torch.dtype) -> None:
    sizes: dict[str, Any] = {"widths": (40, 64, 72), "value_widths": (40, 64, 72), "rel_widths": (16, 40)}
    check_packed(seed, dtype, DEVICE, **sizes, lengths=(0, 1, 17, 64, 130, 200))
