"""Rotations in registers (kernels/tile/registers.py) equal those by a gather, alone and in all kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.interpreter.launch import all_gradients, check_forward_backward, round_terms
from tests.tolerance import assert_at_most, assert_near
from triton_relattn import RelativePositions
from triton_relattn.kernels.call import TileConstants
from triton_relattn.kernels.config.tile_config import KERNELS, READERS, TileConfig
from triton_relattn.kernels.tile.registers import pack, rotate_rows, step_back_words, unpack
from triton_relattn.kernels.tile.table import Table, bias_tile
from triton_relattn.testing import Inputs, last_place, make_inputs

TILES = [
    (64, 64, 4),
    (64, 64, 2),
    (128, 64, 8),
    (128, 64, 2),
    (64, 32, 4),
    (32, 32, 2),
    (32, 16, 1),
    (16, 16, 1),
    (128, 128, 8),
    (128, 128, 2),
]


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
    rounded = {
        name: (2 * getattr(inputs, name)).round()
        for name in ("query", "rel_key", "rel_query", "rel_value", "rel_bias", "d_out")
        if getattr(inputs, name) is not None
    }
    return inputs._replace(**rounded)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({"num_rows": 259}, {}),
    "clamp": ({"num_rows": 41}, {"is_causal": True}),
    "zero": ({"num_rows": 41, "rel_bias": True}, {"positions": RelativePositions(-30, 10, "zero"), "window_size": (70, 20)}),
    "terms": (
        {"num_rows": 41, "rel_value": True, "rel_width": 16, "per_head": True},
        {"positions": RelativePositions(-30, 10), "dropout_p": 0.3, "key_lengths": torch.tensor([120])},
    ),
}


@pytest.mark.parametrize("rounded", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize(
    ("case", "tile", "carry"),
    [
        ("clamp", (64, 64, 4), "scores"),
        ("zero", (64, 32, 4), "scores"),
        ("terms", (64, 64, 2), None),
        *(
            pytest.param(case, tile, carry, marks=pytest.mark.slow)
            for case in CASES
            for tile in TILES[:6]
            for carry in ("scores", None)
        ),
    ],
)
def test_kernels(
    case: str, tile: tuple[int, int, int], carry: str | None, rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With terms that are exact in float16, results equal those of the gather, up to the order of sums."""
    options, arguments = CASES[case]
    inputs = small_integers(make_inputs(1, 1, 100, 130, 16, dtype=torch.float16, seed=4, **options))
    config = TileConfig(*tile, 1)
    gathered = all_gradients(inputs, all_tiles(config, carry), **arguments)
    round_terms(monkeypatch, rounded)
    results = all_gradients(inputs, all_tiles(replace(config, rotation="registers"), carry), **arguments)
    for name, result in results.items():
        difference = float((result.double() - gathered[name].double()).abs().max())
        assert_at_most(name, difference, 2 * last_place(float(gathered[name].abs().max()), result.dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_float32_terms_obey_the_error_rule(dtype: torch.dtype) -> None:
    inputs = make_inputs(1, 1, 70, 90, 16, num_rows=159, rel_bias=True, dtype=dtype, seed=6, sharp=dtype == torch.float16)
    check_forward_backward(inputs, all_tiles(TileConfig(64, 64, 4, 1, rotation="registers")))


@pytest.mark.thorough
@pytest.mark.parametrize("carry", ["scores", None])
def test_tiny_gradients(carry: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of d_out with rel_value are not rounded to float16, where tiny ones would vanish."""
    inputs = make_inputs(1, 1, 70, 90, 16, num_rows=41, rel_value=True, dtype=torch.float32, seed=5)
    inputs = small_integers(inputs)
    inputs = inputs._replace(d_out=inputs.d_out * 2.0**-40, d_lse=torch.zeros_like(inputs.d_lse))
    config = TileConfig(64, 64, 4, 1)
    gathered = all_gradients(inputs, all_tiles(config, carry))
    round_terms(monkeypatch, True)
    packed = all_gradients(inputs, all_tiles(replace(config, rotation="registers"), carry))
    for name, result in packed.items():
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


ALONE: dict[str, dict[str, Any]] = {
    "full": {"num_rows": 159},
    "clamp": {"num_rows": 21},
    "zero": {"num_rows": 21, "positions": RelativePositions(-15, 5, "zero")},
}


@pytest.mark.parametrize("kind", ALONE)
def test_a_bias_alone_is_not_rounded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """out and all gradients have the accuracy of float32, with different tiles and rotations in each kernel."""
    shape = {name: value for name, value in ALONE[kind].items() if name == "num_rows"}
    arguments = {name: value for name, value in ALONE[kind].items() if name != "num_rows"}
    inputs = make_inputs(1, 2, 70, 90, 16, rel_key=False, rel_bias=True, dtype=torch.float32, seed=6, **shape)
    assert inputs.rel_bias is not None
    inputs = inputs._replace(rel_bias=20 + inputs.rel_bias)  # 80 in the units of scores, where float16 has steps of 1 / 16
    round_terms(monkeypatch, True)
    tiles = {
        "forward": TileConfig(64, 32, 4, 1, rotation="registers"),
        "dq": TileConfig(64, 32, 2, 1, rotation="registers"),
        "dkv": TileConfig(64, 64, 2, 1, rotation="registers"),
    }
    for chosen in (tiles, {kernel: replace(config, rotation="gather") for kernel, config in tiles.items()}):
        check_forward_backward(inputs, chosen, **arguments)


def test_terms_beyond_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms beyond float16's range are rounded to its largest value, so that results are finite."""
    inputs = make_inputs(1, 1, 40, 40, 16, num_rows=79, dtype=torch.float16, seed=2)
    assert inputs.rel_key is not None
    query, table = 300 * inputs.query, 300 * inputs.rel_key
    assert float((query.double() @ table.double().mT).abs().max()) > 65504
    inputs = inputs._replace(query=query, rel_key=table)
    round_terms(monkeypatch, True)
    tiles = all_tiles(TileConfig(64, 32, 4, 1, rotation="registers"))
    results = all_gradients(inputs, {**tiles, "stored_dq": TileConfig(32, 32, 4, 1), "dtable": TileConfig(32, 32, 4, 1)})
    assert all(bool(result.isfinite().all()) for result in results.values())


SCALES: dict[str, tuple[float, dict[str, Any], dict[str, Any], float]] = {
    "by position alone": (0.0, {"num_rows": 119}, {"rel_scale": 0.125}, 1.0),
    "by a bias alone": (0.0, {"num_rows": 21, "rel_key": False, "rel_bias": True}, {}, 1.0),
    "by the key's position": (0.0, {"num_rows": 21, "rel_key": False, "rel_p2c": True}, {"rel_scale": 0.25}, 1.0),
    "small": (1e-4, {"num_rows": 119, "rel_key": False, "rel_bias": True}, {}, 20.0),
    "small and negative": (-1e-5, {"num_rows": 21, "rel_bias": True}, {"rel_scale": 0.125, "softcap": 20.0}, 1.0),
    "large": (2.0**26, {"num_rows": 21, "rel_key": False, "rel_bias": True}, {}, 1.0),
}
"""The scale, tensors, other arguments, and a factor for the bias."""


@pytest.mark.parametrize("rotation", ["gather", "registers"])
@pytest.mark.parametrize("case", SCALES)
def test_scales_beyond_float16(case: str, rotation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms divided by a scale near 0 overflow float16, by a large one they underflow: they stay float32."""
    scale, shape, arguments, bias_factor = SCALES[case]
    inputs = make_inputs(1, 2, 50, 60, 16, dtype=torch.float32, seed=3, **shape)
    inputs = inputs._replace(rel_bias=None if inputs.rel_bias is None else bias_factor * inputs.rel_bias)
    if case == "large":
        inputs = inputs._replace(query=inputs.query / scale)
    round_terms(monkeypatch, True)
    check_forward_backward(inputs, all_tiles(TileConfig(32, 32, 2, 1, rotation=rotation)), scale=scale, **arguments)
