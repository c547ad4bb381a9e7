"""Attention on a grid as compiled for GPUs, in bfloat16, which the interpreter lacks: error rules and races."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.compiled import selected_for
from tests.tolerance import assert_gradients_close_fp32
from tools.emulator.device import Emulated, emulated
from triton_relattn._core.grids import GridSpec, GridTensors
from triton_relattn.grids import _reference
from triton_relattn.kernels.grid.backward import backward
from triton_relattn.kernels.grid.forward import forward
from triton_relattn.testing import assert_within_budget

SCALE = 0.2
CASES: dict[str, dict[str, Any]] = {
    "a window": {"grid": (14, 14)},
    "as wide as a tile": {"grid": (2, 64)},
    "class token": {"grid": (5, 7), "prefix": 1},
    "strips": {"grid": (3, 70), "prefix": 70},
    "wide heads": {"grid": (6, 14), "width": 80},
}


def tensors(grid: tuple[int, int], prefix: int = 0, width: int = 64) -> tuple[GridTensors, torch.Tensor]:
    """A call in bfloat16 with two heads, and a gradient of out."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 2, prefix + grid[0] * grid[1], width)
    query, key, value, d_out = (torch.randn(shape, generator=generator).bfloat16() for _ in range(4))
    rel_h, rel_w = (torch.randn(side, side, width, generator=generator).bfloat16().float() / 4 for side in grid)
    return GridTensors(query, key, value, rel_h, rel_w), d_out


def by_reference(given: GridTensors, d_out: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return out and all gradients of the dense formula."""
    leaves = [tensor.to(dtype).requires_grad_() for tensor in given[:5]]
    out = _reference(GridTensors(*leaves), GridSpec(SCALE))
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(dtype))]


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", CASES)
def test_error_rule(name: str, target: str) -> None:
    """out and gradients obey the error rule, and the emulator finds no races."""
    given, d_out = tensors(**CASES[name])
    launches: list[Emulated]
    with selected_for(target), emulated(target) as launches:
        out, softmax_stats = forward(given, SCALE, 0.0)
        gradients = backward(d_out, out, softmax_stats, given, SCALE, 0.0)
    assert [launch.name for launch in launches] == ["grid_forward", "grid_dq", "grid_dkv"]
    for launch in launches:
        assert launch.report.finished and not launch.report.errors, (launch.name, launch.report.errors)
    golden, plain = (by_reference(given, d_out, dtype) for dtype in (torch.float64, torch.bfloat16))
    for field, actual, exact, inexact in zip(("out", *given._fields), (out, *gradients), golden, plain, strict=False):
        assert actual is not None
        assert_within_budget(field, actual, exact, inexact.to(actual.dtype), factor=2 if field == "out" else 3)


@pytest.mark.parametrize("name", ["as wide as a tile", "class token"])
def test_lanes_agree_in_float32(name: str) -> None:
    """Without matrix units, lanes that hold copies of the same sum store the same bits."""
    call, d_out = tensors(**CASES[name])
    given = GridTensors(*(tensor.float() for tensor in call[:5]))
    with selected_for("sm_80"), emulated("sm_80") as launches:
        out, softmax_stats = forward(given, SCALE, 0.0)
        gradients = backward(d_out.float(), out, softmax_stats, given, SCALE, 0.0)
    assert not [error for launch in launches for error in launch.report.errors]
    golden = by_reference(given, d_out, torch.float64)
    for field, actual, exact in zip(given._fields, gradients, golden[1:], strict=False):
        assert actual is not None
        assert_gradients_close_fp32(field, actual, exact, golden[1:])
