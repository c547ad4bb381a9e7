"""In 16 bits, sums over thousands of terms are rounded once: out and all eight gradients.

All terms of a sum have one sign, and little else is rounded: a float32 sum is within one unit in the last place, while one that
is rounded to 16 bits at each tile is several units off. Comparison with plain torch would hide that. With a gradient from lse
alone dS is P; from out alone the gradients of values are sums of P dO.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.check import WAYS, Way, environment, public_function
from tests.conftest import INTERPRETED
from tests.expected import exact
from tests.samples import Sample
from tests.tolerance import assert_at_most

TERMS = 1500
KEYS = Sample(num_queries=2, num_keys=TERMS, cotangents="lse", scale=2.0**-6, dtype="float16", tables=("rel_key",))
QUERIES = Sample(num_queries=TERMS, num_keys=1, cotangents="lse", scale=2.0**-6, dtype="float16")
# Each row of the table has pairs in every sequence.
MANY = Sample(batch=60, num_queries=4, num_keys=4, positions=(-3, 3, "clamp"), scale=2.0**-6, dtype="float16")


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
}


SLOW = ("d_rel_bias", "d_rel_p2c", "d_rel_value") if INTERPRETED else ()
RUNS = [pytest.param(name, marks=pytest.mark.thorough if name in SLOW else ()) for name in SUMS]


@pytest.mark.parametrize("dtype", ["float16"] if INTERPRETED else ["float16", "bfloat16"])
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("way", [way for way in WAYS if way.small], ids=str)
def test_sums_are_rounded_once(way: Way, name: str, dtype: str) -> None:
    sample = replace(SUMS[name], dtype=dtype)
    call = {key: 1 + value.abs() / 8 if isinstance(value, torch.Tensor) else value for key, value in sample.call().items()}
    cotangent = 1 + sample.numbers(f"d_{sample.cotangents}", dtype=torch.float32).abs() / 8
    wanted = name.removeprefix("d_")
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
