"""The shipped helpers: right inputs, and assertions that fail when they should, with the numbers in the message."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.tolerance import within
from triton_relattn._core.spec import DIFFERENTIABLE
from triton_relattn.testing import (
    SHARP_FACTOR,
    SHARP_SHIFT,
    Inputs,
    assert_gradients_close_fp32,
    assert_table_gradient,
    assert_within_budget,
    dense_gradients,
    dropout_mask,
    in_memory_order,
    last_place,
    make_inputs,
    table_gradient_budget,
    with_different_strides,
)

GOLDEN = torch.tensor([1.0, -3.0, 0.5], dtype=torch.float64)
REFERENCE = GOLDEN + torch.tensor([0.0, 0.01, 0.0], dtype=torch.float64)


def small_inputs(dtype: torch.dtype = torch.float64, sharp: bool = False) -> Inputs:
    return make_inputs(2, 3, 5, 7, 8, 4, num_rows=9, per_head=True, dtype=dtype, seed=11, sharp=sharp)


def all_inputs(dtype: torch.dtype = torch.float64, sharp: bool = False, per_head: bool = True) -> Inputs:
    """With every tensor that a call can have."""
    return make_inputs(
        2,
        4,
        5,
        7,
        8,
        6,
        num_rows=9,
        per_head=per_head,
        key_heads=2,
        rel_width=3,
        rel_value=True,
        rel_bias=True,
        rel_p2c=True,
        dtype=dtype,
        seed=11,
        sharp=sharp,
    )


def test_inputs_are_the_same_numbers_in_every_precision() -> None:
    exact = all_inputs()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        rounded = all_inputs(dtype)
        for name, tensor in rounded._asdict().items():
            expected_dtype = torch.float32 if name == "d_lse" else dtype
            assert tensor.dtype == expected_dtype
            assert torch.equal(tensor, getattr(exact, name).to(expected_dtype))
        assert torch.equal(rounded.to(torch.float64).key, rounded.key.double())


def test_inputs_depend_on_the_seed_alone() -> None:
    torch.manual_seed(0)
    first = all_inputs()
    torch.manual_seed(1)
    for one, other in zip(first, all_inputs(), strict=True):
        assert one is not None and other is not None and torch.equal(one, other)
    other_seed = make_inputs(2, 3, 5, 7, 8, 4, num_rows=9, dtype=torch.float64, seed=12)
    assert not torch.equal(first.query, other_seed.query)


def test_further_tensors_leave_the_others_as_they_are() -> None:
    """The numbers of a call do not depend on what it could have besides."""
    tables: dict[str, Any] = {"rel_value": True, "rel_bias": True, "rel_p2c": True}
    plain = make_inputs(2, 3, 5, 7, 8, 4, num_rows=9, per_head=True, **tables, dtype=torch.float64, seed=11)
    for name, tensor in small_inputs()._asdict().items():
        assert tensor is None or torch.equal(tensor, getattr(plain, name)), name
    assert list(plain.terms()) == ["rel_value", "rel_bias", "rel_p2c"] and not small_inputs().terms()


def test_a_rel_query_needs_a_table() -> None:
    for tables in ({"num_rows": None}, {"num_rows": 9, "rel_key": False}):
        with pytest.raises(ValueError, match="rel_width=3"):
            make_inputs(1, 1, 2, 2, 8, rel_width=3, dtype=torch.float32, seed=0, **tables)  # type: ignore[arg-type]


def test_shapes_of_everything() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in all_inputs()._asdict().items()}
    assert shapes == {
        "query": (2, 4, 5, 8),
        "key": (2, 2, 7, 8),
        "value": (2, 2, 7, 6),
        "rel_key": (4, 9, 3),
        "d_out": (2, 4, 5, 6),
        "d_lse": (2, 4, 5),
        "rel_query": (2, 4, 5, 3),
        "rel_value": (4, 9, 6),
        "rel_bias": (4, 9),
        "rel_p2c": (4, 9, 8),
    }
    shared = all_inputs(per_head=False).terms()
    assert shared["rel_value"].shape == (9, 6) and shared["rel_bias"].shape == (9,)
    assert shared["rel_p2c"].shape == (9, 8)
    no_key = make_inputs(1, 1, 2, 2, 8, num_rows=3, rel_key=False, rel_bias=True, dtype=torch.float32, seed=0)
    assert no_key.rel_key is None and list(no_key.terms()) == ["rel_bias"]


def test_shapes() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in small_inputs()._asdict().items() if tensor is not None}
    assert shapes == {
        "query": (2, 3, 5, 8),
        "key": (2, 3, 7, 8),
        "value": (2, 3, 7, 4),
        "rel_key": (3, 9, 8),
        "d_out": (2, 3, 5, 4),
        "d_lse": (2, 3, 5),
    }
    shared = make_inputs(1, 3, 2, 2, 8, num_rows=9, dtype=torch.float32, seed=0)
    assert shared.rel_key is not None and shared.rel_key.shape == (9, 8) and shared.value.shape == (1, 3, 2, 8)
    assert make_inputs(1, 1, 2, 2, 8, num_rows=None, dtype=torch.float32, seed=0).rel_key is None


def test_sharp_inputs() -> None:
    plain, sharp = small_inputs(), small_inputs(sharp=True)
    assert torch.equal(sharp.query, plain.query * SHARP_FACTOR)
    assert torch.equal(sharp.value, plain.value + SHARP_SHIFT) and torch.equal(sharp.d_out, plain.d_out + SHARP_SHIFT)
    assert torch.equal(sharp.key, plain.key)


def test_different_strides() -> None:
    """The same numbers, no two tensors laid out alike, NaN between them."""
    inputs = all_inputs(torch.bfloat16)
    strided = with_different_strides(inputs)
    for name, tensor in strided._asdict().items():
        assert torch.equal(tensor, getattr(inputs, name)) and not tensor.is_contiguous()
        assert tensor.storage_offset() > 0 and torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).isnan().any()
    five = (strided.query, strided.key, strided.value, strided.d_out, strided.terms()["rel_query"])
    orders = {tuple(torch.tensor(tensor.stride()).argsort(descending=True).tolist()) for tensor in five}
    assert len(orders) == 5
    shared = with_different_strides(all_inputs(per_head=False)).terms()
    assert shared["rel_bias"].stride() == (3,) and not shared["rel_value"].is_contiguous()


def test_in_memory_order() -> None:
    tensor = torch.arange(24.0).view(2, 3, 4)
    view = in_memory_order(tensor, 2, 0, 1, step=3)
    assert torch.equal(view, tensor)
    assert view.stride() == (4 * 3, 3, 3 * 4 * 3)


def test_budget_passes_and_fails_at_its_edge() -> None:
    """Budget for float32: 2 * 0.01 and two units in the last place of 3, that is 2 * 2^-22."""
    budget = 0.02 + 2 * 2**-22
    assert_within_budget("out", (GOLDEN + torch.tensor([0, 0, 0.02])).float(), GOLDEN, REFERENCE, factor=2)
    with pytest.raises(AssertionError) as raised:
        assert_within_budget("out", (GOLDEN + torch.tensor([0.001, 0, 1.001 * budget])).float(), GOLDEN, REFERENCE, factor=2)
    for part in ("out: error 2.002e-02", "budget 2.000e-02", "2 * 1.000e-02", "worst at (2,)", "expected 0.5", "1 of 3 elements"):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("actual", "golden", "reference", "message"),
    [
        (GOLDEN, 0 * GOLDEN, REFERENCE, "golden result is all zero"),
        (GOLDEN, GOLDEN, GOLDEN, "the reference has no error"),
        (GOLDEN[:0], GOLDEN[:0], GOLDEN[:0], "nothing to compare"),
        (GOLDEN[:2], GOLDEN, REFERENCE, r"shape \(2,\), expected \(3,\)"),
        (
            GOLDEN * torch.tensor([1, math.nan, 1]),
            GOLDEN,
            REFERENCE,
            r"1 of 3 elements are not finite .* first at \(1,\): got nan",
        ),
        (GOLDEN * torch.tensor([1, 1, math.inf]), GOLDEN, REFERENCE, r"not finite .* \(2,\): got inf"),
        (GOLDEN, GOLDEN, REFERENCE * math.nan, r"\(reference\): 3 of 3 elements are not finite"),
        (GOLDEN, GOLDEN * math.nan, REFERENCE, "golden result has NaN"),
        (GOLDEN, GOLDEN - torch.tensor([0, 0, math.inf]), REFERENCE, r"not -inf\) where"),
    ],
)
def test_budget_refuses(actual: torch.Tensor, golden: torch.Tensor, reference: torch.Tensor, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_within_budget("out", actual, golden, reference, factor=2)


def test_budget_of_a_row_that_sees_nothing() -> None:
    blind = torch.tensor([0, 0, math.inf], dtype=torch.float64)
    assert_within_budget("lse", GOLDEN - blind, GOLDEN - blind, REFERENCE - blind, factor=2)
    with pytest.raises(AssertionError, match=r"lse: error .* worst at \(0,\)"):
        assert_within_budget("lse", GOLDEN - blind + torch.tensor([1, 0, 0]), GOLDEN - blind, REFERENCE - blind, factor=2)


def test_exact_reference_leaves_two_units_in_the_last_place() -> None:
    unit = last_place(3.0, torch.float16)
    assert unit == 2.0**-9
    for units, fails in ((2, False), (3, True)):
        actual = GOLDEN.half() + torch.tensor([0, units * unit, 0]).half()
        if fails:
            with pytest.raises(AssertionError, match="exceeds the budget"):
                assert_within_budget("out", actual, GOLDEN, GOLDEN, factor=2, exact_reference=True)
        else:
            assert_within_budget("out", actual, GOLDEN, GOLDEN, factor=2, exact_reference=True)


def test_table_gradient_fails_beyond_its_budget() -> None:
    inputs = make_inputs(2, 2, 33, 35, 16, num_rows=21, dtype=torch.bfloat16, seed=0, sharp=True)
    golden, budget = table_gradient_budget(inputs, is_causal=True)
    assert 0 < budget < golden.abs().max()
    shift = torch.zeros_like(golden)
    shift[3, 5] = budget
    assert_table_gradient("d_rel_key", golden + 0.99 * shift, inputs, is_causal=True)
    with pytest.raises(AssertionError, match=r"worst at \(3, 5\)"):
        assert_table_gradient("d_rel_key", golden + 1.01 * shift, inputs, is_causal=True)
    with pytest.raises(AssertionError, match="golden table gradient is all zero"):
        silent = inputs._replace(d_out=torch.zeros_like(inputs.d_out), d_lse=torch.zeros_like(inputs.d_lse))
        assert_table_gradient("d_rel_key", torch.zeros_like(golden), silent)
    with pytest.raises(ValueError, match="no table rel_key"):
        table_gradient_budget(inputs._replace(rel_key=None))


@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per_head"])
@pytest.mark.parametrize("table", ["rel_key", "rel_value", "rel_bias", "rel_p2c"])
def test_gradient_of_each_table_fails_beyond_its_budget(table: str, per_head: bool) -> None:
    """With every argument that changes dS or P."""
    inputs = all_inputs(torch.bfloat16, sharp=True, per_head=per_head)
    torch.manual_seed(0)
    keep = dropout_mask(2, 4, 5, 7, 0.3)
    arguments: dict[str, Any] = {"rel_scale": 0.7, "softcap": 20.0, "dropout_p": 0.3, "keep": keep, "window_size": (3, 4)}
    golden, budget = table_gradient_budget(inputs, table=table, **arguments)
    assert 0 < budget < golden.abs().max()
    shift = torch.zeros_like(golden).flatten()
    shift[golden.numel() // 2] = budget
    shift = shift.view_as(golden)
    assert_table_gradient(table, golden + 0.99 * shift, inputs, table=table, **arguments)
    assert_table_gradient(table, golden.to(torch.bfloat16), inputs, table=table, **arguments)
    with pytest.raises(AssertionError, match=r"exceeds the budget .* rounded once to torch\.bfloat16"):
        assert_table_gradient(table, golden + 1.01 * shift, inputs, table=table, **arguments)


@pytest.mark.parametrize("dropout_p", [-0.1, 1.5])
def test_dropout_mask_refuses(dropout_p: float) -> None:
    with pytest.raises(ValueError, match=r"dropout_p must lie in \[0, 1\], got"):
        dropout_mask(1, 1, 2, 2, dropout_p)


def test_dropout_mask_needs_no_seed_without_dropout() -> None:
    state = torch.get_rng_state()
    assert dropout_mask(2, 3, 4, 5, 0.0).all() and torch.equal(state, torch.get_rng_state())
    assert dropout_mask(2, 3, 4, 5, 0.5).shape == (2, 3, 4, 5) and not torch.equal(state, torch.get_rng_state())
    with pytest.raises(ValueError, match=r"dropout_p = 0\.5 needs keep"):
        dense_gradients(all_inputs(), dropout_p=0.5)


def test_gradients_close_fp32() -> None:
    """A gradient that cancels to nothing is measured against 5% of the largest gradient's RMS."""
    large, small = torch.full((4, 4), 100.0, dtype=torch.float64), torch.full((2, 2), 1e-9, dtype=torch.float64)
    assert_gradients_close_fp32("large", large * (1 + 1.9e-4), large, [large, small])
    with pytest.raises(AssertionError, match=r"large: norm of the error 8\.4\d*e-02 exceeds the budget 8\.000e-02"):
        assert_gradients_close_fp32("large", large * (1 + 2.1e-4), large, [large, small])
    room = 2e-4 * 0.05 * 100
    assert_gradients_close_fp32("small", small + 0.9 * room, small, [large, small])
    with pytest.raises(AssertionError, match="small: norm of the error"):
        assert_gradients_close_fp32("small", small + 1.1 * room, small, [large, small])
    with pytest.raises(AssertionError, match="vacuous"):
        assert_gradients_close_fp32("zero", 0 * large, 0 * large, [0 * large])
    with pytest.raises(AssertionError, match="not finite"):
        assert_gradients_close_fp32("nan", large * math.nan, large, [large])


DIFFERENCES: dict[str, tuple[Inputs, dict[str, Any]]] = {
    "one_table": (small_inputs(), {"is_causal": True, "query_offset": 2, "key_lengths": torch.tensor([7, 5])}),
    "everything": (
        all_inputs(),
        {
            "query_offset": torch.tensor([2, -1]),
            "window_size": (3, 2),
            "rel_scale": 0.7,
            "softcap": 2.0,
            "attn_mask": torch.arange(7.0).masked_fill(torch.arange(7) == 4, -math.inf),
            "dropout_p": 0.3,
            "keep": torch.rand(2, 4, 5, 7, generator=torch.Generator().manual_seed(0)) > 0.3,
        },
    ),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_dense_gradients_by_finite_differences(case: str) -> None:
    """The hand-written backward against central differences of its own forward, in one random direction per input."""
    inputs, arguments = DIFFERENCES[case]

    def loss(changed: Inputs) -> torch.Tensor:
        dense = dense_gradients(changed, **arguments)
        lse = dense.lse.masked_fill(dense.lse == -math.inf, 0)
        return (dense.out * inputs.d_out).sum() + (lse * inputs.d_lse).sum()

    gradients = dense_gradients(inputs, **arguments)._asdict()
    step = torch.finfo(torch.float64).eps ** (1 / 3)  # balances rounding and the cubic term
    names = [name for name in DIFFERENTIABLE if getattr(inputs, name) is not None]
    assert len(names) == (4 if case == "one_table" else 8)
    for name in names:
        tensor = getattr(inputs, name)
        direction = torch.randn(tensor.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        ends = [loss(inputs._replace(**{name: tensor + sign * step * direction})) for sign in (1, -1)]
        expected = float((gradients[f"d_{name}"] * direction).sum())
        slope = float(ends[0] - ends[1]) / (2 * step)
        within(name, abs(slope - expected), 100 * step**2 * abs(expected))
    assert all((gradients[f"d_{name}"] is None) == (name not in names) for name in DIFFERENTIABLE)
