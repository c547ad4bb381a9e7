"""Kinds of relative position, and the arguments that each adds to a call of the operator.

An encoding is a module that is called with ``(query, num_keys, query_offset=0, is_causal=False, scale=None)``, query
(B, H, Nq, D). It returns the query to attend with, and further arguments of :func:`triton_relattn.fused_relative_attention`. The
functions make encodings that are known by name; ``head_dim`` is the width of a head, and ``num_heads`` gives each head a table of
its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import tables
from .._core.dtypes import compute_dtype
from ..positions import RelativePositions
from .table import RelativePositionTable

Terms = tuple[torch.Tensor, dict[str, Any]]  # the query to attend with, and further arguments of the operator
Offset = int | torch.Tensor


class TableEncoding(nn.Module):
    """Learned tables with the same positions: rel_key, rel_value and rel_bias of the operator, each of them optional."""

    def __init__(
        self,
        rel_key: RelativePositionTable | None = None,
        rel_value: RelativePositionTable | None = None,
        rel_bias: RelativePositionTable | None = None,
    ) -> None:
        super().__init__()
        positions = [table.positions for table in (rel_key, rel_value, rel_bias) if table is not None]
        if not positions:
            raise ValueError("at least one of rel_key, rel_value and rel_bias is needed")
        if len(set(positions)) > 1:
            raise ValueError(f"all tables must have the same positions, got {positions}")
        self.rel_key, self.rel_value, self.rel_bias = rel_key, rel_value, rel_bias
        self.positions = positions[0]

    def forward(
        self, query: torch.Tensor, num_keys: int, query_offset: Offset = 0, is_causal: bool = False, scale: float | None = None
    ) -> Terms:
        by_name = {"rel_key": self.rel_key, "rel_value": self.rel_value, "rel_bias": self.rel_bias}
        terms: dict[str, Any] = {name: table(query.dtype) for name, table in by_name.items() if table is not None}
        return query, {**terms, "positions": self.positions}


class TransformerXLEncoding(nn.Module):
    """Projected sinusoids of the distance and two learned biases: ``(q + u) . k + (q + v) . (W sin(r))``, both scaled.

    Args:
        num_heads, head_dim: of the attention.
        embed_dim: width of the sinusoids, by default num_heads * head_dim.
        order: of :func:`triton_relattn.tables.sinusoids`: "interleaved" (Conformers) or "concatenated" (Transformer-XL).

    Parameters: ``linear_pos`` (no bias), ``pos_bias_u`` and ``pos_bias_v`` (num_heads, head_dim), names of Wav2Vec2-Conformer.
    Source: Dai et al., "Transformer-XL", 2019; Gulati et al., "Conformer", 2020.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        embed_dim: int | None = None,
        order: Any = "interleaved",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.order = num_heads, head_dim, order
        self.embed_dim = num_heads * head_dim if embed_dim is None else embed_dim
        self.linear_pos = nn.Linear(self.embed_dim, num_heads * head_dim, bias=False, device=device, dtype=dtype)
        self.pos_bias_u = nn.Parameter(torch.empty(num_heads, head_dim, device=device, dtype=dtype))
        self.pos_bias_v = nn.Parameter(torch.empty(num_heads, head_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all three parameters as glorot-uniform."""
        for parameter in self.parameters():
            nn.init.xavier_uniform_(parameter)

    def forward(
        self, query: torch.Tensor, num_keys: int, query_offset: Offset = 0, is_causal: bool = False, scale: float | None = None
    ) -> Terms:
        positions = all_positions(query, num_keys, query_offset, is_causal)
        sinusoids = tables.sinusoids(
            positions.first,
            positions.last,
            self.embed_dim,
            self.order,
            dtype=self.pos_bias_u.dtype,  # not of linear_pos, which may be wrapped or quantised: it is called and no more
            device=query.device,
        )
        rel_key = self.linear_pos(sinusoids).unflatten(-1, (-1, self.head_dim)).transpose(0, 1).to(query.dtype)
        query, rel_bias = tables.fold_transformer_xl(query, rel_key, self.pos_bias_u, self.pos_bias_v, scale)
        return query, {"rel_key": rel_key, "rel_bias": rel_bias, "positions": positions}

    def extra_repr(self) -> str:
        return f'num_heads={self.num_heads}, head_dim={self.head_dim}, order="{self.order}"'


class T5Encoding(nn.Module):
    """A learned number for each bucket of distances and each head, added to the unscaled logits.

    ``weight`` is (num_buckets, num_heads), T5's ``relative_attention_bias.weight``. T5 itself does not scale q.k: ``scale=1.0``.
    Source: Raffel et al., "T5", 2019.
    """

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.positions = RelativePositions(-max_distance, max_distance if bidirectional else 0)
        self.bidirectional = bidirectional
        tables.t5_buckets(torch.zeros(1, dtype=torch.int64), num_buckets, max_distance, bidirectional)  # raises if they are wrong
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)

    def forward(
        self, query: torch.Tensor, num_keys: int, query_offset: Offset = 0, is_causal: bool = False, scale: float | None = None
    ) -> Terms:
        distances = torch.arange(self.positions.first, self.positions.last + 1, device=query.device)
        buckets = tables.t5_buckets(distances, self.weight.shape[0], -self.positions.first, self.bidirectional)
        rel_bias = self.weight[buckets].T.to(compute_dtype(query.dtype))
        return query, {"rel_bias": rel_bias, "positions": self.positions}

    def extra_repr(self) -> str:
        buckets, heads = self.weight.shape
        return (
            f"num_heads={heads}, num_buckets={buckets}, max_distance={-self.positions.first}, bidirectional={self.bidirectional}"
        )


class ALiBiEncoding(nn.Module):
    """``-slope * |r|`` added to the logits, a slope per head. Source: Press et al., "ALiBi", 2021.

    Args:
        learned: make the slopes a parameter, ``slopes``. Keep it in float32 or more: 16 bits are too few for ``-slope * |r|``.
    """

    slopes: nn.Parameter | None

    def __init__(
        self,
        num_heads: int,
        learned: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        dtype = torch.promote_types(dtype or torch.float32, torch.float32)
        slopes = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype)) if learned else None
        self.register_parameter("slopes", slopes)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the slopes to those of ALiBi."""
        if self.slopes is not None:
            self.slopes.copy_(tables.alibi_slopes(self.num_heads))

    def forward(
        self, query: torch.Tensor, num_keys: int, query_offset: Offset = 0, is_causal: bool = False, scale: float | None = None
    ) -> Terms:
        positions = all_positions(query, num_keys, query_offset, is_causal)
        dtype = compute_dtype(query.dtype)
        if self.slopes is None:
            slopes = tables.alibi_slopes(self.num_heads, dtype=dtype, device=query.device)
        else:
            slopes = self.slopes.to(dtype)
        return query, {"rel_bias": tables.alibi_bias(slopes, positions.first, positions.last), "positions": positions}

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, learned={self.slopes is not None}"


def all_positions(query: torch.Tensor, num_keys: int, query_offset: Offset, is_causal: bool) -> RelativePositions:
    """Return positions that have a row for every pair of query and key, without the future if is_causal hides it."""
    if isinstance(query_offset, torch.Tensor):
        raise ValueError("this encoding makes a row for every distance, so query_offset must be an int, not a tensor")
    first, last = 1 - query.shape[-2] - query_offset, num_keys - 1 - query_offset
    if is_causal:
        last = min(last, 0)
    return RelativePositions(first, max(first, last))  # one row if no pair is seen


def shaw(head_dim: int, max_distance: int, num_heads: int | None = None, *, values: bool = True, **options: Any) -> TableEncoding:
    """Make tables for keys and, unless values is False, for values, with distances clipped at max_distance. Shaw et al., 2018."""
    positions = RelativePositions(-max_distance, max_distance)
    rel_key, *others = (RelativePositionTable(positions, head_dim, num_heads, **options) for _ in range(2 if values else 1))
    return TableEncoding(rel_key, *others)


def music_transformer(head_dim: int, length: int, num_heads: int | None = None, **options: Any) -> TableEncoding:
    """Make a table with a row per distance to the past below ``length``, for causal attention. Huang et al., 2018."""
    return TableEncoding(RelativePositionTable(RelativePositions(1 - length, 0), head_dim, num_heads, **options))


def general(head_dim: int, length: int, num_heads: int | None = None, **options: Any) -> TableEncoding:
    """Make a table with a row per distance below ``length``, past and future."""
    return TableEncoding(RelativePositionTable(RelativePositions(1 - length, length - 1), head_dim, num_heads, **options))
