"""Probabilities that the backward recomputes equal those of the forward, with any tiles and logits, and sum to one.

The dkv kernel has other tiles than the forward, and other rotations. If it rounded scores or normalised the softmax differently,
all dS of a query would be wrong by the same factor, which adds up in gradients of tables, and no other test might notice.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.check import Way, compute, right
from tests.expected import exact_results, worst_draw
from tests.interpreter.guard import launches_seen_by
from tests.samples import Sample
from tests.tolerance import assert_at_most, assert_near, sum_allowance
from triton_relattn.testing import assert_within_budget, last_place, make_inputs

REGISTERS = ("scores", "registers")
MIXED = {
    **{"forward": (64, 32, *REGISTERS), "dkv": (64, 64, *REGISTERS), "dq": (64, 32, *REGISTERS)},
    **{"dtable": (16, 16), "stored_dq": (16, 32)},
}
OTHERWISE_MIXED = {"forward": (32, 32, None), "dkv": (16, 16), "dtable": (64, 32), "stored_dq": (32, 16), "dq": (16, 16, None)}
SQUARE = Way("triton", tiles=dict.fromkeys(("forward", "dkv", "stored_dq", "dtable", "dq"), (32, 32)))
FULL = (-79, 79, "clamp")
# Each kind of table, and clamped ones near whose ends kernels with different tiles take different branches.
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "clamp": {"positions": (-4, 4, "clamp")},
    "clamp past": {"positions": (-50, -30, "clamp")},
    "clamp future, bias": {"positions": (20, 24, "clamp"), "tables": ("rel_key", "rel_bias")},
    "zero": {"positions": (-7, 3, "zero")},
    "bias": {"tables": ("rel_bias",)},
    "rel_query": {"tables": ("rel_key", "rel_bias"), "rel_width": 16, "rel_scale": 0.37},
    "rel_value": {"tables": ("rel_key", "rel_value")},
}
VISIBLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "diagonal": ({"window_size": (0, 0)}, MIXED),
    "first key": ({"key_lengths": (1,)}, OTHERWISE_MIXED),
}


@pytest.mark.parametrize("rounded", [pytest.param(False, marks=pytest.mark.slow), True], ids=["float32 terms", "float16 terms"])
@pytest.mark.parametrize("visible", VISIBLE)
@pytest.mark.parametrize("kind", KINDS)
def test_one_visible_key_has_probability_one(kind: str, visible: str, rounded: bool) -> None:
    """P is 1 in each kernel, with logits of several hundred: d_value is the sum of d_out, other gradients are 0."""
    masks, tiles = VISIBLE[visible]
    fields = {"num_queries": 80, "num_keys": 80, "tables": ("rel_key",), "positions": FULL, "cotangents": "out", "sharp": True}
    sample = Sample(**{**fields, **KINDS[kind], **masks, "dtype": "float16", "seed": 5, "round_terms": rounded})
    inputs, _ = sample.inputs()
    changed = {"key": 3 * inputs.key} | ({} if inputs.rel_key is None else {"rel_key": 12 * inputs.rel_key})
    results, golden = compute(sample, Way("triton", tiles=tiles), **changed), right(sample, "triton", **changed)[0]
    assert float(golden["lse"].golden.abs().max()) > 50  # large enough to show rounding to float16
    for name in results.keys() & {"out", "d_value", "d_rel_value"}:
        exact = golden[name].golden
        off = (results[name].double() - exact).abs().max()
        assert_at_most(name, off, last_place(float(exact.abs().max()), torch.float16))
    # dP - delta is 0 except for float32 rounding; each gradient is a sum of at most 80 products with it.
    d_probs = float((inputs.d_out.abs().sum(-1).max() * (inputs.value.abs().max() + 5)).float())
    factors = (inputs.query, inputs.rel_query, *changed.values())
    largest = max(1.0, *(float(tensor.abs().max()) for tensor in factors if tensor is not None))
    for name, result in results.items():
        if name.startswith("d_") and "value" not in name:
            assert_at_most(name, result.abs().max(), 4 * torch.finfo(torch.float32).eps * 80 * d_probs * largest)


@pytest.mark.parametrize("kind", ["full", "clamp", "softcap", "mask"])
@pytest.mark.parametrize(
    "deviation", [100, 1e4, 1e8, *(pytest.param(value, marks=pytest.mark.slow) for value in (1, 10, 30, 1e3))]
)
def test_large_logits(deviation: float, kind: str) -> None:
    """The error rule holds for all gradients with logits of up to 1e17."""
    if kind == "softcap" and deviation > 1e4:
        pytest.skip("all gradients of scores are zero")
    inputs = make_inputs(1, 2, 70, 90, 16, num_rows=21 if kind == "clamp" else 159, dtype=torch.float32, seed=3)
    inputs = inputs._replace(**{name: deviation * getattr(inputs, name) for name in ("query", "key", "rel_key")})
    masks: dict[str, dict[str, Any]] = {"softcap": {"softcap": 1e4}, "mask": {"attn_mask": torch.zeros(70, 90)}}
    arguments = masks.get(kind, {})
    golden, plain = worst_draw(
        inputs,
        lambda moved: exact_results(moved, **arguments),
        lambda moved: Way("reference").results(moved, **arguments),
        draws=10,  # few logits determine the error
    )
    with SQUARE.computing(Sample()):
        results = SQUARE.results(inputs, **arguments)
    for name, result in results.items():
        factor = 2 if name in ("out", "lse") else 3
        assert_within_budget(name, result, golden[name], plain[name], factor=factor, exact_reference=True)


def test_large_logits_that_are_exact_lose_no_digits() -> None:
    """The maximum is subtracted before the scale is applied: only differences are rounded."""
    sample = Sample(num_queries=33, num_keys=40, tables=("rel_key",), positions=(-4, 4, "clamp"), scale=0.3, seed=3)
    changed = {name: sample.numbers(name).round() for name in ("query", "key", "rel_key")}
    changed["query"][..., 0], changed["key"][..., 0] = 512, 512
    results, golden = compute(sample, SQUARE, **changed), right(sample, "triton", **changed)[0]
    for name in ("out", "d_value"):
        assert_near(name, results[name], golden[name].golden.float())


@pytest.mark.parametrize("positions", [(-44, 44, "clamp"), (-4, 4, "clamp")], ids=["full", "clamp"])
def test_scores_that_do_not_repeat(positions: tuple[int, int, str]) -> None:
    """If other tiles round large logits differently, so that they exceed the forward's maximum, P does not exceed 1."""
    sample = Sample(num_queries=40, num_keys=50, tables=("rel_key",), positions=positions, seed=3)

    def lower_the_maximum(name: str, arguments: dict[str, Any]) -> None:
        if name == "delta":
            maximum = arguments["per_query"].softmax_stats[0][:, :, 0]
            maximum -= 4e-7 * maximum.abs()

    with launches_seen_by(lower_the_maximum):
        results = compute(sample, SQUARE, **{name: 1e6 * sample.numbers(name) for name in ("query", "key", "rel_key")})
    assert all(bool(result.isfinite().all()) for result in results.values())
    most = sample.numbers("d_out").abs().sum(2, keepdim=True).double()
    assert_at_most("d_value beyond", (results["d_value"].double().abs() - most).clamp_min(0), sum_allowance(40, most))


@pytest.mark.parametrize("term", ["rel_key", "rel_bias"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_end_rows_that_are_not_finite(value: float, term: str) -> None:
    """What an end row of a clamped table holds reaches queries that see keys beyond it, as in the reference, and no others."""
    sizes: dict[str, Any] = {"key_heads": 2, "num_queries": 70, "num_keys": 90, "seed": 4}
    sample = Sample(**sizes, tables=tuple(sorted({"rel_bias", term})), positions=(-10, 10, "clamp"))
    attn_mask = torch.ones(70, 90, dtype=torch.bool)
    attn_mask[:40, 32:] = False  # of these queries, those of a tile see nothing of the next tiles
    table = sample.numbers(term)
    table[-1].view(-1)[0] = value
    changed: dict[str, Any] = {term: table, "attn_mask": attn_mask}
    results, expected = (compute(sample, way, **changed) for way in (SQUARE, Way("reference")))
    for name in ("out", "lse", "d_query"):
        assert_near(name, results[name], expected[name])
    assert results["out"].isfinite().any() and (term == "rel_bias" or results["out"].isnan().any())
