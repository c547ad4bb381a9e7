"""Attention as people have it in files of their own: what enable finds by its structure, and what it has to leave alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import triton_relattn

Maybe = torch.Tensor | None
enable = partial(triton_relattn.enable, by_structure=True)
"""What serves these modules, which are of no known library."""


def split_heads(states: torch.Tensor, heads: int) -> torch.Tensor:
    return states.unflatten(-1, (heads, -1)).transpose(1, 2)


def skewed(rows: torch.Tensor) -> torch.Tensor:
    """Turn scores (B, H, N, N), whose last column is distance 0, into terms by pair; future pairs get terms of other rows."""
    return F.pad(rows, (1, 0)).reshape(*rows.shape[:2], rows.shape[3] + 1, rows.shape[2])[:, :, 1:]


def by_distance(rows: torch.Tensor, first: int) -> torch.Tensor:
    """Turn terms by distance (..., N, 2N - 1), from distance 1 - N on, into terms by pair (..., N, N)."""
    length = rows.shape[-2]
    distance = torch.arange(length) - torch.arange(length)[:, None]
    return rows.gather(-1, (distance - first).expand(*rows.shape[:-2], length, length))


class SpeechBlock(nn.Module):
    """VITS' attention rewritten: convolutions, and windows of relative vectors for keys and values."""

    def __init__(self, shared: bool = True, sign: float = 1.0) -> None:
        super().__init__()
        self.heads, self.reach, self.sign = 2, 3, sign
        self.to_query, self.to_key, self.to_value, self.to_output = (nn.Conv1d(32, 32, 1) for _ in range(4))
        tables = 1 if shared else self.heads
        self.distance_keys, self.distance_values = (nn.Parameter(torch.randn(tables, 7, 16)) for _ in range(2))
        self.thin = nn.Dropout(0.1)

    def forward(self, signal: torch.Tensor, memory: torch.Tensor, m: Maybe = None) -> torch.Tensor:
        projected = self.to_query(signal), self.to_key(memory), self.to_value(memory)
        query, key, value = (split_heads(states.mT, self.heads) for states in projected)
        length = query.shape[2]
        distance = torch.arange(length) - torch.arange(length)[:, None]
        near, row = distance.abs() <= self.reach, (distance + self.reach).clamp(0, 2 * self.reach)
        scale = query.shape[-1] ** -0.5
        rows = (self.distance_keys[:, row] * near[..., None]).expand(self.heads, -1, -1, -1)
        scores = scale * (query @ key.mT + self.sign * torch.einsum("bhid,hijd->bhij", query, rows))
        if m is not None:
            scores = scores.masked_fill(m == 0, -1e4)
        weights = self.thin(scores.softmax(-1))
        rows = (self.distance_values[:, row] * near[..., None]).expand(self.heads, -1, -1, -1)
        out = weights @ value + torch.einsum("bhij,hijd->bhid", weights, rows)
        return self.to_output(out.transpose(1, 2).flatten(2).mT)  # type: ignore[no-any-return]


class ConformerAttention(nn.Module):
    """ESPnet's attention as copied into a project. legacy: its older shift, with N rows, which wraps around to rows of other
    queries. casts: positions may have another dtype than the weights, as in GigaAM."""

    def __init__(self, legacy: bool = False, past: bool = False, hides: bool = False, casts: bool = False) -> None:
        super().__init__()
        self.heads, self.legacy, self.past, self.hides, self.casts = 4, legacy, past, hides, casts
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(32, 32) for _ in range(4))
        self.pos_proj = nn.Linear(32, 32, bias=False)
        self.u_bias, self.v_bias = (nn.Parameter(torch.randn(4, 8)) for _ in range(2))
        self.dropout = nn.Dropout(0.1)

    def shifted(self, rows: torch.Tensor, keys: int) -> torch.Tensor:
        batch, heads, length, count = rows.shape
        padded = F.pad(rows, (1, 0)).view(batch, heads, count + 1, length)
        scores = padded[:, :, 1:].reshape(batch, heads, length, count)
        scores = scores if self.legacy else scores[..., :keys]
        return scores.tril() if self.past else scores

    def project(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pairs = (self.q_proj, query), (self.k_proj, key), (self.v_proj, value)
        return tuple(split_heads(projection(states), self.heads) for projection, states in pairs)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos_embedding: torch.Tensor, mask: Maybe) -> torch.Tensor:
        pos_embedding = pos_embedding.to(self.pos_proj.weight.dtype) if self.casts else pos_embedding
        p = split_heads(self.pos_proj(pos_embedding), self.heads)
        term = self.shifted((q + self.v_bias[:, None]) @ p.mT, k.shape[2])
        scores = ((q + self.u_bias[:, None]) @ k.mT + term) / math.sqrt(q.shape[-1])
        hidden = None if mask is None else mask[:, None] if self.hides else mask[:, None] == 0
        if hidden is not None:
            scores = scores.masked_fill(hidden, -1e30)
        weights = scores.softmax(-1) if hidden is None else scores.softmax(-1).masked_fill(hidden, 0.0)
        return self.out_proj((self.dropout(weights) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pos_embedding: torch.Tensor, mask: Maybe
    ) -> torch.Tensor:
        q, k, v = self.project(query, key, value)
        return self.attend(q, k, v, pos_embedding, mask)


class CachedConformerAttention(ConformerAttention):
    """ConformerAttention with a cache (1, H, cached keys, 2D), as in projects derived from wenet; it also returns the next
    cache."""

    def forward(self, query, key, value, pos_embedding, mask, cache=None):  # type: ignore[no-untyped-def]
        q, k, v = self.project(query, key, value)
        if cache is not None and cache.numel() > 0:
            k, v = (torch.cat((past, own), 2) for past, own in zip(cache.chunk(2, -1), (k, v), strict=True))
        return self.attend(q, k, v, pos_embedding, mask), torch.cat((k, v), -1)


class RowsPerSequence(ConformerAttention):
    """ConformerAttention whose position embeddings have one batch row per sequence."""

    def forward(self, query, key, value, pos_embedding, mask):  # type: ignore[no-untyped-def]
        assert len(pos_embedding) == len(query)
        return super().forward(query, key, value, pos_embedding, mask)


class GridAttention(nn.Module):
    """SAM's attention on a grid of tokens."""

    def __init__(self, width: int = 32, heads: int = 2, grid: tuple[int, int] = (6, 5), drop: float = 0.1) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.rel_pos_h, self.rel_pos_w = (nn.Parameter(torch.randn(2 * side - 1, width // heads)) for side in grid)
        self.after = nn.Dropout(drop)

    def rows(self, side: int, table: torch.Tensor) -> torch.Tensor:
        if len(table) != 2 * side - 1:
            table = F.interpolate(table.mT[None], size=2 * side - 1, mode="linear")[0].mT
        return table[torch.arange(side)[:, None] - torch.arange(side) + side - 1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, height, width, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, height * width, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        by_place = q.unflatten(2, (height, width))
        vertical = torch.einsum("bhyxd,yjd->bhyxj", by_place, self.rows(height, self.rel_pos_h))
        horizontal = torch.einsum("bhyxd,xjd->bhyxj", by_place, self.rows(width, self.rel_pos_w))
        terms = (vertical[..., :, None] + horizontal[..., None, :]).flatten(4).flatten(2, 3)
        out = (q.shape[-1] ** -0.5 * (q @ k.mT) + terms).softmax(-1) @ v
        return self.after(self.proj(out.transpose(1, 2).reshape(batch, height, width, -1)))  # type: ignore[no-any-return]


class ShawAttention(nn.Module):
    """Shaw's term by a gather. unscaled: added after the scale; sign: the factor of the term; parameter: a parameter instead of
    an embedding."""

    def __init__(
        self, furthest: int = 4, unscaled: bool = False, sign: float = 1.0, past_first: bool = False, parameter: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.furthest, self.unscaled, self.sign, self.past_first = 2, furthest, unscaled, sign, past_first
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(32, 32, bias=False) for _ in range(4))
        if parameter:
            self.vectors = nn.Parameter(torch.randn(2 * furthest + 1, 16))
        else:
            self.distances = nn.Embedding(2 * furthest + 1, 16)

    def forward(self, x: torch.Tensor, mask: Maybe = None) -> torch.Tensor:
        q, k, v = (split_heads(project(x), self.heads) for project in (self.wq, self.wk, self.wv))
        place = torch.arange(x.shape[1])
        distance = place[:, None] - place if not self.past_first else place - place[:, None]
        row = distance.clamp(-self.furthest, self.furthest) + self.furthest
        vectors = self.distances(row) if hasattr(self, "distances") else self.vectors[row]
        term = self.sign * torch.einsum("bhid,ijd->bhij", q, vectors)
        scale = q.shape[-1] ** -0.5
        scores = scale * (q @ k.mT) + term if self.unscaled else scale * (q @ k.mT + term)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], torch.finfo(scores.dtype).min)
        return self.wo((self.weigh(scores) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def weigh(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.softmax(-1)


class Altered(ShawAttention):
    """Shaw's attention whose result is change(module, out, x, mask)."""

    def __init__(self, change: Callable[..., Any], **settings: Any) -> None:
        super().__init__(**settings)
        self.change = change

    def forward(self, x: torch.Tensor, mask: Maybe = None) -> Any:
        return self.change(self, super().forward(x, mask), x, mask)


class StepByStep(ShawAttention):
    """Shaw's attention with two replaceable steps (module, tensor): one on the scores, one on the weights."""

    def __init__(
        self, scores: Callable[..., Any] = lambda _, scores: scores, weights: Callable[..., Any] = lambda _, weights: weights
    ) -> None:
        super().__init__()
        self.change_scores, self.change_weights, self.p = scores, weights, 0.0

    def weigh(self, scores: torch.Tensor) -> torch.Tensor:
        weights = self.change_weights(self, self.change_scores(self, scores).softmax(-1))
        return F.dropout(weights, self.p, self.training)


class FeatureAttention(nn.Module):
    """Enformer's attention: it computes the distance features itself, and its values are wider than its keys."""

    def __init__(self, width: int = 32, heads: int = 2, features: int = 6) -> None:
        super().__init__()
        self.heads, self.features = heads, features
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, heads * head_width, bias=False) for head_width in (8, 8, 12))
        self.to_out, self.to_rel_k = nn.Linear(heads * 12, width), nn.Linear(features, heads * 8, bias=False)
        self.rel_content_bias, self.rel_pos_bias = (nn.Parameter(torch.randn(1, heads, 1, 8)) for _ in range(2))
        self.pos_dropout, self.attn_dropout = nn.Dropout(0.1), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        q, k, v = (split_heads(project(x), self.heads) for project in (self.to_q, self.to_k, self.to_v))
        q = q * 8**-0.5
        distances = torch.arange(1 - length, length, device=x.device)[:, None]
        features = torch.exp(-distances.abs() / torch.arange(1.0, self.features + 1)) * (1 + distances.sign() / 3)
        rows = split_heads(self.to_rel_k(self.pos_dropout(features.to(x)))[None], self.heads)
        term = by_distance((q + self.rel_pos_bias) @ rows.mT, 1 - length)
        weights = self.attn_dropout(((q + self.rel_content_bias) @ k.mT + term).softmax(-1))
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MusicAttention(nn.Module):
    """The Music Transformer's attention with an embedding of the distances to the past, clipped, for each head."""

    def __init__(self, width: int = 32, heads: int = 4, rows: int = 40) -> None:
        super().__init__()
        self.num_heads, self.most = heads, rows
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width) for _ in range(4))
        self.E = nn.Embedding(rows, width)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Maybe = None) -> torch.Tensor:
        q, k, v = (split_heads(layer(states), self.num_heads) for layer, states in ((self.wq, q), (self.wk, k), (self.wv, v)))
        length = q.shape[2]
        rows = self.E(torch.arange(self.most - length, self.most).clamp(min=0))
        terms = skewed(q @ rows.unflatten(-1, (self.num_heads, -1)).transpose(0, 1).mT)
        scores = (q @ k.mT + terms) / q.shape[-1] ** 0.5
        scores = scores if mask is None else scores + mask * -1e9
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class JointMusicAttention(nn.Module):
    """Another Music Transformer attention: one weight for three projections, a table shared by the heads, sequence-first inputs,
    an additive mask, and returned weights."""

    def __init__(self, width: int = 32, heads: int = 4, rows: int = 200, drop: float = 0.1) -> None:
        super().__init__()
        self.num_heads, self.dropout = heads, drop
        self.in_proj_weight = nn.Parameter(torch.randn(3 * width, width) / 6)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj, self.Er = nn.Linear(width, width), nn.Parameter(torch.rand(rows, width // heads))

    def forward(self, query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None):  # type: ignore[no-untyped-def]
        parts = zip((query, key, value), self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3), strict=True)
        q, k, v = (split_heads(F.linear(*operands).transpose(0, 1), self.num_heads) for operands in parts)
        length, q = q.shape[2], q * q.shape[-1] ** -0.5
        is_past = torch.ones(length, length, dtype=torch.bool).tril().flip(1)
        terms = skewed((q @ self.Er[len(self.Er) - length :].mT).where(is_past, 0.0))
        scores = q @ k.mT + terms
        scores = scores if attn_mask is None else scores + attn_mask
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None], -math.inf)
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        out = self.out_proj((weights @ v).permute(2, 0, 1, 3).flatten(2))
        return out, weights.mean(1) if need_weights else None


class GatedAttention(nn.Module):
    """WavLM's attention, sequence first: the first layer computes the bucketed bias, and each layer multiplies it by a gate."""

    def __init__(self, width: int = 32, heads: int = 4, is_first: bool = True) -> None:
        super().__init__()
        self.heads, self.num_buckets, self.max_distance = heads, 16, 30
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))
        self.grep_linear, self.grep_a = nn.Linear(width // heads, 8), nn.Parameter(torch.randn(1, heads, 1, 1))
        self.relative_attention_bias = nn.Embedding(16, heads) if is_first else None

    def _relative_positions_bucket(self, distances: torch.Tensor) -> torch.Tensor:
        return triton_relattn.tables.t5_buckets(distances, self.num_buckets, self.max_distance)

    def forward(self, query, key, value, key_padding_mask=None, need_weights=True, position_bias=None):  # type: ignore[no-untyped-def]
        length, batch = query.shape[:2]
        if position_bias is None and self.relative_attention_bias is not None:
            distances = torch.arange(length) - torch.arange(length)[:, None]
            bias = self.relative_attention_bias(self._relative_positions_bucket(distances))
            position_bias = bias.permute(2, 0, 1).repeat(batch, 1, 1)
        pairs = (self.q_proj, query), (self.k_proj, key), (self.v_proj, value)
        q, k, v = (split_heads(project(states).transpose(0, 1), self.heads) for project, states in pairs)
        gates = self.grep_linear(split_heads(query.transpose(0, 1), self.heads)).unflatten(-1, (2, 4)).sum(-1)
        a, b = gates.sigmoid().chunk(2, dim=-1)
        gate = a * (b * self.grep_a - 1.0) + 2.0
        scores = q @ k.mT / math.sqrt(q.shape[-1]) + gate * position_bias.view(batch, self.heads, length, length)  # type: ignore[union-attr]
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None], -math.inf)
        weights = scores.softmax(-1)
        out = self.out_proj((weights @ v).permute(2, 0, 1, 3).flatten(2))
        return out, weights.mean(1) if need_weights else None, position_bias


class GatedLayers(nn.Module):
    """Two layers; the second gets the bias of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GatedAttention(), GatedAttention(is_first=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x, _, bias = self.first(x, x, x, mask, need_weights=False)
        return self.second(x, x, x, mask, need_weights=False, position_bias=bias)[0]  # type: ignore[no-any-return]


class Block(nn.Module):
    """Any attention inside a typical layer."""

    def __init__(self, attention: nn.Module, width: int = 32) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(self.norm(x))


class Adapter(nn.Module):
    """A linear layer with a low-rank correction, like an adapter."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)
        self.in_features, self.out_features = base.in_features, base.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def refusal(model: nn.Module) -> str:
    """Return, in one line, why enable replaces nothing in a model."""
    with pytest.raises(RuntimeError, match="was enabled; the model is unchanged") as caught:
        enable(model)
    return " ".join(str(caught.value).split())
