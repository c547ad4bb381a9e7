"""Packed sequences are a loop over sequences, and the batch padded to one length."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.cases import ALL_FEATURES, by_sequence, random_varlen_case, unpacked
from tests.conftest import cut_blocks
from tests.oracle import assert_same, attend, attend_varlen, quick_and_slow, results_of
from triton_relattn import fused_relative_attention_varlen
from triton_relattn.testing import Inputs, dropout_mask, make_inputs

IMPLEMENTATIONS = ("blockwise", "reference")
FURTHER_TABLES: dict[str, Any] = {"rel_value": True, "rel_bias": True, "rel_p2c": True}


def expected_results(inputs: Inputs, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the results of each sequence computed by itself, with the dropout that follows manual_seed(0)."""
    parts = unpacked(inputs, arguments)
    longest = max(max(part.inputs.query.shape[2], part.inputs.key.shape[2]) for part in parts)
    torch.manual_seed(0)
    keep = dropout_mask(len(parts), inputs.query.shape[1], longest, longest, arguments.get("dropout_p", 0.0))
    return by_sequence(inputs, arguments, keep)


@pytest.mark.parametrize("seed", quick_and_slow(40, 500))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_random_combination(implementation: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any lengths, among them 0, and any arguments; dropout is that of the batch entries."""
    choose = random.Random(-1 - seed)
    cut_blocks(monkeypatch, *map(choose.choice, ((1, 7, 16, 64, 128), (1, 1 << 9, 1 << 13, 1 << 18), (1, 3, 8, 64))))
    inputs, arguments = random_varlen_case(seed, features=ALL_FEATURES)
    results = results_of(implementation, inputs, attend_varlen, **arguments)
    expected = expected_results(inputs, arguments)
    assert results.keys() == expected.keys()
    for name, result in results.items():
        assert_same(name, result, expected[name])


def packed_inputs(total_q: int, total_k: int, dtype: torch.dtype = torch.float64) -> Inputs:
    inputs = make_inputs(
        1, 4, total_q, total_k, 8, 5, num_rows=9, key_heads=2, rel_width=3, **FURTHER_TABLES, dtype=dtype, seed=1
    )
    packed = {name: getattr(inputs, name)[0].transpose(0, 1) for name in ("query", "key", "value", "d_out", "rel_query")}
    return inputs._replace(**packed, d_lse=inputs.d_lse[0])


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_the_padded_batch(implementation: str, dropout_p: float, block_size: None) -> None:
    """fused_relative_attention with key_lengths, of the same sequences in a padded batch, drops the same."""
    lengths_q, lengths_k = (7, 0, 33, 20), (11, 5, 0, 40)
    starts_q, starts_k = (torch.tensor([0, *lengths]).cumsum(0) for lengths in (lengths_q, lengths_k))
    inputs = packed_inputs(sum(lengths_q), sum(lengths_k))
    offsets = torch.tensor([0, 3, -2, 20])
    arguments: dict[str, Any] = {"enable_gqa": True, "is_causal": True, "query_offset": offsets, "dropout_p": dropout_p}
    arguments |= {"rel_scale": 0.3, "implementation": implementation}
    torch.manual_seed(2)
    out, lse = attend_varlen(
        *inputs[:4], **inputs.terms(), cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=33, max_seqlen_k=40, **arguments
    )

    def padded(tensor: torch.Tensor, starts: torch.Tensor, longest: int) -> torch.Tensor:
        batch = tensor.new_zeros(len(starts) - 1, tensor.shape[1], longest, tensor.shape[2])
        for b in range(len(starts) - 1):
            batch[b, :, : starts[b + 1] - starts[b]] = tensor[starts[b] : starts[b + 1]].transpose(0, 1)
        return batch

    query, rel_query = (padded(tensor, starts_q, 33) for tensor in (inputs.query, inputs.terms()["rel_query"]))
    key, value = (padded(tensor, starts_k, 40) for tensor in (inputs.key, inputs.value))
    terms = {**inputs.terms(), "rel_query": rel_query}
    torch.manual_seed(2)
    lengths = torch.tensor(lengths_k)
    expected_out, expected_lse = attend(query, key, value, inputs.rel_key, **terms, key_lengths=lengths, **arguments)
    for b, length in enumerate(lengths_q):
        queries = slice(int(starts_q[b]), int(starts_q[b + 1]))
        assert_same("out", out[queries], expected_out[b, :, :length].transpose(0, 1))
        assert_same("lse", lse[:, queries], expected_lse[b, :, :length])
    assert (lse[:, 7:40] == -torch.inf).all() and not out[7:40].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, None])
def test_layout_of_the_results(implementation: str | None, dtype: torch.dtype) -> None:
    """(total, heads, width), contiguous as the query is; lse (heads, total) in float32."""
    inputs = packed_inputs(12, 12, dtype)
    query, key, value = (tensor.contiguous() for tensor in inputs[:3] if tensor is not None)
    starts = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    packing: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 7, "max_seqlen_k": 7}
    out, lse = attend_varlen(query, key, value, enable_gqa=True, **packing, implementation=implementation)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((12, 4, 5), dtype, (4, 12), torch.float32)
    assert implementation == "reference" or out.is_contiguous()
    alone = fused_relative_attention_varlen(query, key, value, enable_gqa=True, **packing, implementation=implementation)
    assert isinstance(alone, torch.Tensor) and torch.equal(alone, out)


@pytest.mark.parametrize("starts", [[0], [0, 0], [0, 0, 0]], ids=["no_sequence", "one_empty", "two_empty"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing(implementation: str, starts: list[int]) -> None:
    """No sequences, or only empty ones: right shapes, zero gradients."""
    inputs = packed_inputs(0, 0)
    bounds = torch.tensor(starts)
    packing: dict[str, Any] = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 0, "max_seqlen_k": 0}
    results = results_of(implementation, inputs, attend_varlen, enable_gqa=True, **packing)
    assert results["out"].shape == (0, 4, 5) and results["lse"].shape == (4, 0)
    for name in ("rel_key", "rel_value", "rel_bias"):
        assert results[f"d_{name}"].shape == getattr(inputs, name).shape and not results[f"d_{name}"].any()


def test_sequences_do_not_see_each_other(block_size: None) -> None:
    """NaN in one sequence changes no other, nor what those give to gradients that are not shared."""
    starts = torch.tensor([0, 20, 57, 60])
    packing: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 37, "max_seqlen_k": 37}
    inputs = packed_inputs(60, 60, torch.float32)
    spoilt = {name: getattr(inputs, name).clone() for name in ("query", "key", "value")}
    for tensor in spoilt.values():
        tensor[20:57] = torch.nan
    results, expected = (
        results_of("blockwise", each, attend_varlen, enable_gqa=True, **packing) for each in (inputs._replace(**spoilt), inputs)
    )
    for name in ("out", "d_query", "d_key", "d_value", "d_rel_query"):
        assert results[name][20:57].isnan().any(), name
        results[name][20:57] = expected[name][20:57]
        assert torch.equal(results[name], expected[name]), name
