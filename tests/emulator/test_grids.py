"""Attention on a grid as compiled for GPUs, in bfloat16, which the interpreter lacks: error rules and races."""

from __future__ import annotations

import pytest
import torch

from tests.emulator.way import Emulator
from tests.grids import Case, assert_right, results, tensors
from tests.samples import Sample

CASES = {
    "a window": Case((14, 14), width=64, value_width=64),
    "as wide as a tile": Case((2, 64), width=64, value_width=64),
    "class token": Case((5, 7), prefix=1, width=64, value_width=64),
    "strips": Case((3, 70), prefix=70, width=64, value_width=64),
    "wide heads": Case((6, 14), width=80, value_width=80),
}


def check(case: Case, target: str, dtype: torch.dtype) -> None:
    given, way = tensors(case, dtype), Emulator(target=target)
    with way.computing(Sample()):
        ours = results("triton", case, given)
    assert [launch.name for launch in way.launches] == ["grid_forward", "grid_dq", "grid_dkv"]
    assert_right(case, ours, given)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", CASES)
def test_error_rule(name: str, target: str) -> None:
    """out and gradients obey the error rule, and the emulator finds no races."""
    check(CASES[name], target, torch.bfloat16)


@pytest.mark.parametrize("name", ["as wide as a tile", "class token"])
def test_lanes_agree_in_float32(name: str) -> None:
    """Without matrix units, lanes that hold copies of the same sum store the same bits."""
    check(CASES[name], "sm_80", torch.float32)
