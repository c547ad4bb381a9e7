"""Jagged nested tensors: each sequence as if it were alone, and errors instead of other sequences' rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.check import attend
from tests.tolerance import assert_near
from triton_relattn import RelativePositions, fused_relative_attention


def jagged(width: int, seed: int, lengths: tuple[int, ...] = (5, 9, 1)) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A nested tensor (B, H, N, D), and its sequences (H, N, D), as leaves."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(length, 2, width, generator=generator, dtype=torch.float64).requires_grad_() for length in lengths]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged).transpose(1, 2), parts


@pytest.mark.parametrize("causal", [False, True])
def test_nested_sequences_are_computed_one_by_one(causal: bool) -> None:
    """out, lse and all gradients equal those of separate calls."""
    table = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    (query, queries), (key, keys), (value, values) = jagged(8, 1), jagged(8, 2), jagged(6, 3)
    leaves, options = [*queries, *keys, *values, table], {"is_causal": causal, "positions": RelativePositions(-4, 4)}
    out, lse = fused_relative_attention(query, key, value, table, return_lse=True, **options)  # type: ignore[call-overload]
    assert out.is_nested and out.shape[0] == 3 and out.shape[3] == 6
    loss = torch.cat([sequence.flatten() for sequence in out.transpose(1, 2).unbind()]).square().sum()
    expected_loss = torch.zeros((), dtype=torch.float64)
    for number, parts in enumerate(zip(queries, keys, values, strict=True)):
        expected, expected_lse = attend(*(sequence.transpose(0, 1)[None] for sequence in parts), table, **options)
        assert_near("out", out.transpose(1, 2).unbind()[number], expected[0].transpose(0, 1))
        assert_near("lse", lse.transpose(1, 2).unbind()[number], expected_lse[0].T)
        expected_loss = expected_loss + expected.square().sum()
    for found, exact in zip(*(torch.autograd.grad(total, leaves) for total in (loss, expected_loss)), strict=True):
        assert_near("gradient", found, exact)


def test_nested_tensors_that_are_refused() -> None:
    """Inputs that are not all nested, lengths that differ between tensors, and gaps between sequences, which would read other
    rows."""
    (query, _), (other, _), (same, _) = jagged(8, 1), jagged(8, 2, (9, 5, 1)), jagged(8, 3)
    table, plain = torch.randn(9, 8, dtype=torch.float64), torch.randn(3, 2, 9, 8, dtype=torch.float64)
    fused_relative_attention(query, query, same, table, rel_query=same)
    cache, lengths = torch.randn(2, 6, 2, 8, dtype=torch.float64), torch.tensor([3, 6])
    holes = torch.nested.narrow(cache, 1, torch.zeros(2, dtype=torch.int64), lengths, layout=torch.jagged)
    wrong: list[tuple[Sequence[torch.Tensor], dict[str, Any], type[Exception], str]] = [
        ((query, plain, query), {}, TypeError, "key must be jagged as query is"),
        ((query.transpose(1, 2), query, query), {}, TypeError, "query must be jagged as query is"),
        ((query, query, query), {"key_lengths": torch.tensor([1, 1, 1])}, TypeError, "no attn_mask and no key_lengths"),
        ((query, query, other), {}, ValueError, r"value's sequences must be as long as key's, got \[9, 5, 1\] and \[5, 9, 1\]"),
        ((query, query, query), {"rel_query": other}, ValueError, "rel_query's sequences must be as long as query's"),
        ((holes.transpose(1, 2), query, query), {}, ValueError, "query has holes between its sequences"),
    ]
    for tensors, options, error, message in wrong:
        with pytest.raises(error, match=message):
            attend(*tensors, table, implementation=None, **options)
