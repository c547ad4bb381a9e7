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

__all__ = ["EVERY", "FAMILIES", "Family", "output"]

EAGER, SDPA_FIRST = ("eager",), ("sdpa", "eager")
SMALL = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
# Vocabularies have nothing to do with attention, and the largest one would take most of the memory.
FEW_TOKENS = {"vocab_size": 1000}

# Conformers
hidden = features("hidden_size", name="hidden_states")
SPEECH_LAYERS = ("speech_encoder_layers",)
CLIPPED = {"left_max_position_embeddings": 6, "right_max_position_embeddings": 2}
RELATIVE = {"position_embeddings_type": "relative"}
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
blocks = inputs.without_mask("input_dim")

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

# Layers of vision encoders, which take grids of any size
SAM = {"hidden_size": 32, "num_attention_heads": 4, "mlp_dim": 48, "image_size": 32, "patch_size": 4, "window_size": 6}
WHOLE_GRID = {name: value for name, value in SAM.items() if name != "window_size"}
LARGE_SAM = {"image_size": 1024}
VITDET = {"use_relative_position_embeddings": True}


def grid(name: str, prefix: str, stock: tuple[str, ...] = EAGER, small: Sizes = SAM, real: Sizes = LARGE_SAM) -> Family:
    """Layers of a vision encoder; each implementation of its attention is a class of its own."""
    layer, variants = f"{prefix}Layer", tuple({"implementation": implementation} for implementation in stock[1:])
    alone = partial(parts.LayersOnAGrid, name, layer)
    return Family(name, layer, f"{prefix}Config", inputs.grid, small, real, stock=stock, alone=alone, variants=variants)


EVERY = (
    Family(
        "wav2vec2_bert",
        "Wav2Vec2BertModel",
        "Wav2Vec2BertConfig",
        projected,
        BERT | CLIPPED,
        UNMASKED,
        variants=({"add_adapter": True},),
    ),
    Family(
        "wav2vec2_bert_relative",
        "Wav2Vec2BertModel",
        "Wav2Vec2BertConfig",
        projected,
        BERT | RELATIVE,
        UNMASKED | RELATIVE,
        folder="wav2vec2_bert",
    ),
    Family(
        "wav2vec2_conformer", "Wav2Vec2ConformerEncoder", "Wav2Vec2ConformerConfig", hidden, CONFORMER | RELATIVE, LARGE_CONFORMER
    ),
    Family("seamless_m4t", "SeamlessM4TSpeechEncoder", "SeamlessM4TConfig", projected, SEAMLESS | RELATIVE, layers=SPEECH_LAYERS),
    Family(
        "seamless_m4t_v2",
        "SeamlessM4Tv2SpeechEncoder",
        "SeamlessM4Tv2Config",
        projected,
        SEAMLESS | CLIPPED,
        layers=SPEECH_LAYERS,
        stock=SDPA_FIRST,  # eager adds the bool mask to the logits
    ),
    Family("parakeet", "ParakeetEncoder", "ParakeetEncoderConfig", mel_bins, FAST_CONFORMER),
    Family(
        "parakeet_attention",
        "one attention",
        "ParakeetEncoderConfig",
        inputs.without_mask("hidden_size"),
        {"hidden_size": 32, "num_attention_heads": 4},
        folder="parakeet",
        alone=parts.one_parakeet_attention,
    ),
    Family(
        "fastspeech2_conformer",
        "encoder",
        "FastSpeech2ConformerConfig",
        inputs.phoneme_frames,
        FASTSPEECH2,
        layers=("encoder_layers",),
        stock=EAGER,
        alone=parts.fastspeech2_encoder,
    ),
    Family(
        "nemotron_asr_streaming",
        "NemotronAsrStreamingEncoder",
        "NemotronAsrStreamingEncoderConfig",
        inputs.causal_spectrogram,
        NEMOTRON,
        {"max_position_embeddings": 50000},
        stock=SDPA_FIRST,  # eager hides what should be seen
        pieces=("input_features", (25, 32, 16, 8, 64, 144)),
    ),
    Family("vits", "VitsTextEncoder", "VitsConfig", inputs.phonemes, VITS, stock=EAGER),
    Family("wavlm", "WavLMEncoder", "WavLMConfig", hidden, WAVLM, LARGE, stock=EAGER),
    Family("wavlm_stable", "WavLMEncoderStableLayerNorm", "WavLMConfig", hidden, WAVLM, LARGE, "wavlm", stock=EAGER),
    Family("sew_d", "SEWDEncoder", "SEWDConfig", squeezed, SEW_D, stock=EAGER),
    Family("speecht5", "SpeechT5Encoder", "SpeechT5Config", hidden, SPEECHT5, layers=("encoder_layers",), stock=EAGER),
    Family(
        "granite_speech",
        "GraniteSpeechCTCEncoder",
        "GraniteSpeechEncoderConfig",
        blocks,
        GRANITE,
        layers=("num_layers",),
        stock=EAGER,
    ),
    Family(
        "granite_speech_plus",
        "GraniteSpeechPlusCTCEncoder",
        "GraniteSpeechPlusEncoderConfig",
        blocks,
        GRANITE,
        layers=("num_layers",),
        stock=EAGER,
    ),
    Family(
        "granite_speech5",
        "GraniteSpeech5Encoder",
        "GraniteSpeech5EncoderConfig",
        stacked,
        GRANITE5,
        FEW_TOKENS,
        padding_matters=False,
    ),
    Family("gemma4", "Gemma4AudioModel", "Gemma4AudioConfig", channels, GEMMA4, stock=EAGER, padding_matters=False),
    Family(
        "gemma3n",
        "Gemma3nAudioEncoder",
        "Gemma3nAudioConfig",
        inputs.mel,
        GEMMA3N,
        layers=("conf_num_hidden_layers",),
        stock=EAGER,
        padding_matters=False,
    ),
    Family("phi4_multimodal", "Phi4MultimodalAudioModel", "Phi4MultimodalAudioConfig", audio, PHI4, layers=("num_blocks",)),
    Family(
        "t5", "T5Model", "T5Config", translation, T5, T5_BASE | {"d_ff": 3072}, layers=DEPTHS, writer="T5ForConditionalGeneration"
    ),
    Family("mt5", "MT5Model", "MT5Config", translation, T5, T5_BASE, layers=DEPTHS, writer="MT5ForConditionalGeneration"),
    Family("umt5", "UMT5Model", "UMT5Config", translation, T5, T5_BASE, layers=DEPTHS, writer="UMT5ForConditionalGeneration"),
    Family(
        "switch_transformers",
        "SwitchTransformersModel",
        "SwitchTransformersConfig",
        translation,
        T5 | EXPERTS,
        NO_EXPERTS,
        layers=DEPTHS,
        stock=EAGER,
        writer="SwitchTransformersForConditionalGeneration",
    ),
    Family(
        "pop2piano",
        "Pop2PianoForConditionalGeneration",
        "Pop2PianoConfig",
        translation,
        T5,
        layers=DEPTHS,
        pieces=("decoder_input_ids", PIECES),
    ),
    Family(
        "pix2struct",
        "Pix2StructTextModel",
        "Pix2StructTextConfig",
        inputs.encoded,
        PIX2STRUCT,
        {**FEW_TOKENS, "initializer_range": 0.02},
        layers=("num_layers",),
        pieces=("input_ids", PIECES),
    ),
    Family(
        "longt5",
        "LongT5Model",
        "LongT5Config",
        translation,
        {**T5, "local_radius": 5, "dropout_rate": 0.0},
        T5_BASE,
        layers=DEPTHS,
        stock=EAGER,
        writer="LongT5ForConditionalGeneration",
    ),
    # MPNet ends at 512 tokens; longer ones are for comparison.
    Family(
        "mpnet", "MPNetModel", "MPNetConfig", tokens, SMALL_MPNET, {**FEW_TOKENS, "max_position_embeddings": 10000}, stock=EAGER
    ),
    Family("deberta", "DebertaModel", "DebertaConfig", tokens, SMALL_DEBERTA, DISENTANGLED | FEW_TOKENS, stock=EAGER),
    Family("deberta_v2", "DebertaV2Model", "DebertaV2Config", tokens, SMALL_DEBERTA_V3, DEBERTA_V3_BASE, stock=EAGER),
    Family("bloom", "BloomModel", "BloomConfig", tokens, BLOOM, LARGE_BLOOM, stock=EAGER, writer="BloomForCausalLM"),
    Family("mpt", "MptModel", "MptConfig", tokens, MPT, LARGE_MPT, layers=("n_layers",), stock=EAGER, writer="MptForCausalLM"),
    # Its eager attention adds the biases twice.
    Family("falcon", "FalconModel", "FalconConfig", tokens, FALCON, LARGE_FALCON, stock=SDPA_FIRST, writer="FalconForCausalLM"),
    Family(
        "inkling",
        "InklingTextModel",
        "InklingTextConfig",
        tokens,
        INKLING,
        LARGE_INKLING,
        around=parts.around_inkling,
        writer="InklingForCausalLM",
        padding_matters=False,
    ),
    Family(
        "inkling2",
        "Inkling2TextModel",
        "Inkling2TextConfig",
        tokens,
        INKLING2,
        LARGE_INKLING2,
        stock=EAGER,
        writer="Inkling2ForCausalLM",
    ),
    grid("sam", "SamVision", ("eager", "sdpa")),
    grid("sam_hq", "SamHQVision", ("eager", "sdpa")),
    grid("vitdet", "VitDet", small=SAM | VITDET, real=LARGE_SAM | VITDET),
    grid("seggpt", "SegGpt", small=WHOLE_GRID, real={}),
    grid("got_ocr2", "GotOcr2Vision"),
    grid("deepseek_ocr2", "DeepseekOcr2SamVision", ("eager", "sdpa")),
    grid("unlimited_ocr", "UnlimitedOcrSamVision", ("eager", "sdpa")),
    grid("slanext", "SLANeXtVision"),
    grid("pp_formulanet", "PPFormulaNetVision"),
)
FAMILIES = {family.name: family for family in EVERY}


def output(results: Any) -> torch.Tensor:
    """The main result of a model: the last hidden states, or logits."""
    main: torch.Tensor = results if isinstance(results, torch.Tensor) else results[0]
    return main
