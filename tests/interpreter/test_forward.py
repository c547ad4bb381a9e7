"""The forward kernel in Triton's interpreter, by the error rule: shapes, tables, masks and configurations; masked rows, empty
tensors, NaN, strides, extreme logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.cases import LENGTHS, UNEVEN_LENGTHS, one_hot_case, random_case
from tests.interpreter.launch import attend, check, resolve, run, selectable
from triton_relattn import RelativePositions
from triton_relattn._core.within import within
from triton_relattn._reference import reference_attention
from triton_relattn.kernels.config import selection
from triton_relattn.kernels.config.selection import TileConfig
from triton_relattn.kernels.forward import forward
from triton_relattn.testing import (
    Inputs,
    assert_gradients_close_fp32,
    dense_gradients,
    forward_backward,
    in_memory_order,
    make_inputs,
    with_different_strides,
)

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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("seed", [*range(30), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(30, 400))])
def test_random_combination(seed: int, dtype: torch.dtype) -> None:
    """Any shapes, tables, masks, offsets, strides and scales; sharp attention among them."""
    inputs, arguments = random_case(seed, dtype=dtype, widths=(8, 16, 20, 40), value_widths=(8, 16, 33), features=())
    check(inputs, SMALL if seed % 2 else None, **arguments)


@pytest.mark.parametrize("r", [-9, -1, 0, 2, 11])
@pytest.mark.parametrize("query_offset", [0, 4, -3])
def test_one_table_row_moves_only_its_diagonal(r: int, query_offset: int) -> None:
    """Values that are the identity show the probabilities: only the logits with j - i - query_offset = r change."""
    inputs = make_inputs(1, 2, 33, 35, 16, 35, num_rows=41, dtype=torch.float32, seed=r + 20)
    assert inputs.rel_key is not None
    table = torch.zeros_like(inputs.rel_key)
    table[r + 20] = inputs.rel_key[r + 20]
    identity = torch.eye(35).expand(1, 2, 35, 35)
    changed = check(inputs._replace(rel_key=table, value=identity), SMALL, query_offset=query_offset)
    plain = check(inputs._replace(rel_key=None, value=identity), SMALL, query_offset=query_offset)
    logits, plain_logits = (out.double().log() + lse.double()[..., None] for out, lse in (changed, plain))
    i, j = torch.arange(33)[:, None], torch.arange(35)
    diagonal = (j - i - query_offset == r).expand_as(logits)
    moved = (inputs.query @ table[r + 20] / 4).double()[..., None].expand_as(logits)
    rounding = 16 * torch.finfo(torch.float32).eps * max(plain_logits.abs().max().item(), logits.abs().max().item())
    difference = logits - plain_logits
    assert rounding < moved[diagonal].abs().max()
    within("diagonal", (difference[diagonal] - moved[diagonal]).abs(), rounding)
    within("beside it", difference[~diagonal].abs(), rounding)


@pytest.mark.parametrize("outside", ["clamp", "zero"])
def test_one_hot_d_out_reaches_only_its_rows(outside: Any) -> None:
    """The gradient of one query's output touches the table rows of its visible keys; all others are exactly zero."""
    inputs, arguments, hit = one_hot_case(outside, 16, torch.float32)
    d_rel_key = forward_backward(attend, inputs, **arguments)["d_rel_key"]
    assert torch.equal(d_rel_key != 0, hit[:, None].expand(31, 16))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_gradients_with_the_kernels_lse(is_causal: bool, per_head: bool) -> None:
    """The public function with implementation="triton": all gradients, through out and lse."""
    inputs = make_inputs(2, 2, 70, 90, 16, 24, num_rows=61, per_head=per_head, dtype=torch.float32, seed=5)
    arguments: dict[str, Any] = {"is_causal": is_causal, "key_lengths": torch.tensor([90, 43]), "query_offset": 12}
    results = forward_backward(attend, inputs, **arguments)
    golden = dense_gradients(inputs, **arguments)._asdict()
    gradients = [name for name in results if name.startswith("d_")]
    assert len(gradients) == 4
    for name in gradients:
        assert_gradients_close_fp32(name, results[name], golden[name], [golden[other] for other in gradients])


@pytest.mark.parametrize(
    "arguments",
    [
        {"key_lengths": torch.tensor([0, 0])},
        {"is_causal": True, "query_offset": -17},
        {"is_causal": True, "query_offset": -5, "key_lengths": torch.tensor([0, 13])},
        {"is_causal": True, "query_offset": -30},
    ],
    ids=["lengths", "causal", "both", "all"],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_rows_that_see_nothing(arguments: dict[str, Any], dtype: torch.dtype) -> None:
    """out 0 and lse -inf, also for rows that share a block with rows that see something; gradients finite, and 0 there."""
    inputs = make_inputs(2, 2, 30, 13, 16, num_rows=9, dtype=dtype, seed=4)
    out, lse = check(inputs, SMALL, **arguments)
    offset = arguments.get("query_offset", 0)
    limit = arguments.get("key_lengths", torch.tensor([13, 13]))[:, None]
    sees = torch.arange(30) + offset >= 0 if "is_causal" in arguments else torch.ones(30, dtype=torch.bool)
    blind = ~(sees & (limit > 0))[:, None].expand(2, 2, 30)
    assert blind.any() and torch.equal(lse == -math.inf, blind) and not out[blind].any()
    results = forward_backward(attend, inputs, **arguments)
    assert all(result.isfinite().all() for name, result in results.items() if name != "lse")
    assert not results["d_query"][blind].any()


@pytest.mark.usefixtures("guarded_kernels")
def test_lengths_beyond_the_keys_are_limited() -> None:
    """A GPU's key_lengths are not checked: the kernel limits them to [0, Nk] instead of reading beyond the keys."""
    inputs = make_inputs(2, 1, 20, 21, 16, num_rows=9, dtype=torch.float32, seed=4)
    tensors, spec = resolve(inputs)
    out, lse, *_ = forward(tensors._replace(key_lengths=torch.tensor([1000, -7])), spec, SMALL)
    expected, expected_lse, *_ = forward(tensors._replace(key_lengths=torch.tensor([21, 0])), spec, SMALL)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


@pytest.mark.parametrize("empty", ["batch", "heads", "queries", "keys"])
@pytest.mark.parametrize("num_rows", [None, 5])
def test_empty(empty: str, num_rows: int | None) -> None:
    """Right shapes; without keys out 0 and lse -inf."""
    sizes = [0 if empty == name else size for name, size in zip(("batch", "heads", "queries", "keys"), (2, 3, 4, 6), strict=True)]
    inputs = make_inputs(*sizes, 8, 5, num_rows=num_rows, dtype=torch.float32, seed=0)  # type: ignore[misc, arg-type]
    out, lse = run(inputs)
    assert out.shape == (*sizes[:3], 5) and lse.shape == tuple(sizes[:3])
    assert not out.any() and (lse == -math.inf).all()


@pytest.mark.parametrize(("logit", "spread"), [(1e4, 1.0), (-1e4, 1.0), (-200.0, 0.01)])
@pytest.mark.parametrize("num_keys", [65, 137])
def test_large_logits_in_float16(logit: float, spread: float, num_keys: int) -> None:
    """Logits of +-1e4, and all logits near -200 with lengths that divide no block: finite, and right."""
    inputs = make_inputs(1, 2, 33, num_keys, 16, num_rows=33, dtype=torch.float64, seed=9)
    level = math.sqrt(abs(logit) * 4 / 16)  # 16 products, scale 1/4
    sign = math.copysign(1.0, logit)
    query, key = level + spread * inputs.query / level, sign * level + spread * inputs.key / level
    inputs = inputs._replace(query=query, key=key).to(torch.float16)
    out, lse = run(inputs, SMALL)
    exact_out, exact_lse = reference_attention(*inputs.to(torch.float64)[:4])
    assert (exact_lse - logit).abs().max() < abs(logit) / 5
    # A logit's rounding to float32 scales a probability by as much; rounding to float16 ends it.
    logit_rounding = abs(logit) * torch.finfo(torch.float32).eps
    half = torch.finfo(torch.float16).eps
    within("lse", (lse.double() - exact_lse).abs(), 4 * logit_rounding)
    within("out", (out.double() - exact_out).abs(), (8 * logit_rounding + 2 * half) * exact_out.abs().max())


def test_nan_does_not_leak() -> None:
    """NaN around the tensors, beyond key_lengths, and in table rows that no visible pair has, reaches nothing."""
    inputs = make_inputs(2, 2, 37, 41, 16, num_rows=101, dtype=torch.float32, seed=3)
    lengths = torch.tensor([30, 0])
    assert inputs.rel_key is not None
    key, value, table = inputs.key.clone(), inputs.value.clone(), torch.full_like(inputs.rel_key, math.nan)
    key[0, :, 30:], value[0, :, 30:], key[1], value[1] = math.nan, math.nan, math.nan, math.nan
    for is_causal in (False, True):
        read = slice(50 - 36, 51 if is_causal else 50 + 30)
        table[read] = inputs.rel_key[read]
        spoilt = inputs._replace(
            query=in_memory_order(inputs.query, 0, 2, 1, 3),
            key=in_memory_order(key, 0, 2, 1, 3),
            value=in_memory_order(value, 0, 1, 3, 2),
            rel_key=in_memory_order(table, 0, 1, step=2),
        )
        for config in (SMALL, TileConfig(64, 64, 4, 1)):
            out, lse = run(spoilt, config, key_lengths=lengths, is_causal=is_causal)
            expected, expected_lse = run(inputs, config, key_lengths=lengths, is_causal=is_causal)
            assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_nan_in_one_query_row_stays_there() -> None:
    """Only that row of that batch and head changes; everything else is bit-equal."""
    inputs = make_inputs(2, 2, 70, 90, 16, num_rows=179, dtype=torch.float32, seed=3)
    query = inputs.query.clone()
    query[1, 0, 37] = math.nan
    out, lse = run(inputs._replace(query=query), SMALL)
    expected, expected_lse = run(inputs, SMALL)
    assert out[1, 0, 37].isnan().all() and lse[1, 0, 37].isnan()
    out[1, 0, 37], lse[1, 0, 37] = expected[1, 0, 37], expected_lse[1, 0, 37]
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def packed(inputs: Inputs) -> Inputs:
    """query, key and value as views of one (B, N, 3, H, D) tensor."""
    qkv = torch.stack([tensor.transpose(1, 2) for tensor in inputs[:3]], dim=2)
    query, key, value = (qkv[:, :, part].transpose(1, 2) for part in range(3))
    return inputs._replace(query=query, key=key, value=value)


VIEWS: dict[str, Any] = {
    "transposed": lambda x: x._replace(
        query=in_memory_order(x.query, 0, 2, 1, 3),
        key=in_memory_order(x.key, 3, 2, 1, 0),
        rel_key=in_memory_order(x.rel_key, 1, 0),
    ),
    "packed": packed,
    "offset": lambda x: x._replace(key=torch.cat([x.key.new_ones(1), x.key.flatten()])[1:].view(x.key.shape)),
    "padded": lambda x: x._replace(value=torch.nn.functional.pad(x.value, (0, 3), value=math.nan)[..., :-3]),
    "stride_0": lambda x: x._replace(key=x.key[:, :1].expand_as(x.key), value=x.value[:1, :, :1].expand_as(x.value)),
    "per_head_table": lambda x: x._replace(rel_key=torch.stack([x.rel_key, -x.rel_key], dim=1).transpose(0, 1)),
}


@pytest.mark.parametrize("view", VIEWS)
def test_strides(view: str) -> None:
    """Views give what their contiguous copies give, bit for bit, and out keeps query's memory order."""
    inputs = VIEWS[view](make_inputs(2, 2, 50, 50, 16, num_rows=35, dtype=torch.float32, seed=6))
    contiguous = Inputs(*(tensor.contiguous() for tensor in inputs[:6]))  # type: ignore[union-attr]
    out, lse = run(inputs, SMALL, is_causal=True)
    expected, expected_lse = run(contiguous, SMALL, is_causal=True)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert (out.stride(1) < out.stride(2)) == (inputs.query.stride(1) < inputs.query.stride(2))


def test_wide_offsets() -> None:
    """A table whose rows lie 2**27 elements apart is addressed in 64 bits; the storage is mapped but hardly touched."""
    inputs = make_inputs(1, 1, 20, 20, 8, num_rows=39, dtype=torch.float32, seed=6)
    assert inputs.rel_key is not None
    storage = torch.from_numpy(np.memmap("/dev/zero", dtype=np.float32, mode="c", shape=(38 * 2**27 + 8,)))
    table = storage.as_strided((39, 8), (2**27, 1)).copy_(inputs.rel_key)
    assert selection.needs_wide_index(table) and not selection.needs_wide_index(inputs.rel_key)
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
