"""Fixtures with the ways to compute a call, one after the other."""

from __future__ import annotations

import pytest

from tests.check import WAYS, Way
from tests.conftest import INTERPRETED, cut_blocks, cut_tiles

if INTERPRETED:
    from tests.interpreter.conftest import changed_interpreter as changed_interpreter


TILES = {"forward": (32, 32), "stored_dq": (16, 32), "dq": (32, 16), "dkv": (32, 32), "dtable": (16, 16), "dp2c": (16, 16)}
"""Several tiles in each dimension of short sequences, different ones in most kernels."""


@pytest.fixture(params=WAYS, ids=str)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    """Each way; small blocks have few queries, and the last one may be shorter."""
    return prepared(request.param, monkeypatch)


@pytest.fixture(params=[way for way in WAYS if way.implementation != "reference"], ids=str)
def tiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    """Each way except the reference: those that compute in tiles or blocks and read no hidden keys."""
    return prepared(request.param, monkeypatch)


def prepared(chosen: Way, monkeypatch: pytest.MonkeyPatch) -> Way:
    if chosen.small and chosen.implementation == "blockwise":
        cut_blocks(monkeypatch, 16, 1, 4)
    elif chosen.small:
        cut_tiles(monkeypatch, TILES)
    return chosen
