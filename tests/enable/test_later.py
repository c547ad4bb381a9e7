"""Calls after enable are compared with the stock forward where something is new: modules that change, another mode, size or rule,
and what only calls show. What differs is the stock forward's at once, a warning says so, and the module is stock again."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import triton_relattn
from tests.conftest import forget_warnings
from tests.enable import stock
from tests.enable.models import (
    LENGTH,
    PADDED,
    Sizes,
    arguments,
    assert_as_stock,
    attentions,
    build,
    counted,
    counting,
    fails,
    output,
    planted,
    said,
    subject,
    through_the_door,
    times,
    writer,
)
from tests.enable.stock import Altered, JointMusicAttention, MusicAttention, ShawAttention, StepByStep, enable
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
    "a projection's attribute": (lambda module, factor: setattr(module.wq, "gain", factor), lambda module: module.wq.gain),
    "a buffer or None": (
        lambda module, factor: module.register_buffer("factor", None if factor == 1 else torch.tensor(factor)),
        lambda module: 1.0 if module.factor is None else module.factor,
    ),
    "a flag in a buffer of numbers": (  # which is written in place later
        lambda module, factor: module.factor.fill_(1.0) if factor > 1 else module.register_buffer("factor", torch.zeros(1)),
        lambda module: 3.0 if module.factor.item() > 0.5 else 1.0,
    ),
}
"""Places where a module may store a factor for its result: how it is set, and how the forward reads it."""


def shaw_or(name: str) -> tuple[Any, dict[str, Any]]:
    """Shaw's attention for names that begin with "toy", else a model of a family, and arguments."""
    return (ShawAttention().eval(), {"x": torch.randn(*LONG)}) if name.startswith("toy") else subject(name)


def scaled(place: str, factor: float) -> Any:
    """Shaw's attention with its result multiplied by a factor."""
    write, read = PLACES[place]
    module = Altered(lambda module, out, *_: out * read(module))
    write(module, factor)
    return module


def noisy(module: Any, out: torch.Tensor, *_: Any) -> torch.Tensor:
    """Noise makes the stock forward's own error as large as its output: nothing would differ by more."""
    return out + 2 * torch.randn_like(out) if getattr(module, "noise", False) else out


class Limited(ShawAttention):
    """A class attribute that has no effect at first."""

    factor = 1.0

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.factor * super().forward(x, mask)


DIFFERS = "differs from the stock forward in this call and uses its stock class again"
CHANGES: dict[str, tuple[Callable[[], Any], tuple[Any, str, Any], str]] = {
    "a class attribute": (Limited, (Limited, "factor", 2.0), DIFFERS),
    "a forward": (Limited, (Limited, "forward", lambda self, x, mask=None: 2 * ShawAttention.forward(self, x, mask)), DIFFERS),
    "a function": (
        Limited,
        (stock, "split_heads", lambda states, heads: states.unflatten(2, (heads, -1)).transpose(1, 2).flip(1)),
        DIFFERS,
    ),
    # Results without dropout stay equal.
    "a probability": (lambda: StepByStep().train(), (None, "p", 0.5), r"drops weights with p = \{0.5\}, ours with p = 0"),
    "noise": (lambda: Altered(noisy), (None, "noise", True), "the stock forward cannot be compared"),
}
"""A module, what changes of it (None: of the module itself), its name and value, and what a warning says."""


def assert_noticed(module: nn.Module, *given: Any, says: str = DIFFERS) -> None:
    """The call runs the stock forward, a warning says why, and the module has its stock class again."""
    with pytest.warns(UserWarning, match=says):
        assert_as_stock(module, *given) if says == DIFFERS else module(*given)
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


AT_ONCE = ("an array", "a flag in a buffer of numbers")


@pytest.mark.parametrize(
    ("place", "calls"), [*((place, 3) for place in PLACES), ("an array", 0), *((place, 6) for place in AT_ONCE)]
)
def test_a_module_that_changes_later(place: str, calls: int) -> None:
    """It is noticed later; after six calls of a kind at once if an attribute is set or a buffer is written, although the next
    comparison is in the eighth."""
    module, x = scaled(place, 1.0), torch.randn(*LONG)
    assert enable(module)
    for _ in range(calls):
        assert_as_stock(module, x, is_ours=True)
    PLACES[place][0](module, 3.0)
    assert_noticed(module, x)
    with pytest.raises(RuntimeError, match="differs by"):
        enable(module)


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_what_a_module_reads(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, (owner, name, value), says = CHANGES[what]
    module, x = make(), torch.randn(*LONG)
    assert enable(module)
    assert_as_stock(module, x, is_ours=True)
    monkeypatch.setattr(owner or module, name, value, raising=False)
    assert_noticed(module, x, says=says)


def window(module: Any, out: Any, x: torch.Tensor, _: Any) -> Any:
    """A different rule for sequences longer than those that are compared."""
    return out if x.shape[1] <= 150 else out + ShawAttention.forward(module, x[:, :150]).mean(1, keepdim=True)


def beyond(*limit: int) -> Any:
    """A rule of one size, beyond those of earlier calls."""
    module = Altered(lambda _, out, x, *__: 1.1 * out if x.shape[:2] == limit else out)
    enable(module.eval())
    for shape in ((8, 200), (2, 400), (3, 515)):
        assert_as_stock(module, torch.randn(*shape, 32), is_ours=True)
    return module


class Segments(ShawAttention):
    """A mask with 0 at padding and segment numbers elsewhere; only segment 1 is visible."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x, None if mask is None else mask == 1)


@pytest.mark.parametrize(
    ("make", "size", "masked"),
    [
        (lambda: Altered(window), LONG[:2], False),
        (Segments, LONG[:2], True),
        (lambda: beyond(4, 257), (4, 257), False),
        (lambda: beyond(4, 1030), (4, 1030), False),
        (lambda: beyond(40, 257), (40, 257), False),
    ],
    ids=["a window", "segments", "a length", "four times the length", "a batch"],
)
def test_a_rule_that_only_calls_show(make: Callable[[], Any], size: tuple[int, int], masked: bool) -> None:
    """It is noticed in the first call of its size, or with its mask."""
    module = make()
    enable(module)
    assert_noticed(module, torch.randn(*size, 32), *[torch.randint(0, 3, size)] * masked)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize(
    "shape", [LONG, *(pytest.param(shape, marks=pytest.mark.thorough) for shape in ((1, 1030, 32), (33, 129, 32)))], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_two_percent_more(training: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A rule that begins later and changes 2 % is noticed in each mode, size and dtype (in bfloat16 6 %: 2 % may be rounding)."""
    factor = 1 + max(0.02, 8 * torch.finfo(dtype).eps)
    module: Any = Altered(lambda module, out, *_: out * getattr(module, "late", 1.0)).to(dtype).train(training)
    enable(module)
    x = torch.randn(shape, dtype=dtype)
    module(x)
    module.late = factor
    assert_noticed(module, x)


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
    assert_at_most("out", (out - expected).abs().max(), 16 * max(torch.finfo(dtype).eps, 2.0**-40) * float(expected.abs().max()))


# Which calls are compared.


@pytest.mark.parametrize("check_calls", [None, False])
def test_a_replica_of_dataparallel_is_not_compared(check_calls: bool | None) -> None:
    """Its calls are the stock forward's, which a warning says, or ours on the caller's word."""
    module = ShawAttention().eval()
    enable(module, check_calls=check_calls)
    with said() as texts:
        assert_as_stock(module._replicate_for_data_parallel(), torch.randn(*LONG), is_ours=check_calls is False)
    assert any("replica" in text for text in texts) == (check_calls is None)


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


@pytest.mark.parametrize("check_calls", [None, True, False])
def test_calls_of_library_classes_are_compared_if_asked(check_calls: bool | None) -> None:
    model, given = subject("t5")
    report = triton_relattn.enable(model, check_calls=check_calls)
    output(model, given)
    assert bool(report.calls().compared) == bool(check_calls)


@pytest.mark.parametrize("name", ["t5", "umt5", "bloom", "falcon"])
@pytest.mark.parametrize("is_trained", [False, True], ids=["generate", "train"])
def test_calls_with_a_cache_are_compared(name: str, is_trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, with a graph and without; of a cache no more is copied than the layer's own part."""
    model = writer(name)
    report = enable(model, check_calls=True)
    copies: list[str] = []
    deepcopy = copy.deepcopy

    def counted_deepcopy(value: Any, *memo: Any) -> Any:
        copies.extend([type(value).__name__] if "Cache" in type(value).__name__ else [])
        return deepcopy(value, *memo)

    monkeypatch.setattr(copy, "deepcopy", counted_deepcopy)
    torch.manual_seed(1)
    tokens = torch.randint(1, 50, (2, 12))
    if is_trained:
        model.train()(input_ids=tokens, labels=tokens, use_cache=True).loss.backward()
    else:
        greedy = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "no_repeat_ngram_size": 1}
        model.generate(tokens, max_new_tokens=3, **greedy)
    found = report.calls()
    assert found.compared > 0 and not copies and not found.not_compared and not found.differing


def test_large_calls_are_compared_in_part_or_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch one sequence is compared. If that is too large as well, calls are the stock forward's, which is said once."""
    module: Any = ShawAttention().eval()
    x, long = torch.randn(8, 257, 32), torch.randn(1, 1030, 32)
    monkeypatch.setattr(calls, "MOST_BYTES", calls.SCORES * 8 * 2 * 300**2)
    report = enable(module)
    assert_as_stock(module, x, is_ours=True)
    assert report.calls().compared == 1
    with said() as texts:
        for _ in range(3):
            assert_as_stock(module, long, is_ours=False)
    assert ["check_calls=False" in text for text in texts] == [True] and sum(report.calls().not_compared.values()) == 2
    disable(module)
    enable(module, check_calls=False)
    assert_as_stock(module, long, is_ours=True)


@pytest.mark.parametrize("kind", [MusicAttention, JointMusicAttention])
def test_large_calls_with_the_batch_first_or_second(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence is compared where sequences are the first dimension; else the call is the stock forward's, which is said."""
    module, is_first = kind().eval(), kind is MusicAttention
    x = torch.randn(*((8, 190) if is_first else (190, 8)), 32)
    monkeypatch.setattr(calls, "MOST_BYTES", calls.SCORES * 8 * 4 * 300**2)
    report = enable(module)
    given = (torch.ones(190, 190).triu(1),) if is_first else (None, True, torch.full((190, 190), -torch.inf).triu(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_as_stock(module, x, x, x, *given)
    assert report.calls().compared == is_first and sum(report.calls().not_compared.values()) == (not is_first)


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
        with Sizes() as sizes, said() as texts:
            for _ in range(3):
                module(x)
    finally:
        handle.remove()
    assert len(seen) == 3 and not sizes.ours
    assert len([text for text in texts if "has hooks" in text]) == 1
    assert_as_stock(module, x, is_ours=True)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, how, marks=[pytest.mark.thorough] * (name == "umt5"))
        for name in ("toy", "t5", "umt5", "wav2vec2_bert_relative")
        for how in ("first", "after a call", *["enabled"] * (name != "toy"))
    ],
)
def test_graphs_are_ours_after_a_comparison(name: str, how: str) -> None:
    """One graph has the operator for all attention after a call that was compared, or enable of a library's class; a graph of
    modules that were not compared has stock attention, which a warning says."""
    model, given = shaw_or(name)
    expected = output(model, given)
    if "t5" in name:  # whose caches torch 2.11 cannot trace
        given["use_cache"] = False
    (enable if name == "toy" or how == "enabled" else through_the_door)(model)
    if how == "after a call":
        output(model, given)
    found: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if "triton_relattn" in str(node.target))
        return graph

    torch._dynamo.reset()
    with said() as texts:
        assert_near("output", output(torch.compile(model, backend=backend, fullgraph=True), given), expected)
    count = 1 if name == "toy" else len([part for part in model.modules() if type(part) in door.SERVED])
    assert len(found) == count * (how != "first")
    assert len([text for text in texts if "has eager attention" in text]) == (how == "first" and name != "toy")


# Faults that are planted in ours.


@pytest.mark.parametrize("name", ["t5", "wavlm", "inkling", "bloom", "nemotron_asr_streaming", "wav2vec2_bert"])
def test_modules_that_differ_are_stock_again(name: str) -> None:
    """Only the module that differs becomes stock again; the results are the stock model's, also if the model is then compiled."""
    model, given = subject(name)
    counts = counting(name, PADDED)
    expected = counted(output(model, given), counts)
    report = enable(model, check_calls=True)
    layers = len(attentions(model, report))

    if name == "wav2vec2_bert":
        output(model, given)
        assert report.calls().compared == layers and not report.calls().differing
    wrong = times(lambda _, module, *__: 1.0 if getattr(module, "layer_idx", 0) else 1.1)
    with planted(model, wrong), pytest.warns(UserWarning, match="uses its (stock class|own attention) again"):
        assert_near("output", counted(output(model, given), counts), expected)
    differing = report.calls().differing
    assert differing and all("differs by" in reason for reason in differing.values())
    assert_near("again", counted(output(model, given), counts), expected)


@pytest.mark.parametrize("name", ["mpt", "bloom", "falcon", "t5", "umt5", "deberta", "deberta_v2", "mpnet", "wav2vec2_bert"])
@pytest.mark.parametrize(
    "padding", ["left", *(pytest.param(padding, marks=pytest.mark.thorough) for padding in ("none", "right"))]
)
def test_a_fault_in_any_row(name: str, padding: str) -> None:
    """Each row of a real token is compared, whatever a class's mask means; padding on either side is no fault."""
    model, given = subject(name, lengths=[LENGTH, LENGTH if padding == "none" else 20])
    if padding == "left":
        given["attention_mask"] = given["attention_mask"].flip(1)
    report = enable(model, check_calls=True)
    output(model, given)
    assert report.calls().compared > 0 and not report.calls().differing

    for row in (0, LENGTH // 2, LENGTH - 1):  # real in the first sequence
        faulty = times(lambda out, *_, row=row: torch.where(torch.arange(out.shape[-2]) == row, 1.5, 1.0)[:, None])
        again = copy.deepcopy(model)
        with planted(again, faulty), pytest.warns(UserWarning, match="differs from the stock forward"):
            output(again, given)


@pytest.mark.parametrize("name", ["toy", "toy, not compared", "t5"])
def test_what_raises_in_ours_alone(name: str) -> None:
    """The call is the stock forward's; one warning names the exception, and says nothing of other calls' results."""
    model, given = shaw_or(name)
    expected = output(model, given)
    if name == "t5":
        through_the_door(model)
        output(model, given)  # it is compared
    else:
        enable(model, **{"check_calls": False} if "not" in name else {})
    with planted(model, fails), said() as texts:
        for _ in range(3):
            assert torch.equal(output(model, given), expected)
        if name != "t5":
            with pytest.raises(RuntimeError):  # the stock forward's own error
                model(torch.randn(4, 257, 31))
    (text,) = texts
    assert "IndexError: planted" in text and "wrong" not in text
    assert_as_stock(model, **given, is_ours=True)


def test_what_raises_behind_a_cache() -> None:
    """Keys may be in the cache already: the stock forward would append them again, so the error is the caller's."""
    model = writer("bloom")
    enable(model, check_calls=False)
    with planted(model, fails), pytest.raises(IndexError, match="planted"):
        model(torch.randint(1, 50, (2, 12)), use_cache=True)


@pytest.mark.parametrize("name", ["bloom", "longt5"])
def test_stock_forwards_that_cast_to_float32(name: str) -> None:
    """In float64 the stock forward has float32's rounding error; ours does not, and is not taken for a different computation."""
    model = build(name).double()
    given = arguments(name, model, [20, 13])
    report = enable(model, check_calls=True)
    with torch.no_grad():  # output would leave these casts out
        model(**given)
    assert report.calls().compared > 0 and not report.calls().differing
