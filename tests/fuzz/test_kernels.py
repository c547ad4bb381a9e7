"""Calls that hypothesis thinks of, in the kernels. python -m tests.fuzz --kernels tries more."""

from __future__ import annotations

import os

import pytest
from hypothesis import assume, given, settings

from tests.fuzz.case import Broken, Case, NotApplicable
from tests.fuzz.properties import check, check_broken
from tests.fuzz.strategies import broken, cases, same_each_time

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


@settings(same_each_time, max_examples=25)
@given(cases(kernels=True))
def test_calls(case: Case) -> None:
    """out, lse and the gradients asked for are right, and the call leaves no trace."""
    check(case)


@settings(same_each_time, max_examples=25)
@given(broken(kernels=True))
def test_broken_calls(broken: Broken) -> None:
    """Refused by a documented error, or in fact valid, and right."""
    try:
        check_broken(broken)
    except NotApplicable:
        assume(False)
