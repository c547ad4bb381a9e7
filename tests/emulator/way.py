"""A way to compute a sample: kernels compiled for a GPU, run in the emulator (tools/emulator)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from bench.compiled import selected_for
from tests.check import Way
from tests.conftest import without_plans
from tests.samples import Sample
from tools.emulator.device import Emulated, emulated
from triton_relattn import _implementations
from triton_relattn.kernels.config.selection import Tables
from triton_relattn.kernels.config.tile_config import TileConfig


@dataclass(frozen=True)
class Emulator(Way):
    """Kernels compiled for a GPU.

    Attributes:
        seed: of the order in which warps take turns.
        is_tf32: products of float32 inputs are in TF32.
        tiles: configurations by kernel, instead of the selected ones.
        launches: the launches of the last call, with the emulator's findings.
    """

    implementation: str = "triton"
    target: str = "sm_90"
    seed: int = 0
    is_tf32: bool = False
    tiles: Mapping[str, TileConfig] = field(default_factory=dict)
    launches: list[Emulated] = field(default_factory=list, compare=False)

    def __str__(self) -> str:
        return self.target

    @property
    def arithmetic(self) -> str:
        return "tf32" if self.is_tf32 else "triton"

    @property
    def problems(self) -> list[str]:
        """The findings in the launches, one line each."""
        unfinished = [f"{launch.name} did not end" for launch in self.launches if not launch.report.finished]
        return [f"{launch.name}: {finding}" for launch in self.launches for finding in launch.report.errors] + unfinished

    @contextmanager
    def computing(self, sample: Sample) -> Iterator[None]:
        """Compute all calls with kernels for the target.

        Raises:
            AssertionError: at the end, if there are findings.
        """
        select, precision = Tables.select, torch.get_float32_matmul_precision()

        def selected(tables: Tables, kernel: str, *call: Any) -> TileConfig:
            return self.tiles.get(kernel) or select(tables, kernel, *call)

        with pytest.MonkeyPatch.context() as patch, selected_for(self.target), emulated(self.target, self.seed) as launches:
            for module in ("_implementations", "grids"):
                patch.setattr(f"triton_relattn.{module}.choose_implementation", lambda *_: _implementations.TRITON)
            without_plans(patch)
            patch.setattr(Tables, "select", selected)
            torch.set_float32_matmul_precision("high" if self.is_tf32 else "highest")
            try:
                yield
            finally:
                torch.set_float32_matmul_precision(precision)
                self.launches[:] = launches
        assert not self.problems, "\n".join(self.problems)
