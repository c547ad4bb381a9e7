"""The attention of models of Hugging Face transformers on the operators. ``families.py`` lists models and classes; each of ours
is in the file of its family (``parakeet.py``, ...)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..._core.names import with_names
from ..._core.removed import refuse
from ..enable import disable, enable_in
from ..report import Report
from .families import LIBRARY as LIBRARY
from .families import Family, supported_families

if not TYPE_CHECKING:
    __getattr__ = partial(refuse, __name__)

__all__ = ["Family", "disable", "enable", "supported_families"]


@with_names
def enable(module: Any, *, lengths: int | Sequence[int] = 4096, check_calls: bool = True) -> Report:
    """Let the relative attention in a model of Hugging Face transformers run on the operator.

    The arguments, results and errors are those of :func:`triton_relattn.enable`, for the families that
    :func:`supported_families` lists; docs/transformers.md says what differs from the stock models.

    Example:
        >>> from transformers import VitsConfig, VitsModel
        >>> model = VitsModel(VitsConfig(num_hidden_layers=1, hidden_size=32, flow_size=32, num_attention_heads=2))
        >>> dict(enable(model))
        {'text_encoder.encoder': 'VitsEncoder', 'text_encoder.encoder.layers.0.attention': 'VitsAttention'}
        >>> sorted(disable(model).values())
        ['VitsAttention', 'VitsEncoder']
    """
    return enable_in(module, lengths, check_calls, ("transformers",), structures=False)
