"""Launches by the public functions on GPUs that are not there, for calls drawn from a seed.

The real host code runs, from validation to the specialisation of the kernels' arguments. The expected arguments are computed
here, independently of it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from bench.compiled import recorded_launches
from tests.draws import compiled
from tests.draws import drawn as drawn_sample
from tests.groups import flat, flat_types
from triton_relattn import RelativePositions, fused_relative_attention, fused_relative_attention_varlen
from triton_relattn import _implementations as implementations
from triton_relattn._core.spec import DIFFERENTIABLE
from triton_relattn.kernels.call import Shape, Tile
from triton_relattn.kernels.config.tile_config import TileConfig
from triton_relattn.kernels.workspace import planning
from triton_relattn.kernels.workspace.stored import Layout
from triton_relattn.testing import Inputs

TARGETS = ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942")
CALLS = 320
TABLES = ("rel_key", "rel_value", "rel_bias", "rel_p2c")
OF_SCORES = {"rel_key", "rel_bias", "rel_p2c"}
POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.bool: "*u1"}
BUFFERS = {
    "lses",
    "softmax_stats",
    "d_lses",
    "deltas",
    "far_keys",
    "far_scores",
    "far_values",
    "far_sums",
    "far_key_sums",
    "parts",
    "part_statistics",
}
WORKSPACE = {"ds", "stored_probs", "stored"}
PARTIAL_SUMS = {"d_rows", "d_biases", "d_rel_p2c"}


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Not here: nothing is written to results, which may be large."""


@dataclass
class Call:
    """A call of one of the public functions, and what of it is differentiated."""

    tensors: dict[str, torch.Tensor]
    arguments: dict[str, Any]
    d_out: torch.Tensor
    d_lse: torch.Tensor
    wanted: frozenset[str] = frozenset(DIFFERENTIABLE)
    precision: str = "highest"
    limit: int | None = None  # of the workspace, in bytes, if it is not the usual one

    def __post_init__(self) -> None:
        self.wanted &= set(self.tensors)
        for name in self.wanted:
            self.tensors[name].requires_grad_()

    def run(self) -> None:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.precision)
        try:
            with mock.patch.dict(os.environ, {} if self.limit is None else {planning.VARIABLE: str(self.limit)}):
                out, lse = self.function(**self.tensors, **self.arguments, return_lse=True)
                if self.wanted:
                    wanted = [self.tensors[name] for name in sorted(self.wanted)]
                    torch.autograd.grad((out, lse), wanted, (self.d_out, self.d_lse))
        finally:
            torch.set_float32_matmul_precision(before)

    @property
    def packed(self) -> bool:
        return "cu_seqlens_q" in self.arguments

    @property
    def function(self) -> Callable[..., Any]:
        return fused_relative_attention_varlen if self.packed else fused_relative_attention

    def sizes(self) -> tuple[int, int, int, int, int]:
        """Sequences, heads, heads of keys, queries and keys of the longest sequence."""
        query, key = self.tensors["query"].shape, self.tensors["key"].shape
        if self.packed:
            longest = (self.arguments[f"max_seqlen_{which}"] for which in "qk")
            return len(self.arguments["cu_seqlens_q"]) - 1, query[1], key[1], *longest
        return query[0], query[1], key[1], query[2], key[2]

    @property
    def tables(self) -> dict[str, torch.Tensor]:
        return {name: self.tensors[name] for name in TABLES if name in self.tensors}

    @property
    def num_rows(self) -> int:
        return next(table.shape[-1 if name == "rel_bias" else -2] for name, table in self.tables.items())

    @property
    def per_head(self) -> bool:
        """Whether some table is one for each head."""
        return any(table.dim() == 3 - (name == "rel_bias") for name, table in self.tables.items())

    def coverage(self) -> str:
        """Return which pairs the tables have rows for."""
        if not self.tables:
            return "no table"
        _, _, _, num_queries, num_keys = self.sizes()
        positions = self.arguments.get("positions") or RelativePositions.centred(self.num_rows)
        left, right = self.arguments.get("window_size", (-1, -1))
        right = 0 if self.arguments["is_causal"] else right
        offset = self.arguments["query_offset"]
        low, high = (-(2**40), 2**40) if isinstance(offset, torch.Tensor) else (1 - num_queries - offset, num_keys - 1 - offset)
        low, high = low if left < 0 else max(low, -left), high if right < 0 else min(high, right)
        return "full" if positions.first <= low and high <= positions.last else positions.outside

    def keeps_residual(self) -> bool:
        """Whether what rounding takes from out is kept: errors of delta would add up in the gradient of a table."""
        is_rounded = self.tensors["query"].dtype != torch.float32 or self.precision != "highest"
        return is_rounded and bool(self.wanted and OF_SCORES & self.tables.keys())

    def kernels(self, parts: int) -> list[str]:
        """The kernels that have to run, in their order, and what they read, if it is not dS.

        Args:
            parts: in which a workspace is filled.
        """
        if self.tensors["query"].numel() == 0:
            return []
        clamped = self.coverage() == "clamp"
        far_keys = ["far_keys"] * (clamped and "rel_p2c" in self.tables)
        if not self.wanted or self.tensors["key"].numel() == 0:
            return [*far_keys, "forward"]
        of_rows = bool(self.wanted & {"rel_key", "rel_bias"})
        of_part = {
            "dkv": True,
            "dq": bool(self.wanted & {"query", "rel_query"}) or (clamped and of_rows),
            "dq of P": clamped and "rel_value" in self.wanted,
            "dtable": of_rows,
            "dtable of P": "rel_value" in self.wanted,
            "dp2c": "rel_p2c" in self.wanted,
        }
        return [*far_keys, "forward", *far_keys, "delta", *[name for name, runs in of_part.items() if runs] * parts]


@dataclass(eq=False)
class Recorded:
    """A launch as Triton would specialise it."""

    name: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    signature: dict[str, Any]
    constants: list[Any]
    num_warps: int
    num_stages: int
    max_registers: int | None

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def tile(self) -> TileConfig:
        tile = self["TILE"]
        assert tile.warps == self.num_warps and (tile.carry is None or self.name == "forward")
        carry = tile.carry if self.name == "forward" else "scores"
        return TileConfig(tile.block_m, tile.block_n, tile.warps, self.num_stages, carry, tile.rotation, self.max_registers)

    def strided(self) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
        """The tensors that are addressed by strides."""
        for name, argument in self.arguments.items():
            if type(argument) is tuple and argument and isinstance(argument[0], torch.Tensor):
                yield name, *argument


@contextmanager
def recorded(target: str) -> Iterator[list[Recorded]]:
    """All launches of the public functions within, which use the kernels on the target; nothing is compiled."""
    launches: list[Recorded] = []

    def record(kernel: JITFunction, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        *_, backend, binder = kernel.device_caches[driver.active.get_current_device()]
        bound, specialization, options = binder(*args, **kwargs)
        options, signature, constants, _ = kernel._pack_args(backend, kwargs, bound, specialization, options)
        name = kernel.__name__.removesuffix("_kernel")
        launch = Recorded(
            name,
            grid,
            flat(bound),
            flat_types(bound, signature),
            list(constants.values()),
            num_warps=options.num_warps,
            num_stages=options.num_stages,
            max_registers=getattr(options, "maxnreg", None),
        )
        launches.append(launch)

    with recorded_launches(target), pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", record)
        patch.setattr(implementations, "choose_implementation", lambda *_: implementations.TRITON)
        yield launches


def unwritten(tensor: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """On the CPU, of this shape and these strides, in memory that nothing has touched; along dim 2**31 elements long."""
    strides = list(tensor.stride())
    if dim is not None and tensor.shape[dim] > 1:
        strides[dim] = 2**31 // (tensor.shape[dim] - 1) + 1
    length = 1 + sum(max(size - 1, 0) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    return torch.empty(length, dtype=tensor.dtype).as_strided(tensor.shape, strides)


def emptied(choose: random.Random, inputs: Inputs, arguments: dict[str, Any]) -> tuple[Inputs, dict[str, Any]]:
    """The same padded call without batch entries, queries or keys."""
    of_queries = ("query", "rel_query", "d_out", "d_lse")
    names, dim = choose.choice((((*of_queries, "key", "value"), 0), (of_queries, 2), (("key", "value"), 2)))
    tensors = {name: getattr(inputs, name) for name in names}
    arguments = {name: value for name, value in arguments.items() if name not in ("attn_mask", "key_lengths")}
    if dim == 0 and isinstance(arguments["query_offset"], torch.Tensor):
        arguments["query_offset"] = arguments["query_offset"][:0]
    return inputs._replace(**{name: each.narrow(dim, 0, 0) for name, each in tensors.items() if each is not None}), arguments


def drawn(seed: int) -> Call:
    """A call of any shape, dtype, table, features and gradients, as large as those of models."""
    choose = random.Random(seed)
    packed = choose.random() < 0.35
    dtype = choose.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float16, torch.float32))
    limits = compiled(dtype)._replace(widths=(8, 16, 40, 64, 80, 128, 256), longest=choose.choice((200, 1100, 4100)))
    inputs, arguments = drawn_sample(seed, limits, is_packed=packed).inputs(is_meta=True)
    if not packed and choose.random() < 0.1:
        inputs, arguments = emptied(choose, inputs, arguments)
    tensors = {
        name: unwritten(tensor, choose.randrange(tensor.dim()) if choose.random() < 0.15 else None)
        for name, tensor in inputs._asdict().items()
        if tensor is not None
    }
    if "attn_mask" in arguments:
        arguments["attn_mask"] = unwritten(arguments["attn_mask"])
    some = frozenset(name for name in DIFFERENTIABLE if choose.random() < 0.4)
    call = Call(
        {name: tensor for name, tensor in tensors.items() if name in DIFFERENTIABLE},
        arguments,
        tensors["d_out"],
        tensors["d_lse"],
        frozenset(DIFFERENTIABLE) if choose.random() < 0.3 else some,
        choose.choice(("highest", "high")),
    )
    sequences, heads, _, num_queries, num_keys = call.sizes()
    fraction = choose.choice((None, None, 2, 5, 30))
    call.limit = None if fraction is None else 2 * sequences * heads * num_queries * num_keys // fraction
    return call


def check_grid(target: str, launch: Recorded) -> None:
    """Legal: CUDA counts programs, 65,535 in all dimensions but the first; HIP counts threads, in 32 bits. Triton launches
    nothing where there are no programs: a call without keys has no terms of far ones."""
    least = 0 if launch.name == "far_keys" else 1
    assert all(type(size) is int and size >= least for size in launch.grid), launch.grid
    x, y, z = (*launch.grid, 1, 1)[:3]
    if target.startswith("sm_"):
        assert x < 2**31 and max(y, z) <= 65_535, launch.grid
    else:
        assert x * launch.num_warps * 64 < 2**32 and max(y, z) <= 65_535, launch.grid


def named(launches: list[Recorded]) -> list[str]:
    """The names of launches, those of a workspace with what they read: dS, or P."""
    names = []
    for launch in launches:
        if launch.name == "dkv":
            stored = {"": launch["ds"], " of P": launch["stored_probs"]}
        reads = launch.arguments.get("stored")
        names.append(launch.name)
        if reads is not None:
            (which,) = (which for which, each in stored.items() if each is not None and each[0] is reads[0])
            names[-1] += which
    return names


def check_workspace(call: Call, launches: list[Recorded]) -> None:
    """It has what the wanted gradients need, and is no larger than it may be; parts fill it one after the other, all programs of
    the dkv kernel in turn, and the kernels that follow read what the last one has filled."""
    parts = [each for each in launches if each.name == "dkv"]
    if not parts:
        return
    sequences, heads, key_heads, num_queries, num_keys = call.sizes()
    assert all((each["ds"] is not None) == bool(call.wanted & {"query", "rel_query", *OF_SCORES}) for each in parts)
    assert all((each["stored_probs"] is not None) == ("rel_value" in call.wanted) for each in parts)
    assert [each["first_program"] for each in parts] == [sum(each.grid[0] for each in parts[:n]) for n in range(len(parts))]
    block_n = parts[0]["TILE"].block_n
    blocks = -(-num_keys // block_n)
    assert sum(each.grid[0] for each in parts) == blocks * sequences * key_heads
    stored = parts[0]["ds"] or parts[0]["stored_probs"]
    if stored is None:
        return
    _, items, rows, columns = stored[0].shape
    assert rows == num_queries and rows * columns <= 2**30  # addressed in 32 bits
    of_pair = call.tensors["query"].element_size() * (1 + ("rel_value" in call.tables))
    if call.limit is not None:
        assert items * rows * columns * of_pair <= call.limit or (items, columns) == (heads // key_heads, block_n)
    elif sequences * heads * rows * blocks * block_n * of_pair <= 2**28:
        assert len(parts) == 1
    for launch in launches[launches.index(parts[0]) :]:
        if launch.name == "dkv":
            first, stop = launch["first_program"], launch["first_program"] + launch.grid[0]
        else:
            assert (launch["first_program"], launch["stop_program"], launch["LAYOUT"]) == (first, stop, parts[0]["LAYOUT"])


def check_arguments(call: Call, launch: Recorded) -> None:
    """Dtypes, strides and constants as the kernel takes them; offsets in 64 bits where 32 do not do."""
    dtype = call.tensors["query"].dtype
    has_tile = launch.name != "merge"
    blocks = max(launch["TILE"].block_m, launch["TILE"].block_n) if has_tile else launch["BLOCK_M"]
    step, of_queries = 1, ("vectors", "d_queries", "d_rel_queries")
    if launch.name in ("dtable", "dq"):  # queries of a tile lie 16 bytes apart in a row of dS
        step = 16 // dtype.itemsize
    coverage = call.coverage()
    wide_index = not has_tile or launch["SHAPE"].wide_index
    for name, tensor, strides in launch.strided():
        pointer, types = launch.signature[name]
        added = len(strides) - tensor.dim()  # of a table: it has no entries, and a shared one no heads
        shape = (1,) * added + tensor.shape
        assert strides == (0,) * added + tensor.stride() and len(types) == len(strides), name
        assert added == 0 or name in TABLES, name
        for stride, kind in zip(strides, types, strict=True):
            assert kind == ("constexpr" if stride == 1 else "i32" if stride < 2**31 else "i64"), (name, strides, types)
        if name in BUFFERS | PARTIAL_SUMS:
            assert tensor.is_contiguous(), name
            is_gradient = name in PARTIAL_SUMS and launch.grid[1] == 1 and coverage != "clamp" and not launch["ADDS"]
            assert tensor.dtype == torch.float32 or (is_gradient and tensor.dtype == dtype), name
        elif name == "outs" and launch.name == "forward" and len(launch.grid) == 2:
            assert tensor.dtype == torch.float32  # of parts of the keys
        elif name in ("d_queries", "d_rel_queries") and launch["ADDS"]:
            assert tensor.dtype == torch.float32  # parts of a sum
        elif name not in ("rel_bias", "attn_mask", "mask"):
            assert tensor.dtype == dtype and (name not in WORKSPACE or tensor.is_contiguous()), name
        assert pointer == POINTERS[tensor.dtype], name
        if name == "rel_bias":  # read by rows, in 32 bits
            assert (shape[-1] - 1) * strides[-1] < 2**31
        elif len(shape) == 4 and name not in BUFFERS | {"attn_mask", "mask"}:
            clamped = name in TABLES and coverage == "clamp"  # addressed from its first row on
            rows = shape[2] if clamped else min(step * blocks if name in of_queries else blocks, shape[2])
            offset = (rows - 1) * strides[2] + (shape[3] - 1) * strides[3]
            assert wide_index or offset < 2**31, (name, offset)
    for name, value in launch.arguments.items():
        if type(value) is int and launch.signature[name] != "constexpr":
            assert launch.signature[name] == "i32" and abs(value) < 2**31, name
    if "sequences" in launch.arguments:
        for argument in (launch["scaling"], launch["sequences"], launch["window"]):
            assert all(value is None or type(value) in (int, float, torch.Tensor) for value in argument), argument
        assert set(launch.signature["scaling"]) <= {"fp32", "constexpr"}
        assert all(each.is_contiguous() for each in launch["sequences"] if isinstance(each, torch.Tensor))
    constants = {int, str, bool, type(None), Shape, Tile, Layout}
    assert {type(value) for value in launch.constants} <= constants, launch.constants


def check(target: str, call: Call, launches: list[Recorded]) -> None:
    """Everything that holds for the launches of one call."""
    names = named(launches)
    if "merge" in names:
        forward = names.index("forward")
        assert names.pop(forward + 1) == "merge" and len(launches[forward].grid) == 2
    assert names == call.kernels(names.count("dkv")), (target, sorted(call.wanted))
    check_workspace(call, launches)
    for launch in launches:
        if launch.name in ("forward", "delta"):
            assert (launch["residuals"] is not None) == call.keeps_residual()
            assert launch.arguments.get("SPLITS_KEYS", False) == (launch.name == "forward" and len(launch.grid) == 2)
        check_grid(target, launch)
        check_arguments(call, launch)
        if launch.name != "merge":
            coverage = call.coverage()  # keys beyond a clamped table are summed apart from its rows
            assert launch["TILE"].coverage == ("zero" if coverage == "clamp" and launch.name in ("dq", "dtable") else coverage)
            assert launch.tile.why_invalid(target, bool(call.tables), launch.name) is None, (target, launch.tile)


@pytest.mark.parametrize("seed", range(CALLS))
def test_drawn_calls(seed: int) -> None:
    """On every target: the kernels that the wanted gradients need and no others, grids, configurations and arguments."""
    call = drawn(seed)
    for target in TARGETS:
        with recorded(target) as launches:
            call.run()
        check(target, call, launches)


def test_what_is_drawn() -> None:
    """Calls of every kind, so that the test above is one of all of them."""
    kinds, arguments, wanted = set(), set(), set()
    empty = far_apart = 0
    for call in map(drawn, range(CALLS)):  # one at a time: they are of gigabytes, though of none that is touched
        kinds.add((call.packed, call.coverage(), call.tensors["query"].dtype))
        arguments |= set(call.arguments)
        wanted.add(sum(name in call.wanted for name in DIFFERENTIABLE))
        empty += call.tensors["query"].numel() == 0
        far_apart += sum(max(tensor.stride(), default=0) >= 2**21 for tensor in call.tensors.values())
    assert len(kinds) == 2 * 4 * 3 and wanted >= set(range(8)) and empty > 5 and far_apart > 20
    assert arguments >= {"attn_mask", "key_lengths", "window_size", "softcap", "dropout_p"}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("sequences", "heads", "packed"), [(1, 70_000, False), (70_000, 1, False), (70, 1000, False), (70_000, 1, True)]
)
def test_70_000_heads(sequences: int, heads: int, packed: bool, target: str) -> None:
    """More than a grid's second axis takes."""
    shape = (sequences * 8, heads, 16) if packed else (sequences, heads, 8, 16)
    query, key, value, d_out = (unwritten(torch.empty(shape, dtype=torch.float16, device="meta")) for _ in range(4))
    rel_key, rel_value = (torch.empty(5, 16, dtype=torch.float16) for _ in range(2))
    arguments: dict[str, Any] = {"is_causal": False, "query_offset": 0}
    if packed:
        starts = torch.arange(0, sequences * 8 + 1, 8)
        arguments |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 8, "max_seqlen_k": 8}
    d_lse = torch.zeros((heads, sequences * 8) if packed else shape[:3])
    call = Call({"query": query, "key": key, "value": value, "rel_key": rel_key, "rel_value": rel_value}, arguments, d_out, d_lse)
    with recorded(target) as launches:
        call.run()
    check(target, call, launches)
    assert [launch.grid[0] for launch in launches if launch.name in ("forward", "dkv")] == [70_000] * 2


@pytest.mark.parametrize("target", TARGETS)
def test_queries_of_a_tile_that_are_far_apart(target: str) -> None:
    """The dtable kernel's tiles reach over more rows than others: over all 500 queries, whose memory takes 31 bits."""
    shape = (1, 1, 500, 64)
    tensors = {name: torch.empty(shape, dtype=torch.bfloat16) for name in ("query", "key", "value")}
    step = 2**31 // 499 // 16 * 16 + 16  # loads of 16 bytes; other operands are copied
    tensors["query"] = torch.empty(500 * step, dtype=torch.bfloat16).as_strided(shape, (500 * step, 500 * step, step, 1))
    tensors["rel_key"] = torch.empty(999, 64, dtype=torch.bfloat16)
    call = Call(
        tensors, {"is_causal": False, "query_offset": 0}, torch.empty(shape, dtype=torch.bfloat16), torch.empty(shape[:3])
    )
    with recorded(target) as launches:
        call.run()
    check(target, call, launches)
    assert all(launch["SHAPE"].wide_index for launch in launches if launch.name == "dtable")
