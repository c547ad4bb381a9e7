"""The backward kernels compiled for GPUs that are not there: registers, spills, loops, launches, grids and memory.

Counts of registers and instructions belong to one version of Triton, the one in constraints.txt.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode

from bench.cases import features
from bench.cases.features import LENGTH, call
from bench.compile import KernelCase, used_by
from bench.compiled import (
    Launch,
    Resources,
    matrix_instructions,
    recorded_launches,
    selected,
)
from tests.compile.test_forward import NVIDIA, SWEEP, on_triton_3_7
from triton_relattn.kernels import configs, workspace
from triton_relattn.kernels.architectures import architecture_of
from triton_relattn.kernels.backward import backward
from triton_relattn.kernels.forward import forward

KERNELS = ("dq", "dkv", "dtable")


@pytest.fixture(autouse=True)
def no_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a test asks for one."""
    monkeypatch.setenv(workspace.VARIABLE, "0")


def launches(target: str, dtype: torch.dtype, width: int, name: str, **of_call: Any) -> list[Launch]:
    """Return the kernels that a backward compiles and launches."""
    tensors, spec = call(name, dtype, width, **of_call)
    d_lse, softmax_stats = torch.empty(tensors.query.shape[:3]), torch.empty(*tensors.query.shape[:2], 2, tensors.query.shape[2])
    with recorded_launches(target) as recorded:
        backward(tensors.query, d_lse, tensors.query, softmax_stats, tensors, spec)
    return recorded


def case(kernel: str, target: str, width: int, table: str) -> KernelCase:
    return KernelCase(kernel, target, "bf16", width, table)


def compiled(kernel: str, target: str, width: int, table: str) -> Resources:
    return used_by(case(kernel, target, width, table), case(kernel, target, width, table).config)


@on_triton_3_7
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_loads_are_asynchronous(target: str, kernel: str) -> None:
    """With two stages the loads of the next turn run beside this one: a value carried unchanged would turn that off."""
    width = 64
    stages = case(kernel, target, width, "full").config.num_stages
    loop = compiled(kernel, target, width, "full").main_loop
    assert (loop["LDGSTS"] > 0) == (stages > 1) and (loop["LDG"] > 0) == (stages == 1), (stages, loop)


def per_score(kernel: str, target: str, width: int, table: str) -> list[float]:
    """Instructions of the loops per score element, near loop first: warps times instructions over the elements of a tile."""
    config = case(kernel, target, width, table).config
    loops = [loop for loop in compiled(kernel, target, width, table).loops if matrix_instructions(loop)]
    return [loop.total() * config.num_warps / (config.block_m * config.block_n) for loop in loops]


@pytest.mark.thorough
@on_triton_3_7
def test_cost_of_the_relative_term() -> None:
    """Instructions per score on sm_90, width 64, against the plain kernels: full tables, and far tiles of clamped ones."""
    (plain_rows,), (plain_columns,) = per_score("dq", "sm_90", 64, "none"), per_score("dkv", "sm_90", 64, "none")
    (rows,), (columns,), (table,) = (per_score(kernel, "sm_90", 64, "full") for kernel in KERNELS)
    assert plain_rows < rows <= 3.5 * plain_rows
    assert plain_columns < columns <= 1.9 * plain_columns
    assert plain_rows + plain_columns < rows + columns + table <= 5 * (plain_rows + plain_columns)
    assert per_score("dq", "sm_90", 64, "clamp")[1] <= 1.5 * plain_rows
    assert per_score("dkv", "sm_90", 64, "clamp")[1] <= 1.3 * plain_columns  # prefetches, as that does not


def products(kernel: str, target: str, table: str) -> float:
    """Matrix products per score of the main loop, in units of one [M, D] @ [D, N], on a target that has HMMA only."""
    config = case(kernel, target, 64, table).config
    loop = compiled(kernel, target, 64, table).main_loop
    # One HMMA multiplies 16 x 16 with 16 x 8.
    return loop["HMMA"] * config.num_warps * 16 * 8 * 16 / (config.block_m * config.block_n * 64)


@on_triton_3_7
def test_products_per_tile() -> None:
    """As few as the algorithm needs: the table adds QE and dp in the rows, two blocks of QE in the columns."""
    assert products("dq", "sm_80", "none") == 3  # QK, dP, dQ
    assert products("dq", "sm_80", "full") == 5
    assert products("dkv", "sm_80", "none") == 4  # QK, dV, dP, dK
    assert 5 < products("dkv", "sm_80", "full") <= 6  # of the block behind, only what the tile uses
    assert products("dtable", "sm_80", "full") == 6  # QK and dP of two tiles, QE, dE


@pytest.mark.thorough
def test_grids() -> None:
    """Blocks, heads and entries lie on axis 0, whose limit is 2**31 - 1, even with 70,000 heads. The dtable kernel's programs
    just fill the GPU."""
    recorded = {launch.name: launch.grid for launch in launches("sm_90", torch.float16, 16, "full", length=16, heads=70_000)}
    assert recorded["dq"] == recorded["dkv"] == (70_000, 1, 1)
    block = selected("dtable", "sm_90", *call("full", torch.float16, 16, length=16)).block_n
    blocks = triton.cdiv(31, block)
    assert recorded["dtable"] == (
        blocks,
        configs.PROGRAMS_PER_MULTIPROCESSOR * architecture_of("sm_90").multiprocessors // blocks,
        1,
    )
    # As many blocks as the GPU can hold at once need no partial sums.
    (_, _, table) = launches("sm_90", torch.float16, 16, "full", length=32 * LENGTH, heads=2)
    assert table.grid == (triton.cdiv(64 * LENGTH - 1, block), 1, 1)


class Allocations(TorchDispatchMode):
    """Bytes of all storages that are created within."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {
            leaf.untyped_storage().data_ptr() for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in known:
                self.sizes[leaf.untyped_storage().data_ptr()] = leaf.untyped_storage().nbytes()
                self.kept.append(leaf)  # so that no address is used twice
        return result

    @property
    def total(self) -> int:
        return sum(self.sizes.values())


def allocated(length: int, table: str, with_every_term: bool = False) -> int:
    """Bytes that forward and backward allocate, one head of width 16 in float16, all gradients, everything kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "HALF", 4)
        tensors, spec = call(table, torch.float16, 16, length=length, heads=1, has_lengths=False)
    if with_every_term:
        assert tensors.rel_key is not None
        rows = tensors.rel_key.shape[0]
        terms = {"rel_query": torch.empty_like(tensors.query), "rel_value": torch.empty_like(tensors.rel_key)}
        tensors = tensors._replace(
            **terms, rel_bias=torch.empty(rows, dtype=torch.float16), attn_mask=torch.empty(1, 1, 1, length)
        )
    d_out, d_lse = torch.empty_like(tensors.query), torch.empty(1, 1, length)
    with recorded_launches("sm_90", only=""), Allocations() as allocations:
        out, _, softmax_stats = forward(tensors, spec)
        backward(d_out, d_lse, out, softmax_stats, tensors, spec)
    return allocations.total


def test_memory_is_linear() -> None:
    """Results, lse, statistics and delta, byte for byte; for a clamped table two pairs of vectors and a partial sum more."""
    for length in (1024, 16384):
        row = 16 * 2
        results = 4 * length * row + 3 * length * 4  # out, three gradients, lse, statistics
        table_rows = 2 * length - 1
        # One head and batch entry: nothing is divided, and the gradient needs no partial sums.
        assert allocated(length, "full") == results + length * 4 + table_rows * row
        margin = configs_margin(length)
        clamped = (9 + 2 * (margin + 1)) * 16 * 4
        ends = 2 * 16 * 4  # sums of the margins
        assert allocated(length, "clamp") == results + length * 4 + 4 * length * 4 + 9 * row + clamped + ends


@pytest.mark.thorough
@pytest.mark.parametrize("table", ["full", "clamp"])
def test_memory_of_all_terms_is_linear(table: str) -> None:
    """Twice the length takes twice the bytes, less what does not depend on it."""
    short, middle, long = (allocated(length, table, with_every_term=True) for length in (1024, 2048, 4096))
    assert long - middle == 2 * (middle - short) > 0


def test_memory_of_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word for each pair as long as the limit allows it; then as many keys as it does, and no more whatever the length."""
    lengths = (1024, 4096, 16384)
    without = {(table, length): allocated(length, table) for table in ("full", "clamp") for length in lengths}

    def more(length: int, table: str) -> int:
        return allocated(length, table) - without[table, length]

    def sums(length: int) -> int:
        """Return the bytes of the partial sums of programs that share a block of rows, and of their total. As many programs share
        one as keep the GPU busy, whatever the length."""
        rows, tile = 2 * length - 1, selected("dtable_words", "sm_90", *call("full", torch.float16, 16, length=length))
        programs = triton.cdiv(rows, tile.block_n - 8)
        splits = min(length // (8 * tile.block_m), 4 * architecture_of("sm_90").multiprocessors // programs)
        return (splits + 1 if splits > 1 else 0) * rows * 16 * 4

    limit = 32 * 2**20
    monkeypatch.setenv(workspace.VARIABLE, str(limit))
    assert more(1024, "full") == 1024 * 1024 * 2 + sums(1024)
    assert more(4096, "full") == limit + sums(4096) and limit == 4096 * 4096 * 2
    assert more(16384, "full") == 0  # 16 programs at a time at most: the dtable kernel
    # Two parts, of half the keys each; the gradient is then summed in float32.
    monkeypatch.setenv(workspace.VARIABLE, str(10 * limit))
    assert more(16384, "full") == 16384 * 8192 * 2 + (2 * 16384 - 1) * 16 * 4 < 10 * limit
    # Of a bounded table a band.
    monkeypatch.delenv(workspace.VARIABLE)
    tiles = {kernel: selected(kernel, "sm_90", *call("clamp", torch.float16, 16, length=4096)) for kernel in configs.KERNELS}
    band = -(-(9 + 2 * configs_margin(4096) + tiles["dkv"].block_m - 1 + 15) // 64) * 64
    most = 2 * 4 * architecture_of("sm_90").multiprocessors * tiles["dtable_words"].block_n * 16 * 4  # partial sums
    assert all(0 <= more(length, "clamp") - length * min(band, length) * 2 <= most for length in lengths)


def test_memory_of_the_tail() -> None:
    """A byte for each number of out, in rows of four; the backward then allocates nothing for the query but its gradient."""
    tensors, spec = call("full", torch.bfloat16, 64, length=2048, heads=2, has_lengths=False)
    tensors = tensors._replace(value=tensors.value[..., :49])
    kept, backwards = [], []
    for keeps_tail in (False, True):
        with recorded_launches("sm_90", only=""):
            with Allocations() as of_forward:
                out, _, softmax_stats = forward(tensors, spec, keeps_tail=keeps_tail)
            with Allocations() as of_backward:
                backward(torch.empty_like(out), None, out, softmax_stats, tensors, spec)
        kept.append(of_forward.total)
        backwards.append(of_backward.total)
    assert kept[1] - kept[0] == 2 * 2048 * 52 and backwards[1] == backwards[0]


def configs_margin(length: int) -> int:
    """Rows on either side of a clamped table's partial sums."""
    rows = selected("dq", "sm_90", *call("clamp", torch.float16, 16, length=length))
    return rows.block_m + rows.block_n


@pytest.mark.thorough
def test_dtypes_and_widths_compile_and_fit() -> None:
    """A sample of what the selector can return; all of it in the slow sweep."""
    for target, dtype, width in (
        ("sm_90", torch.float16, 32),
        ("sm_80", torch.float32, 64),
        ("sm_86", torch.bfloat16, 256),
        ("sm_100", torch.bfloat16, 128),
        ("gfx942", torch.bfloat16, 128),
    ):
        for launch in launches(target, dtype, width, "clamp causal"):
            assert launch.kernel.metadata.shared <= architecture_of(target).shared_memory, (target, dtype, width, launch.name)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "dtype", "width", "table"), SWEEP)
def test_everything_compiles_and_fits(target: str, dtype: torch.dtype, width: int, table: str) -> None:
    """Targets, dtypes, widths and tables in turn; widths that are no power of two go with the next one."""
    for launch in launches(target, dtype, width, f"{table} causal"):
        assert launch.kernel.metadata.shared <= architecture_of(target).shared_memory, launch.name


@pytest.mark.parametrize("kernel", configs.KERNELS)
def test_selected_configurations_are_valid(kernel: str) -> None:
    for target in (*NVIDIA, "gfx942", "interpreter"):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            for width in (8, 16, 64, 80, 128, 256):
                for name in features.FEATURES:
                    config = selected(kernel, target, *call(name, dtype, width, length=100))
                    has_table = not name.startswith("none") and name not in features.GRIDS
                    assert config.why_invalid(target, has_table, kernel) is None, (target, dtype, width, name)
