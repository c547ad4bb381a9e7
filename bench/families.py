"""Models of Hugging Face transformers, randomly initialised, whose relative attention ``integrations.transformers`` runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Sizes = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """One kind of model, of real width or small.

    model, config: their names in ``transformers.models.<folder>``. layers: the names of their numbers in the config. real, small:
    what differs from the defaults of the config, which are those of a published model. stock: the implementations that the model
    has, first the one that computes what the model means to.
    """

    name: str
    folder: str
    model: str
    config: str
    small: Sizes
    inputs: Callable[[Any, int, torch.Tensor], dict[str, Any]]
    real: Sizes = field(default_factory=dict)
    layers: tuple[str, ...] = ("num_hidden_layers",)
    stock: tuple[str, ...] = ("eager", "sdpa")

    def build(self, *, small: bool = False, layers: int = 1, implementation: str | None = None, **changes: Any) -> nn.Module:
        """A model in eval mode; torch's generator decides its parameters. changes: further ones of the config."""
        sizes = {**(self.small if small else self.real), **dict.fromkeys(self.layers, layers), **changes}
        config = self._find("configuration", self.config)(**sizes)
        config._attn_implementation = implementation or self.stock[0]
        model = ALONE[self.model](config) if self.model in ALONE else self._find("modeling", self.model)(config)
        if not isinstance(model, importlib.import_module("transformers").PreTrainedModel):
            for module in model.modules():  # a part of a model, which its own initialisation does not reach
                if isinstance(module, nn.Embedding):
                    nn.init.normal_(module.weight, std=config.initializer_range)
        return model.eval()

    def _find(self, kind: str, name: str) -> Any:
        return getattr(importlib.import_module(f"transformers.models.{self.folder}.{kind}_{self.folder}"), name)

    def make(self, model: nn.Module, length: int, lengths: list[int]) -> dict[str, Any]:
        """The arguments of the model's forward for sequences of these lengths, padded to length, as its attention counts them."""
        return self.inputs(model.config, length, torch.tensor(lengths))


def output(made: Any) -> torch.Tensor:
    """The main one of what a model returns: the last hidden states, or logits."""
    main: torch.Tensor = made if isinstance(made, torch.Tensor) else made[0]
    return main


def _exist(lengths: torch.Tensor, length: int) -> torch.Tensor:
    """(B, length) bool: True of what is no padding."""
    return torch.arange(length) < lengths[:, None]


def _features(name: str, reduction: int = 1) -> Callable[[Any, int, torch.Tensor], dict[str, Any]]:
    """Frames of as many numbers as the config says under name, reduction of them for each that the attention sees."""

    def inputs(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
        features = torch.randn(len(lengths), length * reduction, getattr(config, name))
        return {"input_features": features, "attention_mask": _exist(lengths * reduction, length * reduction).long()}

    return inputs


def _spectrogram(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    features = torch.randn(len(lengths), 4 * length, config.subsampling_conv_channels[0])
    return {"input_features": features, "attention_mask": _exist(4 * lengths, 4 * length)}


def _hidden(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(len(lengths), length, config.hidden_size),
        "attention_mask": _exist(lengths, length),
    }


def _tokens(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    tokens = torch.randint(1, config.vocab_size, (len(lengths), length))
    return {"input_ids": tokens, "attention_mask": _exist(lengths, length).long()}


def _translation(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    """Of an encoder and a decoder; the longest of the encoder's sequences is the shortest of the decoder's."""
    decoder = {f"decoder_{name}": each for name, each in _tokens(config, length, lengths).items()}
    return {**_tokens(config, length, lengths.flip(0)), **decoder}


def _encoded(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    """Of a decoder alone."""
    encoder = {"encoder_hidden_states": torch.randn(len(lengths), length, config.hidden_size)}
    encoder["encoder_attention_mask"] = _exist(lengths.flip(0), length).long()
    return {**_tokens(config, length, lengths), **encoder}


def _phonemes(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    arguments = _tokens(config, length, lengths)
    return {**arguments, "padding_mask": arguments["attention_mask"][..., None].float()}


def _frames(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    return {
        "input_tensor": torch.randn(len(lengths), length, config.hidden_size),
        "attention_mask": _exist(lengths, length)[:, None].long(),
    }


def _causal_spectrogram(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    """Frames that causal convolutions make length of."""
    length, lengths = 8 * length - 7, (8 * lengths - 7).clamp(min=0)
    features = torch.randn(len(lengths), length, config.num_mel_bins)
    return {"input_features": features, "attention_mask": _exist(lengths, length)}


def _blocks_of_frames(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    return {"hidden_states": torch.randn(len(lengths), length, config.input_dim)}


def _stacked_frames(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    features = torch.randn(len(lengths), length, 4 * config.num_mel_bins)
    return {"input_features": features, "attention_mask": _exist(lengths, length)}


def _mel(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    features = torch.randn(len(lengths), 4 * length, config.input_feat_size)
    return {"audio_mel": features, "audio_mel_mask": ~_exist(4 * lengths, 4 * length)}


def _audio(config: Any, length: int, lengths: torch.Tensor) -> dict[str, Any]:
    features = torch.randn(len(lengths), config.time_reduction * length, config.input_size)
    return {"hidden_states": features, "mask": _exist(config.time_reduction * lengths, config.time_reduction * length)}


def _one_parakeet_attention(config: Any) -> nn.Module:
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


def _fastspeech2_encoder(config: Any) -> nn.Module:
    """The encoder behind the embedding of phonemes."""
    from transformers.models.fastspeech2_conformer import modeling_fastspeech2_conformer as fastspeech2

    encoder = fastspeech2.FastSpeech2ConformerEncoder(config, config.encoder_config)
    encoder.config = config
    for module in encoder.modules():
        if isinstance(module, fastspeech2.FastSpeech2ConformerAttention):
            nn.init.normal_(module.pos_bias_u, std=0.1)
            nn.init.normal_(module.pos_bias_v, std=0.1)
    return encoder


ALONE: dict[str, Callable[[Any], nn.Module]] = {
    "one attention": _one_parakeet_attention,
    "encoder": _fastspeech2_encoder,
}
CONFORMER = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "conv_depthwise_kernel_size": 7}
SEAMLESS = {
    "hidden_size": 32,
    "speech_encoder_attention_heads": 4,
    "speech_encoder_intermediate_size": 48,
    "feature_projection_input_dim": 12,
    "conv_depthwise_kernel_size": 7,
    "adaptor_kernel_size": 4,
    "adaptor_stride": 4,
}
TABLE = {"left_max_position_embeddings": 6, "right_max_position_embeddings": 2}
BERT = ("wav2vec2_bert", "Wav2Vec2BertModel", "Wav2Vec2BertConfig")
DEPTHS = ("num_layers", "num_decoder_layers")
# All distances from 9 on have one bucket, in a decoder from 12 on.
T5 = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "decoder_start_token_id": 0}
BUCKETS = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
# Vocabularies have nothing to do with attention, and the largest one would take most of the memory.
FEW_TOKENS = {"vocab_size": 1000}
WAVLM = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_conv_pos_embeddings": 6,
    "num_conv_pos_embedding_groups": 4,
    "num_buckets": 16,
    "max_bucket_distance": 12,
}
FALCON = {"multi_query": False, "parallel_attn": False, "new_decoder_architecture": False}
GRANITE = {
    "input_dim": 12,
    "hidden_dim": 32,
    "num_heads": 4,
    "output_dim": 10,
    "context_size": 8,
    "max_pos_emb": 10,
    "conv_kernel_size": 5,
}
WAVLM_LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
# Time is masked at random in training, by numpy's generator: not what is compared.
STEADY = {"apply_spec_augment": False}
EVERY = (
    Family(
        "wav2vec2_bert",
        *BERT,
        {**CONFORMER, **TABLE, "feature_projection_input_dim": 12, "output_hidden_size": 32, **STEADY},
        _features("feature_projection_input_dim"),
        STEADY,
    ),
    Family(
        "wav2vec2_bert_relative",
        *BERT,
        {
            **CONFORMER,
            "feature_projection_input_dim": 12,
            "output_hidden_size": 32,
            "position_embeddings_type": "relative",
            **STEADY,
        },
        _features("feature_projection_input_dim"),
        {"position_embeddings_type": "relative", **STEADY},
    ),
    Family(
        "wav2vec2_conformer",
        "wav2vec2_conformer",
        "Wav2Vec2ConformerEncoder",
        "Wav2Vec2ConformerConfig",
        {**CONFORMER, "position_embeddings_type": "relative"},
        _hidden,
        {
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "hidden_act": "swish",
            "position_embeddings_type": "relative",
        },
    ),
    Family(
        "seamless_m4t",
        "seamless_m4t",
        "SeamlessM4TSpeechEncoder",
        "SeamlessM4TConfig",
        {**SEAMLESS, "position_embeddings_type": "relative"},
        _features("feature_projection_input_dim"),
        layers=("speech_encoder_layers",),
    ),
    Family(
        "seamless_m4t_v2",
        "seamless_m4t_v2",
        "SeamlessM4Tv2SpeechEncoder",
        "SeamlessM4Tv2Config",
        {**SEAMLESS, **TABLE},
        _features("feature_projection_input_dim"),
        layers=("speech_encoder_layers",),
        stock=("sdpa", "eager"),  # eager adds the bool mask to the logits
    ),
    Family(
        "parakeet",
        "parakeet",
        "ParakeetEncoder",
        "ParakeetEncoderConfig",
        {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "conv_kernel_size": 5,
            "subsampling_conv_channels": 8,
            "num_mel_bins": 16,
        },
        _features("num_mel_bins", 8),
    ),
    Family(
        "parakeet_attention",
        "parakeet",
        "one attention",
        "ParakeetEncoderConfig",
        {"hidden_size": 32, "num_attention_heads": 4},
        lambda config, length, lengths: {"hidden_states": torch.randn(len(lengths), length, config.hidden_size)},
    ),
    Family(
        "vits",
        "vits",
        "VitsTextEncoder",
        "VitsConfig",
        {"hidden_size": 24, "num_attention_heads": 2, "ffn_dim": 32, "flow_size": 8},
        _phonemes,
        stock=("eager",),
    ),
    Family(
        "inkling",
        "inkling",
        "InklingTextModel",
        "InklingTextConfig",
        {
            "vocab_size": 50,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 8,
            "sliding_window_size": 5,
            "d_rel": 4,
            "rel_extent": 9,
            "log_scaling_n_floor": 4,
            "local_layer_ids": [0],
            "mlp_layer_types": ["dense", "dense"],
            "intermediate_size": 48,
        },
        _tokens,
        # One layer of full attention; the width of a model that fits here, heads as published.
        {
            "vocab_size": 1000,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "local_layer_ids": [],
            "mlp_layer_types": ["dense"],
            "log_scaling_n_floor": 1024,
        },
    ),
    Family(
        "inkling2",
        "inkling2",
        "Inkling2TextModel",
        "Inkling2TextConfig",
        {
            "vocab_size": 50,
            "unpadded_vocab_size": 50,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 1,
            "swa_head_dim": 8,
            "sliding_window_size": 5,
            "d_rel": 4,
            "rel_extent": 9,
            "log_scaling_n_floor": 4,
            "layer_types": ["hybrid", "hybrid_sliding"],
            "moe_intermediate_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_layers_per_attn_res_block": 2,
            "qk_l2_clip_threshold": 2.0,
            "rel_l2_clip_threshold": 1.0,
            "eos_token_id": None,
            "experts_implementation": "eager",
        },
        _tokens,
        # One layer of full attention; the width of a model that fits here, heads as published.
        {
            "vocab_size": 1000,
            "unpadded_vocab_size": 1000,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 1024,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["hybrid"],
            "log_scaling_n_floor": 1024,
            "eos_token_id": None,
        },
        stock=("eager",),
    ),
    Family(
        "gemma4",
        "gemma4",
        "Gemma4AudioModel",
        "Gemma4AudioConfig",
        {"hidden_size": 32, "num_attention_heads": 4, "subsampling_conv_channels": [16, 4], "output_proj_dims": 16},
        _spectrogram,
        stock=("eager",),
    ),
    Family(
        "t5",
        "t5",
        "T5Model",
        "T5Config",
        {**T5, **BUCKETS},
        _translation,
        {"d_model": 768, "d_ff": 3072, "num_heads": 12, **FEW_TOKENS},
        layers=DEPTHS,
    ),
    Family(
        "mt5",
        "mt5",
        "MT5Model",
        "MT5Config",
        {**T5, **BUCKETS},
        _translation,
        {"d_model": 768, "d_ff": 2048, "num_heads": 12, **FEW_TOKENS},
        layers=DEPTHS,
    ),
    Family(
        "umt5",
        "umt5",
        "UMT5Model",
        "UMT5Config",
        {**T5, **BUCKETS},
        _translation,
        {"d_model": 768, "d_ff": 2048, "num_heads": 12, **FEW_TOKENS},
        layers=DEPTHS,
    ),
    Family(
        "switch_transformers",
        "switch_transformers",
        "SwitchTransformersModel",
        "SwitchTransformersConfig",
        {
            **T5,
            **BUCKETS,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "num_experts": 3,
            "expert_capacity": 50,
        },
        _translation,
        {"num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0, **FEW_TOKENS},
        layers=DEPTHS,
        stock=("eager",),
    ),
    Family(
        "pop2piano",
        "pop2piano",
        "Pop2PianoForConditionalGeneration",
        "Pop2PianoConfig",
        {**T5, **BUCKETS},
        _translation,
        layers=DEPTHS,
    ),
    Family(
        "pix2struct",
        "pix2struct",
        "Pix2StructTextModel",
        "Pix2StructTextConfig",
        {**T5, **BUCKETS, "hidden_size": 32, "initializer_range": 0.02},
        _encoded,
        {**FEW_TOKENS, "initializer_range": 0.02},
        layers=("num_layers",),
    ),
    Family(
        "longt5",
        "longt5",
        "LongT5Model",
        "LongT5Config",
        {**T5, **BUCKETS, "local_radius": 5, "dropout_rate": 0.0},
        _translation,
        {"d_model": 768, "d_ff": 2048, "num_heads": 12, **FEW_TOKENS},
        layers=DEPTHS,
        stock=("eager",),
    ),
    Family(
        "bloom",
        "bloom",
        "BloomModel",
        "BloomConfig",
        {"vocab_size": 50, "hidden_size": 24, "n_head": 3},
        _tokens,
        {"hidden_size": 1024, "n_head": 16, **FEW_TOKENS},
        stock=("eager",),
    ),
    Family(
        "mpt",
        "mpt",
        "MptModel",
        "MptConfig",
        {"vocab_size": 50, "d_model": 24, "n_heads": 3, "max_seq_len": 700},
        _tokens,
        {"d_model": 1024, "n_heads": 16, "max_seq_len": 10000, **FEW_TOKENS},
        layers=("n_layers",),
        stock=("eager",),
    ),
    Family(
        "falcon",
        "falcon",
        "FalconModel",
        "FalconConfig",
        {"vocab_size": 50, "hidden_size": 24, "num_attention_heads": 3, "alibi": True, "bias": True, **FALCON},
        _tokens,
        {"hidden_size": 2048, "num_attention_heads": 32, "alibi": True, "bias": True, **FALCON, **FEW_TOKENS},
        stock=("sdpa", "eager"),  # eager adds the biases twice
    ),
    Family("wavlm", "wavlm", "WavLMEncoder", "WavLMConfig", WAVLM, _hidden, WAVLM_LARGE, stock=("eager",)),
    Family(
        "wavlm_stable",
        "wavlm",
        "WavLMEncoderStableLayerNorm",
        "WavLMConfig",
        WAVLM,
        _hidden,
        WAVLM_LARGE,
        stock=("eager",),
    ),
    Family(
        "mpnet",
        "mpnet",
        "MPNetModel",
        "MPNetConfig",
        {
            "vocab_size": 50,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "relative_attention_num_buckets": 32,
        },
        _tokens,
        # It ends at 512 tokens; longer ones are for comparison.
        {**FEW_TOKENS, "max_position_embeddings": 10000},
        stock=("eager",),
    ),
    Family(
        "speecht5",
        "speecht5",
        "SpeechT5Encoder",
        "SpeechT5Config",
        {
            "hidden_size": 32,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "encoder_max_relative_position": 7,
        },
        _hidden,
        layers=("encoder_layers",),
        stock=("eager",),
    ),
    Family(
        "fastspeech2_conformer",
        "fastspeech2_conformer",
        "encoder",
        "FastSpeech2ConformerConfig",
        {
            "hidden_size": 32,
            "encoder_num_attention_heads": 4,
            "encoder_linear_units": 48,
        },
        _frames,
        layers=("encoder_layers",),
        stock=("eager",),
    ),
    Family(
        "nemotron_asr_streaming",
        "nemotron_asr_streaming",
        "NemotronAsrStreamingEncoder",
        "NemotronAsrStreamingEncoderConfig",
        {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "conv_kernel_size": 5,
            "subsampling_conv_channels": 8,
            "num_mel_bins": 16,
            "sliding_window": 21,
            "default_num_lookahead_tokens": 3,
        },
        _causal_spectrogram,
        {"max_position_embeddings": 50000},
        stock=("sdpa", "eager"),  # eager hides what should be seen
    ),
    Family(
        "granite_speech",
        "granite_speech",
        "GraniteSpeechCTCEncoder",
        "GraniteSpeechEncoderConfig",
        GRANITE,
        _blocks_of_frames,
        layers=("num_layers",),
        stock=("eager",),
    ),
    Family(
        "granite_speech_plus",
        "granite_speech_plus",
        "GraniteSpeechPlusCTCEncoder",
        "GraniteSpeechPlusEncoderConfig",
        GRANITE,
        _blocks_of_frames,
        layers=("num_layers",),
        stock=("eager",),
    ),
    Family(
        "granite_speech5",
        "granite_speech5",
        "GraniteSpeech5Encoder",
        "GraniteSpeech5EncoderConfig",
        {
            "vocab_size": 10,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_mel_bins": 3,
            "max_position_embeddings": 10,
            "context_size": 8,
            "conv_kernel_size": 5,
            "subsample_layers": [1],
        },
        _stacked_frames,
        FEW_TOKENS,
    ),
    Family(
        "gemma3n",
        "gemma3n",
        "Gemma3nAudioEncoder",
        "Gemma3nAudioConfig",
        {
            "hidden_size": 32,
            "input_feat_size": 16,
            "conf_num_attention_heads": 4,
            "conf_reduction_factor": 1,
            "sscp_conv_channel_size": [16, 4],
        },
        _mel,
        layers=("conf_num_hidden_layers",),
        stock=("eager",),
    ),
    Family(
        "phi4_multimodal",
        "phi4_multimodal",
        "Phi4MultimodalAudioModel",
        "Phi4MultimodalAudioConfig",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "input_size": 16,
            "nemo_conv_channels": 8,
            "bias_max_distance": 9,
        },
        _audio,
        layers=("num_blocks",),
    ),
)
FAMILIES = {family.name: family for family in EVERY}
