"""The relative biases of x-transformers on :func:`triton_relattn.fused_relative_attention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..._core.names import with_names
from ..enable import disable, enable_in
from ..libraries import Library, Source
from ..report import Report

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


@with_names
def enable(module: Any, *, lengths: int | Sequence[int] = 4096, check_calls: bool = True) -> Report:
    """Let attention of x-transformers that has a bias by distance run on :func:`triton_relattn.fused_relative_attention`.

    The arguments, results and errors are those of :func:`triton_relattn.enable`, for the classes that docs/libraries.md lists.

    Example:
        >>> from x_transformers import Encoder  # doctest: +SKIP
        >>> enable(Encoder(dim=64, depth=1, heads=2, rel_pos_bias=True))  # doctest: +SKIP
        {'rel_pos': 'RelativePositionBias', 'layers.0.1.attend': 'Attend'}
    """
    return enable_in(module, lengths, check_calls, ("x_transformers",), structures=False)
