"""The linear-memory path: derivatives, long sequences, rounding in every precision and at any scale of the logits; single rows,
hidden pairs, empty tensors, NaN, strides; short rows and large batches."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import weakref
from typing import Any

import pytest
import torch

from tests.conftest import cut_blocks
from tests.oracle import assert_same, attend, by_hand, results_of, unlucky_reference, with_keep
from tests.tolerance import sum_allowance, within
from triton_relattn import RelativePositions, fused_relative_attention
from triton_relattn._blockwise import attention, partition, products
from triton_relattn._blockwise import attention as blockwise
from triton_relattn._blockwise.partition import BlockwiseCall
from triton_relattn._core.arguments import Arguments
from triton_relattn._core.spec import DIFFERENTIABLE, TABLES
from triton_relattn._core.validation import resolve
from triton_relattn._implementations import BLOCKWISE
from triton_relattn._operators.ops import relative_attention
from triton_relattn.testing import (
    Inputs,
    assert_gradients_close_fp32,
    assert_table_gradient,
    assert_within_budget,
    dense_gradients,
    error_budget,
    forward_backward,
    last_place,
    make_inputs,
    with_different_strides,
)

LOW_PRECISION = (torch.float16, torch.bfloat16, torch.float32)
FURTHER_TABLES: dict[str, Any] = {"rel_value": True, "rel_bias": True, "rel_p2c": True}


def test_a_thousand_positions() -> None:
    inputs = make_inputs(1, 2, 1023, 1024, 4, num_rows=513, dtype=torch.float64, seed=1)
    results = forward_backward(attend, inputs, is_causal=True, query_offset=1)
    by_hand = dense_gradients(inputs, is_causal=True, query_offset=1)._asdict()
    for name, result in results.items():
        assert_same(name, result, by_hand[name])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("outside", ["clamp", "zero"])
def test_gradcheck(outside: Any, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Query, key, value and one table through both results, with several blocks."""
    cut_blocks(monkeypatch, 3, 1, 2)
    inputs = make_inputs(2, 2, 5, 6, 3, 2, num_rows=4, per_head=is_causal, dtype=torch.float64, seed=1)
    leaves = [tensor.requires_grad_() for tensor in inputs[:4] if tensor is not None]
    arguments: dict[str, Any] = {"positions": RelativePositions(-2, 1, outside), "is_causal": is_causal, "query_offset": 1}
    arguments["key_lengths"] = torch.tensor([6, 4])
    assert torch.autograd.gradcheck(lambda *tensors: attend(*tensors, **arguments), leaves)


@pytest.mark.parametrize(("outside", "per_head"), [("clamp", True), ("zero", False)])
def test_gradcheck_of_all_inputs(outside: Any, per_head: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All eight, with shared heads, softcap, dropout, a window and a mask."""
    cut_blocks(monkeypatch, 3, 1, 2)
    inputs = make_inputs(
        1,
        2,
        4,
        5,
        2,
        2,
        num_rows=4,
        per_head=per_head,
        key_heads=1,
        rel_width=2,
        rel_value=True,
        rel_bias=True,
        rel_p2c=True,
        dtype=torch.float64,
        seed=1,
    )
    leaves = {name: getattr(inputs, name).requires_grad_() for name in DIFFERENTIABLE}
    attn_mask = torch.randn(4, 5, dtype=torch.float64)
    attn_mask[1, 2] = -math.inf
    arguments: dict[str, Any] = {"positions": RelativePositions(-2, 1, outside), "window_size": (3, 2), "softcap": 2.0}
    arguments |= {"query_offset": torch.tensor([1]), "rel_scale": 0.7, "dropout_p": 0.3, "enable_gqa": True}

    def seeded(*tensors: torch.Tensor) -> Any:
        torch.manual_seed(3)
        named: dict[str, Any] = dict(zip(leaves, tensors, strict=True))
        return attend(**named, attn_mask=attn_mask, **arguments)

    assert len(leaves) == 8
    assert torch.autograd.gradcheck(seeded, tuple(leaves.values()))


ERROR_CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]] = {
    "full": ((2, 2, 97, 97, 64, 64), {"num_rows": 193}, {}),
    "causal": ((2, 2, 129, 129, 32, 48), {"num_rows": 129}, {"positions": RelativePositions(-128, 0), "is_causal": True}),
    "clamped": ((1, 3, 65, 127, 40, 40), {"num_rows": 9}, {}),
    "zero": (
        (1, 3, 113, 203, 21, 16),
        {"num_rows": 31, "per_head": True},
        {"positions": RelativePositions(-20, 10, "zero"), "query_offset": 90},
    ),
    "lengths": ((2, 2, 63, 65, 64, 64), {"num_rows": 65}, {"key_lengths": torch.tensor([33, 65])}),
    "no_table": ((2, 2, 64, 64, 64, 64), {"num_rows": None}, {"is_causal": True}),
    "value_table": ((2, 2, 97, 97, 64, 64), {"num_rows": 21, "rel_value": True}, {"dropout_p": 0.2}),
    "bias_alone": ((2, 2, 97, 97, 32, 32), {"num_rows": 193, "rel_bias": True, "rel_key": False}, {"softcap": 20.0}),
    "p2c": (
        (2, 4, 97, 65, 64, 64),
        {"num_rows": 41, "rel_p2c": True, "key_heads": 2, "per_head": True},
        {"is_causal": True, "query_offset": -3, "enable_gqa": True, "dropout_p": 0.2},
    ),
    "p2c_alone": ((2, 2, 97, 97, 32, 32), {"num_rows": 193, "rel_p2c": True, "rel_key": False}, {"rel_scale": 0.5}),
    "own_query": ((2, 2, 97, 97, 64, 64), {"num_rows": 65, "rel_width": 16}, {"rel_scale": 1.0, "window_size": (40, 30)}),
    "all_terms": (
        (2, 4, 97, 65, 32, 32),
        {"num_rows": 31, "rel_width": 16, **FURTHER_TABLES, "key_heads": 2, "per_head": True},
        {"rel_scale": 0.5, "softcap": 30.0, "window_size": (50, 9), "enable_gqa": True, "query_offset": torch.tensor([-3, 4])},
    ),
}


@pytest.mark.parametrize("sharp", [False, True], ids=["randn", "sharp"])
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@pytest.mark.parametrize("case", ERROR_CASES)
def test_error_rule(case: str, dtype: torch.dtype, sharp: bool, block_size: None) -> None:
    """At most twice (gradients: three times) the error of plain torch, and table gradients as good as rounding dS once.

    In float32, sharp, gradients were six times over the budget: lse, rounded at its magnitude, scales a row of P, and a
    delta that was not divided by the row's sum did not cancel against dP.
    """
    sizes, tables, arguments = ERROR_CASES[case]
    inputs = make_inputs(*sizes, **tables, dtype=dtype, seed=7, sharp=sharp)
    inputs = with_different_strides(inputs)
    golden, reference = unlucky_reference(inputs, **arguments)
    results = results_of("blockwise", inputs, **arguments)
    for name, result in results.items():
        assert result.dtype == (torch.float32 if name == "lse" else dtype)
        assert_within_budget(name, result, golden[name], reference[name], factor=3 if name.startswith("d_") else 2)
        if dtype == torch.float32 and name.startswith("d_"):
            assert_gradients_close_fp32(
                name, result, golden[name], [golden[other] for other in results if other.startswith("d_")]
            )
    for table in TABLES:
        if f"d_{table}" in results and dtype != torch.float32:
            assert_table_gradient(f"d_{table}", results[f"d_{table}"], inputs, table=table, **with_keep(inputs, arguments))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
def test_bias_in_float32(implementation: str, dtype: torch.dtype) -> None:
    """rel_bias may stay in float32 beside inputs of lower precision; its gradient is float32 then."""
    inputs = make_inputs(2, 2, 33, 35, 16, num_rows=21, rel_bias=True, dtype=dtype, seed=0)
    assert inputs.rel_bias is not None
    inputs = inputs._replace(rel_bias=inputs.rel_bias.float())
    results, golden = results_of(implementation, inputs), by_hand(inputs)
    assert results["d_rel_bias"].dtype == torch.float32 and results["out"].dtype == dtype
    if implementation == "blockwise":
        assert_table_gradient("d_rel_bias", results["d_rel_bias"], inputs, table="rel_bias")
        rounded = golden["d_rel_bias"].to(dtype).double() - golden["d_rel_bias"]
        error = results["d_rel_bias"].double() - golden["d_rel_bias"]
        assert error.norm() < rounded.norm(), "the gradient was rounded to the inputs' dtype"


@pytest.mark.parametrize("fast", [False, True], ids=["float32_products", "fast_products"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_are_rounded_once(dtype: torch.dtype, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that sum over many blocks of queries have, in norm, hardly more error than rounding the result alone makes.

    With products in the inputs' dtype, P and dS are rounded, and so is the product of each block. Where numbers of both signs are
    summed, each of the two adds in squares what rounding the result does.
    """
    monkeypatch.setattr(products, "fast_dtypes", lambda: {dtype} if fast else set())
    monkeypatch.setattr(products, "FEWEST_PRODUCTS", 0)
    cut_blocks(monkeypatch, 128, 1, 64)
    inputs = make_inputs(1, 1, 3000, 24, 16, num_rows=41, dtype=dtype, seed=3)
    golden = dense_gradients(inputs)._asdict()
    results = forward_backward(attend, inputs)
    for name in ("d_key", "d_value", "d_rel_key"):
        unavoidable = (golden[name].to(dtype).double() - golden[name]).norm()
        assert unavoidable > 0
        # To round twice would add as much again, in squares. Half of that is allowed, and of two more roundings twice as much.
        beyond = (results[name].double() - golden[name]).norm() - unavoidable
        allowed = 2 * (3**0.5 - 1) if fast else (2**0.5 - 1) / 2
        within(f"{name}, beyond rounding", beyond.clamp_min(0), allowed * unavoidable)


@pytest.mark.parametrize("num_keys", [5, 40])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"key_lengths": torch.tensor([0, 4])},
        {"is_causal": True, "query_offset": -7},
        {"attn_mask": torch.arange(30)[:, None] > 3},
    ],
    ids=["full", "lengths", "causal", "mask"],
)
def test_lse_is_computed_if_it_is_wanted(arguments: dict[str, Any], num_keys: int, block_size: None) -> None:
    """Without it, out and all gradients are the same to the bit, also those of queries that see nothing."""
    inputs = make_inputs(2, 2, 30, num_keys, 8, num_rows=9, dtype=torch.float32, seed=4)
    results = []
    for return_lse, count in ((True, 30), (False, 0)):
        leaves = [tensor.detach().requires_grad_() for tensor in inputs[:4] if tensor is not None]
        out, lse = relative_attention(*resolve(Arguments.of(*leaves, **arguments)), BLOCKWISE, return_lse)
        assert lse.shape == (2, 2, count)
        results.append((out, *torch.autograd.grad(out, leaves, inputs.d_out)))
    for expected, result in zip(*results, strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("return_lse", [False, True])
def test_only_return_lse_asks_for_lse(return_lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The public functions compute lse for nobody else: it takes passes over all scores."""
    computed, softmax = [], attention.softmax

    def spy(block: Any, probs: torch.Tensor, lse: torch.Tensor | None = None, *others: Any) -> torch.Tensor:
        computed.append(lse is not None)
        return softmax(block, probs, lse, *others)

    monkeypatch.setattr(attention, "softmax", spy)
    query = make_inputs(1, 2, 20, 20, 8, num_rows=None, dtype=torch.float32, seed=0).query
    attend(query, query, query, return_lse=return_lse)
    assert computed == [return_lse]


@pytest.mark.parametrize("tables", [{}, {"per_head": True}, {"rel_width": 3}, {"rel_p2c": True}], ids=" ".join)
@pytest.mark.parametrize("num_rows", [81, 9])
def test_one_query(num_rows: int, tables: dict[str, Any]) -> None:
    """A query that stands after its keys, as in decoding: with a table for all of them, and with one for the nearest."""
    inputs = make_inputs(2, 4, 1, 41, 8, num_rows=num_rows, key_heads=2, **tables, dtype=torch.float64, seed=6)
    results = forward_backward(attend, inputs, query_offset=40, rel_scale=0.7, enable_gqa=True)
    expected = dense_gradients(inputs, query_offset=40, rel_scale=0.7)._asdict()
    for name, result in results.items():
        assert_same(name, result, expected[name])


@pytest.mark.parametrize("is_causal", [False, True])
def test_heads_that_share_a_key_in_blocks_of_their_own(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of the key and the value are the sum over the heads, though each block has all queries and all keys."""
    cut_blocks(monkeypatch, 64, 1, 64)
    inputs = make_inputs(2, 8, 9, 13, 8, num_rows=15, key_heads=1, dtype=torch.float64, seed=5)
    arguments: dict[str, Any] = {"enable_gqa": True, "is_causal": is_causal, "query_offset": 2}
    results = forward_backward(attend, inputs, **arguments)
    expected = dense_gradients(inputs, **{name: each for name, each in arguments.items() if name != "enable_gqa"})._asdict()
    for name, result in results.items():
        assert_same(name, result, expected[name])


@pytest.mark.parametrize("softcap", [None, 50.0])
@pytest.mark.parametrize("name", ["rel_key", "rel_p2c"])
def test_end_rows_that_no_visible_pair_has_may_hold_nan(name: str, softcap: float | None, block_size: None) -> None:
    """Queries before all keys see none: the rows of the future are read for no key that is far from them."""
    inputs = make_inputs(1, 2, 33, 5, 4, num_rows=5, rel_p2c=True, dtype=torch.float64, seed=3)
    spoilt = getattr(inputs, name).clone()
    spoilt[3:] = math.nan
    arguments: dict[str, Any] = {"is_causal": True, "query_offset": -9, "softcap": softcap}
    results = forward_backward(attend, inputs._replace(**{name: spoilt}), **arguments)
    expected = dense_gradients(inputs, **arguments)._asdict()
    for which, result in results.items():
        assert_same(which, result, expected[which])


@pytest.mark.parametrize("num_keys", [9, 40])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
@pytest.mark.parametrize("masked", [False, True])
def test_biases_that_hide_all_keys(masked: bool, implementation: str, return_lse: bool, num_keys: int, block_size: None) -> None:
    """A query whose logits are all -inf, by the bias alone or with a mask, sees nothing; the others are as ever."""
    inputs = make_inputs(2, 2, 30, num_keys, 8, num_rows=29 + num_keys, rel_bias=True, dtype=torch.float64, seed=4)
    positions = RelativePositions(-29, num_keys - 1)
    assert inputs.rel_bias is not None and inputs.rel_key is not None and inputs.d_out is not None
    bias = inputs.rel_bias.clone()
    bias[..., 29 - 6 :] = -math.inf  # only keys more than six before the query are seen
    mask = torch.arange(num_keys) > 3 if masked else None  # the fourth on
    leaves = [each.detach().requires_grad_() for each in (inputs.query, inputs.key, inputs.value, inputs.rel_key, bias)]
    given: dict[str, Any] = {"positions": positions, "implementation": implementation}
    results = fused_relative_attention(*leaves[:4], rel_bias=leaves[4], attn_mask=mask, return_lse=return_lse, **given)
    out = results[0] if isinstance(results, tuple) else results
    gradients = torch.autograd.grad(out, leaves, inputs.d_out)
    blind = torch.arange(30) <= (10 if masked else 6)
    assert not out[:, :, blind].any() and out.isfinite().all() and out[:, :, ~blind].any()
    assert all(gradient.isfinite().all() for gradient in gradients) and not gradients[0][:, :, blind].any()
    assert not gradients[4][..., 29 - 6 :].any()
    if isinstance(results, tuple):
        assert (results[1][:, :, blind] == -math.inf).all() and results[1][:, :, ~blind].isfinite().all()
    i, j = torch.arange(30)[:, None], torch.arange(num_keys)
    visible = (j - i < -6) & (torch.ones(num_keys, dtype=torch.bool) if mask is None else mask)
    expected = fused_relative_attention(*leaves[:4], rel_bias=inputs.rel_bias, attn_mask=visible, **given)
    assert_same("out", out, expected)
    for number, other in enumerate(torch.autograd.grad(expected, leaves[:4], inputs.d_out)):
        assert_same(str(number), gradients[number], other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_repeatable(dtype: torch.dtype, block_size: None) -> None:
    """Bit for bit, also where torch is told to be deterministic (which also makes it complain where it cannot)."""
    inputs = make_inputs(2, 3, 97, 111, 16, num_rows=21, dtype=dtype, seed=6)
    first, second = (forward_backward(attend, inputs, is_causal=True) for _ in range(2))
    torch.use_deterministic_algorithms(True)
    try:
        third = forward_backward(attend, inputs, is_causal=True)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, result in first.items():
        assert torch.equal(result, second[name]) and torch.equal(result, third[name]), name


def test_blocks_and_panels(block_size: None, request: pytest.FixtureRequest) -> None:
    """The fixture that the tests above rely on does cut queries and heads."""
    query, table = torch.zeros(1, 2, 37, 8), torch.zeros(73, 8)
    blocks = list(BlockwiseCall(*resolve(Arguments.of(query, query, query, table))).blocks())
    bands = [block.rel_key for block in blocks]
    small = "small_blocks" in request.node.name
    assert [(block.group.heads.start, block.queries.start, block.queries.stop) for block in blocks] == (
        [(head, *queries) for head in (0, 1) for queries in ((26, 37), (13, 26), (0, 13))] if small else [(0, 0, 37)]
    )
    assert [(band.num_panels, band.num_full) for band in bands if band] == ([(3, 2), (4, 3), (4, 3)] * 2 if small else [(1, 1)])


def test_no_heads_of_the_query() -> None:
    """Keys and values that no head attends to have gradients, which are zero."""
    query, key, value = (torch.randn(2, heads, 5, 8, requires_grad=True) for heads in (0, 2, 2))
    out = fused_relative_attention(query, key, value, enable_gqa=True, implementation="blockwise")
    for gradient in torch.autograd.grad(out.sum(), (key, value)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # terms, arguments
    "table": ({}, {}),
    "clipped_causal": ({"num_rows": 9}, {"is_causal": True}),
    "no_table": ({"num_rows": None}, {}),
    "all_terms": ({**FURTHER_TABLES, "rel_width": 16}, {}),
    "p2c": ({"rel_p2c": True, "num_rows": 9}, {}),
    "softcap": ({"rel_bias": True}, {"softcap": 30.0}),
    "float_mask": ({"rel_value": True}, {"attn_mask": True}),
}


DEVIATIONS = (1, 8, 32, 128, 2**10, 2**13, 2**27)
"""Powers of two."""


def quarters(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return (4 * tensor).round() * (factor / 4)


def scaled(inputs: Inputs, deviation: float) -> Inputs:
    """Query, key and what is added to their products, of this standard deviation; the bias of that of products.

    They have so few digits that float32 holds all logits exactly. If they were rounded, two keys with nearly the same would
    decide on the largest error.
    """
    names = ("query", "key", "rel_key", "rel_query", "rel_bias", "rel_p2c")
    factors = {name: deviation ** (2 if name == "rel_bias" else 1) for name in names if getattr(inputs, name) is not None}
    return inputs._replace(**{name: quarters(getattr(inputs, name), factor) for name, factor in factors.items()})


@pytest.mark.parametrize("length", [11, 67, 200])
@pytest.mark.parametrize("deviation", DEVIATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_error_rule_at_any_scale(kind: str, deviation: float, length: int, block_size: None) -> None:
    """Every gradient of float32 calls is within its budget, also through lse.

    Probabilities that are exp(logits - lse) sum to 1.02 at a deviation of 1e3, and to 2e12 at 1e4.
    """
    terms, arguments = KINDS[kind]
    options = {"num_rows": 2 * length - 1, **terms}
    inputs = scaled(make_inputs(1, 3, length, length, 16, **options, dtype=torch.float32, seed=5), deviation)
    if "attn_mask" in arguments:
        generator = torch.Generator().manual_seed(1)
        arguments = {"attn_mask": quarters(torch.randn(1, 3, length, length, generator=generator), deviation**2)}
    golden, reference = unlucky_reference(inputs, **arguments)
    for name, result in results_of("blockwise", inputs, **arguments).items():
        assert result.isfinite().all(), name
        if not golden[name].any():  # saturated: a single key has all the attention
            assert not result.any(), name
            continue
        factor = 3 if name.startswith("d_") else 2
        # Of few large terms plain torch rounds products and sums: a unit in all, of which luck may hide most.
        finite = golden[name].isfinite()
        assert torch.equal(result.isfinite(), finite) and torch.equal(result[~finite].double(), golden[name][~finite])
        least = (factor + 2) * last_place(float(golden[name][finite].abs().max()), torch.float32)
        budget = max(error_budget(golden[name], reference[name], torch.float32, factor=factor), least)
        within(name, (result.double() - golden[name])[finite].abs(), budget)


@pytest.mark.parametrize("num_keys", [5, 15, 16, 31, 300])
@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_probabilities_sum_to_one(deviation: float, num_keys: int, block_size: None) -> None:
    """In the forward and in the backward: with values and d_out of ones, out and the sum of d_value say so."""
    inputs = scaled(make_inputs(2, 2, 40, num_keys, 16, 1, num_rows=79, dtype=torch.float32, seed=2), deviation)
    inputs = inputs._replace(value=torch.ones_like(inputs.value), d_out=torch.ones_like(inputs.d_out))
    for arguments in ({}, {"softcap": 1e9}):  # the second does not keep the probabilities
        results = forward_backward(attend, inputs, **arguments)
        within("out", (results["out"].double() - 1).abs(), sum_allowance(num_keys, 1.0))
        within("d_value", (results["d_value"].double().sum((2, 3)) - 40).abs(), sum_allowance(num_keys + 40, 40.0))


def test_sequences_of_different_lengths_in_one_block() -> None:
    """They are computed together, and each as by itself, padding of NaN or not."""
    lengths = [13, 1, 0, 40, 29]
    inputs = make_inputs(5, 2, 9, 40, 8, num_rows=15, **FURTHER_TABLES, dtype=torch.float64, seed=1)
    for length, key, value in zip(lengths, inputs.key, inputs.value, strict=True):
        key[:, length:], value[:, length:] = torch.nan, torch.nan
    tensors, spec = resolve(Arguments.of(*inputs[:4], key_lengths=torch.tensor(lengths)))
    assert len(list(BlockwiseCall(tensors, spec).blocks())) == 1
    together = forward_backward(attend, inputs, key_lengths=torch.tensor(lengths))
    tables = ("d_rel_key", "d_rel_value", "d_rel_bias", "d_rel_p2c")
    sums = dict.fromkeys(tables, torch.zeros(()))
    for number, length in enumerate(lengths):
        own = {name: getattr(inputs, name)[number : number + 1] for name in ("query", "key", "value", "d_out", "d_lse")}
        own |= {name: own[name][:, :, :length] for name in ("key", "value")}
        alone = forward_backward(attend, inputs._replace(**own))
        for name, result in alone.items():
            if name in tables:
                sums[name] = sums[name] + result
            elif name in ("d_key", "d_value"):
                assert_same(name, together[name][number : number + 1, :, :length], result)
                assert not together[name][number, :, length:].any(), name
            else:
                assert_same(name, together[name][number : number + 1], result)
    for name, expected in sums.items():
        assert_same(name, together[name], expected)


@pytest.mark.parametrize("batch", [1, 7, 300])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 17])
def test_short_sequences(length: int, batch: int) -> None:
    inputs = make_inputs(batch, 2, length, length, 4, num_rows=2 * length - 1, **FURTHER_TABLES, dtype=torch.float64, seed=length)
    results, expected = results_of("blockwise", inputs), by_hand(inputs)
    for name, result in results.items():
        assert_same(name, result, expected[name])


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("num_keys", [5, 15, 17, 33, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_kept_probabilities(dtype: torch.dtype, num_keys: int, dropout_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those that the backward computes without, bit for bit. (A forward that keeps none may round terms of tables.)"""
    monkeypatch.setattr(products, "fast_dtypes", set)
    inputs = make_inputs(3, 4, 29, num_keys, 64, num_rows=21, key_heads=2, **FURTHER_TABLES, dtype=dtype, seed=3)
    arguments: dict[str, Any] = {"window_size": (17, 30), "key_lengths": torch.tensor([num_keys, 3, 0]), "dropout_p": dropout_p}
    kept: list[bool] = []
    backward = blockwise.backward

    def noticed(*given: Any) -> Any:
        kept.append(given[-1] is not None)
        return backward(*given)

    monkeypatch.setattr(blockwise, "backward", noticed)
    results = []
    for keeps in (True, False):
        if not keeps:
            monkeypatch.setattr(blockwise, "keeps_probs", lambda *_: False)
        results.append(results_of("blockwise", inputs, enable_gqa=True, **arguments))
    assert kept == [True, False]
    for name, result in results[0].items():
        assert torch.equal(result, results[1][name]), name


def test_what_is_kept() -> None:
    """No more than query, key, value and out take, and nothing where nobody differentiates."""
    for length, width, keeps in ((64, 32, True), (128, 32, True), (129, 32, False), (4096, 64, False)):
        query = torch.zeros(1, 1, 2, width)
        key = torch.zeros(1, 1, length, width)
        assert blockwise.keeps_probs(*resolve(Arguments.of(query, key, key))) == keeps
    query = torch.zeros(1, 1, 4, 8)
    operator = torch.ops.triton_relattn.attention_forward.default
    tensors, spec = resolve(Arguments.of(query, query, query))
    for keeps, shape in ((True, (1, 1, 4, 4)), (False, (0,))):
        assert operator(*tensors, *spec, "blockwise", keeps)[3].shape == shape


def test_results_do_not_depend_on_how_a_call_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks and panels, the last of which have fewer queries, against one."""
    inputs = make_inputs(2, 4, 47, 53, 8, num_rows=33, key_heads=2, **FURTHER_TABLES, dtype=torch.float64, seed=4)
    arguments: dict[str, Any] = {"enable_gqa": True, "window_size": (-1, 20), "key_lengths": torch.tensor([53, 31])}
    expected = results_of("blockwise", inputs, **arguments)
    for queries, elements, panel_rows in ((16, 1, 4), (5, 1, 1), (47, 1, 9), (16, 1 << 10, 16), (128, 1 << 12, 20)):
        cut_blocks(monkeypatch, queries, elements, panel_rows)
        for name, result in results_of("blockwise", inputs, **arguments).items():
            assert_same(name, result, expected[name])


@pytest.mark.parametrize("table", [True, False])
def test_memory_is_given_back_at_once(table: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls, and blocks that are done with their frames and bands, are in no cycle that would wait for the garbage collector."""
    cut_blocks(monkeypatch, 16, 1, 4)
    kinds = (partition.BlockwiseCall, partition.Block, partition.Frame, partition.Band)
    alive: dict[Any, list[weakref.ref[Any]]] = {kind: [] for kind in kinds}
    most = dict.fromkeys(kinds, 0)

    def watched(self: Any, *arguments: Any, make: Any, **named: Any) -> None:
        alive[type(self)].append(weakref.ref(self))
        most[type(self)] = max(most[type(self)], sum(each() is not None for each in alive[type(self)]))
        make(self, *arguments, **named)

    for kind in kinds:
        monkeypatch.setattr(kind, "__init__", functools.partialmethod(watched, make=kind.__init__))
    inputs = make_inputs(1, 4, 100, 100, 8, num_rows=199 if table else None, rel_p2c=table, dtype=torch.float32, seed=0)
    gc.disable()
    try:
        forward_backward(attend, inputs, is_causal=True)
    finally:
        gc.enable()
    assert len(alive[partition.Block]) > 20 and most[partition.BlockwiseCall] == 1 and most[partition.Block] <= 2
    # Those of two blocks: with rel_p2c, a block has a frame and a band for each of three ranges of keys beside its own.
    assert most[partition.Frame] <= (8 if table else 2) and most[partition.Band] <= (8 if table else 0)
    assert not any(each() is not None for each in itertools.chain(*alive.values()))


def test_memory_by_names_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks at other places of a sequence take the same memory: there are as many names for four times the length."""
    cut_blocks(monkeypatch, 16, 1, 4)
    names: set[str] = set()
    get = partition.Buffers.__call__

    def watched(self: partition.Buffers, name: str, *others: Any) -> torch.Tensor:
        names.add(name)
        return get(self, name, *others)

    monkeypatch.setattr(partition.Buffers, "__call__", watched)
    counts = []
    for length in (100, 400):
        names.clear()
        inputs = make_inputs(1, 2, length, length, 8, num_rows=25, **FURTHER_TABLES, dtype=torch.float32, seed=0)
        forward_backward(attend, inputs)
        counts.append(len(names))
    assert 0 < counts[0] == counts[1], sorted(names)


def test_blocks_of_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of a block grow with the threads only as far as the call's tensors and their gradients do."""
    monkeypatch.setattr(partition, "ELEMENTS_PER_THREAD", 1 << 14)
    tensors, spec = resolve(Arguments.of(*(torch.randn(2, 4, 300, 8) for _ in range(3))))
    largest = []
    for threads in (1, 2, 4, 64):
        monkeypatch.setattr(partition, "threads_of", lambda device, threads=threads: threads)
        largest.append(max(block.scores.numel() for block in BlockwiseCall(tensors, spec).blocks()))
    of_tensors = 2 * 4 * tensors.query.numel()
    assert largest[0] < largest[1] <= largest[2] <= largest[3] <= max(of_tensors, 8 * partition.BLOCK_QUERIES * 300), largest
