"""Parts of models that transformers has no model of."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from triton_relattn.integrations.libraries import with_globals


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


def around_inkling(config: Any) -> nn.Module:
    """The whole of Inkling around a language model of this config, without what looks at images, which needs scipy."""
    from transformers import InklingConfig
    from transformers.models.inkling import modeling_inkling as inkling

    audio = {"n_mel_bins": 4, "mel_vocab_size": 8, "text_hidden_size": config.hidden_size}
    whole = InklingConfig(text_config=config.to_dict(), audio_config=audio)
    whole._attn_implementation, whole.vocab_size = config._attn_implementation, config.vocab_size
    model: nn.Module = inkling.InklingModel.__new__(inkling.InklingModel)
    with_globals(inkling.InklingModel.__init__, InklingVisionModel=lambda _: nn.Identity())(model, whole)
    return model


class LayersOnAGrid(nn.Module):
    """Layers of a vision encoder, the last one of which sees the whole grid, those before it windows if the model has them."""

    def __init__(self, folder: str, name: str, config: Any) -> None:
        super().__init__()
        self.config, kind = config, getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
        self.channels_first = folder == "vitdet"
        self.arguments = (1,) if folder == "seggpt" else ()  # how many prompts make an ensemble
        size = getattr(config, "window_size", None)
        before = {"window_size": size} if size else {}
        last = {"window_size": 0} if size is not None else {"drop_path_rate": 0.0}
        others = config.num_hidden_layers - 1
        self.layers = nn.ModuleList([*(kind(config, **(before or last)) for _ in range(others)), kind(config, **last)])
        for parameter_name, parameter in self.named_parameters():
            if "rel_pos" in parameter_name:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states (B, height, width, C)."""
        states = hidden_states.permute(0, 3, 1, 2) if self.channels_first else hidden_states
        for layer in self.layers:
            output = layer(states, *self.arguments)
            states = output[0] if isinstance(output, tuple) else output
        return states.permute(0, 2, 3, 1) if self.channels_first else states
