"""Transformer-XL's terms with features of the distance that the module makes itself: Enformer and Borzoi.

Source: Avsec et al., "Effective gene expression prediction from sequence by integrating long-range interactions", 2021; Linder
et al., "Predicting RNA-seq coverage from DNA sequence as a unifying model of gene regulation", 2025.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...positions import RelativePositions
from .. import operators
from ..operators import join_heads, split_heads
from .kind import Kind, Reading, Sample, taken
from .roles import argument_roles, of_transformer_xl


class _Reached(Exception):
    """The stock forward has come to the projection of its features."""

    def __init__(self, features: torch.Tensor) -> None:
        super().__init__()
        self.features = features


class _Stop(nn.Module):
    """Stands in place of the projection, and ends the forward there."""

    def __init__(self, projection: Any) -> None:
        super().__init__()
        self.weight = projection.weight  # whose dtype and device the forward may ask for

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        raise _Reached(features)


class DistanceFeatures(Kind):
    """(q_i / sqrt(D) + u) . k_j + (q_i / sqrt(D) + v) . R[j - i]; R (H, 2N - 1, D), projected features of the distance.

    The features are the stock class's: its own forward makes them, of a batch without sequences, which takes no memory.
    """

    title = "Transformer-XL's terms of features of the distance (Enformer, Borzoi)"

    @classmethod
    def readings(cls, module: nn.Module) -> Iterator[Reading]:
        parts = of_transformer_xl(module)
        if parts is None or len(parts[1]) != 4:
            return
        roles, shape = parts
        options = (("width", shape[-1]),)
        for arguments in argument_roles(type(module).forward, ("states",)):
            if set(arguments.values()) == {"states"}:
                yield Reading(tuple(roles.items()), tuple(arguments.items()), options)

    @classmethod
    def examples(cls, module: Any, reading: Reading) -> Iterator[Sample]:
        channels = taken(module, reading)
        lengths = (1536,) if getattr(module, "use_tf_gamma", False) else (11, 5, 23)
        for length in lengths:
            batch = 1 if length > 1000 else 2
            states = torch.randn(batch, length, channels)
            yield Sample(f"{batch} sequences of {length}", {reading.argument("states"): states}, (length,) * 2)  # type: ignore[dict-item]

    @classmethod
    def prepare(cls, model: Any) -> None:
        for name, each in vars(model).items():
            if isinstance(each, torch.Tensor):  # Borzoi's features of the first length that it has seen
                vars(model)[name] = None

    def serves(self, module: Any, states: torch.Tensor) -> bool:
        """Return whether ours computes a call: torch.compile cannot trace how the features are made."""
        return states.dim() == 3 and not torch.compiler.is_compiling()

    def features(self, module: Any, states: torch.Tensor) -> torch.Tensor:
        """The features of all distances, (2N - 1, F), behind their dropout."""
        model = self.stock.__new__(self.stock)
        vars(model).update(vars(module))
        model._modules = {**module._modules, self.roles["position"]: _Stop(self.part(module, "position"))}
        try:
            self.stock.forward(model, states[:0])
        except _Reached as reached:
            return reached.features
        raise RuntimeError(f"{type(module).__name__} does not project features of the distance")

    def compute(self, module: Any, states: torch.Tensor) -> torch.Tensor:
        rel_key = self.child(module, "position", self.features(module, states))
        q, k = (split_heads(self.child(module, role, states), self.options["width"]) for role in ("query", "key"))
        v = self.child(module, "value", states).unflatten(-1, (q.shape[1], -1)).transpose(1, 2)
        rel_key = split_heads(rel_key[None], self.options["width"])
        last, width = states.shape[1] - 1, self.options["width"]
        u, v_bias = (self.part(module, name).reshape(-1, width) for name in ("content_bias", "position_bias"))
        out = operators.attend(
            q,
            k,
            v,
            rel_key,
            u * width**0.5,
            v_bias * width**0.5,
            RelativePositions(-last, last, "error"),
            width**-0.5,
            dropout_p=self.weights_dropout(module),
        )
        return self.output(module, join_heads(out))
