"""Proof that modules compute what those in whose place they stand compute: small models side by side, in float64, on the CPU.

A :class:`Case` is a model and what is computed with it. :func:`prove` computes it twice, before and after the model is changed,
and raises :class:`Disproved` if the results differ. :func:`remember` keeps in the folder of the user's files that a proof
has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .._core import cache
from .comparison import LIMIT, Results, apart, difference_of, first_line, with_gradients
from .comparison import Differs as Disproved
from .comparison import promoted as float32_is_float64


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
    return max(difference_of(f"{case.name}, {name}", ours[name], stock[name], LIMIT) for name in case.runs)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


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
    numbers = {name: each for name, each in given.items() if isinstance(each, torch.Tensor) and each.is_floating_point()}
    inputs = {name: each.requires_grad_() for name, each in numbers.items() if "mask" not in name}
    with float32_is_float64():
        made = model(**{**given, **{name: each.clone() for name, each in inputs.items()}})
        leaves = {**{name: each for name, each in model.named_parameters() if each.requires_grad}, **inputs}
        return with_gradients(counted(main_output(made), counts), leaves)


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
