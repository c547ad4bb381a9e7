"""Positions of a table's rows, and conversions from other layouts and parametrisations: literal cases, errors, gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.tolerance import assert_at_most, assert_near, assert_same, dtype_tolerance
from triton_relattn import RelativePositions, tables


def rows(positions: RelativePositions, relative_position: list[int] | torch.Tensor) -> tuple[list[int], list[bool]]:
    row, applies = positions.rows(torch.as_tensor(relative_position))
    return row.tolist(), applies.tolist()


ROWS: tuple[tuple[RelativePositions, list[int], list[int]], ...] = (
    # Table, relative positions, their rows; Shaw et al.'s words 0, 1, 5 and 9 of ten, clipped at 3, worked out by hand.
    (RelativePositions(-3, 3), list(range(10)), [3, 4, 5, 6, 6, 6, 6, 6, 6, 6]),
    (RelativePositions(-3, 3), list(range(-1, 9)), [2, 3, 4, 5, 6, 6, 6, 6, 6, 6]),
    (RelativePositions(-3, 3), list(range(-5, 5)), [0, 0, 0, 1, 2, 3, 4, 5, 6, 6]),
    (RelativePositions(-3, 3), list(range(-9, 1)), [0, 0, 0, 0, 0, 0, 0, 1, 2, 3]),
    (RelativePositions(-5, -3), list(range(-6, 2)), [0, 0, 1, 2, 2, 2, 2, 2]),
    (RelativePositions(3, 4), list(range(-6, 2)), [0] * 8),
    (RelativePositions(0, 0), list(range(-6, 2)), [0] * 8),
    (RelativePositions(-2, 1), list(range(-6, 2)), [0] * 5 + [1, 2, 3]),
)


def test_rows() -> None:
    """Positions beyond a table's ends take the end rows, also of tables without distance zero; "zero" limits where the term
    applies; positions may have any strides."""
    for positions, relative, expected in ROWS:
        assert rows(positions, relative) == (expected, [True] * len(relative))
    applies = [False, False, True, True, True, True, False]
    assert rows(RelativePositions(-1, 2, "zero"), list(range(-3, 4))) == ([0, 0, 0, 1, 2, 3, 3], applies)
    square = torch.arange(-8, 8).view(4, 4)
    for view in (square.T, square[:, ::2], square[:, :1].expand(4, 3)):
        assert rows(RelativePositions(-3, 2, "zero"), view) == rows(RelativePositions(-3, 2, "zero"), view.contiguous())


def test_positions() -> None:
    """Every integer type becomes an int, except bool, which is refused."""
    assert RelativePositions(-3, 3).num_rows == 7 and RelativePositions(4, 4).num_rows == 1
    assert RelativePositions.centred(7) == RelativePositions(-3, 3, "clamp")
    assert RelativePositions.centred(1, "zero") == RelativePositions(0, 0, "zero")
    positions = RelativePositions(torch.tensor(-2), np.int32(3))  # type: ignore[arg-type]
    assert type(positions.first) is type(positions.last) is int and positions == RelativePositions(-2, 3)


def test_general_layout() -> None:
    """T = 4: seven columns, from r = 3 (the most distant future) to r = -3, become seven rows from r = -3 to r = 3. s_{2-1} is
    what word 2 adds for word 1, one step in its past: r = 1 - 2, column 4 (from 0)."""
    general = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0], [30.0, 20.0, 10.0, 0.0, -10.0, -20.0, -30.0]])
    table = tables.from_general_layout(general)
    assert table.tolist() == [[-3, -30], [-2, -20], [-1, -10], [0, 0], [1, 10], [2, 20], [3, 30]]
    row, _ = RelativePositions.centred(7).rows(torch.tensor(1 - 2))
    assert torch.equal(table[row], general[:, 4])


def test_future_first() -> None:
    """Rows are the last dimension but one, and the last dimension of a bias."""
    table = torch.tensor([[2, 1, 0], [5, 4, 3]])
    assert tables.from_future_first(table.mT, dim=-2).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert tables.from_future_first(table, dim=-1).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tables.from_future_first(table[0], dim=-1).tolist() == [0, 1, 2]


def test_layouts_of_heads() -> None:
    """Each head alone gives what the stack gives, also from a strided, transposed view; gradients keep the original layout."""
    general = torch.randn(3, 7, 10, dtype=torch.float64)[..., ::2].mT.requires_grad_()  # (heads, D, 2T - 1) = (3, 5, 7)
    for convert in (tables.from_general_layout, lambda table: tables.from_future_first(table.mT, dim=-2)):
        table = convert(general)
        assert table.shape == (3, 7, 5)
        for head in range(3):
            assert torch.equal(table[head], torch.stack([general[head, :, column] for column in range(6, -1, -1)]))
        weights = torch.randn(table.shape, dtype=torch.float64)
        (gradient,) = torch.autograd.grad((table * weights).sum(), general)
        assert torch.equal(convert(gradient), weights)


# Distances at which the next bucket starts, as transformers 5.23 (T5Attention) numbers them.
T5_STARTS: dict[tuple[int, int, bool], list[int]] = {
    (32, 128, True): [*range(8), 8, 12, 16, 23, 32, 46, 64, 91],
    (32, 128, False): [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113],
    (16, 64, True): [0, 1, 2, 3, 4, 8, 16, 32],
    (7, 30, True): [0, 1, 6],
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("arguments", T5_STARTS)
def test_t5_buckets(arguments: tuple[int, int, bool], dtype: torch.dtype) -> None:
    starts, bidirectional = T5_STARTS[arguments], arguments[2]
    expected = [sum(start <= distance for start in starts) - 1 for distance in range(300)]
    distance = torch.arange(300, dtype=dtype)
    past = tables.t5_buckets(-distance, *arguments)
    assert past.dtype == torch.int64 and past.tolist() == expected
    future = tables.t5_buckets(distance, *arguments).tolist()
    assert future == ([0, *(bucket + len(starts) for bucket in expected[1:])] if bidirectional else [0] * 300)


def test_t5_buckets_of_wavlm() -> None:
    """320 buckets for distances up to 800, some of which share a bucket; the last bucket starts at 778."""
    bucket = tables.t5_buckets(torch.tensor([[0, -79, -80, -82, -83], [777, 778, 800, -777, -(10**6)]]), 320, 800)
    assert bucket.tolist() == [[0, 79, 80, 80, 81], [318, 319, 319, 158, 159]]


def test_deberta_log_buckets() -> None:
    """bucket_size 16, max_position 64: the distances up to 10 at which the next bucket starts, as transformers 5.23 has them."""
    starts = [*range(1, 10), 11, 15, 20, 27, 35, 47, 64, 85, 114, 153, 205]
    distance = torch.arange(250)
    expected = torch.tensor([sum(start <= d for start in starts) for d in range(250)])
    assert torch.equal(tables.deberta_log_buckets(distance, 16, 64), expected)
    assert torch.equal(tables.deberta_log_buckets(-distance.int(), 16, 64), -expected)
    assert int(tables.deberta_log_buckets(torch.tensor(511), 256, 512)) == 255
    assert tables.deberta_log_buckets(torch.tensor([[1, 2], [3, -20]]), 5, 20).tolist() == [[1, 2], [3, -4]]


def test_alibi_slopes() -> None:
    """The slopes are those of Press et al.: 1/2 .. 1/256 for 8 heads; 12 heads also have 2 ** -0.5, -1.5, -2.5 and -3.5."""
    eight = [2.0**-k for k in range(1, 9)]
    assert tables.alibi_slopes(8).tolist() == eight
    twelve = torch.tensor([*eight, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5], dtype=torch.float64)
    assert torch.equal(tables.alibi_slopes(12, dtype=torch.float64), twelve)
    six = torch.tensor([2.0**-k for k in (2, 4, 6, 8, 1, 3)])
    assert tables.alibi_slopes(1).tolist() == [2.0**-8] and torch.equal(tables.alibi_slopes(6), six)
    assert tables.alibi_slopes(16).dtype == torch.float32


def test_alibi_bias() -> None:
    slopes = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    bias = tables.alibi_bias(slopes, -3, 1)
    assert bias.dtype == torch.float64 and bias.tolist() == [[-1.5, -1, -0.5, 0, -0.5], [-6, -4, -2, 0, -2]]
    (gradient,) = torch.autograd.grad(bias[:, 0].sum(), slopes)
    assert gradient.tolist() == [-3, -3]
    assert torch.equal(tables.alibi_bias(3, 2, 4), -tables.alibi_slopes(3)[:, None] * torch.tensor([2, 3, 4]))
    assert torch.equal(tables.alibi_bias(np.int64(2), -1, 0), tables.alibi_bias(2, -1, 0))  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["interleaved", "concatenated"])
def test_sinusoids(order: Any) -> None:
    """Computed one number at a time: sin and cos of the distance i - j = -r by 10000 ** (-2 c / 6)."""
    expected = []
    for r in range(-4, 3):
        angles = [-r / 10000 ** (2 * c / 6) for c in range(3)]
        pairs = [(math.sin(angle), math.cos(angle)) for angle in angles]
        expected.append([x for pair in (pairs if order == "interleaved" else zip(*pairs, strict=True)) for x in pair])
    actual = tables.sinusoids(-4, 2, 6, order, dtype=torch.float64)
    assert_same("sinusoids", actual, torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(tables.sinusoids(-4, 2, 6, order), actual.float())


def test_sinusoids_far_away() -> None:
    """Six digits are right at 45,000 positions, where angles in float32 would leave three."""
    for found, exact in (
        (tables.sinusoids(-45000, -45000, 4)[0, 0], math.sin(45000)),
        (tables.sinusoids(2, 2, 4, base=16.0)[0, 2], math.sin(-2 / 4)),
    ):
        assert_at_most("sine", abs(float(found) - exact), dtype_tolerance(torch.float32))


@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per_head"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_fold_transformer_xl(packed: bool, per_head: bool) -> None:
    """(q' . k + q' . E) scale + b = scale ((q + u) . k + (q + v) . E), one head, query, key and row at a time."""
    torch.manual_seed(0)
    query, table, u, v, key = (
        torch.randn(shape, dtype=torch.float64)
        for shape in ((1, 2, 3, 4), (2, 5, 4) if per_head else (5, 4), (2, 4), (2, 4), (2, 4))
    )
    given = query[0].transpose(0, 1) if packed else query
    folded, bias = tables.fold_transformer_xl(given, table, u, v, scale=0.3)
    assert folded.shape == given.shape and bias.shape == (2, 5)
    for head in range(2):
        rows = table[head] if per_head else table
        for i in range(3):
            q = query[0, head, i]
            expected = 0.3 * ((q + u[head]) @ key[head] + rows @ (q + v[head]))
            p = folded[i, head] if packed else folded[0, head, i]
            assert_same("logits", 0.3 * (p @ key[head] + rows @ p) + bias[head], expected)
    assert_same("default scale", tables.fold_transformer_xl(given, table, u, v)[1], bias / 0.3 / 2)


def test_fold_transformer_xl_in_half_precision() -> None:
    """The query keeps its dtype next to float32 parameters; the bias is float32, with autocast too."""
    torch.manual_seed(0)
    query, table = torch.randn(1, 2, 3, 4).bfloat16(), torch.randn(2, 5, 4).bfloat16()
    u, v = torch.randn(2, 4), torch.randn(2, 4)
    expected = 0.5 * torch.einsum("hd,hrd->hr", v - u, table.float())
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            folded, bias = tables.fold_transformer_xl(query, table, u, v)
        assert folded.dtype == torch.bfloat16 and bias.dtype == torch.float32
        assert_near("bias", bias, expected)


XL = torch.zeros(1, 2, 5, 4), torch.zeros(9, 4), torch.zeros(2, 4), torch.zeros(2, 4)
"""query, rel_key, u, v"""


def xl(**changes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple((dict(zip(("query", "rel_key", "u", "v"), XL, strict=True)) | changes).values())


R = torch.arange(-3, 4)
KEY_SHAPE = r"rel_key must have shape \(R, 4\) or \(2, R, 4\).*"
REFUSED: tuple[tuple[Callable[..., Any], tuple[Any, ...], type[Exception], str], ...] = (
    *((RelativePositions, (first, 3), TypeError, "first must be an int, got") for first in (False, 1.0, "1", torch.tensor(1.0))),
    (RelativePositions, (0, "2"), TypeError, "last .* got '2'"),
    (RelativePositions, (129,), TypeError, r"needs first and last.*got 129 alone; RelativePositions.centred\(num_rows\)"),
    (RelativePositions, (3, -3), ValueError, "first=3, last=-3"),
    (RelativePositions, (-3, 3, "wrap"), ValueError, "'wrap'"),
    *((RelativePositions.centred, (wrong,), TypeError, "num_rows must be an int, got") for wrong in ("129", 129.0)),
    *((RelativePositions.centred, (n,), ValueError, rf"even number of rows \({n}\).*=RelativePositions\(f") for n in (0, 2, 512)),
    *(
        (tables.fold_transformer_xl, xl(rel_key=torch.zeros(shape)), ValueError, f"{KEY_SHAPE}{hint}")
        for shape, hint in {
            **dict.fromkeys(((9, 5), (3, 9, 4)), "$"),
            (9, 8): r"rel_key.unflatten\(1, \(2, -1\)\).transp",
            (1, 9, 2, 4): r"rel_key\[0\].transpose\(0, 1\) is",
            (1, 2, 9, 4): r"rel_key\[0\] is one, which the batch",
        }.items()
    ),
    (tables.fold_transformer_xl, xl(u=torch.zeros(1, 2, 1, 4)), ValueError, r"u must have shape .*; u.reshape\(2, 4\) has it"),
    (tables.fold_transformer_xl, xl(v=torch.zeros(4)), ValueError, r"v must have shape \(heads, width\) = \(2, 4\), got \(4,\)"),
    (tables.fold_transformer_xl, (XL[0], XL[2], XL[2], XL[1]), ValueError, "v must have .*; the order is query, rel_key, u, v"),
    (tables.fold_transformer_xl, xl(query=torch.zeros(5, 4)), ValueError, "query must have shape"),
    (tables.from_general_layout, (torch.zeros(3, 6),), ValueError, r"2T - 1, got shape \(3, 6\)"),
    (tables.from_general_layout, (torch.zeros(7),), ValueError, r"got \(7,\)"),
    (tables.from_future_first, (torch.zeros(7), -2), ValueError, r"dimension -2, .* got shape \(7,\)"),
    (tables.t5_buckets, (R.float(),), TypeError, r"integers, got torch\.float32"),
    (tables.t5_buckets, (128,), TypeError, r"must be a tensor of integers, as torch\.arange\(-128, 129\).*got 128"),
    (tables.t5_buckets, (R, 3), ValueError, "at least 4, got 3"),
    (tables.t5_buckets, (R, 1, 128, False), ValueError, "at least 2, got 1"),
    (tables.t5_buckets, (R, 32, 8), ValueError, "larger than the 8 distances .* got 8"),
    (tables.t5_buckets, (R, 32.0), TypeError, "num_buckets must be an int, got"),
    (tables.deberta_log_buckets, (torch.tensor(True), 16, 64), TypeError, r"integers, got torch\.bool"),
    (tables.deberta_log_buckets, (R, 1, 64), ValueError, "at least 2, got 1"),
    (tables.deberta_log_buckets, (R, 16, 9), ValueError, r"larger than bucket_size // 2 \+ 1 = 9, got 9"),
    (tables.deberta_log_buckets, (R, 32.0, 128), TypeError, "bucket_size must be an int, got"),
    (tables.deberta_log_buckets, (R, 32, "128"), TypeError, "max_position must be an int, got"),
    (tables.alibi_slopes, (0,), ValueError, "positive, got 0"),
    (tables.alibi_slopes, (8.0,), TypeError, "num_heads must be an int, got"),
    (tables.alibi_bias, (4, 1, 0), ValueError, "last must not be smaller"),
    (tables.alibi_bias, (torch.ones(2, 1), -1, 0), ValueError, r"\(H,\), got \(2, 1\)"),
    (tables.alibi_bias, (torch.tensor([1, 2]), -1, 0), TypeError, "slopes must be floating point"),
    (tables.sinusoids, (-1, 1, 0), ValueError, "even and positive, got 0"),
    (tables.sinusoids, (-1, 1, 5), ValueError, "even and positive, got 5"),
    (tables.sinusoids, (-1, 1, 4, "other"), ValueError, "got 'other'"),
    (tables.sinusoids, (-1.5, 1, 4), TypeError, "first must be an int"),
)


def test_refuses() -> None:
    for function, arguments, error, message in REFUSED:
        with pytest.raises(error, match=message):
            function(*arguments)
