"""The relative biases of x-transformers on :func:`triton_relattn.fused_relative_attention`."""

from __future__ import annotations

from torch import nn

from .. import replacement

__all__ = ["disable", "enable"]

SOURCES = (
    replacement.Source("x_transformers.x_transformers", f"{__name__}.biases", "x-transformers' attention"),
    replacement.Source("x_transformers.attend", f"{__name__}.attend", "x-transformers' attention"),
)

LIBRARY = replacement.Library(SOURCES, "class of x-transformers: Attend and the modules of its biases", f"{__name__}.small")


def enable(module: nn.Module, prove: bool = True) -> dict[str, str]:
    """Let attention of x-transformers that has a bias by distance run on :func:`triton_relattn.fused_relative_attention`.

    Args:
        module: a model, or a part of it. Models built with ``rel_pos_bias`` (T5's buckets), ``dynamic_pos_bias`` (an MLP of the
            distance), ``alibi_pos_bias`` or ``use_rel_proj_pos_bias`` (Inkling's) have such biases.
        prove: with files of the library that are not those of a tested version, compare a small model with the stock one
            first, once; False skips that.

    Returns:
        What was replaced: the names of the modules, as ``module.named_modules()`` has them, and of their classes. Empty if all
        of it already was.

    Outputs and gradients are those of the stock classes, masks, caches, memories and grouped heads included. A module of biases
    then hands on a row for each distance, and its attention uses it. Where stock attention does more than softmax (talking heads,
    memory keys and values, residual or selective attention in one module, a sink, another activation, two biases at once), the
    rows become the stock tensor, and all goes on as in the stock model.

    What differs: which probabilities dropout drops; a query of which mask and causality together hide all keys gets zero, not the
    mean of all values. Weights are not kept: what asks an enabled model for them (``return_attn``, ``attn_z_loss``,
    ``residual_attn``) raises ValueError.

    Raises:
        ValueError: nothing in module is of these classes, or a module to replace has a ``forward`` of its own.
        RuntimeError: the small model differs, or cannot be compared; module is as it was.

    Example:
        >>> from x_transformers import Encoder  # doctest: +SKIP
        >>> enable(Encoder(dim=64, depth=1, heads=2, rel_pos_bias=True))  # doctest: +SKIP
        {'rel_pos': 'RelativePositionBias', 'layers.0.1.attend': 'Attend'}
    """
    return replacement.enable(module, LIBRARY, prove)


def disable(module: nn.Module) -> dict[str, str]:
    """Undo :func:`enable` in module and all inside it.

    Returns:
        The names of the modules that are stock again, and of their classes; empty if none was enabled.
    """
    return replacement.disable(module, LIBRARY)
