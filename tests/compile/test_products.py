"""What ptxas says of Hopper's kernels: that their products wait for each other, and that registers spill."""

from __future__ import annotations

import re
import subprocess
import tempfile

import pytest
import triton

from bench.cases.features import FEATURES
from bench.compile import KernelCase
from bench.compiled import compiled
from triton_relattn.kernels.config.selection import KERNELS

SERIALISED = {f"C75{number}" for number in range(10, 19)} - {"C7517"}
"""Warnings that all products of a kernel wait for each other; C7517 is about one of them."""


def assembled(case: KernelCase) -> str:
    """What ptxas -v says of a kernel."""
    kernel = compiled(case.kernel, case.target, *case.call, case.config)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def cases() -> list[KernelCase]:
    """All that is selected for sm_90."""
    every = [KernelCase(kernel, "sm_90", "bf16", width, name) for kernel in KERNELS for width in (64, 128) for name in FEATURES]
    return [case for case in every if case.exists]


CASES = cases()
FIRST = {(case.kernel, case.head_dim, case.config): case for case in reversed(CASES)}.values()
"""One case of each configuration."""


@pytest.mark.parametrize("case", [c if c in FIRST else pytest.param(c, marks=pytest.mark.thorough) for c in CASES], ids=str)
def test_products_run_side_by_side(case: KernelCase) -> None:
    said = assembled(case)
    assert not SERIALISED & set(re.findall(r"C75\d\d", said)), said
