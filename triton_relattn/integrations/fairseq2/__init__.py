"""fairseq2's relative attention on :func:`triton_relattn.fused_relative_attention`: Shaw's, and Transformer-XL's."""

from __future__ import annotations

from torch import nn

from .. import replacement

__all__ = ["disable", "enable"]

SOURCES = (
    replacement.Source("fairseq2.models.transformer.sdpa.shaw", f"{__name__}.shaw", "fairseq2's Shaw attention"),
    replacement.Source(
        "fairseq2.models.transformer.sdpa.relative", f"{__name__}.relative", "fairseq2's Transformer-XL attention"
    ),
)

LIBRARY = replacement.Library(SOURCES, "class of fairseq2: ShawRelativePositionSDPA, RelativePositionSDPA", f"{__name__}.small")


def enable(module: nn.Module, prove: bool = True) -> dict[str, str]:
    """Let ``ShawRelativePositionSDPA`` and ``RelativePositionSDPA`` run on :func:`triton_relattn.fused_relative_attention`.

    Args:
        module: a model, or any part of it: an encoder, a layer, one of these. Other models of the same class stay as they are.
            Checkpoints, parameters and hooks do, too.
        prove: with files of the library that are not those of a tested version, compare a small model with the stock one
            first, once; False skips that.

    Returns:
        What was replaced: the names of the modules, as ``module.named_modules()`` has them, and of their classes. Empty if all
        of it already was.

    Outputs and gradients are those of the stock classes. ``IdentityBias`` and ``CausalAttentionBias`` become lengths and
    windows; another bias is added as the tensor that it makes. Packed batches, which the stock classes refuse, are taken with the
    first two.

    What differs: queries that are padding see real keys, where in the stock classes they see padding. A call with
    ``needs_weights=True`` is left to the stock class.

    Raises:
        ValueError: nothing in module is of these classes, or a module to replace has a ``forward`` of its own.
        RuntimeError: the small model differs, or cannot be compared; module is as it was.

    Example:
        >>> from fairseq2.models.transformer import IdentityBias, ShawRelativePositionSDPA  # doctest: +SKIP
        >>> enable(ShawRelativePositionSDPA(64, 4, IdentityBias(), 16))  # doctest: +SKIP
        {'': 'ShawRelativePositionSDPA'}
    """
    return replacement.enable(module, LIBRARY, prove)


def disable(module: nn.Module) -> dict[str, str]:
    """Undo :func:`enable` in module and all inside it.

    Returns:
        The names of the modules that are stock again, and of their classes; empty if none was enabled.
    """
    return replacement.disable(module, LIBRARY)
