"""Calls, and calls with something broken, that hypothesis thinks of, in plain torch. python -m tests.fuzz tries more."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.fuzz.case import Broken, Case, NotApplicable
from tests.fuzz.properties import check, check_broken
from tests.fuzz.strategies import broken, cases, explore, same_each_time
from triton_relattn import RelativePositions

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs a process without TRITON_INTERPRET=1")


def check_applicable(case: Broken) -> None:
    try:
        check_broken(case)
    except NotApplicable:
        assume(False)


def test_calls() -> None:
    """out, lse and the gradients asked for are right, and the call leaves no trace."""
    explore(cases(), check, range(60))


@pytest.mark.thorough
def test_broken_calls() -> None:
    """Refused by a documented error, or in fact valid, and right."""
    explore(broken(), check_applicable, range(80))


anything = st.one_of(
    st.integers(),
    st.sampled_from([2**29, -(2**29), 2**29 + 1]),
    st.none() | st.booleans() | st.floats() | st.text() | st.complex_numbers() | st.tuples(st.integers()),
)


@settings(same_each_time, max_examples=100)
@given(anything, anything, st.sampled_from(["clamp", "zero", "error"]) | anything)
def test_positions(first: Any, last: Any, outside: Any) -> None:
    """Either they hold what was given, or a documented error says why not."""
    try:
        positions = RelativePositions(first, last, outside)
    except (ValueError, TypeError) as error:
        assert str(error)
    else:
        assert (positions.first, positions.last, positions.outside) == (first, last, outside)
        assert -(2**29) <= first <= last <= 2**29 and positions.num_rows == last - first + 1


@settings(same_each_time, max_examples=50)
@given(broken())
def test_lines(broken: Broken) -> None:
    """A case prints as one line that a shell takes in single quotes and that is the case again."""
    for value in (broken, broken.case):
        line = repr(value)
        assert "\n" not in line and "'" not in line
        assert eval(line, {"Case": Case, "Broken": Broken}) == value
