"""Kernels of attention on a grid compile for GPUs that this machine lacks, fit, and are shared by grids of all sizes."""

from __future__ import annotations

import pytest
import torch

from bench.cases.features import on_grid
from bench.compiled import recorded_launches
from triton_relattn.kernels.config.architectures import architecture_of
from triton_relattn.kernels.grid.backward import backward
from triton_relattn.kernels.grid.forward import forward

TARGETS = ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942", "sm_75")
GRIDS = (((64, 64), 0), ((14, 14), 1), ((3, 70), 0))
"""Sides, and positions before the grid."""
QUICK = {("sm_86", 80), ("sm_90", 64), ("gfx942", 64)}


@pytest.mark.parametrize(
    ("target", "width"),
    [
        pytest.param(target, width, marks=() if (target, width) in QUICK else pytest.mark.slow)
        for target in TARGETS
        for width in (64, 80, 256)
    ],
)
def test_every_kernel_fits(target: str, width: int) -> None:
    """On known GPUs and an unknown one, for grids as wide as a tile, narrower and wider, with a class token and without."""
    for sides, prefix in GRIDS:
        query = torch.empty(1, 1, prefix + sides[0] * sides[1], width, dtype=torch.bfloat16)
        tensors, spec = on_grid(sides, query)
        with recorded_launches(target) as launches:
            out, softmax_stats = forward(tensors, *spec)
            backward(out, out, softmax_stats, tensors, *spec)
        assert [launch.name for launch in launches] == ["grid_forward", "grid_dq", "grid_dkv"]
        for launch in launches:
            assert launch.kernel.metadata.shared <= architecture_of(target).shared_memory, (launch.name, sides)


def test_one_compilation_for_many_sizes() -> None:
    """Sides are runtime arguments: grids with equally cut tiles share their kernels."""
    with recorded_launches("sm_90") as launches:
        for sides in ((13, 15), (11, 13), (9, 15)):
            tensors, spec = on_grid(sides, torch.empty(1, 2, sides[0] * sides[1], 64, dtype=torch.bfloat16))
            forward(tensors, *spec)
    assert len({launch.kernel.hash for launch in launches}) == 1
