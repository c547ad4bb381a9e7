"""What an implementation is. The operators, the choice, DTensor and context parallelism ask it; none of them knows its name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from .._core.grids import GridTensors
from .._core.spec import AttentionSpec, AttentionTensors

Gradients: TypeAlias = "tuple[torch.Tensor | None, ...]"
"""Of spec.DIFFERENTIABLE, or of the first tensors of a call on a grid; None where not wanted or not there."""


class Results(NamedTuple):
    """What a forward gives. The last two are for the backward; of no elements if it does without."""

    out: torch.Tensor  # (B, Hq, Nq, Dv)
    lse: torch.Tensor  # (B, Hq, Nq)
    softmax_stats: torch.Tensor  # (B, Hq, 2, Nq)
    kept: torch.Tensor  # what an implementation keeps to save the backward work


class Saved(NamedTuple):
    """Results of the forward as the backward gets them; None for those that it does without."""

    out: torch.Tensor | None
    softmax_stats: torch.Tensor | None
    kept: torch.Tensor | None


class Implementation:
    """One way to compute attention. Methods get tensors and scalars that have been validated."""

    name: str
    is_dense = False
    """It has no operator: autograd differentiates its torch functions, in memory that grows with Nq * Nk."""
    saves_statistics = False
    """The backward needs out and softmax_stats."""
    skips_lse = False
    """It saves time where lse is not used."""

    def why_not(self, query: torch.Tensor, value: torch.Tensor, rel_query: torch.Tensor | None = None) -> str | None:
        """Return why it cannot serve these tensors, with what to do about it; None if it can."""
        return None

    def warn(self, device: torch.device) -> None:
        """Warn of what a user should know before the first call on a device."""

    def attend(self, tensors: AttentionTensors, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse, if it is dense."""
        raise NotImplementedError

    def keeps(self, tensors: AttentionTensors, spec: AttentionSpec) -> bool:
        """Return whether the forward of a call that is differentiated keeps something for the backward."""
        raise NotImplementedError

    def empty_results(self, tensors: AttentionTensors, spec: AttentionSpec, keeps: bool) -> Results:
        """Allocate what forward returns; also of tensors without memory."""
        raise NotImplementedError

    def forward(self, tensors: AttentionTensors, spec: AttentionSpec, keeps: bool) -> Results:
        raise NotImplementedError

    def backward(
        self,
        d_out: torch.Tensor,
        d_lse: torch.Tensor | None,
        saved: Saved,
        tensors: AttentionTensors,
        spec: AttentionSpec,
        wanted: Sequence[bool],
    ) -> Gradients:
        raise NotImplementedError

    def empty_grid_results(self, tensors: GridTensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate what grid_forward returns; also of tensors without memory."""
        raise NotImplementedError

    def grid_forward(self, tensors: GridTensors, scale: float, dropout_p: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and softmax_stats of attention on a grid."""
        raise NotImplementedError

    def grid_backward(
        self,
        d_out: torch.Tensor,
        out: torch.Tensor | None,
        softmax_stats: torch.Tensor,
        tensors: GridTensors,
        scale: float,
        dropout_p: float,
        wanted: Sequence[bool],
    ) -> Gradients:
        raise NotImplementedError
