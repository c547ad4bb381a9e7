"""Modules for people who build models: they validate, project and call the functional operator.

RelativePositionTable         a learned table that knows the relative positions of its rows
encodings                     kinds of relative position: Shaw, Music Transformer, Transformer-XL, T5, ALiBi
RelativeAttention             attention with one of these encodings
RelativeMultiheadAttention    the same with projections, in place of torch.nn.MultiheadAttention
"""

from . import encodings
from .attention import RelativeAttention, RelativeMultiheadAttention
from .table import RelativePositionTable

__all__ = ["RelativeAttention", "RelativeMultiheadAttention", "RelativePositionTable", "encodings"]
