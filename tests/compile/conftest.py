"""Calls of compiled kernels: by the kernels although there is no GPU, with no profile of the user."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from triton_relattn import _implementations as implementations
from triton_relattn import grids
from triton_relattn.kernels.config import selection


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Disabled: no results are computed."""


@pytest.fixture(autouse=True)
def kernels_for_an_absent_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (implementations, grids):
        monkeypatch.setattr(module, "choose_implementation", lambda *_, **__: implementations.TRITON)


@pytest.fixture(autouse=True)
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder of profiles for each test, and torch's own settings."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("TRITON_RELATTN_CACHE", str(tmp_path / "cache"))
    selection.forget()
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)
    selection.forget()
