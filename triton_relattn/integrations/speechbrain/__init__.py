"""SpeechBrain's ``RelPosMHAXL`` on :func:`triton_relattn.fused_relative_attention`, and the masks of its ``TransformerASR``."""

from __future__ import annotations

from torch import nn

from .. import replacement

__all__ = ["disable", "enable"]

TITLE = "SpeechBrain's Conformer"
SOURCES = (
    replacement.Source("speechbrain.nnet.attention", f"{__name__}.attention", TITLE),
    replacement.Source("speechbrain.lobes.models.transformer.TransformerASR", f"{__name__}.transformer_asr", TITLE),
)

LIBRARY = replacement.Library(SOURCES, "class of SpeechBrain: RelPosMHAXL", f"{__name__}.small")


def enable(module: nn.Module, prove: bool = True) -> dict[str, str]:
    """Let SpeechBrain's ``RelPosMHAXL`` run on :func:`triton_relattn.fused_relative_attention`.

    Args:
        module: a model, or any part of it: a ``TransformerASR``, an encoder, one attention. Other models of the same class stay
            as they are. Checkpoints, parameters and hooks do, too.
        prove: with files of the library that are not those of a tested version, compare a small model with the stock one
            first, once; False skips that.

    Returns:
        What was replaced: the names of the modules, as ``module.named_modules()`` has them, and of their classes. Empty if all
        of it already was.

    Outputs and gradients are those of the stock class, with its scale 1/sqrt(embed_dim), masks and dropout. An enabled
    ``TransformerASR`` with a Conformer tells its encoder's attention of causality and chunks (``DynChunkTrainConfig``) instead of
    making a mask (T, T): memory is linear in T. A mask that is given is used as it is.

    What differs: which probabilities dropout drops; as many, of other random numbers. Weights are None, which stock attention
    returns by default. ``mask_pos_future`` has no effect, as in the stock class.

    Raises:
        ValueError: nothing in module is of these classes, or a module to replace has a ``forward`` of its own.
        RuntimeError: the small model differs, or cannot be compared; module is as it was.

    Example:
        >>> from speechbrain.nnet.attention import RelPosMHAXL  # doctest: +SKIP
        >>> enable(RelPosMHAXL(embed_dim=64, num_heads=4))  # doctest: +SKIP
        {'': 'RelPosMHAXL'}
    """
    return replacement.enable(module, LIBRARY, prove)


def disable(module: nn.Module) -> dict[str, str]:
    """Undo :func:`enable` in module and all inside it.

    Returns:
        The names of the modules that are stock again, and of their classes; empty if none was enabled.
    """
    return replacement.disable(module, LIBRARY)
