"""Replacement of a model's classes: :func:`enable` and :func:`disable`."""

from __future__ import annotations

import importlib

from torch import nn

from .families import FAMILIES


def _replacements(module: nn.Module) -> dict[type, type]:
    """Return the stock classes of the families that occur in module, each with the class here that replaces it."""
    files = {type(each).__module__ for each in module.modules()}
    found: dict[type, type] = {}
    for folder in (family.folder for family in FAMILIES if family.inside is None):
        if files & {f"transformers.models.{folder}.modeling_{folder}", f"{__package__}.{folder}"}:
            found |= importlib.import_module(f"{__package__}.{folder}").CLASSES
    return found


def _is_replaced(module: nn.Module, classes: dict[type, type]) -> bool:
    """Return whether to replace a module's class. Our class may exclude modules that have no relative term (``applies``)."""
    ours = classes.get(type(module))
    return ours is not None and getattr(ours, "applies", lambda _: True)(module)


def enable(module: nn.Module) -> dict[str, str]:
    """Let the relative attention in a model of Hugging Face transformers run on :func:`triton_relattn.fused_relative_attention`.

    That of vision encoders, on a grid, runs on :func:`triton_relattn.decomposed_relative_attention`.

    Args:
        module: a model, or any part of it: an encoder, a layer, one attention. Models of the families that
            :func:`supported_families` lists can be anywhere inside. Other models of the same class stay as they are.

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
    - Parakeet, Seamless M4T v2 in chunks, Granite Speech 5, causal models: queries that see no key, such as those of padding, see
      all keys evenly, as in eager. But dropout does not apply to them, and in causal models their gradients do not reach the
      logits. In WavLM and Nemotron they see nothing: their output is zero, where the stock models have NaN.
    - Layers that pass on their position bias (T5 and its descendants, WavLM, MPNet, SpeechT5) pass on a row for each distance.
    - SAM and its descendants: weights are None where the stock layers have them. Dropout is that of the implementation that the
      model was made with: their sdpa has none.
    - Phi-4 multimodal keeps its masks (B, N, N) if its config cuts audio into chunks (``chunk_size``; published models do not).

    Enable and disable a model as a whole: an encoder with only part of its attention enabled raises ValueError when it is called.
    Call ``enable`` before the model is sharded or gets hooks that replace ``forward`` (accelerate's ``device_map``).

    Raises:
        ValueError: nothing in module is of a known family, or a module to replace has a ``forward`` of its own.

    Example:
        >>> from transformers import VitsConfig, VitsModel
        >>> model = VitsModel(VitsConfig(num_hidden_layers=1, hidden_size=32, flow_size=32, num_attention_heads=2))
        >>> enable(model)
        {'text_encoder.encoder': 'VitsEncoder', 'text_encoder.encoder.layers.0.attention': 'VitsAttention'}
        >>> sorted(disable(model).values())
        ['VitsAttention', 'VitsEncoder']
    """
    classes = _replacements(module)
    replaced = {name: each for name, each in module.named_modules() if _is_replaced(each, classes)}
    if not replaced and not any(type(each) in classes.values() for each in module.modules()):
        known = ", ".join(f"{family.name} ({family.folder})" for family in FAMILIES)
        raise ValueError(f"{type(module).__name__} has no relative attention of a known family: {known}")
    for name, each in replaced.items():
        if "forward" in vars(each):
            raise ValueError(
                f"{name} ({type(each).__name__}) has a forward of its own, as hooks leave it: call enable before that"
            )
    for each in replaced.values():
        _change_class(each, classes[type(each)])
    return {name: type(each).__name__ for name, each in replaced.items()}


def disable(module: nn.Module) -> dict[str, str]:
    """Undo :func:`enable` in module and all inside it.

    Returns:
        The names of the modules that are stock again, and of their classes; empty if none was enabled.
    """
    classes = {ours: stock for stock, ours in _replacements(module).items()}
    replaced = {name: each for name, each in module.named_modules() if type(each) in classes}
    for each in replaced.values():
        _change_class(each, classes[type(each)])
    return {name: type(each).__name__ for name, each in replaced.items()}


def _change_class(module: nn.Module, new: type) -> None:
    """Change a module's class. Its attributes stay, except that a module which asks for masks gets a view of its config."""
    if getattr(type(module), "mask_function", None):
        module.config = getattr(module.config, "stock", module.config)  # unless it was replaced meanwhile
    module.__class__ = new
    if function := getattr(new, "mask_function", None):
        from .masks import view

        module.config = view(module.config, function)  # type: ignore[assignment]
