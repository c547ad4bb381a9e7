"""Relative attention that is found by its structure: parameters, children and arguments, in any module of any library or none.

A kind is a file: how a module is read, what is computed in place of its forward, and arguments for a comparison. ``not_served``
has what is recognised only.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..._core.removed import refuse
from ..shadow import projections
from .buckets import BucketedBias
from .enformer import DistanceFeatures
from .grid import DecomposedPositions
from .kind import Kind, Refused, enabled_class
from .music import PastRows
from .not_served import recognised
from .observation import observed
from .shaw import ClippedDistances
from .transformer_xl import ProjectedPositions
from .vits import WindowedVectors

KINDS: tuple[type[Kind], ...] = (
    WindowedVectors,
    ProjectedPositions,
    DistanceFeatures,
    DecomposedPositions,
    ClippedDistances,
    PastRows,
    BucketedBias,
)


def kind_of(module: nn.Module) -> type[Kind] | None:
    """Return the kind of a stock module, None if it is of none.

    Raises:
        Refused: it is of a kind, and cannot be served.
    """
    if isinstance(module, torch.jit.ScriptModule) or not projections(module):
        return None
    for kind in KINDS:
        if next(kind.layouts(module), None) is not None:
            return kind
    return None


if not TYPE_CHECKING:
    __getattr__ = partial(refuse, __name__)

__all__ = ["KINDS", "Kind", "Refused", "enabled_class", "kind_of", "observed", "recognised"]
