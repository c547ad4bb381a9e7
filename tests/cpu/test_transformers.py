"""The numbers of transformers' models, enabled, are those of the stock models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tolerance import assert_near, within

pytest.importorskip("transformers")

from bench.families import FAMILIES
from tests.cpu.models import (
    LENGTH,
    PADDED,
    T5,
    Results,
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
from triton_relattn.integrations.proof import counted
from triton_relattn.integrations.transformers import disable, enable
from triton_relattn.testing import assert_within_budget

WHOLE = [LENGTH, LENGTH]
CONFORMER = {"attention_dropout": 0.2, "hidden_dropout": 0.1, "activation_dropout": 0.1, "conformer_conv_dropout": 0.1}
SEAMLESS = {"speech_encoder_dropout": 0.2, "adaptor_dropout": 0.1}
SAM = ("sam", "sam_hq", "got_ocr2", "deepseek_ocr2", "unlimited_ocr", "slanext", "pp_formulanet")
# Its hidden dropout draws in the order of stock attention's memory, (N, B, C): not what is compared.
WAVLM = ("wavlm", "wavlm_stable")
DROPOUT: dict[str, dict[str, Any]] = {
    "wav2vec2_bert": {**CONFORMER, "feat_proj_dropout": 0.1},
    "wav2vec2_bert_relative": {**CONFORMER, "feat_proj_dropout": 0.1},
    "wav2vec2_conformer": CONFORMER,
    "seamless_m4t": SEAMLESS,
    "seamless_m4t_v2": SEAMLESS,
    "parakeet": {"attention_dropout": 0.2, "dropout": 0.1, "activation_dropout": 0.1, "dropout_positions": 0.0},
    "parakeet_attention": {"attention_dropout": 0.2},
    "vits": {"attention_dropout": 0.2, "hidden_dropout": 0.1, "activation_dropout": 0.1},
    "inkling": {"attention_dropout": 0.2},
    "inkling2": {"attention_dropout": 0.2},
    "gemma4": {},  # has none
    **{name: {"dropout_rate": 0.2} for name in T5},
    "longt5": {},  # what its encoder's attention drops is drawn in blocks, and all dropout has one rate
    "bloom": {"attention_dropout": 0.2, "hidden_dropout": 0.1},
    "mpt": {},  # its config takes whole numbers alone
    "falcon": {"attention_dropout": 0.2, "hidden_dropout": 0.1},
    **{name: {"attention_dropout": 0.2, "hidden_dropout": 0.0, "activation_dropout": 0.1} for name in WAVLM},
    "mpnet": {"attention_probs_dropout_prob": 0.2, "hidden_dropout_prob": 0.1},
    **{name: {"attention_probs_dropout_prob": 0.2, "hidden_dropout_prob": 0.1} for name in ("deberta", "deberta_v2")},
    # Its attention has a dropout of its own kind, see DROPPED.
    "sew_d": {"attention_dropout": 0.0, "hidden_dropout": 0.1, "activation_dropout": 0.1},
    "speecht5": {"attention_dropout": 0.2, "hidden_dropout": 0.1, "activation_dropout": 0.1},
    "fastspeech2_conformer": {
        "encoder_attention_dropout_rate": 0.2,
        "encoder_dropout_rate": 0.1,
        "encoder_positional_dropout_rate": 0.1,
    },
    # Its attention's dropout draws for the keys that a chunk sees, not for all.
    "nemotron_asr_streaming": {"attention_dropout": 0.0, "dropout": 0.1, "activation_dropout": 0.1, "dropout_positions": 0.0},
    "granite_speech": {"dropout": 0.1},  # not of its attention
    "granite_speech_plus": {"dropout": 0.1},
    "granite_speech5": {"attention_dropout": 0.2, "activation_dropout": 0.1},
    "gemma3n": {},  # has none
    "phi4_multimodal": {"dropout_rate": 0.2},
    **{name: {"attention_dropout": 0.2} for name in SAM},
    "vitdet": {"dropout_prob": 0.2},  # not of its attention
    "seggpt": {},  # has none but that of whole layers
}
LAYERDROP = {
    "wav2vec2_bert": "layerdrop",
    "wav2vec2_bert_relative": "layerdrop",
    "wav2vec2_conformer": "layerdrop",
    "seamless_m4t": "speech_encoder_layerdrop",
    "seamless_m4t_v2": "speech_encoder_layerdrop",
    "parakeet": "layerdrop",
    "vits": "layerdrop",
    "wavlm": "layerdrop",
    "wavlm_stable": "layerdrop",
    "speecht5": "encoder_layerdrop",
    "nemotron_asr_streaming": "layerdrop",
}
NOT_A_NUMBER = WAVLM
"""Families whose stock attention gives NaN for a query that sees no key."""
every_family = pytest.mark.parametrize("name", FAMILIES)
every_padding = pytest.mark.parametrize("lengths", [WHOLE, PADDED], ids=["whole", "padded"])


def heads(model: Any) -> int:
    config = model.config
    names = ("speech_encoder_attention_heads", "conf_num_attention_heads", "num_attention_heads")
    return next(getattr(config, name) for name in names if hasattr(config, name))


@every_padding
@every_family
def test_the_same_in_float64(name: str, lengths: list[int]) -> None:
    model = build(name, torch.float64)
    with in_float64():
        ours, stock = both(model, arguments(name, model, lengths), counting(name, lengths))
    assert_same(ours, stock)


@every_padding
@every_family
def test_as_exact_in_float32(name: str, lengths: list[int]) -> None:
    model = build(name)
    given, counts = arguments(name, model, lengths), counting(name, lengths)
    ours, stock = both(model, given, counts)
    exact = copy.deepcopy(model).double()
    with in_float64():
        golden = results(exact, {k: v.double() if v.is_floating_point() else v for k, v in given.items()}, counts)
    assert_as_exact(ours, stock, golden)


def assert_as_exact(ours: Results, stock: Results, golden: Results) -> None:
    """The output, and all gradients at once, each relative to its largest number or, if it cancels to nothing, to the others'.

    Four times stock's error is allowed. Both are rounding errors, and which is larger is a matter of luck: of five stock models
    whose parameters differ by a unit, the largest error of one is 1.4 times that of another (median of all families), 2.5 times
    in the worst but one and 4.1 times in the worst. What is computed in a lower precision is thousands of times farther off.
    """
    assert_within_budget("out", ours["out"], golden["out"], stock["out"], factor=4)
    names = golden.keys() - {"out"}
    largest = max(float(golden[name].abs().max()) for name in names)
    size = {name: max(float(golden[name].abs().max()), 1e-2 * largest) for name in names}
    together = [torch.cat([each[name].flatten() / size[name] for name in names]) for each in (ours, golden, stock)]
    assert_within_budget("gradients", *together, factor=4)
    error, usual = ((each - together[1]).norm() for each in (together[0], together[2]))
    within("norm of the gradients' errors", error, 4 * usual)


@pytest.mark.parametrize(
    ("lengths", "layerdrop"), [(WHOLE, 0.0), (PADDED, 0.0), (PADDED, 0.5)], ids=["whole", "padded", "layerdrop"]
)
@every_family
def test_the_same_in_training(name: str, lengths: list[int], layerdrop: float) -> None:
    """With all kinds of dropout, of which the attention's drops what the operator does."""
    if layerdrop and name not in LAYERDROP:
        pytest.skip("no layerdrop")
    changes = {**DROPOUT[name], **({LAYERDROP[name]: layerdrop} if name in LAYERDROP else {})}
    model = build(name, torch.float64, layers=6 if layerdrop else 2, **changes).train()
    given = arguments(name, model, lengths)
    # Queries that see no key see all evenly, and drop none.
    counts = real(lengths) if name in ("parakeet", "deberta", "deberta_v2") else counting(name, lengths)
    with in_float64():
        with operators_dropout(heads(model), one_by_one=name == "parakeet_attention"):
            stock = results(model, given, counts)
        enable(model)
        ours = results(model, given, counts)
        if DROPOUT[name]:
            assert (results(model, given, counts, seed=5)["out"] - ours["out"]).abs().max() > 0.1, "nothing is dropped"
    skipped = {each for each, _ in model.named_parameters() if "layers." in each} - stock.keys()
    assert bool(skipped) == (layerdrop > 0)
    # Batch normalisation takes the gradient of a bias before it away.
    assert_same(ours, stock)


@pytest.mark.parametrize(
    "name", ["t5", "mt5", "umt5", "switch_transformers", "pop2piano", "wav2vec2_bert", "parakeet", "vits", "mpnet", "deberta_v2"]
)
def test_a_sequence_that_is_all_padding(name: str) -> None:
    """In encoders and in cross attention it has the eager path's outputs and gradients: all keys evenly, differentiably."""
    model = build(name, torch.float64)
    given = arguments(name, model, WHOLE)
    given["attention_mask"][1] = 0
    with in_float64():
        assert_same(*both(model, given))


@every_padding
@pytest.mark.parametrize("name", ["parakeet", "nemotron_asr_streaming"])
def test_dropout_of_positions(name: str, lengths: list[int]) -> None:
    """Each sequence has a table of its own, and its own call of the operator."""
    model = build(name, torch.float64, **{**DROPOUT[name], "dropout_positions": 0.2, "layerdrop": 0.0}).train()
    given, counts = arguments(name, model, lengths), real(lengths)
    with in_float64():
        with operators_dropout(heads(model), one_by_one=True):
            stock = results(model, given, counts)
        enable(model)
        ours = results(model, given, counts)
    assert_same(ours, stock)


def test_parakeet_drops_no_even_probabilities() -> None:
    """Queries that are padding get the mean of all values, in training too."""
    model = build("parakeet", attention_dropout=0.5, dropout=0.0, activation_dropout=0.0, dropout_positions=0.0, layerdrop=0.0)
    attention = model.get_submodule("layers.0.self_attn").train()
    enable(attention)
    states = torch.randn(1, 9, 32)
    mask = (torch.arange(9) < 6)[None, None, None]
    positions = torch.randn(1, 17, 32)
    trained = attention(states, position_embeddings=positions, attention_mask=mask)[0]
    attention.eval()
    steady = attention(states, position_embeddings=positions, attention_mask=mask)[0]
    assert_near("trained", trained[:, 6:], steady[:, 6:])
    assert not torch.equal(trained[:, :6], steady[:, :6])


CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert, no positions": ("wav2vec2_bert", {"position_embeddings_type": None}),
    "bert, rotary": ("wav2vec2_bert", {"position_embeddings_type": "rotary"}),
    "bert, adapter": ("wav2vec2_bert", {"add_adapter": True}),
    "bert, adapters": (
        "wav2vec2_bert_relative",
        {"add_adapter": True, "num_adapter_layers": 2, "use_intermediate_ffn_before_adapter": True},
    ),
    "bert, table beyond the ends": ("wav2vec2_bert", {"left_max_position_embeddings": 64, "right_max_position_embeddings": 50}),
    "bert, table to the left": ("wav2vec2_bert", {"left_max_position_embeddings": 3, "right_max_position_embeddings": 0}),
    "conformer, no positions": ("wav2vec2_conformer", {"position_embeddings_type": None}),
    "conformer, rotary": ("wav2vec2_conformer", {"position_embeddings_type": "rotary"}),
    "conformer, few positions": ("wav2vec2_conformer", {"max_source_positions": 8}),
    "seamless, adapter": ("seamless_m4t", {"add_adapter": True}),
    "seamless, rotary": ("seamless_m4t", {"add_adapter": True, "position_embeddings_type": "rotary"}),
    "seamless 2, adapter": ("seamless_m4t_v2", {"add_adapter": True}),
    "seamless 2, chunks": ("seamless_m4t_v2", {"speech_encoder_chunk_size": 10, "speech_encoder_left_chunk_num": 1}),
    "seamless 2, all to the left": ("seamless_m4t_v2", {"speech_encoder_chunk_size": 10, "speech_encoder_left_chunk_num": -1}),
    "seamless 2, chunks alone": ("seamless_m4t_v2", {"speech_encoder_chunk_size": 10, "speech_encoder_left_chunk_num": 0}),
    "parakeet, shared keys": ("parakeet", {"num_key_value_heads": 2, "attention_bias": False, "scale_input": False}),
    "vits, wide window": ("vits", {"window_size": 50}),
    "vits, no bias": ("vits", {"window_size": 1, "use_bias": False}),
    "inkling, no log scaling": ("inkling", {"log_scaling_n_floor": None}),
    "inkling, experts": (
        "inkling",
        {
            "mlp_layer_types": ["dense", "sparse"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "n_shared_experts": 1,
            "experts_implementation": "eager",
        },
    ),
    "inkling, wide": ("inkling", {"sliding_window_size": 50, "rel_extent": 60}),
    "inkling, shared keys in the window": ("inkling", {"swa_num_key_value_heads": 1}),
    "gemma4, into the future": ("gemma4", {"attention_context_right": 3}),
    "gemma4, chunks longer than the past": ("gemma4", {"attention_chunk_size": 16, "attention_context_left": 5}),
    "gemma4, short": ("gemma4", {"attention_chunk_size": 4, "attention_context_left": 2, "attention_context_right": 7}),
    "gemma4, one frame": ("gemma4", {"attention_chunk_size": 3, "attention_context_left": 2}),
    "gemma4, clipped": ("gemma4", {"use_clipped_linears": True}),
    "longt5, wide": ("longt5", {"local_radius": 50}),
    "longt5, few neighbours": ("longt5", {"local_radius": 1}),
    "longt5, transient-global": ("longt5", {"encoder_attention_type": "transient-global", "global_block_size": 4}),
    "bloom, normalised residuals": ("bloom", {"apply_residual_connection_post_layernorm": True, "n_head": 4}),
    "mpt, clipped, other slopes": ("mpt", {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.2}, "n_heads": 6}),
    "falcon, one head of keys": ("falcon", {"multi_query": True}),
    "falcon, fewer heads of keys": (
        "falcon",
        {"num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True, "parallel_attn": True},
    ),
    "falcon, in parallel": ("falcon", {"parallel_attn": True, "bias": False}),
    **{
        f"{name}, {kind or 'neither'}": (name, {"pos_att_type": kind.split(), "share_att_key": name == "sew_d"})
        for name in ("deberta", "deberta_v2", "sew_d")
        for kind in ("c2p", "p2c", "")
    },
    "deberta, no relative attention": ("deberta", {"relative_attention": False, "position_biased_input": True}),
    "deberta, all distances differ": ("deberta", {"max_relative_positions": -1, "type_vocab_size": 2}),
    "deberta 2, no relative attention": ("deberta_v2", {"relative_attention": False}),
    "deberta 2, projections of its own": ("deberta_v2", {"share_att_key": False, "norm_rel_ebd": "none"}),
    "deberta 2, no buckets": ("deberta_v2", {"position_buckets": -1, "max_relative_positions": 10}),
    "deberta 2, no buckets, all distances differ": ("deberta_v2", {"position_buckets": -1, "max_relative_positions": 60}),
    "deberta 2, buckets for all distances": ("deberta_v2", {"position_buckets": 256, "max_relative_positions": -1}),
    "deberta 2, an odd number of buckets": ("deberta_v2", {"position_buckets": 7, "max_relative_positions": 11}),
    "deberta 2, two buckets": ("deberta_v2", {"position_buckets": 2, "max_relative_positions": 30}),
    "deberta 2, four buckets": ("deberta_v2", {"position_buckets": 4, "max_relative_positions": 4}),
    "deberta 2, convolution": ("deberta_v2", {"conv_kernel_size": 3, "conv_act": "gelu"}),
    "deberta 2, convolution of groups": ("deberta_v2", {"conv_kernel_size": 5, "conv_groups": 4}),
    "sew-d, projections of its own": ("sew_d", {"share_att_key": False, "norm_rel_ebd": "none", "squeeze_factor": 1}),
    "sew-d, no buckets": ("sew_d", {"position_buckets": -1, "max_relative_positions": 10}),
    "wavlm, all distances differ": ("wavlm", {"num_buckets": 320, "max_bucket_distance": 800}),
    "wavlm, few buckets": ("wavlm_stable", {"num_buckets": 4, "max_bucket_distance": 5}),
    "speecht5, table beyond the ends": ("speecht5", {"encoder_max_relative_position": 160}),
    "speecht5, one row to each side": ("speecht5", {"encoder_max_relative_position": 1}),
    "fastspeech2, normalised afterwards": ("fastspeech2_conformer", {"encoder_normalize_before": True}),
    "nemotron, frame by frame": ("nemotron_asr_streaming", {"default_num_lookahead_tokens": 0, "sliding_window": 5}),
    "nemotron, its own chunk alone": ("nemotron_asr_streaming", {"sliding_window": 1, "default_num_lookahead_tokens": 40}),
    "granite, one block": ("granite_speech", {"context_size": 40, "max_pos_emb": 50}),
    "granite, whole blocks": ("granite_speech", {"context_size": LENGTH, "max_pos_emb": LENGTH}),
    "granite 5, blocks of one": ("granite_speech5", {"context_size": 1}),
    "granite 5, twice half the frames": ("granite_speech5", {"subsample_layers": [0, 1]}),
    "gemma3n, into the future": ("gemma3n", {"conf_attention_context_right": 3}),
    "gemma3n, chunks longer than the past": ("gemma3n", {"conf_attention_chunk_size": 16, "conf_attention_context_left": 5}),
    "gemma3n, itself alone": ("gemma3n", {"conf_attention_chunk_size": 5, "conf_attention_context_left": 1}),
    "gemma3n, softer": ("gemma3n", {"conf_attention_logit_cap": 3.0, "conf_reduction_factor": 4}),
    "phi4, all distances differ": ("phi4_multimodal", {"bias_max_distance": 1000}),
    "phi4, symmetric": ("phi4_multimodal", {"bias_max_distance": 40, "bias_symmetric": True}),
    "phi4, chunks": ("phi4_multimodal", {"chunk_size": 6, "left_chunk": 2}),
    "inkling2, wide": ("inkling2", {"sliding_window_size": 50, "rel_extent": 60}),
    "inkling2, softer": ("inkling2", {"qk_l2_clip_threshold": 50.0, "rel_l2_clip_threshold": 50.0, "log_scaling_n_floor": 1000}),
    "t5, all distances differ": ("t5", {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}),
    "t5, gated": ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "sam, small windows": ("sam", {"window_size": 3}),
    "sam, tables that fit the height": ("sam", {"image_size": 28}),
    "sam, large tables": ("sam_hq", {"image_size": 256}),
    "sam, windows larger than the image": ("got_ocr2", {"window_size": 9}),
    "sam, wide heads": ("slanext", {"num_attention_heads": 1, "qkv_bias": False}),
    "vitdet, tables that fit": ("vitdet", {"image_size": (28, 24)}),
    "seggpt, small tables": ("seggpt", {"image_size": (12, 8)}),
    "umt5, few buckets": ("umt5", {"relative_attention_num_buckets": 4, "relative_attention_max_distance": 9}),
}


@pytest.mark.parametrize("case", CHANGES)
def test_other_settings(case: str) -> None:
    name, changes = CHANGES[case]
    model = build(name, torch.float64, **changes)
    with in_float64():
        ours, stock = both(model, arguments(name, model, PADDED), counting(name, PADDED))
    assert_same(ours, stock)


@pytest.mark.parametrize("length", [1, 9, 24])
@every_family
def test_other_lengths(name: str, length: int) -> None:
    """Shorter than windows and tables, and a multiple of Gemma's chunk."""
    if length == 1 and name == "granite_speech5":
        pytest.skip("takes half as many frames")
    model = build(name, torch.float64)
    with in_float64():
        ours, stock = both(model, arguments(name, model, [length, length], length))
    assert_same(ours, stock)


@pytest.mark.parametrize("add_adapter", [False, True])
def test_chunks_that_are_all_padding(add_adapter: bool) -> None:
    """Their queries see no key; the adapter's convolution carries what they get to real frames beside them."""
    changes = {"speech_encoder_chunk_size": 10, "speech_encoder_left_chunk_num": 0, "add_adapter": add_adapter}
    model = build("seamless_m4t_v2", torch.float64, **changes)
    given = arguments("seamless_m4t_v2", model, [LENGTH, 20])
    stock = output(model, given)
    enable(model)
    ours = output(model, given)
    real_frames = 5 if add_adapter else 20
    assert_near("ours", ours[0], stock[0])
    assert_near("ours", ours[1, :real_frames], stock[1, :real_frames])


@pytest.mark.parametrize(
    "name",
    [
        *("wav2vec2_bert", "wav2vec2_bert_relative", "wav2vec2_conformer", "seamless_m4t_v2", "vits"),
        *("mpnet", "deberta", "deberta_v2", "sew_d", *WAVLM),
    ],
)
def test_padding_anywhere(name: str) -> None:
    """Frames that are hidden first and in between, not only last."""
    model = build(name, torch.float64)
    given = arguments(name, model, PADDED)
    hidden = torch.rand(given["attention_mask"].shape) < 0.3
    given["attention_mask"] = given["attention_mask"].masked_fill(hidden, 0)
    with in_float64():
        ours, stock = both(model, given)
    assert_same(ours, stock)


@pytest.mark.parametrize("lengths", [PADDED, [LENGTH, 0]], ids=["padded", "nothing"])
def test_padding_in_longt5s_encoder(lengths: list[int]) -> None:
    """Real tokens do not see it."""
    model = build("longt5").get_submodule("encoder")
    given = {"input_ids": torch.randint(1, 50, (2, LENGTH)), "attention_mask": real(lengths)[..., 0].float()}
    stock = output(model, given)
    enable(model)
    assert_near("output", counted(output(model, given), real(lengths)), counted(stock, real(lengths)))


DROPPED: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "longt5": ("dropout_rate", "encoder.block.0.layer.0.LocalSelfAttention", {}, ("v", "o")),
    "nemotron_asr_streaming": (
        "attention_dropout",
        "layers.0.self_attn",
        {"position_embeddings": torch.ones(100, 23, 32), "chunks": (4, 1)},
        ("v_proj", "o_proj"),
    ),
    "sew_d": (
        "attention_dropout",
        "encoder.layer.0.attention.self",
        {"attention_mask": torch.ones(100, 1, 1, 12), "rel_embeddings": torch.ones(16, 32)},
        ("value_proj",),
    ),
}


@pytest.mark.parametrize("name", DROPPED)
def test_as_many_probabilities_are_dropped(name: str) -> None:
    """Dropout keeps the mean of the summed weights at 1. The stock model drops other weights: it draws in another order."""
    rate, part, given, projections = DROPPED[name]
    changes: dict[str, Any] = {rate: 0.3}
    attention: Any = build(name, layers=1, **changes).get_submodule(part)
    enable(attention)
    for projection in projections:
        setattr(attention, projection, torch.nn.Identity())
    with torch.no_grad():
        sums = attention.train()(torch.ones(100, 12, 32), **given)[0]
        assert_near("sums", attention.eval()(torch.ones(100, 12, 32), **given)[0], torch.ones_like(sums))
    assert sums.std() > 0.1
    assert abs(float(sums.mean()) - 1) < 5 * float(sums.std()) / (100 * 12 * 4) ** 0.5


def test_pieces_of_long_audio() -> None:
    """Phi-4 multimodal cuts frames into pieces of 500, the last one padded."""
    model = build("phi4_multimodal", torch.float64, layers=1)
    given = arguments("phi4_multimodal", model, [730], 730)  # the stock model cannot cut two
    with in_float64():
        assert_same(*both(model, given))


@pytest.mark.parametrize("lookahead", [0, 3, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_streaming(lookahead: int, masked: bool) -> None:
    """Nemotron, with caches that forget, in pieces that begin and end within chunks; a mask is counted from position 0."""
    model = build("nemotron_asr_streaming", torch.float64, sliding_window=9)
    features = arguments("nemotron_asr_streaming", model, [LENGTH, LENGTH])["input_features"]

    def in_pieces() -> torch.Tensor:
        past: dict[str, Any] = {}
        frames: list[torch.Tensor] = []
        for piece in features.split([25, 32, 16, 8, 64, 144], 1):
            mask = {"attention_mask": torch.ones(piece.shape[:2], dtype=torch.bool)} if masked else {}
            made = model(piece, num_lookahead_tokens=lookahead, use_cache=True, **mask, **past)
            past = {"past_key_values": made.past_key_values, "padding_cache": made.padding_cache}
            frames.append(made.last_hidden_state)
        return torch.cat(frames, 1)

    with torch.no_grad(), in_float64():
        stock = in_pieces()
        enable(model)
        ours = in_pieces()
    assert ours.shape == (2, LENGTH, 32)
    assert_near("ours", ours, stock)


def test_gemma4_without_a_past() -> None:
    """A window that hides even a frame from itself: what the stock model makes of it, or an error."""
    model = build("gemma4", torch.float64, attention_chunk_size=3, attention_context_left=1)
    given = arguments("gemma4", model, PADDED)
    with in_float64():
        stock = results(model, given)
        try:
            enable(model)
            ours = results(model, given)
        except ValueError:
            return
    assert_same(ours, stock)


@every_family
def test_without_a_mask(name: str) -> None:
    model = build(name, torch.float64)
    given = arguments(name, model, WHOLE)
    given.pop("attention_mask", None)
    with in_float64():
        assert_same(*both(model, given))


@every_family
def test_a_sequence_of_padding(name: str) -> None:
    """Nothing in it sees a key; what the stock model makes of that, and the other sequence as if it were alone."""
    if name == "longt5":
        pytest.skip("what its encoder makes of padding depends on the precision")
    model = build(name, torch.float64)
    given = arguments(name, model, [LENGTH, 0])
    with in_float64():
        if name not in NOT_A_NUMBER:
            assert_same(*both(model, given, counting(name, [LENGTH, 0])))
            return
        stock = output(model, given)
        enable(model)
        ours = output(model, given)
    assert stock[1].isnan().any() and ours.isfinite().all()
    assert_near("ours", ours[0], stock[0])


@pytest.mark.parametrize("holes", [False, True])
def test_inkling_padded_on_the_left(holes: bool) -> None:
    """Padding first, or anywhere."""
    model = build("inkling", torch.float64)
    given = arguments("inkling", model, WHOLE)
    mask = torch.arange(LENGTH) >= torch.tensor([0, 14])[:, None]
    if holes:
        mask = mask & (torch.rand(2, LENGTH) > 0.3)
    given["attention_mask"] = mask.long()
    with in_float64():
        assert_same(*both(model, given, mask[..., None]))


QUERY, KEY = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
MASKS = {
    "causal": KEY <= QUERY,  # in sliding layers, too: nobody has asked for their window
    "window": (KEY <= QUERY) & (QUERY - KEY < 5),
    "prefix": (KEY <= QUERY) | (KEY < 12),  # a prefix that is seen from all positions
    "everything": torch.ones(LENGTH, LENGTH, dtype=torch.bool),
    "documents": (KEY <= QUERY) & ((KEY < 20) == (QUERY < 20)),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bool], ids=["float", "bool"])
def test_a_mask_of_the_users(kind: str, dtype: torch.dtype) -> None:
    """(B, 1, Nq, Nk), used as it is in all layers; a bool mask, which stock eager adds to the logits, as that of numbers."""
    model = build("inkling", torch.float64)
    given = arguments("inkling", model, WHOLE)
    seen = MASKS[kind].expand(2, 1, -1, -1)
    numbers = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    with in_float64():
        stock = results(model, {**given, "attention_mask": numbers})
        enable(model)
        ours = results(model, {**given, "attention_mask": seen if dtype == torch.bool else numbers})
    assert_same(ours, stock)


def test_numbers_in_a_mask_of_the_users() -> None:
    """They are added to the logits."""
    model = build("inkling", torch.float64)
    given = arguments("inkling", model, WHOLE)
    numbers = torch.randn(2, 1, LENGTH, LENGTH, dtype=torch.float64)
    seen = {"full_attention": MASKS["causal"], "sliding_attention": MASKS["window"]}
    masks = {layers: numbers.masked_fill(~each, torch.finfo(numbers.dtype).min) for layers, each in seen.items()}
    with in_float64():
        assert_same(*both(model, {**given, "attention_mask": {**masks, "linear_attention": None}}))


@pytest.mark.parametrize("ends", [[20], [7, 9, 30]])
def test_packed_sequences(ends: list[int]) -> None:
    """Positions that start again start another sequence."""
    model = build("inkling", torch.float64)
    given = arguments("inkling", model, WHOLE)
    pieces = torch.tensor([0, *ends, LENGTH]).diff().tolist()
    positions = torch.cat([torch.arange(piece) for piece in pieces])
    packed = {"input_ids": given["input_ids"], "position_ids": positions.expand(2, -1)}
    with in_float64():
        ours, stock = both(model, packed)
        apart = results(model, {"input_ids": given["input_ids"]})
    assert_same(ours, stock)
    assert (apart["out"] - stock["out"]).abs().max() > 0.1


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("place", ["call", "config"])
def test_attention_in_both_directions(place: str, is_causal: bool) -> None:
    model = build("inkling", torch.float64)
    given = {**arguments("inkling", model, PADDED), **({"is_causal": is_causal} if place == "call" else {})}
    if place == "config":
        model.config.is_causal = is_causal
    with in_float64():
        assert_same(*both(model, given, real(PADDED)))


def causal_model(**changes: Any) -> Any:
    from transformers import InklingForCausalLM, InklingTextConfig

    torch.manual_seed(0)
    config = InklingTextConfig(**{**FAMILIES["inkling"].small, "num_hidden_layers": 2, **changes})
    model = InklingForCausalLM._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("how", [{}, {"use_cache": False}, {"num_beams": 2}], ids=["cache", "no cache", "beams"])
def test_generation(how: dict[str, Any], padding: int) -> None:
    """The same tokens, one at a time with keys of the past, in batches that are padded on the left."""
    model = causal_model()
    tokens = torch.randint(1, 50, (2, 12))
    mask = (torch.arange(12) >= torch.tensor([[padding], [0]])).long()
    how = {"attention_mask": mask, "max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **how}
    stock = model.generate(tokens, **how)
    enable(model)
    ours = model.generate(tokens, **how)
    assert torch.equal(ours, stock)
    assert len(set(ours[0, 12:].tolist())) > 3, "always the same token"


@pytest.mark.parametrize("padding", [0, 5])
def test_parts_of_a_sequence_with_a_cache(padding: int) -> None:
    """Logits of pieces of several tokens, each after what came before."""
    model = causal_model()
    tokens = torch.randint(1, 50, (2, LENGTH))
    mask = (torch.arange(LENGTH) >= torch.tensor([[padding], [0]])).long()

    def in_pieces() -> torch.Tensor:
        past: Any = None
        logits: list[torch.Tensor] = []
        for start, stop in ((0, 9), (9, 10), (10, 25), (25, LENGTH)):
            made = model(tokens[:, start:stop], attention_mask=mask[:, :stop], past_key_values=past, use_cache=True)
            past = made.past_key_values
            logits.append(made.logits)
        return torch.cat(logits, 1)

    with torch.no_grad():
        stock = in_pieces()
        enable(model)
        ours, whole = in_pieces(), model(tokens, attention_mask=mask).logits
    shown = mask.bool()[..., None]
    assert_near("ours", counted(ours, shown), counted(stock, shown))
    assert_near("ours", ours[:, padding:], whole[:, padding:])


def test_parts_of_a_sequence_with_a_static_cache() -> None:
    """The numbers of the whole sequence, and what comes later stays unseen.

    The cache counts in a tensor that it changes in place. The stock model reads it afterwards: its terms are those of later
    queries (and if its first layer has a window, it fails).
    """
    from transformers import StaticCache

    model = causal_model(local_layer_ids=[1]).double()
    tokens = torch.randint(1, 50, (2, 40))
    other = tokens.clone()
    other[:, 39] = tokens[:, 39] % 49 + 1

    def in_pieces(tokens: torch.Tensor) -> torch.Tensor:
        past = StaticCache(model.config, max_cache_len=64)
        pieces = ((0, 20), (20, 39), (39, 40))
        return torch.cat([model(tokens[:, slice(*piece)], past_key_values=past).logits for piece in pieces], 1)

    with torch.no_grad(), in_float64():
        whole = model(tokens).logits
        enable(model)
        ours, changed = in_pieces(tokens), in_pieces(other)
    assert_near("ours", ours, whole)
    assert torch.equal(changed[:, :39], ours[:, :39]) and not torch.equal(changed[:, 39], ours[:, 39])


@pytest.fixture
def composite(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Inkling's whole model, for text: what looks at images is left out."""
    from transformers import InklingConfig, InklingForConditionalGeneration
    from transformers.models.inkling import modeling_inkling

    monkeypatch.setattr(modeling_inkling, "InklingVisionModel", lambda config: torch.nn.Identity())
    audio = {"n_mel_bins": 4, "mel_vocab_size": 8, "text_hidden_size": 32}
    text = {**FAMILIES["inkling"].small, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = InklingConfig(text_config=text, audio_config=audio)
    model = InklingForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("case", ["nothing", "padding", "packed", "both directions"])
def test_inkling_inside_the_whole_model(composite: Any, case: str) -> None:
    tokens = torch.randint(1, 50, (2, LENGTH))
    cases: dict[str, dict[str, Any]] = {
        "nothing": {},
        "padding": {"attention_mask": (torch.arange(LENGTH) >= torch.tensor([[9], [0]])).long()},
        "packed": {"position_ids": torch.cat([torch.arange(20), torch.arange(LENGTH - 20)]).expand(2, -1)},
        "both directions": {"is_causal": False},  # which the whole model does not look at: its masks are causal
    }
    given = cases[case]
    shown = given.get("attention_mask", torch.ones_like(tokens)).bool()[..., None]
    with torch.no_grad():
        stock = counted(composite(tokens, **given).logits, shown)
        enabled = enable(composite)
        ours = counted(composite(tokens, **given).logits, shown)
    assert list(enabled.values()) == ["InklingModel", "InklingTextModel", "InklingAttention", "InklingAttention"]
    assert_near("ours", ours, stock)


def test_masks_inside_the_whole_model(composite: Any) -> None:
    """Inside the whole model, the language model's layers get the padding mask, (B, Nk), by the config of the text part."""
    shapes: list[tuple[int, ...]] = []
    enable(composite)
    for layer in composite.model.language_model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, given: shapes.append(tuple(given["attention_mask"].shape)), with_kwargs=True
        )
    with torch.no_grad():
        composite(torch.randint(1, 50, (2, LENGTH)), attention_mask=(torch.arange(LENGTH) >= torch.tensor([[9], [0]])).long())
    assert shapes == [(2, LENGTH)] * 2


def test_generation_by_the_whole_model(composite: Any) -> None:
    tokens, how = torch.randint(1, 50, (2, 9)), {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    stock = composite.generate(tokens, **how)
    enable(composite)
    assert torch.equal(composite.generate(tokens, **how), stock)


def test_what_the_whole_model_saves(composite: Any, tmp_path: Path) -> None:
    """The tensors of a stock checkpoint, under their published names, which load into a stock model."""
    from safetensors.torch import load_file

    def saved(model: Any, name: str) -> dict[str, torch.Tensor]:
        model.save_pretrained(tmp_path / name)
        return load_file(tmp_path / name / "model.safetensors")

    parts = {"whole": composite, "inner": composite.model}
    stock = {name: saved(part, f"stock {name}") for name, part in parts.items()}
    enable(composite)
    for name, part in parts.items():
        ours = saved(part, name)
        assert ours.keys() == stock[name].keys() != part.state_dict().keys()
        assert all(torch.equal(ours[key], stock[name][key]) for key in ours)
    loaded = type(composite).from_pretrained(tmp_path / "whole", attn_implementation="eager").eval()
    assert disable(loaded) == {}
    state = composite.state_dict()
    assert all(torch.equal(each, state[key]) for key, each in loaded.state_dict().items())


def test_all_of_vits() -> None:
    """Speech from the enabled text encoder."""
    from transformers import VitsConfig, VitsModel

    torch.manual_seed(0)
    small = {**FAMILIES["vits"].small, "num_hidden_layers": 2, "upsample_initial_channel": 16, "spectrogram_bins": 9}
    small |= {"upsample_rates": [2, 2], "upsample_kernel_sizes": [4, 4], "resblock_kernel_sizes": [3]}
    small |= {"resblock_dilation_sizes": [[1, 2]], "prior_encoder_num_flows": 1, "prior_encoder_num_wavenet_layers": 1}
    model = VitsModel(VitsConfig(**small, noise_scale=0.0, noise_scale_duration=0.0)).eval().double()
    tokens = torch.randint(1, 38, (2, 11))
    mask = (torch.arange(11) < torch.tensor([[11], [7]])).long()
    with torch.no_grad():
        stock = model(tokens, attention_mask=mask)
        assert enable(model)
        ours = model(tokens, attention_mask=mask)
    assert torch.equal(ours.sequence_lengths, stock.sequence_lengths)
    assert_near("waveform", ours.waveform, stock.waveform)
    disable(model)
