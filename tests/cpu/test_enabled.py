"""Models that are enabled: which calls are the stock forward's, and what goes on working, as saving, offloading and adapters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.tolerance import assert_near

pytest.importorskip("transformers")

from tests.cpu import stock
from tests.cpu.models import PADDED, arguments, build, counted, counting, output, real, results, runs_the_operator, subject
from tests.cpu.stock import enable
from tests.cpu.whole_models import WHOLE_MODELS, images, vision_encoder, without_vision
from triton_relattn import disable
from triton_relattn.integrations import in_place


def configs(model: nn.Module) -> list[Any]:
    return [part.config for part in model.modules() if hasattr(part, "config")]


def test_short_calls_are_the_stock_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, short calls run the stock forward, bit for bit, and long calls run ours."""
    monkeypatch.setattr(in_place.InPlace, "fewest", in_place.FEWEST)
    for name in ("t5", "wavlm", "inkling", "deberta_v2", "parakeet"):
        model, given = subject(name)
        expected = output(model, given)
        report = enable(model)
        assert torch.equal(output(model, given), expected) and not runs_the_operator(model, given)
        assert not report.calls().compared
    model = build("vits")
    given = arguments("vits", model, [600, 600], 600)
    enable(model)
    assert runs_the_operator(model, given)


def test_weights_that_are_asked_for() -> None:
    """Calls that ask for attention weights run the stock forward."""
    vits, vitdet, inkling = build("vits"), vision_encoder("vitdet"), build("inkling")
    for model, given in ((vits, arguments("vits", vits, PADDED)), (vitdet, images("vitdet"))):
        with torch.no_grad():
            stock = model(**given, output_attentions=True).attentions
            enable(model)
            assert all(torch.equal(*pair) for pair in zip(model(**given, output_attentions=True).attentions, stock, strict=True))
        assert runs_the_operator(model, given)
    given = arguments("inkling", inkling, PADDED)
    inkling.config.output_attentions = True
    enable(inkling)
    with torch.no_grad():
        assert len(inkling(**given).attentions) == 2
    inkling.config.output_attentions = False
    assert runs_the_operator(inkling, {**given, "output_hidden_states": True})


OTHERS = [*((name, "cu_seq_lens_q") for name in ("t5", "mpt", "wav2vec2_bert", "parakeet"))]
OTHERS += [
    ("t5", name) for name in ("max_length_q", "block_table", "head_mask", "softcap", "s_aux", "sliding_window", "a_later_one")
]


@pytest.mark.parametrize(("name", "argument"), OTHERS)
def test_arguments_that_ours_has_not(name: str, argument: str) -> None:
    """With arguments for packed batches, for another softmax, or of a later version, the call runs the stock forward."""
    model = build(name)
    path = next(path for path, part in model.named_modules() if "Attention" in type(part).__name__)
    attention, states = model.get_submodule(path), torch.randn(1, 3, 32)
    given: dict[str, Any] = {argument: torch.tensor([0, 3])}
    given |= {"position_embeddings": torch.randn(1, 5, 32)} if name == "parakeet" else {}
    given |= {"position_bias": None} if name == "mpt" else {}

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


def test_causality_that_is_asked_for() -> None:
    """is_causal=True on an encoder's attention runs the stock forward."""
    model = build("t5")
    encoder, decoder = (part.block[0].layer[0].SelfAttention for part in (model.encoder, model.decoder))
    states = torch.randn(1, 4, 32)
    stock = [attention(states, is_causal=True)[0] for attention in (encoder, decoder)]
    enable(model)
    assert torch.equal(encoder(states, is_causal=True)[0], stock[0])
    assert_near("decoder", decoder(states, is_causal=True)[0], stock[1])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("nemotron_asr_streaming", {"sliding_window": 0}),  # no limit on the past
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
        assert any("layers.2" in path for path in dict(model.named_parameters()).keys() - results(model, given).keys()) == bool(
            rate
        )

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


@pytest.mark.parametrize("name", ["wav2vec2_bert", "t5"])
def test_an_implementation_that_is_changed_later(name: str) -> None:
    """set_attn_implementation undoes enable where ours is such an implementation."""
    model, given = subject(name)
    expected = output(model, given)
    enable(model)
    assert runs_the_operator(model, given)
    model.set_attn_implementation("eager")
    assert torch.equal(output(model, given), expected) and disable(model) == {}
    enable(model)
    disable(model)
    assert model.config._attn_implementation == "eager" and torch.equal(output(model, given), expected)


@pytest.mark.parametrize("name", ["t5", "longt5", "wavlm"])
def test_tables_that_are_offloaded(name: str) -> None:
    """A table's weight may be on another device until its module is called, as with accelerate's offloading."""
    model, given = subject(name)
    enable(model)
    expected = output(model, given)
    tables = [part for path, part in model.named_modules() if path.endswith(("relative_attention_bias", "rel_attn_embed"))]
    assert tables

    def offload(table: Any) -> None:
        forward, weight = table.forward, table.weight

        def loaded(*args: Any) -> torch.Tensor:
            table.weight = weight
            try:
                result: torch.Tensor = forward(*args)
                return result
            finally:
                table.weight = nn.Parameter(weight.detach().to("meta"))

        table.forward, table.weight = loaded, nn.Parameter(weight.detach().to("meta"))

    for table in tables:
        offload(table)
    assert torch.equal(output(model, given), expected)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", ["t5", "wav2vec2_bert", "toy"])
def test_adapters(name: str, before: bool) -> None:
    """Low-rank adapters on projections take effect and are trained, whether added before or after enable."""
    model, given = subject(name)

    def adapt() -> None:
        for path, module in list(model.named_modules()):
            if path.endswith((".q", ".linear_q", ".wq", ".v", ".linear_v", ".wv")):
                model.get_submodule(path.rpartition(".")[0]).register_module(path.rpartition(".")[2], stock.Adapter(module))

    torch.manual_seed(3)
    if before:
        adapt()
    enable(model)
    if not before:
        adapt()
    assert runs_the_operator(model, given)
    ours = results(model, given)
    learned = [gradient for path, gradient in ours.items() if ".up." in path]
    assert learned and all(gradient.any() for gradient in learned)
    disable(model)
    counts = counting(name, PADDED) if name != "toy" else None
    assert_near("ours", counted(ours["out"], counts), counted(output(model, given), counts))
