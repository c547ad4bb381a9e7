"""Probabilities that the backward recomputes equal those of the forward, with any tiles and logits, and sum to one.

The dkv kernel has other tiles than the forward, and other rotations. If it rounded scores or normalised the softmax differently,
all dS of a query would be wrong by the same factor, which adds up in gradients of tables, and no other test might notice.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.check import Way
from tests.expected import exact_results, worst_draw
from tests.interpreter.launch import all_results, launches_seen_by
from tests.tolerance import assert_at_most, assert_near, sum_allowance
from triton_relattn import RelativePositions
from triton_relattn.testing import Inputs, assert_within_budget, last_place, make_inputs

LENGTH = 80
REGISTERS = ("scores", "registers")
MIXED = {
    **{"forward": (64, 32, *REGISTERS), "dkv": (64, 64, *REGISTERS), "dq": (64, 32, *REGISTERS)},
    **{"dtable": (16, 16), "stored_dq": (16, 32)},
}
OTHERWISE_MIXED = {"forward": (32, 32, None), "dkv": (16, 16), "dtable": (64, 32), "stored_dq": (32, 16), "dq": (16, 16, None)}
SQUARE = dict.fromkeys(("forward", "dkv", "stored_dq", "dtable", "dq"), (32, 32))
# Each kind of table, and clamped ones near whose ends kernels with different tiles take different branches.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({"num_rows": 2 * LENGTH - 1}, {}),
    "clamp": ({"num_rows": 9}, {}),
    "clamp past": ({"num_rows": 21}, {"positions": RelativePositions(-50, -30)}),
    "clamp future, bias": ({"num_rows": 5, "rel_bias": True}, {"positions": RelativePositions(20, 24)}),
    "zero": ({"num_rows": 11}, {"positions": RelativePositions(-7, 3, "zero")}),
    "bias": ({"num_rows": 2 * LENGTH - 1, "rel_key": False, "rel_bias": True}, {}),
    "rel_query": ({"num_rows": 2 * LENGTH - 1, "rel_width": 16, "rel_bias": True}, {"rel_scale": 0.37}),
    "rel_value": ({"num_rows": 2 * LENGTH - 1, "rel_value": True}, {}),
}
VISIBLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "diagonal": ({"window_size": (0, 0)}, MIXED),
    "first key": ({"key_lengths": torch.tensor([1])}, OTHERWISE_MIXED),
}


@pytest.mark.parametrize("rounded", [pytest.param(False, marks=pytest.mark.slow), True], ids=["float32 terms", "float16 terms"])
@pytest.mark.parametrize("visible", VISIBLE)
@pytest.mark.parametrize("kind", KINDS)
def test_one_visible_key_has_probability_one(kind: str, visible: str, rounded: bool) -> None:
    """P is 1 in each kernel, with logits of several hundred: d_value is the sum of d_out, other gradients are 0."""
    shape, arguments = KINDS[kind]
    which, tiles = VISIBLE[visible]
    arguments = {**arguments, **which}
    inputs = make_inputs(1, 1, LENGTH, LENGTH, 16, **shape, dtype=torch.float16, seed=5, sharp=True)
    inputs = inputs._replace(key=3 * inputs.key, rel_key=None if inputs.rel_key is None else 12 * inputs.rel_key)
    inputs = inputs._replace(d_lse=torch.zeros_like(inputs.d_lse))
    results, golden = all_results(inputs, tiles, rounded, **arguments), exact_results(inputs, **arguments)
    assert float(golden["lse"].abs().max()) > 50  # large enough to show rounding to float16
    for name in ("out", "d_value", "d_rel_value"):
        if name in results:
            off = float((results[name].double() - golden[name]).abs().max())
            assert_at_most(name, off, last_place(float(golden[name].abs().max()), torch.float16))
    # dP - delta is 0 except for float32 rounding; each gradient is a sum of at most LENGTH products with it.
    d_probs = float((inputs.d_out.abs().sum(-1).max() * (inputs.value.abs().max() + 5)).float())
    factors = [tensor for tensor in (inputs.query, inputs.key, inputs.rel_key, inputs.rel_query) if tensor is not None]
    largest = max(1.0, *(float(tensor.abs().max()) for tensor in factors))
    for name, result in results.items():
        if name.startswith("d_") and "value" not in name:
            assert_at_most(name, result.abs().max(), 4 * torch.finfo(torch.float32).eps * LENGTH * d_probs * largest)


def with_deviation(inputs: Inputs, deviation: float) -> Inputs:
    """The inputs with query, key and rel_key of this standard deviation."""
    assert inputs.rel_key is not None
    query, key, rel_key = (deviation * tensor for tensor in (inputs.query, inputs.key, inputs.rel_key))
    return inputs._replace(query=query, key=key, rel_key=rel_key)


@pytest.mark.parametrize("kind", ["full", "clamp", "softcap", "mask"])
@pytest.mark.parametrize(
    "deviation", [100, 1e4, *(pytest.param(value, marks=pytest.mark.slow) for value in (1, 10, 30, 1e3, 1e8))]
)
def test_large_logits(deviation: float, kind: str) -> None:
    """The error rule holds for all gradients with logits of up to 1e17."""
    if kind == "softcap" and deviation > 1e4:
        pytest.skip("all gradients of scores are zero")
    inputs = make_inputs(1, 2, 70, 90, 16, num_rows=21 if kind == "clamp" else 159, dtype=torch.float32, seed=3)
    inputs = with_deviation(inputs, deviation)
    masks: dict[str, dict[str, Any]] = {"softcap": {"softcap": 1e4}, "mask": {"attn_mask": torch.zeros(70, 90)}}
    arguments = masks.get(kind, {})
    results = all_results(inputs, SQUARE, **arguments)
    golden, plain = worst_draw(
        inputs,
        lambda moved: exact_results(moved, **arguments),
        lambda moved: Way("reference").results(moved, **arguments),
        draws=10,  # few logits determine the error
    )
    for name, result in results.items():
        factor = 2 if name in ("out", "lse") else 3
        assert_within_budget(name, result, golden[name], plain[name], factor=factor, exact_reference=True)


def test_large_logits_that_are_exact_lose_no_digits() -> None:
    """The maximum is subtracted before the scale is applied: only differences are rounded."""
    inputs = make_inputs(1, 1, 33, 40, 16, num_rows=9, dtype=torch.float32, seed=3)
    inputs = inputs._replace(**{name: getattr(inputs, name).round() for name in ("query", "key", "rel_key")})
    inputs.query[..., 0], inputs.key[..., 0] = 512, 512
    results, golden = all_results(inputs, SQUARE, scale=0.3), exact_results(inputs, scale=0.3)
    for name in ("out", "d_value"):
        assert_near(name, results[name], golden[name].float())


@pytest.mark.parametrize("kind", ["full", "clamp"])
def test_scores_that_do_not_repeat(kind: str) -> None:
    """If other tiles round large logits differently, so that they exceed the forward's maximum, P does not exceed 1."""
    inputs = make_inputs(1, 1, 40, 50, 16, num_rows=9 if kind == "clamp" else 89, dtype=torch.float32, seed=3)
    inputs = with_deviation(inputs, 1e6)

    def lower_the_maximum(name: str, arguments: dict[str, Any]) -> None:
        if name == "delta":
            maximum = arguments["per_query"].softmax_stats[0][:, :, 0]
            maximum -= 4e-7 * maximum.abs()

    with launches_seen_by(lower_the_maximum):
        results = all_results(inputs, SQUARE)
    assert all(bool(result.isfinite().all()) for result in results.values())
    most = inputs.d_out.abs().sum(2, keepdim=True).double()
    assert_at_most("d_value beyond", (results["d_value"].double().abs() - most).clamp_min(0), sum_allowance(40, most))


@pytest.mark.parametrize("term", ["rel_key", "rel_bias"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_end_rows_that_are_not_finite(value: float, term: str) -> None:
    """What an end row of a clamped table holds reaches queries that see keys beyond it, as in the reference, and no others."""
    inputs = make_inputs(1, 2, 70, 90, 16, num_rows=21, rel_key=term == "rel_key", rel_bias=True, dtype=torch.float32, seed=4)
    getattr(inputs, term).view(21, -1)[-1, 0] = value
    attn_mask = torch.ones(70, 90, dtype=torch.bool)
    attn_mask[:40, 32:] = False  # of these queries, those of a tile see nothing of the next tiles
    arguments: dict[str, Any] = {"positions": RelativePositions(-10, 10, "clamp"), "attn_mask": attn_mask}
    results = all_results(inputs, SQUARE, **arguments)
    expected = Way("reference").results(inputs, **arguments)
    for name in ("out", "lse", "d_query"):
        assert_near(name, results[name], expected[name])
    assert results["out"].isfinite().any() and (term == "rel_bias" or results["out"].isnan().any())
