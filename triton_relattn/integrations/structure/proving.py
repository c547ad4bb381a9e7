"""Which reading of a stock module is right: its class and ours side by side, on a copy with random weights, in float64.

A copy has the module's settings and the shapes of its weights, on the CPU, and none of its hooks: what is proven holds for any
weights, and a model on a GPU is not touched. Eval mode: outputs, and gradients of inputs and parameters. Training mode: outputs
where dropout is replaced, that of weights by nothing, all other by a fixed pattern; and the probabilities of both.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .. import proof
from .kind import Kind, Reading, Refused, Sample, class_of
from .roles import widths
from .state import name_of, state_of


def prove(kind: type[Kind], module: nn.Module) -> tuple[Reading, float]:
    """Return the reading of a module with which our class computes the same, and the largest difference.

    Raises:
        Refused: there is none, or the stock class cannot be run.
    """
    return proof.apart(lambda: _prove(kind, module))


def _prove(kind: type[Kind], module: nn.Module) -> tuple[Reading, float]:
    model = bare_copy(module)
    kind.prepare(model)
    for number, each in enumerate(each for each in model.modules() if isinstance(each, nn.Dropout)):
        each.p = 0.05 * (number % 15 + 1)  # so that none is taken for another
    nearest: tuple[int, float, str] | None = None
    for plain in kind.readings(module):
        try:
            agreed: list[float] = []
            reading = _observed(kind, plain, model, module)
            for sample, gradients, training in _runs(kind.samples(model, reading)):
                _compare(kind, reading, model, sample, gradients, training, agreed)
            _compare_in_float32(kind, reading, model)
            return reading, max(agreed)
        except proof.Disproved as found:
            difference, said = found.difference, str(found)
        except Refused:
            raise
        except Exception as error:
            difference, said = math.inf, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
        if nearest is None or (-len(agreed), difference) < nearest[:2]:
            nearest = -len(agreed), difference, f"{said} (read as {kind.words(plain)})"
    raise Refused("it computes something else, or takes other arguments. " + (nearest or (0, 0.0, ""))[2])


def bare_copy(module: nn.Module, device: str = "cpu") -> Any:
    """Return a copy with the module's settings, without its hooks, with random weights in float64 on the CPU; "meta": without."""
    memo: dict[int, Any] = {}
    for each in module.modules():
        for value in (*each._parameters.values(), *each._buffers.values(), *vars(each).values()):
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = _bare_tensor(value, device)
    return _bare(module, memo, device)


def _bare(module: nn.Module, memo: dict[int, Any], device: str) -> Any:
    if id(module) in memo:
        return memo[id(module)]
    found = widths(module)
    if found is not None and not isinstance(
        module, (nn.Linear, nn.Conv1d, nn.Sequential)
    ):  # quantised, or with an adapter: called as a linear one
        bias = getattr(module, "bias", None)
        has_bias = (bias() if callable(bias) else bias) is not None
        memo[id(module)] = made_linear = nn.Linear(*found, bias=has_bias, dtype=torch.float64, device=device)
        return made_linear
    made_copy = module.__class__.__new__(module.__class__)
    memo[id(module)] = made_copy
    for name, value in vars(module).items():
        if name == "_modules":
            value = {child: None if each is None else _bare(each, memo, device) for child, each in value.items()}
        elif name.endswith("_hooks") or name.endswith("_hooks_with_kwargs") or name.endswith("_hooks_always_called"):
            value = type(value)()
        elif isinstance(value, nn.Module):
            value = _bare(value, memo, device)
        else:
            value = copy.deepcopy(value, memo)
        made_copy.__dict__[name] = value
    for parameter in made_copy._parameters.values():
        if parameter is not None and not parameter.is_meta:
            _fill(module, parameter)
    return made_copy


def _bare_tensor(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A parameter of the same shape, or about the values of a buffer, in float64 if it has numbers."""
    is_parameter = isinstance(tensor, nn.Parameter)
    dtype = torch.float64 if tensor.is_floating_point() or is_parameter else tensor.dtype
    if is_parameter or tensor.is_meta or device == "meta":
        made_empty = torch.empty(tensor.shape, dtype=dtype, device=device)
        return nn.Parameter(made_empty) if is_parameter else made_empty
    values = tensor.detach().to("cpu", dtype, copy=True)
    # A buffer that has no effect, as a mask of ones, must not be taken for one that is not used.
    return values + 0.1 * torch.randn_like(values) if values.is_floating_point() else values


def _fill(owner: nn.Module, parameter: torch.Tensor) -> None:
    """Random numbers for which attention weights are neither equal nor all but one zero."""
    fan_in = math.prod(parameter.shape[1:])
    of_projection = widths(owner) is not None and parameter.dim() > 1
    with torch.no_grad():
        parameter.normal_(std=fan_in**-0.5 if of_projection else 0.5)


class _Dropout(TorchFunctionMode):
    """Dropout of attention weights does nothing and is noted; that of other numbers multiplies by a pattern that both share."""

    def __init__(self, is_weights: Callable[[torch.Tensor], bool]) -> None:
        self.is_weights, self.noted = is_weights, []  # type: ignore[var-annotated]
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (nn.functional.dropout, torch.dropout):
            names = ("input", "p", "training" if func is nn.functional.dropout else "train")
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            states, p = given["input"], given.get("p", 0.5)
            if not given.get(names[2], True) or p == 0:
                return states
            if self.is_weights(states):
                self.noted.append(p)
                return states
            return states * torch.linspace(1 - p, 1 + p, states.numel(), dtype=states.dtype).view(states.shape)
        if func is nn.functional.scaled_dot_product_attention:
            given = {**dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)), **kwargs}
            if (p := given.pop("dropout_p", 0.0)) > 0:
                self.noted.append(p)
            return func(**given)
        return func(*args, **kwargs)


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Put back attributes that a forward sets: weights for pictures, features of the first length."""
    before = [(each, dict(vars(each))) for each in model.modules()]
    try:
        yield
    finally:
        for each, attributes in before:
            vars(each).clear()
            vars(each).update(attributes)


def _observed(kind: type[Kind], reading: Reading, model: Any, module: nn.Module) -> Reading:
    """The reading, with what a run of the stock forward shows: which children drop what, and what it returns."""
    sample = next(iter(kind.samples(model, reading)))
    dropped: dict[str, torch.Size] = {}
    hooks = [
        child.register_forward_pre_hook(lambda _, given, name=name: dropped.__setitem__(name, given[0].shape))
        for name, child in model.named_children()
        if isinstance(child, nn.Dropout)
    ]
    try:
        with torch.no_grad(), proof.float32_is_float64(), _restored(model):
            before = state_of(model)
            out = model.eval()(**proof.copied(sample.given))
            after = state_of(model)
            left = tuple(sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)))
            changed = [name for name in left if isinstance(after.get(name), (bool, int, float, str))]
    finally:
        for hook in hooks:
            hook.remove()
    if changed:
        raise Refused(f"its forward changes {', '.join(sorted(changed))}, on which what it computes next may depend")
    returns = _returned(out)
    uncalled = [name for name, child in model.named_children() if isinstance(child, nn.Dropout) and name not in dropped]
    # Torch's fused attention takes the probability of one that is not called.
    weights = [name for name, shape in dropped.items() if _are_weights(shape, sample)] or uncalled
    others = [name for name, shape in dropped.items() if name not in weights and shape.numel() == next(_values(out)).numel()]
    return dataclasses.replace(
        reading,
        state=name_of(state_of(module), left),
        left=left,
        drops=next(iter(weights), None),
        drops_out=next(iter(others), None),
        returns=returns,
    )


def _are_weights(shape: torch.Size, sample: Sample) -> bool:
    """Whether numbers of this shape are one for each pair of a query and a key."""
    return len(shape) >= 3 and shape[-2:] == sample.pairs


def _runs(samples: Iterator[Sample]) -> Iterator[tuple[Sample, bool, bool]]:
    """Each sample, whether to compare gradients, too, and whether in training mode.

    Outputs come first, so that a wrong reading is found out soon. Gradients, which take most of the time, follow with all samples
    of the first shape and one of the second; training mode with those of the first.
    """
    every = list(samples)
    first, *others = dict.fromkeys(each.pairs for each in every)
    of_first = [each for each in every if each.pairs == first]
    of_second = [each for each in every if each.pairs in others[:1]]
    yield from ((each, False, False) for each in every)
    yield from ((each, True, False) for each in of_first + of_second[:1])
    yield from ((each, False, True) for each in of_first)


def _compare(
    kind: type[Kind], reading: Reading, model: Any, sample: Sample, gradients: bool, training: bool, agreed: list[float]
) -> None:
    """Append the differences of a sample's outputs and gradients to agreed.

    Raises:
        proof.Disproved: they are too large.
    """
    model.train(training)
    of, stock_class = _in_proof(kind(type(model), reading)), type(model)
    with _restored(model), _Dropout(lambda each: _are_weights(each.shape, sample)) as dropout:
        stock, returned = _results(model, sample, gradients)
    model.__class__ = class_of(of)
    try:
        with _restored(model), _Dropout(lambda each: _are_weights(each.shape, sample)):
            ours, our_returned = _results(model, sample, gradients)
    finally:
        model.__class__ = stock_class
    name = f"{sample.name}, in {'training' if training else 'eval'} mode"
    if returned != our_returned:
        raise proof.Disproved(f"{name}: it returns {_in_words(returned)}, ours {_in_words(our_returned)}")
    if dropout.noted != of.noted:
        raise proof.Disproved(f"{name}: it drops weights with p = {dropout.noted or 0}, ours with p = {of.noted or 0}")
    agreed.append(proof.compare(name, ours, stock))


def _compare_in_float32(kind: type[Kind], reading: Reading, model: Any) -> None:
    """Compare outputs as they are in use: what is rounded to a bucket, or cast, may differ where float64 does not.

    Raises:
        proof.Disproved: they differ by more than rounding does.
    """
    model.float().eval()
    stock_class = type(model)
    try:
        for sample in {each.pairs: each for each in kind.samples(model, reading)}.values():  # one of each shape
            given = {
                name: each.float() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
                for name, each in sample.given.items()
            }
            outs = []
            for each in (stock_class, class_of(_in_proof(kind(stock_class, reading)))):
                model.__class__ = each
                with torch.no_grad(), _restored(model):
                    out = next(_values(model(**given)))
                outs.append(out if sample.counts is None else out.where(sample.counts, 0.0))
            model.__class__ = stock_class
            difference = float((outs[0] - outs[1]).abs().max() / outs[0].abs().max())
            if not difference <= FLOAT32_LIMIT:
                raise proof.Disproved(f"{sample.name}, in float32: the output differs by {difference:.1e}", difference)
    finally:
        model.__class__ = stock_class
        model.double()


FLOAT32_LIMIT = 2.0**-10
"""The largest difference of outputs in float32: 2**14 roundings, far from what a wrong term makes of random weights."""


def _in_proof(of: Kind) -> Kind:
    of.noted = []
    return of


def _results(model: nn.Module, sample: Sample, gradients: bool) -> tuple[proof.Results, tuple[str, ...]]:
    """Outputs, and gradients of the first one with respect to parameters and inputs that are numbers; and what is returned."""
    given = proof.copied(sample.given)
    leaves = {**dict(model.named_parameters()), **proof.differentiable(given)} if gradients else {}
    with proof.float32_is_float64(), torch.set_grad_enabled(gradients):
        found = model(**given)
        out, *others = _values(found)
        kept = out if sample.counts is None else out.where(sample.counts, 0.0)
        results = proof.with_gradients(kept, leaves) if gradients else {proof.OUTPUT: kept.detach()}
    for number, each in enumerate(others, 2):
        if isinstance(each, torch.Tensor):
            results[f"output {number}"] = each.detach()
    return results, _returned(found)


def _returned(found: Any) -> tuple[str, ...]:
    """What a forward returns: nothing for a tensor, else what is in its tuple.

    Raises:
        Refused: it returns something else.
    """
    if isinstance(found, torch.Tensor):
        return ()
    if type(found) is not tuple or not found or not isinstance(found[0], torch.Tensor):
        raise Refused(f"its forward returns a {type(found).__name__}, neither a tensor nor a tuple that begins with one")
    return tuple("tensor" if isinstance(each, torch.Tensor) else str(each) for each in found)


def _in_words(returned: tuple[str, ...]) -> str:
    return f"a tuple of {', '.join(returned)}" if returned else "a tensor"


def _values(found: Any) -> Iterator[Any]:
    if isinstance(found, (tuple, list)):
        yield from found
    else:
        yield found
