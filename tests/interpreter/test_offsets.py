"""Offsets of 2**31 elements and more, in each dimension of all tensors that a kernel addresses.

Launches get copies with strides that large, and their results are copied back. The copies are mapped memory that is hardly used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.check import Way, compute, public_function
from tests.expected import TABLES
from tests.groups import flat, grouped
from tests.samples import Sample
from tests.tolerance import assert_bit_equal
from triton_relattn import RelativePositions
from triton_relattn.kernels.call import needs_wide_index
from triton_relattn.kernels.config import architectures
from triton_relattn.kernels.config.tile_config import KERNELS
from triton_relattn.testing import forward_backward, make_inputs


def far_apart(tensor: torch.Tensor, dim: int, stride: int) -> torch.Tensor:
    """Copy a tensor to mapped memory, with this stride in one dimension.

    The memory begins 2**31 elements earlier, so that an overflowed offset reads zeros instead of unmapped memory.
    """
    strides = [*tensor.contiguous().stride()]
    strides[dim] = stride
    length = 2**31 + stride * (tensor.shape[dim] - 1) + tensor.numel()
    storage: Any = np.memmap("/dev/zero", dtype=tensor.numpy().dtype, mode="c", shape=(length,))
    return torch.from_numpy(storage).as_strided(tensor.shape, strides, 2**31).copy_(tensor)


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
PER_ROW = {"query", "key", "value", "rel_query", "outs", "d_outs", "d_queries", "d_keys", "d_values", "d_rel_queries"}
"""One row per query or key, in all calls; in some also those of these names."""
OTHER_ROWS = {"attn_mask", "residuals", "vectors"}


class Spread(NamedTuple):
    """A dimension of all tensors that gets so large a stride that offsets of the last elements are at least 2**31."""

    dim: int
    unchanged: set[str]
    """Tensors without this dimension, or without a stride in it."""
    last: int = 1
    """The number of elements with offsets of at least 2**31."""
    wide: bool = False
    """Whether offsets within a tile are that large; launchers must say so."""


OF_OTHER_SHAPES = VECTORS | WORKSPACE | BLOCKS | SUMS | {"rel_bias"}
SMALL = Sample(
    **{"num_queries": 10, "num_keys": 70, "tables": TABLES, "per_head": TABLES, "rel_width": 16},  # type: ignore[arg-type]
    **{"positions": (-4, 4, "clamp"), "query_offset": 30},  # type: ignore[arg-type]
)
"""With tiles of 16 there are keys beyond the table on either side."""
SPREADS: dict[str, tuple[Spread, Sample]] = {
    "entry": (Spread(0, {*TABLES} | WORKSPACE | SUMS), replace(SMALL, batch=3)),
    "head": (Spread(1, SUMS), replace(SMALL, key_heads=3)),
    "row": (Spread(2, OF_OTHER_SHAPES, wide=True), replace(SMALL, key_heads=2)),
    "sequence": (
        *(Spread(2, OF_OTHER_SHAPES | PAIRS, last=4, wide=True),),
        *(replace(SMALL, key_heads=2, sequences=((10, 70), (4, 4))),),
    ),
    "tile": (
        *(Spread(2, OF_OTHER_SHAPES | PAIRS, last=32),),
        *(replace(SMALL, num_queries=400, num_keys=400, positions=(-399, 399, "clamp"), query_offset=0),),
    ),
    "table": (
        *(Spread(2, OF_OTHER_SHAPES | PAIRS | PER_ROW | OTHER_ROWS, last=60),),
        *(replace(SMALL, num_queries=16, num_keys=16, positions=(0, 1000, "clamp"), query_offset=-960),),
    ),
    "column": (Spread(3, OF_OTHER_SHAPES | PAIRS, wide=True), replace(SMALL, key_heads=2)),
}


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


@pytest.mark.thorough
@pytest.mark.parametrize("has_p2c", [False, True], ids=["", "p2c"])
@pytest.mark.parametrize("name", SPREADS)
def test_results_are_the_same(name: str, has_p2c: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results have the same bits with any strides."""
    monkeypatch.setattr(architectures, "multiprocessors", lambda _: 100)  # partial sums of table gradients by batch entry
    (spread, sample), block = SPREADS[name], 128 if name == "tile" else 16
    tiles = dict.fromkeys(KERNELS, (block, block))
    tiles |= dict.fromkeys(("stored_dq", "dtable"), (max(block // 4, 16), block))  # with steps of 4 between queries
    if sample.sequences is None:
        shape = (sample.batch, sample.key_heads, sample.num_queries, sample.num_keys)
        sample = replace(sample, mask="float32", mask_shape=shape, mask_low="-1e4")
    sample = replace(sample, tables=TABLES if has_p2c else TABLES[:3])
    inputs, arguments = sample.inputs()
    results = partial(forward_backward, public_function(sample), inputs, **arguments, return_lse=True, implementation="triton")
    with Way("triton", tiles=tiles).computing(sample):
        expected = results()
        with launched(spread) as copied:
            assert_bit_equal(results(), expected)
    assert all(exact.isfinite().all() for exact in expected.values())
    assert copied >= ({*TABLES} - {"rel_p2c"} | PER_ROW) - spread.unchanged


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
    is_alone = sizes[0] == 1  # a table shared by batch entries has a summed gradient
    way, positions = Way("triton", tiles=dict.fromkeys(KERNELS, (16, 16))), RelativePositions(-2, 3)

    def last(*sizes: int) -> list[torch.Tensor]:
        of_heads = (single.query, single.key, single.value, single.d_out, single.d_lse)
        query, key, value, *d_outs = (tensor.expand(*sizes, *tensor.shape[2:]) for tensor in of_heads)
        assert single.rel_key is not None
        leaves = [query, key, value, single.rel_key.expand(sizes[1], *single.rel_key.shape)]
        leaves = [leaf.detach().requires_grad_(number < 3 or is_alone) for number, leaf in enumerate(leaves)]
        with way.computing(Sample()):
            outs = way.attend(*leaves, positions=positions)
            *others, d_last = torch.autograd.grad(outs, leaves[: 3 + is_alone], d_outs)
        results = [tensor.detach()[-1, -1] for tensor in (*outs, *others)]
        return [*results, d_last[-1] if is_alone else d_last[-1, -1]]

    expected = last(1, 1)
    with only_the_last_programs():
        found = last(*sizes)
    for result, exact in zip(found, expected, strict=True):
        assert exact.isfinite().all() and torch.equal(result, exact)


FAR: dict[str, tuple[str, int, int, dict[str, Any], dict[str, tuple[int, int]]]] = {
    # A tensor, its dimension, the stride that makes offsets in it 2**31 and more, the call, and tiles
    **{f"entry of {name}": (name, 0, 2**30, {"batch": 3}, {"forward": (16, 256)}) for name in ("key", "value")},
    **{f"head of {name}": (name, 1, 2**30, {"key_heads": 3}, {"forward": (16, 256)}) for name in ("key", "value")},
    **{f"tile of {name}": (name, 2, 2**22, {"num_keys": 530}, {"forward": (16, 256)}) for name in ("key", "value")},
    # A sequence that begins 2**31 elements behind the first
    "packed keys": ("key", 0, 2**27, {"tables": ("rel_key",), "sequences": ((16, 16), (4, 4))}, {}),
    "row of rel_key": ("rel_key", 0, 2**27, {"tables": ("rel_key",)}, {"forward": (32, 16)}),
    "row of rel_value": ("rel_value", 0, 2**27, {"tables": ("rel_value",)}, {"forward": (32, 16)}),
    "row of rel_bias": (
        *("rel_bias", 1, 2**27, {"key_heads": 2, "tables": ("rel_bias",), "per_head": TABLES}, {"forward": (32, 16)}),
    ),
    # Kernels whose tiles have queries with steps, to read 16 bytes of the workspace at once, have more rows per tile.
    "queries of a tile": (
        *("query", 2, 2**23 - 1024),
        {"num_queries": 300, "tables": ("rel_key",), "positions": (-299, 19, "clamp"), "dtype": "float16", "mode": "grad"},
        {"dkv": (32, 32), "dtable": (128, 32), "stored_dq": (64, 32)},
    ),
}


@pytest.mark.usefixtures("guarded_kernels")
@pytest.mark.parametrize("name", FAR)
def test_large_strides(name: str) -> None:
    """Each summand of an address is computed in 64 bits, also where offsets within a tile fit in 32, and rows of a table may be
    so far apart that those within a tile do not."""
    changed, dim, stride, fields, tiles = FAR[name]
    sizes = {"num_queries": 20, "num_keys": 20, "width": 8, "value_width": 8, "mode": "no_grad"}
    sample = Sample(**{**sizes, **({"positions": (-9, 9, "clamp")} if "tables" in fields else {}), **fields})  # type: ignore[arg-type]
    tensor, way = sample.call()[changed], Way("triton", tiles=tiles)
    wide = far_apart(tensor, dim, stride)
    assert needs_wide_index(wide.shape, wide.stride()) == ("row of" in name)
    assert_bit_equal(compute(sample, way, **{changed: wide}), compute(sample, way))
