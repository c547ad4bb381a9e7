"""The kernels on a GPU with tensors as they come: strided, unaligned, packed, and of odd widths.

tests/interpreter/test_gpu_layouts.py runs the same checks in the interpreter.
"""

from __future__ import annotations

import pytest
import torch

from tests.draws import compiled
from tests.gpu.layouts import LAYOUTS, POSITIONS, check_layout, check_packed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here"),
]
DEVICE = "cuda"


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
    check_packed(seed, compiled(dtype)._replace(widths=(40, 64, 72)), DEVICE)
