"""Learned relative position attention in linear memory.

fused_relative_attention          softmax(scale * (Q K^T + S)) V with S[i, j] = q_i . E[j - i], and more such terms and masks
fused_relative_attention_varlen   the same for sequences packed one after the other
RelativePositions                 the relative positions that the rows of a table stand for
merge_attention                   merge attention over two parts of the keys
can_run_triton                    tell whether the Triton kernels can serve given tensors
tables                            conversions from other table layouts
nn, plots, distributed            modules, pictures, sequences over several devices: imported by their names
"""

from . import tables
from ._core.implementations import can_run_triton
from .functional import fused_relative_attention, fused_relative_attention_varlen
from .merging import merge_attention
from .positions import RelativePositions

__all__ = [
    "RelativePositions",
    "can_run_triton",
    "fused_relative_attention",
    "fused_relative_attention_varlen",
    "merge_attention",
    "tables",
]
__version__ = "0.1.0"
