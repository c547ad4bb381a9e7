"""Enabled models of transformers: which they are, what they need, and that the rest of transformers still works with them."""

from __future__ import annotations

import copy
import functools
import io
import json
import math
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tolerance import assert_near, within

pytest.importorskip("transformers")

from transformers import PreTrainedModel

from bench import families
from bench.families import FAMILIES
from tests.cpu.models import (
    LENGTH,
    PADDED,
    Sizes,
    arguments,
    assert_same,
    both,
    build,
    counting,
    in_float64,
    is_square,
    output,
    real,
    results,
    runs_the_operator,
)
from triton_relattn.integrations.proof import counted
from triton_relattn.integrations.transformers import disable, enable, supported_families
from triton_relattn.integrations.transformers.encoder import Encoder
from triton_relattn.integrations.transformers.heads import attend_evenly

every_family = pytest.mark.parametrize("name", FAMILIES)
# One whose parts are plain modules, one that is itself what asks for masks, one with a forward of its own, and one of two.
some_families = pytest.mark.parametrize("name", ["wav2vec2_bert", "inkling", "parakeet", "t5"])
ROOT = Path(__file__).parents[2]


def classes(model: torch.nn.Module) -> list[tuple[str, str]]:
    """Return the names of all modules and of their classes; names, since some classes are made anew for each model."""
    return [(name, f"{type(each).__module__}.{type(each).__qualname__}") for name, each in model.named_modules()]


def configs(model: torch.nn.Module) -> list[Any]:
    return [each.config for each in model.modules() if hasattr(each, "config")]


@every_family
def test_disable_gives_everything_back(name: str) -> None:
    model = build(name)
    given, before, held = arguments(name, model, PADDED), classes(model), configs(model)
    types = [type(each) for each in model.modules()]
    settings = [copy.deepcopy(each.to_dict()) for each in held]
    stock = results(model, given)
    enabled = enable(model)
    changed = dict(before).items() - dict(classes(model)).items()
    assert {each: kind.rpartition(".")[2] for each, kind in changed} == enabled
    assert runs_the_operator(model, given)
    assert enable(model) == {}
    assert disable(model) == enabled
    assert disable(model) == {}
    assert [type(each) for each in model.modules()] == types
    assert all(now is then for now, then in zip(configs(model), held, strict=True))
    assert [each.to_dict() for each in held] == settings
    again = results(model, given)
    assert all(torch.equal(again[each], stock[each]) for each in stock)


def test_what_enable_returns() -> None:
    attention = {f"encoder.layers.{i}.self_attn": "Wav2Vec2BertSelfAttention" for i in range(2)}
    assert enable(build("wav2vec2_bert")) == {"encoder": "Wav2Vec2BertEncoder", **attention}
    assert enable(build("parakeet").get_submodule("layers.0.self_attn")) == {"": "ParakeetEncoderAttention"}


@every_family
def test_other_models_stay_as_they_are(name: str) -> None:
    """One of the same class, one that shares the config, one that is made later, one that was enabled and no more is."""
    model, other = build(name), build(name)
    given = arguments(name, model, PADDED)
    stock = output(model, given)
    sharing = copy.deepcopy(model) if FAMILIES[name].alone else type(model)(model.config)
    sharing.load_state_dict(model.state_dict())
    sharing.eval()
    before = classes(other)
    enable(model)
    assert classes(other) == before and classes(build(name)) == before and classes(sharing) == classes(other)
    for stranger in (other, sharing, build(name)):
        assert torch.equal(output(stranger, given), stock)
    assert runs_the_operator(model, given)
    enable(sharing)
    disable(model)
    assert torch.equal(output(model, given), stock)
    assert runs_the_operator(sharing, given)


@pytest.mark.parametrize("part", ["encoder.layers.1", "encoder.layers.0.self_attn", "encoder.layers", "encoder"])
def test_a_part_of_wav2vec2_bert(part: str) -> None:
    model = build("wav2vec2_bert", torch.float64)
    given = arguments("wav2vec2_bert", model, PADDED)
    stock = results(model, given)
    before = dict(classes(model))
    enabled = enable(model.get_submodule(part))
    changed = [name for name, kind in classes(model) if kind != before[name]]
    assert changed == [f"{part}.{name}".rstrip(".") for name in enabled]
    assert_same(results(model, given), stock)
    disable(model.get_submodule(part))
    assert dict(classes(model)) == before


@pytest.mark.parametrize("part", ["layers.1", "layers.0.self_attn", "layers"])
def test_a_part_of_parakeet(part: str) -> None:
    model = build("parakeet", torch.float64)
    given = arguments("parakeet", model, PADDED)
    with in_float64():
        stock = results(model, given, real(PADDED))
        assert enable(model.get_submodule(part))
        assert_same(results(model, given, real(PADDED)), stock)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "parakeet_attention"])
@pytest.mark.parametrize("masked", [True, False])
def test_stock_attention_in_an_enabled_encoder(name: str, masked: bool) -> None:
    """A layer that is disabled by itself, or of a class that enable does not know, gives the stock numbers or an error."""
    chunks = {"speech_encoder_chunk_size": 10, "speech_encoder_left_chunk_num": 1} if name == "seamless_m4t_v2" else {}
    model = build(name, torch.float64, **chunks)
    given = arguments(name, model, PADDED if masked else [LENGTH, LENGTH])
    if not masked:
        given.pop("attention_mask", None)
    with in_float64():
        stock = output(model, given)
        enable(model)
        encoders: list[Any] = [each for each in model.modules() if isinstance(each, Encoder)]
        if not encoders:
            pytest.skip("only its attention is replaced")
        try:
            disable(next(each for each in model.modules() if isinstance(each, encoders[0].attention)))
            ours = output(model, given)
        except (ValueError, RuntimeError):
            return
    assert_near("ours", ours, stock)


def test_unknown_models() -> None:
    with pytest.raises(ValueError, match="Linear has no relative attention") as caught:
        enable(torch.nn.Linear(2, 2))
    assert all(each.folder in str(caught.value) and each.name in str(caught.value) for each in supported_families())
    with pytest.raises(ValueError, match="Wav2Vec2BertFeedForward has no"):
        enable(build("wav2vec2_bert").get_submodule("encoder.layers.0.ffn1"))
    assert disable(torch.nn.Linear(2, 2)) == {}


def test_a_forward_of_its_own() -> None:
    """It would hide the new class's. Nothing is changed."""
    model = build("wav2vec2_bert")
    attention = model.get_submodule("encoder.layers.1.self_attn")
    attention.forward = attention.forward
    before = classes(model)
    with pytest.raises(ValueError, match=r"encoder\.layers\.1\.self_attn \(Wav2Vec2BertSelfAttention\) has a forward"):
        enable(model)
    assert classes(model) == before


def test_weights_are_refused() -> None:
    model = build("vits")
    given = {**arguments("vits", model, PADDED), "output_attentions": True}
    enable(model)
    with pytest.raises(ValueError, match="output_attentions"):
        output(model, given)
    attention = build("wav2vec2_bert").get_submodule("encoder.layers.0.self_attn")
    enable(attention)
    with pytest.raises(ValueError, match="output_attentions"):
        attention(torch.randn(1, 5, 32), output_attentions=True)


@pytest.mark.parametrize("name", ["wav2vec2_bert", "parakeet", "inkling"])
def test_weights_that_transformers_collects(name: str) -> None:
    """There are none: one warning says so."""
    model = build(name)
    given = arguments(name, model, PADDED)
    model.config.output_attentions = True
    with torch.no_grad():
        assert len(model(**given).attentions) == 2
    enable(model)
    with pytest.warns(UserWarning, match="no weights to collect") as caught, torch.no_grad():
        assert not model(**given).attentions
    assert len({str(each.message) for each in caught}) == 1
    model.config.output_attentions = False
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        model(**{**given, "output_hidden_states": True})


def test_long_audio_does_not_warn() -> None:
    """WavLM clips distances beyond 800, as it means to: the warning of a table that is too short is not for its users."""
    model = build("wavlm", layers=1, max_bucket_distance=800)
    enable(model)
    given = arguments("wavlm", model, [900], 900)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        model(**given)


def sizes(name: str, length: int, *, enabled: bool) -> Sizes:
    model = build(name)
    if enabled:
        enable(model)
    given = arguments(name, model, [length, length - 7], length)
    with Sizes() as found:
        results(model, given)
    return found


# The stock models see blocks of frames.
LINEAR = ("granite_speech", "granite_speech_plus", "granite_speech5", "gemma3n")


@every_family
def test_nothing_quadratic(name: str) -> None:
    """No tensor has two dimensions as long as the sequence, and the largest one grows with the length."""
    short, long = 150, 300  # longer than all widths
    found = {length: sizes(name, length, enabled=True) for length in (short, long)}
    for length, each in found.items():
        assert any("triton_relattn" in operator for operator in each.operators)
        assert not [shape for shape in each.shapes if is_square(shape, length)]
    largest = {length: max(math.prod(shape) for shape in each.shapes) for length, each in found.items()}
    assert largest[long] <= 2.01 * largest[short]
    if name not in LINEAR:
        assert any(is_square(shape, short) for shape in sizes(name, short, enabled=False).shapes), "nor has the stock model one"


CHILD = """
import sys
import torch
from bench.families import FAMILIES, output
from triton_relattn.integrations.transformers import enable

def status(field):
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith(field + ":"))

def run(model, given):
    model.zero_grad()
    output(model(**given)).sum().backward()

torch.set_num_threads(1)
for name, enabled, length in ((name, *each) for name in sys.argv[1:] for each in ((False, 1024), (True, 1024), (True, 4096))):
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = family.build(small=True)
    if enabled:
        enable(model)
    run(model, family.make(model, 64, [64]))
    given = family.make(model, length, [length - length // 8])
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status("VmRSS")
    run(model, given)
    print(status("VmHWM") - before)
"""


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from Linux's /proc")
def test_peak_memory_grows_linearly() -> None:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-c", CHILD, "parakeet", "wav2vec2_bert_relative"]
    child = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert child.returncode == 0, child.stderr
    peaks = list(map(int, child.stdout.split()))
    assert len(peaks) == 6
    for stock, short, long in (peaks[:3], peaks[3:]):
        assert short >= 1024 * 32 * 4 * 10, "the measurement misses the activations"
        assert long <= 4.5 * short, f"{short} bytes at length 1024, {long} at 4096"
        assert stock >= 2 * short, f"{stock} bytes of the stock model, {short} of ours"


@every_family
def test_copies_stay_enabled_and_independent(name: str) -> None:
    if name == "parakeet_attention":
        pytest.skip("of a class inside a function, which cannot be pickled")
    model = build(name)
    given = arguments(name, model, PADDED)
    stock = output(model, given)
    state = {key: each.clone() for key, each in model.state_dict().items()}
    enabled = enable(model)
    ours = output(model, given)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(each, state[key]) for key, each in model.state_dict().items())
    copies = [copy.deepcopy(model)]
    if name not in ("wav2vec2_conformer", "wavlm", "wavlm_stable", "sew_d"):  # weight normalisation cannot be pickled
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies += [torch.load(file, weights_only=False), pickle.loads(pickle.dumps(model))]
    for copied in copies:
        assert classes(copied) == classes(model)
        assert torch.equal(output(copied, given), ours)
        assert not {id(each) for each in configs(copied)} & {id(each) for each in configs(model)}
        copied.config.layerdrop = 0.123
        assert getattr(model.config, "layerdrop", None) != 0.123
        assert disable(copied) == enabled
        assert torch.equal(output(copied, given), stock)
        assert torch.equal(output(model, given), ours)


@some_families
def test_save_pretrained(name: str, tmp_path: Path) -> None:
    """An enabled model is saved as a stock model."""
    model = build(name)
    given = arguments(name, model, PADDED)
    stock = output(model, given)
    model.save_pretrained(tmp_path / "stock")
    enable(model)
    model.save_pretrained(tmp_path / "ours")
    saved, expected = ((tmp_path / each / "config.json").read_text() for each in ("ours", "stock"))
    assert saved == expected
    assert json.loads(saved)["architectures"] == [type(model).__name__]
    loaded = type(build(name)).from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    assert disable(loaded) == {}
    assert torch.equal(output(loaded, given), stock)


@pytest.mark.parametrize(
    "name",
    [
        *("wav2vec2_bert", "seamless_m4t", "seamless_m4t_v2", "parakeet", "nemotron_asr_streaming", "t5", "umt5", "longt5"),
        *("deberta", "deberta_v2", "bloom", "mpt", "falcon", "inkling", "inkling2"),
    ],
)
def test_gradient_checkpointing(name: str) -> None:
    model = build(name, torch.float64).train()
    given = arguments(name, model, PADDED)
    with in_float64():
        enable(model)
        plain = results(model, given)
        model.gradient_checkpointing_enable()
        checkpointed = results(model, given)
    assert_same(checkpointed, plain)


def test_settings_that_are_changed_later() -> None:
    """A model's config is its encoder's, enabled or not."""
    model = build("wav2vec2_bert", layers=3).train()
    given = arguments("wav2vec2_bert", model, PADDED)
    enable(model)
    model.config.layerdrop = 1.0
    skipped = set(dict(model.named_parameters())) - results(model, given).keys()
    assert any("layers.2" in each for each in skipped)
    model.get_submodule("encoder").config.layerdrop = 0.0
    assert model.config.layerdrop == 0.0
    skipped = set(dict(model.named_parameters())) - results(model, given).keys()
    assert not any("layers" in each for each in skipped)

    inkling = build("inkling")
    given = arguments("inkling", inkling, PADDED)
    enable(inkling)
    for use_cache in (True, False):
        inkling.config.use_cache = use_cache
        assert (inkling(**given).past_key_values is not None) == use_cache
    inkling.config.is_causal = False
    ours = counted(output(inkling, given), real(PADDED))
    disable(inkling)
    assert inkling.config.use_cache is False and inkling.config.is_causal is False
    assert_near("ours", ours, counted(output(inkling, given), real(PADDED)))


@pytest.mark.parametrize("name", ["wav2vec2_bert", "inkling"])
def test_config_that_is_replaced(name: str) -> None:
    """The stock one does as well, and is not lost."""
    model = build(name)
    given = arguments(name, model, PADDED)
    stock = output(model, given)
    enable(model)
    counts = counting(name, PADDED)
    ours = counted(output(model, given), counts)
    other = copy.deepcopy(configs(build(name))[0])
    for each in model.modules():
        if hasattr(each, "config"):
            each.config = other
    assert_near("output", counted(output(model, given), counts), ours)
    assert disable(model)
    assert all(each is other for each in configs(model))
    assert torch.equal(output(model, given), stock)


@every_family
def test_a_model_of_an_enabled_ones_class(name: str) -> None:
    """It is enabled as a whole, whichever config it is made of."""
    model: Any = build(name)
    given = arguments(name, model, PADDED)
    enable(model)
    encoders: list[Any] = [each for each in model.modules() if isinstance(each, Encoder)]
    for encoder in encoders:
        own = getattr(encoder, "config", model.config)  # DeBERTa's has none
        for config in (own, copy.deepcopy(getattr(own, "stock", own))):
            made = type(encoder)(config)
            assert classes(made) == classes(encoder)
            assert not [each for each in configs(made) if type(each) not in {type(every) for every in configs(encoder)}]
    if model in encoders:
        made = type(encoders[0])(encoders[0].config).eval()
        made.load_state_dict(model.state_dict())
        assert torch.equal(output(made, given), output(model, given))
        assert disable(made) and classes(made) == classes(build(name))


@every_family
def test_what_transformers_asks_of_a_class(name: str) -> None:
    """Which it reads from the class's module: whether weights are converted, what may be set later."""
    model = build(name)
    questions = ("is_custom_code", "_can_set_attn_implementation", "_can_set_experts_implementation")

    def answers() -> list[Any]:
        models = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
        return [getattr(each, question)() for each in models for question in questions]

    stock = answers()
    enable(model)
    assert answers() == stock


@some_families
def test_implementation_that_is_changed_later(name: str) -> None:
    """It waits until the model is stock again."""
    model = build(name)
    given = arguments(name, model, PADDED)
    stock = output(model, given)
    enable(model)
    ours = output(model, given)
    model.set_attn_implementation("sdpa")
    assert torch.equal(output(model, given), ours)
    disable(model)
    assert model.config._attn_implementation == "sdpa"
    assert_near("output", output(model, given)[0], stock[0])
    assert not torch.equal(output(model, given), stock)


@every_family
def test_hidden_states(name: str) -> None:
    model = build(name)
    if name in ("fastspeech2_conformer", "phi4_multimodal", "gemma3n") or not isinstance(model, PreTrainedModel):
        pytest.skip("collects none, or is a part that does")
    given = {**arguments(name, model, PADDED), "output_hidden_states": True}

    def hidden_states() -> Any:
        with torch.no_grad():
            made = model(**given)
        return made.get("hidden_states") or (*made.encoder_hidden_states, *made.decoder_hidden_states)

    stock = hidden_states()
    enable(model)
    ours = hidden_states()
    assert len(ours) == len(stock) > 2
    counts = [counting(name, PADDED)] * len(ours)
    if name in ("longt5", "t5"):  # the encoder's come first, whose sequences have other lengths
        counts = [given["attention_mask"].bool()[..., None]] * (len(ours) // 2) + counts[len(ours) // 2 :]
    for each, expected, shown in zip(ours, stock, counts, strict=True):
        assert_near("result", counted(each, shown), counted(expected, shown))
    assert runs_the_operator(model, given)


@every_family
def test_autocast(name: str) -> None:
    """As near to float32 as the stock model's."""
    if name == "deberta":
        pytest.skip("its stock attention fills bfloat16 scores with float32's lowest number, which is an error")
    model = build(name)
    given, counts = arguments(name, model, PADDED), counting(name, PADDED)
    golden = counted(output(model, given), counts)

    def rounded() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return results(model, given, counts)["out"].float()

    stock = rounded()
    enable(model)
    ours = rounded()
    errors = [float((each - golden).norm()) for each in (ours, stock)]
    assert errors[0] > 0
    budget = 2 * errors[1] + 2 * torch.finfo(torch.bfloat16).eps * float(golden.norm())  # as error_budget
    within("out", errors[0], budget)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_family
def test_models_in_16_bits(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype)
    given, counts = arguments(name, model, PADDED), counting(name, PADDED)
    exact = copy.deepcopy(model).float()
    golden = output(exact, {key: each.float() if each.is_floating_point() else each for key, each in given.items()})
    golden = counted(golden, counts)
    stock = results(model, given, counts)
    coarse = copy.deepcopy(model).bfloat16()
    enable(model)
    ours = results(model, given, counts)
    assert ours["out"].dtype == stock["out"].dtype
    assert {key: each.dtype for key, each in ours.items()} == {key: each.dtype for key, each in stock.items()}
    assert all(ours[each].isfinite().all() for each in ours if stock[each].isfinite().all())
    errors = [float((each["out"].float() - golden).norm()) for each in (ours, stock)]
    if name == "longt5" and dtype == torch.float16:  # which the stock model's -1e10 is beyond
        assert math.isnan(errors[1]) and errors[0] > 0
        # bfloat16, which has room for it, has an eighth of float16's precision.
        of_coarse = output(coarse, {key: each.bfloat16() if each.is_floating_point() else each for key, each in given.items()})
        within("out", errors[0], (counted(of_coarse.float(), counts) - golden).norm())
        return
    assert errors[0] > 0
    budget = 2 * errors[1] + 2 * torch.finfo(dtype).eps * float(golden.norm())  # as error_budget
    within("out", errors[0], budget)


@pytest.mark.parametrize("name", ["t5", "mpnet", "speecht5", "wav2vec2_conformer"])
def test_nothing_but_padding_in_float16(name: str) -> None:
    """Keys that are all hidden are seen evenly, beside logits that float16's lowest number does not make vanish."""
    model = build(name, torch.float16)
    given = arguments(name, model, [LENGTH, LENGTH])
    given["attention_mask"][1] = 0
    exact = copy.deepcopy(model).float()
    golden = output(exact, {key: each.float() if each.is_floating_point() else each for key, each in given.items()})
    stock = output(model, given)
    enable(model)
    errors = [float((each.float() - golden).norm() / golden.norm()) for each in (output(model, given), stock)]
    assert errors[0] > 0
    within("out", errors[0], 2 * (errors[1] + torch.finfo(torch.float16).eps))  # of golden's norm


def test_even_attention_in_float16() -> None:
    """Many keys that go with their values have a sum beyond float16, the gradient of the query is within it."""
    torch.manual_seed(0)
    key = 3.5 * torch.randn(1, 2, 9000, 16, dtype=torch.float64)
    value = 4 * key + torch.randn_like(key)
    gradients = list[torch.Tensor]()
    for dtype in (torch.float64, torch.float16):
        query = torch.ones(1, 2, 5, 16, dtype=dtype, requires_grad=True)
        out = attend_evenly(query, key.to(dtype), value.to(dtype), 0.25)
        gradients += torch.autograd.grad(out.sum(), query)
    exact, ours = gradients
    # Values, of which 9,000 are rounded in float16, and the result: a unit each, with a factor of two to spare.
    within("d_query", (ours.double() - exact).norm(), 4 * torch.finfo(torch.float16).eps * exact.norm())


@pytest.mark.parametrize("name", ["mpnet", "deberta", "deberta_v2", "sew_d", "bloom", "fastspeech2_conformer"])
def test_dropout_in_evaluation(name: str) -> None:
    """Dropout modules that train drop, also in a model that does not (Monte Carlo dropout)."""
    model = build(name).eval()
    given = arguments(name, model, PADDED)
    enable(model)
    for module in model.modules():
        dropout = getattr(module, "attention_dropout", getattr(module, "dropout", None))
        if "Attention" in type(module).__name__ and isinstance(dropout, torch.nn.Module):
            vars(dropout).update({"drop_prob" if hasattr(dropout, "drop_prob") else "p": 0.5})
            dropout.train()
    assert not model.training and not torch.equal(output(model, given), output(model, given))


def test_no_limit_to_the_past() -> None:
    """Which the stock model of Nemotron's streaming ASR takes a window of 0 for."""
    model = build("nemotron_asr_streaming", sliding_window=0)
    enable(model)
    with pytest.raises(ValueError, match="sliding_window must be positive"):
        output(model, arguments("nemotron_asr_streaming", model, PADDED))


@pytest.mark.parametrize("name", ["deberta", "deberta_v2", "sew_d"])
def test_a_mask_of_keys_alone(name: str) -> None:
    """A mask (B, 1, 1, N) of the user's hides keys; queries of padding attend as others do."""
    model = build(name, torch.float64)
    encoder = model.encoder
    torch.manual_seed(1)
    states = torch.randn(2, LENGTH, model.config.hidden_size, dtype=torch.float64)
    mask = (torch.arange(LENGTH) < torch.tensor(PADDED)[:, None])[:, None, None].long()

    def result() -> torch.Tensor:
        with torch.no_grad():
            made: torch.Tensor = encoder(states, mask)[0]
        return made

    with in_float64():
        stock = result()
        enable(model)
        assert_near("result", result(), stock)


def test_buckets_of_wavlm() -> None:
    """They are rounded as the stock model rounds them, which is not T5's way: with this number of buckets it shows at 319."""
    model = build("wavlm", torch.float64, num_buckets=316, max_bucket_distance=512)
    with in_float64():
        assert_same(*both(model, arguments("wavlm", model, [330], 330)))


SEVERAL_GRAPHS = ("nemotron_asr_streaming", "vits", "switch_transformers", "inkling2")
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


@every_family
def test_sdpa_models(name: str) -> None:
    """Results do not depend on the attention implementation that a model's config names."""
    if "sdpa" not in FAMILIES[name].stock:
        pytest.skip("has none")
    model = build(name)
    sdpa = build(name, implementation="sdpa")
    given = arguments(name, model, PADDED)
    enable(model)
    enable(sdpa)
    assert torch.equal(output(model, given), output(sdpa, given))


def test_both(length: int = LENGTH) -> None:
    """The helper leaves a stock model behind."""
    model = build("vits", torch.float64)
    both(model, arguments("vits", model, [length]))
    assert disable(model) == {}


def test_models_without_the_term() -> None:
    """Falcon that rotates queries and keys stays stock; beside a model that has the term, too."""
    rotating = build("falcon", alibi=False)
    with pytest.raises(ValueError, match="FalconModel has no relative attention"):
        enable(rotating)
    both_kinds = torch.nn.ModuleList([rotating, build("falcon")])
    before = classes(rotating)
    assert set(enable(both_kinds)) == {"1", "1.h.0.self_attention", "1.h.1.self_attention"}
    assert classes(rotating) == before
    assert len(disable(both_kinds)) == 3


@pytest.mark.parametrize("name", ["t5", "longt5", "wavlm"])
def test_tables_that_are_offloaded(name: str) -> None:
    """A table's weight may be on another device until its module is called, as accelerate's offloading leaves it."""
    model = build(name).eval()
    enable(model)
    inputs = arguments(name, model, PADDED)
    expected = output(model, inputs)
    tables = [each for path, each in model.named_modules() if path.endswith(("relative_attention_bias", "rel_attn_embed"))]
    assert tables

    def load(module: Any, _: Any, weight: torch.nn.Parameter) -> None:
        module.weight = weight

    def offload(module: Any, *_: Any) -> None:
        module.weight = torch.nn.Parameter(module.weight.detach().to("meta"))

    for table in tables:
        table.register_forward_pre_hook(functools.partial(load, weight=table.weight))
        table.register_forward_hook(offload)
        offload(table)
    assert torch.equal(output(model, inputs), expected)
