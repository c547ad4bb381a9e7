"""In 16 bits, sums over thousands of terms are rounded once, and gradients of tables have the error of dS rounded once.

All terms of a sum have one sign, and little else is rounded: a float32 sum is within one unit in the last place, while one that
is rounded to 16 bits at each tile is several units off. Comparison with plain torch would hide that. With a gradient from lse
alone dS is P; from out alone the gradients of values are sums of P dO.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.check import WAYS, Way, compute, environment, public_function
from tests.conftest import INTERPRETED
from tests.expected import TABLES, assert_table_gradient, exact
from tests.samples import Sample
from tests.tolerance import assert_at_most

TERMS = 1500
KEYS = Sample(num_queries=2, num_keys=TERMS, cotangents="lse", scale=2.0**-6, dtype="float16", tables=("rel_key",))
QUERIES = Sample(num_queries=TERMS, num_keys=1, cotangents="lse", scale=2.0**-6, dtype="float16")
# Each row of the table has pairs in every sequence.
MANY = Sample(batch=60, num_queries=4, num_keys=4, positions=(-3, 3, "clamp"), scale=2.0**-6, dtype="float16")

# Nearly all pairs have an end row, whose sum over keys is another kernel's.
FAR_KEYS = Sample(num_queries=16, num_keys=400, positions=(-1, 1, "clamp"), scale=2.0**-6, dtype="float16")

SUMS = {
    "out": replace(KEYS, requires_grad=(), cotangents="out", tables=()),
    "d_query": replace(KEYS, requires_grad=("query",), positions=(-1, TERMS - 1, "clamp")),
    "d_rel_query": replace(KEYS, requires_grad=("rel_query",), rel_width=16, positions=(-1, TERMS - 1, "clamp")),
    "d_key": replace(QUERIES, requires_grad=("key",)),
    "d_value": replace(QUERIES, requires_grad=("value",), cotangents="out"),
    "d_rel_key": replace(MANY, requires_grad=("rel_key",), cotangents="lse", tables=("rel_key",)),
    "d_rel_bias": replace(MANY, requires_grad=("rel_bias",), cotangents="lse", tables=("rel_bias",)),
    "d_rel_p2c": replace(MANY, requires_grad=("rel_p2c",), cotangents="lse", tables=("rel_p2c",)),
    "d_rel_value": replace(MANY, requires_grad=("rel_value",), cotangents="out", tables=("rel_value",)),
    "d_rel_key of far keys": replace(FAR_KEYS, requires_grad=("rel_key",), cotangents="lse", tables=("rel_key",)),
    "d_rel_p2c of far keys": replace(FAR_KEYS, requires_grad=("rel_p2c",), cotangents="lse", tables=("rel_p2c",)),
}
SLOW = ("d_rel_bias", "d_rel_p2c", "d_rel_value") if INTERPRETED else ()
RUNS = [pytest.param(name, marks=pytest.mark.thorough if name in SLOW else ()) for name in SUMS]


DTYPES = ["float16"] if INTERPRETED else ["float16", "bfloat16"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("way", [way for way in WAYS if way.small], ids=str)
def test_sums_are_rounded_once(way: Way, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way.implementation == "triton":  # a single program for a table's sum
        monkeypatch.setattr("triton_relattn.kernels.table_gradient.table_splits", lambda *_: 1)
    sample = replace(SUMS[name], dtype=dtype)
    call = {key: 1 + value.abs() / 8 if isinstance(value, torch.Tensor) else value for key, value in sample.call().items()}
    cotangent = 1 + sample.numbers(f"d_{sample.cotangents}", dtype=torch.float32).abs() / 8
    wanted = name.partition(" ")[0].removeprefix("d_")
    leaf = call[wanted].requires_grad_() if wanted in call else None
    with environment(sample, way):
        results = dict(zip(("out", "lse"), public_function(sample)(**call, implementation=way.implementation), strict=True))
        result = results[sample.cotangents]
        if leaf is not None:
            (found,) = torch.autograd.grad(result, leaf, cotangent.to(result.dtype))
        else:
            found = result.detach()
    leaves, *expected = exact(call)
    total = expected[sample.cotangents == "lse"]
    if leaf is not None:
        (total,) = torch.autograd.grad(total, leaves[wanted], cotangent.to(result.dtype).double())
    assert_at_most(name, (found.double() - total).abs(), torch.finfo(found.dtype).eps * total.abs())


LENGTH = 128 if INTERPRETED else 384
SHARP: dict[str, dict[str, Any]] = {
    "full": {"positions": (1 - LENGTH, LENGTH - 1, "clamp")},
    "causal": {"positions": (1 - LENGTH, 0, "clamp"), "is_causal": True, "per_head": TABLES},
    "clipped": {},
    "a bias alone": {"tables": ("rel_bias",)},
    "positions of keys alone": {"tables": ("rel_p2c",)},
    "values and bias": {"tables": ("rel_value", "rel_bias"), "positions": (-16, 16, "zero")},
    "far keys": {"tables": ("rel_key", "rel_p2c"), "positions": (-3, 4, "clamp"), "window_size": (100, 90), "per_head": TABLES},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", SHARP)
@pytest.mark.parametrize("way", WAYS[:1], ids=str)
def test_table_gradients_are_as_good_as_one_rounding(way: Way, case: str, dtype: str) -> None:
    """Also with sharp attention, where an error that all dS of a query share would add up in the sum over queries."""
    fields = {"tables": ("rel_key",), "positions": (-16, 16, "clamp"), **SHARP[case]}
    sizes: dict[str, Any] = {"key_heads": 2, "num_queries": LENGTH, "num_keys": LENGTH, "width": 32, "value_width": 32}
    sample = Sample(**{**sizes, **fields, "dtype": dtype, "sharp": True, "seed": 1})
    results, (inputs, arguments) = compute(sample, way), sample.inputs()
    for table in sample.tables:
        assert_table_gradient(f"d_{table}", results[f"d_{table}"], inputs, table=table, **arguments)
