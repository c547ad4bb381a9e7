"""The two ways of a call: plain ones past torch's dispatcher, and those that something watches or transforms as an operator. Both
are taken for a kind of call that is new and for one that is known, and have the same results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.conftest import INTERPRETED
from triton_relattn import RelativePositions, _calls, fused_relative_attention
from triton_relattn._core.arguments import asks_for_values

IMPLEMENTATIONS = ["blockwise", *["triton"] * INTERPRETED]
POSITIONS = RelativePositions(-4, 4)
Tensors = list[torch.Tensor]


@pytest.fixture(params=IMPLEMENTATIONS)
def attend(request: pytest.FixtureRequest) -> Callable[..., torch.Tensor]:
    return partial(fused_relative_attention, positions=POSITIONS, implementation=request.param)


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The calls that took the operator's way."""
    taken = list[str]()

    def noted(*arguments: Any) -> Any:
        taken.append("operator")
        return attention(*arguments)

    attention = _calls.relative_attention
    monkeypatch.setattr(_calls, "relative_attention", noted)
    yield taken


def leaves(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 2, 12, 16)] * 3 + [(9, 16)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def gradients(out: torch.Tensor, inputs: Tensors) -> Tensors:
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    return list(torch.autograd.grad(out, inputs, d_out.to(out.dtype)))


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


CONTEXTS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], bool]] = {
    # a context, and whether it watches
    "nothing": (nullcontext, False),
    "default device": (lambda: torch.device("cpu"), False),
    "anomaly detection": (torch.autograd.detect_anomaly, False),
    "saved tensors elsewhere": (torch.autograd.graph.save_on_cpu, False),
    "dispatch mode": (Dispatch, True),
    "function mode": (Functions, True),
    "flop counter": (lambda: FlopCounterMode(display=False), True),
    "dual level": (forward_ad.dual_level, True),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts(name: str, attend: Any, operators: list[str]) -> None:
    """New and known, with gradients: those of a call that nothing watches."""
    context, watches = CONTEXTS[name]
    inputs = leaves()
    expected = attend(*inputs)
    grads = gradients(expected, inputs)
    for _ in range(2):
        for known in (False, True):
            if not known:
                _calls._known.clear()
            operators.clear()
            with context():
                out = attend(*inputs)
                assert_equal([out, *gradients(out, inputs)], [expected, *grads])
            assert bool(operators) == watches


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_without_gradients(mode: Any, attend: Any, operators: list[str]) -> None:
    """Known kinds differ with and without gradients, and of tensors made in inference mode."""
    inputs = leaves()
    expected = attend(*inputs)
    assert expected.requires_grad
    for _ in range(2):
        with mode():
            out = attend(*inputs)
            made = attend(*(tensor.clone() for tensor in inputs))
        assert not out.requires_grad and not made.requires_grad
        assert_equal([out, made], [expected, expected])
        assert attend(*inputs).requires_grad
    assert not operators


def test_autocast(attend: Any, operators: list[str]) -> None:
    """Operands are cast before, so that autocast watches nothing; with it and without it are different kinds."""
    inputs = leaves()
    before = attend(*inputs)
    for _ in range(2):
        with torch.autocast("cpu", torch.float16):
            out = attend(*inputs)
        half = [tensor.detach().half().requires_grad_() for tensor in inputs]
        assert_equal([out, attend(*inputs)], [attend(*half), before])
        found = gradients(out, inputs)
        assert [grad.dtype for grad in found] == [torch.float32] * 4
        assert_equal([grad.half() for grad in found], gradients(attend(*half), half))
    assert not operators


def test_transforms(attend: Any, operators: list[str]) -> None:
    """vmap and torch.func.grad take the operator, with the results of single calls; forward mode is refused, known or not."""
    inputs = [tensor.detach() for tensor in leaves()]
    query, *others = inputs
    for _ in range(2):
        single = attend(*inputs)
        assert not operators
        assert_equal([torch.func.vmap(lambda q: attend(q, *others))(query[None])[0]], [single])
        found = torch.func.grad(lambda q: attend(q, *others).sum())(query)
        assert len(operators) == 2
        leaf = query.clone().requires_grad_()
        assert_equal([found], list(torch.autograd.grad(attend(leaf, *others).sum(), leaf)))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
            attend(forward_ad.make_dual(query, query), *others)
        operators.clear()


def test_compiled(attend: Any) -> None:
    """torch.compile and torch.export see the operator, also of a kind that is known, and leave eager calls as they were."""
    inputs = leaves()
    expected = attend(*inputs)
    grads = gradients(expected, inputs)
    compiled = torch.compile(lambda *tensors: attend(*tensors), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        out = compiled(*inputs)
        assert_equal([out, *gradients(out, inputs)], [expected, *grads])
        assert_equal([attend(*inputs)], [expected])

    class Module(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> Any:
            return attend(*tensors)

    detached = tuple(tensor.detach() for tensor in inputs)
    program = torch.export.export(Module(), detached)
    assert any("attention_forward" in str(node.target) for node in program.graph.nodes)
    assert_equal([program.module()(*detached)], [expected])


class Labelled(torch.Tensor):
    pass


def test_tensors_that_are_more(attend: Any, operators: list[str]) -> None:
    """A subclass takes the operator; a lazily negated tensor is read as what it is, as an input and as a gradient."""
    inputs = leaves()
    expected = attend(-inputs[0].detach(), *inputs[1:])
    for _ in range(2):
        assert_equal([attend(torch._neg_view(inputs[0].detach()), *inputs[1:])], [expected])
        out = attend(*inputs)
        d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
        assert_equal(
            list(torch.autograd.grad(out, inputs, torch._neg_view(d_out), retain_graph=True)),
            list(torch.autograd.grad(out, inputs, -d_out)),
        )
        assert not operators
        labelled = attend(inputs[0].detach().as_subclass(Labelled), *inputs[1:])
        assert type(labelled) is Labelled and operators
        operators.clear()


def test_checkpoint_and_hooks(attend: Any, operators: list[str]) -> None:
    """Recomputed calls, saved tensors that hooks replace, and gradients of a graph that is kept."""
    inputs = leaves()
    out = attend(*inputs)
    expected = gradients(out, inputs)
    for reentrant in (False, True):
        found = checkpoint(lambda *tensors: attend(*tensors), *inputs, use_reentrant=reentrant)
        total = (found * torch.randn(out.shape, generator=torch.Generator().manual_seed(9))).sum()
        for leaf in inputs:
            leaf.grad = None
        total.backward()
        assert_equal([leaf.grad for leaf in inputs if leaf.grad is not None], expected)
    transposed = (
        lambda saved: saved.mT.contiguous() if saved.dim() > 1 else saved,
        lambda kept: kept.mT if kept.dim() > 1 else kept,
    )
    with torch.autograd.graph.saved_tensors_hooks(*transposed):  # other strides than those that were saved
        out = attend(*inputs)
    for _ in range(2):
        close = zip(torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True), inputs, strict=True)
        for (found, leaf), wanted in zip(close, torch.autograd.grad(attend(*inputs), inputs, torch.ones_like(out)), strict=True):
            assert found.shape == leaf.shape and torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert not operators


def test_dropout(attend: Any) -> None:
    """Each call draws new weights, known or not, and what it draws depends on torch's generator alone."""
    inputs = leaves()
    drop = partial(attend, *inputs, dropout_p=0.4)
    torch.manual_seed(3)
    first = [drop() for _ in range(3)]
    assert not any(torch.equal(one, other) for one, other in zip(first, [attend(*inputs), *first], strict=False))
    torch.manual_seed(3)
    with Dispatch():
        assert_equal([drop() for _ in range(3)], first)


def test_threads(attend: Any) -> None:
    """Kinds become known in several threads at once."""
    calls = {seed: leaves(seed) for seed in range(6)}
    expected = {seed: attend(*inputs) for seed, inputs in calls.items()}
    _calls._known.clear()
    wrong: list[int] = []

    def work(seed: int) -> None:
        for _ in range(5):
            if not torch.equal(attend(*calls[seed]), expected[seed]):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a number for a bool": ({"is_causal": 0}, "is_causal must be a bool"),
    "a bool for a number": ({"scale": True}, "scale must be a float"),
    "a pair with a bool": ({"window_size": (True, 3)}, "window_size must be an int"),
    "no number": ({"scale": float("nan")}, "scale must be finite"),
    "another implementation": ({"implementation": "other"}, "implementation must be"),
}
VALID: dict[str, Any] = {"is_causal": False, "scale": 1.0, "window_size": (1, 3)}


@pytest.mark.parametrize("name", WRONG)
def test_what_equals_a_known_call_is_still_checked(name: str, attend: Any) -> None:
    """0 == False and 1 == True, but only one of them is right."""
    inputs, (wrong, text) = leaves(), WRONG[name]
    for _ in range(2):
        attend(*inputs, **VALID)
        with pytest.raises((TypeError, ValueError), match=text):
            attend(*inputs, **VALID | wrong)


def test_values_are_checked_in_each_call(attend: Any) -> None:
    """Lengths of the same shape: those that are too large are refused, known kind or not."""
    inputs = leaves()
    for lengths in ([12, 5], [3, 4], [13, 1], [0, 12], [-1, 2]):
        given = {"key_lengths": torch.tensor(lengths)}
        if max(lengths) > 12 or min(lengths) < 0:
            with pytest.raises(ValueError, match="key_lengths must lie in"):
                attend(*inputs, **given)
        else:
            found = attend(*inputs, **given)
            expected = attend(*inputs, **given | {"implementation": "reference"})
            assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_values_are_checked_as_soon_as_that_is_asked_for(attend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, whose values are not read otherwise, also for a known kind."""
    inputs, lengths = leaves(), torch.tensor([13, 5])
    for module in ("_calls", "_core.validation", "_core.arguments", "_core.mistakes"):
        monkeypatch.setattr(f"triton_relattn.{module}.has_values", lambda _: asks_for_values())
    for _ in range(2):
        attend(*inputs, key_lengths=lengths)
        with monkeypatch.context() as patch, pytest.raises(ValueError, match="key_lengths must lie in"):
            patch.setenv("TRITON_RELATTN_CHECK_VALUES", "1")
            attend(*inputs, key_lengths=lengths)
