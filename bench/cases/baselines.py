"""Baselines, what people write today: relative attention in plain torch, differentiated by autograd, in quadratic memory.

Each function takes ``(query, key, value, table, is_causal)`` with query, key, value (B, H, N, D) and one table (R, D) shared by
the heads, R odd, whose middle row stands for r = 0: 2N - 1 rows, one for every distance, or fewer, the outermost of which serve
all distances beyond; and computes

    softmax((Q K^T + S) / sqrt(D)) V        S[i, j] = q_i . E[j - i]

They differ in how S, (B, H, N, N), comes about. Each is written as well as the method allows: the scale goes into the query
(N D numbers instead of N^2), additions are in place where autograd permits, and the causal forms leave out the future half
of the table where the method can. Memory is what has to be held on the way to S; every method but the last also keeps
the (B, H, N, N) probabilities for the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional

Baseline = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]


def _scaled_query(query: torch.Tensor, key: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """query / sqrt(D), after a check of the shapes."""
    length, width = query.shape[-2:]
    rows = table.shape[0]
    if key.shape[-2] != length or table.shape[1:] != (width,) or rows % 2 == 0 or rows > 2 * length - 1:
        raise ValueError(
            f"a baseline needs as many keys as queries and a table (R, {width}), R odd and at most 2N - 1 = {2 * length - 1}, "
            f"got {key.shape[-2]} keys for {length} queries and a table {tuple(table.shape)}"
        )
    return query / math.sqrt(width)


def _row(length: int, num_rows: int, device: torch.device) -> torch.Tensor:
    """(N, N), the row of a table for j - i."""
    position = torch.arange(length, device=device)
    return (position - position[:, None] + num_rows // 2).clamp_(0, num_rows - 1)


def _hide_future(logits: torch.Tensor) -> torch.Tensor:
    """-inf where j > i, in place."""
    future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu_(1)
    return logits.masked_fill_(future, -math.inf)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, relative: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """softmax(Q K^T + S) V for a scaled query."""
    logits = query @ key.mT
    logits += relative
    if is_causal:
        logits = _hide_future(logits)
    return logits.softmax(-1) @ value


def _relative_by_skewing(query: torch.Tensor, table: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """S for a scaled query, by pad, reshape and slice of q_i . E[row]; with is_causal arbitrary where j > i.

    With one column of padding on the left, row i starts at 2N i and holds row c of the table at 2N i + c + 1; so S[i, j] stands
    at (2N - 1) i + j + N: N elements on, and read with rows that are one shorter. With is_causal, and only the past half of the
    table, it stands at N i + j + N: N elements on as well, and read with rows of N.
    """
    length = query.shape[-2]
    if table.shape[0] != 2 * length - 1:
        raise ValueError(f"skewing needs a row for every distance, 2N - 1 = {2 * length - 1}, got {table.shape[0]}")
    by_row = query @ (table[:length] if is_causal else table).mT
    return functional.pad(by_row, (1, 0)).flatten(-2)[..., length:].unflatten(-1, (length, by_row.shape[-1]))[..., :length]


def _relative_by_gathering(query: torch.Tensor, table: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """S for a scaled query, arbitrary where j > i with is_causal: then only the past half of the table is multiplied."""
    length = query.shape[-2]
    row = _row(length, table.shape[0], query.device)
    if is_causal:
        table = table[: table.shape[0] // 2 + 1]
        row = row.clamp_(max=table.shape[0] - 1)
    by_row = query @ table.mT
    return by_row.gather(-1, row.expand(*by_row.shape[:-1], length))


def shaw_gather(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor, is_causal: bool
) -> torch.Tensor:
    """A vector for every pair: ``S = einsum(q, E[j - i])``. Memory O(N^2 D + B H N^2).

    Source: Shaw et al., "Self-Attention with Relative Position Representations", 2018; the stock attention of Wav2Vec2-BERT
    with ``position_embeddings_type="relative_key"`` is written so.
    """
    query = _scaled_query(query, key, table)
    vectors = functional.embedding(_row(query.shape[-2], table.shape[0], query.device), table)
    return _attend(query, key, value, torch.einsum("bhid,ijd->bhij", query, vectors), is_causal)


def gather(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """A number for every query and row: ``S = (Q E^T).gather(j - i)``. Memory O(B H N (R + N)), half the rows if causal.

    Source: the disentangled attention of He et al., "DeBERTa", 2020, as its stock implementations compute it.
    """
    query = _scaled_query(query, key, table)
    return _attend(query, key, value, _relative_by_gathering(query, table, is_causal), is_causal)


def skewing(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """No gather: ``S = skew(Q E^T)`` by pad, reshape and slice. Memory O(B H N R), R = 2N - 1, or N if causal; full tables only.

    Source: Huang et al., "Music Transformer", 2018 (causal); Dai et al., "Transformer-XL", 2019 (``_rel_shift``).
    """
    query = _scaled_query(query, key, table)
    return _attend(query, key, value, _relative_by_skewing(query, table, is_causal), is_causal)


def relative_scores(query: torch.Tensor, key: torch.Tensor, table: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """S / sqrt(D), by skewing, or by a gather if the table is not full."""
    is_full = table.shape[0] == 2 * query.shape[-2] - 1
    to_scores = _relative_by_skewing if is_full else _relative_by_gathering
    return to_scores(_scaled_query(query, key, table), table, is_causal)


def dense_bias(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor, is_causal: bool) -> torch.Tensor:
    """S as the ``attn_mask`` of ``scaled_dot_product_attention``; by skewing, or by a gather if the table is not full.

    Memory O(B H N (R + N)).

    Source: the documentation of ``torch.nn.functional.scaled_dot_product_attention``: a float mask is added to the logits.
    """
    relative = relative_scores(query, key, table, is_causal)
    # A copy, once: the view keeps the padded (N, 2N) buffer alive, and torch's fused kernels want aligned rows.
    bias = relative.contiguous()
    if is_causal:
        bias = _hide_future(bias)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)


BASELINES: dict[str, Baseline] = {baseline.__name__: baseline for baseline in (shaw_gather, gather, skewing, dense_bias)}
