"""What ptxas says of Hopper's kernels: that their products wait for each other, and that registers spill."""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from triton.backends.nvidia.compiler import get_ptxas

from bench.cases.features import FEATURES, GRIDS
from bench.compile import KernelCase
from bench.compiled import compiled
from triton_relattn.kernels.call import call_of
from triton_relattn.kernels.config.tile_config import KERNELS

SERIALISED = {f"C75{number}" for number in range(10, 19)} - {"C7517"}
"""Warnings that all products of a kernel wait for each other; C7517 is about one of them."""


SPILLING: dict[str, tuple[str, ...]] = {
    "forward 64": ("t5_clamped", "zero", "full", "deberta", "deberta_clamped", "grid"),
    "forward 128": ("clamp", "full", "t5", "own_query", "t5_clamped", "deberta", "deberta_clamped"),
    "dkv 64": ("full",),
    "dkv 128": ("zero", "full", "clamp", "grid"),
    "dq 64": ("shaw", "vits"),
    "dq 128": ("vits", "clamp", "zero", "shaw", "grid"),
}
"""By kernel and width, the calls that spill registers, of those that are not slow, with any supported Triton."""


def cases() -> Iterator[KernelCase]:
    """All that is selected for sm_90."""
    for kernel, width, name in itertools.product(KERNELS, (64, 128), FEATURES):
        case = KernelCase(kernel, "sm_90", "bf16", width, name)
        if case.exists:
            yield case


def kind(case: KernelCase) -> tuple[Any, ...]:
    """Kernels of one kind have the same configuration and loops."""
    if case.kernel in ("dtable", "dp2c"):
        return case.kernel, case.head_dim, case.config
    coverage = "grid" if case.features in GRIDS else call_of(*case.call, case.target).coverage
    return case.kernel, case.head_dim, case.config, coverage


def shown(case: KernelCase) -> str:
    return f"{case.kernel}-{case.head_dim}-{case.features}"


FIRST = {kind(case): case for case in reversed(list(cases()))}.values()


@pytest.mark.parametrize("case", [c if c in FIRST else pytest.param(c, marks=pytest.mark.slow) for c in cases()], ids=shown)
def test_products_and_registers(case: KernelCase) -> None:
    """Products run side by side, and registers suffice where they did."""
    kernel = compiled(case.kernel, case.target, *case.call, case.config)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert not SERIALISED & set(re.findall(r"C75\d\d", said)), said
    (spilled,) = re.findall(r"(\d+) bytes spill stores", said)
    may_spill = case not in FIRST or case.features in SPILLING.get(f"{case.kernel} {case.head_dim}", ())
    assert may_spill or spilled == "0", said
