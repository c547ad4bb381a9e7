"""Parts of models that transformers has no model of."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def one_parakeet_attention(config: Any) -> nn.Module:
    """One attention layer of Parakeet with its positions, and nothing else."""
    from transformers.modeling_outputs import BaseModelOutput
    from transformers.models.parakeet import modeling_parakeet as parakeet

    class OneAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = config
            self.positions = parakeet.ParakeetEncoderRelPositionalEncoding(config)
            self.attention = parakeet.ParakeetEncoderAttention(config, 0)
            nn.init.normal_(self.attention.bias_u, std=0.1)
            nn.init.normal_(self.attention.bias_v, std=0.1)

        def forward(self, hidden_states: torch.Tensor) -> BaseModelOutput:
            return BaseModelOutput(self.attention(hidden_states, self.positions(hidden_states))[0])

    return OneAttention()


def fastspeech2_encoder(config: Any) -> nn.Module:
    """The encoder behind the embedding of phonemes."""
    from transformers.models.fastspeech2_conformer import modeling_fastspeech2_conformer as fastspeech2

    encoder = fastspeech2.FastSpeech2ConformerEncoder(config, config.encoder_config)
    encoder.config = config
    for module in encoder.modules():
        if isinstance(module, fastspeech2.FastSpeech2ConformerAttention):
            nn.init.normal_(module.pos_bias_u, std=0.1)
            nn.init.normal_(module.pos_bias_v, std=0.1)
    return encoder
