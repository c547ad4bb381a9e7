"""T5 and its descendants: a bias by bucket of the distance."""

from __future__ import annotations

from . import inputs
from .family import FEW_TOKENS, Family

PIECES = (9, 1, 1, 15, 11)
DEPTHS = ("num_layers", "num_decoder_layers")
# All distances from 9 on have one bucket, in a decoder from 12 on.
T5 = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "decoder_start_token_id": 0}
BUCKETS = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
EVERY = (
    Family(
        "t5",
        "t5",
        "T5Model",
        "T5Config",
        {**T5, **BUCKETS},
        inputs.translation,
        {"d_model": 768, "d_ff": 3072, "num_heads": 12, **FEW_TOKENS},
        layers=DEPTHS,
        writer="T5ForConditionalGeneration",
    ),
    Family(
        "mt5",
        "mt5",
        "MT5Model",
        "MT5Config",
        {**T5, **BUCKETS},
        inputs.translation,
        {"d_model": 768, "d_ff": 2048, "num_heads": 12, **FEW_TOKENS},
        layers=DEPTHS,
        writer="MT5ForConditionalGeneration",
    ),
    Family(
        "umt5",
        "umt5",
        "UMT5Model",
        "UMT5Config",
        {**T5, **BUCKETS},
        inputs.translation,
        {"d_model": 768, "d_ff": 2048, "num_heads": 12, **FEW_TOKENS},
        layers=DEPTHS,
        writer="UMT5ForConditionalGeneration",
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
        inputs.translation,
        {"num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0, **FEW_TOKENS},
        layers=DEPTHS,
        stock=("eager",),
        writer="SwitchTransformersForConditionalGeneration",
    ),
    Family(
        "pop2piano",
        "pop2piano",
        "Pop2PianoForConditionalGeneration",
        "Pop2PianoConfig",
        {**T5, **BUCKETS},
        inputs.translation,
        layers=DEPTHS,
        pieces=("decoder_input_ids", PIECES),
    ),
    Family(
        "pix2struct",
        "pix2struct",
        "Pix2StructTextModel",
        "Pix2StructTextConfig",
        {**T5, **BUCKETS, "hidden_size": 32, "initializer_range": 0.02, "is_encoder_decoder": True},
        inputs.encoded,
        {**FEW_TOKENS, "initializer_range": 0.02},
        layers=("num_layers",),
        pieces=("input_ids", PIECES),
    ),
    Family(
        "longt5",
        "longt5",
        "LongT5Model",
        "LongT5Config",
        {**T5, **BUCKETS, "local_radius": 5, "dropout_rate": 0.0},
        inputs.translation,
        {"d_model": 768, "d_ff": 2048, "num_heads": 12, **FEW_TOKENS},
        layers=DEPTHS,
        stock=("eager",),
        writer="LongT5ForConditionalGeneration",
    ),
)
