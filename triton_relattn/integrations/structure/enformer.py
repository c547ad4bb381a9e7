"""Transformer-XL's terms with features of the distance that the module makes itself: Enformer and Borzoi.

Source: Avsec et al., "Effective gene expression prediction from sequence by integrating long-range interactions", 2021; Linder
et al., "Predicting RNA-seq coverage from DNA sequence as a unifying model of gene regulation", 2025.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...positions import RelativePositions
from ..operators import attend, join_heads
from .kind import Kind, Reading
from .roles import transformer_xl_roles


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
    meanings = ()

    @classmethod
    def read(cls, module: nn.Module) -> Reading | None:
        parts = transformer_xl_roles(module)
        return (parts[0], {"width": (parts[1][-1],)}) if parts is not None and len(parts[1]) == 4 else None

    def sizes(self, module: Any) -> Iterable[tuple[int, int]]:
        return ((1, 1536),) if getattr(module, "use_tf_gamma", False) else ((2, 11), (2, 5), (2, 23))

    @classmethod
    def prepare_model(cls, model: Any) -> None:
        super().prepare_model(model)
        for name, value in vars(model).items():
            if isinstance(value, torch.Tensor):  # Borzoi's features of its first call's length
                vars(model)[name] = None

    def accepts(self, module: Any, states: torch.Tensor) -> bool:
        """Whether ours computes a call: torch.compile cannot trace how the features are made."""
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
        width, last = self.options["width"], states.shape[1] - 1
        q, k = self.project(module, query=states, key=states)
        v = self.part(module, "value")(states).unflatten(-1, (q.shape[1], -1)).transpose(1, 2)  # of another width
        (rel_key,) = self.project(module, position=self.features(module, states)[None])
        u, v_bias = (self.part(module, name).reshape(-1, width) * width**0.5 for name in ("content_bias", "position_bias"))
        positions = RelativePositions(-last, last, "error")
        out = attend(q, k, v, rel_key, u, v_bias, positions, width**-0.5, dropout_p=self.dropout_p(module))
        return self.output(module, join_heads(out))
