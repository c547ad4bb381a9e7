"""Tests that were missing, as faults of tests/mutants had survived: offsets of 2**31 elements and more, tables of which some are
shared by the heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.interpreter.launch import check, check_every_term, run, run_backward
from triton_relattn import RelativePositions, fused_relative_attention_varlen
from triton_relattn._core.within import within
from triton_relattn.kernels.config import selection
from triton_relattn.kernels.config.selection import TileConfig
from triton_relattn.testing import make_inputs

SMALL = {name: TileConfig(32, 16, 4, 1) for name in selection.KERNELS}


def far_apart(tensor: torch.Tensor, dim: int, stride: int) -> torch.Tensor:
    """The same numbers with this stride in one dimension; the storage is mapped but hardly touched.

    It begins 2**31 elements earlier: an offset that has overflowed leads to zeros instead of to memory that is not there.
    """
    strides = [*tensor.contiguous().stride()]
    strides[dim] = stride
    length = 2**31 + stride * (tensor.shape[dim] - 1) + tensor.numel()
    storage = torch.from_numpy(np.memmap("/dev/zero", dtype=np.float32, mode="c", shape=(length,)))
    return storage.as_strided(tensor.shape, strides, 2**31).copy_(tensor)


# A dimension, its size, and the stride that makes the offset of its last tile 2**31 and more.
OFFSETS = {"entry": (0, 3, 2**30), "head": (1, 3, 2**30), "tile": (2, 530, 2**22)}


@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize("where", OFFSETS)
def test_offsets_of_a_head_and_of_a_tile(where: str, name: str) -> None:
    """Each summand of an address is computed in 64 bits, also where a tile's own rows need no more than 32."""
    dim, size, stride = OFFSETS[where]
    batch, heads, num_keys = (size if dim == each else small for each, small in enumerate((1, 1, 20)))
    inputs = make_inputs(batch, heads, 5, num_keys, 8, num_rows=None, dtype=torch.float32, seed=6)
    wide = far_apart(getattr(inputs, name), dim, stride)
    assert not selection.needs_wide_index(wide)
    config = TileConfig(16, 256, 4, 1)
    for result, expected in zip(run(inputs._replace(**{name: wide}), config), run(inputs, config), strict=True):
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
    """One table alone has rows so far apart that a tile's own offsets need 64 bits."""
    terms: dict[str, Any] = {"rel_key": name == "rel_key", "rel_value": name == "rel_value"}
    inputs = make_inputs(1, 1, 20, 20, 8, num_rows=19, **terms, dtype=torch.float32, seed=6)
    wide = far_apart(getattr(inputs, name), 0, 2**27)
    assert selection.needs_wide_index(wide)
    for result, expected in zip(
        run(inputs._replace(**{name: wide}), SMALL["forward"]), run(inputs, SMALL["forward"]), strict=True
    ):
        assert torch.equal(result, expected)


@pytest.mark.parametrize(("first", "last"), [(-31, 19), (-32, 18)], ids=["past", "future"])
def test_a_table_one_row_short(first: int, last: int) -> None:
    """A clamped table that has a row for every pair of 33 queries and 20 keys but one."""
    inputs = make_inputs(1, 1, 33, 20, 16, num_rows=last - first + 1, rel_value=True, dtype=torch.float32, seed=2)
    check_every_term(inputs, SMALL, positions=RelativePositions(first, last))


@pytest.mark.parametrize("outside", ["clamp", "zero"])
def test_every_alignment_of_the_near_part(outside: Any) -> None:
    """The borders between near and far tiles lie at every column of a tile."""
    inputs = make_inputs(1, 1, 33, 55, 16, num_rows=4, dtype=torch.float32, seed=3)
    for first in range(-8, 8):
        check(inputs, SMALL["forward"], positions=RelativePositions(first, first + 3, outside))


@pytest.mark.parametrize("kind", ["clamp", "zero"])
@pytest.mark.parametrize("shared", ["rel_key", "rel_value", "rel_bias"])
def test_a_shared_table_beside_tables_of_heads(shared: str, kind: Any) -> None:
    """Transformer-XL's fold has such: the gradient of the shared one is summed over the heads."""
    positions = RelativePositions(-4, 6, kind)
    terms: dict[str, Any] = {"num_rows": 11, "rel_width": 12, "rel_value": True, "rel_bias": True, "dtype": torch.float32}
    inputs, others = (make_inputs(2, 2, 20, 33, 16, 12, per_head=per_head, **terms, seed=3) for per_head in (True, False))
    check_every_term(inputs._replace(**{shared: getattr(others, shared)}), SMALL, positions=positions)


@pytest.mark.thorough
@pytest.mark.parametrize("rel_width", [None, 12], ids=["query", "rel_query"])
@pytest.mark.parametrize(
    "options", [{"rel_scale": -0.3}, {"rel_scale": 0.7, "softcap": 3.0, "dropout_p": 0.3}], ids=["scale", "all"]
)
def test_far_keys(options: dict[str, Any], rel_width: int | None) -> None:
    """Most keys lie in tiles beyond a clamped table, past and future, with every term and scales of their own."""
    terms: dict[str, Any] = {"num_rows": 5, "rel_width": rel_width, "rel_value": True, "rel_bias": True}
    inputs = make_inputs(1, 2, 40, 90, 16, 12, **terms, dtype=torch.float32, seed=5)
    check_every_term(inputs, SMALL, positions=RelativePositions(-2, 2), query_offset=25, **options)


@pytest.mark.thorough
def test_every_alignment_of_a_window() -> None:
    """The ends of all walks lie at every place of a tile, those of the window at every row of a block of table rows."""
    for shift in range(16):
        positions = RelativePositions(-20 - shift, 20, "zero")
        inputs = make_inputs(1, 1, 33, 50, 16, num_rows=positions.num_rows, dtype=torch.float32, seed=shift)
        check_every_term(inputs, SMALL, positions=positions, window_size=(3, 2), query_offset=shift)


TERMS = 3000


@pytest.mark.thorough
def test_long_sums_are_rounded_once() -> None:
    """Sums over thousands of keys or queries in float16, of numbers of one sign: plain torch's error would hide that of a sum
    that is rounded at every tile. All probabilities are equal, so that nothing but the sum is rounded."""
    tiles = dict.fromkeys(selection.KERNELS, TileConfig(16, 16, 4, 1))
    inputs = make_inputs(1, 1, 3, TERMS, 16, num_rows=None, dtype=torch.float16, seed=3)
    inputs = inputs._replace(query=torch.zeros_like(inputs.query), value=1 + inputs.value.abs() / 8)
    out, _ = run(inputs, tiles["forward"])
    assert_rounded_once(out, inputs.value.double().mean(2, keepdim=True).expand(out.shape))

    inputs = make_inputs(1, 1, TERMS, 1, 16, num_rows=None, dtype=torch.float16, seed=3)
    inputs = inputs._replace(d_out=1 + inputs.d_out.abs() / 8)
    d_value = run_backward(inputs, tiles, wanted=("d_value",))["d_value"]
    assert d_value is not None
    assert_rounded_once(d_value, inputs.d_out.double().sum(2, keepdim=True))


def assert_rounded_once(result: torch.Tensor, exact: torch.Tensor) -> None:
    """Half a unit in the last place, and what float32 rounds: half a unit of each partial sum, which are half of the whole on
    average. There is a factor of two to spare."""
    units = torch.finfo(result.dtype).eps * 2 ** exact.abs().log2().floor()
    beyond = (result.double() - exact).abs() - units / 2
    within("sum, beyond half a unit", beyond.clamp_min(0), TERMS // 16 * torch.finfo(torch.float32).eps / 2 * exact.abs())
