"""Dense oracle in plain torch: O(Nq * Nk) memory, any dtype, differentiated by autograd."""

from __future__ import annotations

from typing import Any

import torch

from ._core.arguments import Arguments
from ._core.dropout import draw_seed, keep_mask, keep_scale
from ._core.spec import AttentionSpec, AttentionTensors
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
    """Compute out and lse of a batch that is not packed. Every step is one line of the formula, in the dtype of the inputs.

    Args:
        first_sequence: the number of the first batch entry, for dropout.
    """
    query, key, value, rel_query, rel_key, rel_value, rel_bias, rel_p2c, attn_mask, key_lengths, query_offsets, *_ = tensors
    softcap, dropout_p, dropout_seed, dropout_origins = spec.softcap, spec.dropout_p, *tensors[-2:]
    rel_key, rel_value, rel_p2c = (None if each is None else each.to(query.dtype) for each in (rel_key, rel_value, rel_p2c))
    batch, heads, num_queries, _ = query.shape
    num_keys, device = key.shape[2], query.device
    if key.shape[1] != heads:
        key, value = (tensor.repeat_interleave(heads // tensor.shape[1], 1) for tensor in (key, value))
    i = torch.arange(num_queries, device=device)[:, None]
    j = torch.arange(num_keys, device=device)[None, :]
    offset = spec.query_offset if query_offsets is None else query_offsets.view(-1, 1, 1, 1)
    relative_position = (j - i - offset).expand(batch, 1, num_queries, num_keys)
    if tensors.has_table:
        row, inside = RelativePositions(spec.first, spec.last, "clamp" if spec.clamp else "zero").rows(relative_position)
        row = row.expand(batch, heads, num_queries, num_keys)

    logits = spec.scale * (query @ key.mT)
    if not (rel_key is None and rel_bias is None and rel_p2c is None):
        p = query if rel_query is None else rel_query
        logits = logits + position_term(p, key, rel_key, rel_bias, rel_p2c, row, inside, spec.rel_scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)

    visible = torch.ones_like(relative_position, dtype=torch.bool)
    if spec.window_left >= 0:
        visible = visible & (relative_position >= -spec.window_left)
    if spec.window_right >= 0:
        visible = visible & (relative_position <= spec.window_right)
    if key_lengths is not None:
        visible = visible & (j < key_lengths.view(-1, 1, 1, 1))
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
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    logits = logits.to(lse_dtype)
    # Not torch.logsumexp: its derivative, exp(logits - lse), is wrong where logits are so large that lse rounds the sum away.
    top = logits.detach().amax(-1, keepdim=True) if num_keys else logits.new_zeros(batch, heads, num_queries, 1)
    lse = (top + (logits - top).exp().sum(-1, keepdim=True).log()).masked_fill(sees_nothing, float("-inf")).squeeze(-1)
    if dropout_p > 0:
        assert dropout_seed is not None
        index = torch.arange(first_sequence, first_sequence + batch, device=device).view(-1, 1, 1, 1)
        head = torch.arange(heads, device=device).view(-1, 1, 1)
        if dropout_origins is None:
            keep = keep_mask(dropout_seed, dropout_p, index, head, i, slice(0, num_keys))
        else:
            masks = [
                keep_mask(dropout_seed, dropout_p, sequence, head + h, i + q, slice(k, k + num_keys))
                for sequence, h, q, k in dropout_origins[:, :1].sum(1).tolist()
            ]
            keep = torch.stack(masks) if masks else torch.ones_like(probs, dtype=torch.bool)
        probs = torch.where(keep, probs, 0) * keep_scale(dropout_p)
    out = probs @ value
    if rel_value is not None:
        by_row = probs.new_zeros(batch, heads, num_queries, rel_value.shape[-2])
        out = out + by_row.scatter_add(-1, row, torch.where(inside, probs, 0)) @ rel_value
    return out, lse


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
    """Compute ``rel_scale * (p_i . E[row] + k_j . F[row]) + b[row]``, (B, H, Nq, Nk) like row; 0 where ``inside`` is False."""
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
        of_sequence = {name: getattr(whole, name)[:, :, keys] for name in ("key", "value")}
        of_sequence["query"] = whole.query[:, :, queries]
        if whole.rel_query is not None:
            of_sequence["rel_query"] = whole.rel_query[:, :, queries]
        for name in ("query_offsets", "dropout_origins"):
            if (vector := getattr(whole, name)) is not None:
                of_sequence[name] = vector[number : number + 1]
        parts.append(_attention(whole._replace(**of_sequence), spec, number))
    if not parts:
        return _attention(whole._replace(query_offsets=None, dropout_origins=None), spec)
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)
