"""Skips the emulator's tests where there is no gcc to compile its core."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("gcc") is None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="the emulator's core is written in C: needs gcc on the PATH"))
