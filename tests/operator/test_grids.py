"""Attention on a grid: every way to compute it, with the sides, cuts, numbers and dtypes that it can have, and invalid calls."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.check import WAYS, Way
from tests.conftest import INTERPRETED, cut_blocks, cut_tiles, forget_warnings, take_processor
from tests.grids import NAMES, Case, Tensors, assert_right, results, tensors
from tests.tolerance import assert_at_most, assert_near, dtype_tolerance
from triton_relattn import append_decomposed_positions, decomposed_relative_attention
from triton_relattn._peaks import PAGE, in_own_process, map_blocks_from, peak_cpu

if INTERPRETED:
    from tests.interpreter.guard import guarded

plain_torch = pytest.mark.skipif(INTERPRETED, reason="runs no kernels")
call: Any = decomposed_relative_attention
append: Any = append_decomposed_positions

SIDES = [(8, 8), (4, 16), (16, 4), (5, 7)]
"""Three whose rows, or several of them, fill tiles of 16, 32 or 64 positions, and one that does not."""
CASES = {
    **{f"{height} x {width} after {prefix}": Case((height, width), prefix=prefix)
       for (height, width), prefix in product(SIDES, (0, 1, 9))},
    "a window": Case((14, 14)),
    "odd sides": Case((5, 7), width=21, batch=3),
    "rows as wide as a tile": Case((3, 64)),
    "several strips": Case((2, 70)),
    "more columns than heads can be wide": Case((1, 270), width=8),
    "9 x 8 after 1": Case((9, 8), prefix=1, value_width=16, batch=2, heads=3),
    "one column": Case((50, 1)),
    "one token": Case((1, 1)),
    "more before the grid than a tile": Case((4, 20), prefix=70),
    "class tokens and strips": Case((2, 70), prefix=9),
    "pooled keys": Case((8, 10), (4, 5), prefix=1, batch=2),
    "pooled in one direction": Case((6, 4), (6, 2), heads=3),
    "pooled to uneven sides": Case((7, 5), (3, 2), width=6),
    "pooled queries": Case((2, 3), (4, 6)),
    "queries pooled unevenly": Case((2, 3), (9, 8)),
    "short tables": Case((5, 4), rows=(5, 3)),
    "long tables": Case((3, 4), rows=(13, 20), batch=2),
    "pooled, other tables": Case((4, 6), (2, 2), rows=(5, 4)),
    "wide heads": Case((4, 5), width=80, value_width=130),
    "scale": Case((5, 7), prefix=2, scale=0.7),
    "negative scale": Case((2, 3), prefix=9, scale=-0.3),
    "no products with keys": Case((5, 7), prefix=1, scale=0.0),
    "dropout": Case((5, 20), prefix=3, batch=2, dropout_p=0.4),
    "everything is dropped": Case((2, 3), dropout_p=1.0),
}  # fmt: skip


def check(case: Case, way: Way, dtype: torch.dtype | None = None, sharp: int = 1) -> tuple[Tensors, Tensors]:
    """Our results and the exact ones, once they are compared."""
    given = tensors(case, dtype or way.dtype, sharp)
    ours = results(way.implementation, case, given)
    return ours, assert_right(case, ours, given, is_exact=not (way.small or way.implementation == "triton"))


@pytest.mark.parametrize("name", CASES)
def test_the_formula(way: Way, name: str) -> None:
    """out and all gradients are those of the formula pair by pair."""
    check(CASES[name], way)


@plain_torch
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.dropout_p])
def test_appended_positions(name: str) -> None:
    """The wider operands give torch's own attention the same results."""

    def appended(case: Case, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
        wide = append(query, key, *tables, **case.arguments)
        assert wide[0].shape[3] == case.width + sum(case.keys)
        return scaled_dot_product_attention(wide[0], wide[1], value, scale=1.0)

    given = tensors(CASES[name], torch.float64)
    assert_right(CASES[name], results(appended, CASES[name], given), given)


CUTS = [(16, 16), (16, 128)] if INTERPRETED else [(1, 1), (3, 200), (8, 1), (8, 1 << 18), (50, 200)]
"""Tiles; or queries of a block, and scores: parts of rows, whole rows, several heads and several sequences."""
CUT = ("a window", "odd sides", "class tokens and strips", "more before the grid than a tile", "pooled keys")


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("way", WAYS[:1], ids=str)
def test_cuts(way: Way, name: str, cut: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The results do not depend on tiles or blocks, with dropout too."""
    if INTERPRETED:
        cut_tiles(monkeypatch, dict.fromkeys(("forward", "dq", "dkv"), cut))
    else:
        cut_blocks(monkeypatch, *cut, 4)
    check(CASES[name]._replace(dropout_p=0.4), way)


FAST = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_amx_fp16_supported")
PROCESSORS: dict[str, tuple[str, ...]] = {"products in float32": (), "products in 16 bits": FAST}
"""torch's flags for processors without and with fast products in bfloat16 and float16."""
LOW = ("9 x 8 after 1", "no products with keys")  # scale=0: 16-bit products of some processors do not write a result
HALVES = [(dtype, name) for dtype in ("float16", "bfloat16") for name in (*LOW, *CUT, "negative scale", "dropout")]
ROUNDED = HALVES[: len(HALVES) // 2] if INTERPRETED else [*(("float32", name) for name in LOW), *HALVES]


@pytest.mark.parametrize(("dtype", "name"), ROUNDED)
@pytest.mark.parametrize("sharp", [1] if INTERPRETED else [1, 8])
@pytest.mark.parametrize("products", list(PROCESSORS)[:1] if INTERPRETED else PROCESSORS)
def test_error_rule(tiled: Way, dtype: str, name: str, sharp: int, products: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors are at most 2 (gradients: 3) times those of plain torch, on processors with fast 16-bit products and on others;
    blockwise, table gradients are sums in float32 that are rounded once."""
    take_processor(monkeypatch, *PROCESSORS[products])
    ours, exact = check(CASES[name], tiled, getattr(torch, dtype), sharp)
    if dtype != "float32" and not INTERPRETED and CASES[name].scale != 0:
        for found, right in zip(ours[4:], exact[4:], strict=True):
            rounding = torch.finfo(found.dtype).eps * right.abs() + dtype_tolerance(torch.float32) * right.abs().max()
            assert_at_most("table, rounded once", (found.double() - right).abs(), rounding)


def test_large_logits(tiled: Way) -> None:
    """Probabilities of a query sum to one: out of equal values is that value, and d_value sums to d_out."""
    case = Case((6, 5), prefix=1)
    query, key, value, *tables, d_out = tensors(case)
    out, *gradients = results(tiled.implementation, case, (300 * query, 30 * key, torch.ones_like(value), *tables, d_out))
    assert_near("out", out, torch.ones_like(out))
    assert_near("d_value", gradients[2].sum(2), d_out.sum(2))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("wanted", [[0], [1], [2], [3], [4], [0, 3], [1, 2], [2, 4]])
def test_some_gradients(tiled: Way, wanted: list[int]) -> None:
    """Some of the gradients have the same bits as among all, and only their kernels run."""
    case = CASES["5 x 7 after 1"]
    given = tensors(case, tiled.dtype)
    expected = results(tiled.implementation, case, given)[1:]
    leaves = [tensor.detach().requires_grad_(number in wanted) for number, tensor in enumerate(given[:5])]
    out = call(*leaves, case.grid, implementation=tiled.implementation)
    watched: Any = guarded() if INTERPRETED else nullcontext([])
    with watched as launches:
        gradients = torch.autograd.grad(out, [leaves[number] for number in wanted], given[5])
    assert all(torch.equal(gradient, expected[number]) for number, gradient in zip(wanted, gradients, strict=True))
    kernels = ["grid_dq_kernel"] * (wanted != [2]) + ["grid_dkv_kernel"] * (not {1, 2}.isdisjoint(wanted))
    assert [launch.kernel for launch in launches] == (kernels if INTERPRETED else [])


@pytest.mark.parametrize("case", [Case((5, 7), prefix=1, batch=0), Case((5, 7), prefix=1, heads=0)], ids=["batch", "heads"])
def test_empty(tiled: Way, case: Case) -> None:
    """Without sequences or heads, out is empty and gradients of tables are zeros."""
    given = tensors(case)
    out, *gradients = results(tiled.implementation, case, given)
    assert out.shape == given[5].shape and not any(gradient.any() for gradient in gradients)


def test_autocast_does_not_change_the_precision(way: Way) -> None:
    """Tensors in its dtype give the same bits with and without it, forward and backward."""
    given = tensors(CASES["odd sides"], torch.float16)
    expected = results(way.implementation, CASES["odd sides"], given)
    with torch.autocast("cpu", torch.float16):
        found = results(way.implementation, CASES["odd sides"], given)
    assert all(map(torch.equal, found, expected))


@plain_torch
def test_repeats_bit_for_bit() -> None:
    """Also with two threads."""
    case = Case((12, 11), prefix=1, batch=2)
    torch.set_num_threads(2)
    try:
        first, *others = (results("blockwise", case, tensors(case)) for _ in range(3))
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))


def wide(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float64)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "grid": ({"grid": (5, 4)}, ValueError, "20 positions, more than the 12 of query"),
    "sides": ({"grid": (0, 4)}, ValueError, "at least 1 each"),
    "keys": ({"key_grid": (2, 2)}, ValueError, r"key must have shape \(2, 3, 4, 6\)"),
    "dropout": ({"dropout_p": 1.5}, ValueError, r"dropout_p must lie in \[0, 1\], got 1.5"),
    "rel_pos_h": ({"rel_pos_h": wide(7, 5)}, ValueError, r"rel_pos_h must have shape \(rows, 6\)"),
    "rel_pos_w": ({"rel_pos_w": wide(0, 6)}, ValueError, r"rel_pos_w must have shape \(rows, 6\)"),
    "value": ({"value": wide(2, 3, 11, 6)}, ValueError, "value must have shape"),
    "query": ({"query": wide(3, 12, 6)}, ValueError, r"query must have shape \(B, H, N, width\)"),
    "dtype": ({"query": wide(2, 3, 12, 6).float()}, TypeError, "key must have query's dtype"),
    "triton": ({"implementation": "triton"}, NotImplementedError, "float64" if INTERPRETED else "triton.* cannot run here"),
    "learned scale": ({"scale": torch.nn.Parameter(torch.ones(()))}, TypeError, "multiply key by it and pass scale=1.0"),
    "scale of nan": ({"scale": math.nan}, ValueError, "scale must be finite, got nan"),
    "area": ({"grid": 12}, TypeError, r"grid must be a pair \(height, width\), got 12"),
    "real sides": ({"grid": (4.0, 3.0)}, TypeError, "grid must be an int, got 4.0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name: str) -> None:
    """The error names the argument, in both functions if both have it."""
    case = Case((4, 3), width=6, batch=2, heads=3)
    given: dict[str, Any] = dict(zip(NAMES[1:], tensors(case, torch.float64), strict=False)) | {"grid": case.grid}
    changes, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call(**given | changes)
    if not changes.keys() & {"value", "dropout_p", "implementation"}:
        del given["value"]
        with pytest.raises(error, match=message):
            append(**given | changes)


@pytest.mark.parametrize("function", [call, append])
def test_exchanged_sides_warn_once(function: Any) -> None:
    """Swapped tables, a (width, height) grid and pooled keys warn once, on the caller's line. Other interpolation does not
    warn."""

    def warned(case: Case) -> list[str]:
        forget_warnings()
        query, key, value, *tables, _ = tensors(case)
        given = (query, key, value, *tables) if function is call else (query, key, *tables)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                function(*given, case.grid, key_grid=case.key_grid)
        assert all(warning.category is UserWarning and warning.filename == __file__ for warning in caught)
        return [str(warning.message) for warning in caught]

    for case in (Case((4, 6), rows=(11, 7)), Case((4, 6), (2, 3), rows=(11, 7))):
        (message,) = warned(case)
        assert "have 11 and 7 rows" in message and "need 7 and 11" in message
    for case in (Case((4, 6)), Case((4, 6), rows=(11, 11)), Case((4, 4), rows=(7, 9)), Case((4, 6), rows=(9, 7))):
        assert warned(case) == []


def peak(side: int, implementation: str) -> dict[str, Any]:
    """Bytes of a forward and backward call on a square grid, of float32 and 4 heads of width 64."""
    torch.set_num_threads(1)
    map_blocks_from(PAGE)
    warm, measured = (tensors(Case((size, size), width=64, value_width=64, heads=4)) for size in (8, side))
    results(implementation, Case((8, 8)), warm)
    return {"bytes": peak_cpu(lambda: results(implementation, Case((side, side)), measured))}


@plain_torch
@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from Linux's /proc")
def test_peak_memory_is_linear() -> None:
    """Four times the tokens need four times the memory; one (H, N, N) tensor of the larger grid would take 256 MiB."""
    calls = ((32, "blockwise"), (64, "blockwise"), (32, "reference"))
    short, long, dense = (in_own_process(peak, given, None)["bytes"] for given in calls)
    assert short >= 3 * 4 * 32**2 * 64 * 4, "the measurement misses the gradients"
    assert long <= 4.5 * short and long <= 4 * 64**4 * 4 / 4, f"{short} bytes of 32 x 32 tokens, {long} of 64 x 64"
    assert dense >= 2 * 4 * 32**4 * 4, "the measurement does not see a square tensor"
