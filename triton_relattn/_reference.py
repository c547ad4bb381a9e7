"""Dense oracle in plain torch: O(Nq * Nk) memory, any dtype, differentiated by autograd."""

from __future__ import annotations

from typing import Any

import torch

from ._core.arguments import Arguments
from ._core.dropout import draw_seed, keep_mask, keep_scale
from ._core.spec import TABLES, AttentionSpec, AttentionTensors
from ._core.validation import resolve
from .positions import RelativePositions


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_key: torch.Tensor | None = None,
    *,
    dropout_seed: torch.Tensor | None = None,
    **named: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out and lse as :func:`triton_relattn.fused_relative_attention` defines them, densely. It explains the arguments.
    Key and value may have fewer heads than query. dropout_seed: by default drawn from torch's generator."""
    tensors, spec = resolve(Arguments(query, key, value, rel_key, **named)._replace(enable_gqa=True))
    if spec.dropout_p > 0:
        tensors = tensors._replace(dropout_seed=draw_seed(query.device) if dropout_seed is None else dropout_seed)
    return resolved_reference(tensors, spec)


def _attention(tensors: AttentionTensors, spec: AttentionSpec, first_sequence: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out and lse of a batch that is not packed, by the formula. first_sequence: number of the first entry, for
    dropout."""
    tensors = without_hidden(tensors, spec)
    content, position = score_terms(tensors, spec)
    keep = dropout_keep(tensors, spec, first_sequence) if spec.dropout_p > 0 else None
    probs, lse = probabilities(content if position is None else content + position, tensors, spec, keep)
    return weighted_values(probs, tensors, spec), lse


def relative_positions(tensors: AttentionTensors, spec: AttentionSpec) -> torch.Tensor:
    """Return j - i - query_offset, (B, 1, Nq, Nk)."""
    num_queries, num_keys, device = tensors.query.shape[2], tensors.key.shape[2], tensors.query.device
    i = torch.arange(num_queries, device=device)[:, None]
    j = torch.arange(num_keys, device=device)[None, :]
    offset = spec.query_offset if tensors.query_offsets is None else tensors.query_offsets.view(-1, 1, 1, 1)
    return (j - i - offset).expand(tensors.query.shape[0], 1, num_queries, num_keys)


def table_rows(tensors: AttentionTensors, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the table row of each pair, and whether relative terms apply to it, (B, 1, Nq, Nk)."""
    return RelativePositions(spec.first, spec.last, "clamp" if spec.clamp else "zero").rows(relative_positions(tensors, spec))


def in_reach(tensors: AttentionTensors, spec: AttentionSpec) -> torch.Tensor:
    """Return whether the window and the lengths leave each pair, (B, 1, Nq, Nk)."""
    relative_position = relative_positions(tensors, spec)
    visible = torch.ones_like(relative_position, dtype=torch.bool)
    if spec.window_left >= 0:
        visible = visible & (relative_position >= -spec.window_left)
    if spec.window_right >= 0:
        visible = visible & (relative_position <= spec.window_right)
    if tensors.key_lengths is not None:
        keys = torch.arange(tensors.key.shape[2], device=visible.device)
        visible = visible & (keys < tensors.key_lengths.view(-1, 1, 1, 1))
    return visible


def without_hidden(tensors: AttentionTensors, spec: AttentionSpec) -> AttentionTensors:
    """Return tensors with zeros for keys, values and table rows of no pair in reach: they may hold NaN, and 0 * NaN is NaN."""
    visible = in_reach(tensors, spec)
    is_seen = visible.any(2)[..., None]  # (B, 1, Nk, 1)
    changes = {name: torch.where(is_seen, getattr(tensors, name), 0) for name in ("key", "value")}
    row, inside = table_rows(tensors, spec)
    uses = torch.zeros(spec.last - spec.first + 1, device=row.device)
    is_used = uses.scatter_add(0, row.flatten(), (visible & inside).flatten().to(uses.dtype)) > 0  # (R,)
    for name in TABLES:
        if (table := getattr(tensors, name)) is not None:
            changes[name] = torch.where(is_used if name == "rel_bias" else is_used[:, None], table, 0)
    return tensors._replace(**changes)


def shared_by_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat the heads of key or value for the query heads that share them."""
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], 1)


def score_terms(tensors: AttentionTensors, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the content term scale q.k and the position term, None without a table for it, (B, Hq, Nq, Nk)."""
    query, rel_key, rel_bias, rel_p2c = tensors.query, tensors.rel_key, tensors.rel_bias, tensors.rel_p2c
    key = shared_by_heads(tensors.key, query.shape[1])
    content = spec.scale * (query @ key.mT)
    if rel_key is None and rel_bias is None and rel_p2c is None:
        return content, None
    p = query if tensors.rel_query is None else tensors.rel_query
    rel_key, rel_p2c = (None if table is None else table.to(query.dtype) for table in (rel_key, rel_p2c))
    row, inside = table_rows(tensors, spec)
    return content, position_term(p, key, rel_key, rel_bias, rel_p2c, row, inside, spec.rel_scale)


def probabilities(
    scores: torch.Tensor, tensors: AttentionTensors, spec: AttentionSpec, keep: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the probabilities, (B, Hq, Nq, Nk), after dropout has kept those of ``keep`` (None: all), and lse."""
    attn_mask, num_keys, softcap = tensors.attn_mask, tensors.key.shape[2], spec.softcap
    logits = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    visible = in_reach(tensors, spec)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        visible = visible & attn_mask
    elif attn_mask is not None:
        # A finite number stays finite, even if a float32 mask is added to 16-bit logits.
        smallest = max(torch.finfo(dtype).min for dtype in (logits.dtype, attn_mask.dtype))
        logits = logits + attn_mask.clamp_min(smallest).to(logits.dtype)
        visible = visible & (attn_mask != float("-inf"))
    visible = visible & (logits != float("-inf"))  # a query all of whose logits are -inf sees nothing, whatever made them so
    sees_nothing = ~visible.any(-1, keepdim=True)

    # A query that sees nothing has no softmax. It is computed as if it saw all keys equally, and cleared afterwards.
    logits = logits.masked_fill(~visible, float("-inf")).masked_fill(sees_nothing, 0)
    probs = torch.softmax(logits, dim=-1).masked_fill(sees_nothing, 0)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # Not torch.logsumexp: its derivative, exp(logits - lse), is wrong where logits are so large that lse rounds the sum away.
    top = logits.detach().amax(-1, keepdim=True) if num_keys else logits.new_zeros(*logits.shape[:3], 1)
    lse = (top + (logits - top).exp().sum(-1, keepdim=True).log()).masked_fill(sees_nothing, float("-inf")).squeeze(-1)
    return (probs if keep is None else torch.where(keep, probs, 0) * keep_scale(spec.dropout_p)), lse


def dropout_keep(tensors: AttentionTensors, spec: AttentionSpec, first_sequence: int) -> torch.Tensor:
    """Return the mask of the probabilities that dropout keeps, (B, Hq, Nq, Nk)."""
    (batch, heads, num_queries, _), num_keys, seed = tensors.query.shape, tensors.key.shape[2], tensors.dropout_seed
    assert seed is not None
    sequence, head, query = (torch.arange(size, device=seed.device) for size in (batch, heads, num_queries))
    head, query = head.view(-1, 1, 1), query.view(-1, 1)
    if tensors.dropout_origins is None:
        sequence = (first_sequence + sequence).view(-1, 1, 1, 1)
        return keep_mask(seed, spec.dropout_p, sequence, head, query, slice(0, num_keys))
    origins = tensors.dropout_origins[:, :1].sum(1).tolist()
    masks = [keep_mask(seed, spec.dropout_p, b, head + h, query + q, slice(k, k + num_keys)) for b, h, q, k in origins]
    return torch.stack(masks) if masks else torch.ones(0, heads, num_queries, num_keys, dtype=torch.bool, device=seed.device)


def weighted_values(probs: torch.Tensor, tensors: AttentionTensors, spec: AttentionSpec) -> torch.Tensor:
    """Compute the sum over keys of probs (V + A[row])."""
    out = probs @ shared_by_heads(tensors.value, probs.shape[1])
    if tensors.rel_value is None:
        return out
    row, inside = table_rows(tensors, spec)
    by_row = probs.new_zeros(*probs.shape[:3], tensors.rel_value.shape[-2])
    return out + by_row.scatter_add(-1, row.expand_as(probs), torch.where(inside, probs, 0)) @ tensors.rel_value.to(probs.dtype)


def position_term(
    rel_query: torch.Tensor,
    key: torch.Tensor,
    rel_key: torch.Tensor | None,
    rel_bias: torch.Tensor | None,
    rel_p2c: torch.Tensor | None,
    row: torch.Tensor,
    inside: torch.Tensor,
    rel_scale: float,
) -> torch.Tensor:
    """Compute ``rel_scale * (p_i . E[row] + k_j . F[row]) + b[row]``, (B, H, Nq, Nk); 0 where ``inside`` is False."""
    row = row.expand(-1, rel_query.shape[1], -1, -1)
    term = torch.zeros(row.shape, dtype=rel_query.dtype, device=row.device)
    if rel_key is not None:
        term = rel_scale * (rel_query @ rel_key.mT).gather(-1, row)
    if rel_bias is not None:
        batch, heads, num_queries, _ = row.shape
        bias = rel_bias.to(term.dtype).expand(batch, heads, -1)[:, :, None].expand(-1, -1, num_queries, -1)
        term = term + bias.gather(-1, row)
    if rel_p2c is not None:
        term = term + rel_scale * (key @ rel_p2c.mT).gather(-1, row.mT).mT
    return torch.where(inside, term, 0)


def resolved_reference(tensors: AttentionTensors, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out and lse of a resolved call; the sequences of a packed batch are computed one after the other."""
    if tensors.cu_seqlens_q is None or tensors.cu_seqlens_k is None:
        return _attention(tensors, spec)
    starts_q, starts_k = tensors.cu_seqlens_q.tolist(), tensors.cu_seqlens_k.tolist()
    whole = tensors._replace(cu_seqlens_q=None, cu_seqlens_k=None)
    if whole.rel_bias is not None:  # once: autograd adds up the sequences' gradients in the wider dtype
        dtype = torch.promote_types(whole.rel_bias.dtype, whole.query.dtype)
        whole = whole._replace(rel_bias=whole.rel_bias.to(dtype))
    parts = []
    for number in range(tensors.num_sequences):
        queries, keys = slice(*starts_q[number : number + 2]), slice(*starts_k[number : number + 2])
        sequence = {name: getattr(whole, name)[:, :, keys] for name in ("key", "value")}
        sequence["query"] = whole.query[:, :, queries]
        if whole.rel_query is not None:
            sequence["rel_query"] = whole.rel_query[:, :, queries]
        for name in ("query_offsets", "dropout_origins"):
            if (vector := getattr(whole, name)) is not None:
                sequence[name] = vector[number : number + 1]
        parts.append(_attention(whole._replace(**sequence), spec, number))
    if not parts:
        return _attention(whole._replace(query_offsets=None, dropout_origins=None), spec)
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)
