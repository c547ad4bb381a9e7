"""Instructions of compiled kernels: fences, matrix products, rotations in registers, asynchronous loads, spills, and the cost of
the relative term.

Numbers of instructions are those of one version of Triton, the one in constraints.txt. The rest holds for Triton 3.6 to 3.9.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas

from bench.cases.features import FEATURES, GRIDS
from bench.compile import KernelCase, used_by
from bench.compiled import Resources, matrix_instructions, recorded_launches
from bench.compiled import compiled as compiled_kernel
from tests.compile.calls import call, compiled_launches
from tools.absent_gpu import Launch
from tools.emulator import small_kernels as small
from triton_relattn.kernels.call import call_of
from triton_relattn.kernels.config import architectures
from triton_relattn.kernels.config.tile_config import KERNELS, TileConfig

VERSION = ".".join(triton.__version__.split(".")[:2])
on_triton_3_7 = pytest.mark.skipif(VERSION != "3.7", reason=f"the counts are Triton 3.7's, this is {VERSION}")


def case(kernel: str, target: str, width: int, table: str) -> KernelCase:
    return KernelCase(kernel, target, "bf16", width, table)


def compiled(kernel: str, target: str, width: int, table: str) -> tuple[TileConfig, Resources]:
    """The kernel's default configuration, and the kernel in it."""
    found = case(kernel, target, width, table)
    return found.config, used_by(found, found.config)


# Fences between copies and products on Hopper, which Triton before 3.7.1 omits: kernels/config/architectures.py.


@pytest.fixture
def an_older_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the installed Triton as one that omits fences."""
    monkeypatch.setattr(architectures, "LACKS_FENCES", True)


def launches_on_hopper() -> list[Launch]:
    """The kernels of calls with a short table and one for all pairs, with tiles large enough for wgmma."""
    return compiled_launches("sm_90", call(320, positions=(-4, 4, "clamp"), key_heads=1), call(320, key_heads=1))


@pytest.mark.usefixtures("an_older_triton")
def test_every_product_on_hopper_has_a_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wgmma has a fence, and kernels with and without have different keys in Triton's caches."""
    launches = launches_on_hopper()
    before = {
        launch.name: re.findall(rf"(\S+;?)\s+{re.escape(architectures.WGMMA)}", launch.kernel.asm["ptx"]) for launch in launches
    }
    assert {name for name, instructions in before.items() if instructions} == {"forward", "dkv", "stored_dq", "dtable", "dq"}
    assert {instruction for instructions in before.values() for instruction in instructions} == {"fence.proxy.async.shared::cta;"}
    monkeypatch.setattr(architectures, "LACKS_FENCES", False)
    assert not {launch.kernel.hash for launch in launches} & {launch.kernel.hash for launch in launches_on_hopper()}


@pytest.mark.usefixtures("an_older_triton")
def test_kernels_of_others_other_gpus_and_the_users_options_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    launches_on_hopper()
    q = torch.zeros(64, 64, dtype=torch.bfloat16)
    with recorded_launches("sm_90") as launches:
        small.attention[(1,)](q, q, q, q, 64, D=64, BLOCK_M=64, BLOCK_N=64, num_stages=2)
        assert architectures.ptx_options("sm_90") == architectures.MARK
    assert launches[0].kernel.metadata.ptx_options is None
    for target in ("sm_80", "sm_100", "gfx942"):
        with recorded_launches(target):
            assert architectures.ptx_options(target) is None
    monkeypatch.setattr(knobs.nvidia, "ptxas_options", "--verbose")
    with recorded_launches("sm_90"):
        assert architectures.ptx_options("sm_90") == f"--verbose {architectures.MARK}"


# What ptxas says of Hopper's kernels: that their products wait for each other, and that registers spill.


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
        if (found := case(kernel, "sm_90", width, name)).exists:
            yield found


def kind(case: KernelCase) -> tuple[Any, ...]:
    """Kernels of one kind have the same configuration and loops."""
    if case.kernel in ("dtable", "dp2c"):
        return case.kernel, case.head_dim, case.config
    coverage = "grid" if case.features in GRIDS else call_of(*case.call, case.target).coverage
    return case.kernel, case.head_dim, case.config, coverage


FIRST = {kind(case): case for case in reversed(list(cases()))}.values()


@pytest.mark.parametrize("case", [c if c in FIRST else pytest.param(c, marks=pytest.mark.slow) for c in cases()], ids=str)
def test_products_run_side_by_side_and_registers_suffice(case: KernelCase) -> None:
    """No kernel's products are serialised, and registers suffice where they did."""
    kernel = compiled_kernel(case.kernel, case.target, *case.call, case.config)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert not SERIALISED & set(re.findall(r"C75\d\d", said)), said
    (spilled,) = re.findall(r"(\d+) bytes spill stores", said)
    may_spill = case not in FIRST or case.features in SPILLING.get(f"{case.kernel} {case.head_dim}", ())
    assert may_spill or spilled == "0", said


# Rotations in registers: no shared memory, no barrier, few shuffles, and asynchronous loads. If these tests fail with a new
# Triton, it no longer keeps the accumulator's layout, see kernels/tile/registers.py, and "gather" is faster.


ANY = 10**6
# (target, head dim, tile): most instructions of the forward's loop, and bytes on the stack
FORWARD = {
    ("sm_90", 64, (64, 64, 4)): (620, 0),
    ("sm_90", 64, (128, 64, 8)): (620, 0),
    ("sm_90", 128, (128, 64, 8)): (710, 0),
    ("sm_80", 64, (128, 64, 8)): (760, 16),
}


def wrong_counts(used: Resources, allowed: dict[str, tuple[int, int]]) -> dict[str, tuple[int, tuple[int, int]]]:
    """Counts of the main loop that are outside their limits, with those. Totals are checked for one version of Triton only."""
    totals = {"instructions": used.main_loop.total(), "stack bytes": used.stack_bytes}
    counts = Counter({**used.main_loop, **(totals if VERSION == "3.7" else {})})
    return {name: (counts[name], limits) for name, limits in allowed.items() if not limits[0] <= counts[name] <= limits[1]}


@pytest.mark.parametrize(("target", "head_dim", "tile"), FORWARD)
def test_rotations_of_the_forward_stay_in_registers(target: str, head_dim: int, tile: tuple[int, int, int]) -> None:
    """A word of two elements takes one shuffle; other moves are those of the kernel without a table."""
    config, full = TileConfig(*tile, 2, rotation="registers"), case("forward", target, head_dim, "full")
    plain = used_by(full.plain, replace(config, rotation="gather")).main_loop
    block_m, block_n, warps = tile
    words = block_m * block_n // (64 * warps)
    # On sm_80 the statistics of a row go through shared memory once. Triton 3.9 has a barrier more for a third wgmma.
    slack = 4 if target == "sm_80" else 0
    allowed = {name: (0, plain[name] + slack) for name in ("LDS", "STS")}
    allowed |= {"SHFL": (words, plain["SHFL"] + words), "BAR": (0, plain["BAR"] + max(slack, VERSION == "3.9"))}
    instructions, stack = FORWARD[target, head_dim, tile]
    allowed |= {"LDGSTS": (1, ANY), "instructions": (0, instructions), "stack bytes": (0, stack)}
    assert wrong_counts(used_by(full, config), allowed) == {}


def test_rotations_of_the_backward_stay_in_registers() -> None:
    """The default configuration of the dkv kernel, 64 x 64: no shared memory for rotations; moves are for statistics and dS."""
    full = case("dkv", "sm_90", 64, "full")
    config = replace(full.config, max_registers=None)  # which would spill, and add instructions that are no rotations
    assert (config.block_m, config.block_n, config.num_warps, config.rotation) == (64, 64, 4, "registers")
    allowed = {"SHFL": (16, 16), "LDS": (0, 6), "STS": (0, 20), "BAR": (0, 11), "instructions": (0, 890), "stack bytes": (0, 0)}
    allowed["LDGSTS" if config.num_stages > 1 else "LDG"] = (1, ANY)
    assert wrong_counts(used_by(full, config), allowed) == {}


def test_a_gather_uses_shared_memory() -> None:
    """So that the check of rotations can fail."""
    used = used_by(case("forward", "sm_90", 64, "full"), TileConfig(64, 64, 4, 2, rotation="gather"))
    assert wrong_counts(used, {"LDS": (0, 0)}) == {"LDS": (16, (0, 0))}


# The cost of the relative term.


def per_score(kernel: str, target: str, width: int, table: str) -> list[float]:
    """Instructions of each loop per score, near loop first: warps times instructions over the elements of a tile. Without a limit
    of registers, whose spills are no cost of a term."""
    kernel_case = case(kernel, target, width, table)
    config = replace(kernel_case.config, max_registers=None)
    loops = [loop for loop in used_by(kernel_case, config).loops if matrix_instructions(loop)]
    return [loop.total() * config.num_warps / (config.block_m * config.block_n) for loop in loops]


@on_triton_3_7
@pytest.mark.parametrize("width", [64, 128])
def test_cost_of_the_relative_term_in_the_forward(width: int) -> None:
    """At most 1.6 times the instructions of the kernel without a table, in the near loop on sm_90."""
    plain, near = (per_score("forward", "sm_90", width, table)[0] for table in ("none", "full"))
    assert plain < near <= 1.6 * plain


@pytest.mark.thorough
@on_triton_3_7
def test_cost_of_the_relative_term_in_the_backward() -> None:
    """Instructions per score on sm_90, width 64, against kernels without a table: full tables, and far tiles of clamped ones."""
    (plain_columns,), (plain_rows,) = (per_score(kernel, "sm_90", 64, "none") for kernel in ("dkv", "dq"))
    (columns,), (rows,), (table,) = (per_score(kernel, "sm_90", 64, "full") for kernel in ("dkv", "stored_dq", "dtable"))
    assert plain_columns < columns <= 2 * plain_columns
    assert rows <= plain_rows  # two products beside three
    assert plain_rows + plain_columns < rows + columns + table <= 2 * (plain_rows + plain_columns)
    assert per_score("dkv", "sm_90", 64, "clamp")[1] <= 1.3 * plain_columns  # which does not prefetch
    assert per_score("dq", "sm_90", 64, "clamp")[1] <= 1.4 * plain_rows  # which has no far term, and no sum over far keys


# Products and loads.


@on_triton_3_7
@pytest.mark.parametrize(
    ("kernel", "width"), [("forward", 64), ("forward", 128), *((kernel, 64) for kernel in ("dkv", "stored_dq", "dtable"))]
)
@pytest.mark.parametrize(("target", "unit"), [("sm_80", "HMMA"), ("sm_90", "HGMMA")])
def test_loads_are_asynchronous(target: str, unit: str, kernel: str, width: int) -> None:
    """With two stages, loads of the next iteration run beside this one; a value carried unchanged would turn Triton's pipelining
    off. Exceptions in the dtable kernel are the number of a sequence's keys and, on sm_80, dS, which has to be transposed."""
    config, used = compiled(kernel, target, width, "full")
    loop, others, stages = used.main_loop, 0, config.num_stages
    if kernel == "dtable":
        words = config.block_m * config.block_n * 2 // 16 // (32 * config.num_warps)  # of 16 bytes, loaded by a thread
        others = 1 + words * (target == "sm_80")
    assert (loop["LDGSTS"] > 0) == (stages > 1) and (loop["LDG"] > others) == (stages == 1), (stages, loop)
    assert matrix_instructions(loop) == loop[unit] > 0


@on_triton_3_7
@pytest.mark.parametrize(
    ("kernel", "width", "table", "least", "most"),
    [
        ("forward", 64, "none", 2, 2),  # QK, PV
        ("forward", 64, "full", 3, 3),  # and one block of QE; the other is carried
        ("forward", 128, "none", 2, 2),
        ("forward", 128, "full", 3, 3),
        ("dkv", 64, "none", 4, 4),  # QK, dV, dP, dK
        ("dkv", 64, "full", 5.01, 6),  # and two blocks of QE, of the second only what the tile uses
        ("dq", 64, "none", 3, 3),  # QK, dP, dQ
        ("dq", 64, "clamp", 4, 4),  # near the table; one block of QE is carried
        ("stored_dq", 64, "full", 2, 2),  # dS with keys, and with rows of the table
        ("dtable", 64, "full", 1, 1),  # dE
    ],
)
def test_products_per_tile(kernel: str, width: int, table: str, least: float, most: int) -> None:
    """As few as the algorithm needs: matrix products per score of the main loop on sm_80, in units of one [M, D] @ [D, N]; one
    HMMA is 16 x 16 by 16 x 8."""
    config, used = compiled(kernel, "sm_80", width, table)
    found = used.main_loop["HMMA"] * config.num_warps * 16 * 8 * 16 / (config.block_m * config.block_n * width)
    assert least <= found <= most


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_beyond_a_table_nan_is_kept(target: str) -> None:
    """An end row with NaN reaches out: the shift of far scores is a maximum that keeps NaN, unlike fmax. (In the interpreter both
    are numpy's.)"""
    for table in ("full", "clamp"):
        kernel = compiled_kernel("forward", target, *case("forward", target, 64, table).call)
        assert ("max.NaN.f32" in kernel.asm["ptx"]) == (table == "clamp")


def test_far_tiles_cost_no_product() -> None:
    """Tiles beyond a bounded table have the number of matrix instructions that they have without a table."""
    for table in ("zero", "clamp"):
        loops = compiled("forward", "sm_90", 64, table)[1].loops
        near, far = (matrix_instructions(loop) for loop in loops if matrix_instructions(loop))
        assert far * 3 == near * 2
