"""FlashAttention with learned relative positions.

fused_relative_attention          softmax(scale * (Q K^T + S)) V with S[i, j] = q_i . E[j - i], and more such terms and masks
fused_relative_attention_varlen   the same for sequences packed one after the other
RelativePositions                 the relative positions that the rows of a table stand for
decomposed_relative_attention     attention on a grid: q_i . R_h[y_i - y_j] + q_i . R_w[x_i - x_j]
append_decomposed_positions       those terms as further columns of query and key, for any other attention
merge_attention                   merge attention over two parts of the keys
enable, disable                   let the relative attention in any model run on these, where it computes the same
can_run_triton                    tell whether the Triton kernels can serve given tensors
tables                            conversions from other table layouts
nn, plots, distributed, testing   modules, pictures, sequences over several devices, inputs and budgets for tests
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import tables
from ._implementations import can_run_triton
from .functional import fused_relative_attention, fused_relative_attention_varlen
from .grids import append_decomposed_positions, decomposed_relative_attention
from .merging import merge_attention
from .positions import RelativePositions

if TYPE_CHECKING:
    from .integrations.enable import disable, enable

__all__ = [
    "RelativePositions",
    "append_decomposed_positions",
    "can_run_triton",
    "decomposed_relative_attention",
    "disable",
    "enable",
    "fused_relative_attention",
    "fused_relative_attention_varlen",
    "merge_attention",
    "tables",
]
__version__ = "0.4.0"


def __getattr__(name: str) -> Any:
    """Import what models need when it is first asked for."""
    if name in ("enable", "disable"):
        from .integrations import enable

        return getattr(enable, name)
    if name in ("distributed", "nn", "plots", "testing"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
