"""Products in the dtype of the inputs, on processors that are fast at them, and torch's fused attention where it is faster: the
error rule, hidden NaN, repeatability, and what chooses. Every way runs on any processor here, fast or not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.cpu.test_blockwise import ERROR_CASES
from tests.oracle import attend, results_of, unlucky_reference, with_keep
from tests.tolerance import within
from triton_relattn import RelativePositions, fused_relative_attention
from triton_relattn._blockwise import attention, products
from triton_relattn._core.arguments import Arguments
from triton_relattn._core.spec import TABLES
from triton_relattn._core.validation import resolve
from triton_relattn._implementations import BLOCKWISE
from triton_relattn.testing import (
    Inputs,
    assert_table_gradient,
    assert_within_budget,
    dense_gradients,
    forward_backward,
    make_inputs,
    with_different_strides,
)


@pytest.fixture(params=["products", "fused"])
def fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """A processor that is fast at products in 16 bits, and one whose fused attention is, too; the blocks that this had."""
    fused, calls = attention.fused, []

    def counted(block: Any, *others: Any) -> torch.Tensor:
        calls.append(block.scores)
        return fused(block, *others)

    monkeypatch.setattr(products, "fast_dtypes", lambda: {torch.bfloat16, torch.float16})
    monkeypatch.setattr(products, "FEWEST_PRODUCTS", 0)
    monkeypatch.setattr(attention, "has_fast_fused_attention", lambda: request.param == "fused")
    monkeypatch.setattr(attention, "fused", counted)
    return calls


@pytest.mark.parametrize("sharp", [False, True], ids=["randn", "sharp"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ERROR_CASES)
def test_error_rule(case: str, dtype: torch.dtype, sharp: bool, fast: list[torch.Tensor], block_size: None) -> None:
    """The same as with products in float32: at most twice (gradients: three times) the error of plain torch, and gradients of
    tables as good as rounding dS once."""
    sizes, tables, arguments = ERROR_CASES[case]
    inputs = with_different_strides(make_inputs(*sizes, **tables, dtype=dtype, seed=7, sharp=sharp))
    golden, reference = unlucky_reference(inputs, **arguments)
    results = results_of("blockwise", inputs, **arguments)
    for name, result in results.items():
        assert result.dtype == (torch.float32 if name == "lse" else dtype)
        assert_within_budget(name, result, golden[name], reference[name], factor=3 if name.startswith("d_") else 2)
    for table in TABLES:
        if f"d_{table}" in results:
            assert_table_gradient(f"d_{table}", results[f"d_{table}"], inputs, table=table, **with_keep(inputs, arguments))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("scale", "rel_scale"), [(0.0, 0.125), (0.125, 0.0), (0.0, 0.0)])
def test_scale_of_zero(scale: float, rel_scale: float, dtype: torch.dtype, fast: list[torch.Tensor]) -> None:
    """Attention by position, by content or by a bias alone: torch's products by 0 in 16 bits do not write their result."""
    inputs = make_inputs(1, 2, 96, 96, 64, num_rows=129, rel_bias=True, rel_p2c=True, dtype=dtype, seed=7)
    arguments: dict[str, Any] = {"scale": scale, "rel_scale": rel_scale}
    golden, reference = unlucky_reference(inputs, **arguments)
    for name, result in results_of("blockwise", inputs, **arguments).items():
        if golden[name].any():
            assert_within_budget(name, result, golden[name], reference[name], factor=3 if name.startswith("d_") else 2)
        else:
            assert not result.any(), name


@pytest.mark.parametrize("case", ERROR_CASES)
def test_forward_alone(case: str, fast: list[torch.Tensor], block_size: None, request: pytest.FixtureRequest) -> None:
    """Nothing is kept for a backward, and terms of tables may be rounded: out and lse within twice the error of plain torch."""
    sizes, tables, arguments = ERROR_CASES[case]
    inputs = with_different_strides(make_inputs(*sizes, **tables, dtype=torch.bfloat16, seed=7))
    golden, reference = unlucky_reference(inputs, **arguments)
    torch.manual_seed(0)
    with torch.no_grad():
        out, lse = attend(*inputs[:4], **inputs.terms(), **arguments)
    assert_within_budget("out", out, golden["out"], reference["out"], factor=2)
    assert_within_budget("lse", lse, golden["lse"], reference["lse"], factor=2)
    can = not {"softcap", "dropout_p"} & arguments.keys() and inputs.rel_value is None and sizes[4] == sizes[5]
    assert bool(fast) == (can and "fused" in request.node.callspec.id.split("-"))
    assert all(scores.dtype == torch.bfloat16 for scores in fast)


HIDING: dict[str, dict[str, Any]] = {
    "lengths": {"key_lengths": torch.tensor([30, 0])},
    "causal": {"is_causal": True, "query_offset": -9},
    "window": {"window_size": (7, 3), "query_offset": 2},
    "mask": {"attn_mask": torch.arange(53) % 3 > 0},
    "mask_of_rows": {"attn_mask": (torch.arange(60)[:, None] % 5 > 0).expand(60, 53)},
}


@pytest.mark.parametrize("where", ["nowhere", "key", "value"])
@pytest.mark.parametrize("case", HIDING)
def test_what_is_hidden(case: str, where: str, fast: list[torch.Tensor], block_size: None) -> None:
    """Queries that see nothing get 0 and -inf; NaN that a mask hides from a query does not reach it."""
    inputs = make_inputs(2, 2, 60, 53, 16, num_rows=21, rel_bias=True, dtype=torch.bfloat16, seed=3)
    arguments, positions = HIDING[case], RelativePositions(-8, 12)
    seen = dense_gradients(inputs, positions=positions, **arguments).probs > 0
    spoilt = inputs
    if where != "nowhere":
        hidden = ~seen.any(2)  # from all queries
        hidden[..., 40] = case == "window" and where == "key"  # from some of them
        tensor = getattr(inputs, where).masked_fill(hidden[..., None], math.nan)
        spoilt = inputs._replace(**{where: tensor})
    if where == "value" and case in ("mask", "mask_of_rows"):
        pytest.skip("a value that a mask hides is multiplied by 0")
    with torch.no_grad():
        out, lse = attend(*spoilt[:4], **spoilt.terms(), positions=positions, **arguments)
        expected, _ = attend(*inputs[:4], **inputs.terms(), positions=positions, **arguments)
    blind = ~seen.any(-1)
    assert torch.equal(lse == -math.inf, blind) and not out[blind].any()
    clean = ~seen[..., 40] if case == "window" and where == "key" else torch.ones_like(blind)
    assert out[clean].isfinite().all()
    error = (out.double() - expected.double()).abs()[clean].amax() if clean.any() else torch.zeros(())
    # With NaN about, the fused attention is left alone: two roundings of terms, and of out.
    assert error <= 8 * torch.finfo(torch.bfloat16).eps * float(expected.abs().max())


def test_a_part_of_the_keys(fast: list[torch.Tensor]) -> None:
    """Its maximum and sum are those of the backward's logits, whose terms are not rounded: else P would not sum to one."""
    inputs = make_inputs(1, 2, 60, 50, 32, num_rows=109, dtype=torch.bfloat16, seed=3, sharp=True)
    tensors, spec = resolve(Arguments.of(*inputs[:4]))  # type: ignore[misc]
    part = BLOCKWISE.forward_of_part(tensors, spec)
    exact = dense_gradients(inputs).lse
    # Rounded terms are off by a unit of bfloat16, 2**16 times this.
    rounding = 64 * torch.finfo(torch.float32).eps * exact.abs().max()
    within("lse", (part.largest.double() + part.log_sum.double() - exact).abs(), rounding)


def test_repeats_bit_for_bit(fast: list[torch.Tensor]) -> None:
    inputs = make_inputs(2, 4, 150, 150, 32, num_rows=299, dtype=torch.bfloat16, seed=3)
    first, *others = (forward_backward(attend, inputs, is_causal=True) for _ in range(3))
    for other in others:
        for name, result in other.items():
            assert torch.equal(result, first[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_stay_as_they_are(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, whatever the processor is fast at."""
    inputs: Inputs = make_inputs(2, 4, 150, 150, 32, num_rows=299, dtype=dtype, seed=3)
    results = []
    for fast in (set(), {torch.bfloat16, torch.float16}):
        monkeypatch.setattr(products, "fast_dtypes", lambda fast=fast: fast)
        monkeypatch.setattr(attention, "has_fast_fused_attention", lambda fast=fast: bool(fast))
        results.append(forward_backward(attend, inputs, is_causal=True))
    for name, result in results[0].items():
        assert torch.equal(result, results[1][name]), name


FLAGS = {
    "avx2": ((), set(), False),
    "avx512_bf16": (("_is_avx512_bf16_supported",), {torch.bfloat16}, False),
    "amx": (("_is_amx_tile_supported", "_is_avx512_bf16_supported"), {torch.bfloat16}, True),
    "amx_fp16": (("_is_amx_tile_supported", "_is_amx_fp16_supported"), {torch.bfloat16, torch.float16}, True),
}


@pytest.mark.parametrize("processor", FLAGS)
def test_what_a_processor_is_fast_at(processor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's flags decide; a version of torch that lacks one counts as a processor that does."""
    flags, dtypes, fuses = FLAGS[processor]
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported", "_is_amx_fp16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda name=name: name in flags, raising=False)
    monkeypatch.setattr(products.platform, "machine", lambda: "x86_64")
    assert products.fast_dtypes.__wrapped__() == dtypes
    monkeypatch.setattr(products, "fast_dtypes", lambda: dtypes)
    assert products.has_fast_fused_attention.__wrapped__() == fuses
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported", "_is_amx_fp16_supported"):
        monkeypatch.delattr(torch.cpu, name, raising=False)
    monkeypatch.setattr(products, "fast_dtypes", products.fast_dtypes)
    assert not products.has_fast_fused_attention.__wrapped__()
    query = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)
    assert products.product_dtype(query, 1 << 30) == (torch.bfloat16 if dtypes else torch.float32)
    assert products.product_dtype(query, 1 << 10) == products.product_dtype(query.to("meta"), 1 << 30) == torch.float32


def test_what_fused_attention_cannot_take(fast: list[torch.Tensor]) -> None:
    """Numbers of a mask, which may be too large for bfloat16, softcap, dropout, a table of values: as ever."""
    inputs = make_inputs(1, 2, 50, 50, 16, num_rows=9, rel_value=True, dtype=torch.bfloat16, seed=3)
    numbers = torch.zeros(50, 50).masked_fill(torch.arange(50) > 20, torch.finfo(torch.float32).min)
    with torch.no_grad():
        for arguments in ({"attn_mask": numbers}, {"softcap": 5.0}, {"dropout_p": 0.1}, {"rel_value": inputs.rel_value}):
            fused_relative_attention(*inputs[:4], implementation="blockwise", **arguments)  # type: ignore[arg-type]
    assert not fast
