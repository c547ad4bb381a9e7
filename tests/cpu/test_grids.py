"""Decomposed relative positions on a grid: the formula pair by pair, all ways to compute it, cut in every way."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.functional import interpolate, scaled_dot_product_attention

from tests.conftest import cut_blocks, forget_warnings, take_processor
from tests.tolerance import assert_at_most, assert_near, dtype_tolerance
from triton_relattn import append_decomposed_positions, decomposed_relative_attention
from triton_relattn.testing import assert_within_budget

call: Any = decomposed_relative_attention
append: Any = append_decomposed_positions


class Case(NamedTuple):
    """The sizes of a call."""

    grid: tuple[int, int]
    key_grid: tuple[int, int] | None = None
    prefix: int = 0
    rows: tuple[int, int] | None = None
    """Rows of the two tables, if they differ from what the grids need."""
    width: int = 6
    value_width: int = 5

    @property
    def keys(self) -> tuple[int, int]:
        return self.key_grid or self.grid

    @property
    def arguments(self) -> dict[str, Any]:
        return {"grid": self.grid, "key_grid": self.key_grid}


CASES = {
    "square": Case((4, 4)),
    "rectangular": Case((3, 7)),
    "one row": Case((1, 9)),
    "one column": Case((9, 1)),
    "one token": Case((1, 1)),
    "class token": Case((4, 3), prefix=1),
    "many tokens before": Case((2, 3), prefix=9),
    "pooled keys": Case((4, 6), (2, 3), prefix=1),
    "pooled in one direction": Case((6, 4), (6, 2)),
    "pooled to uneven sides": Case((7, 5), (3, 2)),
    "pooled queries": Case((2, 3), (4, 6)),
    "short tables": Case((5, 4), rows=(5, 3)),
    "long tables": Case((3, 4), rows=(13, 20)),
    "pooled, other tables": Case((4, 6), (2, 2), rows=(5, 4)),
    "more values": Case((3, 4), value_width=11),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
Tensors = tuple[torch.Tensor, ...]


def tensors(case: Case, dtype: torch.dtype = torch.float64, batch: int = 2, heads: int = 3) -> Tensors:
    """Query, key, value, both tables, and an output gradient."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)

    queries, keys = (case.prefix + height * width for height, width in (case.grid, case.keys))
    rows = case.rows or tuple(2 * max(sides) - 1 for sides in zip(case.grid, case.keys, strict=True))
    qkv = (made(batch, number, heads, width) for number, width in ((queries, case.width), (keys, case.width)))
    query, key = (tensor.transpose(1, 2) for tensor in qkv)
    value = made(batch, heads, keys, case.value_width)
    return query, key, value, *(made(number, case.width) for number in rows), made(batch, heads, queries, case.value_width)


def resized(table: torch.Tensor, length: int) -> torch.Tensor:
    """A table interpolated to another length, as the models do it."""
    return interpolate(table.mT[None], size=length, mode="linear")[0].mT


def difference(query: int, key: int, query_side: int, key_side: int) -> int:
    """The table row for a pair of coordinates."""
    in_keys, in_queries = max(query_side / key_side, 1), max(key_side / query_side, 1)
    return int(query * in_queries - key * in_keys + (key_side - 1) * in_keys)


def pair_by_pair(case: Case, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *pos: torch.Tensor) -> torch.Tensor:
    """The formula, computed one number at a time."""
    tables = [resized(table, 2 * max(sides) - 1) for table, *sides in zip(pos, case.grid, case.keys, strict=True)]
    bias: list[list[torch.Tensor]] = []
    for i in range(query.shape[2]):
        bias.append([])
        for j in range(key.shape[2]):
            number = query.new_zeros(query.shape[:2])
            if i >= case.prefix and j >= case.prefix:
                places = divmod(i - case.prefix, case.grid[1]), divmod(j - case.prefix, case.keys[1])
                for table, *pair in zip(tables, *places, case.grid, case.keys, strict=True):
                    number = number + query[:, :, i] @ table[difference(*pair)]
            bias[-1].append(number)
    logits = query @ key.mT / query.shape[3] ** 0.5 + torch.stack([torch.stack(row, -1) for row in bias], 2)
    return logits.softmax(-1) @ value


def appended(case: Case, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *pos: torch.Tensor) -> torch.Tensor:
    """The same result from torch's own attention."""
    wide = append(query, key, *pos, **case.arguments)
    assert wide[0].shape[3] == case.width + sum(case.keys)
    return scaled_dot_product_attention(wide[0], wide[1], value, scale=1.0)


def attend(case: Case, *given: Any, **arguments: Any) -> Any:
    return call(*given, **case.arguments, **arguments)


def results(function: Any, case: Case, given: Tensors, **arguments: Any) -> Tensors:
    """Output and all gradients."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in given[:5]]
    out = function(case, *leaves, **arguments)
    return out.detach(), *torch.autograd.grad(out, leaves, given[5])


NAMES = ("out", "query", "key", "value", "rel_pos_h", "rel_pos_w")


def assert_same(ours: Tensors, expected: Tensors) -> None:
    largest = max(float(result.abs().max()) for result in expected)
    for name, actual, right in zip(NAMES, ours, expected, strict=True):
        assert actual.shape == right.shape and right.isfinite().all(), name
        assert_near(name, actual, right, smallest=largest / 100)


WAYS = {
    "blockwise": (attend, {"implementation": "blockwise"}),
    "reference": (attend, {"implementation": "reference"}),
    "appended": (appended, {}),
}


@every_case
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("block_size")
def test_the_formula(case: Case, way: str) -> None:
    function, arguments = WAYS[way]
    given = tensors(case)
    assert_same(results(function, case, given, **arguments), results(pair_by_pair, case, given))


@pytest.mark.parametrize(("queries", "elements"), [(1, 1), (3, 200), (8, 1), (8, 1 << 18), (50, 200)])
@pytest.mark.parametrize("name", ["rectangular", "class token", "pooled keys"])
def test_cuts(monkeypatch: pytest.MonkeyPatch, name: str, queries: int, elements: int) -> None:
    """Blocks of partial rows, whole rows, several heads and several sequences give the same result, with dropout too."""
    case, given = CASES[name], tensors(CASES[name])

    def dropped(implementation: str) -> Tensors:
        torch.manual_seed(3)
        return results(attend, case, given, implementation=implementation, dropout_p=0.4)

    cut_blocks(monkeypatch, queries, elements, 4)
    ours = dropped("blockwise")
    assert_same(ours, dropped("reference"))
    assert (ours[0] - attend(case, *given[:5])).abs().max() > 0.1, "nothing is dropped"


FAST = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_amx_fp16_supported")
"""torch's flags for a processor with fast products in bfloat16 and float16."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sharp", [0, 1, 8])
@pytest.mark.parametrize("fast", [False, True], ids=["products in float32", "products in 16 bits"])
def test_error_rule(dtype: torch.dtype, sharp: int, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On processors with fast 16-bit products and on others, with sharp logits. sharp = 0 means scale = 0, attention by position
    alone, where torch's 16-bit products with alpha = 0 do not write their result on some processors."""
    take_processor(monkeypatch, *(FAST if fast else ()))
    case, scale = Case((9, 8), prefix=1, width=16, value_width=16), None if sharp else 0.0
    query, *others = tensors(case, dtype)
    given = ((sharp or 1) * query, *others)
    golden = results(attend, case, tuple(tensor.double() for tensor in given), implementation="reference", scale=scale)
    dense, ours = (
        results(attend, case, given, implementation=implementation, scale=scale) for implementation in ("reference", "blockwise")
    )
    assert {result.dtype for result in ours} == {dtype}
    for name, actual, exact, usual in zip(NAMES, ours, golden, dense, strict=True):
        if not exact.any():  # d_key, with a scale of 0
            assert not actual.any(), name
            continue
        assert_within_budget(name, actual, exact, usual, factor=2 if name == "out" else 3)
        if name.startswith("rel_pos") and dtype.itemsize == 2 and sharp:  # sums in float32 that are rounded once
            rounding = torch.finfo(dtype).eps * exact.abs() + dtype_tolerance(torch.float32) * exact.abs().max()
            assert_at_most(f"{name}, rounded once", (actual.double() - exact).abs(), rounding)


def test_large_logits() -> None:
    """Each row's probabilities sum to one, forward and backward: the output is one and gradients are finite for equal values."""
    case = Case((6, 5), width=16)
    query, key, value, *pos, d_out = tensors(case, torch.float32)
    gradients = results(attend, case, (300 * query, 30 * key, torch.ones_like(value), *pos, d_out))
    assert_near("out", gradients[0], torch.ones_like(gradients[0]))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_repeats_bit_for_bit() -> None:
    case = Case((12, 11), prefix=1)
    given = tensors(case, torch.float32)
    torch.set_num_threads(2)
    try:
        first, *others = (results(attend, case, given) for _ in range(3))
    finally:
        torch.set_num_threads(1)
    for other in others:
        assert all(map(torch.equal, first, other))


def test_empty() -> None:
    case = CASES["class token"]
    for batch, heads in ((0, 3), (2, 0)):
        given = tensors(case, batch=batch, heads=heads)
        out, *gradients = results(attend, case, given)
        assert out.shape == given[5].shape and not any(gradient.abs().sum() for gradient in gradients)


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
    "triton": ({"implementation": "triton"}, NotImplementedError, 'implementation="triton" cannot run here'),
    "learned scale": ({"scale": torch.nn.Parameter(torch.ones(()))}, TypeError, "multiply key by it and pass scale=1.0"),
    "scale of nan": ({"scale": math.nan}, ValueError, "scale must be finite, got nan"),
    "area": ({"grid": 12}, TypeError, r"grid must be a pair \(height, width\), got 12"),
    "real sides": ({"grid": (4.0, 3.0)}, TypeError, "grid must be an int, got 4.0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name: str) -> None:
    """The error names the argument, in both functions if both have it."""
    given: dict[str, Any] = dict(zip(NAMES[1:], tensors(Case((4, 3)))[:5], strict=True)) | {"grid": (4, 3)}
    changes, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call(**{**given, **changes})
    if not changes.keys() & {"value", "dropout_p", "implementation"}:
        del given["value"]
        with pytest.raises(error, match=message):
            append(**{**given, **changes})


@pytest.mark.parametrize("function", [call, append])
def test_exchanged_sides_warn_once(function: Any) -> None:
    """Swapped tables, a (width, height) grid and pooled keys warn once, on the caller's line. Other interpolation does not
    warn."""

    def warned(case: Case) -> list[str]:
        forget_warnings()
        query, key, value, *pos, _ = tensors(case)
        given = (query, key, value, *pos) if function is call else (query, key, *pos)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                function(*given, **case.arguments)
        assert all(warning.category is UserWarning and warning.filename == __file__ for warning in caught)
        return [str(warning.message) for warning in caught]

    for case in (Case((4, 6), rows=(11, 7)), Case((4, 6), (2, 3), rows=(11, 7))):
        (message,) = warned(case)
        assert "have 11 and 7 rows" in message and "need 7 and 11" in message
    for case in (Case((4, 6)), Case((4, 6), rows=(11, 11)), Case((4, 4), rows=(7, 9)), Case((4, 6), rows=(9, 7))):
        assert warned(case) == []


CHILD = """
import sys
import torch
from triton_relattn._peaks import PAGE, map_blocks_from, peak_cpu
from triton_relattn import decomposed_relative_attention

side, implementation = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
map_blocks_from(PAGE)

def run(side):
    given = [torch.randn(1, 4, side * side, 64, requires_grad=True) for _ in range(3)]
    given += [torch.randn(2 * side - 1, 64, requires_grad=True) for _ in range(2)]
    return lambda: decomposed_relative_attention(*given, (side, side), implementation=implementation).sum().backward()

run(8)()
print(peak_cpu(run(side)))
"""


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from Linux's /proc")
def test_peak_memory_is_linear() -> None:
    """Four times the tokens need four times the memory; one (H, N, N) tensor of the larger grid would take 256 MiB."""

    def peak(side: int, implementation: str = "blockwise") -> int:
        command = [sys.executable, "-c", CHILD, str(side), implementation]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "4096"}
        root = Path(__file__).parents[2]
        child = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, check=False)
        assert child.returncode == 0, child.stderr
        return int(child.stdout)

    short, long = peak(32), peak(64)
    assert short >= 3 * 4 * 32**2 * 64 * 4, "the measurement misses the gradients"
    assert long <= 4.5 * short and long <= 4 * 64**4 * 4 / 4, f"{short} bytes of 32 x 32 tokens, {long} of 64 x 64"
    assert peak(32, "reference") >= 2 * 4 * 32**4 * 4, "the measurement does not see a square tensor"
