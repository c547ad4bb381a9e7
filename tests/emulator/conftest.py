"""Skips the emulator's tests where there is no gcc to compile its core, and those that find what an older Triton leaves out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import triton

HAS_FENCES = tuple(map(int, triton.__version__.split(".")[:3])) >= (3, 7, 1)
"""Before, Triton leaves out most fences between stores to shared memory and the wgmma that reads them: docs/versions.md."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_compiler = shutil.which("gcc")
    for item in items:
        target = getattr(item, "callspec", None) and item.callspec.params.get("target", "sm_90")  # type: ignore[attr-defined]
        if not HAS_FENCES and item.get_closest_marker("fences") and target in (None, "sm_90"):
            item.add_marker(pytest.mark.skip(reason="Triton before 3.7.1 leaves out fences"))
        if has_compiler:
            continue
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="the emulator's core is written in C: needs gcc on the PATH"))
