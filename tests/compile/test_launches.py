"""Launches by the public functions on GPUs that are not there, for calls drawn from a seed: all are checked, some compiled.

The real host code runs, from validation to the specialisation of the kernels' arguments. The expected arguments are computed
here, independently of it.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import pytest
import torch
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from bench.compiled import Launch, recorded_launches, resources
from tests import cases
from tests.groups import flat, flat_types
from triton_relattn import RelativePositions, fused_relative_attention, fused_relative_attention_varlen
from triton_relattn._core import implementations
from triton_relattn._core.spec import DIFFERENTIABLE
from triton_relattn.kernels.architectures import architecture_of
from triton_relattn.kernels.arguments import Shape, TableRows, Tile
from triton_relattn.kernels.configs import TileConfig
from triton_relattn.kernels.tile_config import OF_TABLES
from triton_relattn.testing import Inputs, make_inputs

TARGETS = ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942")
CALLS = 320
KERNELS = ("forward", "merge", "dq", "dkv", "dtable", "dtable_words", "dtable_ends", "delta", "dq_words")
OF_WORDS = ("dtable_words", "delta", "dq_words")
WITHOUT_TILE = ("merge", "dtable_ends", "delta")
TABLES = ("rel_key", "rel_value", "rel_bias")
POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.bool: "*u1", torch.int8: "*i8"}
BUFFERS = {
    "lses",
    "softmax_stats",
    "d_lses",
    "deltas",
    "far_scores",
    "far_values",
    "far_sums",
    "far_kept",
    "sums",
    "parts",
    "part_statistics",
}
PARTIAL_SUMS = {"d_rel_key", "d_rel_value", "d_rel_bias", "d_tables"}


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

    def __post_init__(self) -> None:
        self.wanted &= set(self.tensors)
        for name in self.wanted:
            self.tensors[name].requires_grad_()

    def run(self) -> None:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.precision)
        try:
            out, lse = self.function(**self.tensors, **self.arguments, return_lse=True)
            if self.wanted:
                torch.autograd.grad((out, lse), [self.tensors[name] for name in sorted(self.wanted)], (self.d_out, self.d_lse))
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

    def may_use_workspace(self, target: str) -> bool:
        """Whether the gradients of the tables are products of words, if there is room for these."""
        has_offsets = isinstance(self.arguments["query_offset"], torch.Tensor)
        of_scores = self.tables.keys() & {"rel_key", "rel_bias"} and "rel_value" not in self.tables
        return bool(of_scores) and not self.packed and not has_offsets and target.startswith("sm_")

    def may_use_words_for_query(self, target: str) -> bool:
        """Whether the query's gradient is a product of words, if a workspace has all keys of a head."""
        is_long = self.sizes()[3] >= 1024 and self.tensors["query"].dtype != torch.float32
        return self.may_use_workspace(target) and is_long and self.coverage() == "full"

    def key_splits(self, target: str, programs: int, block_m: int) -> int:
        """Return how many programs have to share the keys of a block of queries: they fill the GPU, with 1,024 keys each."""
        if self.sizes()[3] > block_m:  # more than a block of queries for each head
            return 1
        keys, (left, right) = self.sizes()[4], self.arguments.get("window_size") or (-1, -1)
        right = 0 if self.arguments["is_causal"] else right
        if left >= 0 and right >= 0:
            keys = min(keys, left + right + block_m)
        return max(1, min(architecture_of(target).multiprocessors // programs, keys // 1024))

    def kernels(self, parts: int, from_words: bool) -> list[str]:
        """The kernels that have to run, in their order.

        Args:
            parts: in which a workspace is filled, or 0.
            from_words: whether it has the query's gradient, too.
        """
        if self.tensors["query"].numel() == 0:
            return []
        if not self.wanted or self.tensors["key"].numel() == 0:
            return ["forward"]
        clamped = self.coverage() == "clamp"
        # Besides d_query, the dq kernel makes delta, and of keys beyond a clamped table their scores, and what is kept of P.
        needs_delta = self.wanted - {"value", "rel_value"}
        needs_far_scores = clamped and "value" in self.wanted and self.tables.keys() & {"rel_key", "rel_bias"}
        rows = 1 if needs_delta or needs_far_scores or (clamped and "rel_value" in self.wanted) else 0
        if self.arguments.get("exact_query_grad") and self.wanted & {"query", "rel_query"}:
            rows = 1 if from_words else 2
        of_query = from_words and bool(self.wanted & {"query", "rel_query"})
        ends = [name for name in ("rel_key", "rel_value") if clamped and name in self.wanted]
        return [
            "forward",
            *(["delta"] if from_words else ["dq"]) * rows,
            *["dkv"] * (parts == 0 and bool(self.wanted & {"key", "value"})),
            *["dtable"] * (parts == 0 and bool(self.wanted & set(TABLES))),
            *["dkv", *["dtable_words"] * bool(self.wanted & set(TABLES)), *["dq_words"] * of_query] * parts,
            *["dtable_ends"] * len(ends),
        ]


@dataclass
class Recorded:
    """A launch as Triton would specialise it."""

    name: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    signature: dict[str, Any]
    constants: list[Any]
    num_warps: int
    num_stages: int

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def tile(self) -> TileConfig:
        tile = self["TILE"]
        assert tile.warps == self.num_warps and (tile.carry is None or self.name in ("forward", "dq"))
        carry = tile.carry if self.name in ("forward", "dq") else "scores"
        return TileConfig(tile.block_m, tile.block_n, tile.warps, self.num_stages, carry, tile.rotation)

    def strided(self) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
        """The tensors that are addressed by strides."""
        for name, argument in self.arguments.items():
            if type(argument) is tuple and argument and isinstance(argument[0], torch.Tensor):
                yield name, *argument


@contextmanager
def recorded(
    target: str, is_compiled: Callable[[Recorded], bool] = lambda _: False
) -> Iterator[tuple[list[Recorded], list[Launch]]]:
    """Within, the public functions use the kernels on the target: all launches, and those of them that are compiled."""
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
        )
        launches.append(launch)
        if is_compiled(launch):
            compile_and_record(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    with recorded_launches(target) as compiled, pytest.MonkeyPatch.context() as patch:
        compile_and_record = JITFunction.run
        patch.setattr(JITFunction, "run", record)
        patch.setattr(implementations, "choose_implementation", lambda *_: "triton")
        yield launches, compiled


def on_meta(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which creates its tensors without memory."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with torch.device("meta"):
            return function(*args, **kwargs)

    return wrapper


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
    sizes: dict[str, Any] = {
        "dtype": choose.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float16, torch.float32)),
        "widths": (8, 16, 40, 64, 64, 80, 128, 128, 256),
        "value_widths": (8, 16, 64, 64, 80, 128, 256),
        "rel_widths": (1, 4, 16, 64, 128, 256),
        "lengths": (1, 17, 64, 127, 128, 129, 500, 1024, 3001),
    }
    if not packed:
        sizes["uneven_lengths"] = ((1, 4096), (4096, 1), (77, 2048))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "make_inputs", on_meta(functools.partial(make_inputs, device="meta")))
        patch.setattr(cases, "random_mask", on_meta(cases.random_mask))
        inputs, arguments = (cases.random_varlen_case if packed else cases.random_case)(seed, **sizes)
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
    return Call(
        {name: tensor for name, tensor in tensors.items() if name in DIFFERENTIABLE},
        arguments,
        tensors["d_out"],
        tensors["d_lse"],
        frozenset(DIFFERENTIABLE) if choose.random() < 0.3 else some,
        choose.choice(("highest", "high")),
    )


def check_grid(target: str, launch: Recorded) -> None:
    """Legal: CUDA counts programs, 65,535 in all dimensions but the first; HIP counts threads, in 32 bits."""
    assert all(type(size) is int and size >= 1 for size in launch.grid), launch.grid
    x, y, z = (*launch.grid, 1, 1)[:3]
    if target.startswith("sm_"):
        assert x < 2**31 and max(y, z) <= 65_535, launch.grid
    else:
        assert x * launch.num_warps * 64 < 2**32 and max(y, z) <= 65_535, launch.grid


def check_programs(target: str, call: Call, launch: Recorded, launches: list[Recorded]) -> None:
    """As many as the blocks of queries, keys or table rows; where several share a block, no more than the GPU takes."""
    sequences, heads, key_heads, num_queries, num_keys = call.sizes()

    def blocks(length: int, block: str) -> int:
        return -(-length // getattr(launch["TILE"], block))

    if launch.name in ("forward", "dq"):
        programs = blocks(num_queries, "block_m") * sequences * heads
        splits = call.key_splits(target, programs, launch["TILE"].block_m) if launch.name == "forward" else 1
        assert launch.grid == ((programs,) if splits == 1 else (programs, splits)), launch.grid
    elif launch.name == "delta":
        entries, _, queries, _ = launch["outs"][0].shape
        assert launch.grid == (entries * -(-queries // launch["BLOCK_M"]), heads), launch.grid
    elif launch.name == "dq_words":  # blocks of queries that are eight apart
        items = launch["words"][0].shape[1]
        assert launch.grid[0] % (8 * -(-num_queries // (8 * launch["TILE"].block_m))) == 0, launch.grid
        assert launch.grid[0] <= items * 8 * -(-num_queries // (8 * launch["TILE"].block_m)), launch.grid
    elif launch.name == "merge":
        entries, _, queries, _ = launch["outs"][0].shape
        assert launch.grid == (entries * -(-queries // launch["BLOCK_M"]), heads), launch.grid
    elif launch.name == "dkv":
        parts = [each for each in launches if each.name == "dkv"]
        assert sum(each.grid[0] for each in parts) == blocks(num_keys, "block_n") * sequences * key_heads, launch.grid
        if launch["words"] is not None:  # one part after the other
            assert launch["first_program"] == sum(each.grid[0] for each in parts[: parts.index(launch)])
    else:
        table = next(each for each in launches if each.name in OF_TABLES)
        table_heads = heads if call.per_head else 1
        splits, units = table.grid[1], sequences * heads // table_heads
        partial, *_ = (tensor for name, tensor, _ in launch.strided() if name in PARTIAL_SUMS)
        margin = 0
        if table["TILE"].coverage == "clamp":  # as many near keys as the dq kernel can have beyond the table
            rows = next(each for each in launches if each.name == "dq")
            tile = rows["TILE"]
            margin = tile.block_m + tile.block_n
            assert table["ROWS"][1:3] == (tile.block_m, tile.block_n)
        if launch.name == "dtable_words":  # blocks of queries that are so far apart, of the heads in the workspace
            apart = 16 // launch["words"][0].element_size()
            units = -(-num_queries // (apart * launch["TILE"].block_m)) * -(-launch["words"][0].shape[1] // table_heads)
        elif table.name != "dtable":
            units = splits
        assert partial.shape[:2] == (splits, table_heads) and 1 <= splits <= units
        assert partial.shape[2] == call.num_rows + 2 * (margin + 1 if margin else 0)
        per_head = launch["PER_HEAD"] if launch.name == "dtable_ends" else launch["ROWS"].per_head
        assert per_head == call.per_head
        if launch.name in OF_TABLES:
            tile, own_rows = launch["TILE"], launch["TILE"].block_n
            if launch.name == "dtable_words":
                own_rows -= 8 if call.tensors["query"].dtype != torch.float32 else 4
            programs = -(-(call.num_rows + 2 * margin) // own_rows) * table_heads
            assert launch.grid == (programs, splits)
            if launch.name == "dtable":
                assert launch["num_sequences"] == sequences
            else:  # of the heads in the workspace
                programs = programs // table_heads * min(table_heads, launch["words"][0].shape[1])
            assert splits == 1 or programs * splits <= 4 * architecture_of(target).multiprocessors
        else:
            assert launch.grid == (table_heads, splits)


def check_arguments(call: Call, launch: Recorded) -> None:
    """Dtypes, strides and constants as the kernel takes them; offsets in 64 bits where 32 do not do."""
    dtype = call.tensors["query"].dtype
    has_tile = launch.name not in WITHOUT_TILE
    blocks = max(launch["TILE"].block_m, launch["TILE"].block_n) if has_tile else launch["BLOCK_M"]
    coverage = launch["TILE"].coverage if has_tile else "clamp"
    wide_index = launch.name in ("merge", "delta") or (launch["SHAPE"].wide_index if has_tile else launch["WIDE_INDEX"])
    for name, tensor, strides in launch.strided():
        pointer, types = launch.signature[name]
        added = len(strides) - tensor.dim()  # of a table: it has no entries, and a shared one no heads
        shape = (1,) * added + tensor.shape
        assert strides == (0,) * added + tensor.stride() and len(types) == len(strides), name
        assert added == 0 or name in ("rel_key", "rel_value", "rel_bias"), name
        for stride, kind in zip(strides, types, strict=True):
            assert kind == ("constexpr" if stride == 1 else "i32" if stride < 2**31 else "i64"), (name, strides, types)
        if name in BUFFERS | PARTIAL_SUMS:
            above_a_tail = name == "softmax_stats" and tensor.stride()[2:] == (tensor.shape[3], 1)
            assert tensor.is_contiguous() or above_a_tail, name
            is_gradient = name in PARTIAL_SUMS and launch.grid[1] == 1 and coverage != "clamp"
            assert tensor.dtype == torch.float32 or (is_gradient and tensor.dtype == dtype), name
        elif name == "tails":
            assert tensor.dtype == torch.int8
        elif name == "outs" and launch.name == "forward" and len(launch.grid) == 2:
            assert tensor.dtype == torch.float32  # of parts of the keys
        elif name not in ("rel_bias", "attn_mask", "mask"):
            assert tensor.dtype == dtype, name
        assert pointer == POINTERS[tensor.dtype], name
        if name == "rel_bias":  # read by rows, in 32 bits
            assert (shape[-1] - 1) * strides[-1] < 2**31
        elif len(shape) == 4 and name not in BUFFERS | {"attn_mask", "mask"}:
            clamped = name in ("rel_key", "rel_value") and coverage == "clamp"  # addressed from its first row on
            rows = shape[2] if clamped else min(blocks, shape[2])
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
    constants = {int, str, bool, type(None), Shape, Tile, TableRows}
    assert {type(value) for value in launch.constants} <= constants, launch.constants


def check(target: str, call: Call, launches: list[Recorded]) -> None:
    """Everything that holds for the launches of one call."""
    of_words = [launch["words"][0] for launch in launches if launch.name == "dkv" and launch["words"] is not None]
    parts, from_words = len(of_words), any(launch.name == "delta" for launch in launches)
    assert not from_words or call.may_use_words_for_query(target)
    if of_words and call.may_use_words_for_query(target):
        assert from_words == (of_words[0].shape[3] >= call.sizes()[4])
    names = [launch.name for launch in launches]
    if "merge" in names:
        assert names.pop(1) == "merge" and len(launches[0].grid) == 2
    assert names == call.kernels(parts, from_words), (target, sorted(call.wanted))
    assert parts == 0 or call.may_use_workspace(target)
    if parts == 0 and call.wanted & {"rel_key", "rel_bias"} and call.may_use_workspace(target) and launches[1:]:
        (_, heads, queries, _), key_heads = call.tensors["query"].shape, call.tensors["key"].shape[1]
        assert architecture_of(target).multiprocessors * 128 * heads // key_heads * queries * 4 > 2**28
    for launch in launches:
        check_grid(target, launch)
        check_programs(target, call, launch, launches)
        check_arguments(call, launch)
        if launch.name not in WITHOUT_TILE:
            assert launch["TILE"].coverage == call.coverage()
            assert launch.tile.why_invalid(target, bool(call.tables), launch.name) is None, (target, launch.tile)


@pytest.mark.parametrize("seed", range(CALLS))
def test_drawn_calls(seed: int) -> None:
    """On every target: the kernels that the wanted gradients need and no others, grids, configurations and arguments."""
    call = drawn(seed)
    for target in TARGETS:
        with recorded(target) as (launches, _):
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
    assert len(kinds) == 2 * 4 * 3 and wanted == set(range(8)) and empty > 5 and far_apart > 20
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
    with recorded(target) as (launches, _):
        call.run()
    check(target, call, launches)
    assert [launch.grid[0] for launch in launches if launch.name in ("forward", "dq", "dkv")] == [70_000] * 3


def check_compiled(target: str, kinds: set[Any], kind: Callable[[Recorded], Any]) -> None:
    """Compile the first launch of each kind that is drawn, and assert that it fits the target."""
    missing = set(kinds)

    def is_compiled(launch: Recorded) -> bool:
        is_missing = kind(launch) in missing
        missing.discard(kind(launch))
        return is_missing

    for seed in range(CALLS):
        call = drawn(seed)
        with recorded(target, is_compiled) as (_, compiled):
            call.run()
        for launch in compiled:
            used = resources(launch.kernel)
            assert used.fits(target), (seed, launch.name, used)
        if not missing:
            return
    raise AssertionError(f"never drawn: {missing}")


def kernels_for(target: str) -> set[str]:
    """Return the kernels that calls can launch: none on AMD's GPUs has a workspace."""
    return set(KERNELS) - (set(OF_WORDS) if target.startswith("gfx") else set())


@pytest.mark.thorough
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_and_fits(target: str) -> None:
    check_compiled(target, kernels_for(target), lambda launch: launch.name)


@pytest.mark.thorough
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("num_rows", [127, 9])
def test_kernels_of_rel_p2c_compile(target: str, packed: bool, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded calls have a workspace on NVIDIA's GPUs, packed ones have none. Clamped tables have kernels for what lies beyond."""
    monkeypatch.setattr(implementations, "choose_implementation", lambda *_: "triton")
    shape = (2 * 64, 2, 64) if packed else (2, 2, 64, 64)
    query, table = (torch.randn(*sizes, dtype=torch.bfloat16).requires_grad_() for sizes in (shape, (num_rows, 64)))
    starts = torch.tensor([0, 64, 128])
    packing = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 64, "max_seqlen_k": 64} if packed else {}
    attend: Any = fused_relative_attention_varlen if packed else fused_relative_attention
    with recorded_launches(target, assembled=False) as launches:
        attend(query, query, query, table, rel_p2c=table, **packing).sum().backward()
    has_words = not packed and architecture_of(target).is_nvidia
    of_tables = ["dtable_words", "dp2c_words"] if has_words else ["dtable", "dp2c"]
    if num_rows == 127:
        expected = ["forward", "dq", "dkv", *of_tables]
    else:
        expected = ["far_keys", "forward", "far_keys", "dq", "dkv", *of_tables, "dtable_ends", "dtable_ends"]
    assert [launch.name for launch in launches] == expected


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_table_and_dtype_compile_and_fit(target: str) -> None:
    """Each kernel compiles and fits for every kind of table and every dtype, each on one of the targets."""
    tables = {"dtable": ("full", "clamp", "zero"), "dtable_words": ("full", "clamp", "zero"), "dtable_ends": ("clamp",)}
    tables |= dict.fromkeys(("delta", "dq_words"), ("full",))
    wanted = set[Any]()
    for name in KERNELS:
        targets = [each for each in TARGETS if name in kernels_for(each)]
        kinds = product(
            (name,),
            (torch.float16, torch.bfloat16, *[torch.float32] * (name not in OF_WORDS[1:])),
            tables.get(name, ("no table", "full", "clamp", "zero")),
        )
        if target in targets:
            wanted |= set(islice(kinds, targets.index(target), None, len(targets)))

    def kind(launch: Recorded) -> Any:
        of_call = {"delta": "full"}.get(launch.name, "clamp")
        return launch.name, next(launch.strided())[1].dtype, launch["TILE"].coverage if "TILE" in launch.arguments else of_call

    check_compiled(target, wanted, kind)
