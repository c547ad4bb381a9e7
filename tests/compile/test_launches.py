"""Launches by the public functions on GPUs that this machine lacks, for calls drawn from a seed.

The real host code runs, from validation to the specialisation of the kernels' arguments. The tests check grids, dtypes, strides,
offsets beyond 32 bits, and configurations.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
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
from triton_relattn import _implementations as implementations
from triton_relattn import fused_relative_attention, fused_relative_attention_varlen
from triton_relattn._core.spec import DIFFERENTIABLE
from triton_relattn.kernels.call import Shape, TileConstants
from triton_relattn.kernels.config.tile_config import TileConfig
from triton_relattn.kernels.workspace import planning
from triton_relattn.kernels.workspace.stored import Layout
from triton_relattn.testing import Inputs

TARGETS = ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942")
CALLS = 320
TABLES = ("rel_key", "rel_value", "rel_bias", "rel_p2c")
POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.bool: "*u1"}
BUFFERS = {"lses", "softmax_stats", "d_lses", "deltas", "far_keys", "far_scores", "far_values", "table_parts"}
BUFFERS |= {"parts", "part_statistics"}
BUFFERS |= {"end_rows", "end_rel_key", "end_rel_bias", "end_rel_value"}
WORKSPACE = {"ds", "stored_probs", "stored"}
PARTIAL_SUMS = {"d_rows", "d_biases", "d_rel_p2c"}


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Disabled: results may be large, and nothing is written to them."""


@dataclass
class Call:
    """A call of one of the public functions, and the inputs with gradients."""

    tensors: dict[str, torch.Tensor]
    arguments: dict[str, Any]
    d_out: torch.Tensor
    d_lse: torch.Tensor
    wanted: frozenset[str] = frozenset(DIFFERENTIABLE)
    precision: str = "highest"
    limit: int | None = None  # of the workspace in bytes, None: the default

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["query"].dtype

    def launches(self, target: str) -> list[Recorded]:
        """Run the call and its backward, and return its launches on a GPU."""
        function: Any = fused_relative_attention_varlen if "cu_seqlens_q" in self.arguments else fused_relative_attention
        wanted = [tensor.requires_grad_() for name, tensor in sorted(self.tensors.items()) if name in self.wanted]
        environment = {} if self.limit is None else {planning.VARIABLE: str(self.limit)}
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.precision)
        try:
            with recorded(target) as launches, mock.patch.dict(os.environ, environment):
                out_and_lse = function(**self.tensors, **self.arguments, return_lse=True)
                if wanted:
                    torch.autograd.grad(out_and_lse, wanted, (self.d_out, self.d_lse))
        finally:
            torch.set_float32_matmul_precision(precision)
        return launches


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
        assert tile.warps == self.num_warps and (tile.carry is None or self.name in ("forward", "dq"))
        carry = tile.carry if self.name in ("forward", "dq") else "scores"
        return TileConfig(tile.block_m, tile.block_n, tile.warps, self.num_stages, carry, tile.rotation, self.max_registers)

    def strided(self) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
        """The tensors that are addressed by strides."""
        for name, argument in self.arguments.items():
            if type(argument) is tuple and argument and isinstance(argument[0], torch.Tensor):
                yield name, *argument


@contextmanager
def recorded(target: str) -> Iterator[list[Recorded]]:
    """Record the launches of public functions on the target, without compiling kernels."""
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
    """A CPU tensor with this shape and strides in untouched memory; its dimension dim spans 2**31 elements."""
    strides = list(tensor.stride())
    if dim is not None and tensor.shape[dim] > 1:
        strides[dim] = 2**31 // (tensor.shape[dim] - 1) + 1
    length = 1 + sum(max(size - 1, 0) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    return torch.empty(length, dtype=tensor.dtype).as_strided(tensor.shape, strides)


def without_elements(choose: random.Random, inputs: Inputs, arguments: dict[str, Any]) -> tuple[Inputs, dict[str, Any]]:
    """The padded call without batch entries, queries or keys."""
    query_tensors = ("query", "rel_query", "d_out", "d_lse")
    names, dim = choose.choice((((*query_tensors, "key", "value"), 0), (query_tensors, 2), (("key", "value"), 2)))
    tensors = {name: getattr(inputs, name) for name in names}
    arguments = {name: value for name, value in arguments.items() if name not in ("attn_mask", "key_lengths")}
    if dim == 0 and isinstance(arguments["query_offset"], torch.Tensor):
        arguments["query_offset"] = arguments["query_offset"][:0]
    emptied = {name: tensor.narrow(dim, 0, 0) for name, tensor in tensors.items() if tensor is not None}
    return inputs._replace(**emptied), arguments


def drawn(seed: int) -> Call:
    """A call of any shape, dtype, table, features and gradients, as large as those of models."""
    choose = random.Random(seed)
    packed = choose.random() < 0.35
    dtype = choose.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float16, torch.float32))
    limits = compiled(dtype)._replace(widths=(8, 16, 40, 64, 80, 128, 256), longest=choose.choice((200, 1100, 4100)))
    inputs, arguments = drawn_sample(seed, limits, is_packed=packed).inputs(is_meta=True)
    if not packed and choose.random() < 0.1:
        inputs, arguments = without_elements(choose, inputs, arguments)
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
    pairs = tensors["query"][..., 0].numel() * (arguments["max_seqlen_k"] if packed else tensors["key"].shape[2])
    fraction = choose.choice((None, None, 2, 5, 30))
    call.limit = None if fraction is None else 2 * pairs // fraction
    return call


def check_grid(target: str, launch: Recorded) -> None:
    """Assert legal sizes: CUDA allows 65,535 programs in all dimensions except the first, HIP 2**32 threads. Only the far_keys
    kernel may have none, without keys."""
    least = 0 if launch.name == "far_keys" else 1
    assert all(type(size) is int and size >= least for size in launch.grid), launch.grid
    x, y, z = (*launch.grid, 1, 1)[:3]
    if target.startswith("sm_"):
        assert x < 2**31 and max(y, z) <= 65_535, launch.grid
    else:
        assert x * launch.num_warps * 64 < 2**32 and max(y, z) <= 65_535, launch.grid


def check_workspace(call: Call, launches: list[Recorded]) -> None:
    """Assert that the workspace obeys its limit, or is one block of keys of a head, and is addressed in 32 bits."""
    for launch in launches:
        stored = launch["ds"] or launch["stored_probs"] if launch.name == "dkv" else None
        if stored is None:
            continue
        _, items, rows, columns = stored[0].shape
        assert rows * columns <= 2**30
        size = items * rows * columns * stored[0].element_size() * (1 + ("rel_value" in call.tensors))
        smallest = launch["SHAPE"].group, launch["TILE"].block_n
        assert call.limit is None or size <= call.limit or (items, columns) == smallest


def is_sum(launch: Recorded) -> bool:
    """Whether more is added to what the stored_dq kernel writes."""
    return launch["ADDS"] or launch["TILE"].coverage != "full"


def check_arguments(call: Call, launch: Recorded) -> None:
    """Assert dtypes, strides and constants as the kernel expects them, and 64-bit offsets where 32 bits overflow."""
    dtype = call.dtype
    if launch.name == "table_gradient":
        check_table_gradient(launch)
        return
    has_tile = launch.name != "merge"
    blocks = max(launch["TILE"].block_m, launch["TILE"].block_n) if has_tile else launch["BLOCK_M"]
    step, query_tensors = 1, ("vectors", "d_queries", "d_rel_queries")
    if launch.name in ("dtable", "stored_dq"):  # queries of a tile have steps of 16 bytes in a row of dS
        step = 16 // dtype.itemsize
    is_clamped = has_tile and launch["TILE"].coverage == "clamp"
    wide_index = not has_tile or launch["SHAPE"].wide_index
    for name, tensor, strides in launch.strided():
        pointer, types = launch.signature[name]
        added = len(strides) - tensor.dim()  # dimensions that tables lack: batch entries, or also heads
        shape = (1,) * added + tensor.shape
        assert strides == (0,) * added + tensor.stride() and len(types) == len(strides), name
        assert added == 0 or name in TABLES, name
        for stride, kind in zip(strides, types, strict=True):
            assert kind == ("constexpr" if stride == 1 else "i32" if stride < 2**31 else "i64"), (name, strides, types)
        if name in BUFFERS | PARTIAL_SUMS:
            assert tensor.is_contiguous(), name
            is_gradient = name in PARTIAL_SUMS and tensor.shape[0] == 1 and not launch["ADDS"]
            assert tensor.dtype == torch.float32 or (is_gradient and tensor.dtype == dtype), name
        elif name == "outs" and launch.name == "forward" and launch["SPLITS_KEYS"]:
            assert tensor.dtype == torch.float32  # of parts of the keys
        elif name in ("d_queries", "d_rel_queries") and launch.name == "stored_dq" and is_sum(launch):
            assert tensor.dtype == torch.float32
        elif name not in ("rel_bias", "attn_mask", "mask"):
            assert tensor.dtype == dtype and (name not in WORKSPACE or tensor.is_contiguous()), name
        assert pointer == POINTERS[tensor.dtype], name
        if name == "rel_bias":  # read by rows, in 32 bits
            assert (shape[-1] - 1) * strides[-1] < 2**31
        elif len(shape) == 4 and name not in BUFFERS | {"attn_mask", "mask"}:
            is_whole = name in TABLES and is_clamped  # addressed from its first row on
            rows = shape[2] if is_whole else min(step * blocks if name in query_tensors else blocks, shape[2])
            offset = (rows - 1) * strides[2] + (shape[3] - 1) * strides[3]
            assert wide_index or offset < 2**31, (name, offset)
    for name, value in launch.arguments.items():
        if type(value) is int and launch.signature[name] != "constexpr":
            assert launch.signature[name] == "i32" and abs(value) < 2**31, name
    if "sequences" in launch.arguments:
        for argument in (launch["scaling"], launch["sequences"], launch["window"]):
            assert all(value is None or type(value) in (int, float, torch.Tensor) for value in argument), argument
        assert set(launch.signature["scaling"]) <= {"fp32", "constexpr"}
        assert all(tensor.is_contiguous() for tensor in launch["sequences"] if isinstance(tensor, torch.Tensor))
    constants = {int, str, bool, type(None), Shape, TileConstants, Layout}
    assert {type(value) for value in launch.constants} <= constants, launch.constants


def check_table_gradient(launch: Recorded) -> None:
    """Assert that terms of the sums lie in their tensors, and that the grid has a program for each element."""
    gradients, (size,) = launch["gradients"]
    heads = gradients.numel() // size
    programs = -(-size // launch["BLOCK"]) + 2 * (launch["ends"] is not None) * -(-launch["WIDTH"] // launch["COLUMNS"])
    assert size == launch["num_rows"] * launch["WIDTH"] and launch.grid[0] == heads * programs
    padded = size + 2 * launch["margin"] * launch["WIDTH"]
    for name, count, length in (("parts", "num_parts", padded), ("ends", "num_ends", 2 * launch["WIDTH"])):
        if launch[name] is not None:
            tensor, (step, of_head) = launch[name]
            assert tensor.is_contiguous() and tensor.dtype == torch.float32 and min(step, of_head or step) == length
            assert (launch[count] - 1) * step + (heads - 1) * of_head + length == tensor.numel()


def check(target: str, call: Call) -> list[Recorded]:
    """Check and return the launches of a call."""
    launches = call.launches(target)
    check_workspace(call, launches)
    for launch in launches:
        check_grid(target, launch)
        check_arguments(call, launch)
        if launch.name not in ("merge", "table_gradient"):
            has_table = any(name in call.tensors for name in TABLES)
            assert launch.tile.why_invalid(target, has_table, launch.name) is None, (target, launch.tile)
    return launches


@pytest.mark.parametrize("seed", range(CALLS))
def test_drawn_calls(seed: int) -> None:
    """Grids, configurations, arguments, and the size of the workspace are valid on all targets."""
    call = drawn(seed)
    for target in TARGETS:
        assert bool(check(target, call)) == (call.tensors["query"].numel() > 0)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("sequences", "heads", "packed"), [(1, 70_000, False), (70_000, 1, False), (70, 1000, False), (70_000, 1, True)]
)
def test_70_000_heads(sequences: int, heads: int, packed: bool, target: str) -> None:
    """More heads than the second axis of a grid can have."""
    shape = (sequences * 8, heads, 16) if packed else (sequences, heads, 8, 16)
    query, key, value, d_out = (unwritten(torch.empty(shape, dtype=torch.float16, device="meta")) for _ in range(4))
    rel_key, rel_value = (torch.empty(5, 16, dtype=torch.float16) for _ in range(2))
    arguments: dict[str, Any] = {"is_causal": False, "query_offset": 0}
    if packed:
        starts = torch.arange(0, sequences * 8 + 1, 8)
        arguments |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 8, "max_seqlen_k": 8}
    d_lse = torch.zeros((heads, sequences * 8) if packed else shape[:3])
    call = Call({"query": query, "key": key, "value": value, "rel_key": rel_key, "rel_value": rel_value}, arguments, d_out, d_lse)
    launches = check(target, call)
    assert [launch.grid[0] for launch in launches if launch.name in ("forward", "dkv")] == [70_000] * 2


@pytest.mark.parametrize("target", TARGETS)
def test_queries_of_a_tile_that_are_far_apart(target: str) -> None:
    """Tiles of the dtable kernel span more rows than others: all 500 queries, with offsets beyond 31 bits."""
    shape = (1, 1, 500, 64)
    tensors = {name: torch.empty(shape, dtype=torch.bfloat16) for name in ("query", "key", "value")}
    step = 2**31 // 499 // 16 * 16 + 16  # loads of 16 bytes; other operands are copied
    tensors["query"] = torch.empty(500 * step, dtype=torch.bfloat16).as_strided(shape, (500 * step, 500 * step, step, 1))
    tensors["rel_key"] = torch.empty(999, 64, dtype=torch.bfloat16)
    call = Call(
        tensors, {"is_causal": False, "query_offset": 0}, torch.empty(shape, dtype=torch.bfloat16), torch.empty(shape[:3])
    )
    launches = check(target, call)
    assert all(launch["SHAPE"].wide_index for launch in launches if launch.name == "dtable")
