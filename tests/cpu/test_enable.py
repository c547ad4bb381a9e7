"""What enable and disable do to any model: what stays, what is given back, what is refused, and what works afterwards."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import random
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.tolerance import assert_near

pytest.importorskip("transformers")

from tests.cpu import stock
from tests.cpu.models import (
    PADDED,
    arguments,
    assert_same,
    build,
    counted,
    counting,
    in_float64,
    output,
    real,
    results,
    runs_the_operator,
)
from tests.cpu.whole_models import WHOLE_MODELS, images, vision_encoder, without_vision
from triton_relattn import disable, enable
from triton_relattn.integrations import in_place, replacement, transformers

# Parts that are plain modules, an encoder that asks for masks, one with a forward of its own, two stacks, a class of no library.
SUBJECTS = ("wav2vec2_bert", "inkling", "parakeet", "t5", "toy")
every_subject = pytest.mark.parametrize("name", SUBJECTS)


def made(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
    """A model and arguments, long enough that the operator is used."""
    if name != "toy":
        model = build(name, dtype)
        return model, arguments(name, model, PADDED)
    torch.manual_seed(0)
    toy = nn.Sequential(*(stock.Block(stock.ShawAttention()) for _ in range(2)))
    return toy.to(dtype).eval(), {"input": torch.randn(16, 128, 32, dtype=dtype)}


def classes(model: nn.Module) -> list[tuple[str, str]]:
    """The names of all modules and of their classes; names, since some classes are made when a model is enabled."""
    return [(name, f"{type(each).__module__}.{type(each).__qualname__}") for name, each in model.named_modules()]


def configs(model: nn.Module) -> list[Any]:
    return [each.config for each in model.modules() if hasattr(each, "config")]


@every_subject
def test_disable_gives_everything_back(name: str) -> None:
    model, given = made(name)
    types, held = [type(each) for each in model.modules()], configs(model)
    settings, expected = [copy.deepcopy(each.to_dict()) for each in held], results(model, given)
    state, called = dict(model.state_dict(keep_vars=True)), list[str]()
    enabled = dict(enable(model))
    for path in enabled:
        model.get_submodule(path).register_forward_hook(lambda module, *_: called.append(type(module).__name__))
    changed = [
        (path, was)
        for (path, each), was in zip(model.named_modules(), types, strict=True)
        if type(each) is not was and isinstance(each, was)
    ]
    assert {path: was.__name__ for path, was in changed} == enabled
    assert runs_the_operator(model, given) and set(called) == set(enabled.values())
    now = model.state_dict(keep_vars=True)
    assert now.keys() == state.keys() and all(each is state[key] for key, each in now.items())
    model.load_state_dict(model.state_dict())
    assert enable(model) == {}
    assert disable(model) == enabled and disable(model) == {}
    assert [type(each) for each in model.modules()] == types
    assert all(now is then for now, then in zip(configs(model), held, strict=True))
    assert [each.to_dict() for each in held] == settings
    again = results(model, given)
    assert all(torch.equal(again[each], expected[each]) for each in expected)


@every_subject
def test_other_models_stay_as_they_are(name: str) -> None:
    """One of the same class, one that shares the config, one that is made later, one that was enabled and no more is."""
    (model, given), (other, _) = made(name), made(name)
    expected, before = output(model, given), classes(other)
    sharing = copy.deepcopy(model) if name == "toy" else type(model)(model.config).eval()
    sharing.load_state_dict(model.state_dict())
    enable(model)
    for stranger in (other, sharing, made(name)[0]):
        assert classes(stranger) == before and torch.equal(output(stranger, given), expected)
    enable(sharing)
    disable(model)
    assert torch.equal(output(model, given), expected)
    assert runs_the_operator(sharing, given)


@pytest.mark.parametrize("name", ["inkling", "wav2vec2_bert"])
def test_a_model_of_an_enabled_ones_class(name: str) -> None:
    """It is enabled as a whole, whichever config it is made of."""
    model, given = made(name)
    inner = model if name == "inkling" else model.encoder
    config = copy.deepcopy(inner.config)
    enable(model)
    for each in (config, inner.config):
        other = type(inner)(each).eval()
        other.load_state_dict(inner.state_dict())
        assert classes(other) == classes(inner)
        assert disable(other)
    if name == "inkling":
        enable(other)
        assert torch.equal(output(other, given), output(model, given))


@every_subject
def test_copies_and_files_stay_enabled_and_independent(name: str) -> None:
    model, given = made(name)
    expected = output(model, given)
    enabled = enable(model)
    ours = output(model, given)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), torch.load(file, weights_only=False), pickle.loads(pickle.dumps(model))):
        assert classes(copied) == classes(model)
        assert torch.equal(output(copied, given), ours) and runs_the_operator(copied, given)
        assert not {id(each) for each in configs(copied)} & {id(each) for each in configs(model)}
        for each in configs(copied)[:1]:
            each.layerdrop = 0.123
            assert getattr(model.config, "layerdrop", None) != 0.123
        assert disable(copied) == enabled
        assert torch.equal(output(copied, given), expected)
        assert torch.equal(output(model, given), ours)


@every_subject
def test_threads_and_checkpoints(name: str) -> None:
    """Threads share a model; activations may be computed again."""
    model, given = made(name)
    enable(model)
    ours = output(model, given)
    with ThreadPoolExecutor(3) as pool:
        assert all(torch.equal(each, ours) for each in pool.map(lambda _: output(model, given), range(3)))
    if name != "toy":
        plain = results(model.train(), given)
        model.gradient_checkpointing_enable()
        assert_same(results(model, given), plain)


@pytest.mark.parametrize("part", ["layers.1", "layers.0.self_attn", "layers"])
def test_a_part_of_a_model(part: str) -> None:
    model, given = made("parakeet", torch.float64)
    with in_float64():
        expected, before = results(model, given, real(PADDED)), classes(model)
        enabled = enable(model.get_submodule(part))
        changed = [path for (path, kind), old in zip(classes(model), before, strict=True) if (path, kind) != old]
        assert changed == [f"{part}.{path}".rstrip(".") for path in enabled]
        assert_same(results(model, given, real(PADDED)), expected)
    disable(model.get_submodule(part))
    assert classes(model) == before


@pytest.mark.parametrize("name", ["wav2vec2_bert", "inkling", "t5", "wavlm", "mpnet", "speecht5", "phi4_multimodal", "deberta"])
def test_a_part_that_is_disabled(name: str) -> None:
    """Stock layers among enabled ones get what stock layers pass on, and enabled ones take it."""
    model, given = made(name, torch.float64)
    with in_float64():
        expected = results(model, given, counting(name, PADDED))
        attention = [path for path, kind in enable(model).items() if "Attention" in kind]
        for path in (attention[0], attention[-1]):
            disable(model.get_submodule(path))
            assert_same(results(model, given, counting(name, PADDED)), expected)
            enable(model)
    assert disable(model)


@pytest.mark.parametrize("name", ["t5", "wavlm", "inkling", "bloom", "nemotron_asr_streaming"])
def test_modules_that_differ_are_stock_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them; the others stay enabled, and the results are the stock model's, also of a model that is compiled then."""
    model, given = made(name)
    expected = output(model, given)
    report = enable(model)
    attention = model.get_submodule(next(path for path, kind in report.items() if "Attention" in kind))
    scaling = "inv_norm_factor" if name == "bloom" else "scaling"
    ours = type(attention)._triton_relattn
    function = ours.function

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.layer_idx if hasattr(self, "layer_idx") else False:
            return function(self, *args, **kwargs)
        before = getattr(self, scaling)
        vars(self)[scaling] = 2 * before
        try:
            return function(self, *args, **kwargs)
        finally:
            vars(self)[scaling] = before

    monkeypatch.setattr(ours, "function", wrong)
    with pytest.warns(UserWarning, match="uses its stock class again"):
        assert_near("output", counted(output(model, given), counting(name, PADDED)), counted(expected, counting(name, PADDED)))
    differing = report.calls().differing
    assert differing and all("differs by" in each for each in differing.values())
    monkeypatch.undo()
    monkeypatch.setattr(in_place.InPlace, "fewest", 0)
    again = counted(output(model, given), counting(name, PADDED))
    assert_near("again", again, counted(expected, counting(name, PADDED)))


def test_short_calls_are_the_stock_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU: bit for bit. Long ones are ours."""
    monkeypatch.setattr(in_place.InPlace, "fewest", in_place.FEWEST)
    for name in ("t5", "wavlm", "inkling", "deberta_v2", "parakeet"):
        model, given = made(name)
        expected = output(model, given)
        report = enable(model)
        assert torch.equal(output(model, given), expected) and not runs_the_operator(model, given)
        assert not report.calls().compared
    model = build("vits")
    given = arguments("vits", model, [600, 600], 600)
    enable(model)
    assert runs_the_operator(model, given)


def test_models_that_are_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacement, "installed_version", lambda _: "4.57.3")
    with pytest.raises(RuntimeError, match=r"transformers 4.57.3: it is too old: versions from 5.0 on are served"):
        enable(build("t5"))


def test_a_class_that_is_derived_from_one_that_is_served() -> None:
    """By a user: what it changes is not known."""
    model, given = made("vits")
    attention = model.get_submodule("encoder.layers.0.attention")
    attention.__class__ = type("Mine", (type(attention),), {})
    with pytest.warns(UserWarning, match="1 of 2|1 of 3"):
        report = enable(model)
    assert "is derived from VitsAttention" in report.left["encoder.layers.0.attention"]
    assert set(report) == {"encoder.layers.1.attention"}
    assert runs_the_operator(model, given)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("facebook/sam-vit-base", TypeError, "got the string 'facebook/sam-vit-base': load it first"),
        (stock.GridAttention, TypeError, "got the class GridAttention: create an instance"),
        (stock.GridAttention().state_dict(), TypeError, "got a state_dict: load it into its module"),
        (3, TypeError, "expects a torch.nn.Module, or an object that holds some, got int"),
        (nn.Linear(2, 2), ValueError, "Linear has no relative attention that triton_relattn knows"),
    ],
    ids=["name", "class", "state_dict", "number", "nothing"],
)
def test_what_cannot_be_enabled(model: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        enable(model)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("function", [enable, transformers.enable])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lengths": "4096"}, TypeError, "lengths must be an int, or several in a sequence, got '4096'"),
        ({"lengths": [8.0]}, TypeError, r"lengths must be an int, or several in a sequence, got \[8.0\]"),
        ({"lengths": 0}, ValueError, "lengths must be positive, got 0"),
        ({"length": 8}, TypeError, "did you mean 'lengths'"),
        ({"prove": False}, TypeError, r"enable\(\) got an unexpected keyword argument 'prove'; it was removed in 0.3.0"),
    ],
    ids=["text", "floats", "zero", "a slip", "removed"],
)
def test_wrong_arguments(function: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    model = build("t5")
    with pytest.raises(error, match=message):
        function(model, **options)
    assert disable(model) == {}


def test_models_without_the_term() -> None:
    """They stay stock, also beside one that has it."""
    rotating = build("falcon", alibi=False)
    without = [build("deberta_v2", relative_attention=False), build("deberta", pos_att_type=[])]
    for model in (rotating, vision_encoder("sam", use_rel_pos=False), *without, nn.Linear(2, 2)):
        with pytest.raises(ValueError, match=f"{type(model).__name__} has no relative attention"):
            transformers.enable(model)
    both_kinds = nn.ModuleList([rotating, build("falcon")])
    before = classes(rotating)
    assert set(enable(both_kinds)) == {"1", "1.h.0.self_attention", "1.h.1.self_attention"}
    assert classes(rotating) == before
    assert len(disable(both_kinds)) == 3


@pytest.mark.parametrize("name", ["wav2vec2_bert", "toy"])
def test_a_forward_of_its_own(name: str) -> None:
    """As hooks of other libraries leave it: it would hide ours. Nothing is changed."""
    model, _ = made(name)
    for each in model.modules():
        if type(each).__name__ in ("Wav2Vec2BertSelfAttention", "ShawAttention"):
            each.forward = each.forward
    before = classes(model)
    with pytest.raises(RuntimeError, match="its forward was replaced"):
        enable(model)
    assert classes(model) == before


def test_weights_that_are_asked_for() -> None:
    """They are the stock forward's."""
    vits, vitdet, inkling = build("vits"), vision_encoder("vitdet"), build("inkling")
    for model, given in ((vits, arguments("vits", vits, PADDED)), (vitdet, images("vitdet"))):
        with torch.no_grad():
            stock = model(**given, output_attentions=True).attentions
            enable(model)
            assert all(torch.equal(*each) for each in zip(model(**given, output_attentions=True).attentions, stock, strict=True))
        assert runs_the_operator(model, given)
    given = arguments("inkling", inkling, PADDED)
    inkling.config.output_attentions = True
    enable(inkling)
    with torch.no_grad():
        assert len(inkling(**given).attentions) == 2
    inkling.config.output_attentions = False
    assert runs_the_operator(inkling, {**given, "output_hidden_states": True})


PACKED = ("cu_seq_lens_q", "max_length_q", "block_table")


@pytest.mark.parametrize("argument", [*PACKED, "head_mask", "softcap", "s_aux", "sliding_window", "a_later_one"])
@pytest.mark.parametrize("name", ["t5", "mpt", "wav2vec2_bert", "parakeet"])
def test_arguments_that_ours_has_not(name: str, argument: str) -> None:
    """They are of a packed batch, of another softmax, or of a later version: the call is the stock forward's."""
    model = build(name)
    path = next(path for path, each in model.named_modules() if "Attention" in type(each).__name__)
    attention, states = model.get_submodule(path), torch.randn(1, 3, 32)
    given: dict[str, Any] = {argument: torch.tensor([0, 3])}
    given |= {"position_embeddings": torch.randn(1, 5, 32)} if name == "parakeet" else {}
    given |= {"position_bias": None} if name == "mpt" else {}

    def run() -> Any:
        try:
            return attention(states, **given)[0]
        except (TypeError, ValueError, RuntimeError) as error:
            return str(error)

    stock = run()
    enable(model)
    assert run() == stock if isinstance(stock, str) else torch.equal(run(), stock)


def test_causality_that_is_asked_for() -> None:
    """Of an encoder's attention: the call is the stock forward's."""
    model = build("t5")
    encoder, decoder = (part.block[0].layer[0].SelfAttention for part in (model.encoder, model.decoder))
    states = torch.randn(1, 4, 32)
    stock = [each(states, is_causal=True)[0] for each in (encoder, decoder)]
    enable(model)
    assert torch.equal(encoder(states, is_causal=True)[0], stock[0])
    assert_near("decoder", decoder(states, is_causal=True)[0], stock[1])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("nemotron_asr_streaming", {"sliding_window": 0}),  # no limit to the past
        ("gemma4", {"attention_chunk_size": 3, "attention_context_left": 1}),  # a window that hides a frame from itself
    ],
)
def test_settings_of_the_stock_forward(name: str, settings: dict[str, Any]) -> None:
    model = build(name, **settings)
    given = arguments(name, model, PADDED)
    expected = output(model, given)
    try:
        enable(model)
    except ValueError:
        assert name == "gemma4"
    assert torch.equal(output(model, given), expected)


@pytest.mark.parametrize("name", ["wav2vec2_bert", "t5", "inkling"])
def test_saved_models_are_stock_models(name: str, tmp_path: Path) -> None:
    """The same files: settings, and tensors under their published names, which load into a stock model."""
    from safetensors.torch import load_file

    torch.manual_seed(0)
    model = WHOLE_MODELS["inkling"][0]()[0].model if name == "inkling" else build(name)
    model.save_pretrained(tmp_path / "stock")
    enable(model)
    model.save_pretrained(tmp_path / "ours")
    files = [[tmp_path / each / file for each in ("ours", "stock")] for file in ("config.json", "model.safetensors")]
    assert files[0][0].read_text() == files[0][1].read_text()
    ours, expected = (load_file(each) for each in files[1])
    assert ours.keys() == expected.keys() and all(torch.equal(ours[key], expected[key]) for key in ours)
    disable(model)
    with without_vision():
        loaded = type(model).from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert disable(loaded) == {}
    state = model.state_dict()
    assert all(torch.equal(each, state[key]) for key, each in loaded.state_dict().items())


def test_settings_that_are_changed_later() -> None:
    """A model's config is its encoder's, enabled or not; one that is put in its place does as well, and is not lost."""
    model = build("wav2vec2_bert", layers=3).train()
    given = arguments("wav2vec2_bert", model, PADDED)
    enable(model)
    for rate in (1.0, 0.0):
        (model if rate else model.encoder).config.layerdrop = rate
        assert model.config.layerdrop == rate
        assert any("layers.2" in each for each in dict(model.named_parameters()).keys() - results(model, given).keys()) == bool(
            rate
        )

    inkling, given = made("inkling")
    enable(inkling)
    for use_cache in (True, False):
        inkling.config.use_cache = use_cache
        assert (inkling(**given).past_key_values is not None) == use_cache
    inkling.config.is_causal = False
    ours = counted(output(inkling, given), real(PADDED))
    other = copy.deepcopy(build("inkling").config)
    other.is_causal = other.use_cache = False
    for each in inkling.modules():
        if hasattr(each, "config"):
            each.config = other
    assert_near("another config", counted(output(inkling, given), real(PADDED)), ours)
    disable(inkling)
    assert all(each is other for each in configs(inkling))
    assert_near("ours", ours, counted(output(inkling, given), real(PADDED)))


@pytest.mark.parametrize("name", ["wav2vec2_bert", "t5"])
def test_an_implementation_that_is_changed_later(name: str) -> None:
    """It waits until the model is stock again."""
    model, given = made(name)
    expected = output(model, given)
    enable(model)
    ours = output(model, given)
    model.set_attn_implementation("sdpa")
    assert torch.equal(output(model, given), ours)
    disable(model)
    assert model.config._attn_implementation == "sdpa"
    assert_near("output", output(model, given)[0], expected[0])
    assert not torch.equal(output(model, given), expected)


@pytest.mark.parametrize("name", ["t5", "longt5", "wavlm"])
def test_tables_that_are_offloaded(name: str) -> None:
    """A table's weight may be on another device until its module is called, as accelerate's offloading leaves it."""
    model, given = made(name)
    enable(model)
    expected = output(model, given)
    tables = [each for path, each in model.named_modules() if path.endswith(("relative_attention_bias", "rel_attn_embed"))]
    assert tables

    def load(module: Any, _: Any, weight: nn.Parameter) -> None:
        module.weight = weight

    def offload(module: Any, *_: Any) -> None:
        module.weight = nn.Parameter(module.weight.detach().to("meta"))

    for table in tables:
        table.register_forward_pre_hook(functools.partial(load, weight=table.weight))
        table.register_forward_hook(offload)
        offload(table)
    assert torch.equal(output(model, given), expected)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", ["t5", "wav2vec2_bert", "toy"])
def test_adapters(name: str, before: bool) -> None:
    """Projections with a correction of low rank count, and learn, whether they came before enable or after."""
    model, given = made(name)

    def adapt() -> None:
        for path, each in list(model.named_modules()):
            if path.endswith((".q", ".linear_q", ".wq", ".v", ".linear_v", ".wv")):
                model.get_submodule(path.rpartition(".")[0]).register_module(path.rpartition(".")[2], stock.Adapter(each))

    torch.manual_seed(3)
    if before:
        adapt()
    enable(model)
    if not before:
        adapt()
    assert runs_the_operator(model, given)
    ours = results(model, given)
    learned = [each for path, each in ours.items() if ".up." in path]
    assert learned and all(each.any() for each in learned)
    disable(model)
    counts = counting(name, PADDED) if name != "toy" else None
    assert_near("ours", counted(ours["out"], counts), counted(output(model, given), counts))


def test_objects_that_hold_modules() -> None:
    """Pipelines: their attributes, and the components of those of diffusers."""

    class Pipeline:
        def __init__(self) -> None:
            self.model, self.name = stock.ShawAttention(), "a pipeline"

        @property
        def components(self) -> dict[str, Any]:
            return {"encoder": nn.ModuleList([stock.GridAttention()]), "tokenizer": None}

    parts = Pipeline()
    assert dict(enable(parts)) == {"model": "ShawAttention", "encoder.0": "GridAttention"}
    assert disable(parts) == {"model": "ShawAttention"}  # the others were built again


CONTEXTS: dict[str, Callable[[], Any]] = {
    "nothing": nullcontext,
    "meta": lambda: torch.device("meta"),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_what_the_caller_has_set_stays(name: str) -> None:
    """And has no effect on a comparison."""

    class New(stock.ShawAttention):  # a class that was compared before would not be compared again
        pass

    def state() -> list[Any]:
        drawn: Any = np.random.get_state()
        numbers = [torch.get_rng_state().tolist(), random.getstate(), drawn[1].tolist()]
        modes = [
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            warnings.filters[:],
        ]
        return [
            *numbers,
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.get_num_threads(),
            *modes,
            *warnings.filters,
        ]

    model = New()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with CONTEXTS[name]():
            before = state()
            assert enable(model)
            assert state() == before
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("change", ["another scale", "another argument"])
def test_another_version_of_a_library(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules are compared as those of any version; if they compute something else they stay."""
    model, _ = made("bloom")
    before, stock_class = classes(model), type(model.h[0].self_attention)
    forward = stock_class.forward

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.inv_norm_factor *= 1 + 1e-6
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.inv_norm_factor /= 1 + 1e-6

    def later(self: Any, *args: Any, of_tomorrow: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(stock_class, "forward", scaled if change == "another scale" else later)
    with pytest.raises(RuntimeError, match="the output differs by" if change == "another scale" else "of_tomorrow"):
        enable(model)
    assert classes(model) == before
