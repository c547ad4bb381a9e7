"""Other models of text: a bias by bucket of the distance, disentangled attention, ALiBi, Inkling's terms."""

from __future__ import annotations

from . import inputs
from .family import FEW_TOKENS, Family

FALCON = {"multi_query": False, "parallel_attn": False, "new_decoder_architecture": False}
DISENTANGLED = {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0}
SMALL_DEBERTA = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
V3 = {"position_buckets": 256, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
EVERY = (
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
        inputs.tokens,
        # It ends at 512 tokens; longer ones are for comparison.
        {**FEW_TOKENS, "max_position_embeddings": 10000},
        stock=("eager",),
    ),
    Family(
        "deberta",
        "deberta",
        "DebertaModel",
        "DebertaConfig",
        {**SMALL_DEBERTA, **DISENTANGLED, "max_relative_positions": 12},
        inputs.tokens,
        {**DISENTANGLED, **FEW_TOKENS},
        stock=("eager",),
    ),
    Family(
        "deberta_v2",
        "deberta_v2",
        "DebertaV2Model",
        "DebertaV2Config",
        {**SMALL_DEBERTA, **DISENTANGLED, **V3, "position_buckets": 8, "max_relative_positions": 20},
        inputs.tokens,
        # DeBERTa v3, base.
        {**DISENTANGLED, **V3, **FEW_TOKENS, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
        stock=("eager",),
    ),
    Family(
        "bloom",
        "bloom",
        "BloomModel",
        "BloomConfig",
        {"vocab_size": 50, "hidden_size": 24, "n_head": 3},
        inputs.tokens,
        {"hidden_size": 1024, "n_head": 16, **FEW_TOKENS},
        stock=("eager",),
    ),
    Family(
        "mpt",
        "mpt",
        "MptModel",
        "MptConfig",
        {"vocab_size": 50, "d_model": 24, "n_heads": 3, "max_seq_len": 700},
        inputs.tokens,
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
        inputs.tokens,
        {"hidden_size": 2048, "num_attention_heads": 32, "alibi": True, "bias": True, **FALCON, **FEW_TOKENS},
        stock=("sdpa", "eager"),  # eager adds the biases twice
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
        inputs.tokens,
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
        inputs.tokens,
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
            "experts_implementation": "eager",  # the default has no float64
        },
        stock=("eager",),
    ),
)
