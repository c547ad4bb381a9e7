"""Code of a user who runs mypy in strict mode. Wrong lines are marked, and mypy complains about a mark without an error."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from triton_relattn import (
    RelativePositions,
    can_run_triton,
    fused_relative_attention,
    fused_relative_attention_varlen,
    merge_attention,
    tables,
)
from triton_relattn.integrations.transformers import disable, enable
from triton_relattn.nn import RelativeAttention, RelativeMultiheadAttention, RelativePositionTable, encodings
from triton_relattn.plots import attention_maps
from triton_relattn.testing import make_inputs


def functions(query: Tensor, table: Tensor, wanted: bool) -> Tensor:
    out: Tensor = fused_relative_attention(query, query, query, table)
    out = fused_relative_attention(query, query, query, table, return_lse=False, positions=RelativePositions(-2, 2))
    both: tuple[Tensor, Tensor] = fused_relative_attention(query, query, query, table, window_size=None, return_lse=True)
    either: Tensor | tuple[Tensor, Tensor] = fused_relative_attention(query, query, query, table, return_lse=wanted)
    out = fused_relative_attention(query, query, query, table, return_lse=True)  # type: ignore[assignment]
    out = fused_relative_attention(query, query, query, table, return_lse=wanted)  # type: ignore[assignment]
    out, lse = merge_attention(*both, *both)
    return out if isinstance(either, Tensor) and can_run_triton(query, query) else out + lse[..., None]


def packed(query: Tensor, starts: Tensor, longest: int) -> Tensor:
    out: Tensor = fused_relative_attention_varlen(
        query, query, query, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest
    )
    _, lse = fused_relative_attention_varlen(
        query, query, query, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest, return_lse=True
    )
    return out + lse.T[..., None]


def wrong(query: Tensor, starts: Tensor) -> None:
    fused_relative_attention(query, query, query, causal=True)  # type: ignore[call-overload]
    fused_relative_attention(query, query, query, window_size=3)  # type: ignore[call-overload]
    fused_relative_attention(query, query, query, None, starts)  # type: ignore[call-overload]
    fused_relative_attention_varlen(query, query, query, cu_seqlens_q=starts)  # type: ignore[call-overload]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = RelativeMultiheadAttention.shaw(16, 2, max_distance=4, batch_first=True)
        self.plain = RelativeAttention(encodings.shaw(8, 4), window_size=(3, 0))
        self.table = RelativePositionTable(RelativePositions(-4, 4), 8)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.attention.forward(x, x, x, key_lengths=torch.tensor([3]))
        return output


def others(model: nn.Module, query: Tensor, table: Tensor) -> dict[str, str]:
    bias: Tensor = tables.alibi_bias(2, -7, 0)
    attention_maps(query, query, table, rel_bias=bias).savefig("maps.png")
    made: Tensor = make_inputs(1, 2, 3, 3, 8, num_rows=5, dtype=torch.float32, seed=0).query
    replaced: dict[str, str] = enable(model)
    disable(model)
    return replaced if made.any() else {}
