"""The checks of tests/gpu/test_layouts.py, which need a GPU there, in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.layouts import LAYOUTS, POSITIONS, check_layout, check_packed


@pytest.mark.parametrize(("layout", "width"), [*zip(LAYOUTS, (40, 72) * 4, strict=False)])
def test_layouts(layout: str, width: int) -> None:
    outside = list(POSITIONS)[list(LAYOUTS).index(layout) % 3]
    check_layout(layout, width, outside, torch.float16, "cpu", length=37)


@pytest.mark.parametrize("seed", range(4))
def test_packed(seed: int) -> None:
    sizes: dict[str, Any] = {"widths": (8, 40), "value_widths": (8, 24), "rel_widths": (3, 16)}
    check_packed(seed, torch.float16 if seed % 2 else torch.float32, "cpu", **sizes, lengths=(0, 1, 17, 20))
