"""One call of attention on a grid, resolved: the tensors and scalars that every implementation gets, and the query's terms."""

from __future__ import annotations

from typing import NamedTuple

import torch


class GridTensors(NamedTuple):
    """All tensors of a call, those with gradients first. Field names are also the operator's schema (see _operators.py).

    Positions before those of the grid (class tokens) have no terms: as many queries as keys.
    """

    query: torch.Tensor  # (B, H, prefix + query height * query width, D)
    key: torch.Tensor  # (B, H, prefix + key height * key width, D)
    value: torch.Tensor  # (B, H, prefix + key height * key width, Dv)
    rel_h: torch.Tensor  # (query height, key height, D), also in the compute dtype
    rel_w: torch.Tensor  # (query width, key width, D), also in the compute dtype
    dropout_seed: torch.Tensor | None = None
    dropout_origins: torch.Tensor | None = None  # as those of AttentionTensors

    @property
    def prefix(self) -> int:
        """Positions before those of the grid."""
        return self.query.shape[2] - self.rel_h.shape[0] * self.rel_w.shape[0]

    def by_place(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what belongs to the queries on the grid, (B, H, query height, query width, ...), of (B, H, N, ...)."""
        return rows[:, :, self.prefix :].unflatten(2, (self.rel_h.shape[0], self.rel_w.shape[0]))


class GridSpec(NamedTuple):
    """All of a call that is not a tensor. Field names and types are also the operator's schema (see _operators.py)."""

    scale: float  # factor of q.k
    dropout_p: float = 0.0  # dropout probability of the attention weights


def grid_terms(by_place: torch.Tensor, rel_h: torch.Tensor, rel_w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the terms of queries (B, H, query height, query width, D), with key height or key width in place of D."""
    return torch.einsum("bgyxd,ykd->bgyxk", by_place, rel_h), torch.einsum("bgyxd,xkd->bgyxk", by_place, rel_w)
