"""The dense reference as an implementation: every step is a line of the formula, and autograd differentiates it."""

from __future__ import annotations

import torch

from .._core.dtypes import without_autocast
from .._core.spec import AttentionSpec, AttentionTensors
from .._reference import resolved_reference
from .base import Implementation


class Dense(Implementation):
    """The reference, in O(Nq * Nk) memory."""

    name = "reference"
    is_dense = True

    def attend(self, tensors: AttentionTensors, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
        with without_autocast(tensors.query.device):
            return resolved_reference(tensors, spec)
