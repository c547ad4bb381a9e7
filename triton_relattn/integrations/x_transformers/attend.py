"""Attention of x-transformers, once queries, keys and values are there."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import softmax
from x_transformers import attend as stock

from ...functional import fused_relative_attention
from .bias import Bias, dense

MORE = (
    *("pre_softmax_talking_heads", "post_softmax_talking_heads", "pre_scale_post_talking_heads", "selective", "cog_signed"),
    *("l2_distance", "add_zero_kv", "head_learned_sink", "cope", "inverted_attention", "flash_pack_seq"),
)
"""Settings of stock attention that are more than softmax((q . k) scale + bias)."""


class Intermediates(stock.Intermediates):
    """Intermediates without weights, which are never made: to ask for them is an error, where they would be missed silently."""


def _missing(_: Any) -> Any:
    raise ValueError("attention weights, Nq x Nk numbers, are never made by an enabled model: disable(model) first")


for name in ("qk_similarities", "pre_softmax_attn", "post_softmax_attn"):
    setattr(Intermediates, name, property(_missing, lambda self, value: None))


class Attend(stock.Attend):
    """softmax((q . k) scale + bias) v with a bias by distance; all else is stock attention."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        attn_bias: Any = None,
        *args: Any,
        causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        """q (B, H, Nq, D), k (B, Hk, Nk, D), v (B, Hk, Nk, Dv), mask bool, True where a query may attend."""
        # A row_mask, which attention always hands on, is for inverted attention alone. All else asks for more than is done here.
        more = {**kwargs, "row_mask": None}
        asked = [each for each in (*args, *more.values()) if each is not None]
        if not isinstance(attn_bias, Bias) or asked or not self._is_plain():
            given = {**kwargs, "causal": causal} if causal is not None else kwargs
            out: tuple[torch.Tensor, Any] = super().forward(q, k, v, mask, dense(attn_bias), *args, **given)
            return out
        groups = q.shape[1] // k.shape[1]
        if groups > 1 and k.shape[1] > 1:  # query head h has the key head h modulo their number, not one of successive heads
            k, v = (each.repeat(1, groups, 1, 1) for each in (k, v))
        attended = fused_relative_attention(
            q,
            k,
            v,
            attn_mask=mask[:, None, None] if mask is not None and mask.dim() == 2 else mask,
            is_causal=self.causal if causal is None else causal,
            query_offset=k.shape[2] - q.shape[2],
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scale,
            softcap=self.logit_softclamp_value if self.softclamp_logits else None,
            enable_gqa=True,
            **attn_bias.term,
        )
        return attended, Intermediates()

    def _is_plain(self) -> bool:
        """Whether it is a softmax of the logits, and no more."""
        is_softmax = getattr(self.attn_fn, "func", None) is softmax and self.attn_fn.keywords["dim"] == -1
        return is_softmax and not any(getattr(self, each, None) for each in MORE)


CLASSES = {stock.Attend: Attend}
