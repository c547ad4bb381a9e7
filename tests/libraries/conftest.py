"""Calls of the small models have few scores; on a CPU these would use the stock forward."""

import pytest

from tests.cpu.conftest import short_calls_are_ours as short_calls_are_ours
from triton_relattn.integrations.structure.grid import DecomposedPositions
from triton_relattn.integrations.structure.kind import Kind


@pytest.fixture(autouse=True)
def short_calls_of_kinds_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Kind, DecomposedPositions):
        monkeypatch.setattr(kind, "fewest", 0)
