"""The backward kernels compiled for GPUs that this machine lacks: registers, spills, loops, launches, grids and memory.

Counts of registers and instructions belong to one version of Triton, the one in constraints.txt.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.cases import features
from bench.cases.features import call
from bench.compile import KernelCase, used_by
from bench.compiled import (
    Resources,
    matrix_instructions,
    recorded_launches,
    selected,
)
from tests.compile.targets import NVIDIA, on_triton_3_7
from triton_relattn.kernels.backward import backward
from triton_relattn.kernels.config import selection
from triton_relattn.kernels.forward import forward
from triton_relattn.kernels.workspace import planning

KERNELS = ("dkv", "dq", "dtable")
WINDOW = (20, 9)


def case(kernel: str, target: str, width: int, table: str) -> KernelCase:
    return KernelCase(kernel, target, "bf16", width, table)


def compiled(kernel: str, target: str, width: int, table: str) -> Resources:
    return used_by(case(kernel, target, width, table), case(kernel, target, width, table).config)


@on_triton_3_7
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_loads_are_asynchronous(target: str, kernel: str) -> None:
    """With two stages the loads of the next turn run beside this one: a value carried unchanged would turn that off. The dtable
    kernel loads the number of a sequence's keys otherwise, and on sm_80 dS, which has to be transposed."""
    kernel_case = case(kernel, target, 64, "full")
    config, loop = kernel_case.config, used_by(kernel_case, kernel_case.config).main_loop
    others = 0
    if kernel == "dtable":
        words = config.block_m * config.block_n * 2 // 16 // (32 * config.num_warps)  # of 16 bytes, that a thread loads
        others = 1 + words * (target == "sm_80")
    stages = config.num_stages
    assert (loop["LDGSTS"] > 0) == (stages > 1) and (loop["LDG"] > others) == (stages == 1), (stages, loop)


def per_score(kernel: str, target: str, width: int, table: str) -> list[float]:
    """Instructions of the loops per score element, near loop first: warps times instructions over the elements of a tile."""
    config = case(kernel, target, width, table).config
    loops = [loop for loop in compiled(kernel, target, width, table).loops if matrix_instructions(loop)]
    return [loop.total() * config.num_warps / (config.block_m * config.block_n) for loop in loops]


@pytest.mark.thorough
@on_triton_3_7
def test_cost_of_the_relative_term() -> None:
    """Instructions per score on sm_90, width 64, against the plain kernels: full tables, and far tiles of clamped ones."""
    (plain_columns,), (plain_rows,) = (per_score(kernel, "sm_90", 64, "none") for kernel in ("dkv", "dq"))
    (columns,), (rows,), (table,) = (per_score(kernel, "sm_90", 64, "full") for kernel in KERNELS)
    assert plain_columns < columns <= 2 * plain_columns
    assert plain_rows < rows <= 2 * plain_rows  # products with the keys, and as many with the table
    assert plain_rows + plain_columns < rows + columns + table <= 2 * (plain_rows + plain_columns)
    assert per_score("dkv", "sm_90", 64, "clamp")[1] <= 1.3 * plain_columns  # prefetches, as that does not


def products(kernel: str, target: str, table: str) -> float:
    """Matrix products per score of the main loop, in units of one [M, D] @ [D, N], on a target that has HMMA only."""
    config = case(kernel, target, 64, table).config
    loop = compiled(kernel, target, 64, table).main_loop
    # One HMMA multiplies 16 x 16 with 16 x 8.
    return loop["HMMA"] * config.num_warps * 16 * 8 * 16 / (config.block_m * config.block_n * 64)


@on_triton_3_7
def test_products_per_tile() -> None:
    """As few as the algorithm needs: the table adds two blocks of QE where scores are computed, and one product with dS."""
    assert products("dkv", "sm_80", "none") == 4  # QK, dV, dP, dK
    assert 5 < products("dkv", "sm_80", "full") <= 6  # of the block behind, only what the tile uses
    assert products("dq", "sm_80", "none") == 1  # of keys
    assert products("dq", "sm_80", "full") == 2  # and of rows
    assert products("dtable", "sm_80", "full") == 1  # dE


class Allocations(TorchDispatchMode):
    """Bytes of all storages that are created within."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        existing = {
            leaf.untyped_storage().data_ptr() for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in existing:
                self.sizes[leaf.untyped_storage().data_ptr()] = leaf.untyped_storage().nbytes()
                self.kept.append(leaf)  # so that no address is used twice
        return result

    @property
    def total(self) -> int:
        return sum(self.sizes.values())


def allocated(length: int, table: str, with_all_terms: bool = False, has_window: bool = False) -> int:
    """Bytes that forward and backward allocate, one head of width 16 in float16, all gradients, everything kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "HALF", 4)
        tensors, spec = call(table, torch.float16, 16, length=length, heads=1, has_lengths=False)
    if with_all_terms:
        assert tensors.rel_key is not None
        rows = tensors.rel_key.shape[0]
        terms = {"rel_query": torch.empty_like(tensors.query), "rel_value": torch.empty_like(tensors.rel_key)}
        tensors = tensors._replace(
            **terms, rel_bias=torch.empty(rows, dtype=torch.float16), attn_mask=torch.empty(1, 1, 1, length)
        )
    if has_window:
        spec = spec._replace(window_left=WINDOW[0], window_right=WINDOW[1])
    d_out, d_lse = torch.empty_like(tensors.query), torch.empty(1, 1, length)
    with recorded_launches("sm_90", only=""), Allocations() as allocations:
        out, _, softmax_stats, _ = forward(tensors, spec)
        backward(d_out, d_lse, out, softmax_stats, tensors, spec)
    return allocations.total


@pytest.mark.parametrize("has_window", [False, True], ids=["all keys", "band"])
def test_memory_of_the_workspace(has_window: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than the limit beyond what the smallest takes; two bytes for each pair if all fit; of keys in a window few."""
    limit, length = 8 * 2**20, 8192
    monkeypatch.setenv(planning.VARIABLE, "0")
    least = allocated(length, "clamp", has_window=has_window)
    monkeypatch.setenv(planning.VARIABLE, str(limit))
    whole, large = (allocated(num_keys, "clamp", has_window=has_window) for num_keys in (2048, length))
    assert large - least <= limit
    if has_window:
        assert large < 4.1 * whole
    else:
        assert 2048 * 2048 * 2 < whole < limit + 2**22


@pytest.mark.thorough
@pytest.mark.parametrize(("table", "shortest"), [("full", 16384), ("clamp", 2048)])
def test_memory_of_all_terms_is_linear(table: str, shortest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the length takes twice the bytes, less what does not depend on it: with a full table so many rows that each block of
    them has one program, with a clamped one as many programs as there are blocks of queries."""
    monkeypatch.setenv(planning.VARIABLE, "0")
    short, middle, long = (allocated(factor * shortest, table, with_all_terms=True) for factor in (1, 2, 4))
    assert long - middle == 2 * (middle - short) > 0


def test_memory_of_the_residual() -> None:
    """As much as out takes; the backward then allocates nothing for the query but its gradient."""
    tensors, spec = call("full", torch.bfloat16, 64, length=2048, heads=2, has_lengths=False)
    tensors = tensors._replace(value=tensors.value[..., :49])
    kept, backwards = [], []
    for keeps_residual in (False, True):
        with recorded_launches("sm_90", only=""):
            with Allocations() as in_forward:
                out, _, softmax_stats, residual = forward(tensors, spec, keeps_residual=keeps_residual)
            with Allocations() as in_backward:
                backward(torch.empty_like(out), None, out, softmax_stats, tensors, spec, residual=residual)
        kept.append(in_forward.total)
        backwards.append(in_backward.total)
    assert kept[1] - kept[0] == 2 * 2048 * 49 * 2 and backwards[1] == backwards[0]


@pytest.mark.parametrize("kernel", selection.KERNELS)
def test_selected_configurations_are_valid(kernel: str) -> None:
    for target in (*NVIDIA, "gfx942", "interpreter"):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            for width in (8, 16, 64, 80, 128, 256):
                for name in features.FEATURES:
                    config = selected(kernel, target, *call(name, dtype, width, length=100))
                    has_table = not name.startswith("none") and name not in features.GRIDS
                    assert config.why_invalid(target, has_table, kernel) is None, (target, dtype, width, name)
