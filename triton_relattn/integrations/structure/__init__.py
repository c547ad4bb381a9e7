"""Relative attention that is found by its structure: parameters, children and arguments, in any module of any library or none.

A kind is a file: how a module is read, what is computed in place of its forward, and arguments for a comparison.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..._core.removed import refuse
from ..comparison import Refused
from ..enabled import STRUCTURE, Match
from ..shadow import projections
from .enformer import DistanceFeatures
from .grid import DecomposedPositions
from .kind import Kind
from .music import PastRows
from .not_served import recognised
from .shaw import ClippedDistances
from .transformer_xl import ProjectedPositions
from .vits import WindowedVectors
from .wavlm import GatedBuckets

KINDS: tuple[type[Kind], ...] = (
    WindowedVectors,
    ProjectedPositions,
    DistanceFeatures,
    DecomposedPositions,
    ClippedDistances,
    PastRows,
    GatedBuckets,
)


def find(module: nn.Module) -> Match | None:
    """Return the kind of a stock module, or what else it is recognised as; None if it is most likely something else."""
    if type(module).__module__.startswith("torch.nn.") or isinstance(module, torch.jit.ScriptModule):
        return None
    try:
        for kind in KINDS if projections(module) else ():
            if next(kind.layouts(module), None) is not None:
                return Match(kind.title, STRUCTURE, kind)
    except Refused as refused:
        return Match("relative attention", STRUCTURE, reason=str(refused))
    except Exception:  # an attribute may raise anything
        return None
    other = recognised(module)
    return None if other is None else Match(other.title, STRUCTURE, reason=other.instead)


if not TYPE_CHECKING:
    __getattr__ = partial(refuse, __name__)

__all__ = ["KINDS", "find"]
