"""Every family of transformers with other settings, and in training: enabled, it computes what the stock model does."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.tolerance import assert_near

pytest.importorskip("transformers")

from tests.cpu.models import (
    LENGTH,
    PADDED,
    T5,
    WAVLM,
    arguments,
    assert_same,
    both,
    build,
    counting,
    in_float64,
    operators_dropout,
    output,
    real,
    results,
)
from tests.cpu.whole_models import VISION, images, vision_encoder
from triton_relattn.integrations.transformers import enable

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "wav2vec2_bert": [
        {"position_embeddings_type": None},
        {"add_adapter": True},
        {"left_max_position_embeddings": 64, "right_max_position_embeddings": 50},
    ],
    "wav2vec2_bert_relative": [
        {"add_adapter": True, "num_adapter_layers": 2, "use_intermediate_ffn_before_adapter": True},
    ],
    "wav2vec2_conformer": [
        {"max_source_positions": 8},
        {"position_embeddings_type": "rotary"},
        {"position_embeddings_type": None},
    ],
    "seamless_m4t": [{"add_adapter": True}],
    "seamless_m4t_v2": [
        {"add_adapter": True},
        *({"speech_encoder_chunk_size": 10, "speech_encoder_left_chunk_num": left} for left in (1, -1, 0)),
    ],
    "parakeet": [{"num_key_value_heads": 2, "attention_bias": False, "scale_input": False}],
    "vits": [{"window_size": 50}, {"window_size": 1, "use_bias": False}],
    "inkling": [{"log_scaling_n_floor": None}, {"sliding_window_size": 50, "rel_extent": 60}, {"swa_num_key_value_heads": 1}],
    "inkling2": [{"qk_l2_clip_threshold": 50.0, "rel_l2_clip_threshold": 50.0, "log_scaling_n_floor": 1000}],
    "gemma4": [
        {"attention_chunk_size": 4, "attention_context_left": 2, "attention_context_right": 7},
        {"attention_chunk_size": 3, "attention_context_left": 2},
        {"use_clipped_linears": True},
    ],
    "gemma3n": [
        {"conf_attention_context_right": 3},
        {"conf_attention_chunk_size": 5, "conf_attention_context_left": 1},
        {"conf_attention_logit_cap": 3.0, "conf_reduction_factor": 4},
    ],
    "longt5": [
        {"local_radius": 50},
        {"local_radius": 1},
        {"encoder_attention_type": "transient-global", "global_block_size": 4},
    ],
    "t5": [{"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}],
    "umt5": [{"relative_attention_num_buckets": 4, "relative_attention_max_distance": 9}],
    "bloom": [{"apply_residual_connection_post_layernorm": True, "n_head": 4}],
    "mpt": [{"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.2}, "n_heads": 6}],
    "falcon": [
        {"multi_query": True},
        {"num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True, "parallel_attn": True},
    ],
    "deberta": [
        *({"pos_att_type": kind} for kind in (["c2p"], ["p2c"])),
        {"max_relative_positions": -1, "type_vocab_size": 2},
    ],
    "deberta_v2": [
        *({"pos_att_type": kind, "share_att_key": False} for kind in (["c2p"], ["p2c"])),
        {"position_buckets": -1, "max_relative_positions": 10},
        {"position_buckets": -1, "max_relative_positions": 60},
        {"position_buckets": 256, "max_relative_positions": -1},
        {"position_buckets": 7, "max_relative_positions": 11},
        {"position_buckets": 2, "max_relative_positions": 30},
    ],
    "sew_d": [{"pos_att_type": ["p2c"], "share_att_key": True}, {"position_buckets": -1, "max_relative_positions": 10}],
    "wavlm_stable": [{"num_buckets": 4, "max_bucket_distance": 5}],
    "speecht5": [{"encoder_max_relative_position": 160}, {"encoder_max_relative_position": 1}],
    "nemotron_asr_streaming": [
        {"default_num_lookahead_tokens": 0, "sliding_window": 5},
        {"sliding_window": 1, "default_num_lookahead_tokens": 40},
    ],
    "granite_speech": [{"context_size": 40, "max_pos_emb": 50}, {"context_size": LENGTH, "max_pos_emb": LENGTH}],
    "granite_speech5": [{"context_size": 1}],
    "phi4_multimodal": [
        {"bias_max_distance": 1000},
        {"bias_max_distance": 40, "bias_symmetric": True},
        {"chunk_size": 6, "left_chunk": 2},
    ],
    "sam": [{"window_size": 3}, {"image_size": 28}],
    "vitdet": [{"image_size": (28, 24)}],
}
SETTING = [pytest.param(name, changes, id=f"{name}-{n}") for name, all_of in SETTINGS.items() for n, changes in enumerate(all_of)]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "changes"), SETTING)
def test_other_settings(name: str, changes: dict[str, Any]) -> None:
    model = build(name, torch.float64, **changes)
    with in_float64():
        assert_same(*both(model, arguments(name, model, PADDED), counting(name, PADDED)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "length", "changes"),
    [
        ("phi4_multimodal", 730, {}),
        ("wavlm", 330, {"num_buckets": 316, "max_bucket_distance": 512}),
        ("wavlm", 900, {"max_bucket_distance": 800}),
    ],
    ids=["phi4_multimodal", "wavlm", "wavlm-clipped"],
)
def test_long_audio(name: str, length: int, changes: dict[str, Any]) -> None:
    """Phi-4 multimodal splits long audio into pieces of 500 frames and pads the last one. WavLM rounds its buckets differently
    from T5, which shows at distance 319 with this number of buckets. Distances are clipped without a warning."""
    model = build(name, torch.float64, layers=1, **changes)
    given = arguments(name, model, [length], length)  # Phi-4's stock model cannot split a batch of two
    with in_float64(), warnings.catch_warnings():
        warnings.filterwarnings("error", "the .* rows of a table")
        assert_same(*both(model, given))


CONFORMER = {"attention_dropout": 0.2, "hidden_dropout": 0.1, "activation_dropout": 0.1, "conformer_conv_dropout": 0.1}
SEAMLESS = {"speech_encoder_dropout": 0.2, "adaptor_dropout": 0.1}
FAST_CONFORMER = {"attention_dropout": 0.2, "dropout": 0.1, "activation_dropout": 0.1, "dropout_positions": 0.0}
USUAL = {"attention_dropout": 0.2, "hidden_dropout": 0.1, "activation_dropout": 0.1}
PROBABILITIES = {"attention_probs_dropout_prob": 0.2, "hidden_dropout_prob": 0.1}
DROPOUT: dict[str, dict[str, Any]] = {
    "wav2vec2_bert": {**CONFORMER, "feat_proj_dropout": 0.1},
    "wav2vec2_bert_relative": {**CONFORMER, "feat_proj_dropout": 0.1},
    "wav2vec2_conformer": CONFORMER,
    "seamless_m4t": SEAMLESS,
    "seamless_m4t_v2": SEAMLESS,
    "parakeet": FAST_CONFORMER,
    "parakeet_attention": {"attention_dropout": 0.2},
    "vits": USUAL,
    **{name: {"attention_dropout": 0.2} for name in ("inkling", "inkling2")},
    **{name: {"dropout_rate": 0.2} for name in (*T5, "phi4_multimodal")},
    **{name: {"attention_dropout": 0.2, "hidden_dropout": 0.1} for name in ("bloom", "falcon")},
    # Hidden dropout draws in the memory order of stock attention's output, (N, B, C), which is not compared.
    **{name: {**USUAL, "hidden_dropout": 0.0} for name in WAVLM},
    **dict.fromkeys(("mpnet", "deberta", "deberta_v2"), PROBABILITIES),
    # Their attention dropout is drawn in another order.
    "sew_d": {**USUAL, "attention_dropout": 0.0},
    "nemotron_asr_streaming": {**FAST_CONFORMER, "attention_dropout": 0.0},
    "speecht5": USUAL,
    "fastspeech2_conformer": {f"encoder_{kind}_rate": 0.1 for kind in ("attention_dropout", "dropout", "positional_dropout")},
    **{name: {"dropout": 0.1} for name in ("granite_speech", "granite_speech_plus")},
    "granite_speech5": {"attention_dropout": 0.2, "activation_dropout": 0.1},
    **{name: {"attention_dropout": 0.2} for name in VISION if name not in ("vitdet", "seggpt")},
    "vitdet": {"dropout_prob": 0.2},
    # Gemma's have no dropout, SegGPT drops whole layers, MPT's config only accepts integers, LongT5 draws in blocks.
    **{name: {} for name in ("gemma4", "gemma3n", "seggpt", "mpt", "longt5")},
}
TRAINED = [
    *(pytest.param(name, changes, id=name) for name, changes in DROPOUT.items()),
    *(
        pytest.param(name, {**DROPOUT[name], setting: 0.5}, id=f"{name}-{setting}")
        for setting, names in {
            "layerdrop": ["wav2vec2_bert", "parakeet", "vits", "wavlm", "nemotron_asr_streaming"],
            "encoder_layerdrop": ["speecht5"],
            "dropout_positions": ["parakeet", "nemotron_asr_streaming"],
        }.items()
        for name in names
    ),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "changes"), TRAINED)
def test_training(name: str, changes: dict[str, Any]) -> None:
    """Training with all kinds of dropout; the stock attention drops the same probabilities as the operator."""
    dropped_layers = any("layerdrop" in change for change in changes)
    steady = {name: 0.0 for name in ("layerdrop", "speech_encoder_layerdrop", "encoder_layerdrop") if name not in changes}
    model = build(name, torch.float64, layers=6 if dropped_layers else 2, **{**steady, **changes}).train()
    given = arguments(name, model, PADDED)
    # Queries that see no key weight all keys evenly and drop none; with dropped positions each sequence has its own table.
    counts = real(PADDED) if name in ("parakeet", "deberta", "deberta_v2") else counting(name, PADDED)
    one_by_one = name == "parakeet_attention" or changes.get("dropout_positions", 0.0) > 0
    names = ("speech_encoder_attention_heads", "conf_num_attention_heads", "num_attention_heads")
    heads = next(getattr(model.config, attribute) for attribute in names if hasattr(model.config, attribute))
    with in_float64():
        with operators_dropout(heads, one_by_one):
            stock = results(model, given, counts)
        enable(model)
        ours = results(model, given, counts)
        if changes:
            assert (results(model, given, counts, seed=5)["out"] - ours["out"]).abs().max() > 0.1, "nothing is dropped"
    skipped = {path for path, _ in model.named_parameters() if "layers." in path} - stock.keys()
    assert bool(skipped) == dropped_layers
    assert_same(ours, stock)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["mpnet", "deberta_v2", "sew_d", "bloom", "fastspeech2_conformer"])
def test_dropout_in_evaluation(name: str) -> None:
    """Dropout modules in training mode drop, also in a model in eval mode (Monte Carlo dropout)."""
    model = build(name).eval()
    given = arguments(name, model, PADDED)
    enable(model)
    for module in model.modules():
        dropout = getattr(module, "attention_dropout", getattr(module, "dropout", None))
        if "Attention" in type(module).__name__ and isinstance(dropout, nn.Module):
            vars(dropout).update({"drop_prob" if hasattr(dropout, "drop_prob") else "p": 0.5})
            dropout.train()
    assert not model.training and not torch.equal(output(model, given), output(model, given))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["sam", "sam_hq", "deepseek_ocr2", "unlimited_ocr"])
def test_dropout_of_vision_encoders_is_eagers(name: str) -> None:
    """Enabled, the classes for sdpa drop nothing, like their stock classes; those for eager drop."""
    given = images(name)
    eager, sdpa = (vision_encoder(name, kind, attention_dropout=0.5).train() for kind in ("eager", "sdpa"))
    stock = output(sdpa, given)
    enable(eager)
    enable(sdpa)
    assert_near("sdpa", output(sdpa, given), stock)
    assert (output(eager, given) - stock).abs().max() > 0.01


@pytest.mark.parametrize(("kind", "named"), [("rotary", "rotary positions, no relative term"), (None, "no positions")])
def test_the_report_names_what_is_no_relative_term(kind: str | None, named: str) -> None:
    report = enable(build("wav2vec2_conformer", position_embeddings_type=kind))
    assert {row.kind for row in report.rows} == {f"Wav2Vec2-Conformer: {named}"}
