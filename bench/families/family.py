"""A family of models, as bench and the tests build it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Sizes = dict[str, Any]


@dataclass(eq=False)
class Family:
    """One kind of model, of real width or small.

    Attributes:
        prefix: the beginning of the names of its classes in ``transformers.models.<folder>``.
        inputs: makes the arguments of the forward, a function of ``inputs.py``.
        small, real: what differs from the defaults of the config, which are those of a published model.
        folder: if it is not the name.
        part: the end of the name of the model's class.
        config: the name of the config's class, if it is not prefix and "Config".
        layers: the settings that count layers.
        stock: the implementations that the model has, first the one that computes what the model is meant to.
        alone: makes a part that transformers has no model of, from a config.
        around: makes a larger model around this one, from its config.
        writer: the class that generates tokens with a cache.
        pieces: of a model with a cache and no such class, the argument that may come in pieces, and their lengths.
        padding_matters: whether the output at padding, and its gradients, are those of the stock model.
        variants: arguments of build for models that have further classes.
    """

    name: str
    prefix: str
    inputs: Callable[[Any, int, torch.Tensor], dict[str, Any]]
    small: Sizes
    real: Sizes = field(default_factory=dict)
    folder: str = ""
    layers: tuple[str, ...] = ("num_hidden_layers",)
    stock: tuple[str, ...] = ("eager", "sdpa")
    alone: Callable[[Any], nn.Module] | None = None
    around: Callable[[Any], nn.Module] | None = None
    writer: str | None = None
    pieces: tuple[str, tuple[int, ...]] | None = None
    padding_matters: bool = True
    variants: tuple[Sizes, ...] = ()
    part: str = "Model"
    config: str = ""

    def __post_init__(self) -> None:
        self.folder, self.config = self.folder or self.name, self.config or f"{self.prefix}Config"

    @property
    def model(self) -> str:
        """The name of the model's class."""
        return self.prefix + self.part

    def build(
        self,
        *,
        small: bool = False,
        layers: int = 1,
        implementation: str | None = None,
        make: Callable[[Any], nn.Module] | None = None,
        **changes: Any,
    ) -> nn.Module:
        """A model in eval mode, initialised by torch's generator.

        make: makes another model from the config. changes: further settings of the config.
        """
        sizes = {**(self.small if small else self.real), **dict.fromkeys(self.layers, layers), **changes}
        configurations = importlib.import_module(f"transformers.models.{self.folder}.configuration_{self.folder}")
        config = getattr(configurations, self.config)(**sizes)
        config._attn_implementation = implementation or self.stock[0]
        model = (make or self.alone or self.find(self.model))(config)
        if not isinstance(model, importlib.import_module("transformers").PreTrainedModel):
            for module in model.modules():  # a part of a model, which its own initialisation does not reach
                if isinstance(module, nn.Embedding):
                    nn.init.normal_(module.weight, std=config.initializer_range)
        return model.eval()

    def find(self, name: str) -> Any:
        """The class of this name that the family's file has."""
        return getattr(importlib.import_module(f"transformers.models.{self.folder}.modeling_{self.folder}"), name)

    def make(self, model: nn.Module, length: int, lengths: list[int]) -> dict[str, Any]:
        """The arguments of the model's forward for sequences of these lengths, padded to length, as its attention counts them."""
        return self.inputs(model.config, length, torch.tensor(lengths))
