"""The forward kernel in Triton's interpreter, by the error rule: shapes, tables, masks and configurations; masked rows, empty
tensors, NaN, strides, extreme logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.expected import exact_results
from tests.interpreter.launch import LENGTHS, UNEVEN_LENGTHS, attend, check, has_wide_index, resolve, run, selectable
from tests.samples import with_different_strides
from tests.tolerance import assert_gradients_close_fp32
from triton_relattn import RelativePositions
from triton_relattn.kernels.config.selection import TileConfig
from triton_relattn.kernels.forward import forward
from triton_relattn.testing import forward_backward, make_inputs

SMALL = TileConfig(32, 16, 4, 1)  # several tiles each way in short sequences, and two tiles a block of queries


@pytest.mark.parametrize("num_queries", LENGTHS)
def test_lengths(num_queries: int) -> None:
    """Every pair of lengths around the block sizes, full table; causal and with an offset where they differ."""
    for num_keys in LENGTHS:
        num_rows = 2 * max(num_queries, num_keys) - 1
        inputs = make_inputs(1, 2, num_queries, num_keys, 16, num_rows=num_rows, dtype=torch.float32, seed=num_keys)
        is_causal = (num_queries + num_keys) % 2 == 1
        check(inputs, is_causal=is_causal, query_offset=num_keys - num_queries if num_keys % 3 == 0 else 0)


@pytest.mark.parametrize(("num_queries", "num_keys"), [*UNEVEN_LENGTHS, pytest.param(1023, 1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_rows", [33, 2047])
@pytest.mark.parametrize("lower_right", [False, True])
def test_cross_attention(num_queries: int, num_keys: int, num_rows: int, lower_right: bool) -> None:
    """Very uneven lengths, aligned at the upper left or the lower right corner, with a short and a long table."""
    inputs = make_inputs(1, 2, num_queries, num_keys, 16, 24, num_rows=num_rows, dtype=torch.float16, seed=1)
    offset = num_keys - num_queries if lower_right else 0
    check(inputs, query_offset=offset)
    check(inputs, query_offset=offset, is_causal=True)


@pytest.mark.parametrize("width", [1, 3, 8, 16, 21, 40, 59, 64, 80, 96, 111, 128, 192, 256])
def test_widths(width: int) -> None:
    """Widths that are no power of two are padded inside the kernel; the storage beyond them holds NaN."""
    for value_width in (width, 24):
        inputs = make_inputs(1, 2, 33, 47, width, value_width, num_rows=31, per_head=True, dtype=torch.float16, seed=width)
        check(with_different_strides(inputs))


@pytest.mark.parametrize("config", selectable("forward"), ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_every_selectable_configuration(config: TileConfig, dtype: torch.dtype) -> None:
    """A full, a clamped and a bounded table, and none, with lengths that divide no block."""
    num_queries, num_keys = config.block_m + 21, config.block_m + 2 * config.block_n + 9
    positions: tuple[RelativePositions | None, ...] = (
        RelativePositions(-num_queries - 30, num_keys),
        RelativePositions(-3, 7),
        RelativePositions(-config.block_m - 5, 2, "zero"),
        None,
    )
    for seed, where in enumerate(positions):
        num_rows = None if where is None else where.num_rows
        inputs = make_inputs(1, 2, num_queries, num_keys, 16, num_rows=num_rows, dtype=dtype, seed=seed)
        lengths = torch.tensor([num_keys - 5])
        check(inputs, config, positions=where, is_causal=seed % 2 == 0, query_offset=19, key_lengths=lengths)


TABLES: dict[str, RelativePositions] = {
    "exact": RelativePositions(-69, 89),
    "longer": RelativePositions(-100, 120),
    "shorter": RelativePositions(-20, 8),
    "one_row": RelativePositions(0, 0),
    "one_row_future": RelativePositions(17, 17),
    "two_rows": RelativePositions(-1, 0),
    "causal_rows": RelativePositions(-69, 0),
    "wholly_past": RelativePositions(-500, -200),
    "past": RelativePositions(-40, -16),
    "wholly_future": RelativePositions(300, 333),
    "future": RelativePositions(16, 48),
}


@pytest.mark.parametrize("outside", ["clamp", "zero"])
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("config", [SMALL, TileConfig(32, 32, 4, 1)], ids=["32x16", "32x32"])
def test_tables(table: str, outside: Any, config: TileConfig) -> None:
    """Tables that cover all, part or none of the relative positions, with an offset and lengths.

    Shared, and per head: what lies behind a table is then that of the next head, and not zero by chance.
    """
    positions = RelativePositions(TABLES[table].first, TABLES[table].last, outside)
    for seed, (is_causal, query_offset) in enumerate(((False, 0), (True, 20), (False, -13))):
        inputs = make_inputs(1, 2, 70, 90, 16, num_rows=positions.num_rows, per_head=seed > 0, dtype=torch.float32, seed=seed)
        lengths = torch.tensor([37]) if seed else None
        check(inputs, config, positions=positions, is_causal=is_causal, query_offset=query_offset, key_lengths=lengths)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_gradients_with_the_kernels_lse(is_causal: bool, per_head: bool) -> None:
    """The public function with implementation="triton": all gradients, through out and lse."""
    inputs = make_inputs(2, 2, 70, 90, 16, 24, num_rows=61, per_head=per_head, dtype=torch.float32, seed=5)
    arguments: dict[str, Any] = {"is_causal": is_causal, "key_lengths": torch.tensor([90, 43]), "query_offset": 12}
    results = forward_backward(attend, inputs, **arguments)
    golden = exact_results(inputs, **arguments)
    gradients = [name for name in results if name.startswith("d_")]
    assert len(gradients) == 4
    for name in gradients:
        assert_gradients_close_fp32(name, results[name], golden[name], [golden[other] for other in gradients])


@pytest.mark.usefixtures("guarded_kernels")
def test_lengths_beyond_the_keys_are_limited() -> None:
    """A GPU's key_lengths are not checked: the kernel limits them to [0, Nk] instead of reading beyond the keys."""
    inputs = make_inputs(2, 1, 20, 21, 16, num_rows=9, dtype=torch.float32, seed=4)
    tensors, spec = resolve(inputs)
    out, lse, *_ = forward(tensors._replace(key_lengths=torch.tensor([1000, -7])), spec, SMALL)
    expected, expected_lse, *_ = forward(tensors._replace(key_lengths=torch.tensor([21, 0])), spec, SMALL)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_wide_offsets() -> None:
    """A table whose rows lie 2**27 elements apart is addressed in 64 bits; the storage is mapped but hardly touched."""
    inputs = make_inputs(1, 1, 20, 20, 8, num_rows=39, dtype=torch.float32, seed=6)
    assert inputs.rel_key is not None
    storage = torch.from_numpy(np.memmap("/dev/zero", dtype=np.float32, mode="c", shape=(38 * 2**27 + 8,)))
    table = storage.as_strided((39, 8), (2**27, 1)).copy_(inputs.rel_key)
    assert has_wide_index(table) and not has_wide_index(inputs.rel_key)
    out, lse = run(inputs._replace(rel_key=table), SMALL)
    expected, expected_lse = run(inputs, SMALL)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_invalid_configuration() -> None:
    inputs = make_inputs(1, 1, 20, 20, 16, num_rows=39, dtype=torch.float32, seed=6)
    with pytest.raises(ValueError, match=r"block_m must be block_n or twice that.*64 and 16"):
        run(inputs, TileConfig(64, 16, 4, 1))
    run(inputs._replace(rel_key=None), TileConfig(64, 16, 4, 1))


def test_what_the_interpreter_cannot_do() -> None:
    """bfloat16 is computed wrongly there, float64 is not what the kernels do: an error that says so, no fallback."""
    inputs = make_inputs(1, 1, 20, 20, 16, num_rows=39, dtype=torch.bfloat16, seed=6)
    with pytest.raises(RuntimeError, match="interpreter computes bfloat16 wrongly"):
        attend(*inputs[:4])
    with pytest.raises(RuntimeError, match=r"not in torch\.float64"):
        attend(*inputs.to(torch.float64)[:4])
    wide = make_inputs(1, 1, 4, 4, 257, num_rows=7, dtype=torch.float32, seed=6)
    with pytest.raises(RuntimeError, match="up to 256, got 257"):
        attend(*wide[:4])
