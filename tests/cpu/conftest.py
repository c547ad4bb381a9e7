"""Fixtures of the CPU tests."""

from __future__ import annotations

import pytest

from tests.conftest import cut_blocks
from triton_relattn.integrations import in_place


@pytest.fixture(params=["default_blocks", "small_blocks"])
def block_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything in one block, and many blocks of one head and few queries, in panels of which the last may be shorter."""
    if request.param == "small_blocks":
        cut_blocks(monkeypatch, 16, 1, 4)


@pytest.fixture(autouse=True)
def short_calls_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the small models of libraries have few scores, which on a CPU are the stock forward's."""
    monkeypatch.setattr(in_place.InPlace, "fewest", 0)
