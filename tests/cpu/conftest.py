"""Fixtures of the CPU tests."""

from __future__ import annotations

import pytest

from triton_relattn import blocks


@pytest.fixture(params=["default_blocks", "small_blocks"])
def block_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything in one block, and many blocks of queries with one head per chunk."""
    if request.param == "small_blocks":
        monkeypatch.setattr(blocks, "BLOCK_QUERIES", 16)
        monkeypatch.setattr(blocks, "BAND_ELEMENTS_PER_THREAD", 1)
