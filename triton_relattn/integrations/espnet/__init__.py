"""ESPnet's Conformers, and CosyVoice's copy of their attention, on :func:`triton_relattn.fused_relative_attention`."""

from __future__ import annotations

from torch import nn

from .. import replacement

__all__ = ["disable", "enable"]

SOURCES = (
    replacement.Source("espnet2.legacy.nets.pytorch_backend.transformer.attention", f"{__name__}.espnet2", "ESPnet's Conformer"),
    replacement.Source("espnet.nets.pytorch_backend.transformer.attention", f"{__name__}.espnet1", "ESPnet's Conformer"),
    replacement.Source("espnet2.asr.encoder.conformer_encoder", f"{__name__}.encoder", "ESPnet's Conformer"),
    replacement.Source("cosyvoice.transformer.attention", f"{__name__}.cosyvoice", "CosyVoice's attention"),
)

LIBRARY = replacement.Library(SOURCES, "class of ESPnet or CosyVoice: RelPositionMultiHeadedAttention", f"{__name__}.small")


def enable(module: nn.Module, prove: bool = True) -> dict[str, str]:
    """Let ESPnet's ``RelPositionMultiHeadedAttention`` run on :func:`triton_relattn.fused_relative_attention`; CosyVoice's, too.

    Args:
        module: a model, or any part of it: an encoder, a layer, one attention. Other models of the same class stay as they are.
            Checkpoints, parameters and hooks do, too.
        prove: with files of the library that are not those of a tested version, compare a small model with the stock one
            first, once; False skips that.

    Returns:
        What was replaced: the names of the modules, as ``module.named_modules()`` has them, and of their classes. Empty if all
        of it already was.

    Outputs and gradients are those of the stock classes, with ``zero_triu``, masks and dropout, and CosyVoice's caches. A mask of
    padding stays (B, 1, 1, T), and an enabled ``ConformerEncoder`` makes it without the (T, T) that the stock one makes it of. A
    mask for all pairs, (B, T, T), as CosyVoice makes one of chunks, is used as it is.

    What differs: which probabilities dropout drops; as many, of other random numbers. ``attn``, the weights that stock attention
    leaves in the module for pictures and for guided attention, is None. ``LegacyRelPositionMultiHeadedAttention`` is replaced if
    it has ``zero_triu``: without, its terms of the future are those of other queries.

    WeNet's class of this name has no relative term, and stays as it is.

    Raises:
        ValueError: nothing in module is of these classes, or a module to replace has a ``forward`` of its own.
        RuntimeError: the small model differs, or cannot be compared; module is as it was.

    Example:
        >>> from espnet2.asr.encoder.conformer_encoder import ConformerEncoder  # doctest: +SKIP
        >>> encoder = ConformerEncoder(80, num_blocks=1, macaron_style=True, rel_pos_type="latest")  # doctest: +SKIP
        >>> enable(encoder)  # doctest: +SKIP
        {'': 'ConformerEncoder', 'encoders.0.self_attn': 'RelPositionMultiHeadedAttention'}
    """
    return replacement.enable(module, LIBRARY, prove)


def disable(module: nn.Module) -> dict[str, str]:
    """Undo :func:`enable` in module and all inside it.

    Returns:
        The names of the modules that are stock again, and of their classes; empty if none was enabled.
    """
    return replacement.disable(module, LIBRARY)
