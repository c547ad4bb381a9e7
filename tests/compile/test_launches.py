"""Launches of public functions on GPUs that this machine lacks: arguments, grids, configurations, memory, and what is compiled.

The real host code runs, from validation to the specialisation of the kernels' arguments.
"""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from bench.compiled import recorded_launches
from tests.compile.calls import Call, call, call_of, compiled_launches, unwritten
from tests.draws import compiled
from tests.draws import drawn as drawn_sample
from tests.expected import INPUTS, TABLES
from tests.groups import flat
from tests.samples import Sample
from triton_relattn import kernels
from triton_relattn.kernels.backward import backward
from triton_relattn.kernels.call import Shape, TileConstants
from triton_relattn.kernels.config.tile_config import TileConfig
from triton_relattn.kernels.forward import forward
from triton_relattn.kernels.workspace import planning
from triton_relattn.kernels.workspace.stored import Layout
from triton_relattn.testing import Inputs

TARGETS = ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942")
CALLS = 320
BUFFERS = {"lses", "softmax_stats", "d_lses", "deltas", "far_keys", "far_scores", "far_values", "table_parts"}
BUFFERS |= {"parts", "part_statistics"}
BUFFERS |= {"end_rows", "end_rel_key", "end_rel_bias", "end_rel_value"}
WORKSPACE = {"ds", "stored_probs", "stored"}
PARTIAL_SUMS = {"d_rows", "d_biases", "d_rel_p2c"}


@dataclass(eq=False)
class Recorded:
    """A launch; arguments: members of groups under their own names; options: of Triton, warps among them."""

    name: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: list[Any]
    options: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def tile(self) -> TileConfig:
        tile, options = self["TILE"], self.options
        assert tile.warps == options["num_warps"] and (tile.carry is None or self.name in ("forward", "dq"))
        carry = tile.carry if self.name in ("forward", "dq") else "scores"
        stages, most_registers = options["num_stages"], options.get("maxnreg")
        return TileConfig(tile.block_m, tile.block_n, tile.warps, stages, carry, tile.rotation, most_registers)

    def strided(self) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
        """The tensors that are addressed by strides."""
        for name, argument in self.arguments.items():
            if type(argument) is tuple and argument and isinstance(argument[0], torch.Tensor):
                yield name, *argument


def launched(target: str, call: Call) -> list[Recorded]:
    """Run the call and its backward without compiling kernels, and return the launches."""
    launches: list[Recorded] = []

    def record(kernel: JITFunction, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=True))
        constants = [given[parameter.name] for parameter in kernel.params if parameter.is_constexpr]
        launches.append(Recorded(kernel.__name__.removesuffix("_kernel"), grid, flat(given), constants, options))

    with recorded_launches(target), pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", record)
        call.run()
    return launches


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


def drawn(seed: int) -> tuple[Call, str, int | None]:
    """A call of any shape, dtype, table, features and gradients, as large as those of models; float32's precision; and the limit
    of the workspace in bytes, or None."""
    choose = random.Random(seed)
    packed = choose.random() < 0.35
    dtype = choose.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float16, torch.float32))
    limits = compiled(dtype)._replace(widths=(8, 16, 40, 64, 80, 128, 256), longest=choose.choice((200, 1100, 4100)))
    sample = drawn_sample(seed, limits, is_packed=packed)
    inputs, arguments = sample.inputs(is_meta=True)
    if not packed and choose.random() < 0.1:
        inputs, arguments = without_elements(choose, inputs, arguments)

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        return unwritten(tensor, choose.randrange(tensor.dim()) if choose.random() < 0.15 else None)

    call = call_of(sample, spread, (inputs, arguments))
    some = frozenset(name for name in INPUTS if choose.random() < 0.4)
    call.wanted = call.wanted if choose.random() < 0.3 else some
    precision, fraction = choose.choice(("highest", "high")), choose.choice((None, None, 2, 5, 30))
    pairs = inputs.query[..., 0].numel() * (arguments["max_seqlen_k"] if packed else inputs.key.shape[2])
    return call, precision, None if fraction is None else 2 * pairs // fraction


def check_grid(target: str, launch: Recorded) -> None:
    """Assert legal sizes: CUDA allows 65,535 programs in all dimensions except the first, HIP 2**32 threads. Only the far_keys
    kernel may have none, without keys."""
    least = 0 if launch.name == "far_keys" else 1
    assert all(type(size) is int and size >= least for size in launch.grid), launch.grid
    x, y, z = (*launch.grid, 1, 1)[:3]
    if target.startswith("sm_"):
        assert x < 2**31 and max(y, z) <= 65_535, launch.grid
    else:
        assert x * launch.options.get("num_warps", 4) * 64 < 2**32 and max(y, z) <= 65_535, launch.grid


def check_workspace(call: Call, limit: int | None, launches: list[Recorded]) -> None:
    """Assert that the workspace obeys its limit, or is one block of keys of a head, and is addressed in 32 bits."""
    for launch in launches:
        stored = launch["ds"] or launch["stored_probs"] if launch.name == "dkv" else None
        if stored is None:
            continue
        _, items, rows, columns = stored[0].shape
        assert rows * columns <= 2**30
        size = items * rows * columns * stored[0].element_size() * (1 + ("rel_value" in call.tensors))
        smallest = launch["SHAPE"].group, launch["TILE"].block_n
        assert limit is None or size <= limit or (items, columns) == smallest


def is_sum(launch: Recorded) -> bool:
    """Whether more is added to what the stored_dq kernel writes."""
    return launch["ADDS"] or launch["TILE"].coverage != "full"


def check_arguments(dtype: torch.dtype, launch: Recorded) -> None:
    """Assert dtypes, strides and constants as the kernel expects them, and 64-bit offsets where 32 bits overflow."""
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
        added = len(strides) - tensor.dim()  # dimensions that tables lack: batch entries, or also heads
        shape = (1,) * added + tensor.shape
        assert strides == (0,) * added + tensor.stride(), name
        assert added == 0 or name in TABLES, name
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
        if name == "rel_bias":  # read by rows, in 32 bits
            assert (shape[-1] - 1) * strides[-1] < 2**31
        elif len(shape) == 4 and name not in BUFFERS | {"attn_mask", "mask"}:
            is_whole = name in TABLES and is_clamped  # addressed from its first row on
            rows = shape[2] if is_whole else min(step * blocks if name in query_tensors else blocks, shape[2])
            offset = (rows - 1) * strides[2] + (shape[3] - 1) * strides[3]
            assert wide_index or offset < 2**31, (name, offset)
    assert all(abs(value) < 2**31 for value in launch.arguments.values() if type(value) is int), launch.arguments
    if "sequences" in launch.arguments:
        for argument in (launch["scaling"], launch["sequences"], launch["window"]):
            assert all(value is None or type(value) in (int, float, torch.Tensor) for value in argument), argument
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


def check(target: str, call: Call, limit: int | None = None) -> list[Recorded]:
    """Check and return the launches of a call."""
    launches = launched(target, call)
    check_workspace(call, limit, launches)
    for launch in launches:
        check_grid(target, launch)
        check_arguments(call.tensors["query"].dtype, launch)
        if launch.name not in ("merge", "table_gradient"):
            has_table = any(name in call.tensors for name in TABLES)
            assert launch.tile.why_invalid(target, has_table, launch.name) is None, (target, launch.tile)
    return launches


@pytest.mark.parametrize("seed", range(CALLS))
def test_drawn_calls_launch_what_is_valid_on_every_gpu(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grids, configurations, arguments, and the size of the workspace."""
    call, precision, limit = drawn(seed)
    torch.set_float32_matmul_precision(precision)
    if limit is not None:
        monkeypatch.setenv(planning.VARIABLE, str(limit))
    for target in TARGETS:
        assert bool(check(target, call, limit)) == (call.tensors["query"].numel() > 0)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("sequences", "heads", "packed"), [(1, 70_000, False), (70_000, 1, False), (70, 1000, False), (70_000, 1, True)]
)
def test_70_000_heads(sequences: int, heads: int, packed: bool, target: str) -> None:
    """More heads than the second axis of a grid can have."""
    sizes: dict[str, Any] = {
        "batch": sequences,
        "num_queries": 8,
        "num_keys": 8,
        "sequences": ((8, 8),) * sequences if packed else None,
    }
    tables: dict[str, Any] = {"tables": ("rel_key", "rel_value"), "positions": (-2, 2, "clamp"), "dtype": "float16"}
    launches = check(target, call_of(Sample(**sizes, **tables, key_heads=heads)))
    assert [launch.grid[0] for launch in launches if launch.name in ("forward", "dkv")] == [70_000] * 2


@pytest.mark.parametrize("target", TARGETS)
def test_queries_of_a_tile_that_are_far_apart(target: str) -> None:
    """Tiles of the dtable kernel span more rows than others: all 500 queries, with offsets beyond 31 bits."""
    far, step = call_of(call(500, key_heads=1)), 2**31 // 499 // 16 * 16 + 16  # loads of 16 bytes; other operands are copied
    far.tensors["query"] = torch.empty(500 * step, dtype=torch.bfloat16).as_strided(
        (1, 1, 500, 64), (500 * step, 500 * step, step, 1)
    )
    launches = check(target, far)
    assert all(launch["SHAPE"].wide_index for launch in launches if launch.name == "dtable")


# Memory.


class Allocations(TorchDispatchMode):
    """Counts the bytes of all storages created in the context."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.results: list[torch.Tensor] = []  # so that no address is reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        existing = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in existing:
                self.sizes[leaf.untyped_storage().data_ptr()] = leaf.untyped_storage().nbytes()
                self.results.append(leaf)
        return result


def allocated(sample: Sample, keeps_residual: bool = False) -> tuple[int, int]:
    """Bytes that forward and backward allocate for all gradients."""
    call = call_of(sample)
    tensors, spec = call.resolved()
    with recorded_launches("sm_90", only=""):
        with Allocations() as in_forward:
            out, _, softmax_stats, residual = forward(tensors, spec, keeps_residual=keeps_residual)
        with Allocations() as in_backward:
            backward(*call.d_outs, out, softmax_stats, tensors, spec, residual=residual)
    return sum(in_forward.sizes.values()), sum(in_backward.sizes.values())


def narrow(length: int, table: str = "full", **changes: Any) -> Sample:
    """A call of one head of width 16 in float16; a short table has 9 rows."""
    changes = changes | ({"positions": (-4, 4, "clamp")} if table == "clamp" else {})
    return call(length, table, **{"dtype": "float16", "key_heads": 1, "width": 16, "value_width": 16, **changes})


@pytest.mark.parametrize(
    ("table", "window"), [("full", (-1, -1)), ("full", (20, 9)), ("clamp", (-1, -1))], ids=["all keys", "window", "short table"]
)
def test_memory_of_the_workspace(table: str, window: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace takes at most the limit, two bytes for each pair if all fit, and few with a window or a short table."""
    limit, length = 8 * 2**20, 8192
    monkeypatch.setenv(planning.VARIABLE, "0")
    least = sum(allocated(narrow(length, table, window_size=window)))
    monkeypatch.setenv(planning.VARIABLE, str(limit))
    sizes = {n: sum(allocated(narrow(n, table, window_size=window))) for n in (2048, length // 2, length, 2 * length)}
    assert sizes[length] - least <= limit
    if table == "clamp" or window != (-1, -1):
        assert sizes[2 * length] < 4.1 * sizes[length // 2]
    else:
        assert 2048 * 2048 * 2 < sizes[2048] < limit + 2**22


@pytest.mark.thorough
@pytest.mark.parametrize(("table", "shortest"), [("full", 32768), ("clamp", 2048)])
def test_memory_of_all_terms_is_linear(table: str, shortest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the length takes twice the bytes, except for a constant, once the number of programs no longer grows."""
    monkeypatch.setenv(planning.VARIABLE, "0")
    terms: dict[str, Any] = {"tables": ("rel_key", "rel_value", "rel_bias"), "rel_width": 16, "mask": "float32"}
    short, middle, long = (
        sum(allocated(narrow(length, table, **terms, mask_shape=(length,)))) for length in (shortest, 2 * shortest, 4 * shortest)
    )
    assert long - middle == 2 * (middle - short) > 0


def test_without_a_table_nothing_is_stored() -> None:
    """A backward without a table allocates the gradients, and one number per query."""
    rows = 2 * 2048
    assert allocated(call(2048, "none"))[1] == 3 * rows * 64 * 2 + rows * 4


def test_memory_of_the_residual() -> None:
    """The residual takes as much memory as out, and none in the backward."""
    (forward, backward), (with_residual, backward_with_it) = (
        allocated(call(2048, value_width=49), keeps) for keeps in (False, True)
    )
    assert with_residual - forward == 2 * 2048 * 49 * 2 and backward_with_it == backward


# What is compiled.


def test_a_limit_of_registers_reaches_the_compiler() -> None:
    """On Hopper the forward with a full table has one; a kernel without one has Triton's default."""
    limits = {launch.name: launch.options.get("maxnreg", "default") for launch in launched("sm_90", call_of(call(256)))}
    assert limits["forward"] == 168 and limits["delta"] == "default"


def groups() -> dict[str, type[Any]]:
    """All named tuples of the kernels' modules: arguments of launches, and tuples made in kernels."""
    modules = [importlib.import_module(module.name) for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")]
    classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    return {group.__name__: group for group in classes if issubclass(group, tuple) and hasattr(group, "_fields")}


def test_no_field_is_hidden_by_an_attribute_of_tritons_tuple() -> None:
    """Groups are Python's tuples up to Triton 3.7, and Triton's own tuples in later versions."""
    taken, found = set(dir(tl.tuple(()))) | {"values", "type"}, groups()
    assert {"TileConstants", "Operands", "Scaling", "Table", "Place", "Strip"} <= set(found)
    assert {name: hidden for name, group in found.items() if (hidden := taken & set(group._fields))} == {}


@pytest.mark.parametrize(
    ("known", "further"),
    [
        (((33, 48), (50, 80)), (83, 96)),
        (((48, 33), (64, 70)), (96, 90)),
        (((1, 40), (1, 57)), (1, 90)),
        (((32, 48), (64, 160)), (96, 112)),
    ],
    ids=str,
)
def test_a_length_of_a_known_kind_compiles_nothing(known: tuple[tuple[int, int], ...], further: tuple[int, int]) -> None:
    """Triton specialises kernels for lengths of 1 and multiples of 16; there are no other specialisations."""
    before, after = (
        {launch.kernel.hash for launch in compiled_launches("sm_90", *(call(n, num_keys=k) for n, k in lengths), assembled=False)}
        for lengths in (known, [further])
    )
    assert after <= before
