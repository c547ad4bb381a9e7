"""A family of models, as bench and the tests build it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Sizes = dict[str, Any]
# Vocabularies have nothing to do with attention, and the largest one would take most of the memory.
FEW_TOKENS = {"vocab_size": 1000}


@dataclass(frozen=True)
class Family:
    """One kind of model, of real width or small.

    model, config: their names in ``transformers.models.<folder>``. layers: the names of their numbers in the config. real, small:
    what differs from the defaults of the config, which are those of a published model. stock: the implementations that the model
    has, first the one that computes what the model means to. alone: makes a part that transformers has no model of.

    writer: the class of the same folder that writes tokens with a cache. pieces: of a model that has a cache and no such class,
    the argument that may come in pieces, and how long these are for LENGTH. padding_matters: whether the output at
    padding is the stock model's, and its gradients. variants: arguments of build for models that have further classes. around:
    makes a larger model around this one, of a further class, from its config.
    """

    name: str
    folder: str
    model: str
    config: str
    small: Sizes
    inputs: Callable[[Any, int, torch.Tensor], dict[str, Any]]
    real: Sizes = field(default_factory=dict)
    layers: tuple[str, ...] = ("num_hidden_layers",)
    stock: tuple[str, ...] = ("eager", "sdpa")
    alone: Callable[[Any], nn.Module] | None = None
    writer: str | None = None
    pieces: tuple[str, tuple[int, ...]] | None = None
    padding_matters: bool = True
    variants: tuple[Sizes, ...] = ()
    around: Callable[[Any], nn.Module] | None = None

    def build(
        self,
        *,
        small: bool = False,
        layers: int = 1,
        implementation: str | None = None,
        make: Callable[[Any], nn.Module] | None = None,
        **changes: Any,
    ) -> nn.Module:
        """A model in eval mode; torch's generator decides its parameters.

        make: makes another one of the config. changes: further settings of the config.
        """
        sizes = {**(self.small if small else self.real), **dict.fromkeys(self.layers, layers), **changes}
        config = self._find("configuration", self.config)(**sizes)
        config._attn_implementation = implementation or self.stock[0]
        model = (make or self.alone or self._find("modeling", self.model))(config)
        if not isinstance(model, importlib.import_module("transformers").PreTrainedModel):
            for module in model.modules():  # a part of a model, which its own initialisation does not reach
                if isinstance(module, nn.Embedding):
                    nn.init.normal_(module.weight, std=config.initializer_range)
        return model.eval()

    def find(self, name: str) -> Any:
        """The class of the family's file that has this name."""
        return self._find("modeling", name)

    def _find(self, kind: str, name: str) -> Any:
        return getattr(importlib.import_module(f"transformers.models.{self.folder}.{kind}_{self.folder}"), name)

    def make(self, model: nn.Module, length: int, lengths: list[int]) -> dict[str, Any]:
        """The arguments of the model's forward for sequences of these lengths, padded to length, as its attention counts them."""
        return self.inputs(model.config, length, torch.tensor(lengths))
