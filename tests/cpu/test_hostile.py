"""Modules and programs that enable must not be fooled by: a second module of a class, modules that change later, calls that show
another rule, and what only training, dropout, hooks, threads or copies show.

What enable replaces computes what the stock forward does, in the first call already; where it does not, a warning says so and the
module is stock.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
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

import triton_relattn
from tests.conftest import forget_warnings
from tests.cpu import stock
from tests.cpu.models import LENGTH, Sizes, arguments, assert_as_stock, build, counted, output, real
from tests.cpu.stock import Altered, JointMusicAttention, MusicAttention, ShawAttention, StepByStep, enable
from tests.tolerance import assert_at_most, assert_near
from triton_relattn import disable
from triton_relattn.integrations import calls
from triton_relattn.integrations.transformers import door

LONG = (4, 257, 32)
"""With two heads it has 2**19 scores, enough for the operator."""


@dataclasses.dataclass(slots=True)
class Slotted:
    factor: float


def keyword_default(factor: float) -> Any:
    def function(*, by: float = factor) -> float:
        return by

    return function


def as_attribute(make: Callable[[float], Any]) -> Callable[[Any, float], None]:
    return lambda module, factor: setattr(module, "factor", make(factor))


PLACES: dict[str, tuple[Callable[[Any, float], None], Callable[[Any], Any]]] = {
    "an array": (as_attribute(lambda factor: np.array([factor])), lambda module: float(module.factor[0])),
    "a dataclass with slots": (as_attribute(Slotted), lambda module: module.factor.factor),
    "a keyword's default": (as_attribute(keyword_default), lambda module: module.factor()),
    "a tensor in a dictionary": (as_attribute(lambda factor: {"by": torch.tensor(factor)}), lambda module: module.factor["by"]),
    "a projection's attribute": (
        lambda module, factor: setattr(module.wq, "gain", factor),
        lambda module: module.wq.gain,
    ),
    "a buffer or None": (
        lambda module, factor: module.register_buffer("factor", None if factor == 1 else torch.tensor(factor)),
        lambda module: 1.0 if module.factor is None else module.factor,
    ),
    "a flag in a buffer of numbers": (
        lambda module, factor: module.register_buffer("factor", torch.tensor([factor > 1]).float()),
        lambda module: 3.0 if module.factor.item() > 0.5 else 1.0,
    ),
}
"""Places where a module may store a factor for its result: how it is set, and how the forward reads it."""


def scaled(place: str, factor: float) -> Any:
    """Shaw's attention with its result multiplied by a factor."""
    write, read = PLACES[place]
    module = Altered(lambda module, out, *_: out * read(module))
    write(module, factor)
    return module


def assert_noticed(module: nn.Module, *given: Any) -> None:
    """The call runs the stock forward, a warning says why, and the module has its stock class again."""
    with pytest.warns(UserWarning, match="differs from the stock forward in this call and uses its stock class again"):
        assert_as_stock(module, *given)
    assert disable(module) == {}


@pytest.mark.parametrize("place", ["a dataclass with slots", "a keyword's default", "a buffer or None"])
def test_two_modules_of_a_class(place: str) -> None:
    """Two modules of one class are compared separately: the first is replaced, the second is not."""
    first, second = scaled(place, 1.0), scaled(place, 3.0)
    with pytest.warns(UserWarning, match="enable left 1 of 2"):
        report = enable(nn.ModuleList([first, second]))
    assert set(report) == {"0"} and "differs by" in report.left["1"]
    assert_as_stock(first, torch.randn(*LONG), is_ours=True)
    assert_as_stock(second, torch.randn(*LONG), is_ours=False)


@pytest.mark.parametrize(("place", "calls"), [*((place, 3) for place in PLACES), ("an array", 0)])
def test_a_module_that_changes_later(place: str, calls: int) -> None:
    module, x = scaled(place, 1.0), torch.randn(*LONG)
    assert enable(module)
    for _ in range(calls):
        assert_as_stock(module, x, is_ours=True)
    PLACES[place][0](module, 3.0)
    assert_noticed(module, x)
    with pytest.raises(RuntimeError, match="differs by"):
        enable(module)


@pytest.mark.parametrize("place", ["an array", "a flag in a buffer of numbers"])
def test_a_change_is_noticed_at_once(place: str) -> None:
    """An attribute that is set or a buffer that is written after six calls is noticed, although the next comparison is in the
    eighth."""
    module, x = scaled(place, 1.0), torch.randn(*LONG)
    enable(module)
    for _ in range(6):
        with torch.no_grad():
            module(x)  # calls of one kind: with gradients, or with x by its name, is another
    if place == "an array":
        module.factor = np.array([3.0])
    else:
        module.factor.fill_(1.0)
    assert_noticed(module, x)


class Limited(ShawAttention):
    """A class attribute that has no effect at first."""

    factor = 1.0

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.factor * super().forward(x, mask)


def test_classes_and_functions_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes to a class attribute, a replaced forward, and a changed module-level function."""
    x = torch.randn(*LONG)
    for owner, name, value in (
        (Limited, "factor", 2.0),
        (Limited, "forward", lambda self, x, mask=None: 2 * ShawAttention.forward(self, x, mask)),
        (stock, "split_heads", lambda states, heads: states.unflatten(2, (heads, -1)).transpose(1, 2).flip(1)),
    ):
        module = Limited().eval()
        enable(module)
        with monkeypatch.context() as patch, pytest.warns(UserWarning, match="differs from the stock forward"):
            patch.setattr(owner, name, value)
            module(x)
        assert type(module) is Limited


def window(module: Any, out: Any, x: torch.Tensor, _: Any) -> Any:
    """A different rule for sequences longer than those that are compared."""
    return out if x.shape[1] <= 150 else out + ShawAttention.forward(module, x[:, :150]).mean(1, keepdim=True)


class Segments(ShawAttention):
    """A mask with 0 at padding and segment numbers elsewhere; only segment 1 is visible."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x, None if mask is None else mask == 1)


@pytest.mark.parametrize(("make", "masks"), [(lambda: Altered(window), ()), (Segments, (torch.randint(0, 3, LONG[:2]),))])
def test_a_rule_that_only_calls_show(make: Callable[[], Any], masks: tuple[Any, ...]) -> None:
    module = make()
    assert enable(module)
    assert_noticed(module, torch.randn(*LONG), *masks)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize(
    "shape", [LONG, *(pytest.param(shape, marks=pytest.mark.thorough) for shape in ((1, 1030, 32), (33, 129, 32)))], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_two_percent_more(training: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A rule that begins later and changes 2 % is noticed in each mode, size and dtype (in bfloat16 6 %: 2 % may be rounding)."""
    factor = 1 + max(0.02, 8 * torch.finfo(dtype).eps)
    module: Any = (
        Altered(lambda module, out, *_: factor * out if getattr(module, "late", False) else out).to(dtype).train(training)
    )
    enable(module)
    x = torch.randn(shape, dtype=dtype)
    module(x)
    module.late = True
    assert_noticed(module, x)


def test_masks_one_diagonal_off() -> None:
    """A mask that hides the future from the next key on is causal; one that begins a diagonal later is not."""
    x = torch.randn(8, 128, 32)
    for diagonal in (1, 2, 3):
        module = stock.MusicAttention().eval()
        enable(module, check_calls=False)
        assert_as_stock(module, x, x, x, torch.ones(128, 128).triu(diagonal), is_ours=diagonal == 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{}, {"check_calls": False}], ids=str)
def test_positions_of_another_dtype(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """A stock forward that casts its positions, as GigaAM's: ours runs, without a warning."""
    module = stock.ConformerAttention(casts=True).to(dtype).eval()
    x, positions = torch.randn(4, 257, 32, dtype=dtype), torch.randn(1, 513, 32)
    given = x, x, x, positions, None
    expected = nn.Module.__call__(module, *given)
    enable(module, **options)
    with warnings.catch_warnings(), Sizes() as sizes:
        warnings.simplefilter("error")
        out = module(*given)
    assert sizes.ours and out.dtype == dtype
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps if dtype == torch.float64 else torch.finfo(dtype).eps
    assert_at_most("out", (out - expected).abs().max(), 16 * max(eps, 2.0**-40) * float(expected.abs().max()))


@pytest.mark.parametrize("options", [{}, {"check_calls": False}], ids=str)
def test_what_raises_in_ours_alone(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is the stock forward's; one warning names the exception, and says nothing of other calls' results."""
    forget_warnings()
    module: Any = ShawAttention().eval()
    x = torch.randn(*LONG)
    expected = output(module, {"x": x})
    enable(module, **options)

    def fails(*_: Any, **__: Any) -> Any:
        raise IndexError("planted")

    replacement = type(module)._triton_relattn
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(replacement, "function", fails)
        for _ in range(3):
            assert torch.equal(output(module, {"x": x}), expected)
        with pytest.raises(RuntimeError):  # the stock forward's own error
            module(torch.randn(4, 257, 31))
    (text,) = {str(warning.message) for warning in caught if "triton_relattn" in str(warning.message)}
    assert "IndexError: planted" in text and "wrong" not in text
    assert_as_stock(module, x, is_ours=True)


STEPS = {
    "compare": "enable",
    "count_bytes": "enable",
    "enabled_class": "enable",
    "Report": "enable",
    "change_classes": "enable",
    "Calls": "enabled",
    "link_encoder": "enabled",
}
"""What enable calls, one after the other, and the file that calls it."""


class Interrupted(BaseException):
    """As KeyboardInterrupt."""


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_an_exception_at_any_step(step: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """enable is interrupted when a step is reached for the first or the second time: the model stays as it was."""
    model = build("t5")
    given = arguments("t5", model, [20, 13])
    expected, before = output(model, given), [(type(part), dict(vars(part))) for part in model.modules()]
    owner: Any = importlib.import_module(f"triton_relattn.integrations.{STEPS[step]}")
    reached, called = getattr(owner, step), 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal called
        called += 1
        if called == number:
            raise Interrupted
        return reached(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, interrupted)
        with contextlib.suppress(Interrupted):
            enable(model)
    if called >= number:  # some steps are reached once
        assert before == [(type(part), dict(vars(part))) for part in model.modules()] and disable(model) == {}
    else:
        disable(model)
    assert torch.equal(output(model, given), expected)


def test_a_probability_that_is_set_later() -> None:
    """Results without dropout stay equal, so dropout probabilities are compared as well."""
    module = StepByStep().train()
    assert enable(module)
    module(torch.randn(*LONG))
    module.p = 0.5
    with pytest.warns(UserWarning, match=r"drops weights with p = \{0.5\}, ours with p = 0"):
        module(torch.randn(*LONG))
    assert type(module) is StepByStep


def test_threads_enable_different_models() -> None:
    """Concurrent enable calls leave the default dtype, the random state and warning filters unchanged."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(1)
        models = [type(f"OfThread{number}", (ShawAttention,), {})() for number in range(4)]
        state, filters = torch.get_rng_state(), warnings.filters[:]
        threads = [threading.Thread(target=enable, args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        dtypes = set()
        while any(thread.is_alive() for thread in threads):
            dtypes.add(torch.zeros(1).dtype)
        for thread in threads:
            thread.join()
        assert dtypes <= {torch.float64} and torch.get_default_dtype() == torch.float64
        assert torch.equal(state, torch.get_rng_state()) and warnings.filters[:] == filters
    finally:
        torch.set_default_dtype(torch.float32)


REGISTRY: dict[str, type] = {}


class Registered(ShawAttention):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        REGISTRY[cls.__name__] = cls


class InRegistry(Registered):
    pass


def test_a_registry_of_classes() -> None:
    """A registry keeps the stock class and does not get ours."""
    assert enable(InRegistry()) and REGISTRY["InRegistry"] is InRegistry


def loaded(model: Any) -> Any:
    model.load_state_dict({name: value + 0.5 for name, value in model.state_dict().items()})
    return model.train().eval()


def adapted(model: Any) -> Any:
    model.wq = stock.Adapter(model.wq)
    return model


def profiled(model: Any) -> Any:
    model.flops = 0
    model.register_buffer("total_ops", torch.zeros(1))
    return model


@pytest.mark.parametrize("change", [loaded, adapted, profiled, copy.deepcopy])
def test_changes_that_change_nothing(change: Callable[[Any], Any]) -> None:
    """Attributes left on a module by profilers, checkpoints and adapters: ours still runs, without a warning."""
    module, x = ShawAttention().eval(), torch.randn(*LONG)
    enable(module)
    assert module(torch.randn(0, 20, 32)).shape == (0, 20, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        changed = change(module)
        with Sizes() as sizes:
            out = output(changed, {"x": x})
    assert sizes.ours and type(changed) is not ShawAttention
    plain = copy.deepcopy(module)
    disable(plain)
    assert_near("out", out, output(plain, {"x": x}))


@pytest.mark.parametrize("check_calls", [None, False])
def test_a_replica_of_dataparallel_is_not_compared(check_calls: bool | None) -> None:
    """Its calls are the stock forward's, which a warning says, or ours on the caller's word."""
    module, x = ShawAttention().eval(), torch.randn(*LONG)
    enable(module, check_calls=check_calls)
    forget_warnings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_as_stock(module._replicate_for_data_parallel(), x, is_ours=check_calls is False)
    assert bool([warning for warning in caught if "replica" in str(warning.message)]) == (check_calls is None)


def test_the_report_counts_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report counts compared calls, and other calls by reason; it can be saved to a file."""
    module, x = ShawAttention().eval(), torch.randn(*LONG)
    report = enable(module)
    output(module, {"x": x})
    with monkeypatch.context() as patch:
        patch.setattr(calls, "MOST_BYTES", 0)
        output(module, {"x": x})  # the second call
    reason = "the stock forward of a sequence needs more than 0 MiB"
    assert report.calls().compared == 1 and dict(report.calls().not_compared) == {reason: 1}
    assert "calls compared with the stock forward: 1" in str(report) and f"not compared: 1, {reason}" in str(report)
    again = pickle.loads(pickle.dumps(report))
    assert dict(again) == dict(report) and again.calls() == report.calls()
    other = ShawAttention().eval()
    report = enable(other, check_calls=False)
    output(other, {"x": x})
    assert report.calls().compared == 0


def test_exports_and_traces_as_the_stock_model() -> None:
    module = ShawAttention().eval()
    enable(module)
    module(torch.randn(*LONG))  # it is compared, so that graphs may be ours
    length = torch.export.Dim("n", min=100, max=3000)
    program = torch.export.export(module, (torch.randn(1, 600, 32),), dynamic_shapes=({1: length},), strict=False)
    assert "triton_relattn" not in str(program.graph)
    traced = torch.jit.trace(module, torch.randn(1, 600, 32))
    x = torch.randn(1, 700, 32)
    for graph in (program.module(), traced):
        assert_near("out", graph(x), output(module, {"x": x}))


# Library classes.


@pytest.mark.parametrize("name", ["deberta_v2", "fastspeech2_conformer"])
def test_hooks_on_the_dropout_of_the_weights(name: str) -> None:
    """Ours computes no attention weights, so a hook on their dropout makes the call run the stock forward."""
    model, given = build(name), None
    given = arguments(name, model, [20, 20])
    enabled = copy.deepcopy(model)
    enable(enabled)
    for network in (model, enabled):
        for part in network.modules():
            if "ropout" in type(part).__name__:
                part.register_forward_hook(lambda _, __, result: 0 * result)
    assert_near("output", output(enabled, given), output(model, given))


@pytest.mark.parametrize("name", ["mpt", "bloom", "falcon", "t5", "umt5", "deberta", "deberta_v2", "mpnet", "wav2vec2_bert"])
@pytest.mark.parametrize(
    "padding", ["left", *(pytest.param(padding, marks=pytest.mark.thorough) for padding in ("none", "right"))]
)
def test_a_fault_in_any_row(name: str, padding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row of a real token is compared, whatever a class's mask means; padding on either side is no fault."""
    model = build(name)
    given = arguments(name, model, [LENGTH, LENGTH if padding == "none" else 20])
    if padding == "left":
        given["attention_mask"] = given["attention_mask"].flip(1)
    report = enable(model, check_calls=True)
    output(model, given)
    assert report.calls().compared > 0 and not report.calls().differing
    replacements = (getattr(type(part), "_triton_relattn", None) for part in model.modules())
    replacement = next((found for found in replacements if found and not found.ours.passes_on), None)
    true = replacement.function if replacement else door.fused_relative_attention
    for row in (0, LENGTH // 2, LENGTH - 1):  # real in the first sequence
        again = copy.deepcopy(model)

        def faulty(*args: Any, row: int = row, **kwargs: Any) -> Any:
            result = true(*args, **kwargs)
            out, *more = result if isinstance(result, tuple) else (result,)
            out = out * torch.where(torch.arange(out.shape[-2]) == row, 1.5, 1.0)[:, None]
            return (out, *more) if isinstance(result, tuple) else out

        with monkeypatch.context() as patch, pytest.warns(UserWarning, match="differs from the stock forward"):
            owner, name = (replacement, "function") if replacement else (door, "fused_relative_attention")
            patch.setattr(owner, name, faulty)
            output(again, given)


@pytest.mark.parametrize("name", ["bloom", "longt5"])
def test_stock_forwards_that_cast_to_float32(name: str) -> None:
    """In float64 the stock forward has float32's rounding error; ours does not, and is not taken for a different computation."""
    model = build(name).double()
    given = arguments(name, model, [20, 13])
    report = enable(model, check_calls=True)
    with torch.no_grad():
        model(**given)
    assert report.calls().compared > 0 and not report.calls().differing


@pytest.mark.parametrize("name", ["parakeet", "mpnet", "t5"])
@pytest.mark.parametrize("through", ["a copy", "a file"])
def test_one_layer_of_a_copy_is_stock(name: str, through: str) -> None:
    """One layer of a copy is disabled and the copy compiled: its stock layer cannot read what enabled layers pass on."""
    model = build(name)
    given = arguments(name, model, [20, 13])
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
    """A hook modifies the bias that T5's first layer passes on; later layers read the modified values."""
    model = build("t5")
    given = arguments("t5", model, [20, 20])
    enabled = copy.deepcopy(model)
    enable(enabled)

    def add(_: Any, __: Any, result: Any) -> None:
        bias = next(tensor for tensor in result[1:] if isinstance(tensor, torch.Tensor) and tensor.dim() > 1)
        with torch.no_grad():
            bias[..., 3] += 5

    for _ in range(2):  # so that the next call is not compared
        output(enabled, given)
    for network in (model, enabled):
        next(part for path, part in network.named_modules() if path.endswith("SelfAttention")).register_forward_hook(add)
    assert_near("output", output(enabled, given), output(model, given))


def test_backward_hooks_on_what_is_passed_on() -> None:
    model = build("t5")
    for path, part in model.named_modules():
        if path.endswith("SelfAttention"):
            part.register_full_backward_hook(lambda *_: None)
    enable(model)
    given = arguments("t5", model, [20, 13])
    model(**given)[0].sum().backward()
    assert all(parameter.grad is not None for path, parameter in model.named_parameters() if "relative_attention_bias" in path)


def test_a_class_derived_from_an_enabled_one() -> None:
    """Subclasses created by torch.nn.utils.parametrize and FSDP2."""
    model = build("parakeet")
    given = arguments("parakeet", model, [20, 13])
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
    """A trainable mask gets the same gradient as in the stock model."""
    model = build(name)
    given = arguments(name, model, [LENGTH, LENGTH])
    given.pop("attention_mask", None)
    mask = torch.zeros(2, 1, LENGTH, LENGTH, requires_grad=True)
    gradients = []
    for is_enabled in (False, True):
        if is_enabled:
            assert enable(model)
        out = model(**given, attention_mask=mask)[0]
        gradients.append(torch.autograd.grad(out.square().sum(), mask)[0])
    assert_near("gradient", *gradients)


# What the word by_structure means, and what calls are compared.


def test_look_alikes_are_listed_and_served_when_asked() -> None:
    """Alone they are refused with the word to add; beside a library's class they stay stock, and a warning lists them."""
    alone = nn.ModuleList([ShawAttention(), stock.GridAttention()])
    with pytest.raises(RuntimeError, match="by_structure=True serves it") as refused:
        triton_relattn.enable(alone)
    assert "Shaw et al." in str(refused.value) and "grid" in str(refused.value) and disable(alone) == {}
    both = nn.ModuleDict({"known": build("t5"), "look_alike": ShawAttention()})
    with pytest.warns(UserWarning, match="by_structure=True"):
        report = triton_relattn.enable(both)
    assert report and set(report.left) == {"look_alike"} and type(both["look_alike"]) is ShawAttention
    assert dict(triton_relattn.enable(both, by_structure=True)) == {"look_alike": "ShawAttention"}


@pytest.mark.parametrize("check_calls", [None, True, False])
def test_calls_of_library_classes_are_compared_if_asked(check_calls: bool | None) -> None:
    model = build("t5")
    report = triton_relattn.enable(model, check_calls=check_calls)
    output(model, arguments("t5", model, [LENGTH, 20]))
    assert bool(report.calls().compared) == bool(check_calls)


def with_visible_weights() -> Any:
    """A child gets the attention weights, as nn.Softmax does in lucidrains' code."""
    module: Any = StepByStep(weights=lambda module, weights: module.attend(weights))
    module.attend = nn.Identity()
    return module.eval()


@pytest.mark.parametrize("kind", ["forward", "pre", "global", "global pre"])
def test_calls_with_hooks_are_the_stock_forwards(kind: str) -> None:
    """A hook that reads the attention weights sees all of them, one that changes them counts, and one warning says whose calls
    these are."""
    module, seen, x = with_visible_weights(), list[Any](), torch.randn(*LONG)
    enable(module)
    assert_as_stock(module, x, is_ours=True)

    def hook(part: nn.Module, *given: Any) -> None:
        if part is module.attend:
            seen.append(given)

    register: dict[str, Callable[..., Any]] = {
        "forward": module.attend.register_forward_hook,
        "pre": module.attend.register_forward_pre_hook,
        "global": nn.modules.module.register_module_forward_hook,
        "global pre": nn.modules.module.register_module_forward_pre_hook,
    }
    forget_warnings()
    handle = register[kind](hook)
    try:
        with Sizes() as sizes, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                module(x)
    finally:
        handle.remove()
    assert len(seen) == 3 and not sizes.ours
    assert len([warning for warning in caught if "has hooks" in str(warning.message)]) == 1
    assert_as_stock(module, x, is_ours=True)


LOSSES: list[float] = []


class Config:
    def __init__(self) -> None:
        self.losses: list[float] = []


class Keeping(ShawAttention):
    """Keeps something of each call for others."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.losses, self.config = where, list[float](), Config()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        out = super().forward(x, mask)
        if self.where == "attribute":
            self.attention_map = out.detach()
        else:
            lists = {"own list": self.losses, "global list": LOSSES, "list of an object": self.config.losses}
            lists[self.where].append(float(out.detach().mean()))
        return out


@pytest.mark.parametrize("where", ["attribute", "own list", "global list", "list of an object"])
def test_a_forward_that_keeps_something_is_refused(where: str) -> None:
    """Who reads it would get what was kept before enable."""
    module = Keeping(where)
    with pytest.raises(RuntimeError, match="its forward changes"):
        enable(module)
    assert module.losses == [] and "attention_map" not in vars(module)


def test_a_forward_that_is_unlike_itself_is_not_compared() -> None:
    """Noise that begins later makes the stock forward's own error as large as its output: nothing would differ by more."""

    def noisy(module: Any, out: torch.Tensor, *_: Any) -> torch.Tensor:
        return out + 2 * torch.randn_like(out) if getattr(module, "noise", False) else out

    module: Any = Altered(noisy).eval()
    enable(module)
    module.noise = True
    with pytest.warns(UserWarning, match="the stock forward cannot be compared"):
        module(torch.randn(*LONG))
    assert type(module) is Altered


@pytest.mark.parametrize("is_compared", [False, True])
def test_a_graph_of_a_look_alike_is_ours_after_a_compared_call(is_compared: bool) -> None:
    module, x = ShawAttention().eval(), torch.randn(*LONG)
    enable(module)
    if is_compared:
        module(x)
    torch._dynamo.reset()
    operators: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        operators.extend(str(node.target) for node in graph.graph.nodes if "triton_relattn" in str(node.target))
        return graph

    found = torch.compile(module, backend=backend, fullgraph=True)(x)
    assert bool(operators) == is_compared
    assert_at_most("out", (found - ShawAttention.forward(module, x)).abs().max(), 1e-5)


@pytest.mark.parametrize("limit", [(4, 257), (4, 1030), (40, 257)], ids=["length", "four times the length", "batch"])
def test_each_size_is_compared_anew(limit: tuple[int, int]) -> None:
    """A rule that begins at a length, or a batch, beyond those of earlier calls is noticed in the first call with it."""

    def beyond(_: Any, out: torch.Tensor, x: torch.Tensor, *__: Any) -> torch.Tensor:
        return 1.1 * out if x.shape[:2] == limit else out

    module = Altered(beyond).eval()
    enable(module)
    for shape in ((8, 200), (2, 400), (3, 515)):
        assert_as_stock(module, torch.randn(*shape, 32), is_ours=True)
    assert_noticed(module, torch.randn(*limit, 32))


def test_large_calls_are_compared_in_part_or_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch one sequence is compared. If that is too large as well, calls are the stock forward's, which is said once."""
    module: Any = ShawAttention().eval()
    x, long = torch.randn(8, 257, 32), torch.randn(1, 1030, 32)
    monkeypatch.setattr(calls, "MOST_BYTES", calls.SCORES * 8 * 2 * 300**2)
    report = enable(module)
    assert_as_stock(module, x, is_ours=True)
    assert report.calls().compared == 1
    forget_warnings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert_as_stock(module, long, is_ours=False)
    assert [str(warning.message) for warning in caught if "check_calls=False" in str(warning.message)]
    assert len(caught) == 1 and sum(report.calls().not_compared.values()) == 2
    disable(module)
    enable(module, check_calls=False)
    assert_as_stock(module, long, is_ours=True)


@pytest.mark.parametrize("kind", [MusicAttention, JointMusicAttention])
def test_large_calls_with_the_batch_first_or_second(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence is compared where sequences are the first dimension; else the call is the stock forward's, which is said."""
    module: Any = kind().eval()
    x = torch.randn(*((8, 190) if kind is MusicAttention else (190, 8)), 32)
    future = torch.ones(190, 190).triu(1) if kind is MusicAttention else torch.full((190, 190), -torch.inf).triu(1)
    monkeypatch.setattr(calls, "MOST_BYTES", calls.SCORES * 8 * 4 * 300**2)
    report = enable(module)
    is_first = kind is MusicAttention
    given = (x, x, x, future) if is_first else (x, x, x, None, True, future)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, found = kind.forward(module, *given), module(*given)
    assert_near("output", *((out if isinstance(out, torch.Tensor) else out[0]) for out in (found, expected)))
    assert report.calls().compared == is_first and sum(report.calls().not_compared.values()) == (not is_first)
