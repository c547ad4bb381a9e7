"""The faults: in the kernels, their launchers, the blockwise path, what all share, and in models."""

from __future__ import annotations

from ..fault import Fault
from .everywhere import OF_ALL, OF_BLOCKWISE
from .kernels import OF_COLUMNS, OF_FORWARD, OF_ROWS, OF_TABLE
from .launchers import OF_LAUNCHERS
from .models import OF_MODELS
from .tiles import OF_BAND, OF_MASKS, OF_QUADS

FAULTS: tuple[Fault, ...] = (
    *OF_QUADS,
    *OF_BAND,
    *OF_FORWARD,
    *OF_MASKS,
    *OF_ROWS,
    *OF_COLUMNS,
    *OF_TABLE,
    *OF_LAUNCHERS,
    *OF_BLOCKWISE,
    *OF_ALL,
    *OF_MODELS,
)
