"""Dense oracle in plain torch: O(Nq * Nk) memory, any dtype, differentiated by autograd."""

from __future__ import annotations

import torch

from .positions import RelativePositions


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_key: torch.Tensor | None = None,
    *,
    positions: RelativePositions | None = None,
    key_lengths: torch.Tensor | None = None,
    is_causal: bool = False,
    query_offset: int = 0,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``softmax(scale * (Q K^T + S)) V`` and the log-sum-exp of the logits, S[i, j] = q_i . E[row(j - i - offset)].

    Every step is one line of the formula, in the dtype of the inputs. Arguments as in
    :func:`triton_relattn.fused_relative_attention`, which validates them.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    i = torch.arange(num_queries, device=query.device)[:, None]
    j = torch.arange(num_keys, device=query.device)[None, :]
    relative_position = j - i - query_offset

    logits = scale * (query @ key.mT)
    if rel_key is not None:
        positions = positions or RelativePositions.centred(rel_key.shape[-2])
        row, inside = positions.rows(relative_position)
        term = (query @ rel_key.mT).gather(-1, row.expand(*logits.shape))
        logits = logits + scale * torch.where(inside, term, 0)

    visible = torch.ones_like(relative_position, dtype=torch.bool)
    if is_causal:
        visible = visible & (relative_position <= 0)
    if key_lengths is not None:
        visible = visible & (j < key_lengths.view(-1, 1, 1, 1))
    visible = visible.expand_as(logits)
    sees_nothing = ~visible.any(-1, keepdim=True)

    # A row that sees nothing has no softmax: it takes part as if it saw everything, and is cleared afterwards.
    logits = logits.masked_fill(~visible & ~sees_nothing, float("-inf"))
    probs = torch.softmax(logits, dim=-1).masked_fill(sees_nothing, 0)
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    lse = torch.logsumexp(logits.to(lse_dtype), dim=-1).masked_fill(sees_nothing.squeeze(-1), float("-inf"))
    return probs @ value, lse
