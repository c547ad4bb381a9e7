"""Run a call of the package as compiled for a GPU, and compare its results with float64."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch

from bench.compiled import selected_for
from bench.report.rows import in_one_line
from tools.emulator.device import Emulated, emulated
from triton_relattn import _implementations as implementations
from triton_relattn.kernels.config import selection
from triton_relattn.kernels.config.tile_config import TileConfig
from triton_relattn.kernels.workspace import planning

from .calls import SMALL_WORKSPACE, Call, build
from .judge import Judge, Ratio, results_of

DTYPES = ("bfloat16", "float16", "float32", "tf32")
"""Dtypes of the inputs; tf32 is float32 after torch.set_float32_matmul_precision("high")."""


@dataclass(frozen=True)
class Subject:
    """A call to check, for a target.

    Attributes:
        width, lengths: of heads; of queries and keys. Random calls have their own.
        name: see calls.build.
        seed: draws the order in which warps take turns.
    """

    target: str
    dtype: str
    width: int
    name: str
    lengths: tuple[int, int]
    seed: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = torch.float32 if self.dtype == "tf32" else getattr(torch, self.dtype)
        return dtype

    def build(self) -> Call:
        return build(self.name, *self.lengths, self.width, self.torch_dtype)

    def judge(self) -> Judge:
        """Compute what to expect."""
        return Judge(self.build(), is_tf32=self.dtype == "tf32")

    def __str__(self) -> str:
        sizes = "" if self.name.startswith("random") else f" {self.lengths[0]}x{self.lengths[1]} D={self.width}"
        return f"{self.target} {self.dtype} {self.name}{sizes}"


@dataclass(frozen=True)
class Checked:
    """Results of a call, error / allowance of each, and the launches with what was found in them."""

    ratios: dict[str, Ratio]
    launches: list[Emulated]
    results: dict[str, torch.Tensor]

    @property
    def problems(self) -> list[str]:
        """Everything that is wrong, a line each."""
        wrong = [
            f"{name} is off by {ratio.value:.2f} times its allowance ({ratio.rule})"
            for name, ratio in self.ratios.items()
            if not ratio.value <= 1
        ]
        findings = [f"{launch.name}: {finding}" for launch in self.launches for finding in launch.report.errors]
        unfinished = [f"{launch.name} did not end" for launch in self.launches if not launch.report.finished]
        return [*findings, *unfinished, *wrong]


@contextmanager
def settings(subject: Subject, tiles: Mapping[str, TileConfig]) -> Iterator[None]:
    """Let calls choose the kernels, give some kernels other configurations, limit the workspace, and fill new memory with NaN."""
    select = selection.select
    precision, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()

    def selected(kernel: str, *call: Any, **others: Any) -> TileConfig:
        return tiles.get(kernel) or select(kernel, *call, **others)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(implementations, "choose_implementation", lambda *_: implementations.TRITON))
        stack.enter_context(mock.patch.object(selection, "select", selected))
        stack.enter_context(mock.patch.dict(os.environ, {planning.VARIABLE: "0" if SMALL_WORKSPACE in subject.name else ""}))
        stack.callback(torch.set_float32_matmul_precision, precision)
        stack.callback(torch.use_deterministic_algorithms, deterministic)
        torch.set_float32_matmul_precision("high" if subject.dtype == "tf32" else "highest")
        torch.use_deterministic_algorithms(True)  # torch.empty fills what it returns
        yield


def run(
    subject: Subject,
    call: Call,
    tiles: Mapping[str, TileConfig] | None = None,
    change: Callable[[str, str], str] | None = None,
) -> tuple[dict[str, torch.Tensor], list[Emulated]]:
    """Run a call forward and backward; return results and launches.

    Args:
        tiles: configurations by the kernels' names, instead of the selected ones.
        change: see device.emulated.
    """
    with settings(subject, tiles or {}), selected_for(subject.target), emulated(subject.target, subject.seed, change) as launches:
        return results_of(call, None), launches


def check(
    subject: Subject,
    tiles: Mapping[str, TileConfig] | None = None,
    change: Callable[[str, str], str] | None = None,
    judge: Judge | None = None,
) -> Checked:
    """Run a call and compare. judge: of the subject, if there is one already; other arguments as of run."""
    judge = judge or subject.judge()
    results, launches = run(subject, judge.call, tiles, change)
    return Checked(judge.ratios(results), launches, results)


class Row(NamedTuple):
    """A call as it is shown: a line, and below it what is wrong."""

    text: str
    ratios: dict[str, Ratio]
    failed: bool


def row_of(subject: Subject, tiles: Mapping[str, TileConfig], show_notes: bool = False) -> Row:
    """Check a call; the row says whatever goes wrong."""
    started = time.monotonic()
    has_table = not subject.name.startswith("none")
    reasons = {kernel: config.why_invalid(subject.target, has_table, kernel) for kernel, config in tiles.items()}
    lines = [f"{kernel}: {reason}" for kernel, reason in reasons.items() if reason]
    found = Checked({}, [], {})
    if not lines:
        try:
            found = check(subject, tiles)
            lines = found.problems
        except Exception as error:
            lines = [in_one_line(error)]
    failed = bool(lines)
    if show_notes:
        lines += [f"note: {launch.name}: {note}" for launch in found.launches for note in launch.report.notes]
    results = ", ".join(f"{name} {ratio}" for name, ratio in found.ratios.items())
    first = f"{'WRONG' if failed else 'ok   '} {subject}: {results} ({time.monotonic() - started:.1f} s)"
    return Row("\n".join([first, *(f"      {line}" for line in lines)]), found.ratios, failed)
