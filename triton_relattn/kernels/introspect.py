"""The door for benchmarks and tools: what the kernels of a call are, in which configurations, and in which parts.

Call(tensors, spec) describes a call: its ``tile(kernel)`` is the configuration of one of ``selection.KERNELS``.
``planning.plan`` says what the workspace of its backward has, and in which parts. ``selection`` chooses configurations,
``architectures`` has the GPUs. forward and backward launch the kernels, grid_forward and grid_backward those of attention on a
grid. Nothing of the package imports this.
"""

from . import kernels_are_interpreted, tuning
from .backward import backward
from .call import Call
from .config import architectures, selection
from .config.architectures import ARCHITECTURES, architecture_of
from .config.tile_config import TileConfig
from .forward import forward
from .grid.backward import backward as grid_backward
from .grid.call import GridCall
from .grid.forward import forward as grid_forward
from .workspace import planning
from .workspace.stored import program_rows, query_step

__all__ = [
    "ARCHITECTURES",
    "Call",
    "GridCall",
    "TileConfig",
    "architecture_of",
    "architectures",
    "backward",
    "forward",
    "grid_backward",
    "grid_forward",
    "kernels_are_interpreted",
    "planning",
    "program_rows",
    "query_step",
    "selection",
    "tuning",
]
