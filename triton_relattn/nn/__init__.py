"""Modules for people who build models: they validate, project and call the functional operator.

RelativePositionTable         a learned table, with what its rows stand for
encodings                     what kinds of relative position add to a call: Shaw, Music Transformer, Transformer-XL, T5, ALiBi
RelativeAttention             attention with one of them
RelativeMultiheadAttention    the same with projections, in place of torch.nn.MultiheadAttention
parallel                      a plan for tensor parallelism
"""

from . import encodings, parallel
from .attention import RelativeAttention, RelativeMultiheadAttention
from .table import RelativePositionTable

__all__ = ["RelativeAttention", "RelativeMultiheadAttention", "RelativePositionTable", "encodings", "parallel"]
