"""The forward that both kinds of relative attention of fairseq2 have: biases, layouts of batches, and the call."""

from __future__ import annotations

from typing import Any

import torch
from fairseq2.models.transformer import attention_bias as stock

from ...functional import fused_relative_attention, fused_relative_attention_varlen
from ..arguments import StockArguments


class RelativeSDPA(StockArguments):
    """Mixin: the forward. Subclasses have ``term(query, length)``: the query, and the operator's arguments that make the term."""

    def forward(
        self: Any,
        q: torch.Tensor,
        q_layout: Any,
        k: torch.Tensor,
        k_layout: Any,
        v: torch.Tensor,
        bias_cache: Any,
        *,
        needs_weights: bool = False,
    ) -> Any:
        """q (B, Nq, H, D), k (B, Nk, H, D), v (B, Nk, H, Dv); packed (total, H, D), which stock attention refuses."""
        if needs_weights:
            return super().forward(q, q_layout, k, k_layout, v, bias_cache, needs_weights=True)  # type: ignore[misc]
        if q_layout.packed or k_layout.packed:
            return self._attend_packed(q, q_layout, k, k_layout, v), None
        query, key, value = (each.transpose(1, 2) for each in (q, k, v))
        masks = seen(self.bias, q_layout.width)
        if masks is None or (k_layout.padded and list(q_layout.seq_lens) != list(k_layout.seq_lens)):
            masks = {"attn_mask": added(self.bias, q, q_layout, k_layout, bias_cache)}
        elif k_layout.padded:
            masks["key_lengths"] = k_layout.seq_lens_pt
        query, term = self.term(query, key.shape[2])
        out: Any = fused_relative_attention(query, key, value, query_offset=key.shape[2] - query.shape[2], **masks, **term)
        return out.transpose(1, 2), None

    def _attend_packed(
        self: Any, q: torch.Tensor, q_layout: Any, k: torch.Tensor, k_layout: Any, v: torch.Tensor
    ) -> torch.Tensor:
        masks = seen(self.bias, q_layout.max_seq_len)
        if masks is None or list(q_layout.seq_lens) != list(k_layout.seq_lens):
            raise ValueError(
                "packed batches need IdentityBias or CausalAttentionBias, and keys of the same lengths as queries; "
                f"got {self.bias}, {list(q_layout.seq_lens)} and {list(k_layout.seq_lens)}"
            )
        query, term = self.term(q, k_layout.max_seq_len)
        starts, longest = q_layout.seq_begin_indices_pt, q_layout.max_seq_len
        lengths: dict[str, Any] = {
            "cu_seqlens_q": starts,
            "cu_seqlens_k": starts,
            "max_seqlen_q": longest,
            "max_seqlen_k": longest,
        }
        out: torch.Tensor = fused_relative_attention_varlen(query, k, v, **lengths, **masks, **term)
        return out


def seen(bias: Any, queries: int) -> dict[str, Any] | None:
    """The operator's masks that say what bias says, for sequences of so many queries; None: no masks do."""
    if isinstance(bias, stock.IdentityBias):
        return {}
    if isinstance(bias, stock.CausalAttentionBias):
        width = bias.attn_window_len
        # A window that is as long as the queries are is none in the stock class, though there may be more keys.
        return {"window_size": (-1 if width is None or width >= queries else width - 1, 0)}
    return None


def added(bias: Any, q: torch.Tensor, q_layout: Any, k_layout: Any, bias_cache: Any) -> torch.Tensor | None:
    """The tensor that stock attention adds to the logits, (1 or B, 1 or H, Nq, Nk)."""
    tensor: torch.Tensor | None = stock.maybe_get_attention_bias_tensor(bias, q, q_layout, k_layout, bias_cache)
    return None if tensor is None else tensor.reshape((1,) * (4 - tensor.dim()) + tensor.shape)
