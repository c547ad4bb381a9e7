"""Proof that modules compute what those in whose place they stand compute: small models side by side, in float64, on the CPU.

A :class:`Case` is a model and what is computed with it. :func:`prove` computes it twice, before and after the model is changed,
and raises :class:`Disproved` if the results differ. :func:`remember` keeps in the folder of the user's files that a proof
has passed.
"""

from __future__ import annotations

import contextvars
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .._core import cache

Results = dict[str, torch.Tensor]
T = TypeVar("T")
OUTPUT, GRADIENT = "the output", "the gradient of "
LIMIT = 2.0**-30
"""The largest difference that passes, as a share of a tensor's largest number: 64 times finer than float32's rounding, 2**-24, so
that no user of float32 can see it, and 2**23 times float64's, 2**-53, of which our small models make 2**9 at most."""


class Disproved(Exception):
    """A changed model computes something else; the message says what differs, and by how much.

    difference: as a share of the largest number; infinite if results cannot be compared.
    """

    def __init__(self, message: str, difference: float = float("inf")) -> None:
        super().__init__(message)
        self.difference = difference


@dataclass(frozen=True)
class Case:
    """A model to prove a change with.

    name: for messages. make: returns the model, unchanged, in float64 and eval mode. runs: what is computed with it, by name.
    """

    name: str
    make: Callable[[], nn.Module]
    runs: Mapping[str, Callable[[nn.Module], Results]]


def prove(cases: Iterable[Case], change: Callable[[nn.Module], object]) -> float:
    """Compare the results of each case's model before and after change, and return the largest difference.

    Whatever the caller has set for torch (modes, devices, autocast, its random state) has no effect, and stays.

    Raises:
        Disproved: they differ, or one of the two raises.
    """
    return apart(lambda: max(_difference(case, change) for case in cases))


def _difference(case: Case, change: Callable[[nn.Module], object]) -> float:
    try:
        model = case.make()
        stock = {name: run(model) for name, run in case.runs.items()}
    except Exception as error:
        raise Disproved(f"{case.name}: the stock model cannot be built and run as before ({_short(error)})") from error
    try:
        change(model)
        ours = {name: run(model) for name, run in case.runs.items()}
    except Disproved:
        raise
    except Exception as error:
        raise Disproved(f"{case.name}: the enabled model raises {_short(error)}") from error
    return max(compare(f"{case.name}, {name}", ours[name], stock[name]) for name in case.runs)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


def compare(name: str, ours: Results, stock: Results) -> float:
    """Return the largest difference, as a share of each tensor's largest number; of a gradient that cancels to nothing, of a
    hundredth of the largest gradient's.

    Raises:
        Disproved: it is above LIMIT; name is in the message.
    """
    if ours.keys() != stock.keys():
        raise Disproved(f"{name}: not the same results: {', '.join(sorted(ours.keys() ^ stock.keys()))}")
    largest = max((float(each.abs().max()) for what, each in stock.items() if what.startswith(GRADIENT)), default=0.0)
    worst = 0.0
    for what, expected in stock.items():
        found = ours[what]
        if found.shape != expected.shape:
            raise Disproved(f"{name}: {what} has the shape {tuple(found.shape)}, stock {tuple(expected.shape)}")
        size = max(float(expected.abs().max()), 1e-2 * largest if what.startswith(GRADIENT) else 0.0)
        difference = float((found.double() - expected.double()).abs().max()) / (size or 1.0)
        if not difference <= LIMIT:  # NaN, too
            message = f"{name}: {what} differs by {difference:.1e} of the largest number there, {LIMIT:.0e} is allowed"
            raise Disproved(message, difference)
        worst = max(worst, difference)
    return worst


def varied(model: nn.Module) -> Any:
    """Return the model in float64 and eval mode, all its parameters changed at random, so that none is zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.double().eval()


def results(model: nn.Module, given: Mapping[str, Any], counts: torch.Tensor | None = None) -> Results:
    """Return the output of a model, and the gradients of its parameters and inputs for a random gradient of the output.

    counts: positions of the output that are compared (B, N, 1), bool; the others are the model's own matter.
    """
    given = copied(given)
    inputs = differentiable(given)
    with float32_is_float64():
        made = model(**{**given, **{name: each.clone() for name, each in inputs.items()}})
        leaves = {**{name: each for name, each in model.named_parameters() if each.requires_grad}, **inputs}
        return with_gradients(counted(main_output(made), counts), leaves)


def differentiable(given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the arguments that have gradients, as leaves: numbers that are no mask."""
    return {
        name: each.requires_grad_()
        for name, each in given.items()
        if isinstance(each, torch.Tensor) and each.is_floating_point() and "mask" not in name
    }


def with_gradients(out: torch.Tensor, leaves: Mapping[str, torch.Tensor]) -> Results:
    """Return an output, and the gradients of leaves for a random gradient of it, which is the same in each call."""
    d_out = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(3))
    gradients = torch.autograd.grad(out, list(leaves.values()), d_out, allow_unused=True, materialize_grads=True)
    return {OUTPUT: out.detach(), **{GRADIENT + name: each for name, each in zip(leaves, gradients, strict=True)}}


def counted(out: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor:
    """Return an output (B, frames, C), zero where nothing counts.

    counts: (B, N, 1), bool. A frame may stand for several positions; it counts if they all do.
    """
    if counts is None:
        return out
    length, frames = counts.shape[1], out.shape[1]
    size = -(-length // frames)
    padded = nn.functional.pad(counts, (0, 0, 0, frames * size - length))
    return out.where(padded.unflatten(1, (frames, size)).all(2), 0.0)


def copied(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that a model may write to, numbers in float64."""
    return {
        name: (each.double() if each.is_floating_point() else each).clone() if isinstance(each, torch.Tensor) else each
        for name, each in given.items()
    }


def main_output(made: Any) -> torch.Tensor:
    """Return the main one of what a model returns: the last hidden states, or logits."""
    main: torch.Tensor = made if isinstance(made, torch.Tensor) else made[0]
    return main


class _Float32IsFloat64(TorchFunctionMode):
    """Functions of torch that are asked for float32 give float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if each is torch.float32 else each for each in args]
        kwargs = {name: torch.float64 if each is torch.float32 else each for name, each in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextmanager
def float32_is_float64() -> Iterator[None]:
    """Let the casts to float32 that models make give float64, in this thread."""
    with _Float32IsFloat64():
        yield


def apart(function: Callable[[], T]) -> T:
    """Call function where nothing that the caller has set for torch has an effect, and where it changes nothing of that.

    A thread of its own has no modes of torch, no autocast, no device but the CPU, and has gradients. Random numbers and the
    default dtype are those of all threads: they are put back.
    """
    threads = torch.get_num_threads()

    def call() -> T:
        torch.set_num_threads(threads)  # a new thread has as many as the machine
        with _kept():
            torch.set_default_dtype(torch.float32)
            torch.default_generator.manual_seed(0)
            return function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.Context().run, call).result()


@contextmanager
def _kept() -> Iterator[None]:
    """Put back the random states of the CPU, the default dtype and the filters of warnings."""
    dtype, drawn, numpy = torch.get_default_dtype(), random.getstate(), sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            random.setstate(drawn)
            if numpy:
                numpy.random.set_state(state)


FOLDER = "proofs"
_passed: dict[str, str] = {}
"""What was said of the proofs that this process remembers, whether it can write files or not."""


def is_remembered(identity: str) -> bool:
    """Return whether the proof of that name has passed, on this machine or for this user."""
    return recalled(identity) is not None


def recalled(identity: str) -> str | None:
    """Return what was said of the proof of that name when it passed, on this machine or for this user; None if it is not
    remembered."""
    return _passed[identity] if identity in _passed else cache.recall(FOLDER, identity)


def remember(identity: str, said: str) -> None:
    """Remember that the proof of that name has passed; said is for a reader of the file. A folder that cannot be written is no
    error."""
    _passed[identity] = said
    cache.remember(FOLDER, identity, said)
