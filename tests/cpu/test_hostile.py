"""Modules and programs that enable must not be fooled by: modules that look like a kind and compute something else, from the
start, in a second module, later, or for some arguments; what only training, dropout, hooks or copies show.

What enable replaces computes what the stock forward does, in the first call already; where it does not, a warning says so and the
module is stock.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.cpu import stock
from tests.cpu.models import LENGTH, Sizes, build, counted, output, real
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


class Times(stock.ShawAttention):
    """The result times a factor that is kept somewhere."""

    def __init__(self, keep: Callable[[Any, float], None], read: Callable[[Any], Any], factor: float) -> None:
        super().__init__()
        keep(self, factor)
        self.read = read

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x, mask) * self.read(self)


@dataclasses.dataclass(slots=True)
class Slotted:
    factor: float


def keyword_default(factor: float) -> Any:
    def function(*, by: float = factor) -> float:
        return by

    return function


def kept(make: Callable[[float], Any]) -> Callable[[Any, float], None]:
    return lambda module, factor: setattr(module, "kept", make(factor))


PLACES: dict[str, tuple[Callable[[Any, float], None], Callable[[Any], Any]]] = {
    "an array": (kept(lambda factor: np.array([factor])), lambda module: float(module.kept[0])),
    "a dataclass with slots": (kept(Slotted), lambda module: module.kept.factor),
    "a keyword's default": (kept(keyword_default), lambda module: module.kept()),
    "a tensor in a dictionary": (kept(lambda factor: {"by": torch.tensor(factor)}), lambda module: module.kept["by"]),
    "a projection's attribute": (
        lambda module, factor: setattr(module.wq, "gain", factor),
        lambda module: module.wq.gain,
    ),
    "a buffer or None": (
        lambda module, factor: module.register_buffer("kept", None if factor == 1 else torch.tensor(factor)),
        lambda module: 1.0 if module.kept is None else module.kept,
    ),
    "a flag in a buffer of numbers": (
        lambda module, factor: module.register_buffer("kept", torch.tensor([factor > 1]).float()),
        lambda module: 3.0 if module.kept.item() > 0.5 else 1.0,
    ),
}


def computed(module: nn.Module, *given: Any) -> torch.Tensor:
    with torch.no_grad():
        return module(*given)  # type: ignore[no-any-return]


def assert_right(module: nn.Module, *given: Any, is_ours: bool | None = None) -> None:
    """A module computes what its stock class does; is_ours: whether by the operator."""
    plain = copy.deepcopy(module)
    disable(plain)
    with Sizes() as seen:
        found = computed(module, *given)
    assert_near("out", found, computed(plain, *given))
    assert is_ours is None or seen.ours == is_ours


@pytest.mark.parametrize("place", ["a dataclass with slots", "a keyword's default", "a buffer or None"])
def test_two_modules_of_a_class(place: str) -> None:
    """Each is compared itself: the first one is replaced, the second one is not."""
    first, second = (Times(*PLACES[place], factor) for factor in (1.0, 3.0))
    with pytest.warns(UserWarning, match="enable left 1 of 2"):
        report = enable(nn.ModuleList([first, second]))
    assert set(report) == {"0"} and "differs by" in report.left["1"]
    assert_right(first, torch.randn(*LONG), is_ours=True)
    assert_right(second, torch.randn(*LONG), is_ours=False)


@pytest.mark.parametrize(("place", "calls"), [*((place, 3) for place in PLACES), ("an array", 0)])
def test_a_module_that_changes_later(place: str, calls: int) -> None:
    keep, read = PLACES[place]
    module, x = Times(keep, read, 1.0), torch.randn(*LONG)
    assert enable(module)
    for _ in range(calls):
        assert_right(module, x, is_ours=True)
    keep(module, 3.0)
    with pytest.warns(UserWarning, match="Times differs from the stock forward"):
        assert_right(module, x)
    assert type(module) is Times
    with pytest.raises(RuntimeError, match="differs by"):
        enable(module)


def test_a_buffer_that_is_written_is_noticed_at_once() -> None:
    module, x = Times(*PLACES["a flag in a buffer of numbers"], 1.0), torch.randn(*LONG)
    enable(module)
    for _ in range(6):
        computed(module, x)
    module.kept.fill_(1.0)  # type: ignore[union-attr,operator]
    with pytest.warns(UserWarning, match="differs from the stock forward"):
        assert_right(module, x)


class Window(stock.ShawAttention):
    """Keys that are far away are hidden, in sequences that are longer than those that are compared."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        out = super().forward(x, mask)
        return out if x.shape[1] <= 150 else out + super().forward(x[:, :150], None).mean(1, keepdim=True)


class Segments(stock.ShawAttention):
    """A mask that is 0 of padding, and the number of a segment elsewhere: only the first one is seen."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x, None if mask is None else mask == 1)


@pytest.mark.parametrize(("make", "masks"), [(Window, ()), (Segments, (torch.randint(0, 3, LONG[:2]),))])
def test_a_rule_that_only_calls_show(make: Callable[[], Any], masks: tuple[Any, ...]) -> None:
    module = make()
    assert enable(module)
    with pytest.warns(UserWarning, match="differs from the stock forward"):
        assert_right(module, torch.randn(*LONG), *masks)


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


@pytest.mark.parametrize("make", [CausalByNumbers, DropsScores, WeakGradient])
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


class Remembering(stock.ShawAttention):
    """Its forward keeps states for its next call."""

    past: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        past, self.past = self.past, x.mean(1, keepdim=True)
        return super().forward(x if past is None else x + past[: len(x)], mask)


class InAList(stock.ShawAttention):
    """The same in a private list that it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self._past: list[float] = []

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        self._past.append(1.0)
        return super().forward(x, mask) * len(self._past)


class Steps(stock.ShawAttention):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if self.training:
            self.steps += 1  # type: ignore[assignment,operator]
        return super().forward(x, mask)


class Noisy(stock.ShawAttention):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        out = super().forward(x, mask)
        return out + torch.randn_like(out) if self.training else out


@pytest.mark.parametrize("make", [Remembering, InAList, Steps, Noisy], ids=lambda each: each.__name__)
def test_forwards_that_depend_on_calls_before(make: Callable[[], Any]) -> None:
    module = make()
    assert "on which what it computes next may depend" in stock.refusal(module)
    assert not vars(module).get("past") and not vars(module).get("_past")


class Unknown(nn.Module):
    out_features = 4

    @property
    def in_features(self) -> int:
        raise RuntimeError("not known before the first batch")


class Locked(stock.ShawAttention):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Raising(stock.ShawAttention):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        raise KeyError("of the user")


@pytest.mark.parametrize("make", [Unknown, Locked, Raising], ids=lambda each: each.__name__)
def test_modules_that_raise(make: Callable[[], nn.Module]) -> None:
    """They stay as they are, and the others are enabled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = enable(nn.ModuleList([stock.ShawAttention(), make()]))
    assert report["0"] == "ShawAttention"
    assert make is not Raising or "KeyError" in report.left["1"]


def test_threads_enable_different_models() -> None:
    """The default dtype, the random state and the filters of warnings stay as they are."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(1)
        models = [type(f"OfThread{number}", (stock.ShawAttention,), {})() for number in range(4)]
        state, filters = torch.get_rng_state(), warnings.filters[:]
        threads = [threading.Thread(target=enable, args=(each,)) for each in models]
        for each in threads:
            each.start()
        dtypes = set()
        while any(each.is_alive() for each in threads):
            dtypes.add(torch.zeros(1).dtype)
        for each in threads:
            each.join()
        assert dtypes <= {torch.float64} and torch.get_default_dtype() == torch.float64
        assert torch.equal(state, torch.get_rng_state()) and warnings.filters[:] == filters
    finally:
        torch.set_default_dtype(torch.float32)


REGISTRY: dict[str, type] = {}


class Registered(stock.ShawAttention):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        REGISTRY[cls.__name__] = cls


class InRegistry(Registered):
    pass


def test_a_registry_of_classes() -> None:
    """It does not get ours in place of the stock class."""
    assert enable(InRegistry()) and REGISTRY["InRegistry"] is InRegistry


def replica(model: Any) -> Any:
    return model._replicate_for_data_parallel()


def adapted(model: Any) -> Any:
    model.wq = stock.Adapter(model.wq)
    return model


def with_attribute(model: Any) -> Any:
    model.flops = 0
    return model


def with_buffer(model: Any) -> Any:
    model.register_buffer("total_ops", torch.zeros(1))
    return model


@pytest.mark.parametrize("change", [replica, adapted, with_attribute, with_buffer, copy.deepcopy], ids=lambda each: each.__name__)
def test_changes_that_change_nothing(change: Callable[[Any], Any]) -> None:
    """What profilers, DataParallel and adapters leave on a module: ours runs, and nothing is said."""
    module, x = stock.ShawAttention().eval(), torch.randn(*LONG)
    enable(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        changed = change(module)
        with Sizes() as seen:
            found = computed(changed, x)
    assert seen.ours and type(changed) is not stock.ShawAttention
    plain = copy.deepcopy(module)
    disable(plain)
    assert_near("out", found, computed(plain, x))


def test_what_is_not_compared_is_counted() -> None:
    module, x = stock.ShawAttention().eval(), torch.randn(*LONG)
    report = enable(module)
    computed(module, x)
    hook = module.wq.register_forward_hook(lambda *_: None)
    computed(module, x)  # the second one
    hook.remove()
    assert report.calls().compared == 1 and dict(report.calls().not_compared) == {"its parts have hooks": 1}
    assert "calls compared with the stock forward: 1" in str(report) and "not compared: 1, its parts have hooks" in str(report)
    other = stock.ShawAttention().eval()
    report = enable(other, check_calls=False)
    computed(other, x)
    assert report.calls().compared == 0


def test_exports_and_traces_as_the_stock_model() -> None:
    module = stock.ShawAttention().eval()
    enable(module)
    length = torch.export.Dim("n", min=100, max=3000)
    program = torch.export.export(module, (torch.randn(1, 600, 32),), dynamic_shapes=({1: length},), strict=False)
    assert "triton_relattn" not in str(program.graph)
    traced = torch.jit.trace(module, torch.randn(1, 600, 32))
    x = torch.randn(1, 700, 32)
    for each in (program.module(), traced):
        assert_near("out", each(x), computed(module, x))


def test_a_mask_that_shows_the_future() -> None:
    """The Music Transformer's skew leaves other rows' terms there: such a call is the stock class's."""
    module, x = stock.MusicAttention().eval(), torch.randn(4, 257, 32)
    enable(module)
    causal = torch.ones(257, 257).triu(1)
    assert_right(module, x, x, x, causal, is_ours=True)
    causal[3, 200] = 0
    for mask in (causal, None):
        assert_right(module, x, x, x, mask, is_ours=False)


# Library classes.


@pytest.mark.parametrize("name", ["deberta_v2", "fastspeech2_conformer"])
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


@pytest.mark.parametrize("name", ["bloom", "longt5"])
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
