"""Lengths, windows and chunks in place of masks, for models of other libraries; tests/libraries has the models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tolerance import assert_near
from triton_relattn import RelativePositions, fused_relative_attention
from triton_relattn.integrations import seen


@pytest.mark.parametrize("chunk", [1, 3, 4])
@pytest.mark.parametrize(("left", "right"), [(5, 2), (-1, 0), (0, -1), (-1, -1), (100, 3)])
@pytest.mark.parametrize("first", [0, 6])
@pytest.mark.parametrize("queries_of_a_call", [1, 8, 512])
def test_what_is_seen(
    chunk: int, left: int, right: int, first: int, queries_of_a_call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts with windows, lengths and small masks are one call with a mask for all pairs."""
    monkeypatch.setattr(seen, "QUERIES", queries_of_a_call)
    torch.manual_seed(0)
    queries, keys = 17, 17 + first
    query, key, value = (torch.randn(2, 2, each, 4, dtype=torch.float64) for each in (queries, keys, keys))
    table = torch.randn(2 * keys - 1, 4, dtype=torch.float64)
    positions = RelativePositions(1 - keys, keys - 1)

    def operator(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **masks: Any) -> torch.Tensor:
        out: Any = fused_relative_attention(query, key, value, table, positions=positions, **masks)
        return out  # type: ignore[no-any-return]

    i, j = first + torch.arange(queries)[:, None], torch.arange(keys)
    begin = i // chunk * chunk
    mask = (left < 0) | (j >= begin - left)
    mask = mask & ((right < 0) | (j < begin + chunk + right))
    lengths = torch.tensor([keys, keys - 4])
    real = j < lengths[:, None]
    expected = operator(query, key, value, attn_mask=mask & real[:, None, None], query_offset=first)
    for told in ({"lengths": lengths}, {"real": real}):
        given = seen.Seen(**told, left=left, right=right, chunk=chunk, first=first)
        assert_near("attend", given.attend(operator, query, key, value), expected)
