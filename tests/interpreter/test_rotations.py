"""Rotations in registers (kernels/tile/registers.py) equal those by a gather, alone and in all kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.check import Way, check
from tests.interpreter.launch import all_results, check_forward_backward
from tests.samples import Sample
from tests.tolerance import assert_near
from triton_relattn import RelativePositions
from triton_relattn.kernels.call import TileConstants
from triton_relattn.kernels.config.tile_config import KERNELS, READERS, TileConfig
from triton_relattn.kernels.tile.band import Table, bias_tile
from triton_relattn.kernels.tile.registers import pack, rotate_rows, step_back_words, unpack
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


@triton.jit
def words_kernel(low, high, before, once, twice, out_low, out_high, DTYPE: tl.constexpr, SATURATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The elements of 64 words, some of them one or two chunks back."""
    n = tl.arange(0, 64)
    words = pack(tl.load(low + n), tl.load(high + n), DTYPE, SATURATE)
    # The earlier words hold the negated values.
    older = pack(-tl.load(low + n), -tl.load(high + n), DTYPE, SATURATE)
    words = step_back_words(words, older, tl.load(once + n) != 0, tl.load(twice + n) != 0)
    first, second = unpack(words, DTYPE)
    tl.store(out_low + n, first.to(tl.float32))
    tl.store(out_high + n, second.to(tl.float32))


@pytest.mark.parametrize("saturate", [False, True])
def test_words(saturate: bool) -> None:
    """Packed values are rounded once, beyond float16's range to its largest value or infinity; steps back are half words."""
    generator = torch.Generator().manual_seed(0)
    low, high = (torch.randn(64, generator=generator) * 100 for _ in range(2))
    low[:4] = torch.tensor([65504.0, 65519.0, 1e6, -1e6])
    steps = torch.arange(64) % 3  # back
    results = torch.empty(2, 64)
    words_kernel[(1,)](low, high, low, (steps > 0).int(), (steps > 1).int(), *results, tl.float16, saturate)
    low, high = (values.clamp(-65504, 65504) if saturate else values for values in (low, high))
    low, high = low.half().float(), high.half().float()
    chunks = torch.stack([high, low, -high, -low])  # the newest first
    expected = torch.stack([chunks.gather(0, (steps + place)[None])[0] for place in (1, 0)])
    assert torch.equal(results, expected) and bool(results.isfinite().all()) == saturate


def all_tiles(config: TileConfig, carry: str | None = "scores") -> dict[str, TileConfig]:
    """The configuration for all kernels, with ``carry`` in the forward, and a gather in kernels that read dS."""
    tiles = {**dict.fromkeys(KERNELS, config), "forward": replace(config, carry=carry)}
    return tiles | {kernel: replace(config, rotation="gather") for kernel in READERS}


def small_integers(inputs: Inputs) -> Inputs:
    """Inputs of small integers, whose terms are exact in float16."""
    names = ("query", "rel_key", "rel_value", "d_out")
    return inputs._replace(**{name: (2 * getattr(inputs, name)).round() for name in names})


@pytest.mark.thorough
@pytest.mark.parametrize("carry", ["scores", None])
def test_tiny_gradients(carry: str | None) -> None:
    """Products of d_out with rel_value are not rounded to float16, where tiny ones would vanish."""
    inputs = small_integers(make_inputs(1, 1, 70, 90, 16, num_rows=41, rel_value=True, dtype=torch.float32, seed=5))
    inputs = inputs._replace(d_out=inputs.d_out * 2.0**-40, d_lse=torch.zeros_like(inputs.d_lse))
    config = TileConfig(64, 64, 4, 1)
    gathered = all_results(inputs, all_tiles(config, carry))
    for name, result in all_results(inputs, all_tiles(replace(config, rotation="registers"), carry), True).items():
        assert_near(name, result, gathered[name])


@triton.jit
def bias_kernel(bias, target, relative_position, first, last, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """target = the bias of a tile that begins at this relative position, in the order of its columns."""
    places = tl.arange(0, TILE.block_m)[:, None] * TILE.block_n + tl.arange(0, TILE.block_n)[None, :]
    table = Table(0, 1.0, (bias, 1), 1.0, first, last)
    tl.store(target + places, bias_tile(table, relative_position, TILE))


@pytest.mark.parametrize("coverage", ["full", "clamp", "zero"])
@pytest.mark.parametrize("rotation", ["gather", "registers"])
@pytest.mark.parametrize(("block_m", "block_n", "warps"), TILES)
def test_terms_of_a_bias(block_m: int, block_n: int, warps: int, rotation: str, coverage: str) -> None:
    """The bias of each pair in float32, beyond the table that of its ends, or zero."""
    first, last = (-200, 250) if coverage == "full" else (-30, 17)
    bias = 100 + torch.randn(last - first + 1, generator=torch.Generator().manual_seed(0))
    place, m = torch.arange(block_n), torch.arange(block_m)[:, None]
    key = place if rotation == "gather" else place % 2 * (block_n // 2) + place // 2
    for start in (-37, 5, 90):
        target = torch.full((block_m, block_n), torch.nan)
        # round_terms does not apply to a bias alone, and is ignored.
        tile = TileConstants(block_m, block_n, rotation, warps, round_terms=True, coverage=coverage, has_bias=True)
        bias_kernel[(1,)](bias, target, start, first, last, tile)
        positions = RelativePositions(first, last, "clamp" if coverage == "clamp" else "zero")
        row, applies = positions.rows(start + key - m)
        assert torch.equal(target, bias[row] * applies)


def test_terms_beyond_float16() -> None:
    """Terms beyond float16's range are rounded to its largest value, so that results are finite."""
    inputs = make_inputs(1, 1, 40, 40, 16, num_rows=79, dtype=torch.float16, seed=2)
    assert inputs.rel_key is not None
    query, table = 300 * inputs.query, 300 * inputs.rel_key
    assert float((query.double() @ table.double().mT).abs().max()) > 65504
    tiles = all_tiles(TileConfig(64, 32, 4, 1, rotation="registers"))
    tiles |= dict.fromkeys(("stored_dq", "dtable"), TileConfig(32, 32, 4, 1))
    results = all_results(inputs._replace(query=query, rel_key=table), tiles, True)
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
    inputs = make_inputs(1, 2, 50, 60, 16, num_rows=21, rel_key=False, rel_bias=True, dtype=torch.float32, seed=3)
    tiles = all_tiles(TileConfig(32, 32, 2, 1, rotation=rotation))
    check_forward_backward(inputs._replace(query=inputs.query / 2.0**26), tiles, True, scale=2.0**26)
