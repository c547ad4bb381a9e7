"""Models of Hugging Face transformers of every family, randomly initialised: small ones for tests, and as wide as real ones.

A new family is an entry of FAMILIES; ``family.py`` says what its fields are, ``inputs.py`` makes the arguments of a forward.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from . import inputs, parts
from .family import Family, Sizes
from .inputs import features, tokens, translation

__all__ = ["FAMILIES", "Family", "output"]

EAGER, SDPA_FIRST, BOTH = ("eager",), ("sdpa", "eager"), ("eager", "sdpa")
GENERATION = "ForConditionalGeneration"
SMALL = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
# Vocabularies have nothing to do with attention, and the largest one would take most of the memory.
FEW_TOKENS = {"vocab_size": 1000}

# Conformers
hidden = features("hidden_size", name="hidden_states")
SPEECH_LAYERS = ("speech_encoder_layers",)
CLIPPED = {"left_max_position_embeddings": 6, "right_max_position_embeddings": 2}
RELATIVE = {"position_embeddings_type": "relative"}
ATTENTION = {"hidden_size": 32, "num_attention_heads": 4}
CONFORMER = {**SMALL, "conv_depthwise_kernel_size": 7}
# Time is masked at random in training, by numpy's generator: not what is compared.
UNMASKED = {"apply_spec_augment": False}
LARGE_CONFORMER = {**LARGE, **RELATIVE, "hidden_act": "swish"}
BERT = {**CONFORMER, **UNMASKED, "feature_projection_input_dim": 12, "output_hidden_size": 32}
SEAMLESS = {
    "hidden_size": 32,
    "speech_encoder_attention_heads": 4,
    "speech_encoder_intermediate_size": 48,
    "feature_projection_input_dim": 12,
    "conv_depthwise_kernel_size": 7,
    "adaptor_kernel_size": 4,
    "adaptor_stride": 4,
}
FAST_CONFORMER = {**SMALL, "conv_kernel_size": 5, "subsampling_conv_channels": 8, "num_mel_bins": 16}
FASTSPEECH2 = {"hidden_size": 32, "encoder_num_attention_heads": 4, "encoder_linear_units": 48}
NEMOTRON = {**FAST_CONFORMER, "sliding_window": 21, "default_num_lookahead_tokens": 3}
projected = features("feature_projection_input_dim", mask_dtype=torch.long)
mel_bins = features("num_mel_bins", 8, mask_dtype=torch.long)

# Other encoders of speech
CONVOLUTION = {**SMALL, "num_conv_pos_embeddings": 6, "num_conv_pos_embedding_groups": 4}
WAVLM = {**CONVOLUTION, "num_buckets": 16, "max_bucket_distance": 12}
VITS = {"hidden_size": 24, "num_attention_heads": 2, "ffn_dim": 32, "flow_size": 8}
SEW_D = {**CONVOLUTION, "position_buckets": 8, "max_position_embeddings": 20}
SPEECHT5 = {"hidden_size": 32, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "encoder_max_relative_position": 7}
GRANITE = {"hidden_dim": 32, "num_heads": 4, "context_size": 8, "max_pos_emb": 10, "conv_kernel_size": 5}
GRANITE |= {"input_dim": 12, "output_dim": 10}
GRANITE5: Sizes = {**SMALL, "vocab_size": 10, "num_mel_bins": 3, "max_position_embeddings": 10, "context_size": 8}
GRANITE5 |= {"conv_kernel_size": 5, "subsample_layers": [1]}
GEMMA3N: Sizes = {"hidden_size": 32, "conf_num_attention_heads": 4, "input_feat_size": 16, "conf_reduction_factor": 1}
GEMMA3N |= {"sscp_conv_channel_size": [16, 4]}
GEMMA4 = {"hidden_size": 32, "num_attention_heads": 4, "subsampling_conv_channels": [16, 4], "output_proj_dims": 16}
PHI4 = {**SMALL, "input_size": 16, "nemo_conv_channels": 8, "bias_max_distance": 9}
PHI4 |= {"ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32}
squeezed = features("hidden_size", "squeeze_factor", "hidden_states", mask_dtype=torch.long)
stacked = features(lambda config: 4 * config.num_mel_bins)
channels = features(lambda config: config.subsampling_conv_channels[0], 4)
audio = features("input_size", "time_reduction", "hidden_states", "mask")
blocks, attention = inputs.without_mask("input_dim"), inputs.without_mask("hidden_size")

# T5 and its descendants. All distances from 9 on have one bucket, in a decoder from 12 on.
T5 = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "decoder_start_token_id": 0}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
T5_BASE = {"d_model": 768, "d_ff": 2048, "num_heads": 12, **FEW_TOKENS}
EXPERTS = {"num_experts": 3, "expert_capacity": 50, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
NO_EXPERTS = {"num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0, **FEW_TOKENS}
PIX2STRUCT = {**T5, "hidden_size": 32, "initializer_range": 0.02, "is_encoder_decoder": True}
PIECES = (9, 1, 1, 15, 11)
DEPTHS = ("num_layers", "num_decoder_layers")

# Other models of text
SMALL_TEXT = {"vocab_size": 50, **SMALL}
SMALL_MPNET = {**SMALL_TEXT, "relative_attention_num_buckets": 32}
DISENTANGLED = {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0}
V3 = {**DISENTANGLED, "position_buckets": 256, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
SMALL_DEBERTA = {**SMALL_TEXT, **DISENTANGLED, "max_relative_positions": 12}
SMALL_DEBERTA_V3 = {**SMALL_TEXT, **V3, "position_buckets": 8, "max_relative_positions": 20}
DEBERTA_V3_BASE = {**V3, **FEW_TOKENS, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
BLOOM = {"vocab_size": 50, "hidden_size": 24, "n_head": 3}
LARGE_BLOOM = {**FEW_TOKENS, "hidden_size": 1024, "n_head": 16}
MPT = {"vocab_size": 50, "d_model": 24, "n_heads": 3, "max_seq_len": 700}
LARGE_MPT = {**FEW_TOKENS, "d_model": 1024, "n_heads": 16, "max_seq_len": 10000}
ALIBI = {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False, "new_decoder_architecture": False}
FALCON = {**ALIBI, "vocab_size": 50, "hidden_size": 24, "num_attention_heads": 3}
LARGE_FALCON = {**ALIBI, **FEW_TOKENS, "hidden_size": 2048, "num_attention_heads": 32}
SMALL_INKLING = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_head_dim": 8,
    "sliding_window_size": 5,
    "d_rel": 4,
    "rel_extent": 9,
    "log_scaling_n_floor": 4,
}
INKLING = {
    **SMALL_INKLING,
    "swa_num_key_value_heads": 4,
    "local_layer_ids": [0],
    "mlp_layer_types": ["dense", "dense"],
    "intermediate_size": 48,
}
# One layer of full attention; the width of a model that fits here, heads as published.
WIDE_INKLING = {**FEW_TOKENS, "hidden_size": 1024, "log_scaling_n_floor": 1024}
LARGE_INKLING = {**WIDE_INKLING, "intermediate_size": 4096, "local_layer_ids": [], "mlp_layer_types": ["dense"]}
# experts_implementation: the default has no float64.
EXPERTS2 = {"n_routed_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager", "eos_token_id": None}
INKLING2 = {
    **SMALL_INKLING,
    **EXPERTS2,
    "unpadded_vocab_size": 50,
    "swa_num_key_value_heads": 1,
    "layer_types": ["hybrid", "hybrid_sliding"],
    "moe_intermediate_size": 8,
    "n_layers_per_attn_res_block": 2,
    "qk_l2_clip_threshold": 2.0,
    "rel_l2_clip_threshold": 1.0,
}
LARGE_INKLING2 = {
    **WIDE_INKLING,
    **EXPERTS2,
    "unpadded_vocab_size": 1000,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 1024,
    "layer_types": ["hybrid"],
}
LOOP = {
    **{"loop_layer_index_start": 1, "loop_layer_index_end": 2, "loop_num_passes": 2, "loop_gate_rank": 4},
    **{"num_hidden_layers": 3, "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"]},
    **{"n_layers_per_attn_res_block": 1, "num_experts_per_tok": 4},  # all experts: rounding exchanges none
}

# Layers of vision encoders, which take grids of any size
SAM = {"hidden_size": 32, "num_attention_heads": 4, "mlp_dim": 48, "image_size": 32, "patch_size": 4, "window_size": 6}
WHOLE_GRID = {name: value for name, value in SAM.items() if name != "window_size"}
LARGE_SAM = {"image_size": 1024}
VITDET = {"use_relative_position_embeddings": True}


def t5(name: str, prefix: str, small: Sizes, real: Sizes, stock: tuple[str, ...] = BOTH) -> Family:
    return Family(name, prefix, translation, small, real, layers=DEPTHS, stock=stock, writer=f"{prefix}{GENERATION}")


def granite(name: str, prefix: str) -> Family:
    config = f"{prefix}EncoderConfig"
    return Family(name, prefix, blocks, GRANITE, layers=("num_layers",), stock=EAGER, part="CTCEncoder", config=config)


def grid(name: str, prefix: str, stock: tuple[str, ...] = EAGER, small: Sizes = SAM, real: Sizes = LARGE_SAM) -> Family:
    """Layers of a vision encoder; each implementation of its attention is a class of its own."""
    alone = partial(parts.LayersOnAGrid, name, f"{prefix}Layer")
    variants = tuple({"implementation": implementation} for implementation in stock[1:])
    return Family(name, prefix, inputs.grid, small, real, stock=stock, part="Layer", alone=alone, variants=variants)


ALL = (
    Family("wav2vec2_bert", "Wav2Vec2Bert", projected, BERT | CLIPPED, UNMASKED, variants=({"add_adapter": True},)),
    Family("wav2vec2_bert_relative", "Wav2Vec2Bert", projected, BERT | RELATIVE, UNMASKED | RELATIVE, folder="wav2vec2_bert"),
    Family("wav2vec2_conformer", "Wav2Vec2Conformer", hidden, CONFORMER | RELATIVE, LARGE_CONFORMER, part="Encoder"),
    Family("seamless_m4t", "SeamlessM4T", projected, SEAMLESS | RELATIVE, layers=SPEECH_LAYERS, part="SpeechEncoder"),
    # Its eager attention adds the bool mask to the logits.
    Family(
        "seamless_m4t_v2",
        "SeamlessM4Tv2",
        projected,
        SEAMLESS | CLIPPED,
        layers=SPEECH_LAYERS,
        stock=SDPA_FIRST,
        part="SpeechEncoder",
    ),
    Family("parakeet", "ParakeetEncoder", mel_bins, FAST_CONFORMER, part=""),
    Family("parakeet_attention", "ParakeetEncoder", attention, ATTENTION, folder="parakeet", alone=parts.one_parakeet_attention),
    Family(
        "fastspeech2_conformer",
        "FastSpeech2Conformer",
        inputs.phoneme_frames,
        FASTSPEECH2,
        layers=("encoder_layers",),
        stock=EAGER,
        alone=parts.fastspeech2_encoder,
    ),
    # Its eager attention hides what should be seen.
    Family(
        "nemotron_asr_streaming",
        "NemotronAsrStreamingEncoder",
        inputs.causal_spectrogram,
        NEMOTRON,
        {"max_position_embeddings": 50000},
        stock=SDPA_FIRST,
        part="",
        pieces=("input_features", (25, 32, 16, 8, 64, 144)),
    ),
    Family("vits", "Vits", inputs.phonemes, VITS, stock=EAGER, part="TextEncoder"),
    Family("wavlm", "WavLM", hidden, WAVLM, LARGE, stock=EAGER, part="Encoder"),
    Family("wavlm_stable", "WavLM", hidden, WAVLM, LARGE, "wavlm", stock=EAGER, part="EncoderStableLayerNorm"),
    Family("sew_d", "SEWD", squeezed, SEW_D, stock=EAGER, part="Encoder"),
    Family("speecht5", "SpeechT5", hidden, SPEECHT5, layers=("encoder_layers",), stock=EAGER, part="Encoder"),
    granite("granite_speech", "GraniteSpeech"),
    granite("granite_speech_plus", "GraniteSpeechPlus"),
    Family("granite_speech5", "GraniteSpeech5Encoder", stacked, GRANITE5, FEW_TOKENS, part="", padding_matters=False),
    Family("gemma4", "Gemma4Audio", channels, GEMMA4, stock=EAGER, padding_matters=False),
    Family(
        "gemma3n",
        "Gemma3nAudio",
        inputs.mel,
        GEMMA3N,
        layers=("conf_num_hidden_layers",),
        stock=EAGER,
        part="Encoder",
        padding_matters=False,
    ),
    Family("phi4_multimodal", "Phi4MultimodalAudio", audio, PHI4, layers=("num_blocks",)),
    t5("t5", "T5", T5, T5_BASE | {"d_ff": 3072}),
    t5("mt5", "MT5", T5, T5_BASE),
    t5("umt5", "UMT5", T5, T5_BASE),
    t5("switch_transformers", "SwitchTransformers", T5 | EXPERTS, NO_EXPERTS, EAGER),
    Family("pop2piano", "Pop2Piano", translation, T5, layers=DEPTHS, part=GENERATION, pieces=("decoder_input_ids", PIECES)),
    Family(
        "pix2struct",
        "Pix2StructText",
        inputs.encoded,
        PIX2STRUCT,
        {**FEW_TOKENS, "initializer_range": 0.02},
        layers=("num_layers",),
        pieces=("input_ids", PIECES),
    ),
    t5("longt5", "LongT5", {**T5, "local_radius": 5, "dropout_rate": 0.0}, T5_BASE, EAGER),
    # MPNet ends at 512 tokens; longer ones are for comparison.
    Family("mpnet", "MPNet", tokens, SMALL_MPNET, {**FEW_TOKENS, "max_position_embeddings": 10000}, stock=EAGER),
    Family("deberta", "Deberta", tokens, SMALL_DEBERTA, DISENTANGLED | FEW_TOKENS, stock=EAGER),
    Family("deberta_v2", "DebertaV2", tokens, SMALL_DEBERTA_V3, DEBERTA_V3_BASE, stock=EAGER),
    Family("bloom", "Bloom", tokens, BLOOM, LARGE_BLOOM, stock=EAGER, writer="BloomForCausalLM"),
    Family("mpt", "Mpt", tokens, MPT, LARGE_MPT, layers=("n_layers",), stock=EAGER, writer="MptForCausalLM"),
    # Its eager attention adds the biases twice.
    Family("falcon", "Falcon", tokens, FALCON, LARGE_FALCON, stock=SDPA_FIRST, writer="FalconForCausalLM"),
    Family(
        "inkling",
        "InklingText",
        tokens,
        INKLING,
        LARGE_INKLING,
        around=parts.around_inkling,
        writer="InklingForCausalLM",
        padding_matters=False,
    ),
    Family("inkling2", "Inkling2Text", tokens, INKLING2, LARGE_INKLING2, stock=EAGER, writer="Inkling2ForCausalLM"),
    Family(
        "inkling2_loop",
        "Inkling2LoopText",
        tokens,
        INKLING2 | LOOP,
        LARGE_INKLING2 | LOOP,
        layers=(),
        stock=EAGER,
        writer="Inkling2LoopForCausalLM",
    ),
    grid("sam", "SamVision", BOTH),
    grid("sam_hq", "SamHQVision", BOTH),
    grid("vitdet", "VitDet", small=SAM | VITDET, real=LARGE_SAM | VITDET),
    grid("seggpt", "SegGpt", small=WHOLE_GRID, real={}),
    grid("got_ocr2", "GotOcr2Vision"),
    grid("deepseek_ocr2", "DeepseekOcr2SamVision", BOTH),
    grid("unlimited_ocr", "UnlimitedOcrSamVision", BOTH),
    grid("slanext", "SLANeXtVision"),
    grid("pp_formulanet", "PPFormulaNetVision"),
)
FAMILIES = {family.name: family for family in ALL}


def output(results: Any) -> torch.Tensor:
    """The main result of a model: the last hidden states, or logits."""
    main: torch.Tensor = results if isinstance(results, torch.Tensor) else results[0]
    return main
