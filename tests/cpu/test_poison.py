"""The habits of tests/conftest.py do what they say."""

from __future__ import annotations

import os
from typing import Any

import torch

from tests.conftest import THREADS
from triton_relattn._core import dtypes


def test_the_package_gets_poisoned_memory() -> None:
    query = torch.zeros(2, 3, 5, 4)
    assert dtypes.new_like(query, 6).isnan().all()
    assert dtypes.new_like(query.transpose(1, 2), 6).isnan().all()


def test_every_way_to_create_it_is_covered() -> None:
    """Called as from a module of the package."""
    tensor = torch.zeros(3, 2)
    created: dict[str, torch.Tensor] = {}
    source = """
created |= {
    "empty": torch.empty(3, 2), "like": torch.empty_like(tensor), "strided": torch.empty_strided((3, 2), (2, 1)),
    "new": tensor.new_empty(3, 2), "new_strided": tensor.new_empty_strided((3, 2), (2, 1)),
}
counts = torch.empty(3, dtype=torch.int32)
"""
    module: dict[str, Any] = {"__name__": "triton_relattn.kernels.example", "torch": torch, "tensor": tensor, "created": created}
    exec(source, module)
    assert {name for name, result in created.items() if result.isnan().all()} == set(created) and len(created) == 5
    assert module["counts"].tolist() == [2**31 - 1] * 3


def test_others_get_what_they_ask_for() -> None:
    """Only the package's own calls pay for the poison."""
    zeros = torch.zeros(64)
    assert torch.empty(64, out=zeros) is zeros
    assert not zeros.isnan().any()


def test_one_thread() -> None:
    assert torch.get_num_threads() == int(os.environ.get(THREADS, 1))
