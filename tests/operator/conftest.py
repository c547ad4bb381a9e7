"""The ways to compute a call, one after the other."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import INTERPRETED, cut_blocks
from tests.way import WAYS, Way

if INTERPRETED:
    from tests.interpreter.conftest import changed_interpreter as changed_interpreter
    from tests.interpreter.conftest import short_sequences as short_sequences


@pytest.fixture(params=WAYS, ids=str)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    """One of them; in small blocks there are many of few queries, and of panels the last may be shorter."""
    return prepared(request.param, monkeypatch)


@pytest.fixture(params=[each for each in WAYS if each.implementation != "reference"], ids=str)
def tiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    """One of those that compute in tiles or blocks, and that read no more than what a mask shows."""
    return prepared(request.param, monkeypatch)


def prepared(chosen: Way, monkeypatch: pytest.MonkeyPatch) -> Way:
    if chosen.small and chosen.implementation == "blockwise":
        cut_blocks(monkeypatch, 16, 1, 4)
    elif chosen.small:
        take_small_tiles(monkeypatch)
    return chosen


def take_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels have several tiles each way in short sequences, and no two kernels the same ones."""
    from triton_relattn.kernels import call
    from triton_relattn.kernels.config import selection
    from triton_relattn.kernels.config.selection import TileConfig

    tiles = {"forward": (32, 32), "dq": (32, 16), "dq_from_ds": (16, 32), "dkv": (32, 32), "dtable": (16, 16), "dp2c": (16, 16)}

    def select(kernel: str, *_: Any) -> TileConfig:
        return TileConfig(*tiles[kernel], 4, 1)

    monkeypatch.setattr(selection, "select", select)
    monkeypatch.setattr(call, "fixed", call.fixed.__wrapped__)  # which remembers what was selected before
