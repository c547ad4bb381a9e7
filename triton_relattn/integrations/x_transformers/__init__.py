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
    Source("x_transformers.attend", "x-transformers' attention", {"Attend": "attend.Attend"}),
)
LIBRARY = Library("x-transformers", __name__, SOURCES)


@with_names
def enable(module: Any, *, lengths: int | Sequence[int] = 4096, check_calls: bool = True) -> Report:
    """Let attention of x-transformers that has a bias by distance run on :func:`triton_relattn.fused_relative_attention`.

    :func:`triton_relattn.enable` does the same for models of all libraries, and says how modules are compared before.

    Outputs and gradients are those of the stock classes, masks, caches, memories and grouped heads included. A module of biases
    then passes on a row per distance, and its attention uses it. Where stock attention does more than softmax (talking heads,
    memory keys and values, residual or selective attention in one module, a sink, another activation, two biases at once), the
    rows become the stock tensor, and all goes on as in the stock model.

    What differs: which probabilities dropout drops; a query of which mask and causality together hide all keys gets zero, not the
    mean of all values. Weights are not kept: what asks an enabled model for them (``return_attn``, ``attn_z_loss``,
    ``residual_attn``) raises ValueError.

    Args:
        module: a model, or a part of it. Models built with ``rel_pos_bias`` (T5's buckets), ``dynamic_pos_bias`` (an MLP of
            the distance), ``alibi_pos_bias`` or ``use_rel_proj_pos_bias`` (Inkling's) have such biases.
        lengths, check_calls: as there.

    Returns, Raises: as there, of these classes alone.

    Example:
        >>> from x_transformers import Encoder  # doctest: +SKIP
        >>> enable(Encoder(dim=64, depth=1, heads=2, rel_pos_bias=True))  # doctest: +SKIP
        {'rel_pos': 'RelativePositionBias', 'layers.0.1.attend': 'Attend'}
    """
    return enable_in(module, lengths, check_calls, ("x_transformers",), structures=False)
