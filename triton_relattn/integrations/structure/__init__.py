"""Relative attention that is found by its structure: parameters, children and arguments, in any module of any library or none.

A kind is a file: how a module is read, the class in its place, and arguments for a proof. ``not_served`` has what is recognised
only.
"""

from __future__ import annotations

import ast
from dataclasses import astuple
from typing import Any

import torch
from torch import nn

from ..._core.cache import digest
from .. import proof
from . import sources
from .buckets import BucketedBias
from .enformer import DistanceFeatures
from .grid import DecomposedPositions
from .kind import Kind, Reading, Refused, made
from .not_served import of as not_served
from .proving import prove
from .roles import projections
from .shaw import ClippedDistances
from .state import name_of, state_of
from .transformer_xl import ProjectedPositions
from .vits import WindowedVectors

KINDS: tuple[type[Kind], ...] = (
    WindowedVectors,
    ProjectedPositions,
    DistanceFeatures,
    DecomposedPositions,
    ClippedDistances,
    BucketedBias,
)
_proven: dict[Any, tuple[type[nn.Module], float] | str] = {}
"""What proofs have found in this process: the class and the largest difference, or why there is none."""


def kind_of(module: nn.Module) -> type[Kind] | None:
    """Return the kind of a stock module, None if it is of none.

    Raises:
        Refused: it is of a kind, and cannot be served.
    """
    if isinstance(module, torch.jit.ScriptModule) or len(projections(module)) < 2:
        return None
    for kind in KINDS:
        if next(iter(kind.readings(module)), None) is not None:
            return kind
    return None


def replacement_of(kind: type[Kind], module: nn.Module) -> tuple[type[nn.Module], float]:
    """Return the class in place of a module's, and the largest difference of its proof, which may be a remembered one.

    Raises:
        Refused: no reading of it computes the same.
    """
    stock, state = type(module), name_of(state_of(module))
    found = _proven.get((kind, stock, state))
    if found is None:
        found = _remembered(kind, stock, state)
    if found is None:
        try:
            reading, difference = prove(kind, module)
            _remember(kind, stock, state, reading, difference)
            found = made(kind, stock, reading), difference  # type: ignore[arg-type]
        except Refused as refused:
            found = str(refused)
    _proven[kind, stock, state] = found
    if isinstance(found, str):
        raise Refused(found)
    return found


def _identity(kind: type[Kind], stock: type[nn.Module], state: str) -> str | None:
    """A name for a proof of a class, by its source and ours; None if the source is out of reach."""
    source = sources.of_class(stock)  # type: ignore[arg-type]
    return None if source is None else digest(source, sources.of_ours(), kind.__name__, state)


def _remember(kind: type[Kind], stock: type[nn.Module], state: str, reading: Reading, difference: float) -> None:
    identity = _identity(kind, stock, state)
    if identity is not None:
        proof.remember(identity, f"{stock.__module__}.{stock.__qualname__}, {kind.title}\n{(astuple(reading), difference)!r}")


def _remembered(kind: type[Kind], stock: type[nn.Module], state: str) -> tuple[type[nn.Module], float] | None:
    """The class of a proof that has passed for the same source and state, and its largest difference."""
    identity = _identity(kind, stock, state)
    said = None if identity is None else proof.recalled(identity)
    if said is None:
        return None
    reading, difference = ast.literal_eval(said.splitlines()[-1])
    return made(kind, stock, Reading(*reading)), difference  # type: ignore[arg-type]


__all__ = ["KINDS", "Kind", "Refused", "kind_of", "not_served", "replacement_of"]
