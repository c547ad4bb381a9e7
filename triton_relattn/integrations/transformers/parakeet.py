"""Parakeet's encoder, a FastConformer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.parakeet import modeling_parakeet as stock
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ...positions import RelativePositions
from ..arguments import StockArguments
from ..transformer_xl import attend
from .encoder import Encoder
from .heads import attend_evenly, join_heads, query_key_value, refuse_weights, split_heads


class ParakeetEncoderAttention(StockArguments, stock.ParakeetEncoderAttention):
    """(q_i + u) . k_j + (q_i + v) . R[j - i], both scaled; R, a row per distance and head, projected sinusoids."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, N, C), position_embeddings (B, 2N - 1, C) or one for all, (1, 2N - 1, C).

        attention_mask: bool, (B, 1, 1, N), False of padding, which is hidden both as key and as query; or (B, 1, N, N).
        """
        refuse_weights(kwargs)
        query, key, value = query_key_value(self, hidden_states)
        rel_keys = split_heads(self.relative_k_proj(position_embeddings), self.head_dim)
        last = query.shape[2] - 1
        out = attend(
            query,
            key,
            value,
            rel_keys,
            self.bias_u,
            self.bias_v,
            RelativePositions(-last, last),
            self.scaling,
            attn_mask=attention_mask,
            dropout_p=self.attention_dropout if self.training else 0.0,
            enable_gqa=True,
        )
        if attention_mask is not None:  # Nemotron H Omni reads a row of padding
            attends = attention_mask.mT if attention_mask.shape[2] == 1 else attention_mask.any(-1, keepdim=True)
            query = (query + self.bias_u[:, None]).to(query.dtype)
            key, value = (stock.repeat_kv(each, self.num_key_value_groups) for each in (key, value))
            out = torch.where(attends, out, attend_evenly(query, key, value, self.scaling))
        return self.o_proj(join_heads(out)), None


class ParakeetEncoder(Encoder, stock.ParakeetEncoder):
    """Encoder whose mask stays (B, 1, 1, N); all sequences have one table of positions unless dropout makes them differ."""

    attention = ParakeetEncoderAttention
    mask_function = None

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_features: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        output_attention_mask: bool = True,
        **kwargs: Any,
    ) -> Any:
        """As the stock class: input_features (B, T, mel), attention_mask (B, T)."""
        hidden_states = self.subsampling(input_features, attention_mask) * self.input_scale
        positions_differ = self.training and self.dropout_positions > 0
        position_embeddings = self.encode_positions(hidden_states if positions_differ else hidden_states[:1])
        hidden_states = nn.functional.dropout(hidden_states, self.dropout, self.training)
        position_embeddings = nn.functional.dropout(position_embeddings, self.dropout_positions, self.training)

        output_mask = None
        if attention_mask is not None:
            output_mask = self._get_output_attention_mask(attention_mask, target_length=hidden_states.shape[1])
        mask = None if output_mask is None else output_mask[:, None, None, :]
        for layer in self.layers:
            skipped = self.training and self.layerdrop > 0 and bool(torch.rand([]) < self.layerdrop)
            if not skipped:
                hidden_states = layer(hidden_states, attention_mask=mask, position_embeddings=position_embeddings, **kwargs)

        return stock.ParakeetEncoderModelOutput(
            last_hidden_state=hidden_states,
            attention_mask=output_mask.int() if output_mask is not None and output_attention_mask else None,
        )


CLASSES = {
    stock.ParakeetEncoderAttention: ParakeetEncoderAttention,
    stock.ParakeetEncoder: ParakeetEncoder,
}
