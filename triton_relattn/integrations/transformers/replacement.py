"""Replacement of a model's classes: :func:`enable` and :func:`disable`."""

from __future__ import annotations

from torch import nn

from .. import replacement
from .families import FAMILIES, columns_of
from .rows import ROWS

SOURCES = tuple(
    replacement.Source(
        f"transformers.models.{each.folder}.modeling_{each.folder}",
        f"{__package__}.{'rows' if each.folder in ROWS else each.folder}",
        each.name,
        columns_of(each),
    )
    for each in FAMILIES
    if each.inside is None
)
NAMES = "family: " + ", ".join(f"{each.name} ({each.folder})" for each in FAMILIES)
BESIDE = (
    *("masking_utils", "cache_utils", "configuration_utils", "modeling_utils", "modeling_layers"),
    *("utils.generic", "utils.output_capturing"),
)
LIBRARY = replacement.Library(SOURCES, NAMES, f"{__package__}.small.cases", tuple(f"transformers.{each}" for each in BESIDE))


def enable(module: nn.Module, prove: bool = True) -> dict[str, str]:
    """Let the relative attention in a model of Hugging Face transformers run on :func:`triton_relattn.fused_relative_attention`.

    That of vision encoders, on a grid, runs on :func:`triton_relattn.decomposed_relative_attention`.

    Args:
        module: a model, or any part of it: an encoder, a layer, one attention. Models of the families that
            :func:`supported_families` lists can be anywhere inside. Other models of the same class stay as they are.
        prove: with files of transformers that are not those of a tested version, compare a small model of the family with the
            stock one first: outputs, gradients, and steps with a cache. It takes seconds, and is remembered. False skips that.

    Returns:
        The replaced modules: their names, as in ``module.named_modules()``, and the names of their classes. Empty if all had
        been replaced before.

    Outputs and gradients are those of the model's own eager path, with its masks, dropout and training mode. No tensor of size
    Nq x Nk is made on the way: padding stays a mask (B, 1, 1, Nk). A 4-d mask that is given is used as it is.

    Differences:

    - Dropout drops as many weights, but chooses them by other random numbers.
    - Attention weights are not returned. ``output_attentions=True`` is an error if the model passes it to its attention. If
      transformers collects the weights, it gets none, as from its sdpa implementation, and there is a warning.
    - An encoder that asks transformers for its mask has a view of its config, whose ``_attn_implementation`` names our function
      for masks. All else in the view is the config's. :func:`disable` puts the config back.
    - Inkling with a ``StaticCache``: results are those without a cache. The stock model uses the terms of later queries.
    - Seamless M4T v2, Nemotron ASR streaming, Falcon: results are those of their sdpa implementation. The eager ones, in this
      order, add a bool mask to the logits, hide keys that should be seen, and add the biases twice.
    - Rows of padding, and of queries that see nothing but padding. Stock models have the mean of some values there, or NaN; an
      enabled model has zeros, or attention to real keys. What is heard of real ones does not depend on them. Where it does, rows
      of padding are the stock model's: in Seamless M4T v2 with chunks, whose adapter mixes them with real ones, and in Parakeet,
      of which Nemotron H Omni reads one row too many.
    - Layers that pass on their position bias (T5 and its descendants, WavLM, MPNet, SpeechT5) pass on a row for each distance.
    - SAM and its descendants: weights are None where the stock layers have them. Dropout is that of the implementation that the
      model was made with: their sdpa has none.
    - Phi-4 multimodal keeps its masks (B, N, N) if its config cuts audio into chunks (``chunk_size``; published models do not).

    Enable and disable a model as a whole: an encoder with only part of its attention enabled raises ValueError when it is called.
    Call ``enable`` before the model is sharded or gets hooks that replace ``forward`` (accelerate's ``device_map``).

    Raises:
        ValueError: nothing in module is of a known family, or a module to replace has a ``forward`` of its own.
        RuntimeError: the small model differs, or cannot be compared; module is as it was.

    Example:
        >>> from transformers import VitsConfig, VitsModel
        >>> model = VitsModel(VitsConfig(num_hidden_layers=1, hidden_size=32, flow_size=32, num_attention_heads=2))
        >>> enable(model)
        {'text_encoder.encoder': 'VitsEncoder', 'text_encoder.encoder.layers.0.attention': 'VitsAttention'}
        >>> sorted(disable(model).values())
        ['VitsAttention', 'VitsEncoder']
    """
    return replacement.enable(module, LIBRARY, prove)


def disable(module: nn.Module) -> dict[str, str]:
    """Undo :func:`enable` in module and all inside it.

    Returns:
        The names of the modules that are stock again, and of their classes; empty if none was enabled.
    """
    return replacement.disable(module, LIBRARY)
