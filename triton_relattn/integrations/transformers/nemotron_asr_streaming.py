"""The encoder of Nemotron ASR streaming, a FastConformer that sees chunks of frames."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.nemotron_asr_streaming import modeling_nemotron_asr_streaming as stock

from ...positions import RelativePositions
from ..arguments import StockArguments, argument_name
from ..transformer_xl import attend
from .chunks import Chunks
from .encoder import Encoder
from .heads import join_heads, query_key_value, refuse_weights, split_heads
from .masks import PADDING

CACHE = argument_name(stock.NemotronAsrStreamingEncoderBlock.forward, "cache")


class NemotronAsrStreamingEncoderAttention(StockArguments, stock.NemotronAsrStreamingEncoderAttention):
    """(q_i + u) . k_j + (q_i + v) . R[j - i], both scaled; a frame sees its chunk and some chunks before it.

    Each chunk of queries is a batch entry, with a copy of the keys that it sees. R, a row per distance and head, is made of
    sinusoids; only the rows of distances that are seen are projected.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        chunks: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, Nq, C), position_embeddings (B, 2Nk - 1, C), attention_mask bool (B, 1, 1, Nk), True of frames."""
        refuse_weights(kwargs)
        query, key, value = query_key_value(self, hidden_states)
        cut = Chunks(chunks, cache, self.layer_idx, query.shape[2])
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if attention_mask is None:
            attention_mask = key.new_ones(len(key), 1, 1, key.shape[2], dtype=torch.bool)
        states = cut.of_queries(query), cut.of_keys(key), cut.of_keys(value), cut.of_keys(attention_mask.mT).mT
        query, key, value, mask = (each.flatten(0, 1) for each in states)

        differ = self.training and self.config.dropout_positions > 0
        last = (position_embeddings.shape[1] - 1) // 2
        ends = max(-last, 1 - cut.seen), min(last, cut.size - 1)
        rows = position_embeddings[slice(None) if differ else slice(1), last + ends[0] : last + ends[1] + 1]
        rel_keys = split_heads(self.relative_k_proj(rows), self.head_dim)
        out = attend(
            query,
            key,
            value,
            rel_keys,
            self.bias_u,
            self.bias_v,
            RelativePositions(*ends),
            self.scaling,
            attn_mask=mask,
            query_offset=cut.left * cut.size,
            dropout_p=self.attention_dropout if self.training else 0.0,
            enable_gqa=True,
        )
        return self.o_proj(join_heads(cut.joined(out))), None


class NemotronAsrStreamingEncoderBlock(StockArguments, stock.NemotronAsrStreamingEncoderBlock, hands_on=True):
    """Layer in which frames that see no real frame are set to zero before the convolution. The stock encoder finds these frames
    in its (B, 1, N, N) mask."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        all_masked_rows: torch.Tensor | None = None,
        cache: Any = None,
        chunks: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """hidden_states (B, Nq, C), attention_mask bool (B, 1, 1, Nk)."""
        if attention_mask is not None:
            cut = Chunks(chunks, cache, self.self_attn.layer_idx, hidden_states.shape[1])
            sees = cut.of_keys(attention_mask.mT).any(3, keepdim=True).expand(-1, -1, -1, cut.size, -1)
            all_masked_rows = ~cut.joined(sees.flatten(0, 1))[..., 0]
        given = {"attention_mask": attention_mask, "all_masked_rows": all_masked_rows, CACHE: cache}
        out: torch.Tensor = super().forward(hidden_states, **given, chunks=chunks, **kwargs)
        return out


class NemotronAsrStreamingEncoder(StockArguments, Encoder, stock.NemotronAsrStreamingEncoder, hands_on=True):
    """Encoder with a mask of padding only; it passes the chunks, which the stock encoder puts in a mask (B, 1, N, N), to its
    attention."""

    attention = NemotronAsrStreamingEncoderAttention
    mask_function = PADDING

    def forward(self, num_lookahead_tokens: int | None = None, **kwargs: Any) -> Any:
        left, right = self._resolve_attn_context(num_lookahead_tokens)
        if left < 0:
            raise ValueError("sliding_window must be positive: without a limit, all chunks see all others; call disable(model)")
        chunks = (right + 1, left // (right + 1))
        return super().forward(num_lookahead_tokens=num_lookahead_tokens, chunks=chunks, **kwargs)


CLASSES = {
    stock.NemotronAsrStreamingEncoderAttention: NemotronAsrStreamingEncoderAttention,
    stock.NemotronAsrStreamingEncoderBlock: NemotronAsrStreamingEncoderBlock,
    stock.NemotronAsrStreamingEncoder: NemotronAsrStreamingEncoder,
}
