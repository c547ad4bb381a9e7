"""What users of triton_relattn.testing need: right inputs, and assertions that fail when they should, with the numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.tolerance import within
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
BLIND = torch.tensor([0, 0, math.inf], dtype=torch.float64)


def inputs_of(dtype: torch.dtype = torch.float64, **changes: Any) -> Inputs:
    """With every tensor that a call can have."""
    tables = {"rel_width": 3, "rel_value": True, "rel_bias": True, "rel_p2c": True, "per_head": True, "key_heads": 2}
    return make_inputs(2, 4, 5, 7, 8, 6, **{"num_rows": 9, "dtype": dtype, "seed": 11, **tables, **changes})


def test_inputs() -> None:
    """The same numbers in every precision, whatever else a call has; they depend on the seed alone."""
    exact, sharp, state = inputs_of(), inputs_of(sharp=True), torch.get_rng_state()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for name, tensor in inputs_of(dtype)._asdict().items():
            assert torch.equal(tensor, getattr(exact, name).to(torch.float32 if name == "d_lse" else dtype))
    plain = inputs_of(rel_width=None, rel_value=False, rel_bias=False, rel_p2c=False)
    assert torch.equal(plain.query, exact.query) and torch.equal(plain.d_out, exact.d_out) and not plain.terms()
    assert not torch.equal(inputs_of(seed=12).query, exact.query) and torch.equal(state, torch.get_rng_state())
    assert torch.equal(sharp.query, exact.query * SHARP_FACTOR) and torch.equal(sharp.key, exact.key)
    assert torch.equal(sharp.value, exact.value + SHARP_SHIFT) and torch.equal(sharp.d_out, exact.d_out + SHARP_SHIFT)
    with pytest.raises(ValueError, match="rel_width=3"):
        inputs_of(num_rows=None)


def test_shapes() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in inputs_of()._asdict().items()}
    positions = {"query": (2, 4, 5, 8), "key": (2, 2, 7, 8), "value": (2, 2, 7, 6), "rel_query": (2, 4, 5, 3)}
    tables = {"rel_key": (4, 9, 3), "rel_value": (4, 9, 6), "rel_bias": (4, 9), "rel_p2c": (4, 9, 8)}
    assert shapes == {**positions, **tables, "d_out": (2, 4, 5, 6), "d_lse": (2, 4, 5)}
    shared = inputs_of(per_head=False).terms()
    assert [tuple(shared[name].shape) for name in ("rel_value", "rel_bias", "rel_p2c")] == [(9, 6), (9,), (9, 8)]


def test_different_strides() -> None:
    """The same numbers, no two tensors laid out alike, NaN between them; or the order in memory that is asked for."""
    for per_head in (False, True):
        inputs = inputs_of(torch.bfloat16, per_head=per_head)
        strided = with_different_strides(inputs)
        for name, tensor in strided._asdict().items():
            assert torch.equal(tensor, getattr(inputs, name)) and not tensor.is_contiguous() and tensor.storage_offset() > 0
            assert torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).isnan().any()
    five = (strided.query, strided.key, strided.value, strided.d_out, strided.terms()["rel_query"])
    assert len({tuple(torch.tensor(each.stride()).argsort(descending=True).tolist()) for each in five}) == 5
    tables = strided.rel_key, strided.terms()["rel_value"], strided.terms()["rel_p2c"]
    assert len({tuple(torch.tensor(each.stride()).argsort().tolist()) for each in tables if each is not None}) > 1
    view = in_memory_order(tensor := torch.arange(24.0).view(2, 3, 4), 2, 0, 1, step=3)
    assert torch.equal(view, tensor) and view.stride() == (4 * 3, 3, 3 * 4 * 3)


def test_a_budget_passes_and_fails_at_its_edge() -> None:
    """Of float32: 2 * 0.01 and two units in the last place of 3, that is 2 * 2^-22; of an exact reference the two units."""
    third = torch.tensor([0, 0, 1], dtype=torch.float64)
    assert_within_budget("out", (GOLDEN + 0.02 * third).float(), GOLDEN, REFERENCE, factor=2)
    with pytest.raises(AssertionError) as raised:
        assert_within_budget("out", (GOLDEN + 1.001 * (0.02 + 2**-21) * third).float(), GOLDEN, REFERENCE, factor=2)
    for part in ("out: error 2.002e-02", "budget 2.000e-02", "2 * 1.000e-02", "worst at (2,)", "expected 0.5", "1 of 3 elements"):
        assert part in str(raised.value)
    unit = last_place(3.0, torch.float16)
    assert unit == 2.0**-9
    assert_within_budget("out", GOLDEN.half() + (2 * unit * third).half(), GOLDEN, GOLDEN, factor=2, exact_reference=True)
    with pytest.raises(AssertionError, match="exceeds the budget"):
        assert_within_budget("out", GOLDEN.half() + (3 * unit * third).half(), GOLDEN, GOLDEN, factor=2, exact_reference=True)
    assert_within_budget("lse", GOLDEN - BLIND, GOLDEN - BLIND, REFERENCE - BLIND, factor=2)
    with pytest.raises(AssertionError, match=r"lse: error .* worst at \(0,\)"):
        assert_within_budget("lse", GOLDEN + third.flip(0) - BLIND, GOLDEN - BLIND, REFERENCE - BLIND, factor=2)


NAN = torch.tensor([1, math.nan, 1])


@pytest.mark.parametrize(
    ("actual", "golden", "reference", "message"),
    [
        (GOLDEN, 0 * GOLDEN, REFERENCE, "golden result is all zero"),
        (GOLDEN, GOLDEN, GOLDEN, "the reference has no error"),
        (GOLDEN[:0], GOLDEN[:0], GOLDEN[:0], "nothing to compare"),
        (GOLDEN[:2], GOLDEN, REFERENCE, r"shape \(2,\), expected \(3,\)"),
        (GOLDEN * NAN, GOLDEN, REFERENCE, r"1 of 3 elements are not finite .* first at \(1,\): got nan"),
        (GOLDEN + BLIND, GOLDEN, REFERENCE, r"not finite .* \(2,\): got inf"),
        (GOLDEN, GOLDEN, REFERENCE * math.nan, r"\(reference\): 3 of 3 elements are not finite"),
        (GOLDEN, GOLDEN * math.nan, REFERENCE, "golden result has NaN"),
        (GOLDEN, GOLDEN - BLIND, REFERENCE, r"not -inf\) where"),
    ],
)
def test_a_budget_refuses(actual: torch.Tensor, golden: torch.Tensor, reference: torch.Tensor, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_within_budget("out", actual, golden, reference, factor=2)


@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per_head"])
@pytest.mark.parametrize("table", ["rel_key", "rel_value", "rel_bias", "rel_p2c"])
def test_the_gradient_of_each_table_fails_beyond_its_budget(table: str, per_head: bool) -> None:
    """With every argument that changes dS or P."""
    inputs = inputs_of(torch.bfloat16, sharp=True, per_head=per_head)
    torch.manual_seed(0)
    arguments: dict[str, Any] = {"rel_scale": 0.7, "softcap": 20.0, "dropout_p": 0.3, "window_size": (3, 4)}
    arguments["keep"] = dropout_mask(2, 4, 5, 7, 0.3)
    golden, budget = table_gradient_budget(inputs, table=table, **arguments)
    assert 0 < budget < golden.abs().max()
    shift = torch.zeros_like(golden)
    shift.view(-1)[golden.numel() // 2] = budget
    for right in (golden + 0.99 * shift, golden.to(torch.bfloat16)):
        assert_table_gradient(table, right, inputs, table=table, **arguments)
    with pytest.raises(AssertionError, match=r"exceeds the budget .* rounded once to torch\.bfloat16"):
        assert_table_gradient(table, golden + 1.01 * shift, inputs, table=table, **arguments)
    with pytest.raises(AssertionError, match="golden table gradient is all zero"):
        silent = inputs._replace(d_out=0 * inputs.d_out, d_lse=0 * inputs.d_lse)
        assert_table_gradient(table, 0 * golden, silent, table=table)
    with pytest.raises(ValueError, match=f"no table {table}"):
        without: dict[str, Any] = {table: None, "rel_query": None}
        table_gradient_budget(inputs._replace(**without), table=table)


def test_dropout_masks() -> None:
    state = torch.get_rng_state()
    assert dropout_mask(2, 3, 4, 5, 0.0).all() and torch.equal(state, torch.get_rng_state())
    assert dropout_mask(2, 3, 4, 5, 0.5).shape == (2, 3, 4, 5) and not torch.equal(state, torch.get_rng_state())
    assert not dropout_mask(2, 3, 4, 5, 1.0).any()
    for wrong in (-0.1, 1.5):
        with pytest.raises(ValueError, match=r"dropout_p must lie in \[0, 1\], got"):
            dropout_mask(1, 1, 2, 2, wrong)
    with pytest.raises(ValueError, match=r"dropout_p = 0\.5 needs keep"):
        dense_gradients(inputs_of(), dropout_p=0.5)


def test_gradients_close_fp32() -> None:
    """A gradient that cancels to nothing is measured against 5% of the largest gradient's RMS."""
    large, small = torch.full((4, 4), 100.0, dtype=torch.float64), torch.full((2, 2), 1e-9, dtype=torch.float64)
    room = 2e-4 * 0.05 * 100
    assert_gradients_close_fp32("large", large * (1 + 1.9e-4), large, [large, small])
    assert_gradients_close_fp32("small", small + 0.9 * room, small, [large, small])
    for actual, golden, message in (
        (large * (1 + 2.1e-4), large, r"norm of the error 8\.4\d*e-02 exceeds the budget 8\.000e-02"),
        (small + 1.1 * room, small, "norm of the error"),
        (large * math.nan, large, "not finite"),
    ):
        with pytest.raises(AssertionError, match=message):
            assert_gradients_close_fp32("each", actual, golden, [large, small])
    with pytest.raises(AssertionError, match="vacuous"):
        assert_gradients_close_fp32("zero", 0 * large, 0 * large, [0 * large])


def test_dense_gradients_by_finite_differences() -> None:
    """The hand-written backward against central differences of its own forward, in one random direction per input."""
    inputs, generator = inputs_of(), torch.Generator().manual_seed(0)
    mask = torch.arange(7.0).masked_fill(torch.arange(7) == 4, -math.inf)
    arguments: dict[str, Any] = {"query_offset": torch.tensor([2, -1]), "window_size": (3, 2), "rel_scale": 0.7, "softcap": 2.0}
    keep = torch.rand(2, 4, 5, 7, generator=generator) > 0.3
    arguments |= {"attn_mask": mask, "dropout_p": 0.3, "keep": keep, "key_lengths": torch.tensor([7, 5])}

    def terms(changed: Inputs) -> torch.Tensor:
        """The numbers whose sum is the loss."""
        dense = dense_gradients(changed, **arguments)
        logsumexp = dense.lse.masked_fill(dense.lse == -math.inf, 0)
        return torch.cat(((dense.out * inputs.d_out).flatten(), (logsumexp * inputs.d_lse).flatten()))

    found = dense_gradients(inputs, **arguments)._asdict()
    step = torch.finfo(torch.float64).eps ** (1 / 3)  # balances rounding and the cubic term
    for name, tensor in inputs._asdict().items():
        if name not in ("d_out", "d_lse"):
            direction = torch.randn(tensor.shape, dtype=torch.float64, generator=generator)
            ends = [terms(inputs._replace(**{name: tensor + sign * step * direction})) for sign in (1, -1)]
            expected = float((found[f"d_{name}"] * direction).sum())
            rounding = 8 * step**3 * float(ends[0].abs().sum()) / step  # of each term, some of float64's
            error = abs(float((ends[0] - ends[1]).sum()) / (2 * step) - expected)
            within(name, error, 100 * step**2 * abs(expected) + rounding)
