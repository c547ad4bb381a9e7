"""The faults: kernels, launchers, blockwise, grids, what all share, use, several ranks, models, bench."""

from __future__ import annotations

from ..fault import Fault
from .blockwise import OF_BLOCKWISE
from .cycles import OF_CYCLES
from .distributed import OF_DISTRIBUTED
from .everywhere import OF_ALL
from .gpu import OF_GPU
from .grids import OF_GRIDS
from .kernels import OF_COLUMNS, OF_FORWARD, OF_ROWS, OF_TABLE
from .key_splits import OF_KEY_SPLITS
from .key_terms import OF_KEY_TERMS
from .launchers import OF_LAUNCHERS
from .mirror import OF_MIRROR
from .models import OF_MODELS
from .query_from_ds import OF_QUERY_FROM_DS
from .tiles import OF_BAND, OF_MASKS, OF_QUADS
from .use import OF_USE
from .workspace import OF_WORKSPACE

FAULTS: tuple[Fault, ...] = (
    *OF_QUADS,
    *OF_BAND,
    *OF_FORWARD,
    *OF_MASKS,
    *OF_ROWS,
    *OF_COLUMNS,
    *OF_TABLE,
    *OF_WORKSPACE,
    *OF_QUERY_FROM_DS,
    *OF_KEY_TERMS,
    *OF_KEY_SPLITS,
    *OF_LAUNCHERS,
    *OF_BLOCKWISE,
    *OF_GRIDS,
    *OF_MIRROR,
    *OF_ALL,
    *OF_USE,
    *OF_DISTRIBUTED,
    *OF_CYCLES,
    *OF_GPU,
    *OF_MODELS,
)
