"""The ways to compute a call, one after the other."""

from __future__ import annotations

import pytest

from tests.check import WAYS, Way
from tests.conftest import INTERPRETED, cut_blocks, cut_tiles

if INTERPRETED:
    from tests.interpreter.conftest import changed_interpreter as changed_interpreter


TILES = {"forward": (32, 32), "dq": (16, 32), "dkv": (32, 32), "dtable": (16, 16), "dp2c": (16, 16)}
"""Several tiles each way in short sequences, and hardly two kernels with the same ones."""


@pytest.fixture(params=WAYS, ids=str)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    """One of them; in small blocks there are many of few queries, and of panels the last may be shorter."""
    return prepared(request.param, monkeypatch)


@pytest.fixture(params=[way for way in WAYS if way.implementation != "reference"], ids=str)
def tiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    """One of those that compute in tiles or blocks, and that read no more than what a mask shows."""
    return prepared(request.param, monkeypatch)


def prepared(chosen: Way, monkeypatch: pytest.MonkeyPatch) -> Way:
    if chosen.small and chosen.implementation == "blockwise":
        cut_blocks(monkeypatch, 16, 1, 4)
    elif chosen.small:
        cut_tiles(monkeypatch, TILES)
    return chosen
