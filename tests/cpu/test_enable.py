"""What enable and disable do to any model: what stays, what is given back, what is refused, and what works afterwards."""

from __future__ import annotations

import copy
import io
import pickle
import random
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
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
    THROUGH_THE_DOOR,
    assert_same,
    build,
    counted,
    counting,
    in_float64,
    output,
    real,
    results,
    runs_the_operator,
    subject,
)
from tests.cpu.stock import enable
from tests.cpu.whole_models import vision_encoder
from triton_relattn import disable
from triton_relattn.integrations import in_place, libraries, transformers
from triton_relattn.integrations.transformers import door

# Parts that are plain modules, an encoder that asks for masks, one with a forward of its own, two stacks, a class of no library.
SUBJECTS = ("wav2vec2_bert", "inkling", "parakeet", "t5", "toy")
every_subject = pytest.mark.parametrize("name", SUBJECTS)


def classes(model: nn.Module) -> list[tuple[str, type]]:
    """The names of all modules, and their classes."""
    return [(name, type(module)) for name, module in model.named_modules()]


def configs(model: nn.Module) -> list[Any]:
    return [module.config for module in model.modules() if hasattr(module, "config")]


@every_subject
def test_disable_gives_everything_back(name: str) -> None:
    model, given = subject(name)
    types, held = [type(part) for part in model.modules()], configs(model)
    settings, expected = [copy.deepcopy(config.to_dict()) for config in held], results(model, given)
    state, called = dict(model.state_dict(keep_vars=True)), list[str]()
    enabled = dict(enable(model))
    for path in enabled:
        model.get_submodule(path).register_forward_hook(lambda module, *_: called.append(type(module).__name__))
    pairs = zip(model.named_modules(), types, strict=True)
    changed = {path: was.__name__ for (path, part), was in pairs if type(part) is not was and isinstance(part, was)}
    assert changed == ({} if name in THROUGH_THE_DOOR else enabled)
    assert runs_the_operator(model, given) and set(called) == set(enabled.values())
    now = model.state_dict(keep_vars=True)
    assert now.keys() == state.keys() and all(weight is state[key] for key, weight in now.items())
    model.load_state_dict(model.state_dict())
    assert enable(model) == {}
    assert disable(model) == enabled and disable(model) == {}
    assert [type(part) for part in model.modules()] == types
    assert all(now is then for now, then in zip(configs(model), held, strict=True))
    assert [config.to_dict() for config in held] == settings
    again = results(model, given)
    assert all(torch.equal(again[key], expected[key]) for key in expected)


@every_subject
def test_other_models_stay_as_they_are(name: str) -> None:
    """Models of the same class, created later, or disabled again are not affected by enable, nor are those that share the config,
    unless it names the implementation."""
    (model, given), (other, _) = subject(name), subject(name)
    expected, before = output(model, given), classes(other)
    config = copy.deepcopy(model.config) if name in THROUGH_THE_DOOR else getattr(model, "config", None)
    sharing = copy.deepcopy(model) if name == "toy" else type(model)(config).eval()
    sharing.load_state_dict(model.state_dict())
    enable(model)
    for stranger in (other, sharing, subject(name)[0]):
        assert classes(stranger) == before and torch.equal(output(stranger, given), expected)
    enable(sharing)
    disable(model)
    assert torch.equal(output(model, given), expected)
    assert runs_the_operator(sharing, given)


def test_a_model_of_an_enabled_ones_class() -> None:
    """A new model of an enabled model's class is enabled completely, whichever config it is built from."""
    model, given = subject("inkling")
    config = copy.deepcopy(model.config)
    enable(model)
    for settings in (config, model.config):
        other = type(model)(settings).eval()
        other.load_state_dict(model.state_dict())
        assert classes(other) == classes(model)
        assert disable(other)
    enable(other)
    assert torch.equal(output(other, given), output(model, given))


@every_subject
def test_copies_and_files_stay_enabled_and_independent(name: str) -> None:
    model, given = subject(name)
    expected = output(model, given)
    enabled = enable(model)
    ours = output(model, given)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), torch.load(file, weights_only=False), pickle.loads(pickle.dumps(model))):
        assert classes(copied) == classes(model)
        assert torch.equal(output(copied, given), ours) and runs_the_operator(copied, given)
        assert not {id(config) for config in configs(copied)} & {id(config) for config in configs(model)}
        for config in configs(copied)[:1]:
            config.layerdrop = 0.123
            assert getattr(model.config, "layerdrop", None) != 0.123
        assert disable(copied) == enabled
        assert torch.equal(output(copied, given), expected)
        assert torch.equal(output(model, given), ours)


@every_subject
def test_threads_and_checkpoints(name: str) -> None:
    """Threads can share an enabled model, and activation checkpointing works."""
    model, given = subject(name)
    enable(model)
    ours = output(model, given)
    with ThreadPoolExecutor(3) as pool:
        assert all(torch.equal(result, ours) for result in pool.map(lambda _: output(model, given), range(3)))
    if name != "toy":
        plain = results(model.train(), given)
        model.gradient_checkpointing_enable()
        assert_same(results(model, given), plain)


@pytest.mark.parametrize("part", ["layers.1", "layers.0.self_attn", "layers"])
def test_a_part_of_a_model(part: str) -> None:
    model, given = subject("parakeet", torch.float64)
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
    """A mix of stock and enabled layers works: each kind reads what the other passes on."""
    model, given = subject(name, torch.float64)
    with in_float64(), warnings.catch_warnings():
        warnings.filterwarnings("error", ".*ours raises")
        expected = results(model, given, counting(name, PADDED))
        attention = [path for path, kind in enable(model).items() if "Attention" in kind]
        for path in (attention[0], attention[-1]):
            disable(model.get_submodule(path))
            assert_same(results(model, given, counting(name, PADDED)), expected)
            enable(model)
    assert disable(model)


@pytest.mark.parametrize("name", ["t5", "wavlm", "inkling", "bloom", "nemotron_asr_streaming"])
def test_modules_that_differ_are_stock_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the module that differs becomes stock again; the results are the stock model's, also if the model is then compiled."""
    model, given = subject(name)
    expected = output(model, given)
    report = enable(model, check_calls=True)
    attention = model.get_submodule(next(path for path, kind in report.items() if "Attention" in kind))
    scaling = "inv_norm_factor" if name == "bloom" else "scaling"
    owner, what = (door, "fused_relative_attention") if name == "t5" else (type(attention)._triton_relattn, "function")
    function = getattr(owner, what)

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "t5":
            return 2 * function(self, *args, **kwargs)
        if self.layer_idx if hasattr(self, "layer_idx") else False:
            return function(self, *args, **kwargs)
        before = getattr(self, scaling)
        vars(self)[scaling] = 2 * before
        try:
            return function(self, *args, **kwargs)
        finally:
            vars(self)[scaling] = before

    monkeypatch.setattr(owner, what, wrong)
    with pytest.warns(UserWarning, match="uses its (stock class|own attention) again"):
        assert_near("output", counted(output(model, given), counting(name, PADDED)), counted(expected, counting(name, PADDED)))
    differing = report.calls().differing
    assert differing and all("differs by" in reason for reason in differing.values())
    monkeypatch.undo()
    monkeypatch.setattr(in_place.InPlace, "fewest", 0)
    again = counted(output(model, given), counting(name, PADDED))
    assert_near("again", again, counted(expected, counting(name, PADDED)))


def test_models_that_are_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "installed_version", lambda _: "4.57.3")
    with pytest.raises(RuntimeError, match=r"transformers 4.57.3: it is too old: versions from 5.0 on are served"):
        enable(build("t5"))


def test_a_class_that_is_derived_from_one_that_is_served() -> None:
    """A user's subclass is not replaced, because its changes are unknown."""
    model, given = subject("vits")
    attention = model.get_submodule("encoder.layers.0.attention")
    attention.__class__ = type("Mine", (type(attention),), {})
    with pytest.warns(UserWarning, match="1 of 2|1 of 3"):
        report = enable(model)
    assert "is derived from VitsAttention" in report.left["encoder.layers.0.attention"]
    assert set(report) == {"encoder.layers.1.attention"}
    assert runs_the_operator(model, given)


WRONG: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "a name": ("facebook/sam-vit-base", {}, TypeError, "got the string 'facebook/sam-vit-base': load it first"),
    "a class": (stock.GridAttention, {}, TypeError, "got the class GridAttention: create an instance"),
    "a state_dict": (stock.GridAttention().state_dict(), {}, TypeError, "got a state_dict: load it into its module"),
    "a number": (3, {}, TypeError, "expects a torch.nn.Module, or an object that holds some, got int"),
    "nothing relative": (nn.Linear(2, 2), {}, ValueError, "Linear has no relative attention that triton_relattn knows"),
    "a text": (None, {"lengths": "4096"}, TypeError, "lengths must be an int, or several in a sequence, got '4096'"),
    "floats": (None, {"lengths": [8.0]}, TypeError, r"lengths must be an int, or several in a sequence, got \[8.0\]"),
    "zero": (None, {"lengths": 0}, ValueError, "lengths must be positive, got 0"),
    "a slip": (None, {"length": 8}, TypeError, "did you mean 'lengths'"),
    "removed": (None, {"prove": False}, TypeError, r"unexpected keyword argument 'prove'; it was removed in 0.3.0"),
}


@pytest.mark.parametrize("function", [enable, transformers.enable])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(function: Any, name: str) -> None:
    """The message explains the mistake in one line, and no module is changed."""
    model, options, error, message = WRONG[name]
    model = build("t5") if model is None else model
    with pytest.raises(error, match=message) as caught:
        function(model, **options)
    assert len(str(caught.value)) < 300
    assert not isinstance(model, nn.Module) or disable(model) == {}


def test_models_without_the_term() -> None:
    """Modules without relative attention stay stock, also beside one that has it."""
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
    """A forward set on the instance, as hooks of other libraries do, would hide ours: enable raises and changes nothing."""
    model, _ = subject(name)
    for module in model.modules():
        if type(module).__name__ in ("Wav2Vec2BertSelfAttention", "ShawAttention"):
            module.forward = module.forward
    before = classes(model)
    with pytest.raises(RuntimeError, match="its forward was replaced"):
        enable(model)
    assert classes(model) == before


def test_objects_that_hold_modules() -> None:
    """Pipelines: modules in their attributes, and the components of diffusers' pipelines."""

    class Pipeline:
        def __init__(self) -> None:
            self.model, self.name = stock.ShawAttention(), "a pipeline"

        @property
        def components(self) -> dict[str, Any]:
            return {"encoder": nn.ModuleList([stock.GridAttention()]), "tokenizer": None}

    parts = Pipeline()
    assert dict(enable(parts)) == {"model": "ShawAttention", "encoder.0": "GridAttention"}
    assert disable(parts) == {"model": "ShawAttention"}  # the others were recreated


CONTEXTS: dict[str, Callable[[], Any]] = {
    "nothing": nullcontext,
    "meta": lambda: torch.device("meta"),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def process_state() -> list[Any]:
    drawn: Any = np.random.get_state()
    numbers = [torch.get_rng_state().tolist(), random.getstate(), drawn[1].tolist()]
    modes = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")]
    return [*numbers, *modes, torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(), *warnings.filters]


@pytest.mark.parametrize("name", CONTEXTS)
def test_what_the_caller_has_set_stays(name: str) -> None:
    """enable restores the caller's global state, which does not influence the comparison."""
    model = stock.ShawAttention()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with CONTEXTS[name]():
            before = process_state()
            assert enable(model)
            assert process_state() == before
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("change", ["another scale", "another argument"])
def test_another_version_of_a_library(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of an unknown library version are compared like any other; if they compute something else they stay stock."""
    model, _ = subject("bloom")
    before, stock_class = classes(model), type(model.h[0].self_attention)
    forward = stock_class.forward

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.inv_norm_factor *= 1 + 1e-6
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.inv_norm_factor /= 1 + 1e-6

    def later(self: Any, *args: Any, later_argument: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(stock_class, "forward", scaled if change == "another scale" else later)
    with pytest.raises(RuntimeError, match="the output differs by" if change == "another scale" else "later_argument"):
        enable(model)
    assert classes(model) == before
