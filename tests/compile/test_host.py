"""``python -m bench host``, which measures the time of the host code."""

from __future__ import annotations

import pytest

from bench.verbs import host
from triton_relattn import _implementations as implementations


@pytest.mark.thorough
@pytest.mark.parametrize("kind", host.KINDS)
def test_what_is_measured(kind: str) -> None:
    """Parts take less time than the whole, and patches are undone."""
    before = implementations._why_no_kernels
    found = host.measure(kind, 2)
    assert implementations._why_no_kernels is before and tuple(found) == host.COLUMNS
    assert 0 < found["first kernel"] < found["forward"] < found["both"]
    assert 0 < found["first of backward"] < found["backward"] < found["both"]
