"""Fixtures of the CPU tests."""

from __future__ import annotations

import pytest

from tests.conftest import cut_blocks
from triton_relattn.integrations import in_place


@pytest.fixture(params=["default_blocks", "small_blocks"])
def block_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with one block for everything, and with many blocks of one head and few queries, whose last panel may be shorter."""
    if request.param == "small_blocks":
        cut_blocks(monkeypatch, 16, 1, 4)


@pytest.fixture(autouse=True)
def short_calls_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the operator in small models too: on a CPU, calls with few scores otherwise run the stock forward."""
    monkeypatch.setattr(in_place.InPlace, "fewest", 0)
