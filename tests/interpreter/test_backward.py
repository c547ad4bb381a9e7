"""The backward kernels in Triton's interpreter: every gradient within its rounding; masked rows, empty tensors, NaN, strides,
extreme logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.expected import assert_table_gradient
from tests.interpreter.launch import (
    LENGTHS,
    UNEVEN_LENGTHS,
    all_gradients,
    assert_rounding_errors,
    check_backward,
    check_gradients,
    has_wide_index,
    resolve,
    rounding_budget,
    selectable,
)
from tests.samples import with_different_strides
from tests.tolerance import assert_bit_equal, within
from triton_relattn import RelativePositions
from triton_relattn.kernels import bwd_dkv
from triton_relattn.kernels.backward import backward
from triton_relattn.kernels.call import SMALLEST_SCALE, PerQuery
from triton_relattn.kernels.config import selection
from triton_relattn.kernels.config.selection import TileConfig
from triton_relattn.kernels.forward import forward
from triton_relattn.testing import make_inputs


def tile(block_m: int, block_n: int) -> TileConfig:
    return TileConfig(block_m, block_n, 4, 1)


# Several tiles each way in short sequences, and no two kernels with the same.
SMALL = {"forward": tile(32, 32), "dq": tile(32, 16), "dkv": tile(32, 32), "dtable": tile(16, 16)}
TABLE_KINDS = ("full", "clamp", "zero")


def table_of_kind(kind: str, num_queries: int, num_keys: int) -> RelativePositions:
    """A table with a row for every pair, or a short one around the middle of the keys."""
    if kind == "full":
        return RelativePositions(-num_queries, num_keys)
    return RelativePositions(-7, 9, kind)  # type: ignore[arg-type]


def sampled_pairs() -> list[Any]:
    """All pairs of lengths; by default one number of keys with each number of queries, each once."""
    pairs = [(m, n) for m in range(len(LENGTHS)) for n in range(len(LENGTHS))]
    return [
        pytest.param(LENGTHS[m], LENGTHS[n], marks=() if n == (5 * m + 8) % len(LENGTHS) else pytest.mark.slow) for m, n in pairs
    ]


@pytest.mark.parametrize(("num_queries", "num_keys"), sampled_pairs())
def test_lengths(num_queries: int, num_keys: int) -> None:
    """Lengths around the block sizes; causal and with an offset for some; a table that covers all pairs, or clamps, or ends."""
    for seed, kind in enumerate(TABLE_KINDS):
        positions = table_of_kind(kind, num_queries, num_keys)
        inputs = make_inputs(1, 1, num_queries, num_keys, 16, num_rows=positions.num_rows, dtype=torch.float32, seed=seed)
        is_causal = (num_queries + num_keys + seed) % 2 == 1
        offset = num_keys - num_queries if (num_keys + seed) % 3 == 0 else 0
        if kind == "full":
            positions = RelativePositions(positions.first - offset, positions.last - offset)
        check_backward(inputs, positions=positions, is_causal=is_causal, query_offset=offset)


@pytest.mark.parametrize(("num_queries", "num_keys"), [*UNEVEN_LENGTHS, pytest.param(1023, 1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("num_rows", "lower_right", "is_causal"),
    [
        (33, True, True),
        (2047, False, False),
        pytest.param(33, False, True, marks=pytest.mark.slow),
        pytest.param(33, True, False, marks=pytest.mark.slow),
        pytest.param(2047, True, False, marks=pytest.mark.slow),
    ],
)
def test_cross_attention(num_queries: int, num_keys: int, num_rows: int, lower_right: bool, is_causal: bool) -> None:
    """Very uneven lengths, aligned at the upper left or the lower right corner, with a short and a long table."""
    inputs = make_inputs(1, 1, num_queries, num_keys, 16, 24, num_rows=num_rows, dtype=torch.float16, seed=1)
    check_backward(inputs, query_offset=num_keys - num_queries if lower_right else 0, is_causal=is_causal)


@pytest.mark.parametrize("width", [1, 3, 16, 21, 40, 59, 80, 111, 128, 192, 256])
@pytest.mark.parametrize("kind", ["clamp", "zero"])
def test_widths(width: int, kind: Any) -> None:
    """Widths that are no power of two are padded inside the kernels; the storage beyond them holds NaN."""
    value_width, positions = (
        (width, RelativePositions(-15, 9, kind)) if kind == "clamp" else (24, RelativePositions(-40, 50, kind))
    )
    inputs = make_inputs(
        1, 2, 21, 35, width, value_width, num_rows=positions.num_rows, per_head=True, dtype=torch.float16, seed=width
    )
    check_backward(with_different_strides(inputs), positions=positions)


@pytest.mark.parametrize(
    ("kernel", "config"),
    [(kernel, config) for kernel in ("dq", "dkv", "dtable") for config in selectable(kernel)],
    ids=str,
)
def test_every_selectable_tile(kernel: str, config: TileConfig) -> None:
    """A full, a clamped and a bounded table, and none, with lengths that divide no block; nor do they divide the queries over
    which a block is spread in the kernels that read dS."""
    tables: tuple[tuple[Any, bool, torch.dtype], ...] = (
        ("full", True, torch.float32),
        (RelativePositions(-3, 7), False, torch.float16),
        (RelativePositions(-config.block_m - 5, 2, "zero"), True, torch.float32),
        (None, False, torch.float16),
    )
    for seed, (positions, is_causal, dtype) in enumerate(tables):
        if positions is None and kernel == "dtable":
            continue
        # With half as many or fewer the kernels that read dS take a smaller tile.
        num_queries = 21 + config.block_m * (1 if kernel == "dkv" else 8 // dtype.itemsize)
        num_keys = config.block_m + 2 * config.block_n + 9
        positions = RelativePositions(-num_queries - 30, num_keys) if positions == "full" else positions
        num_rows = None if positions is None else positions.num_rows
        inputs = make_inputs(1, 1, num_queries, num_keys, 16, num_rows=num_rows, dtype=dtype, seed=seed)
        arguments = {"is_causal": is_causal, "query_offset": 19, "key_lengths": torch.tensor([num_keys - 5])}
        check_backward(inputs, {kernel: config}, positions=positions, **arguments)


BORDERS = ((-3, 7, 0), (-20, -20, 17), (5, 6, -9))
"""First and last row, and the offset: borders of the table at other places of the tiles, or close to each other."""
TILES_AT_BORDERS = (  # of the dkv, the dq and the dtable kernel
    ((16, 16), (32, 16), (64, 64)),
    ((32, 16), (16, 32), (16, 16)),
    ((64, 32), (64, 64), (32, 16)),
    ((32, 32), (16, 16), (32, 32)),
)


@pytest.mark.parametrize(("keys", "queries", "table"), TILES_AT_BORDERS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_tiles_at_the_borders_of_a_table(
    keys: tuple[int, int], queries: tuple[int, int], table: tuple[int, int], is_causal: bool
) -> None:
    """With a clamped table each pair beyond it is counted once, by the dq kernel, and each within by the dtable kernel, whatever
    tiles the dkv kernel has near the border and beyond."""
    tiles = {"dkv": tile(*keys), "dq": tile(*queries), "dtable": tile(*table)}
    for seed, (first, last, offset) in enumerate(BORDERS):
        inputs = make_inputs(1, 1, 51, 59, 16, num_rows=last - first + 1, dtype=torch.float32, seed=seed)
        check_backward(inputs, tiles, positions=RelativePositions(first, last), query_offset=offset, is_causal=is_causal)


TABLES: dict[str, RelativePositions] = {
    "exact": RelativePositions(-44, 57),
    "longer": RelativePositions(-70, 80),
    "shorter": RelativePositions(-20, 8),
    "one_row": RelativePositions(0, 0),
    "one_row_future": RelativePositions(17, 17),
    "two_rows": RelativePositions(-1, 0),
    "three_rows": RelativePositions(-16, -14),
    "causal_rows": RelativePositions(-44, 0),
    "wholly_past": RelativePositions(-500, -200),
    "past": RelativePositions(-40, -16),
    "wholly_future": RelativePositions(300, 333),
    "future": RelativePositions(16, 48),
}


@pytest.mark.parametrize("outside", ["clamp", "zero"])
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("seeds", [(0, 1), pytest.param((2,), marks=pytest.mark.slow)], ids=["default", "more"])
def test_tables(table: str, outside: Any, seeds: tuple[int, ...]) -> None:
    """Tables that cover all, part or none of the relative positions, shared and per head, with an offset and lengths."""
    positions = RelativePositions(TABLES[table].first, TABLES[table].last, outside)
    for seed in seeds:
        batch, heads, is_causal, query_offset = ((1, 1, False, 0), (1, 2, True, 20), (2, 1, False, -13))[seed]
        inputs = make_inputs(
            batch, heads, 45, 58, 16, num_rows=positions.num_rows, per_head=seed == 1, dtype=torch.float32, seed=seed
        )
        lengths = (None, torch.tensor([49]), torch.tensor([58, 37]))[seed]
        tiles = {"dq": tile(32, 32), "dkv": tile(64, 32), "dtable": tile(32, 32)} if seed == 1 else None
        check_backward(inputs, tiles, positions=positions, is_causal=is_causal, query_offset=query_offset, key_lengths=lengths)


@pytest.mark.parametrize("scale", [-0.4, 0.0])
@pytest.mark.parametrize("kind", TABLE_KINDS)
def test_scale(scale: float, kind: str) -> None:
    """A negative scale turns the order of the logits round; with zero, all keys are equal and only value has a gradient.

    The kernels take 2**-60 for zero, which leaves as much of the other gradients.
    """
    positions = table_of_kind(kind, 37, 45)
    inputs = make_inputs(1, 2, 37, 45, 16, num_rows=positions.num_rows, dtype=torch.float32, seed=3)
    results = all_gradients(inputs, SMALL, positions=positions, scale=scale)
    vanishing = 512 * SMALLEST_SCALE  # times sums of 45 products of dS with numbers of order one
    results = {name: result.masked_fill(result.abs() < vanishing, 0) for name, result in results.items()}
    check_gradients(results, inputs, positions=positions, scale=scale)
    assert [name for name, result in results.items() if name[:2] == "d_" and not result.any()] == (
        [] if scale else ["d_query", "d_key", "d_rel_key"]
    )


@pytest.mark.parametrize("through", ["out", "lse"])
@pytest.mark.parametrize("kind", TABLE_KINDS)
def test_gradient_through_one_result(through: str, kind: str) -> None:
    """Only out is used, or only lse; value does not take part in lse."""
    positions = table_of_kind(kind, 37, 45)
    inputs = make_inputs(1, 2, 37, 45, 16, num_rows=positions.num_rows, dtype=torch.float16, seed=3)
    unused = "d_lse" if through == "out" else "d_out"
    inputs = inputs._replace(**{unused: torch.zeros_like(getattr(inputs, unused))})
    results = check_backward(inputs, SMALL, positions=positions)
    assert bool(results["d_value"].any()) == (through == "out") and results["d_rel_key"].any()


SHARP_CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    # length, rows, arguments
    "full": (128, 255, {}),
    "causal": (192, 192, {"positions": RelativePositions(-191, 0), "is_causal": True}),
    "clipped": (160, 33, {}),
}


class WithDelta:
    """The dkv kernel, launched with another delta than the one it is given."""

    def __init__(self, kernel: Any, delta: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.kernel, self.delta = kernel, delta

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*, per_query: PerQuery, **kwargs: Any) -> None:
            delta, strides = per_query.deltas
            self.kernel[grid](per_query=per_query._replace(deltas=(self.delta(delta), strides)), **kwargs)

        return launch


@pytest.mark.parametrize("case", SHARP_CASES)
def test_table_gradient_needs_the_exact_delta(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharp attention: as good as dS rounded once, and far from that if the dkv kernel gets rowsum(out * d_out) - d_lse.

    out was rounded: every dS of a row is off by the same amount then, which adds up in the table's sum over all queries.
    """
    length, num_rows, arguments = SHARP_CASES[case]
    inputs = make_inputs(1, 2, length, length, 32, num_rows=num_rows, dtype=torch.float16, seed=1, sharp=True)
    results = check_backward(inputs, **arguments)
    rounded = (results["out"].float() * inputs.d_out.float()).sum(-1) - inputs.d_lse
    deltas = []

    def replaced(delta: torch.Tensor) -> torch.Tensor:
        deltas.append(delta)
        return rounded

    monkeypatch.setattr(bwd_dkv, "dkv_kernel", WithDelta(bwd_dkv.dkv_kernel, replaced))
    spoilt = all_gradients(inputs, **arguments)["d_rel_key"]
    (exact,) = deltas
    assert 0 < (exact - rounded).abs().max() < 0.05 * exact.abs().max()
    with pytest.raises(AssertionError, match="times the allowance"):
        assert_table_gradient("d_rel_key", spoilt, inputs, **arguments)


# Several tiles each way in short sequences.
SMALL_TILES = {"forward": tile(32, 32), "dq": tile(32, 16), "dkv": tile(32, 32), "dtable": tile(32, 32)}
FULL, CLAMP, ZERO = RelativePositions(-60, 60), RelativePositions(-4, 6), RelativePositions(-4, 6, "zero")
POSITIONS = {"full": FULL, "clamp": CLAMP, "zero": ZERO}


@pytest.mark.usefixtures("guarded_kernels")
@pytest.mark.parametrize("outside", ["clamp", "zero"])
def test_lengths_beyond_the_keys_are_limited(outside: Any) -> None:
    """A GPU's key_lengths are not checked: the kernels limit them to [0, Nk] instead of reading beyond the keys."""
    inputs = make_inputs(2, 1, 40, 21, 16, num_rows=9, dtype=torch.float32, seed=4)
    tensors, spec = resolve(inputs, positions=RelativePositions(-4, 4, outside))

    def gradients(*lengths: int) -> list[torch.Tensor]:
        limited = tensors._replace(key_lengths=torch.tensor(lengths))
        found = backward(inputs.d_out, inputs.d_lse, *forward(limited, spec)[::2], limited, spec, tiles=SMALL_TILES)
        return [gradient for gradient in found if gradient is not None]

    results = gradients(1000, -7)
    assert len(results) == 4
    for result, expected in zip(results, gradients(21, 0), strict=True):
        assert expected.any() and torch.equal(result, expected)


@pytest.mark.parametrize("outside", ["clamp", "zero"])
def test_wide_offsets(outside: Any) -> None:
    """Tensors whose rows lie 2**26 and more elements apart are addressed in 64 bits; the storage is mapped but hardly touched."""
    positions = RelativePositions(-12, 12, outside)
    inputs = make_inputs(1, 1, 33, 33, 8, num_rows=25, dtype=torch.float32, seed=6)
    storage = torch.from_numpy(np.memmap("/dev/zero", dtype=np.float32, mode="c", shape=(32 * 2**26 + 8,)))
    table = torch.from_numpy(np.memmap("/dev/zero", dtype=np.float32, mode="c", shape=(24 * 2**27 + 8,)))
    assert inputs.rel_key is not None
    table = table.as_strided((25, 8), (2**27, 1)).copy_(inputs.rel_key)
    d_out = storage.as_strided(inputs.d_out.shape, (0, 0, 2**26, 1)).copy_(inputs.d_out)
    assert all(has_wide_index(tensor) for tensor in (table, d_out)) and not has_wide_index(inputs.rel_key)
    expected = all_gradients(inputs, SMALL_TILES, positions=positions)
    for wide in (inputs._replace(rel_key=table), inputs._replace(d_out=d_out)):
        assert_bit_equal(all_gradients(wide, SMALL_TILES, positions=positions), expected)


@pytest.mark.usefixtures("guarded_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_wide_offsets_of_spread_queries(dtype: torch.dtype) -> None:
    """Tiles whose queries lie apart, to read the workspace 16 bytes at a time, have more rows than those of other kernels."""
    inputs = make_inputs(1, 1, 300, 20, 8, num_rows=319, dtype=dtype, seed=6)
    stride = 2**23 - 1024  # times the rows of most tiles, 256 at most, it is below 2**31
    storage: Any = np.memmap("/dev/zero", dtype=inputs.query.numpy().dtype, mode="c", shape=(299 * stride + 108,))
    query, d_out = (
        torch.from_numpy(storage)[each:].as_strided(inputs.query.shape, (0, 0, stride, 1)).copy_(tensor)
        for each, tensor in ((0, inputs.query), (100, inputs.d_out))
    )
    positions = RelativePositions(-299, 19)
    tiles = {**SMALL_TILES, "dtable": tile(128, 32), "dq": tile(64, 32)}
    expected = all_gradients(inputs, tiles, positions=positions)
    assert_bit_equal(all_gradients(inputs._replace(query=query, d_out=d_out), tiles, positions=positions), expected)


@pytest.mark.thorough
@pytest.mark.parametrize(("per_head", "kind"), [(False, "clamp"), (True, "full")])
def test_number_of_splits(per_head: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many programs share a table's sum, it is the same but for the order of summation; also with idle ones."""
    positions = POSITIONS[kind]
    inputs = make_inputs(2, 2, 33, 30, 16, num_rows=positions.num_rows, per_head=per_head, dtype=torch.float32, seed=8)
    budget = rounding_budget(inputs, positions=positions)["d_rel_key"]
    found = []
    for splits in (1, 2, 5):
        monkeypatch.setattr(selection, "table_splits", lambda *_, splits=splits: splits)
        results = all_gradients(inputs, SMALL_TILES, positions=positions)  # two blocks of queries in each sum
        assert_rounding_errors(results, inputs, positions=positions)
        found.append(results["d_rel_key"])
    for other in found[1:]:
        # The budget has a unit of the sum of all magnitudes; the order of four summands moves the sum by at most four.
        within("another order", (other - found[0]).abs(), 4 * budget)
    assert any(not torch.equal(other, found[0]) for other in found[1:])  # the number did reach the launch
