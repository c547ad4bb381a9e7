"""Checks of calls with strided, unaligned and packed tensors, and odd widths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tests.check import Way, attend_varlen
from tests.draws import Limits, drawn
from tests.expected import TABLES, assert_table_gradient, exact_results
from tests.samples import in_memory_order, with_different_strides
from tests.tolerance import assert_at_most, assert_gradients_close_fp32, dtype_tolerance
from triton_relattn import RelativePositions
from triton_relattn.testing import Inputs, assert_within_budget, dropout_mask, forward_backward, make_inputs

POSITIONS = {
    "full": lambda length: RelativePositions(1 - length, length - 1),
    "clamp": lambda length: RelativePositions(-length // 3, length // 4),
    "zero": lambda length: RelativePositions(-length // 3, length // 4, "zero"),
}
LARGEST_DISTANCE = {torch.float32: 10 * dtype_tolerance(torch.float32)}
LARGEST_DISTANCE |= {dtype: dtype_tolerance(dtype) for dtype in (torch.bfloat16, torch.float16)}
"""Relative error in norm of a packed call; in float32 gradients may cancel to a tenth."""


def map_tensors(inputs: Inputs, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
    return Inputs(*(None if tensor is None else change(tensor) for tensor in inputs))  # type: ignore[arg-type]


def after_one_element(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that begins with the second element of its storage, not aligned to 16 bytes."""
    storage = tensor.new_full((tensor.numel() + 1,), torch.nan)
    return storage[1:].view(tensor.shape).copy_(tensor)


def by_length(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the memory order of (B, N, H, D), the output of a projection."""
    return in_memory_order(tensor, 0, 2, 1, 3) if tensor.dim() == 4 else tensor


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose last dimension has a step of two."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


LAYOUTS: dict[str, Callable[[Inputs], Inputs]] = {
    "dense": lambda inputs: inputs,
    "by length": lambda inputs: map_tensors(inputs, by_length),
    "strided": with_different_strides,
    "every other": lambda inputs: map_tensors(inputs, every_other),
    "unaligned": lambda inputs: map_tensors(inputs, after_one_element),
    "one unaligned": lambda inputs: inputs._replace(key=after_one_element(inputs.key)),
    "from the middle": lambda inputs: map_tensors(inputs, lambda tensor: torch.cat([tensor, tensor])[tensor.shape[0] :]),
}


def check_forward_backward(inputs: Inputs, **arguments: Any) -> None:
    """Run forward and backward of a padded call, and apply the error rule to out, lse and all gradients, on any device.

    Errors are at most twice (gradients: three times) those of plain torch in the same precision, and those of tables in 16 bits
    the error of dS (or P) rounded once. In float32 gradients are close in norm, also those that cancel to zero; out and lse may
    have four times the error of plain torch: the kernel scales logits to base 2, a rounding that plain torch does not have and
    that the interpreter, which has no fused multiply-add, makes where a GPU does not.
    """
    results = Way("triton").results(inputs, **arguments)
    dense, dropout_p = dict(arguments), arguments.get("dropout_p", 0.0)
    if dropout_p:
        torch.manual_seed(0)
        sizes = *inputs.query.shape[:3], inputs.key.shape[2]
        dense["keep"] = dropout_mask(*sizes, dropout_p, inputs.query.device)  # type: ignore[call-arg]
    golden, plain = exact_results(inputs, **dense), Way("reference").results(inputs, **arguments)
    assert results.keys() == golden.keys()
    gradients = [golden[name] for name in golden if name.startswith("d_")]
    largest = max(float(gradient.abs().max()) for gradient in gradients if gradient.numel())
    is_float32 = inputs.query.dtype == torch.float32
    for name, result in results.items():
        exact, table = golden[name], name.removeprefix("d_")
        tensor = getattr(inputs, table, None) if name.startswith("d_") else None
        assert tensor is None or (result.dtype, result.shape) == (tensor.dtype, tensor.shape), name
        if tensor is None:
            if bool((exact.isfinite() & (exact != 0)).any()):
                # Rows that see a single key copy its value: plain torch may be exact.
                assert_within_budget(name, result, exact, plain[name], factor=4 if is_float32 else 2, exact_reference=True)
            else:  # no query sees a key
                assert torch.equal(result.double(), exact)
        elif largest == 0:
            assert not result.any(), name
        elif is_float32:
            assert_gradients_close_fp32(name, result, exact, gradients)
        elif not exact.any():  # with one visible key it cancels to zero
            assert_at_most(name, result.abs(), 10 * torch.finfo(result.dtype).eps * largest)
        else:
            assert_within_budget(name, result, exact, plain[name], factor=3, exact_reference=True)
            if table in TABLES and (table != "rel_p2c" or inputs.query.dtype == torch.float16):
                assert_table_gradient(name, result, inputs, table=table, **dense)


def check_layout(layout: str, width: int, outside: str, dtype: torch.dtype, device: str, length: int = 150) -> None:
    """Check a call and its gradients against float64."""
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
    check_forward_backward(LAYOUTS[layout](inputs), positions=positions, is_causal=outside == "zero")


def check_packed(seed: int, limits: Limits, device: str) -> None:
    """Check a packed call, perhaps with empty sequences, against its sequences in float64."""
    inputs, arguments = replace(drawn(seed, limits, is_packed=True), dropout_p=0.0).inputs()  # a GPU draws another mask
    expected = exact_results(inputs, **arguments)
    on_device = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    kernels = partial(attend_varlen, implementation="triton")
    results = forward_backward(kernels, map_tensors(inputs, lambda tensor: tensor.to(device)), **on_device)
    assert set(results) == set(expected)
    for name, result in results.items():
        ours, exact = result.double().cpu(), expected[name]
        is_finite = exact.isfinite()
        assert torch.equal(ours[~is_finite], exact[~is_finite]), name
        if not is_finite.any():  # all sequences are empty
            continue
        distance = float((ours[is_finite] - exact[is_finite]).norm())
        scale = max(float(exact[is_finite].norm()), 0.05 * exact[is_finite].numel() ** 0.5)
        assert_at_most(name, distance, LARGEST_DISTANCE[result.dtype] * scale)
