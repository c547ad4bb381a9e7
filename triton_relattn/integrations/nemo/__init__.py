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
        {"RelPositionMultiHeadAttention": "attention.RelPositionMultiHeadAttention"},
    ),
    Source(
        "nemo.collections.asr.modules.conformer_encoder",
        "NeMo's Conformer",
        {"ConformerEncoder": "encoder.ConformerEncoder"},
    ),
)
LIBRARY = Library("nemo_toolkit", __name__, SOURCES)


@with_names
def enable(module: Any, *, lengths: int | Sequence[int] = 4096, check_calls: bool = True) -> Report:
    """Let NeMo's ``RelPositionMultiHeadAttention`` run on :func:`triton_relattn.fused_relative_attention`.

    :func:`triton_relattn.enable` does the same for models of all libraries, and says how modules are compared before.

    Outputs and gradients are those of the stock classes, with either ``use_pytorch_sdpa``, padding, dropout, caches for streaming
    and all contexts (``att_context_size`` regular, ``chunked_limited`` and ``chunked_limited_with_rc``). An enabled
    ``ConformerEncoder`` passes lengths, windows and chunks to its attention instead of a mask (B, T, T): memory is linear in T. A
    mask that another encoder makes is used as it is.

    What differs: which probabilities dropout drops: the same rate, another random stream. Attention that is local
    (``rel_pos_local_attn``) or has another kind of position, and encoders with adapters (``ConformerEncoderAdapter``), keep their
    own classes (of the latter, all but the attention). To export a model, disable it first.

    Args:
        module: a model, or any part of it: a ``ConformerEncoder``, a layer, one attention.
        lengths, check_calls: as there.

    Returns, Raises: as there, of these classes alone.

    Example:
        >>> from triton_relattn.integrations.nemo import enable  # doctest: +SKIP
        >>> model = ASRModel.from_pretrained("nvidia/parakeet-ctc-1.1b")  # doctest: +SKIP
        >>> enable(model)  # doctest: +SKIP
        {'encoder': 'ConformerEncoder', 'encoder.layers.0.self_attn': 'RelPositionMultiHeadAttention', ...}
    """
    return enable_in(module, lengths, check_calls, ("nemo",), structures=False)
