"""The attention of models of Hugging Face transformers on :func:`triton_relattn.fused_relative_attention`, or on
:func:`triton_relattn.decomposed_relative_attention`.

Classes of a model that have to act differently have subclasses of the same name. ``classes.py`` says what they do: a row has
the stock class and a general one, of a file of the family (``parakeet.py``, ...). :func:`enable` changes the classes
of a model's modules to these, and :func:`disable` changes them back. Nothing else of the model changes: parameters, hooks,
checkpoints and ``state_dict`` stay. No other model changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..._core.names import with_names
from ..._core.removed import refuse
from ..enable import disable, enable_in
from ..report import Report
from .classes import LIBRARY as LIBRARY
from .families import Family, supported_families

if not TYPE_CHECKING:
    __getattr__ = partial(refuse, __name__)

__all__ = ["Family", "disable", "enable", "supported_families"]


@with_names
def enable(module: Any, *, lengths: int | Sequence[int] = 4096, check_calls: bool = True) -> Report:
    """Let the relative attention in a model of Hugging Face transformers run on the operator.

    :func:`triton_relattn.enable` does the same for models of all libraries, and says how modules are compared before.

    That of vision encoders, on a grid, runs on :func:`triton_relattn.decomposed_relative_attention`.

    Outputs and gradients are those of the model's own forward, with its masks, dropout and training mode, whichever of eager and
    sdpa it was made with. Masks stay small: padding is (B, 1, 1, Nk). A 4-d mask that is given is used as it is. Layers that pass
    on their position bias (T5 and its descendants, WavLM, MPNet, SpeechT5) pass one row per distance; a stock layer among
    them gets the tensor that it expects. transformers 5.0 and later are served.

    Calls that ask for attention weights, with caches that were not compared, and short ones on a CPU are the stock forward's.

    What differs:

    - Dropout has the same rate and a different random stream.
    - An encoder that asks transformers for its mask has a view of its config, whose ``_attn_implementation`` names our function
      for masks. All else in the view is the config's. :func:`disable` puts the config back.
    - Rows of padding, and of queries that see nothing but padding. Stock models have the mean of some values there, or NaN; an
      enabled model has zeros, or attention to real keys. What is heard of real ones does not depend on them. Where it does, rows
      of padding are the stock model's: in Seamless M4T v2 with chunks, whose adapter mixes them with real ones, and in Parakeet,
      of which Nemotron H Omni reads one row too many.
    - Seamless M4T v2, Nemotron ASR streaming and Falcon stay stock in their eager implementation, which in this order adds a
      boolean mask to the logits, hides keys that should be seen, and adds the biases twice: make them with sdpa.

    Args:
        module: a model, or any part of it: an encoder, a layer, one attention. Models of the families that
            :func:`supported_families` lists can be anywhere inside.
        lengths, check_calls: as there.

    Returns, Raises: as there, of these classes alone.

    Example:
        >>> from transformers import VitsConfig, VitsModel
        >>> model = VitsModel(VitsConfig(num_hidden_layers=1, hidden_size=32, flow_size=32, num_attention_heads=2))
        >>> dict(enable(model))
        {'text_encoder.encoder': 'VitsEncoder', 'text_encoder.encoder.layers.0.attention': 'VitsAttention'}
        >>> sorted(disable(model).values())
        ['VitsAttention', 'VitsEncoder']
    """
    return enable_in(module, lengths, check_calls, ("transformers",), structures=False)
