"""The dense reference against the published algorithms, loops and hand computation: never against itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.oracle import assert_same, dense_forward
from triton_relattn import RelativePositions, tables
from triton_relattn._reference import reference_attention
from triton_relattn.testing import Inputs, dense_gradients, forward_backward, make_inputs, with_different_strides


def attention_with_scores(inputs: Inputs, relative_scores: torch.Tensor, is_causal: bool, scale: float) -> torch.Tensor:
    """softmax(scale * (Q K^T + S)) V for given S."""
    logits = scale * (inputs.query @ inputs.key.mT + relative_scores)
    if is_causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -math.inf)
    return logits.softmax(-1) @ inputs.value


def diagonal_stacking(query: torch.Tensor, general_table: torch.Tensor, num_keys: int) -> torch.Tensor:
    """S = truncate(transpose(diagonals(Q E))), E (d, 2T - 1) from the most distant future to the most distant past.

    Key j is met on the diagonal of Q E that starts in column T - 1 - j.
    """
    num_queries, max_length = query.shape[-2], (general_table.shape[-1] + 1) // 2
    products = query @ general_table
    diagonals = [products.diagonal(max_length - 1 - j, -2, -1)[..., :num_queries] for j in range(num_keys)]
    return torch.stack(diagonals, -2).mT


def pad_reshape_slice(query: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Music Transformer's skewing of Q E^T, E (L, d) with rows for -(L - 1) .. 0: right on and below the diagonal."""
    products = query @ table.mT
    length = products.shape[-1]
    padded = torch.nn.functional.pad(products, (1, 0))
    return padded.reshape(*products.shape[:-2], length + 1, length)[..., 1:, :]


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per_head"])
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "max_length"), [(7, 7, 7), (5, 9, 9), (9, 5, 9), (6, 4, 11), (1, 3, 4), (1, 1, 1)]
)
def test_general_relative_attention(num_queries: int, num_keys: int, max_length: int, per_head: bool, is_causal: bool) -> None:
    """Self and cross attention, tables exactly as long as needed and longer."""
    inputs = make_inputs(
        2, 3, num_queries, num_keys, 8, 5, num_rows=2 * max_length - 1, per_head=per_head, dtype=torch.float64, seed=max_length
    )
    assert inputs.rel_key is not None
    general_table = inputs.rel_key.flip(-2).mT
    expected = attention_with_scores(inputs, diagonal_stacking(inputs.query, general_table, num_keys), is_causal, 8**-0.5)
    table = tables.from_general_layout(general_table)
    out, _ = reference_attention(inputs.query, inputs.key, inputs.value, table, is_causal=is_causal)
    assert_same("out", out, expected)


@pytest.mark.parametrize("length", [1, 2, 7, 16, 33])
@pytest.mark.parametrize("scale", [None, 1.0, -0.5])
def test_music_transformer(length: int, scale: float | None) -> None:
    """Causal, one row per distance from -(L - 1) to 0."""
    inputs = make_inputs(2, 2, length, length, 6, num_rows=length, per_head=True, dtype=torch.float64, seed=length)
    assert inputs.rel_key is not None
    skewed = pad_reshape_slice(inputs.query, inputs.rel_key)
    expected = attention_with_scores(inputs, skewed, is_causal=True, scale=6**-0.5 if scale is None else scale)
    positions = RelativePositions(-(length - 1), 0)
    out, _ = reference_attention(*inputs[:4], positions=positions, is_causal=True, scale=scale)  # type: ignore[arg-type]
    assert_same("out", out, expected)


@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per_head"])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(10, 10), (4, 11), (11, 4)])
def test_clipping_of_shaw_et_al(num_queries: int, num_keys: int, per_head: bool) -> None:
    """e_ij = x_i (k_j + w[clip(j - i, -k, k)]) / sqrt(d), one pair at a time, k = 3."""
    inputs = make_inputs(2, 2, num_queries, num_keys, 4, num_rows=7, per_head=per_head, dtype=torch.float64, seed=3)
    query, key, value, table = inputs[:4]
    assert table is not None
    expected = torch.zeros(2, 2, num_queries, 4, dtype=torch.float64)
    for b in range(2):
        for h in range(2):
            w = table[h] if per_head else table
            for i in range(num_queries):
                clipped = [max(-3, min(3, j - i)) for j in range(num_keys)]
                e = [float(query[b, h, i] @ (key[b, h, j] + w[clipped[j] + 3])) / 2 for j in range(num_keys)]
                total = sum(math.exp(x) for x in e)
                for j in range(num_keys):
                    expected[b, h, i] += math.exp(e[j]) / total * value[b, h, j]
    assert_same("out", reference_attention(query, key, value, table)[0], expected)


def test_two_by_two_by_hand() -> None:
    """d = 1, queries 1 and 2, keys 1 and 0, values 1 and 3, E = -1, 0, 1 + ln 3 for r = -1, 0, 1, scale 1.

    Logits [[1 + 0, 0 + 1 + ln 3], [2 - 2, 0 + 0]]: P = [[1/4, 3/4], [1/2, 1/2]], out = 5/2, 2, lse = 1 + ln 4, ln 2.
    For d_out = 1, 0: dP = 1, 3, delta = 5/2, dS = -3/8, 3/8 in row 0. dE = 0, -3/8, 3/8; dq_0 = 3/8 (ln 3), as
    key + row is 1 for the first pair and 1 + ln 3 for the second; dk = -3/8, 3/8; dv = 1/4, 3/4.
    """
    column = lambda *numbers: torch.tensor(numbers, dtype=torch.float64).view(1, 1, -1, 1)  # noqa: E731
    table = column(-1, 0, 1 + math.log(3))[0, 0]
    inputs = Inputs(column(1, 2), column(1, 0), column(1, 3), table, column(1, 0), torch.zeros(1, 1, 2, dtype=torch.float64))
    expected = {
        "out": column(2.5, 2),
        "lse": column(1 + math.log(4), math.log(2))[..., 0],
        "d_query": column(0.375 * math.log(3), 0),
        "d_key": column(-0.375, 0.375),
        "d_value": column(0.25, 0.75),
        "d_rel_key": column(0, -0.375, 0.375)[0, 0],
    }
    by_hand = dense_gradients(inputs)._asdict()
    for name, result in forward_backward(reference_attention, inputs, scale=1.0).items():
        assert_same(name, result, expected[name])
        assert_same(name, by_hand[name], expected[name])


CASES: dict[str, tuple[tuple[int, int, int | None], dict[str, Any]]] = {
    "plain": ((5, 7, None), {}),
    "zero_outside": ((6, 8, 5), {"positions": RelativePositions(-2, 2, "zero")}),
    "clamp_past": ((6, 8, 3), {"positions": RelativePositions(-4, -2)}),
    "zero_past": ((6, 8, 3), {"positions": RelativePositions(-4, -2, "zero")}),
    "clamp_future": ((6, 8, 3), {"positions": RelativePositions(2, 4)}),
    "offset": ((4, 9, 5), {"query_offset": 5}),
    "offset_causal": ((4, 9, 5), {"query_offset": 5, "is_causal": True}),
    "offset_back": ((6, 4, 5), {"query_offset": -2, "is_causal": True}),
    "lengths": ((5, 7, 9), {"key_lengths": torch.tensor([4, 0])}),
    "lengths_causal": ((5, 7, 9), {"key_lengths": torch.tensor([2, 7], dtype=torch.int32), "is_causal": True}),
    "scale": ((5, 7, 9), {"scale": -0.7}),
    "all": ((6, 8, 4), {"positions": RelativePositions(-3, 0, "zero"), "query_offset": 1, "is_causal": True, "scale": 2.0}),
}


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("case", CASES)
def test_every_argument_against_loops(case: str, strided: bool) -> None:
    (num_queries, num_keys, num_rows), arguments = CASES[case]
    inputs = make_inputs(2, 2, num_queries, num_keys, 4, 3, num_rows=num_rows, dtype=torch.float64, seed=5)
    expected_out, expected_lse = dense_forward(*inputs[:4], **arguments)
    results = forward_backward(reference_attention, with_different_strides(inputs) if strided else inputs, **arguments)
    assert_same("out", results["out"], expected_out)
    assert_same("lse", results["lse"], expected_lse)
    by_hand = dense_gradients(inputs, **arguments)._asdict()
    for name, result in results.items():
        assert_same(name, result, by_hand[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_of_the_results(dtype: torch.dtype) -> None:
    inputs = make_inputs(1, 1, 3, 4, 8, num_rows=3, dtype=dtype, seed=0)
    out, lse = reference_attention(*inputs[:4])
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)


def test_a_row_that_sees_nothing() -> None:
    """Causal with the lower right corners aligned and more queries than keys: the first rows see no key."""
    inputs = make_inputs(1, 2, 7, 3, 4, num_rows=5, dtype=torch.float64, seed=0)
    results = forward_backward(reference_attention, inputs, is_causal=True, query_offset=-4)
    assert not results["out"][:, :, :4].any() and (results["lse"][:, :, :4] == -math.inf).all()
    assert not results["d_query"][:, :, :4].any() and results["d_query"][:, :, 5:].all()
    assert all(result.isfinite().all() for name, result in results.items() if name != "lse")


def test_gradcheck() -> None:
    inputs = make_inputs(1, 2, 4, 5, 3, 2, num_rows=5, per_head=True, dtype=torch.float64, seed=1)
    leaves = [tensor.requires_grad_() for tensor in inputs[:4] if tensor is not None]
    arguments: dict[str, Any] = {"positions": RelativePositions(-3, 1, "zero"), "query_offset": 1, "is_causal": True}
    assert torch.autograd.gradcheck(lambda *tensors: reference_attention(*tensors, **arguments), leaves)
