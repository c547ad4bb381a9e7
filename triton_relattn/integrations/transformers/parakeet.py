"""Parakeet's encoder, a FastConformer."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn import functional
from transformers.models.parakeet import modeling_parakeet as stock

try:
    from transformers.utils.generic import merge_with_config_defaults
    from transformers.utils.output_capturing import capture_outputs
except ImportError:  # before transformers 5.2
    from transformers.utils.generic import can_return_tuple as capture_outputs
    from transformers.utils.generic import check_model_inputs as merge_with_config_defaults

from ...positions import RelativePositions
from ..calls import is_graph
from ..compact import Compact, is_small
from ..operators import attend, join_heads, split_heads
from .base import Attention, Encoder, attend_evenly, attending, query_key_value
from .masks import Padding


class ParakeetAttention(Attention):
    """(q_i + u) . k_j + (q_i + v) . R[j - i], both scaled; R, a row per distance and head, projected sinusoids."""

    casts = ("position_embeddings",)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, N, C), position_embeddings (B or 1, 2N - 1, C), attention_mask bool (B, 1, 1 or N, N)."""
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
            attends = attending(attention_mask)
            query = (query + self.bias_u[:, None]).to(query.dtype)
            key, value = (states.repeat_interleave(self.num_key_value_groups, 1) for states in (key, value))
            out = torch.where(attends, out, attend_evenly(query, key, value, self.scaling))
        return self.o_proj(join_heads(out)), None

    def serves(self, attention_mask: Any = None) -> bool:  # type: ignore[override]
        """Return whether ours computes a call: a mask (B, 1, 1, N) of the user's hides keys alone, one of numbers is inverted."""
        is_bool = attention_mask is None or attention_mask.dtype == torch.bool
        return super().serves() and is_bool and (is_small(attention_mask) or attention_mask.shape[2] > 1)

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        states = torch.randn(batch, length, self.config.hidden_size)
        rows = shared_positions(torch.randn(1, 2 * length - 1, self.config.hidden_size), batch)
        return {"hidden_states": states, "position_embeddings": rows, "attention_mask": padding_mask(real)}


def shared_positions(position_embeddings: torch.Tensor, batch: int) -> Any:
    """Return positions (1, 2N - 1, C) that all sequences share, of which the stock encoder makes a copy each."""
    return Compact.of(position_embeddings, lambda small: small.expand(batch, -1, -1))


def padding_mask(real: torch.Tensor | None) -> Any:
    """Return the mask (B, 1, 1, N) of real frames (B, N); padding is hidden both as key and as query."""
    return None if real is None else Padding.of(real[:, None, None, :], lambda small: small & small.mT)


RETURNS_MASK = inspect.signature(stock.ParakeetEncoder.forward).parameters["output_attention_mask"].default


class ParakeetEncoder(Encoder):
    """Encoder whose mask stays (B, 1, 1, N); all sequences have one table of positions unless dropout makes them differ."""

    mask_function = None

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_features: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        output_attention_mask: bool | None = RETURNS_MASK,
        **kwargs: Any,
    ) -> Any:
        """As the stock class: input_features (B, T, mel), attention_mask (B, T)."""
        if is_graph():
            return inspect.unwrap(stock.ParakeetEncoder.forward)(
                self, input_features, attention_mask, output_attention_mask, **kwargs
            )
        hidden_states = self.subsampling(input_features, attention_mask) * self.input_scale
        positions_differ = self.training and self.dropout_positions > 0
        position_embeddings = self.encode_positions(hidden_states if positions_differ else hidden_states[:1])
        hidden_states = functional.dropout(hidden_states, self.dropout, self.training)
        position_embeddings = functional.dropout(position_embeddings, self.dropout_positions, self.training)

        if len(position_embeddings) < len(hidden_states):
            position_embeddings = shared_positions(position_embeddings, len(hidden_states))

        output_mask = None
        if attention_mask is not None:
            output_mask = self._get_output_attention_mask(attention_mask, target_length=hidden_states.shape[1])
        mask = padding_mask(output_mask)
        for layer in self.layers:
            skipped = self.training and self.layerdrop > 0 and bool(torch.rand([]) < self.layerdrop)
            if not skipped:
                hidden_states = layer(hidden_states, attention_mask=mask, position_embeddings=position_embeddings, **kwargs)

        return stock.ParakeetEncoderModelOutput(
            last_hidden_state=hidden_states,
            attention_mask=output_mask.int() if output_mask is not None and output_attention_mask else None,
        )
