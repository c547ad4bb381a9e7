"""Every family of transformers, enabled, computes what the stock model does: at any length, with any mask and setting, trained,
in 16 bits, compiled. No tensor is N x N. test_decoding has caches and generation."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.tolerance import assert_at_most, assert_near

pytest.importorskip("transformers")

from bench.families import FAMILIES
from tests.enable.models import (
    LENGTH,
    PADDED,
    SEQ2SEQ,
    T5,
    WAVLM,
    WHOLE,
    WRITERS,
    Results,
    Sizes,
    arguments,
    assert_same,
    both,
    build,
    counted,
    counting,
    in_precision,
    operators_dropout,
    output,
    padding_first,
    real,
    results,
    subject,
    varied,
)
from tests.enable.whole_models import VISION, WHOLE_MODELS, images, vision_encoder
from triton_relattn.integrations.transformers import disable, enable, supported_families
from triton_relattn.testing import assert_within_budget

pytestmark = pytest.mark.filterwarnings(
    "error:(?!Support|.*hides every key).*(query_offset|positions=|attn_mask|rows of a table)"
)
Call = tuple[Any, dict[str, Any], torch.Tensor | None]
"""A model, the arguments of its forward, and the positions that are compared, by default all."""
every_family = pytest.mark.parametrize("name", FAMILIES)


def padded(name: str, lengths: list[int] = PADDED, length: int = LENGTH, **changes: Any) -> Call:
    model = build(name, torch.float64, **changes)
    return model, arguments(name, model, lengths, length), counting(name, lengths, length)


def without_mask(name: str) -> Call:
    model, given, _ = padded(name, WHOLE)
    return model, {key: argument for key, argument in given.items() if key != "attention_mask"}, None


def with_holes(name: str) -> Call:
    """Frames hidden at the beginning and in between, not only at the end."""
    model, given, _ = padded(name)
    given["attention_mask"].masked_fill_(torch.rand(given["attention_mask"].shape) < 0.3, 0)
    return model, given, None


def keys_alone(name: str) -> Call:
    """A user's mask (B, 1, 1, N) hides keys only; queries at padding attend like others."""
    states, mask = torch.randn(2, LENGTH, 32, dtype=torch.float64), real(PADDED).mT[:, None].long()
    return build(name, torch.float64).encoder, {"hidden_states": states, "attention_mask": mask}, None


TAKE_MASKS = [*SEQ2SEQ, "pix2struct", "inkling", "inkling2", "mpt"]  # BLOOM and Falcon do not accept one
QUERY, KEY = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
MASKS = {
    "causal": (KEY <= QUERY, ["inkling"]),  # also in sliding layers: this mask does not ask for their window
    "prefix": ((KEY <= QUERY) | (KEY < 12), TAKE_MASKS),  # a prefix that is visible from all positions
    "everything": (torch.ones(LENGTH, LENGTH, dtype=torch.bool), ["t5", "mpt", "inkling", "inkling2"]),
    "documents": ((KEY <= QUERY) & ((KEY < 20) == (QUERY < 20)), ["inkling"]),
    "a-row-for-all": (KEY[None] < 30, ["t5", "mpt", "inkling2"]),  # (1, Nk): visible to all queries, including earlier ones
}
"""What is visible, and the models that are given it."""


def users_mask(name: str, kind: str) -> Call:
    """A mask (B, 1, Nq, Nk) is used unchanged in all layers: no causal mask is added to it."""
    model, given, _ = padded(name, WHOLE)
    hidden = ~MASKS[kind][0].expand(2, 1, -1, -1)
    added = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, torch.finfo(torch.float64).min)
    return model, {**given, mask_name(given): added}, None


def mask_name(given: dict[str, Any]) -> str:
    """The mask of a decoder, if there is one."""
    return "decoder_attention_mask" if "decoder_attention_mask" in given else "attention_mask"


def left_padded(name: str, holes: bool = False) -> Call:
    """Padding comes first, or anywhere with holes."""
    model, given, _ = padded(name, WHOLE)
    for argument in given:
        if argument.endswith("attention_mask"):
            given[argument] = padding_first(14 if argument == "decoder_attention_mask" else 5)
            given[argument] *= (torch.rand(2, LENGTH) > 0.3).long() if holes else 1
    return model, given, given[mask_name(given)][..., None].bool()


def both_directions(name: str) -> Call:
    """A decoder whose config says that it is not causal."""
    model, given, _ = padded(name)
    model.get_submodule("decoder" if name in SEQ2SEQ else "").config.is_causal = False
    return model, given, real(PADDED)


def packed(name: str, *ends: int) -> Call:
    """Positions that restart begin a new sequence."""
    model, given, _ = padded(name, WHOLE)
    pieces = torch.tensor([0, *ends, LENGTH]).diff().tolist()
    positions = torch.cat([torch.arange(piece) for piece in pieces]).expand(2, -1)
    return model, {"input_ids": given["input_ids"], "position_ids": positions}, None


def of_images(name: str, training: bool = False) -> Call:
    """Images of DeepSeek-OCR2, Unlimited-OCR and VitDet are smaller than their tables."""
    return vision_encoder(name).train(training), images(name), None


def cases(kind: str, make: Callable[..., Call], names: Iterable[str], *given: Any, quick: Iterable[str] = ()) -> Iterator[Any]:
    for name in names:
        marks = [] if name in quick else [pytest.mark.thorough]
        yield pytest.param(partial(make, name, *given), id=f"{name}-{kind}".removesuffix("-"), marks=marks)


SETTINGS: dict[str, list[dict[str, Any]]] = {
    "wav2vec2_bert": [
        {"position_embeddings_type": None},
        {"add_adapter": True},
        {"left_max_position_embeddings": 64, "right_max_position_embeddings": 50},
    ],
    "wav2vec2_bert_relative": [{"add_adapter": True, "num_adapter_layers": 2, "use_intermediate_ffn_before_adapter": True}],
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
    "longt5": [{"local_radius": 50}, {"local_radius": 1}, {"encoder_attention_type": "transient-global", "global_block_size": 4}],
    "t5": [{"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}],
    "umt5": [{"relative_attention_num_buckets": 4, "relative_attention_max_distance": 9}],
    "bloom": [{"apply_residual_connection_post_layernorm": True, "n_head": 4}],
    "mpt": [{"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.2}, "n_heads": 6}],
    "falcon": [
        {"multi_query": True},
        {"num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True, "parallel_attn": True},
    ],
    "deberta": [*({"pos_att_type": kind} for kind in (["c2p"], ["p2c"])), {"max_relative_positions": -1, "type_vocab_size": 2}],
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
CALLS = [
    *cases("", padded, FAMILIES, quick=FAMILIES),
    *cases("no-mask", without_mask, FAMILIES, quick=FAMILIES),
    # Shorter than windows and tables (some take half as many frames, or run the stock forward), and a multiple of Gemma's chunk.
    *cases("one", padded, [name for name in FAMILIES if name not in ("granite_speech5", "fastspeech2_conformer")], [1, 1], 1),
    *cases("twenty-four", padded, FAMILIES, [24, 24], 24),
    *cases("all-padding", padded, [name for name in FAMILIES if name not in ("longt5", *WAVLM)], [LENGTH, 0]),
    *cases("holes", with_holes, ["wav2vec2_bert", "wav2vec2_bert_relative", "mpnet", "deberta_v2", "sew_d", "wavlm"]),
    *cases("keys-alone", keys_alone, ["deberta", "deberta_v2", "sew_d"]),
    *(
        case
        for name, settings in SETTINGS.items()
        for n, changes in enumerate(settings)
        for case in cases(f"setting{n}", partial(padded, **changes), [name])
    ),
    # Pieces of 500 frames, of which the last one is padded; the stock model cannot split a batch of two.
    *cases("long", partial(padded, layers=1), ["phi4_multimodal"], [730], 730),
    # Buckets are rounded differently from T5's, which shows at distance 319 with this number of them.
    *cases("long", partial(padded, layers=1, num_buckets=316, max_bucket_distance=512), ["wavlm"], [330], 330),
    *cases("clipped", partial(padded, layers=1, max_bucket_distance=800), ["wavlm"], [900], 900),
    *cases("images", of_images, VISION, quick=["sam"]),
    *cases("training-images", of_images, VISION, True, quick=["sam"]),
    *(case for kind in MASKS for case in cases(f"{kind}-mask", users_mask, MASKS[kind][1], kind, quick=TAKE_MASKS)),
    *cases("left", left_padded, [*WRITERS, "pix2struct"]),
    *cases("left-holes", left_padded, ["inkling"], True, quick=["inkling"]),
    *cases("both-directions", both_directions, [*WRITERS, "pix2struct"]),
    *cases("two-packed", packed, ["inkling"], 20, quick=["inkling"]),
    *cases("four-packed", packed, ["inkling"], 7, 9, 30, quick=["inkling"]),
]


@pytest.mark.parametrize("make", CALLS)
def test_outputs_and_gradients(make: Callable[[], Call]) -> None:
    """In float64: the output, and gradients of inputs and all parameters."""
    assert_same(*both(*make()))


@pytest.mark.filterwarnings("error", "ignore:Support for mismatched key_padding_mask")  # raised by WavLM itself
@every_family
def test_all_of_a_model_is_enabled(name: str) -> None:
    report = enable(build(name, torch.float64))
    assert report and not report.left and max(row.error or 0.0 for row in report.rows) < 1e-12


def test_every_family_is_here() -> None:
    folders = {family.folder for family in FAMILIES.values()}
    assert {family.folder for family in supported_families() if not family.inside} == folders
    inside = {family.folder: family.inside for family in supported_families() if family.inside}
    assert inside.keys() <= WHOLE_MODELS.keys() and set(inside.values()) <= folders
    assert VISION.keys() <= folders


CHUNKS = {"speech_encoder_chunk_size": 10, "speech_encoder_left_chunk_num": 0}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "dtype", "changes", "lengths", "frames"),
    [
        *((name, torch.float64, {}, [LENGTH, 0], 0) for name in WAVLM),  # stock gives NaN
        *(("longt5", torch.float32, {}, [LENGTH, other], other) for other in (22, 0)),  # stock's depends on the precision
        ("seamless_m4t_v2", torch.float64, CHUNKS, [LENGTH, 20], 20),  # chunks that are all padding
        ("seamless_m4t_v2", torch.float64, {**CHUNKS, "add_adapter": True}, [LENGTH, 20], 5),  # which a convolution carries on
    ],
)
def test_real_frames_beside_padding_that_sees_nothing(
    name: str, dtype: torch.dtype, changes: dict[str, Any], lengths: list[int], frames: int
) -> None:
    """Where stock's output at padding is of no use, that of real frames is equal, and ours is finite everywhere."""
    model, given = subject(name, dtype, **changes, lengths=lengths)
    if name == "longt5":
        model, mask = model.encoder, real(lengths)[..., 0].float()
        given = {"input_ids": torch.randint(1, 50, (2, LENGTH)), "attention_mask": mask}
    stock = output(model, given)
    enable(model)
    ours = output(model, given)
    assert_near("whole", ours[0], stock[0])
    assert_near("padded", ours[1, :frames], stock[1, :frames])
    assert ours.isfinite().all()


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
    together = [torch.cat([tensors[name].flatten() / size[name] for name in names]) for tensors in (ours, golden, stock)]
    assert_within_budget("gradients", *together, factor=4)
    error, usual = ((gradients - together[1]).norm() for gradients in (together[0], together[2]))
    assert_at_most("norm of the gradients' errors", error, 4 * usual)


@pytest.mark.thorough
@every_family
def test_float32_is_as_exact_as_stock(name: str) -> None:
    model = build(name)
    given, counts = arguments(name, model, PADDED), counting(name, PADDED)
    ours, stock = both(model, given, counts)
    golden = results(copy.deepcopy(model).double(), in_precision(given, torch.float64), counts)
    assert_as_exact(ours, stock, golden)


# Queries whose keys are all hidden weight them evenly; float16's lowest number does not fully absorb the logits.
SIXTEEN_BITS = [(name, how, PADDED) for name in FAMILIES for how in ("bfloat16", "float16", "autocast")]
SIXTEEN_BITS += [(name, "float16", []) for name in ("t5", "mpnet", "speecht5", "wav2vec2_conformer")]
# Its stock attention fills bfloat16 scores with float32's lowest number, which is an error.
SIXTEEN_BITS.remove(("deberta", "autocast", PADDED))


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "how", "lengths"), SIXTEEN_BITS)
def test_16_bits_are_as_exact_as_stock(name: str, how: str, lengths: list[int]) -> None:
    """The results also have the stock dtypes, and are finite where the stock results are. No lengths: one sequence is hidden."""
    model = build(name, torch.float32 if how == "autocast" else getattr(torch, how))
    given, counts = arguments(name, model, lengths or WHOLE), counting(name, lengths) if lengths else None
    if not lengths:
        given["attention_mask"][1] = 0
    golden = counted(output(copy.deepcopy(model).float(), in_precision(given, torch.float32)), counts)
    coarse = copy.deepcopy(model).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        ours, stock = both(model, given, counts)
    assert {key: result.dtype for key, result in ours.items()} == {key: result.dtype for key, result in stock.items()}
    assert all(ours[key].isfinite().all() for key in ours if stock[key].isfinite().all())
    error, usual = ((tensors["out"].float() - golden).norm() for tensors in (ours, stock))
    assert error > 0, "nothing is rounded"
    if (name, how) == ("longt5", "float16"):  # the stock model's -1e10 exceeds its range
        # bfloat16 has the range for it, but an eighth of float16's precision.
        assert usual.isnan()
        out = counted(output(coarse, in_precision(given, torch.bfloat16)).float(), counts)
        assert_at_most("out", error, (out - golden).norm())
        return
    eps = torch.finfo(torch.float16 if how == "float16" else torch.bfloat16).eps
    assert_at_most("out", error, 2 * usual + 2 * eps * golden.norm())  # as in error_budget


@pytest.mark.thorough
@every_family
def test_nothing_quadratic(name: str) -> None:
    """No tensor has two dimensions of the sequence length, and the largest tensor grows linearly."""
    largest = []
    shortest = 600 if name == "nemotron_asr_streaming" else 150  # longer than all widths and than a chunk's mask
    for length in (shortest, 2 * shortest):
        model = build(name)
        enable(model, check_calls=False)  # the check would run the stock forward
        given = arguments(name, model, [length, length - 7], length)
        with Sizes() as found:
            results(model, given)
        assert found.ours and not found.squares(length)
        largest.append(max(math.prod(shape) for shape in found.shapes))
    assert largest[1] <= 2.01 * largest[0]
    if name == "parakeet":
        disable(model)
        with Sizes() as found:
            results(model, given)
        assert found.squares(length), "nor does the stock model have one"


OFTEN = ("t5", "wav2vec2_bert", "inkling", "parakeet")
CHECKPOINTED = (*OFTEN, "seamless_m4t_v2", "nemotron_asr_streaming", "longt5", "deberta_v2", "bloom", "falcon", "inkling2")


@pytest.mark.parametrize("make", [*cases("", padded, CHECKPOINTED, quick=OFTEN), *cases("images", of_images, VISION)])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(make: Callable[[], Call], use_reentrant: bool) -> None:
    """The gradients without checkpoints, of inputs and all parameters, also of tables that layers pass on."""
    model, given, _ = make()
    if use_reentrant and "DebertaV2" in type(model).__name__:
        pytest.skip("its stock layers raise in reentrant checkpoints")
    enable(model.train())
    plain = results(model, given)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_same(results(model, given), plain)


SEVERAL_GRAPHS = ("nemotron_asr_streaming", "vits", "switch_transformers", "inkling2", "inkling2_loop")
"""Families whose stock model cannot be compiled as one graph either."""


@pytest.mark.thorough
@pytest.mark.parametrize("weights", [False, True], ids=["", "weights"])
@every_family
def test_compiled(name: str, weights: bool) -> None:
    """As uncompiled. Calls that ask for attention weights run the stock forward, which needs all that stock layers pass on."""
    model = build(name)
    given = {**arguments(name, model, PADDED), **({"output_attentions": True} if weights else {})}

    def attempt(call: Any) -> torch.Tensor | str:
        torch._dynamo.reset()
        try:
            return output(call, given)
        except Exception as error:  # some stock models return no weights, and some cannot be compiled this way
            if not weights:
                raise
            return type(error).__name__

    if weights:
        expected = attempt(model)
        enable(model)
    else:
        enable(model)
        expected = attempt(model)
    ours = attempt(torch.compile(model, backend="eager", fullgraph=not weights and name not in SEVERAL_GRAPHS))
    if isinstance(ours, str):
        disable(model)
        assert attempt(torch.compile(model, backend="eager")) == ours
    else:
        assert isinstance(expected, torch.Tensor), expected
        assert_near("output", ours, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if "sdpa" in family.stock])
def test_results_do_not_depend_on_the_implementation(name: str) -> None:
    """Of the config. Where the eager one computes something else, it is refused."""
    sdpa, eager = (build(name, implementation=implementation) for implementation in ("sdpa", "eager"))
    given = arguments(name, eager, PADDED)
    assert enable(sdpa)
    if name in ("falcon", "nemotron_asr_streaming", "seamless_m4t_v2"):
        with pytest.raises(RuntimeError, match="computes something else"):
            enable(eager)
        return
    assert enable(eager)
    assert_near("output", output(sdpa, given), output(eager, given))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name not in ("canary", "inkling"))) for name in WHOLE_MODELS]
)
def test_whole_models(name: str) -> None:
    make, replaced = WHOLE_MODELS[name]
    torch.manual_seed(0)
    model, run = make()
    varied(model).eval()
    with torch.no_grad():
        stock = run(model)
        enabled = enable(model)
        with Sizes() as sizes:
            ours = run(model)
        assert sizes.ours and set(enabled.values()) == replaced
        assert_near("ours", ours, stock)
        assert disable(model) == enabled and torch.equal(run(model), stock)


@every_family
def test_graphs_have_the_stock_forward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """During export the stock forward runs, bit for bit: exported graphs have no small masks or positions."""
    model, given = subject(name)
    enable(model)
    for function in ("is_compiling", "is_exporting"):
        monkeypatch.setattr(torch.compiler, function, lambda: True)
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True, raising=False)
    with Sizes() as found:
        ours = output(model, given)
    disable(model)
    assert torch.equal(ours, output(model, given))
    assert not found.ours


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


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("nemotron_asr_streaming", {"sliding_window": 0}),  # no limit on the past
        ("gemma4", {"attention_chunk_size": 3, "attention_context_left": 1}),  # a window that hides a frame from itself
    ],
)
def test_settings_of_the_stock_forward(name: str, settings: dict[str, Any]) -> None:
    model, given = subject(name, **settings)
    expected = output(model, given)
    try:
        enable(model)
    except ValueError:
        assert name == "gemma4"
    assert torch.equal(output(model, given), expected)


@pytest.mark.parametrize(("kind", "named"), [("rotary", "rotary positions, no relative term"), (None, "no positions")])
def test_the_report_names_what_is_no_relative_term(kind: str | None, named: str) -> None:
    report = enable(build("wav2vec2_conformer", position_embeddings_type=kind))
    assert {row.kind for row in report.rows} == {f"Wav2Vec2-Conformer: {named}"}
