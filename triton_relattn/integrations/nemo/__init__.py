"""NeMo's ``RelPositionMultiHeadAttention``, and its encoder's masks, on :func:`triton_relattn.fused_relative_attention`."""

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
        "nemo.collections.asr.parts.submodules.multi_head_attention",
        "NeMo's Conformer",
        {"RelPositionMultiHeadAttention": "conformer.RelPositionMultiHeadAttention"},
    ),
    Source(
        "nemo.collections.asr.modules.conformer_encoder",
        "NeMo's Conformer",
        {"ConformerEncoder": "conformer.ConformerEncoder"},
    ),
    Source(
        "nemo.collections.asr.modules.transformer_encoder",
        "NeMo's TransformerEncoder",
        {"MultiHeadAttention": "transformer.MultiHeadAttention", "TransformerEncoder": "transformer.TransformerEncoder"},
    ),
)
LIBRARY = Library("nemo_toolkit", __name__, SOURCES)


@with_names
def enable(module: Any, *, lengths: int | Sequence[int] = 4096, check_calls: bool = True) -> Report:
    """Let NeMo's ``RelPositionMultiHeadAttention`` run on :func:`triton_relattn.fused_relative_attention`.

    The arguments, results and errors are those of :func:`triton_relattn.enable`, for the classes that docs/libraries.md lists.

    Example:
        >>> from triton_relattn.integrations.nemo import enable  # doctest: +SKIP
        >>> model = ASRModel.from_pretrained("nvidia/parakeet-ctc-1.1b")  # doctest: +SKIP
        >>> enable(model)  # doctest: +SKIP
        {'encoder': 'ConformerEncoder', 'encoder.layers.0.self_attn': 'RelPositionMultiHeadAttention', ...}
    """
    return enable_in(module, lengths, check_calls, ("nemo",), structures=False)
