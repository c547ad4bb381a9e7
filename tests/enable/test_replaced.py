"""Enabled models: what enable changes, what goes on working, as copies, files, offloading and adapters, which calls are the stock
forward's, and that disable gives everything back."""

from __future__ import annotations

import copy
import random
import threading
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
from torch.nn.utils import parametrize

from tests.tolerance import assert_near

pytest.importorskip("transformers")

from bench.families import FAMILIES
from tests.enable import stock
from tests.enable.models import (
    COPIES,
    LENGTH,
    PADDED,
    THROUGH_THE_DOOR,
    WHOLE,
    arguments,
    assert_odd_calls_are_stock,
    assert_same,
    attentions,
    build,
    classes,
    counted,
    counting,
    output,
    real,
    results,
    runs_the_operator,
    subject,
)
from tests.enable.stock import enable
from tests.enable.whole_models import WHOLE_MODELS, images, vision_encoder, without_vision
from triton_relattn import disable
from triton_relattn.integrations import in_place

# Parts that are plain modules, an encoder that asks for masks, one with a forward of its own, two stacks, a class of no library.
every_subject = pytest.mark.parametrize("name", ["wav2vec2_bert", "inkling", "parakeet", "t5", "toy"])


def configs(model: nn.Module) -> list[Any]:
    return [module.config for module in model.modules() if hasattr(module, "config")]


@every_subject
def test_disable_gives_everything_back(name: str) -> None:
    model, given = subject(name)
    types, held = classes(model), configs(model)
    settings, expected = [copy.deepcopy(config.to_dict()) for config in held], results(model, given)
    state, called = dict(model.state_dict(keep_vars=True)), list[str]()
    enabled = dict(enable(model))
    for path in enabled:
        model.get_submodule(path).register_forward_hook(lambda module, *_: called.append(type(module).__name__))
    pairs = zip(model.named_modules(), types, strict=True)
    changed = {path: was.__name__ for (path, part), (_, was) in pairs if type(part) is not was and isinstance(part, was)}
    assert changed == ({} if name in THROUGH_THE_DOOR else enabled)
    assert runs_the_operator(model, given) and set(called) == set(enabled.values())
    now = model.state_dict(keep_vars=True)
    assert now.keys() == state.keys() and all(weight is state[key] for key, weight in now.items())
    model.load_state_dict(model.state_dict())
    assert enable(model) == {}
    assert disable(model) == enabled and disable(model) == {}
    assert classes(model) == types and all(now is then for now, then in zip(configs(model), held, strict=True))
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
    for through in COPIES.values():
        copied = through(model)
        assert classes(copied) == classes(model)
        assert torch.equal(output(copied, given), ours) and runs_the_operator(copied, given)
        assert not {id(config) for config in configs(copied)} & {id(config) for config in configs(model)}
        for config in configs(copied)[:1]:
            config.layerdrop = 0.123
            assert getattr(model.config, "layerdrop", None) != 0.123
        assert disable(copied) == enabled
        assert torch.equal(output(copied, given), expected)
        assert torch.equal(output(model, given), ours)


@pytest.mark.parametrize("name", ["parakeet", "mpnet", "t5"])
@pytest.mark.parametrize("through", ["a copy", pytest.param("a file", marks=pytest.mark.thorough)])
def test_one_layer_of_a_copy_is_stock(name: str, through: str) -> None:
    """One layer of a copy is disabled and the copy compiled: its stock layer cannot read what enabled layers pass on."""
    model, given = subject(name, lengths=[20, 13])
    expected = output(model, given)
    enabled = enable(model)
    again = COPIES[through](model)
    disable(attentions(again, enabled)[-1])
    torch._dynamo.reset()
    found = output(torch.compile(again, backend="eager"), given)
    shown = real([20, 13]) if found.shape[1] == LENGTH else None
    assert_near("output", counted(found, shown), counted(expected, shown))


@every_subject
def test_threads_share_an_enabled_model(name: str) -> None:
    model, given = subject(name)
    enable(model)
    ours = output(model, given)
    with ThreadPoolExecutor(3) as pool:
        assert all(torch.equal(result, ours) for result in pool.map(lambda _: output(model, given), range(3)))


PARTS = [("parakeet", part) for part in ("layers.1", "layers.0.self_attn", "layers")]
PARTS += [("t5", "encoder.block.1.layer.0.SelfAttention"), ("phi4_multimodal", "relative_attention_bias_layer")]
PARTS += [(name, "") for name in "wav2vec2_bert inkling t5 wavlm mpnet speecht5 phi4_multimodal deberta".split()]


@pytest.mark.filterwarnings("error:.*ours raises")
@pytest.mark.parametrize(("name", "path"), PARTS)
def test_a_part_of_a_model(name: str, path: str) -> None:
    """A part may be stock in an enabled model, and enabled in a stock one: each kind of layer reads what the other passes on. No
    path: the first and the last attention become stock."""
    model, given = subject(name, torch.float64)
    counts, before = real(PADDED) if name == "parakeet" else counting(name, PADDED), classes(model)
    expected = results(model, given, counts)
    found = attentions(model, enable(model))
    for part in [model.get_submodule(path)] if path else (found[0], found[-1]):
        enable(model)
        disable(part)
        assert_same(results(model, given, counts), expected)
    disable(model)
    if path:
        changed = [f"{path}.{inner}".rstrip(".") for inner in enable(part)]
        others = [inner for (inner, kind), (_, was) in zip(classes(model), before, strict=True) if kind != was]
        assert changed == ([path] if name in THROUGH_THE_DOOR else others)
        assert_same(results(model, given, counts), expected)
        disable(part)
    assert classes(model) == before


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name not in ("inkling", "deberta", "gemma4"))) for name in FAMILIES],
)
def test_calls_that_no_model_makes(name: str) -> None:
    """As before enable, if one module of a model is called on its own."""
    assert_odd_calls_are_stock(*subject(name, torch.float64, WHOLE), enable)


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


REGISTRY: dict[str, type] = {}


class Registered(stock.ShawAttention):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        REGISTRY[cls.__name__] = cls


class InRegistry(Registered):
    pass


def test_a_registry_of_classes() -> None:
    """A registry keeps the stock class and does not get ours."""
    assert enable(InRegistry()) and REGISTRY["InRegistry"] is InRegistry


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
    """enable restores the caller's global state, which does not influence the comparison; threads that enable other models do not
    see it change."""
    models = [type(f"OfThread{number}", (stock.ShawAttention,), {})() for number in range(4 if name == "nothing" else 0)]
    model, dtypes = stock.ShawAttention(), {torch.bfloat16}
    torch.set_default_dtype(torch.bfloat16)
    try:
        with CONTEXTS[name]():
            before = process_state()
            threads = [threading.Thread(target=enable, args=(model,)) for model in models]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                dtypes.add(torch.zeros(1).dtype)
            assert enable(model)
            assert process_state() == before and dtypes == {torch.bfloat16}
    finally:
        torch.set_default_dtype(torch.float32)


# Calls of the stock forward.


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in ("t5", "wavlm", "inkling", "deberta_v2", "parakeet")),
        *(("t5", dtype) for dtype in (torch.float16, torch.bfloat16)),
    ],
    ids=str,
)
def test_short_calls_are_the_stock_forwards(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, short calls run the stock forward, bit for bit, also of a sequence without a real token; long calls run ours."""
    monkeypatch.setattr(in_place.InPlace, "fewest", in_place.FEWEST)
    model = build(name, dtype)
    report = enable(model)
    for lengths in (PADDED, [LENGTH, 0]):
        given = arguments(name, model, lengths)
        assert torch.equal(output(model, given).nan_to_num(), output(build(name, dtype), given).nan_to_num())
        assert not runs_the_operator(model, given) and not report.calls().compared
    if name == "parakeet":
        enable(vits := build("vits"))
        assert runs_the_operator(vits, arguments("vits", vits, [600, 600], 600))


@pytest.mark.parametrize(
    ("name", "asks"),
    [
        *((name, "weights") for name in ("vits", "vitdet", "t5", "pix2struct", "wav2vec2_bert")),
        ("inkling", "weights in its config"),
        *(
            pytest.param(name, "states", marks=pytest.mark.thorough)
            for name in "parakeet wav2vec2_bert deberta_v2 gemma4".split()
        ),
        ("inkling", "states"),
    ],
)
def test_weights_and_states_that_are_asked_for(name: str, asks: str) -> None:
    """Calls that ask for attention weights run the stock forward; hidden states are those of the stock model."""
    model = vision_encoder(name) if name == "vitdet" else build(name)
    given = images(name) if name == "vitdet" else arguments(name, model, WHOLE if asks == "states" else PADDED)
    model.config.output_attentions = "config" in asks
    options = {"states": {"output_hidden_states": True}, "weights": {"output_attentions": True}}.get(asks, {})

    def returned() -> list[torch.Tensor]:
        with torch.no_grad():
            made = model(**given, **options)
        return [
            each for kind in made if kind.endswith("states" if asks == "states" else "attentions") for each in made[kind] or ()
        ]

    expected = returned()
    enable(model)
    found = returned()
    assert len(found) == len(expected) > 1
    for pair in zip(found, expected, strict=True):
        assert asks == "states" or torch.equal(*pair)
        assert_near(asks, *pair)
    model.config.output_attentions = False
    assert runs_the_operator(model, {**given, **(options if asks == "states" else {})})


OTHERS = [(name, "cu_seq_lens_q") for name in ("t5", "mpt", "wav2vec2_bert", "parakeet")]
OTHERS += [("t5", name) for name in "max_length_q block_table head_mask softcap s_aux sliding_window a_later_one".split()]


@pytest.mark.parametrize(("name", "argument"), OTHERS)
def test_arguments_that_ours_has_not(name: str, argument: str) -> None:
    """With arguments for packed batches, for another softmax, or of a later version, the call runs the stock forward."""
    model = build(name)
    attention = next(part for part in model.modules() if "Attention" in type(part).__name__)
    needed: dict[str, dict[str, Any]] = {
        "parakeet": {"position_embeddings": torch.randn(1, 5, 32)},
        "mpt": {"position_bias": None},
    }
    states, given = torch.randn(1, 3, 32), {argument: torch.tensor([0, 3]), **needed.get(name, {})}

    def run() -> Any:
        try:
            return attention(states, **given)[0]
        except (TypeError, ValueError, RuntimeError) as error:
            return str(error)

    expected = run()
    enable(model)
    if name in ("t5", "wav2vec2_bert"):  # whose stock attention reads none of them
        assert_near("output", run(), expected)
    else:
        assert run() == expected if isinstance(expected, str) else torch.equal(run(), expected)


@pytest.mark.parametrize("name", ["toy", "wav2vec2_bert"])
def test_exports_and_traces_as_the_stock_model(name: str) -> None:
    """Also of a module that was compared, so that graphs may be ours, and at another length."""
    if name == "toy":
        model, given = stock.ShawAttention().eval(), {"x": torch.randn(1, 600, 32)}
    else:
        model, given = subject(name)
    shapes = {"x": {1: torch.export.Dim("n", min=100, max=3000)}} if name == "toy" else None
    expected = output(model, given)
    enable(model)
    assert_near("output", output(model, given), expected)
    program = torch.export.export(model, (), given, dynamic_shapes=shapes, strict=False)
    assert "triton_relattn" not in str(program.graph)
    assert_near("exported", output(program.module(), given), expected)
    if name == "toy":
        x = torch.randn(1, 700, 32)
        for longer in (program.module()(x=x), torch.jit.trace(model, given["x"])(x)):
            assert_near("longer", longer, output(model, {"x": x}))


# What goes on working.


@pytest.mark.parametrize("name", ["wav2vec2_bert", "t5", "inkling", "parakeet"])
def test_saved_models_are_stock_models(name: str, tmp_path: Path) -> None:
    """An enabled model saves the same files as the stock one, settings and tensor names included, which load into a stock
    model."""
    from safetensors.torch import load_file

    torch.manual_seed(0)
    model = WHOLE_MODELS["inkling"][0]()[0].model if name == "inkling" else build(name)
    model.save_pretrained(tmp_path / "stock")
    enable(model, packed=name == "t5")
    model.save_pretrained(tmp_path / "ours")
    files = [[tmp_path / folder / file for folder in ("ours", "stock")] for file in ("config.json", "model.safetensors")]
    assert files[0][0].read_text() == files[0][1].read_text()
    ours, expected = (load_file(path) for path in files[1])
    assert ours.keys() == expected.keys() and all(torch.equal(ours[key], expected[key]) for key in ours)
    disable(model)
    with without_vision():
        loaded = type(model).from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert disable(loaded) == {}
    state = model.state_dict()
    assert all(torch.equal(weight, state[key]) for key, weight in loaded.state_dict().items())


def test_settings_that_are_changed_later() -> None:
    """Enabled or not, a model and its encoder share one config; a config assigned later takes effect and is kept by disable."""
    model = build("wav2vec2_bert", layers=3).train()
    given = arguments("wav2vec2_bert", model, PADDED)
    enable(model)
    for rate in (1.0, 0.0):
        (model if rate else model.encoder).config.layerdrop = rate
        assert model.config.layerdrop == rate
        skipped = dict(model.named_parameters()).keys() - results(model, given).keys()
        assert any("layers.2" in path for path in skipped) == bool(rate)

    inkling, given = subject("inkling")
    enable(inkling)
    for use_cache in (True, False):
        inkling.config.use_cache = use_cache
        assert (inkling(**given).past_key_values is not None) == use_cache
    inkling.config.is_causal = False
    ours = counted(output(inkling, given), real(PADDED))
    other = copy.deepcopy(build("inkling").config)
    other.is_causal = other.use_cache = False
    for module in inkling.modules():
        if hasattr(module, "config"):
            module.config = other
    assert_near("another config", counted(output(inkling, given), real(PADDED)), ours)
    disable(inkling)
    assert all(config is other for config in configs(inkling))
    assert_near("ours", ours, counted(output(inkling, given), real(PADDED)))


@pytest.mark.parametrize("name", ["t5", "longt5", "wavlm"])
def test_tables_that_are_offloaded(name: str) -> None:
    """A table's weight may be on another device until its module is called, as with accelerate's offloading."""
    model, given = subject(name)
    enable(model)
    expected = output(model, given)
    tables: list[Any] = [part for path, part in model.named_modules() if path.endswith(("attention_bias", "rel_attn_embed"))]
    assert tables
    for table in tables:

        def loaded(*args: Any, table: Any = table, forward: Any = table.forward, weight: Any = table.weight) -> Any:
            table.weight = weight
            try:
                return forward(*args)
            finally:
                table.weight = nn.Parameter(weight.detach().to("meta"))

        table.forward, table.weight = loaded, nn.Parameter(table.weight.detach().to("meta"))
    assert torch.equal(output(model, given), expected)


def adapt(model: Any) -> None:
    """Low-rank adapters on projections."""
    for path, module in list(model.named_modules()):
        if path.endswith((".q", ".linear_q", ".wq", ".v", ".linear_v", ".wv")):
            model.set_submodule(path, stock.Adapter(module).to(module.weight.dtype))


def zero_the_weights(model: nn.Module) -> None:
    """By a hook on their dropout; ours computes none, so the call is the stock forward's."""
    for part in model.modules():
        if "ropout" in type(part).__name__:
            part.register_forward_hook(lambda _, __, result: 0 * result)


def parametrized(model: Any) -> None:
    """Which makes a subclass, as FSDP2 does."""
    parametrize.register_parametrization(model.layers[0].self_attn, "bias_u", nn.Identity())
    model.train().eval()


def write_to_the_bias(model: nn.Module) -> None:
    """A hook modifies the bias that T5's first layer passes on; later layers read the modified values."""

    def add(_: Any, __: Any, result: Any) -> None:
        bias = next(tensor for tensor in result[1:] if isinstance(tensor, torch.Tensor) and tensor.dim() > 1)
        with torch.no_grad():
            bias[..., 3] += 5

    next(part for path, part in model.named_modules() if path.endswith("SelfAttention")).register_forward_hook(add)


def look_at_gradients(model: nn.Module) -> None:
    """By backward hooks on what layers pass on."""
    for path, part in model.named_modules():
        if path.endswith("SelfAttention"):
            part.register_full_backward_hook(lambda *_: None)


CHANGES = [(name, adapt, before, True) for name in ("t5", "wav2vec2_bert", "toy") for before in (True, False)]
CHANGES += [(name, zero_the_weights, False, False) for name in ("deberta_v2", "fastspeech2_conformer")]
CHANGES += [
    ("parakeet", parametrized, False, True),
    ("t5", write_to_the_bias, False, True),
    ("t5", look_at_gradients, True, True),
]


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize(("name", "change", "before", "is_ours"), CHANGES)
def test_changes_that_have_an_effect(name: str, change: Callable[[Any], None], before: bool, is_ours: bool) -> None:
    """What is done to a model before enable, or after calls of this kind were compared, has the effect that it has on the stock
    model: on its output, and on all gradients."""
    (model, given), (plain, _) = (subject(name, torch.float64, [20, 20]) for _ in range(2))
    counts = counting(name, [20, 20]) if name != "toy" else None
    if not before:
        enable(model)
    for _ in range(2):
        output(model, given)
    for network in (model, plain):
        torch.manual_seed(3)
        change(network)
    enable(model)
    ours = results(model, given, counts)
    assert runs_the_operator(model, given) == is_ours
    assert_same(ours, results(plain, given, counts))
    assert change is not adapt or all(gradient.any() for path, gradient in ours.items() if ".up." in path)
    disable(model)
    assert_near("disabled", counted(output(model, given), counts), counted(output(plain, given), counts))


@pytest.mark.filterwarnings("error:triton_relattn")  # given if ours is tried
@pytest.mark.parametrize("name", ["t5", "umt5", "inkling", "mpnet"])
def test_a_mask_that_is_trained(name: str) -> None:
    """A trainable mask gets the same gradient as in the stock model."""
    model, given = subject(name, lengths=[LENGTH, LENGTH])
    given["attention_mask"] = torch.zeros(2, 1, LENGTH, LENGTH, requires_grad=True)
    gradients = []
    for change in (lambda _: True, enable):
        assert change(model)
        gradients += torch.autograd.grad(model(**given)[0].square().sum(), given["attention_mask"])
    assert_near("gradient", *gradients)
