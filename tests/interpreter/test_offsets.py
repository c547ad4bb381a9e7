"""Offsets of 2**31 elements and more, in each dimension of all tensors that a kernel addresses.

Launches get copies with strides that large, and their results are copied back. The copies are mapped memory that is hardly used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.groups import flat, grouped
from tests.interpreter.launch import all_gradients, has_wide_index, run
from tests.tolerance import assert_bit_equal
from triton_relattn import RelativePositions, fused_relative_attention_varlen
from triton_relattn._core import validation
from triton_relattn._core.arguments import Arguments
from triton_relattn._core.spec import DIFFERENTIABLE
from triton_relattn.kernels.backward import backward
from triton_relattn.kernels.config import architectures
from triton_relattn.kernels.config.tile_config import KERNELS, TileConfig
from triton_relattn.kernels.forward import forward
from triton_relattn.testing import make_inputs


def far_apart(tensor: torch.Tensor, dim: int, stride: int) -> torch.Tensor:
    """Copy a tensor to mapped memory, with this stride in one dimension.

    The memory begins 2**31 elements earlier, so that an overflowed offset reads zeros instead of unmapped memory.
    """
    strides = [*tensor.contiguous().stride()]
    strides[dim] = stride
    length = 2**31 + stride * (tensor.shape[dim] - 1) + tensor.numel()
    storage = torch.from_numpy(np.memmap("/dev/zero", dtype=np.float32, mode="c", shape=(length,)))
    return storage.as_strided(tensor.shape, strides, 2**31).copy_(tensor)


TABLES = {"rel_key", "rel_value", "rel_bias", "rel_p2c"}
VECTORS = {"lses", "d_lses", "deltas", "d_biases"}
"""One value for each row; rows are always adjacent."""
PAIRS = {"softmax_stats", "far_scores", "far_values", "far_keys"}
"""Two values for each row."""
BLOCKS = {"end_rows", "end_rel_key", "end_rel_bias", "end_rel_value"}
"""Two rows for each block of rows of a head and sequence."""
SUMS = {"parts", "ends", "gradients"}
"""Of the table_gradient kernel: contiguous."""
WORKSPACE = {"ds", "stored_probs", "stored"}
"""dS and P: contiguous, and within a sequence and head addressed in 32 bits."""
PER_ROW = {
    "query",
    "key",
    "value",
    "rel_query",
    "attn_mask",
    "outs",
    "d_outs",
    "d_queries",
    "d_keys",
    "d_values",
    "d_rel_queries",
    "residuals",
    "vectors",
}
"""One row for each query or key."""


class Spread(NamedTuple):
    """A dimension of all tensors that gets so large a stride that offsets of the last elements are at least 2**31."""

    dim: int
    unchanged: set[str]
    """Tensors without this dimension, or without a stride in it."""
    last: int = 1
    """The number of elements with offsets of at least 2**31."""
    wide: bool = False
    """Whether offsets within a tile are that large; launchers must say so."""


ENTRIES = Spread(0, TABLES | WORKSPACE | SUMS)
HEADS = Spread(1, SUMS)
ROWS = Spread(2, VECTORS | WORKSPACE | BLOCKS | SUMS | {"rel_bias"}, wide=True)
SEQUENCES = Spread(2, VECTORS | PAIRS | WORKSPACE | BLOCKS | SUMS | {"rel_bias"}, last=4, wide=True)
TILES = Spread(2, VECTORS | PAIRS | WORKSPACE | BLOCKS | SUMS | {"rel_bias"}, last=32)
TABLE = Spread(2, PER_ROW | VECTORS | PAIRS | WORKSPACE | BLOCKS | SUMS | {"rel_bias"}, last=60)
COLUMNS = Spread(3, VECTORS | PAIRS | WORKSPACE | BLOCKS | SUMS | {"rel_bias"}, wide=True)


@contextmanager
def launched(spread: Spread) -> Iterator[set[str]]:
    """Pass copies with large strides to all kernels. Yields the names of the tensors that were copied."""
    copied: set[str] = set()
    run = interpreter.InterpretedFunction.run

    def run_apart(function: Any, *arguments: Any, **options: Any) -> None:
        options |= dict(zip(function.arg_names, arguments, strict=False))
        changed, copies = {}, []
        for name, argument in flat(options).items():
            if not (isinstance(argument, tuple) and isinstance(argument[0], torch.Tensor)):
                continue  # not addressed by strides
            tensor = argument[0][None] if name in TABLES else argument[0]  # a table of each head
            if name in spread.unchanged or tensor.shape[spread.dim] <= spread.last:
                continue
            copied.add(name)
            copy = far_apart(tensor, spread.dim, -(-(2**31) // (tensor.shape[spread.dim] - spread.last)))
            copies.append((tensor, copy))
            changed[name] = copy, copy.stride()
        options = grouped(options, changed)
        if "SHAPE" in options:
            options["SHAPE"] = options["SHAPE"]._replace(wide_index=spread.wide)
        run(function, **options)
        for tensor, copy in copies:
            tensor.copy_(copy)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "run", run_apart)
        yield copied


def results(
    batch: int,
    heads: int,
    num_queries: int,
    num_keys: int,
    first: int,
    last: int,
    offset: int,
    *,
    packed: bool,
    block: int,
    p2c: bool,
) -> list[torch.Tensor]:
    """out, lse and all gradients of a call with all tensors of a padded or packed batch; p2c: with rel_p2c."""
    inputs = make_inputs(
        batch,
        heads,
        num_queries,
        num_keys,
        16,
        num_rows=last - first + 1,
        per_head=True,
        rel_width=16,
        rel_value=True,
        rel_bias=True,
        rel_p2c=p2c,
        dtype=torch.float32,
        seed=heads,
    )
    tensors: dict[str, Any] = {name: getattr(inputs, name) for name in ("query", "key", "value", "rel_query")}
    if packed:
        tensors = {name: tensor[0].transpose(0, 1) for name, tensor in tensors.items()}
        tensors |= {"is_packed": True, "max_seqlen_q": num_queries - 4, "max_seqlen_k": num_keys - 4}
        tensors["cu_seqlens_q"] = torch.tensor([0, num_queries - 4, num_queries])
        tensors["cu_seqlens_k"] = torch.tensor([0, num_keys - 4, num_keys])
    else:
        tensors["attn_mask"] = torch.randn(batch, heads, num_queries, num_keys, generator=torch.Generator().manual_seed(0))
    tables = {name: getattr(inputs, name) for name in TABLES}
    call = validation.resolve(Arguments(**tensors, **tables, positions=RelativePositions(first, last), query_offset=offset))
    tiles = dict.fromkeys(KERNELS, TileConfig(block, block, 4, 1))
    reader_tile = TileConfig(max(block // 4, 16), block, 4, 1)  # with steps of 4 between queries
    tiles |= {"stored_dq": reader_tile, "dtable": reader_tile}
    out, lse, softmax_stats, _ = forward(*call, tiles["forward"])
    gradients = backward(inputs.d_out, inputs.d_lse, out, softmax_stats, *call, tiles=tiles)
    return [out, lse, *(gradient for gradient in gradients if gradient is not None)]


SMALL = (10, 70, -4, 4, 30)
"""Queries, keys, first and last row, offset: with tiles of 16 there are keys beyond the table on either side."""


@pytest.mark.thorough
@pytest.mark.parametrize("p2c", [False, True], ids=["", "p2c"])
@pytest.mark.parametrize(
    ("spread", "sizes", "packed"),
    [
        pytest.param(ENTRIES, (3, 1, *SMALL), False, id="entry"),
        pytest.param(HEADS, (1, 3, *SMALL), False, id="head"),
        pytest.param(ROWS, (1, 2, *SMALL), False, id="row"),
        pytest.param(SEQUENCES, (1, 2, 14, 74, *SMALL[2:]), True, id="sequence"),
        pytest.param(TILES, (1, 1, 400, 400, -399, 399, 0), False, id="tile"),
        pytest.param(TABLE, (1, 1, 16, 16, 0, 1000, -960), False, id="table"),
        pytest.param(COLUMNS, (1, 2, *SMALL), False, id="column"),
    ],
)
def test_results_are_the_same(
    spread: Spread, sizes: tuple[int, int, int, int, int, int, int], packed: bool, p2c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results have the same bits with any strides."""
    monkeypatch.setattr(architectures, "multiprocessors", lambda _: 100)  # partial sums of table gradients by batch entry
    block = 128 if spread is TILES else 16
    expected = results(*sizes, packed=packed, block=block, p2c=p2c)
    with launched(spread) as copied:
        found = results(*sizes, packed=packed, block=block, p2c=p2c)
    for result, exact in zip(found, expected, strict=True):
        assert exact.isfinite().all() and torch.equal(result, exact)
    assert copied >= ({*TABLES, *PER_ROW} - {"rel_p2c", "attn_mask", "residuals", "vectors"}) - spread.unchanged


@contextmanager
def only_the_last_programs() -> Iterator[None]:
    """Run only the last program of each grid; for the stored_dq kernel the last four, which share a block of queries."""
    run = interpreter.InterpretedFunction.run

    def run_last(function: Any, *arguments: Any, grid: tuple[int, ...], **options: Any) -> None:
        def number(index: int) -> Any:
            return interpreter.TensorHandle(np.array([index], dtype=np.int32), tl.int32)

        for last in range(1, 5 if function.__name__ == "stored_dq_kernel" else 2):
            place = [grid[0] - last, *(size - 1 for size in grid[1:]), 0, 0]
            with pytest.MonkeyPatch.context() as patch:
                builder = interpreter.InterpreterBuilder
                patch.setattr(builder, "create_get_program_id", lambda _, axis, place=place: number(place[axis]))
                patch.setattr(builder, "create_get_num_programs", lambda _, axis: number(grid[axis] if axis < len(grid) else 1))
                run(function, *arguments, grid=(1,), **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "run", run_last)
        yield


@pytest.mark.parametrize("sizes", [(1, 70_000), (70_000, 1), (70, 1000)])
def test_the_last_of_70_000_heads(sizes: tuple[int, int]) -> None:
    """The last programs of each grid compute the last head as in a call with a single head."""
    single = make_inputs(1, 1, 3, 4, 16, num_rows=6, dtype=torch.float32, seed=1)
    tiles = dict.fromkeys(KERNELS, TileConfig(16, 16, 4, 1))
    is_alone = sizes[0] == 1  # a table shared by batch entries has a summed gradient
    wants = [name in ("query", "key", "value", "rel_key")[: 4 if is_alone else 3] for name in DIFFERENTIABLE]

    def last(*sizes: int) -> list[torch.Tensor]:
        query, key, value, d_out, d_lse = (
            tensor.expand(*sizes, *tensor.shape[2:])
            for tensor in (single.query, single.key, single.value, single.d_out, single.d_lse)
        )
        assert single.rel_key is not None
        rel_key = single.rel_key.expand(sizes[1], *single.rel_key.shape)
        call = validation.resolve(Arguments(query, key, value, rel_key, positions=RelativePositions(-2, 3)))
        out, lse, softmax_stats, _ = forward(*call, tiles["forward"])
        gradients = backward(d_out, d_lse, out, softmax_stats, *call, wants, tiles)
        *others, d_rel_key = (gradient for gradient in (*gradients[:3], gradients[4]))
        results = [tensor[-1, -1] for tensor in (out, lse, *others) if tensor is not None]
        return results if d_rel_key is None else [*results, d_rel_key[-1]]

    expected = last(1, 1)
    with only_the_last_programs():
        found = last(*sizes)
    assert len(found) == 5 + is_alone
    for result, exact in zip(found, expected, strict=True):
        assert exact.isfinite().all() and torch.equal(result, exact)


# A dimension, its size, and the stride that makes the offset of its last tile 2**31 and more.
OFFSETS = {"entry": (0, 3, 2**30), "head": (1, 3, 2**30), "tile": (2, 530, 2**22)}


@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize("where", OFFSETS)
def test_offsets_of_a_head_and_of_a_tile(where: str, name: str) -> None:
    """Each summand of an address is computed in 64 bits, also where offsets within a tile fit in 32."""
    dim, size, stride = OFFSETS[where]
    batch, heads, num_keys = (size if dim == axis else small for axis, small in enumerate((1, 1, 20)))
    inputs = make_inputs(batch, heads, 5, num_keys, 8, num_rows=None, dtype=torch.float32, seed=6)
    wide = far_apart(getattr(inputs, name), dim, stride)
    assert not has_wide_index(wide)
    config = TileConfig(16, 256, 4, 1)
    for result, expected in zip(run(inputs._replace(**{name: wide}), config), run(inputs, config), strict=True):
        assert torch.equal(result, expected)


def test_offsets_of_a_bias() -> None:
    """Rows of a bias so far apart that their offsets do not fit in 32 bits."""
    inputs = make_inputs(1, 2, 20, 20, 8, num_rows=19, per_head=True, rel_key=False, rel_bias=True, dtype=torch.float32, seed=6)
    assert inputs.rel_bias is not None
    wide = inputs._replace(rel_bias=far_apart(inputs.rel_bias[None, :, :, None], 2, 2**27)[0, :, :, 0])
    config = TileConfig(32, 16, 4, 1)
    for result, expected in zip(run(wide, config), run(inputs, config), strict=True):
        assert torch.equal(result, expected)


def test_offsets_of_a_packed_sequence() -> None:
    """The second sequence begins 2**31 elements behind the first."""
    inputs = make_inputs(1, 1, 20, 20, 8, num_rows=7, dtype=torch.float32, seed=6)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in inputs[:3])
    starts = torch.tensor([0, 16, 20], dtype=torch.int32)
    packing: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 16, "max_seqlen_k": 16}

    def attend(key: torch.Tensor) -> Any:
        return fused_relative_attention_varlen(query, key, value, inputs.rel_key, **packing, implementation="triton")

    assert torch.equal(attend(far_apart(key, 0, 2**27)), attend(key))


@pytest.mark.parametrize("name", ["rel_key", "rel_value"])
def test_offsets_of_a_table(name: str) -> None:
    """A table whose stride is so large that offsets within a tile need 64 bits."""
    terms: dict[str, Any] = {"rel_key": name == "rel_key", "rel_value": name == "rel_value"}
    inputs = make_inputs(1, 1, 20, 20, 8, num_rows=19, **terms, dtype=torch.float32, seed=6)
    wide = far_apart(getattr(inputs, name), 0, 2**27)
    assert has_wide_index(wide)
    for result, expected in zip(
        run(inputs._replace(**{name: wide}), TileConfig(32, 16, 4, 1)), run(inputs, TileConfig(32, 16, 4, 1)), strict=True
    ):
        assert torch.equal(result, expected)


@pytest.mark.usefixtures("guarded_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_wide_offsets_of_spread_queries(dtype: torch.dtype) -> None:
    """Kernels whose tiles have queries with steps, to read 16 bytes of the workspace at once, have more rows per tile."""
    inputs = make_inputs(1, 1, 300, 20, 8, num_rows=319, dtype=dtype, seed=6)
    stride = 2**23 - 1024  # below 2**31 times the rows of other tiles, at most 256
    storage: Any = np.memmap("/dev/zero", dtype=inputs.query.numpy().dtype, mode="c", shape=(299 * stride + 108,))
    query, d_out = (
        torch.from_numpy(storage)[start:].as_strided(inputs.query.shape, (0, 0, stride, 1)).copy_(tensor)
        for start, tensor in ((0, inputs.query), (100, inputs.d_out))
    )
    positions = RelativePositions(-299, 19)
    tiles = {"dkv": TileConfig(32, 32, 4, 1), "dtable": TileConfig(128, 32, 4, 1), "stored_dq": TileConfig(64, 32, 4, 1)}
    expected = all_gradients(inputs, tiles, positions=positions)
    assert_bit_equal(all_gradients(inputs._replace(query=query, d_out=d_out), tiles, positions=positions), expected)
