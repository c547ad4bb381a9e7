"""Calls that hypothesis thinks of, in the kernels. python -m tests.fuzz --kernels tries more."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import assume

from tests.fuzz.case import Broken, Case, NotApplicable
from tests.fuzz.properties import check, check_broken
from tests.fuzz.strategies import broken, cases, explore

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


def check_applicable(case: Broken) -> None:
    try:
        check_broken(case)
    except NotApplicable:
        assume(False)


@pytest.mark.parametrize("seeds", [range(10), range(10, 20)], ids=str)
def test_calls(seeds: range) -> None:
    """out, lse and the gradients asked for are right, and the call leaves no trace."""
    explore(cases(kernels=True), check, seeds)


SMALL: dict[str, Any] = {"implementation": "triton", "blocks": 1, "batch": 2, "num_queries": 20, "num_keys": 20}
KNOWN = {
    "scale 0": Case(**SMALL, tables=("rel_bias",), positions=(-19, 19, "clamp"), scale=0.0, round_terms=True),
    "no keys": Case(
        **SMALL,
        tables=("rel_p2c",),
        positions=(-5, 5, "clamp"),
        key_lengths=(0, 20),
        query_offset=(40, -40),
        requires_grad=("key", "rel_p2c"),
        spoilt=True,
    ),
    "packed, no queries": Case(
        **{**SMALL, "batch": 1},
        sequences=((0, 20), (20, 20)),
        tables=("rel_p2c",),
        positions=(-5, 5, "clamp"),
        query_offset=(40, -40),
        requires_grad=("key", "rel_p2c"),
        spoilt=True,
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_calls_that_went_wrong(name: str) -> None:
    check(KNOWN[name])


@pytest.mark.parametrize("seeds", [range(10), range(10, 20)], ids=str)
def test_broken_calls(seeds: range) -> None:
    """Refused by a documented error, or in fact valid, and right."""
    explore(broken(kernels=True), check_applicable, seeds)
