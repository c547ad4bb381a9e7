"""Calls that hypothesis thinks of, in the kernels. python -m tests.fuzz --kernels tries more."""

from __future__ import annotations

import os

import pytest
from hypothesis import assume

from tests.fuzz.case import Broken, NotApplicable
from tests.fuzz.properties import check, check_broken
from tests.fuzz.strategies import broken, cases, explore

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


def check_applicable(case: Broken) -> None:
    try:
        check_broken(case)
    except NotApplicable:
        assume(False)


def test_calls() -> None:
    """out, lse and the gradients asked for are right, and the call leaves no trace."""
    explore(cases(kernels=True), check, range(20))


def test_broken_calls() -> None:
    """Refused by a documented error, or in fact valid, and right."""
    explore(broken(kernels=True), check_applicable, range(20))
