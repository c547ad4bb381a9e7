"""Sizes that the small models of all libraries share, and the cases that they make."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from . import proof

WIDTH, HEADS, MEL = 32, 4, 20
LENGTH = 37
"""Frames, or tokens: no width of the small models, no multiple of a chunk, more than all windows and tables."""
LENGTHS = {"without padding": [LENGTH, LENGTH], "with padding": [LENGTH, 22]}


def cases(
    build: Callable[..., nn.Module],
    given: Callable[[int, list[int]], dict[str, Any]],
    settings: Mapping[str, dict[str, Any]],
    padding_matters: bool = True,
) -> tuple[proof.Case, ...]:
    """Return a case for each of the settings of a model, by name.

    given: makes arguments for sequences of these lengths, padded to a length. padding_matters: whether the outputs and gradients
    of padding are the stock model's.
    """

    def run(lengths: list[int], model: nn.Module) -> proof.Results:
        torch.default_generator.manual_seed(1)
        counts = None if padding_matters else (torch.arange(LENGTH) < torch.tensor(lengths)[:, None])[..., None]
        return proof.results(model, given(LENGTH, lengths), counts)

    runs = {name: functools.partial(run, lengths) for name, lengths in LENGTHS.items()}
    return tuple(
        proof.Case(name, lambda chosen=chosen: proof.varied(build(**chosen)), runs)  # type: ignore[misc]
        for name, chosen in settings.items()
    )
