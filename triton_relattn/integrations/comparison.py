"""The comparison of a stock forward with ours before enable replaces a class: on a shadow of the module with random weights, in
float64 on the CPU, outputs and gradients, in eval and in training mode.

Nothing is inferred from another module, another process or a list of versions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from .._core.warn import first_line
from .compact import to_dense
from .isolation import Dropout, Promoted, in_own_thread
from .replacement import Replacement
from .shadow import copied, copied_tensor, shadow, with_random_weights

OUTPUT, GRADIENT = "the output", "the gradient of "
LIMIT = 2.0**-30
"""The largest difference that passes in float64, as a share of a tensor's largest number: 64 times finer than float32's rounding,
so that no user of float32 sees it, and 2**23 times float64's, of which our modules make 2**9 at most."""
FLOAT32_LIMIT = 2.0**-10
"""The same for outputs in float32: 2**14 roundings, far from what a wrong term makes of random weights."""
SCRIPTED_LIMIT = 2.0**-18
"""The same for classes with scripted functions, which round single numbers to float32 (DeBERTa before transformers 5.23)."""


class Sample(NamedTuple):
    """Arguments of a stock forward, by its own names; pairs: how many queries and keys they have. dtypes: of arguments that have
    another than the weights."""

    name: str
    arguments: dict[str, Any]
    pairs: tuple[int, int]
    dtypes: Mapping[str, torch.dtype] = {}


class Differs(Exception):
    """Ours computes something else. difference: as a share of the largest number; infinite if results cannot be compared."""

    def __init__(self, message: str, difference: float = math.inf) -> None:
        super().__init__(message)
        self.difference = difference


class Refused(Exception):
    """A module has relative attention, and is left as it is; the message says why."""


def compare(module: nn.Module, ours: Any, similar: Replacement | None = None) -> tuple[Replacement, float]:
    """Return the first replacement that computes what a module's class does, and the largest difference; or raise Refused."""
    return in_own_thread(lambda: _compare(module, ours, similar))


def _compare(module: nn.Module, ours: Any, similar: Replacement | None) -> tuple[Replacement, float]:
    models = [with_random_weights(module)]
    if any(buffer.is_floating_point() for buffer in module.buffers()):
        models.append(with_random_weights(module, changes_buffers=False))
    for model in models:
        ours.prepare_model(model)
    if similar is not None:
        try:
            return similar, max(_differences(similar, models, is_light=True))
        except Exception:  # of this module another candidate may be the right one
            pass
    failures: list[tuple[int, float, str]] = []  # of the candidate that agreed with most samples the message is shown
    for description, make in ours.candidates(module, models[0]):
        agreed: list[float] = []
        try:
            replacement = make()
            for difference in _differences(replacement, models):
                agreed.append(difference)
            return replacement, max(agreed)
        except Refused:
            raise
        except Differs as error:
            failures.append((-len(agreed), error.difference, f"{error}{description}"))
        except Exception as error:  # a stock forward may raise anything
            failures.append((-len(agreed), math.inf, f"{type(error).__name__}: {first_line(error)}{description}"))
    _, _, nearest = min(failures, key=lambda failure: failure[:2], default=(0, 0.0, ""))
    raise Refused(f"it computes something else, or takes other arguments. {nearest}")


def _differences(replacement: Replacement, models: list[Any], is_light: bool = False) -> Iterator[float]:
    """Yield the difference of one sample after the other. models: with random buffers, and with the module's own, if any."""
    model = models[0]
    samples = list(replacement.ours.samples(model, is_light))
    is_single = model_dtype(model) == torch.float32
    limit = FLOAT32_LIMIT if is_single else SCRIPTED_LIMIT if is_scripted(replacement.stock) else LIMIT
    for sample, gradients, training in (_light_runs if is_light else _runs)(samples):
        yield _difference(replacement, model, sample, gradients, training, limit)
    for with_own_buffers in models[1:]:
        yield _difference(replacement, with_own_buffers, samples[-1], False, False, limit)
    if not is_light and not is_single:
        single = shadow(model, lambda tensor: copied_tensor(tensor, torch.float32))
        for sample in {sample.pairs: sample for sample in samples}.values():  # one of each shape
            named = sample._replace(name=f"{sample.name}, in float32")
            _difference(replacement, single, named, False, False, FLOAT32_LIMIT)
    if not is_light:
        for sample in _of_another_dtype(samples[0], model_dtype(model)):
            try:
                _results(replacement, model, sample, False, is_ours=False)
            except Exception:  # a stock forward may refuse them: then ours has nothing to equal
                continue
            _difference(replacement, model, sample, False, False, FLOAT32_LIMIT)


def _of_another_dtype(sample: Sample, dtype: torch.dtype) -> Iterator[Sample]:
    """Yield a sample with arguments of another dtype than the weights: all of them, and all but the first one, the states."""
    names = [name for name, value in sample.arguments.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    other = torch.float32 if dtype == torch.float64 else torch.float64
    for which in filter(None, (names, names[1:])):
        named = f"{sample.name}, {', '.join(which)} in {other}".replace("torch.", "")
        yield sample._replace(name=named, dtypes=dict.fromkeys(which, other))


def _runs(samples: list[Sample]) -> Iterator[tuple[Sample, bool, bool]]:
    """Yield samples, each with whether to compare gradients, and whether in training mode.

    Outputs come first, so that a wrong candidate fails soon. Gradients, which take most of the time, follow with all samples
    of the first shape and one of the second; training mode with those of the first, one of them with gradients.
    """
    shapes = list(dict.fromkeys(sample.pairs for sample in samples))
    first = [sample for sample in samples if sample.pairs == shapes[0]]
    second = [sample for sample in samples if sample.pairs in shapes[1:2]]
    yield from ((sample, False, False) for sample in samples)
    yield from ((sample, True, False) for sample in first + second[:1])
    yield from ((sample, number == 0, True) for number, sample in enumerate(first))


def _light_runs(samples: list[Sample]) -> Iterator[tuple[Sample, bool, bool]]:
    """Yield the same for a further module of a class: a sample of each shape, one of them with gradients, one in training."""
    first, *others = {sample.pairs: sample for sample in samples}.values()
    yield from ((sample, False, False) for sample in others)
    yield min(samples, key=lambda sample: math.prod(sample.pairs)), True, False
    yield first, False, True


def run(replacement: Replacement, model: Any, arguments: dict[str, Any], is_ours: bool, dtype: Any) -> tuple[Any, list[float]]:
    """Return what a forward returns, computed in dtype, and each probability with which it would drop attention weights."""
    with Dropout() as dropout, Promoted() if dtype == torch.float64 else nullcontext():
        returned = replacement.by_ours(model, arguments) if is_ours else replacement.by_stock(model, (), arguments)
        return to_dense(returned), dropout.noted


def dropped_otherwise(stock: Collection[float], ours: Collection[float]) -> str:
    """Return how the probabilities of two runs differ; nothing if they are the same."""
    return "" if stock == ours else f"it drops weights with p = {stock or 0}, ours with p = {ours or 0}"


def _difference(replacement: Replacement, model: Any, sample: Sample, gradients: bool, training: bool, limit: float) -> float:
    """Return the difference of a sample's outputs and gradients; raise Differs if it is above the limit."""
    model.train(training)
    name = f"{sample.name}, in {'training' if training else 'eval'} mode"
    stock, returned, dropped = _results(replacement, model, sample, gradients, is_ours=False)
    ours, our_returned, our_dropped = _results(replacement, model, sample, gradients, is_ours=True)
    if replacement.ours.lacks_weights and len(returned) == len(our_returned):
        lacking = {number for number, text in enumerate(our_returned, 1) if number > 1 and text == "None"}
        stock = {name: tensor for name, tensor in stock.items() if name not in {f"output {number}" for number in lacking}}
        returned = tuple("None" if number in lacking else text for number, text in enumerate(returned, 1))
    if returned != our_returned:
        texts = (f"a tuple of {', '.join(parts)}" if parts else "a tensor" for parts in (returned, our_returned))
        raise Differs("{}: it returns {}, ours {}".format(name, *texts))
    if text := dropped_otherwise(dropped, our_dropped):
        raise Differs(f"{name}: {text}")
    return largest_difference(name, ours, stock, limit)


def _results(
    replacement: Replacement, model: nn.Module, sample: Sample, gradients: bool, is_ours: bool
) -> tuple[dict[str, torch.Tensor], tuple[str, ...], list[float]]:
    """Return outputs, and gradients of the first one with respect to parameters and inputs; what is returned; and what drops."""
    dtype = model_dtype(model)
    arguments = cloned_arguments(sample, dtype)
    leaves: dict[str, torch.Tensor] = dict(model.named_parameters()) if gradients else {}
    if gradients:
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point() and name not in replacement.constants:
                leaves[name] = value.requires_grad_()
    with torch.set_grad_enabled(gradients):
        returned, dropped = run(replacement, copied(model), arguments, is_ours, dtype)
        out, *others = values(returned)
        counts = replacement.counted(sample.arguments)
        out = out if counts is None else out.where(counts, 0.0)
        results = {OUTPUT: out.detach()}
        if leaves:
            d_out = torch.randn(out.shape, dtype=out.dtype, device="cpu", generator=torch.Generator().manual_seed(3))
            found = torch.autograd.grad(out, list(leaves.values()), d_out, allow_unused=True, materialize_grads=True)
            results |= {GRADIENT + name: gradient for name, gradient in zip(leaves, found, strict=True)}
    for number, other in enumerate(others, 2):
        if isinstance(other, torch.Tensor) and not is_weights(other, sample.pairs):
            results[f"output {number}"] = other.detach()
    return results, described(returned, sample), dropped


def described(returned: Any, sample: Sample) -> tuple[str, ...]:
    """Return what is in the tuple that a forward returns, "None" for weights, which ours lacks; nothing for a tensor."""
    if isinstance(returned, torch.Tensor):
        return ()
    if type(returned) is not tuple or not returned or not isinstance(returned[0], torch.Tensor):
        raise Refused(f"its forward returns a {type(returned).__name__}, neither a tensor nor a tuple that begins with one")
    texts = []
    for value in returned:
        if value is None or is_weights(value, sample.pairs):
            texts.append("None")
        elif isinstance(value, torch.Tensor):
            texts.append("tensor")
        else:
            texts.append(str(value) if isinstance(value, (bool, int, float, str)) else type(value).__name__)
    return tuple(texts)


def is_weights(value: Any, pairs: tuple[int, int]) -> bool:
    """Return whether a value is attention weights: a number per pair of a query and a key, of which each row sums to one."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dim() < 3 or value.shape[-2:] != pairs:
        return False
    return not bool((value < 0).any()) and torch.allclose(value.sum(-1), torch.ones_like(value[..., 0]), atol=1e-5)


def largest_difference(name: str, ours: dict[str, torch.Tensor], stock: dict[str, torch.Tensor], limit: float) -> float:
    """Return the largest difference, as a share of each tensor's largest number; raise Differs if it is above limit."""
    if ours.keys() != stock.keys():
        raise Differs(f"{name}: not the same results: {', '.join(sorted(ours.keys() ^ stock.keys()))}")
    largest = max((float(tensor.abs().max()) for what, tensor in stock.items() if what.startswith(GRADIENT)), default=0.0)
    worst = 0.0
    for what, expected in stock.items():
        found = ours[what]
        if found.shape != expected.shape:
            raise Differs(f"{name}: {what} has the shape {tuple(found.shape)}, stock {tuple(expected.shape)}")
        finite = expected.abs().where(expected.isfinite(), 0)  # what hides keys may be infinite
        if found.dtype != expected.dtype:
            raise Differs(f"{name}: {what} is {found.dtype}, stock {expected.dtype}")
        # A gradient that cancels to nothing is compared with a hundredth of the largest one.
        size = max(float(finite.max()), 1e-2 * largest if what.startswith(GRADIENT) else 0.0)
        error = (found.double() - expected.double()).abs().where(found != expected, 0.0)
        difference = float(error.max()) / (size or 1.0)
        if not difference <= limit:  # also of NaN
            message = f"{name}: {what} differs by {difference:.1e} of the largest number there, {limit:.0e} is allowed"
            raise Differs(message, difference)
        worst = max(worst, difference)
    return worst


def is_scripted(stock: type[nn.Module]) -> bool:
    """Return whether a class's file has scripted functions, whose casts to float32 stay in float64."""
    module = sys.modules.get(stock.__module__)
    return module is not None and any(isinstance(value, torch.jit.ScriptFunction) for value in vars(module).values())


def model_dtype(model: nn.Module) -> torch.dtype:
    return next((weight.dtype for weight in model.parameters()), torch.float64)


def cloned_arguments(sample: Sample, dtype: torch.dtype) -> dict[str, Any]:
    """Return a sample's arguments, which a forward may write to, in dtype or their own."""
    cloned = dict(sample.arguments)
    for name, value in cloned.items():
        wanted = sample.dtypes.get(name, dtype)
        if hasattr(value, "cast"):  # a small form
            cloned[name] = (value.clone() if isinstance(value, torch.Tensor) else value).cast(wanted)  # type: ignore[union-attr]
        elif isinstance(value, torch.Tensor):
            cloned[name] = copied_tensor(value, wanted)
    return cloned


def values(returned: Any) -> tuple[Any, ...]:
    """Return what a forward returns, a tensor, a tuple or a list, as a tuple."""
    return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
