"""A call, resolved: the tensors and scalars that every implementation gets, over a sequence and on a grid."""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionTensors(NamedTuple):
    """All tensors of a call, those with gradients first. Field names are also the operator's schema (see _operators.py).

    With cu_seqlens the batch is packed: query, key, value and rel_query hold all sequences one after the other in a single
    batch entry.

    Tables may also be in the compute dtype, for gradients that are still to be added up; products take them in that of query.
    """

    query: torch.Tensor  # (B, Hq, Nq, D)
    key: torch.Tensor  # (B, Hk, Nk, D)
    value: torch.Tensor  # (B, Hk, Nk, Dv)
    rel_query: torch.Tensor | None = None  # (B, Hq, Nq, Dr); None: query
    rel_key: torch.Tensor | None = None  # (R, Dr) or (Hq, R, Dr)
    rel_value: torch.Tensor | None = None  # (R, Dv) or (Hq, R, Dv)
    rel_bias: torch.Tensor | None = None  # (R,) or (Hq, R)
    rel_p2c: torch.Tensor | None = None  # (R, D) or (Hq, R, D)
    attn_mask: torch.Tensor | None = None  # 4-d, sizes as (B, Hq, Nq, Nk) or 1
    key_lengths: torch.Tensor | None = None  # (B,)
    query_offsets: torch.Tensor | None = None  # (B,); instead of AttentionSpec.query_offset
    cu_seqlens_q: torch.Tensor | None = None  # (B + 1,)
    cu_seqlens_k: torch.Tensor | None = None  # (B + 1,)
    dropout_seed: torch.Tensor | None = None  # (1,) int64
    dropout_origins: torch.Tensor | None = None  # (B, Hq, 4) int64: sequence, head, first query and first key as dropout counts

    @property
    def has_table(self) -> bool:
        return any(getattr(self, name) is not None for name in TABLES)

    @property
    def num_sequences(self) -> int:
        return self.query.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1


TABLES = ("rel_key", "rel_value", "rel_bias", "rel_p2c")
"""Names of the tensors with a row per relative position, in their order."""


def is_per_head(name: str, table: torch.Tensor) -> bool:
    """Return whether one of TABLES has rows per head, (Hq, R, ...), and not rows that the heads share, (R, ...)."""
    return table.ndim > 1 + (name != "rel_bias")


DIFFERENTIABLE = AttentionTensors._fields[:8]  # names of the tensors that have gradients, in their order


class AttentionSpec(NamedTuple):
    """All of a call that is not a tensor. Field names and types are also the operator's schema (see _operators.py)."""

    scale: float  # factor of q.k
    rel_scale: float  # factor of p.E and k.F
    first: int  # relative position of the tables' row 0
    last: int  # relative position of the tables' last row
    clamp: bool  # beyond first and last the end row applies (True), or no relative term (False)
    window_left: int  # keys with a relative position below -window_left are hidden; -1: none are
    window_right: int  # keys with a relative position above window_right are hidden; -1: none are. A causal mask is 0.
    query_offset: int  # query i stands at key position i + query_offset
    max_seqlen_q: int  # number of queries of the longest sequence
    max_seqlen_k: int  # number of keys of the longest sequence
    softcap: float | None = None  # logits are limited smoothly to +-softcap
    dropout_p: float = 0.0  # dropout probability of the attention weights
    with_lse: bool = True  # compute lse; else implementations return None, and operators (B, Hq, 0)

    def coverage(self, has_one_offset: bool = True) -> str:
        """Return "full" if the tables have a row for every visible pair; else "clamp" or "zero", what applies beyond their
        ends."""
        farthest_past, farthest_future = self.farthest(has_one_offset)
        if self.first <= farthest_past and farthest_future <= self.last:
            return "full"
        return "clamp" if self.clamp else "zero"

    def farthest(self, has_one_offset: bool = True) -> tuple[int, int]:
        """Return the lowest and the highest relative position that a visible pair may have; exchanged if there is none."""
        farthest_past = -(self.max_seqlen_q - 1) - self.query_offset if has_one_offset else -(2**31)
        farthest_future = self.max_seqlen_k - 1 - self.query_offset if has_one_offset else 2**31
        if self.window_left >= 0:
            farthest_past = max(farthest_past, -self.window_left)
        if self.window_right >= 0:
            farthest_future = min(farthest_future, self.window_right)
        return farthest_past, farthest_future


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
