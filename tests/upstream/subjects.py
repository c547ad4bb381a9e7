"""Small models of every family, as the common tests want them: those of ``bench.families``, or, where these are a part alone (an
encoder, a layer, an attention), whole ones."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from bench.families import EVERY, FAMILIES, Family
from tests.cpu.whole_models import VISION, images

LAYERS = 2
Inputs = Callable[[Any, int, int], dict[str, torch.Tensor]]
CONVOLUTIONS: dict[str, Any] = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
SEW_CONVOLUTIONS: dict[str, Any] = {**CONVOLUTIONS, "squeeze_factor": 1}
FLOWS: dict[str, Any] = {"flow_size": 16, "spectrogram_bins": 9, "vocab_size": 50, "upsample_initial_channel": 16}
TO_SPEECH: dict[str, Any] = {
    "decoder_layers": 1,
    "decoder_num_attention_heads": 4,
    "decoder_linear_units": 48,
    "vocab_size": 50,
    "num_mel_bins": 8,
    "speech_decoder_postnet_units": 16,
}


@dataclass(frozen=True)
class Subject:
    """A model by the names of its class and its config, and its inputs by config, batch and length."""

    name: str
    folder: str
    model: str
    config: str
    small: dict[str, Any]
    make_inputs: Inputs

    implementation: str = "eager"
    is_encoder_decoder: bool = False

    def get_config(self) -> Any:
        config = self.found("configuration", self.config)(**self.small)
        config._attn_implementation = self.implementation
        return config

    def get_model_class(self) -> Any:
        return self.found("modeling", self.model)

    def found(self, kind: str, name: str) -> Any:
        """Return a class of the family's module of that kind, or None."""
        return getattr(importlib.import_module(f"transformers.models.{self.folder}.{kind}_{self.folder}"), name, None)


def audio(config: Any, batch: int, length: int) -> dict[str, torch.Tensor]:
    """As many samples as give frames of that number."""
    return {"input_values": torch.randn(batch, 10 * length + 15)}


def tokens(config: Any, batch: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(1, 50, (batch, length)), "attention_mask": torch.ones(batch, length, dtype=torch.long)}


def images_of(name: str) -> Inputs:
    """Return a function for images of the family's size."""
    return lambda config, batch, length: images(name, batch, torch.float32)


def small(name: str, **others: Any) -> dict[str, Any]:
    """Return the sizes of a family's small model with others beside them."""
    family = FAMILIES[name]
    return {**family.small, **dict.fromkeys(family.layers, LAYERS), **others}


def of_family(family: Family) -> Subject:
    def make_inputs(config: Any, batch: int, length: int) -> dict[str, torch.Tensor]:
        return family.inputs(config, length, torch.full((batch,), length))

    is_encoder_decoder = "num_decoder_layers" in family.layers
    return Subject(
        family.name,
        family.folder,
        family.model,
        family.config,
        small(family.name),
        make_inputs,
        family.stock[0],
        is_encoder_decoder,
    )


def is_whole(family: Family) -> bool:
    """Return whether a family's model in bench.families is one that the common tests know."""
    model = of_family(family).get_model_class()
    return model is not None and issubclass(model, PreTrainedModel) and family.name not in {each.name for each in WHOLE}


WHOLE = (
    Subject("wav2vec2_conformer", "wav2vec2_conformer", "Wav2Vec2ConformerModel", "Wav2Vec2ConformerConfig",
          small("wav2vec2_conformer", **CONVOLUTIONS), audio),
    Subject("wavlm", "wavlm", "WavLMModel", "WavLMConfig", small("wavlm", **CONVOLUTIONS), audio),
    Subject("wavlm_stable", "wavlm", "WavLMModel", "WavLMConfig",
          small("wavlm_stable", **CONVOLUTIONS, do_stable_layer_norm=True, feat_extract_norm="layer"), audio),
    Subject("sew_d", "sew_d", "SEWDModel", "SEWDConfig", small("sew_d", **SEW_CONVOLUTIONS), audio),
    Subject("fastspeech2_conformer", "fastspeech2_conformer", "FastSpeech2ConformerModel", "FastSpeech2ConformerConfig",
          small("fastspeech2_conformer", **TO_SPEECH), tokens),
    Subject("vits", "vits", "VitsModel", "VitsConfig", small("vits", **FLOWS), tokens),
    *(Subject(name, name, each.model, each.config, each.sizes, images_of(name)) for name, each in VISION.items()),
)  # fmt: skip

SUBJECTS = (*(of_family(family) for family in EVERY if is_whole(family)), *WHOLE)
