"""Conformers with Transformer-XL's terms, or a table of clipped distances."""

from __future__ import annotations

from . import inputs, parts
from .family import Family

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
FAST_CONFORMER = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_kernel_size": 5,
    "subsampling_conv_channels": 8,
    "num_mel_bins": 16,
}
TABLE = {"left_max_position_embeddings": 6, "right_max_position_embeddings": 2}
BERT = ("wav2vec2_bert", "Wav2Vec2BertModel", "Wav2Vec2BertConfig")
# Time is masked at random in training, by numpy's generator: not what is compared.
STEADY = {"apply_spec_augment": False}
EVERY = (
    Family(
        "wav2vec2_bert",
        *BERT,
        {**CONFORMER, **TABLE, "feature_projection_input_dim": 12, "output_hidden_size": 32, **STEADY},
        inputs.features("feature_projection_input_dim"),
        STEADY,
        variants=({"add_adapter": True},),
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
        inputs.features("feature_projection_input_dim"),
        {"position_embeddings_type": "relative", **STEADY},
    ),
    Family(
        "wav2vec2_conformer",
        "wav2vec2_conformer",
        "Wav2Vec2ConformerEncoder",
        "Wav2Vec2ConformerConfig",
        {**CONFORMER, "position_embeddings_type": "relative"},
        inputs.hidden,
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
        inputs.features("feature_projection_input_dim"),
        layers=("speech_encoder_layers",),
    ),
    Family(
        "seamless_m4t_v2",
        "seamless_m4t_v2",
        "SeamlessM4Tv2SpeechEncoder",
        "SeamlessM4Tv2Config",
        {**SEAMLESS, **TABLE},
        inputs.features("feature_projection_input_dim"),
        layers=("speech_encoder_layers",),
        stock=("sdpa", "eager"),  # eager adds the bool mask to the logits
    ),
    Family(
        "parakeet",
        "parakeet",
        "ParakeetEncoder",
        "ParakeetEncoderConfig",
        FAST_CONFORMER,
        inputs.features("num_mel_bins", 8),
    ),
    Family(
        "parakeet_attention",
        "parakeet",
        "one attention",
        "ParakeetEncoderConfig",
        {"hidden_size": 32, "num_attention_heads": 4},
        inputs.hidden_alone,
        alone=parts.one_parakeet_attention,
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
        inputs.frames,
        layers=("encoder_layers",),
        stock=("eager",),
        alone=parts.fastspeech2_encoder,
    ),
    Family(
        "nemotron_asr_streaming",
        "nemotron_asr_streaming",
        "NemotronAsrStreamingEncoder",
        "NemotronAsrStreamingEncoderConfig",
        {
            **FAST_CONFORMER,
            "sliding_window": 21,
            "default_num_lookahead_tokens": 3,
        },
        inputs.causal_spectrogram,
        {"max_position_embeddings": 50000},
        stock=("sdpa", "eager"),  # eager hides what should be seen
        pieces=("input_features", (25, 32, 16, 8, 64, 144)),
    ),
)
