"""Enabled models of libraries have equal outputs and gradients, in linear memory."""

from __future__ import annotations

import copy
import importlib
import io
import math
from typing import Any

import pytest
import torch

from tests.enable.models import (
    LENGTH,
    PADDED,
    WHOLE,
    Results,
    Sizes,
    assert_same,
    in_float64,
    operators_dropout,
    output,
    results,
    runs_the_operator,
    varied,
)
from tests.libraries.copies import states
from tests.libraries.models import HEADS, MEL, MODELS, Model, nemo
from tests.libraries.standins import is_installed
from tests.tolerance import assert_near
from triton_relattn import disable, enable


def parametrize_models(*models: Model) -> Any:
    """Parametrise by models; skipped if the library is not installed."""

    def case(model: Model) -> Any:
        missing = pytest.mark.skipif(
            not is_installed(model.package), reason=f"{model.distribution} is not installed: make test-libraries"
        )
        return pytest.param(model, id=model.name.replace(" ", "-"), marks=missing)

    return pytest.mark.parametrize("kind", [case(model) for model in models])


def named(*names: str) -> Any:
    return parametrize_models(*(model for model in MODELS if model.name in names))


all_models = parametrize_models(*MODELS)
# One of each library.
some_models = named("nemo", "speechbrain", "espnet", "cosyvoice", "x T5", "x inkling")
all_paddings = pytest.mark.parametrize("lengths", [WHOLE, PADDED], ids=["whole", "padded"])


def computed(model: Any, given: dict[str, Any]) -> Results:
    with in_float64():
        return results(model, given)


@all_paddings
@all_models
def test_the_same_in_float64(kind: Model, lengths: list[int]) -> None:
    model, given = kind.make(), kind.arguments(LENGTH, lengths)
    stock = computed(model, given)
    assert kind.integration.enable(model)
    assert runs_the_operator(model, given)
    ours = computed(model, given)
    assert_same(ours, stock)


@all_models
def test_disable_gives_everything_back(kind: Model) -> None:
    model, given = kind.make(torch.float32), kind.arguments(LENGTH, WHOLE, torch.float32)
    types = [type(module) for module in model.modules()]
    keys, stock = list(model.state_dict()), output(model, given)
    enabled = kind.integration.enable(model)
    changed = {
        name: type(module).__name__
        for (name, module), stock_type in zip(model.named_modules(), types, strict=True)
        if type(module) is not stock_type
    }
    assert changed == enabled and list(model.state_dict()) == keys
    assert kind.integration.enable(model) == {}
    assert_near("output", output(model, given), stock)
    assert kind.integration.disable(model) == enabled
    assert kind.integration.disable(model) == {}
    assert [type(module) for module in model.modules()] == types
    assert torch.equal(output(model, given), stock)


DROPOUT: dict[str, dict[str, Any]] = {
    "nemo": {"dropout_att": 0.2},
    "espnet": {"attention_dropout_rate": 0.2},
    "cosyvoice": {"attention_dropout_rate": 0.2},
    "x T5": {"attn_dropout": 0.2},
    "speechbrain": {"dropout": 0.2},
}


@named(*DROPOUT)
def test_dropout(kind: Model) -> None:
    """With the operator's dropout mask in stock attention, results are equal."""
    model, given = kind.make(**DROPOUT[kind.name]).train(), kind.arguments(LENGTH, PADDED)
    with in_float64(), operators_dropout(HEADS):
        stock = results(model, given)
    kind.integration.enable(model)  # outside in_float64, which replaces softmax: the integration would import that
    with in_float64():
        ours = results(model, given)
        assert (results(model, given, seed=5)["out"] - ours["out"]).abs().max() > 0.01, "nothing is dropped"
    assert_same(ours, stock)


@parametrize_models(*(model for model in MODELS if model.name != "cosyvoice chunks"))  # where the user's mask is quadratic
def test_nothing_quadratic(kind: Model) -> None:
    """No tensor has two dimensions of the sequence's length, and the largest one grows linearly."""
    found = {}
    for enabled, length in ((True, 600), (True, 1200), (False, 600)):
        model = kind.make(torch.float32)
        if enabled:
            kind.integration.enable(model, check_calls=False)  # no comparison with the stock forward
        given = kind.arguments(length, [length, length - 7], torch.float32)
        with Sizes() as found[enabled, length]:
            results(model, given)
        squares = found[enabled, length].squares(length - 7)
        assert bool(squares) != enabled, squares[:3]
    largest = [max(math.prod(shape) for shape in found[True, length].shapes) for length in (600, 1200)]
    assert largest[1] <= 2.01 * largest[0]


@some_models
def test_copies_and_pickles(kind: Model) -> None:
    """Copies and pickles of enabled models stay enabled, and are independent."""
    model = kind.make(torch.float32)
    given = kind.arguments(LENGTH, PADDED, torch.float32)
    kind.integration.enable(model)
    other = copy.deepcopy(model)
    kind.integration.disable(other)
    assert runs_the_operator(model, given) and not runs_the_operator(other, given)
    if kind.library != "x_transformers":  # its lambdas cannot be pickled
        file = io.BytesIO()
        torch.save(model, file)
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        assert torch.equal(output(loaded, given), output(model, given)) and runs_the_operator(loaded, given)


@some_models
def test_a_part(kind: Model) -> None:
    """A single attention can be enabled or disabled; it uses the masks of the rest of the model."""
    model, given = kind.make(), kind.arguments(LENGTH, PADDED)
    stock = computed(model, given)
    name = next(iter(reversed(kind.integration.enable(model))))
    kind.integration.disable(model)
    assert kind.integration.enable(model.get_submodule(name))
    ours = computed(model, given)
    assert_same(ours, stock)
    kind.integration.enable(model)
    kind.integration.disable(model.get_submodule(name))
    assert_same(computed(model, given), stock)


@all_models
def test_unknown_arguments_are_refused(kind: Model) -> None:
    """Enabled classes raise an error for unknown arguments, such as those of later versions."""
    model, given = kind.make(), kind.arguments(LENGTH, WHOLE)
    enabled = kind.integration.enable(model)
    calls: dict[Any, tuple[Any, Any]] = {}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, args, kwargs: calls.__setitem__(module, (args, kwargs)), with_kwargs=True
        )
        for name in enabled
    ]
    output(model, given)
    for hook in hooks:
        hook.remove()
    assert calls
    for module, (args, kwargs) in calls.items():
        with pytest.raises(TypeError, match="of_a_later_version"), torch.no_grad(), in_float64():
            module(*args, **kwargs, of_a_later_version=torch.ones(1))


def dense_flex(q: Any, k: Any, v: Any, block_mask: Any = None, score_mod: Any = None) -> Any:
    """FlexAttention with gradients on a CPU."""
    batch, head, i, j = torch.meshgrid(*map(torch.arange, (*q.shape[:3], k.shape[2])), indexing="ij")
    scores = score_mod(q @ k.mT / math.sqrt(q.shape[-1]), batch, head, i, j)
    return scores.masked_fill(~block_mask.mask_mod(batch, head, i, j), -math.inf).softmax(-1) @ v


@pytest.mark.skipif(not is_installed("nemo"), reason="not installed: make test-libraries")
@pytest.mark.parametrize("settings", [{}, {"attn_mode": "causal", "qk_norm": True, "qkv_bias": True}], ids=["full", "causal"])
def test_nemos_transformer_encoder(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are FlexAttention's, gradients those of its formula; and it trains on a CPU, which the stock encoder cannot."""
    nemo()
    stock = importlib.import_module("nemo.collections.asr.modules.transformer_encoder")
    sizes = {"feat_in": MEL, "d_model": 32, "n_heads": 2, "n_layers": 2, "drop_rate": 0.0, "subsampling": "stacking"}
    torch.manual_seed(0)
    model = varied(stock.TransformerEncoder(**sizes, subsampling_factor=2, **settings)).double().eval()
    given = {"audio_signal": states(2, MEL, 2 * LENGTH), "length": torch.tensor([2 * LENGTH, LENGTH])}
    with torch.no_grad():
        flex = model(**given)[0]
    with pytest.raises(NotImplementedError):
        model(**given)[0].sum().backward()
    with monkeypatch.context() as patch:
        patch.setattr(stock, "flex_attention", dense_flex)
        expected = computed(model, given)
    assert len(enable(model)) == 3
    ours = computed(model, given)
    assert_same(ours, expected)
    assert_near("FlexAttention", ours["out"], flex)
    optimizer = torch.optim.SGD(model.train().parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        loss = model(**given)[0].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[2] < losses[1] < losses[0]
    disable(model)
