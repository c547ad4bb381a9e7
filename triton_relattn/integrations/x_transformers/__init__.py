"""The relative biases of x-transformers on :func:`triton_relattn.fused_relative_attention`."""

from __future__ import annotations

from ..enable import disable, enable
from ..libraries import Library, Source

__all__ = ["disable", "enable"]

SOURCES = (
    Source(
        "x_transformers.x_transformers",
        "x-transformers' attention",
        {
            "RelativePositionBias": "biases.RelativePositionBias",
            "DynamicPositionBias": "biases.DynamicPositionBias",
            "AlibiPositionalBias": "biases.AlibiPositionalBias",
            "RelativeProjPositionalBias": "biases.RelativeProjPositionalBias",
        },
    ),
    Source("x_transformers.attend", "x-transformers' attention", {"Attend": "biases.Attend"}),
)
LIBRARY = Library("x-transformers", __name__, SOURCES)
