"""Calls that hypothesis thinks of, in the kernels. python -m tests.fuzz --kernels tries more."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume

from tests.fuzz.case import Broken, Case, NotApplicable
from tests.fuzz.properties import check, check_broken
from tests.fuzz.strategies import broken, cases, explore
from triton_relattn._core.spec import DIFFERENTIABLE

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


TABLES: dict[str, Any] = {"tables": ("rel_key", "rel_value", "rel_bias", "rel_p2c"), "requires_grad": DIFFERENTIABLE}
IN_PARTS = {
    "all keys": Case(**SMALL, **TABLES, rel_width=3, positions=(-30, 30, "zero"), key_lengths=(20, 17), spoilt=True),
    "band": Case(
        **{**SMALL, "num_queries": 18, "num_keys": 180},
        **{**TABLES, "tables": ("rel_value", "rel_p2c"), "requires_grad": ("key", "rel_value", "rel_p2c")},
        positions=(-5, 5, "zero"),
        query_offset=(70, 85),
        spoilt=True,
    ),
    "packed": Case(
        **{**SMALL, "batch": 1},
        **TABLES,
        rel_width=3,
        sequences=((20, 15), (0, 4), (9, 33)),
        per_head=("rel_value",),
        positions=(-9, 4, "clamp"),
        query_offset=(4, -3, 20),
        dropout_p=0.3,
        key_heads=2,
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("bytes_at_most", [None, 10000, 0])
@pytest.mark.parametrize("name", IN_PARTS)
def test_parts_of_a_workspace(name: str, bytes_at_most: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tables, packed sequences and offsets of each, with a workspace in one part, in some, and in as many as there can be."""
    from tests.interpreter.launch import record_plans

    plans, case = record_plans(monkeypatch), IN_PARTS[name]
    check(replace(case, workspace=bytes_at_most))
    (plan,) = plans
    assert plan is not None
    most = case.num_sequences * case.key_heads * plan.blocks
    assert len(plan.parts) in {None: (1,), 10000: range(2, most), 0: (most,)}[bytes_at_most]
    assert plan.layout.is_band == (name == "band" and bytes_at_most != 0)


@pytest.mark.parametrize("seeds", [range(10), range(10, 20)], ids=str)
def test_broken_calls(seeds: range) -> None:
    """Refused by a documented error, or in fact valid, and right."""
    explore(broken(kernels=True), check_applicable, seeds)
