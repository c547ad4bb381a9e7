"""The checks of tests/gpu/test_kernels.py, which need a GPU there, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.draws import KERNEL_LIMITS
from tests.gpu.layouts import LAYOUTS, POSITIONS, check_layout, check_packed


@pytest.mark.parametrize(("layout", "width"), [*zip(LAYOUTS, (40, 72) * 4, strict=False)])
def test_layouts(layout: str, width: int) -> None:
    outside = list(POSITIONS)[list(LAYOUTS).index(layout) % 3]
    check_layout(layout, width, outside, torch.float16, "cpu", length=37)


@pytest.mark.parametrize("seed", range(4))
def test_packed(seed: int) -> None:
    dtype = "float16" if seed % 2 else "float32"
    check_packed(seed, KERNEL_LIMITS._replace(dtypes=(dtype,), widths=(8, 40), longest=20), "cpu")
