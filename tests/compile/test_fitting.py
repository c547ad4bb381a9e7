"""Configurations that do not fit in a simulated GPU's small shared memory are replaced by smaller ones."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import triton
from triton.compiler.compiler import CompiledKernel
from triton.runtime.errors import OutOfResources

from bench.cases.features import call
from bench.compiled import Launch, recorded_launches, selected
from triton_relattn.kernels.backward import backward
from triton_relattn.kernels.config import selection
from triton_relattn.kernels.config.tile_config import TileConfig
from triton_relattn.kernels.forward import forward

LENGTH, LIMIT = 512, 16_000


@contextmanager
def little_memory(limit: int) -> Iterator[list[Launch]]:
    """Record launches for a sm_90 with this limit of shared memory in bytes."""
    with recorded_launches("sm_90") as launches:
        record = CompiledKernel.run

        def run(kernel: CompiledKernel) -> object:
            if kernel.metadata.shared > limit:
                raise OutOfResources(kernel.metadata.shared, limit, "shared memory")
            return record.fget(kernel)

        CompiledKernel.run = property(run)
        yield launches


@pytest.fixture(autouse=True)
def nothing_replaced() -> Iterator[None]:
    selection._smaller.clear()
    yield
    selection._smaller.clear()


@pytest.mark.thorough
@pytest.mark.parametrize("features", ["clamp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("full_causal", "none"))])
def test_a_smaller_one_takes_its_place(features: str) -> None:
    """All kernels get a smaller configuration, with a warning and matching grids; later calls use it at once."""
    tensors, spec = call(features, torch.bfloat16, 64, length=LENGTH)
    d_lse, softmax_stats = torch.empty(tensors.query.shape[:3]), torch.empty(*tensors.query.shape[:2], 2, LENGTH)
    with little_memory(LIMIT) as launches:
        with pytest.warns(
            RuntimeWarning, match=r"forward: TileConfig\(.*\) does not fit this GPU .*; TileConfig\(.*\) is used instead"
        ):
            forward(tensors, spec)
        with pytest.warns(RuntimeWarning, match="dkv: .* does not fit"):
            backward(tensors.query, d_lse, tensors.query, softmax_stats, tensors, spec)
        assert all(launch.kernel.metadata.shared <= LIMIT for launch in launches)
        tiles = {kernel: selected(kernel, "sm_90", tensors, spec) for kernel in ("forward", "dq", "dkv")}
        grids = {launch.name: launch.grid[0] for launch in launches}
        assert grids["forward"] == 2 * triton.cdiv(LENGTH, tiles["forward"].block_m)
        assert grids["dq"] == 2 * 8 * triton.cdiv(LENGTH, 8 * tiles["dq"].block_m)
        assert grids["dkv"] == 2 * triton.cdiv(LENGTH, tiles["dkv"].block_n)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            forward(*call(features, torch.bfloat16, 64, length=LENGTH - 100))
            backward(tensors.query, d_lse, tensors.query, softmax_stats, tensors, spec)


@pytest.mark.thorough
def test_nothing_fits() -> None:
    """Triton's error is raised if no smaller configuration is left, and at once for a requested configuration."""
    tensors, spec = call("full", torch.bfloat16, 64, length=LENGTH)
    with little_memory(10), pytest.raises(OutOfResources), pytest.warns(RuntimeWarning, match="does not fit"):
        forward(tensors, spec)
    with little_memory(10), pytest.raises(OutOfResources), warnings.catch_warnings():
        warnings.simplefilter("error")
        forward(tensors, spec, TileConfig(64, 64, 4, 2))


def test_smaller_ones_stay_valid() -> None:
    """Halving a configuration gives valid ones, down to the smallest."""
    in_registers = TileConfig(128, 64, 8, 2, rotation="registers")  # whose warps have at least 16 rows
    for config in (TileConfig(128, 64, 8, 3), TileConfig(64, 64, 4, 1), TileConfig(32, 16, 4, 2, None), in_registers):
        steps = 0
        smaller: TileConfig | None = config
        while smaller is not None:
            assert smaller.why_invalid("sm_90", True) is None
            assert (smaller.carry, smaller.rotation) == (config.carry, config.rotation)
            assert smaller.num_warps == config.num_warps or smaller.num_warps * 16 == smaller.block_m
            last, smaller, steps = smaller, smaller.smaller(), steps + 1
        assert (last.block_m, last.block_n, last.num_stages) == (16, 16, 1) and steps < 9
