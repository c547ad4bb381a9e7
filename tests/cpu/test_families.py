"""Every family of transformers, enabled, computes what the stock model does; test_decoding has masks, caches and generation."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any
from unittest import mock

import pytest
import torch

from tests.tolerance import assert_at_most, assert_near

pytest.importorskip("transformers")

from bench import families
from bench.families import FAMILIES
from tests.cpu.models import (
    LENGTH,
    PADDED,
    WAVLM,
    WHOLE,
    Results,
    Sizes,
    arguments,
    assert_same,
    both,
    build,
    counted,
    counting,
    in_float64,
    in_precision,
    output,
    real,
    results,
    varied,
)
from tests.cpu.whole_models import VISION, WHOLE_MODELS, images, vision_encoder
from triton_relattn._blockwise import attention, grids
from triton_relattn.integrations.transformers import disable, enable, supported_families
from triton_relattn.testing import assert_within_budget

every_family = pytest.mark.parametrize("name", FAMILIES)


@every_family
def test_outputs_and_gradients(name: str) -> None:
    """In float64 with padding: the output, and gradients of inputs and all parameters."""
    model = build(name, torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Support for mismatched key_padding_mask")  # raised by WavLM itself
        report = enable(model)
    assert not report.left and max(row.error or 0.0 for row in report.rows) < 1e-12
    disable(model)
    with in_float64():
        assert_same(*both(model, arguments(name, model, PADDED), counting(name, PADDED)))


def test_every_family_is_here() -> None:
    folders = {family.folder for family in FAMILIES.values()}
    assert {family.folder for family in supported_families() if not family.inside} == folders
    inside = {family.folder: family.inside for family in supported_families() if family.inside}
    assert inside.keys() <= WHOLE_MODELS.keys() and set(inside.values()) <= folders
    assert VISION.keys() <= folders


@pytest.mark.parametrize(
    ("lengths", "masked"),
    [
        pytest.param([1, 1], True, id="one", marks=pytest.mark.thorough),
        pytest.param([24, 24], True, id="twenty-four", marks=pytest.mark.thorough),
        pytest.param(WHOLE, False, id="no-mask"),
    ],
)
@every_family
def test_other_lengths(name: str, lengths: list[int], masked: bool) -> None:
    """Lengths shorter than windows and tables, a multiple of Gemma's chunk, and no mask."""
    if lengths == [1, 1] and name in ("granite_speech5", "fastspeech2_conformer"):
        pytest.skip("takes half as many frames, or runs the stock forward for one frame")
    model = build(name, torch.float64)
    given = arguments(name, model, lengths, lengths[0])
    if not masked:
        given.pop("attention_mask", None)
    with in_float64():
        assert_same(*both(model, given))


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "longt5"])
def test_a_sequence_of_padding(name: str) -> None:
    """An all-padding sequence sees no key and gives the stock model's output; the other sequence is not affected by it."""
    model = build(name, torch.float64)
    given = arguments(name, model, [LENGTH, 0])
    with in_float64():
        if name not in WAVLM:
            assert_same(*both(model, given, counting(name, [LENGTH, 0])))
            return
        stock = output(model, given)
        enable(model)
        ours = output(model, given)
    assert stock[1].isnan().any() and ours.isfinite().all()
    assert_near("ours", ours[0], stock[0])


@pytest.mark.thorough
@pytest.mark.parametrize("lengths", [PADDED, [LENGTH, 0]], ids=["padded", "nothing"])
def test_padding_in_longt5s_encoder(lengths: list[int]) -> None:
    """Real tokens do not see padding; the stock encoder's output at padding itself depends on the precision."""
    model = build("longt5").get_submodule("encoder")
    given = {"input_ids": torch.randint(1, 50, (2, LENGTH)), "attention_mask": real(lengths)[..., 0].float()}
    stock = output(model, given)
    enable(model)
    assert_near("output", counted(output(model, given), real(lengths)), counted(stock, real(lengths)))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["wav2vec2_bert", "wav2vec2_bert_relative", "mpnet", "deberta_v2", "sew_d", "wavlm"])
def test_padding_anywhere(name: str) -> None:
    """Frames hidden at the beginning and in between, not only at the end."""
    model = build(name, torch.float64)
    given = arguments(name, model, PADDED)
    given["attention_mask"] = given["attention_mask"].masked_fill(torch.rand(given["attention_mask"].shape) < 0.3, 0)
    with in_float64():
        assert_same(*both(model, given))


@pytest.mark.thorough
@pytest.mark.parametrize("add_adapter", [False, True])
def test_chunks_that_are_all_padding(add_adapter: bool) -> None:
    """Queries in all-padding chunks see no key; the adapter's convolution carries their output to neighbouring real frames."""
    changes = {"speech_encoder_chunk_size": 10, "speech_encoder_left_chunk_num": 0, "add_adapter": add_adapter}
    model = build("seamless_m4t_v2", torch.float64, **changes)
    given = arguments("seamless_m4t_v2", model, [LENGTH, 20])
    stock = output(model, given)
    enable(model)
    ours = output(model, given)
    frames = 5 if add_adapter else 20
    assert_near("whole", ours[0], stock[0])
    assert_near("padded", ours[1, :frames], stock[1, :frames])


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["deberta", "deberta_v2", "sew_d"])
def test_a_mask_of_keys_alone(name: str) -> None:
    """A user's mask (B, 1, 1, N) hides keys only; queries at padding attend like others."""
    encoder = build(name, torch.float64).encoder
    states = torch.randn(2, LENGTH, 32, dtype=torch.float64)
    given = {"hidden_states": states, "attention_mask": real(PADDED).mT[:, None].long()}
    with in_float64():
        assert_same(*both(encoder, given))


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
    with in_float64():
        golden = results(copy.deepcopy(model).double(), in_precision(given, torch.float64), counts)
    assert_as_exact(ours, stock, golden)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["bfloat16", "float16", "autocast"])
@every_family
def test_16_bits_are_as_exact_as_stock(name: str, how: str) -> None:
    """The results also have the stock dtypes, and are finite where the stock results are."""
    if (name, how) == ("deberta", "autocast"):
        pytest.skip("its stock attention fills bfloat16 scores with float32's lowest number, which is an error")
    model = build(name, torch.float32 if how == "autocast" else getattr(torch, how))
    given, counts = arguments(name, model, PADDED), counting(name, PADDED)
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
        assert_at_most(
            "out", error, (counted(output(coarse, in_precision(given, torch.bfloat16)).float(), counts) - golden).norm()
        )
        return
    eps = torch.finfo(torch.float16 if how == "float16" else torch.bfloat16).eps
    assert_at_most("out", error, 2 * usual + 2 * eps * golden.norm())  # as in error_budget


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["t5", "mpnet", "speecht5", "wav2vec2_conformer"])
def test_nothing_but_padding_in_float16(name: str) -> None:
    """Queries whose keys are all hidden weight them evenly; float16's lowest number does not fully absorb the logits."""
    model = build(name, torch.float16)
    given = arguments(name, model, WHOLE)
    given["attention_mask"][1] = 0
    golden = output(copy.deepcopy(model).float(), in_precision(given, torch.float32))
    stock = output(model, given)
    enable(model)
    error, usual = ((result.float() - golden).norm() for result in (output(model, given), stock))
    assert error > 0
    assert_at_most("out", error, 2 * (usual + torch.finfo(torch.float16).eps * golden.norm()))


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


CHECKPOINTED = ("wav2vec2_bert", "seamless_m4t_v2", "parakeet", "nemotron_asr_streaming", "t5", "longt5", "deberta_v2")


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*CHECKPOINTED, "bloom", "falcon", "inkling", "inkling2"])
def test_gradient_checkpointing(name: str) -> None:
    model = build(name, torch.float64).train()
    given = arguments(name, model, PADDED)
    with in_float64():
        enable(model)
        plain = results(model, given)
        model.gradient_checkpointing_enable()
        assert_same(results(model, given), plain)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["parakeet", "wav2vec2_bert", "deberta_v2", "gemma4", "inkling"])
def test_hidden_states(name: str) -> None:
    model = build(name)
    given = {**arguments(name, model, WHOLE), "output_hidden_states": True}
    with torch.no_grad():
        stock = model(**given).hidden_states
        enable(model)
        ours = model(**given).hidden_states
    assert len(ours) == len(stock) > 2
    for states, expected in zip(ours, stock, strict=True):
        assert_near("states", states, expected)


SEVERAL_GRAPHS = ("nemotron_asr_streaming", "vits", "switch_transformers", "inkling2", "inkling2_loop")
"""Families whose stock model cannot be compiled as one graph either."""


@pytest.mark.thorough
@every_family
def test_compiled(name: str) -> None:
    model = build(name)
    given = arguments(name, model, PADDED)
    enable(model)
    eager = output(model, given)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled: Any = torch.compile(model, backend="eager", fullgraph=name not in SEVERAL_GRAPHS)
        assert_near("output", families.output(compiled(**given)), eager)


@pytest.mark.thorough
@every_family
def test_compiled_with_weights(name: str) -> None:
    """Compiled calls that ask for attention weights run the stock forward, which needs everything that stock layers pass on."""
    model = build(name)
    given = {**arguments(name, model, PADDED), "output_attentions": True}

    def attempt(call: Any) -> torch.Tensor | str:
        torch._dynamo.reset()
        try:
            with torch.no_grad():
                return families.output(call(**given))
        except Exception as error:  # some stock models return no weights, and some cannot be compiled this way
            return type(error).__name__

    stock = attempt(model)
    enable(model)
    ours = attempt(torch.compile(model, backend="eager"))
    if isinstance(ours, str):
        disable(model)
        assert attempt(torch.compile(model, backend="eager")) == ours
    else:
        assert isinstance(stock, torch.Tensor), stock
        assert_near("output", ours, stock)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if "sdpa" in family.stock])
def test_results_do_not_depend_on_the_implementation(name: str) -> None:
    """Results do not depend on the attention implementation in the config. Where the eager one computes something else, it is
    refused."""
    models = {implementation: build(name, implementation=implementation) for implementation in ("sdpa", "eager")}
    given = arguments(name, models["eager"], PADDED)
    assert enable(models["sdpa"])
    if name in ("falcon", "nemotron_asr_streaming", "seamless_m4t_v2"):
        with pytest.raises(RuntimeError, match="computes something else"):
            enable(models["eager"])
        return
    assert enable(models["eager"])
    assert_near("output", *(output(model, given) for model in models.values()))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.thorough] * (name != "sam")) for name in VISION])
@pytest.mark.parametrize("training", [False, True])
def test_vision_encoders(name: str, training: bool) -> None:
    """Image encoders, in training with checkpointing. Images of DeepSeek-OCR2, Unlimited-OCR and VitDet are smaller than their
    tables."""
    model = vision_encoder(name).train(training)
    given = images(name)
    with in_float64():
        ours, stock = both(model, given)
        assert any("rel_pos_h" in key for key in stock) and any("rel_pos_w" in key for key in stock)
        assert_same(ours, stock)
        if training:
            enable(model)
            model.gradient_checkpointing_enable()
            assert_same(results(model, given), stock)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name not in ("canary", "inkling"))) for name in WHOLE_MODELS]
)
def test_whole_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, replaced = WHOLE_MODELS[name]
    torch.manual_seed(0)
    model, run = make()
    varied(model).eval()
    # Results alone need not show whose they are: PyTorch's fused attention may compute both.
    spies = [mock.Mock(wraps=forward) for forward in (attention.forward, grids.forward)]
    for module, spy in zip((attention, grids), spies, strict=True):
        monkeypatch.setattr(module, "forward", spy)
    with torch.no_grad():
        stock = run(model)
        assert not any(spy.called for spy in spies)
        enabled = enable(model)
        ours = run(model)
        assert set(enabled.values()) == replaced
        assert_near("ours", ours, stock)
        counts = [spy.call_count for spy in spies]
        assert any(counts)
        assert disable(model) == enabled and torch.equal(run(model), stock)
        assert counts == [spy.call_count for spy in spies]


@every_family
def test_graphs_have_the_stock_forward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """During export the stock forward runs, bit for bit: exported graphs have no small masks or positions."""
    model = build(name)
    given = arguments(name, model, PADDED)
    enable(model)
    for function in ("is_compiling", "is_exporting"):
        monkeypatch.setattr(torch.compiler, function, lambda: True)
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True, raising=False)
    with Sizes() as found:
        ours = output(model, given)
    disable(model)
    assert torch.equal(ours, output(model, given))
    assert not found.ours
