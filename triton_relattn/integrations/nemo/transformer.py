"""NeMo's ``TransformerEncoder`` with relative positions, whose stock attention is torch's FlexAttention."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from nemo.collections.asr.modules import transformer_encoder as stock

from ...positions import RelativePositions
from ..in_place import InPlace
from ..libraries import WithFunctions, with_globals
from ..masks import ChunkedWindow
from ..operators import attend, join_heads, split_heads


def flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_mask: Any = None, score_mod: Any = None
) -> Any:
    """Call torch's FlexAttention; with gradients, which it has none of on a CPU, compute it with plain operations."""
    if not torch.is_grad_enabled():
        return stock.flex_attention(query, key, value, block_mask=block_mask, score_mod=score_mod)
    scores = query @ key.mT * query.shape[-1] ** -0.5  # (B, H, Nq, Nk)
    pairs = torch.meshgrid(*(torch.arange(size, device=query.device) for size in scores.shape), indexing="ij")
    scores = scores if score_mod is None else score_mod(scores, *pairs)
    if block_mask is not None:
        scores = scores.masked_fill(~block_mask.mask_mod(*pairs), -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ value  # a query without keys gets 0


class MultiHeadAttention(InPlace):
    """((q_i + u) . k_j + (q_i + v) . R[j - i]) / sqrt(D); R, a row per distance and head, projected sinusoids."""

    fewest = 0  # the stock forward cannot train on a CPU
    stock_forward = with_globals(stock.MultiHeadAttention.forward, flex_attention=flex_attention)

    @staticmethod
    def applies(module: Any) -> bool:
        return module.self_attention_model == "rel_pos"  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor, block_mask: Any = None, pos_emb: torch.Tensor | None = None) -> torch.Tensor:
        """x (B, N, C), pos_emb (1, 2N - 1, C), the most distant past first; block_mask: a ChunkedWindow of the encoder."""
        length = x.shape[1]
        q, k, v = (split_heads(part, self.head_dim) for part in self.w_qkv(x).chunk(3, dim=-1))
        if self.qk_norm:
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        operator = functools.partial(
            attend,
            rel_keys=split_heads(self.linear_pos(pos_emb), self.head_dim),
            u=self.pos_bias_u.to(q.dtype),
            v=self.pos_bias_v.to(q.dtype),
            positions=RelativePositions(1 - length, length - 1),
        )
        out = operator(q, k, v) if block_mask is None else block_mask.attend(operator, q, k, v)
        return self.out_proj(join_heads(out))  # type: ignore[no-any-return]

    def serves(self, x: torch.Tensor, block_mask: Any = None, pos_emb: Any = None) -> bool:  # type: ignore[override]
        is_known = block_mask is None or isinstance(block_mask, ChunkedWindow)
        return is_known and pos_emb is not None and tuple(pos_emb.shape[:2]) == (1, 2 * x.shape[1] - 1)

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        given = {"x": torch.randn(batch, length, self.d_model), "pos_emb": torch.randn(1, 2 * length - 1, self.d_model)}
        return given if real is None else {**given, "block_mask": small_mask((real.sum(1), False), batch, 1, length, length)}


def small_mask(keys: tuple[torch.Tensor, bool], B: int, H: int, Q_LEN: int, KV_LEN: int, device: Any = None) -> ChunkedWindow:
    """Return the lengths, and whether the past alone is seen, in place of torch's BlockMask."""
    lengths, is_causal = keys
    mask = stock._make_padding_mod(lengths)
    mask = stock.and_masks(stock._make_causal_mod(), mask) if is_causal else mask
    sizes = {"B": B, "H": H, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN, "device": device or lengths.device}
    make = functools.partial(stock.create_block_mask, mask, **sizes)
    return ChunkedWindow(lengths, right=0 if is_causal else -1, make=make)


class TransformerEncoder(WithFunctions):
    """Encoder that passes lengths to its attention: the functions that make torch's BlockMask make arguments of small_mask."""

    methods = ("forward_internal",)
    functions: ClassVar[dict[str, Any]] = {
        "_make_causal_mod": lambda: True,
        "_make_padding_mod": lambda lengths: (lengths, False),
        "and_masks": lambda is_causal, keys: (keys[0], is_causal),
        "create_block_mask": small_mask,
    }

    applies = MultiHeadAttention.applies
