"""Modules and programs that enable must not be fooled by: what only training, masks, dropout, hooks or copies show."""

from __future__ import annotations

import copy
import io
import pickle
import types
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.cpu import stock
from tests.cpu.models import LENGTH, build, counted, output, real
from tests.cpu.models import arguments as arguments_of
from tests.tolerance import assert_near
from triton_relattn import disable, enable

LONG = (4, 257, 32)
"""Two heads give it 2**19 scores: the operator computes it."""


class Plain(stock.ShawAttention):
    """The same in steps that a subclass changes, with dropout of the weights."""

    p = 0.0

    def scores(self, scores: torch.Tensor) -> torch.Tensor:
        return scores

    def dropped(self, weights: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(weights, self.p, self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        q, k, v = (stock.heads_of(each(x), self.heads) for each in (self.wq, self.wk, self.wv))
        place = torch.arange(x.shape[1])
        row = (place[:, None] - place).clamp(-self.furthest, self.furthest) + self.furthest
        term = torch.einsum("bhid,ijd->bhij", q, self.distances(row))
        weights = self.dropped(self.scores(q.shape[-1] ** -0.5 * (q @ k.mT + term)).softmax(-1))
        return self.wo((weights @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class CausalByNumbers(Plain):
    """A buffer of ones and zeros, in float32, of which the zeros hide keys."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(300, 300).tril())

    def scores(self, scores: torch.Tensor) -> torch.Tensor:
        length = scores.shape[-1]
        return scores.masked_fill(self.seen[:length, :length] == 0, -torch.inf)


class DropsScores(Plain):
    """Dropout of what softmax takes, not of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def scores(self, scores: torch.Tensor) -> torch.Tensor:
        return self.drop(scores)  # type: ignore[no-any-return]


class WeakGradient(Plain):
    """Gradients that are another's in training alone."""

    def dropped(self, weights: torch.Tensor) -> torch.Tensor:
        return weights.detach() + 0.1 * (weights - weights.detach()) if self.training else weights


class Counts(Plain):
    """A number of calls, kept under a name that begins with an underscore."""

    _calls = 0

    def scores(self, scores: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        return scores if self._calls < 100 else -scores


@pytest.mark.parametrize("make", [CausalByNumbers, DropsScores, WeakGradient, Counts])
def test_what_looks_alike_is_refused(make: type[nn.Module]) -> None:
    assert stock.refusal(make())


def test_a_probability_that_is_set_later() -> None:
    """Results without dropout are the same: the probabilities are also compared."""
    module = Plain().train()
    assert enable(module)
    module(torch.randn(*LONG))
    module.p = 0.5
    with pytest.warns(UserWarning, match=r"drops weights with p = \{0.5\}, ours with p = 0"):
        module(torch.randn(*LONG))
    assert type(module) is Plain


def test_a_function_bound_to_the_module_itself() -> None:
    """It has the module's own weights, so that nothing can be computed in float64; the results are compared all the same."""
    module = Plain()
    assert enable(module)

    def scores(self: Any, scores: torch.Tensor) -> torch.Tensor:
        return scores + self.wq(torch.ones(1, 32)).sum()[None, None] * torch.arange(scores.shape[-1])

    module.scores = types.MethodType(scores, module)  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="differs from the stock forward"):
        module(torch.randn(*LONG))
    assert type(module) is Plain


def test_a_setting_called_attn() -> None:
    """Stock classes keep weights under this name; what is no tensor stays."""
    module: Any = Plain()
    module.attn = "relative"
    enable(module)
    module(torch.randn(*LONG))
    assert module.attn == "relative"


def test_an_empty_batch() -> None:
    module = Plain()
    enable(module)
    assert module(torch.randn(0, 20, 32)).shape == (0, 20, 32)


def test_warnings_that_are_errors() -> None:
    """enable raises before it has changed anything."""
    model = nn.ModuleList([Plain(), stock.WindowAttention()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="enable left 1 of 2"):
            enable(model)
    assert type(model[0]) is Plain


def test_a_report_is_pickled() -> None:
    module = Plain()
    report = enable(module)
    assert dict(pickle.loads(pickle.dumps(report))) == dict(report)


# Library classes.


@pytest.mark.parametrize("name", ["mpnet", "deberta_v2", "bloom", "fastspeech2_conformer"])
def test_hooks_on_the_dropout_of_the_weights(name: str) -> None:
    """Ours computes no weights: such a call is the stock forward's."""
    model, given = build(name), None
    given = arguments_of(name, model, [20, 20])
    enabled = copy.deepcopy(model)
    enable(enabled)
    for each in (model, enabled):
        for part in each.modules():
            if "ropout" in type(part).__name__:
                part.register_forward_hook(lambda _, __, result: 0 * result)
    assert_near("output", output(enabled, given), output(model, given))


@pytest.mark.parametrize("name", ["bloom", "mpt", "longt5", "deberta"])
def test_stock_forwards_that_cast_to_float32(name: str) -> None:
    """In float64 the stock forward is off by float32's rounding: ours, which is not, is no other."""
    model = build(name).double()
    given = arguments_of(name, model, [20, 13])
    report = enable(model)
    with torch.no_grad():
        model(**given)
    assert report.calls().compared > 0 and not report.calls().differing


@pytest.mark.parametrize("name", ["wav2vec2_bert", "t5"])
@pytest.mark.parametrize("through", ["a copy", "a file"])
def test_one_layer_of_a_copy_is_stock(name: str, through: str) -> None:
    """Compiled, where stock layers cannot read what enabled ones pass on."""
    model = build(name)
    given = arguments_of(name, model, [20, 13])
    stock_output = output(model, given)
    enabled = [path for path, kind in enable(model).items() if "Attention" in kind]
    if through == "a copy":
        again = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    disable(again.get_submodule(enabled[-1]))
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(again, backend="eager")(**given)[0]  # type: ignore[operator]
    shown = real([20, 13]) if found.shape[1] == LENGTH else None
    assert_near("output", counted(found, shown), counted(stock_output, shown))


def test_a_position_bias_that_is_written_to() -> None:
    """A hook that adds to what T5's first layer passes on: the others read what it has written."""
    model = build("t5")
    given = arguments_of("t5", model, [20, 20])
    enabled = copy.deepcopy(model)
    enable(enabled)

    def add(_: Any, __: Any, result: Any) -> None:
        bias = next(each for each in result[1:] if isinstance(each, torch.Tensor) and each.dim() > 1)
        with torch.no_grad():
            bias[..., 3] += 5

    for _ in range(2):  # so that the next call is not compared
        output(enabled, given)
    for each in (model, enabled):
        next(part for path, part in each.named_modules() if path.endswith("SelfAttention")).register_forward_hook(add)
    assert_near("output", output(enabled, given), output(model, given))


def test_backward_hooks_on_what_is_passed_on() -> None:
    model = build("t5")
    for path, part in model.named_modules():
        if path.endswith("SelfAttention"):
            part.register_full_backward_hook(lambda *_: None)
    enable(model)
    given = arguments_of("t5", model, [20, 13])
    model(**given)[0].sum().backward()
    assert all(each.grad is not None for path, each in model.named_parameters() if "relative_attention_bias" in path)


def test_a_class_derived_from_an_enabled_one() -> None:
    """As torch.nn.utils.parametrize and FSDP2 make it."""
    model = build("parakeet")
    given = arguments_of("parakeet", model, [20, 13])
    expected = output(model, given)
    enable(model)
    attention = model.layers[0].self_attn  # type: ignore[index, union-attr]
    parametrize.register_parametrization(attention, "bias_u", nn.Identity())
    model.train().eval()
    assert_near("output", output(model, given), expected)
    disable(model)
    assert_near("output", output(model, given), expected)


@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_a_mask_that_is_trained(name: str) -> None:
    """Its gradient is the stock model's."""
    model = build(name)
    given = arguments_of(name, model, [LENGTH, LENGTH])
    given.pop("attention_mask", None)
    mask = torch.zeros(2, 1, LENGTH, LENGTH, requires_grad=True)
    gradients = []
    for is_enabled in (False, True):
        if is_enabled:
            assert enable(model)
        out = model(**given, attention_mask=mask)[0]
        gradients.append(torch.autograd.grad(out.square().sum(), mask)[0])
    assert_near("gradient", *gradients)
