"""Attention of x-transformers, once queries, keys and values are there."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import softmax
from x_transformers import attend as stock

from ...positions import RelativePositions
from ..in_place import InPlace
from ..operators import fused_relative_attention
from .biases import Bias

MORE = (
    *("pre_softmax_talking_heads", "post_softmax_talking_heads", "pre_scale_post_talking_heads", "selective", "cog_signed"),
    *("l2_distance", "add_zero_kv", "head_learned_sink", "cope", "inverted_attention", "flash_pack_seq"),
)
"""Settings of stock attention that are more than softmax((q . k) scale + bias)."""


class Intermediates(stock.Intermediates):
    """Intermediates whose weights stock attention computes when they are asked for."""

    make: Any = None


def _made(name: str) -> property:
    def get(self: Any) -> Any:
        return None if self.make is None else getattr(self.make(), name)

    return property(get, lambda self, value: None)


for name in ("qk_similarities", "pre_softmax_attn", "post_softmax_attn"):
    setattr(Intermediates, name, _made(name))


class Attend(InPlace, stock.Attend):
    """softmax((q . k) scale + bias) v with a bias by distance; all else is stock attention."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        attn_bias: Any = None,
        row_mask: Any = None,
        causal: bool | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """q (B, H, Nq, D), k (B, Hk, Nk, D), v (B, Hk, Nk, Dv), mask bool, True where a query may attend."""
        given = q, k, v, mask
        groups = q.shape[1] // k.shape[1]
        if groups > 1 and k.shape[1] > 1:  # query head h has the key head h modulo their number, not one of successive heads
            k, v = (states.repeat(1, groups, 1, 1) for states in (k, v))
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
        intermediates = Intermediates()
        bias = attn_bias.dense
        intermediates.make = lambda: super(Attend, self).forward(*given, attn_bias=bias(), row_mask=row_mask, causal=causal)[1]
        return attended, intermediates

    def serves(self, attn_bias: Any = None) -> bool:  # type: ignore[override]
        return isinstance(attn_bias, Bias) and self._is_plain()

    @staticmethod
    def counted(mask: torch.Tensor) -> torch.Tensor | None:
        return None

    def pairs(self, q: torch.Tensor, k: torch.Tensor) -> int:  # type: ignore[override]
        return q.shape[:3].numel() * k.shape[2]

    @staticmethod
    def num_positions(given: dict[str, Any]) -> int:
        return given["q"].shape[2]  # type: ignore[no-any-return]

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        heads, width = 4, 8
        q, k, v = (torch.randn(batch, heads, length, width) for _ in range(3))
        positions = RelativePositions(1 - length, length - 1)
        bias = Bias(length, length, rel_bias=torch.randn(heads, positions.num_rows), positions=positions)
        return {"q": q, "k": k, "v": v, "mask": real, "attn_bias": bias}

    def _is_plain(self) -> bool:
        """Return whether it is a softmax of the logits, and no more."""
        is_softmax = getattr(self.attn_fn, "func", None) is softmax and self.attn_fn.keywords["dim"] == -1
        return is_softmax and not any(getattr(self, setting, None) for setting in MORE)
