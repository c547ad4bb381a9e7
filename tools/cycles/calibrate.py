"""The model against published speeds of attention: kernels like those that were timed, compiled here, predicted, and compared.

A kernel that its authors tune is predicted in each configuration that they try, and the best counts. FlashAttention-2 multiplies
with mma.sync on every GPU; so the code that Triton makes for an A100 stands for it, on an H100 assembled for that.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import triton
from triton.compiler.compiler import CompiledKernel

from ..absent_gpu import assembler_for, disassembled, recorded_launches
from . import known
from .machine import MACHINES
from .predict import Prediction, of_sass, teraflops

LENGTH = 4096  # only its divisibility matters
Option = tuple[int, int, int, int]
"""BLOCK_M, BLOCK_N, warps, stages."""


@dataclass(frozen=True)
class Part:
    """A kernel of known.py and the configurations that its authors try."""

    kernel: str
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Published:
    """A speed that somebody has measured.

    Attributes:
        code: target for which Triton makes the code: "sm_80" multiplies with mma.sync, "sm_90" with wgmma.
        target: of the GPU that was timed.
        products: that its operations are counted as.
        teraflops: without a mask, 16k queries and keys, 16 bits.
    """

    what: str
    head_dim: int
    code: str
    target: str
    products: int
    teraflops: float
    source: str
    parts: tuple[Part, ...]


def _options(*choices: Iterable[int]) -> tuple[Option, ...]:
    return tuple((m, n, warps, stages) for m, n, warps, stages in product(*choices))


_FORWARD_2024 = Part("forward", _options((64, 128), (32, 64), (4,), (3, 4)))
_FORWARD_2025 = Part("forward", _options((64, 128), (32, 64, 128), (4,), (2, 3, 4)) + _options((128,), (128,), (8,), (2, 3, 4)))
_BACKWARD = (Part("keys", ((32, 128, 4, 5),)), Part("queries", ((128, 32, 4, 5),)))
_FORWARD_MMA = Part("forward", ((128, 64, 4, 2), (128, 64, 4, 3), (128, 32, 4, 3), (64, 64, 4, 3), (128, 64, 8, 3)))
_BACKWARD_MMA = Part("keys, adding d_query", ((32, 128, 4, 2), (64, 64, 4, 2), (32, 64, 4, 2), (64, 128, 8, 3)))
_TUTORIAL, _FA2 = "Triton's tutorial 06", "FlashAttention-2"
_PAPER = "Shah et al., FlashAttention-3, arXiv 2407.08608, figures 5 and 6"
_A100 = "github.com/Dao-AILab/flash-attention, assets/flash2_a100_fwd_bwd_benchmark.png"
_RATIO = "291 of FlashAttention-2 times 1.12, their ratio in github.com/triton-lang/triton/issues/5437"
PUBLISHED = (
    Published(f"{_TUTORIAL}, forward", 64, "sm_90", "sm_90", 2, 403, _PAPER, (_FORWARD_2024,)),
    Published(f"{_TUTORIAL}, forward", 128, "sm_90", "sm_90", 2, 395, _PAPER, (_FORWARD_2024,)),
    Published(
        *(f"{_TUTORIAL} of 2025, forward", 128, "sm_90", "sm_90", 2, 487),
        "github.com/facebookexperimental/triton/pull/205",
        (_FORWARD_2025,),
    ),
    Published(f"{_TUTORIAL}, backward", 64, "sm_90", "sm_90", 5, 326, _RATIO, _BACKWARD),
    Published(f"{_FA2}, forward", 64, "sm_80", "sm_90", 2, 324, _PAPER, (_FORWARD_MMA,)),
    Published(f"{_FA2}, forward", 128, "sm_80", "sm_90", 2, 370, _PAPER, (_FORWARD_MMA,)),
    Published(f"{_FA2}, backward", 64, "sm_80", "sm_90", 5, 291, _PAPER, (_BACKWARD_MMA,)),
    Published(f"{_FA2}, backward", 128, "sm_80", "sm_90", 5, 322, _PAPER, (_BACKWARD_MMA,)),
    Published(f"{_FA2}, both", 64, "sm_80", "sm_80", 7, 176, _A100, (_FORWARD_MMA, _BACKWARD_MMA)),
    Published(f"{_FA2}, both", 128, "sm_80", "sm_80", 7, 203, _A100, (_FORWARD_MMA, _BACKWARD_MMA)),
)


def compiled_known(kernel: str, code: str, head_dim: int, option: Option) -> CompiledKernel:
    """Return a kernel of known.py, compiled."""
    block_m, block_n, warps, stages = option
    rows = torch.empty(1, 2, LENGTH, head_dim, dtype=torch.float16)
    statistics = torch.empty(2, LENGTH)
    sizes = (1.0, LENGTH, head_dim, block_m, block_n)
    how = {"num_warps": warps, "num_stages": stages}
    with recorded_launches(code) as launches:
        if kernel == "forward":
            known.known_forward_kernel[(1, 2)](*[rows] * 4, statistics, *sizes, **how)
        elif kernel == "queries":
            known.known_queries_kernel[(1, 2)](*[rows] * 5, statistics, statistics, *sizes, **how)
        else:
            adds = kernel == "keys, adding d_query"
            d_query = rows.float() if adds else rows
            known.known_keys_kernel[(1, 2)](*[rows] * 4, d_query, rows, rows, statistics, statistics, *sizes, adds, **how)
    return launches[0].kernel


def assembled_for(kernel: CompiledKernel, target: str) -> str:
    """Return the machine code that the assembler makes for a GPU other than the one that Triton made the kernel for."""
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(kernel.asm["ptx"])
        command = [assembler_for(target), f"--gpu-name={target}", str(ptx), "-o", str(cubin)]
        subprocess.run(command, capture_output=True, check=True)
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", "-res-usage", str(cubin)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True)
class Candidate:
    """A known kernel in one configuration, on one machine."""

    kernel: str
    code: str
    target: str
    head_dim: int
    option: Option


def predict_known(candidate: Candidate) -> tuple[float, bool] | None:
    """Return cycles for 64 x 64 scores, and whether registers are spilled; None if the kernel does not fit."""
    machine, (block_m, block_n, warps, _) = MACHINES[candidate.target], candidate.option
    kernel = compiled_known(candidate.kernel, candidate.code, candidate.head_dim, candidate.option)
    if kernel.metadata.shared > machine.shared_bytes - machine.reserved_bytes:
        return None
    sass = disassembled(kernel) if candidate.code == candidate.target else assembled_for(kernel, candidate.target)
    prediction: Prediction = of_sass(sass, machine, warps, kernel.metadata.shared, block_m * block_n, 0)
    return prediction.cycles, re.search(r"\bSTL\b", sass) is not None


@dataclass(frozen=True)
class Comparison:
    """A published speed beside the model's. ratio: of the published one to what the model says without its efficiency."""

    published: Published
    model: float
    options: tuple[Option, ...]
    spills: bool

    @property
    def ratio(self) -> float:
        """Return the published speed over the model's without its efficiency."""
        return self.published.teraflops / self.model * MACHINES[self.published.target].efficiency


def compare(map_all: Callable[..., Iterable[tuple[float, bool] | None]] = map) -> list[Comparison]:
    """Return all of PUBLISHED beside what the model says. map_all: map, perhaps in several processes."""
    candidates = {
        Candidate(part.kernel, one.code, one.target, one.head_dim, option): None
        for one in PUBLISHED
        for part in one.parts
        for option in part.options
    }
    found = dict(zip(candidates, map_all(predict_known, candidates), strict=True))
    comparisons = []
    for one in PUBLISHED:
        best = [_best(found, one, part) for part in one.parts]
        cycles = sum(cycles for _, (cycles, _) in best)
        comparisons.append(
            Comparison(
                *(one, teraflops(cycles, MACHINES[one.target], one.head_dim, one.products)),
                options=tuple(option for option, _ in best),
                spills=any(spills for _, (_, spills) in best),
            )
        )
    return comparisons


def _best(found: dict[Candidate, tuple[float, bool] | None], one: Published, part: Part) -> tuple[Option, tuple[float, bool]]:
    fitting = [
        (option, result)
        for option in part.options
        if (result := found[Candidate(part.kernel, one.code, one.target, one.head_dim, option)]) is not None
    ]
    return min(fitting, key=lambda each: each[1][0])


def fitted_efficiency(comparisons: Sequence[Comparison]) -> float:
    """Return the mean ratio of those that spill nothing: their registers are allocated about as well as their authors did."""
    ratios = [one.ratio for one in comparisons if not one.spills]
    return math.exp(sum(map(math.log, ratios)) / len(ratios))
