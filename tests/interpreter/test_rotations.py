"""Rotations in registers (kernels/tile/registers.py) equal those by a gather, alone and in all kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.check import Way, check, compute
from tests.samples import Sample
from tests.tolerance import assert_near
from triton_relattn.kernels.config.tile_config import KERNELS, READERS, TileConfig
from triton_relattn.kernels.tile.registers import rotate_rows
from triton_relattn.testing import Inputs, make_inputs

TILES = [
    *((64, 64, 4), (64, 64, 2), (128, 64, 8), (128, 64, 2), (64, 32, 4), (32, 32, 2)),
    *((32, 16, 1), (16, 16, 1), (128, 128, 8), (128, 128, 2)),
]
"""Rows, columns and warps."""


@triton.jit
def rotate_kernel(source, target, M: tl.constexpr, W: tl.constexpr, WARPS: tl.constexpr, BACK: tl.constexpr):  # type: ignore[no-untyped-def]
    """target = the source, rotated."""
    places = tl.arange(0, M)[:, None] * W + tl.arange(0, W)[None, :]
    tl.store(target + places, rotate_rows(tl.load(source + places), M, W, WARPS, BACK))


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(("block_m", "block_n", "warps"), TILES)
def test_rows_are_rotated_as_by_a_gather(block_m: int, block_n: int, warps: int, back: bool) -> None:
    width = block_n // 2
    source = torch.randperm(block_m * width).view(block_m, width).float()
    target = torch.full_like(source, -1)
    rotate_kernel[(1,)](source, target, block_m, width, warps, back)
    m, n = torch.arange(block_m)[:, None], torch.arange(width)
    assert torch.equal(target, source.gather(1, (n + m if back else n - m) % width))


def all_tiles(config: TileConfig, carry: str | None = "scores") -> dict[str, TileConfig]:
    """The configuration for all kernels, with ``carry`` in the forward, and a gather in kernels that read dS."""
    tiles = {**dict.fromkeys(KERNELS, config), "forward": replace(config, carry=carry)}
    return tiles | {kernel: replace(config, rotation="gather") for kernel in READERS}


def inputs_of_integers() -> Inputs:
    """Inputs of small integers, whose terms are exact in float16, and a tiny d_out."""
    inputs = make_inputs(1, 1, 70, 90, 16, num_rows=41, rel_value=True, dtype=torch.float32, seed=5)
    inputs = inputs._replace(**{name: (2 * getattr(inputs, name)).round() for name in ("query", "rel_key", "rel_value", "d_out")})
    return inputs._replace(d_out=inputs.d_out * 2.0**-40, d_lse=torch.zeros_like(inputs.d_lse))


@pytest.mark.thorough
@pytest.mark.parametrize("carry", ["scores", None])
def test_tiny_gradients(carry: str | None) -> None:
    """Products of d_out with rel_value are not rounded to float16, where tiny ones would vanish."""
    found = []
    for rotation in ("gather", "registers"):
        way = Way("triton", tiles=all_tiles(TileConfig(64, 64, 4, 1, rotation=rotation), carry))
        with way.computing(Sample(round_terms=rotation == "registers")):
            found.append(way.results(inputs_of_integers()))
    for name, result in found[1].items():
        assert_near(name, result, found[0][name])


def test_terms_beyond_float16() -> None:
    """Terms beyond float16's range are rounded to its largest value, so that results are finite."""
    sample = Sample(num_queries=40, num_keys=40, tables=("rel_key",), positions=(-39, 39, "clamp"), dtype="float16", seed=2)
    query, table = 300 * sample.numbers("query"), 300 * sample.numbers("rel_key")
    assert float((query.double() @ table.double().mT).abs().max()) > 65504
    tiles = all_tiles(TileConfig(64, 32, 4, 1, rotation="registers"))
    tiles |= dict.fromkeys(("stored_dq", "dtable"), TileConfig(32, 32, 4, 1))
    results = compute(replace(sample, round_terms=True), Way("triton", tiles=tiles), query=query, rel_key=table)
    assert all(bool(result.isfinite().all()) for result in results.values())


IN_FLOAT32: dict[str, dict[str, Any]] = {
    # A bias alone, with different tiles in each kernel
    "full": {"tables": ("rel_bias",), "positions": (-79, 79, "clamp")},
    "clamp": {"tables": ("rel_bias",), "positions": (-10, 10, "clamp")},
    "zero": {"tables": ("rel_bias",), "positions": (-15, 5, "zero")},
    # Terms divided by a scale near 0 overflow float16
    "no products with keys": {"tables": ("rel_key",), "positions": (-79, 79, "clamp"), "scale": 0.0, "rel_scale": 0.125},
    "a bias alone, no products": {"tables": ("rel_bias",), "scale": 0.0},
    "by the key's position": {"tables": ("rel_p2c",), "scale": 0.0, "rel_scale": 0.25},
    "small scale": {"tables": ("rel_bias",), "positions": (-79, 79, "clamp"), "scale": 5e-6},
    "small and negative scale": {"tables": ("rel_key", "rel_bias"), "scale": -1e-5, "rel_scale": 0.125, "softcap": 20.0},
}


@pytest.mark.parametrize("rotation", ["gather", "registers"])
@pytest.mark.parametrize("case", IN_FLOAT32)
def test_terms_that_stay_float32(case: str, rotation: str) -> None:
    """A bias alone, and terms at a scale at which float16 cannot hold them, are not rounded. Results have float32's accuracy."""
    fields = {"positions": (-10, 10, "clamp"), **IN_FLOAT32[case]}
    sample = Sample(**{"key_heads": 2, "num_queries": 70, "num_keys": 90, "round_terms": True, "seed": 6, **fields})
    tiles = all_tiles(TileConfig(64, 64, 2, 1, rotation=rotation))  # two rows of 16 for each warp
    if "scale" not in fields:
        tiles |= {"forward": TileConfig(64, 32, 4, 1, rotation=rotation), "dkv": TileConfig(32, 32, 2, 1, rotation=rotation)}
    check(sample, Way("triton", tiles=tiles))


@pytest.mark.parametrize("rotation", ["gather", "registers"])
def test_a_large_scale(rotation: str) -> None:
    """A bias divided by a large scale would underflow float16."""
    fields: dict[str, Any] = {"key_heads": 2, "tables": ("rel_bias",), "positions": (-10, 10, "clamp"), "scale": 2.0**26}
    sample = Sample(num_queries=50, num_keys=60, **fields, round_terms=True, seed=3)
    way = Way("triton", tiles=all_tiles(TileConfig(32, 32, 2, 1, rotation=rotation)))
    check(sample, way, query=sample.numbers("query") / 2.0**26)
