"""Small calls whose arguments tests change: padded and packed, of leaves that have gradients, and small modules of each kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.samples import with_different_strides
from triton_relattn import RelativePositions, fused_relative_attention, fused_relative_attention_varlen
from triton_relattn.nn import RelativeMultiheadAttention
from triton_relattn.testing import make_inputs

zeros, lengths, Positions = torch.zeros, torch.tensor, RelativePositions
Changes = dict[str, Any]
CAUSAL: Changes = {"is_causal": True}
LAYOUT = ".transpose(1, 2) makes them (batch, heads, length, width)"


def call(**changes: Any) -> Any:
    """The operator on (B, H, Nq, Nk, D, Dv) = (2, 3, 5, 7, 8, 4), all strides different, with some arguments changed."""
    inputs = with_different_strides(make_inputs(2, 3, 5, 7, 8, 4, num_rows=9, dtype=torch.float32, seed=0))
    arguments = {"query": inputs.query, "key": inputs.key, "value": inputs.value, "rel_key": inputs.rel_key}
    return fused_relative_attention(**{**arguments, **changes})


def call_varlen(**changes: Any) -> Any:
    """The packed operator on sequences of 2, 0 and 3 queries and 4, 1 and 2 keys, (Hq, Hk, D, Dv) = (3, 3, 8, 4)."""
    inputs = make_inputs(1, 3, 5, 7, 8, 4, num_rows=9, dtype=torch.float32, seed=0)
    arguments: Changes = {name: getattr(inputs, name)[0].transpose(0, 1) for name in ("query", "key", "value")}
    arguments |= {"rel_key": inputs.rel_key, "max_seqlen_q": 3, "max_seqlen_k": 4}
    arguments |= {"cu_seqlens_q": lengths([0, 2, 2, 5]), "cu_seqlens_k": lengths([0, 4, 5, 7], dtype=torch.int32)}
    return fused_relative_attention_varlen(**{**arguments, **changes})


def says(message: str, *parts: str) -> None:
    """Assert that a message contains every part; parts are separated by " | "."""
    for part in " | ".join(parts).split(" | "):
        assert part in message, f"{part!r} is not in {message!r}"


def refused(function: Any, changes: Changes, error: type[Exception], parts: str) -> None:
    with pytest.raises(error) as raised:
        function(**changes)
    says(str(raised.value), parts)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return zeros(*shape, dtype=dtype, device="meta")


def qkv(batch: int, heads: int, length: int, keys: int | None = None, key_heads: int | None = None) -> Changes:
    """Query, key and value of these sizes; pass heads and lengths swapped for the layout (batch, length, heads, width)."""
    keys, key_heads = length if keys is None else keys, heads if key_heads is None else key_heads
    return {
        "query": zeros(batch, heads, length, 8),
        "key": zeros(batch, key_heads, keys, 8),
        "value": zeros(batch, key_heads, keys, 4),
    }


def attend_out(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    """Only the output, from the default implementation."""
    out: Any = fused_relative_attention(*tensors, **options)
    return out


def four(*lengths: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """query, key, value and a table of 9 rows, all requiring gradients."""
    num_queries, num_keys = lengths or (10, 10)
    inputs = make_inputs(2, 2, num_queries, num_keys, 8, num_rows=9, dtype=dtype, seed=0)
    return [tensor.requires_grad_() for tensor in inputs[:4] if tensor is not None]


WIDTH, HEADS, LENGTH = 24, 4, 11
KINDS: dict[str, Any] = {
    "none": lambda **o: RelativeMultiheadAttention(WIDTH, HEADS, encoding=None, **o),
    "shaw": lambda **o: RelativeMultiheadAttention.shaw(WIDTH, HEADS, 4, **o),
    "shaw_keys": lambda **o: RelativeMultiheadAttention.shaw(WIDTH, HEADS, 4, values=False, per_head=True, **o),
    "music_transformer": lambda **o: RelativeMultiheadAttention.music_transformer(WIDTH, HEADS, LENGTH, **o),
    "general": lambda **o: RelativeMultiheadAttention.general(WIDTH, HEADS, LENGTH, **o),
    "transformer_xl": lambda **o: RelativeMultiheadAttention.transformer_xl(WIDTH, HEADS, **o),
    "t5": lambda **o: RelativeMultiheadAttention.t5(WIDTH, HEADS, 8, 20, **o),
    "alibi": lambda **o: RelativeMultiheadAttention.alibi(WIDTH, HEADS, learned=True, **o),
    "fixed_alibi": lambda **o: RelativeMultiheadAttention.alibi(WIDTH, HEADS, **o),
}


def module(kind: str, **options: Any) -> RelativeMultiheadAttention:
    torch.manual_seed(0)
    made: RelativeMultiheadAttention = KINDS[kind](**{"batch_first": True, "dtype": torch.float64, **options})
    return made
