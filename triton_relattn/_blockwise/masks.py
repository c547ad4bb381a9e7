"""What hides pairs of a block, and what drops them.

A mask is kept as two tensors of integers, the least and the largest that the bits of a logit may have: any for a visible pair,
those of -inf for a hidden one. A clamp between them makes hidden logits -inf even if they are NaN, as a clamp of floats would
not; masked_fill_() takes up to ten times as long on a CPU, more than softmax.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import torch

from .._core.dropout import keep_mask, keep_scale

if TYPE_CHECKING:
    from .blocks import Block

BITS = {
    torch.float64: (torch.int64, -1 << 52),
    torch.float32: (torch.int32, -1 << 23),
    torch.bfloat16: (torch.int16, -1 << 7),
}
"""Integers of the same size, and the bits of -inf."""
Limits: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
"""The least and the largest integer that the bits of each logit may have."""


def limits(visible: torch.Tensor, dtype: torch.dtype) -> Limits:
    """Return the limits of logits of a dtype from a mask of the pairs that are visible."""
    integers, hidden = BITS[dtype]
    ends, is_visible = torch.iinfo(integers), visible.to(integers).neg_()  # all bits are 1 where a pair is visible
    least = (is_visible & (ends.min ^ hidden)).bitwise_xor_(hidden)
    return least, (is_visible & (ends.max ^ hidden)).bitwise_xor_(hidden)


def hide(logits: torch.Tensor, least: torch.Tensor, limit: torch.Tensor) -> None:
    """Set the logits of hidden pairs to -inf."""
    logits.view(least.dtype).clamp_(least, limit)


def triangles(num_rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Limits, Limits]:
    """Return limits (num_rows, num_rows) for the edges of a window: of the first, pair (m, n) is visible from n = m on, of the
    second before that."""
    visible = torch.ones(num_rows, num_rows, dtype=torch.bool, device=device).triu_()
    return limits(visible, dtype), limits(~visible, dtype)


def mask(block: Block, pairs: torch.Tensor) -> None:
    """Add a float mask to the logits of the pairs [S, H, M, N], and set those of hidden pairs to -inf."""
    group, spec, attn_mask = block.group, block.call.spec, block.call.tensors.attn_mask
    if attn_mask is not None:
        add_mask(block, pairs, attn_mask)
    num_rows, num_columns = pairs.shape[2:]
    if spec.window_left >= 0:  # hides n - m < -(base + left)
        skip = block.base + spec.window_left
        stop = min(num_rows - 1 - skip, num_columns)
        if stop > 0:
            left, _ = block.call.triangles(num_rows, pairs.dtype)
            hide(pairs[..., :stop], *(limit[:, skip : skip + stop] for limit in left))
    if spec.window_right >= 0:  # hides n - m > right - base
        first = spec.window_right - block.base + 1
        start = max(first, 0)
        if start < block.num_keys:
            skip, count = start - first, block.num_keys - start
            _, right = block.call.triangles(num_rows, pairs.dtype)
            hide(pairs[..., start : block.num_keys], *(limit[:, skip : skip + count] for limit in right))
    if (exists := group.key_rows.exists) is not None:
        hide(pairs, *limits(exists[:, None, None, block.start : block.start + num_columns], pairs.dtype))
    if block.num_keys < num_columns:
        pairs[..., block.num_keys :].fill_(-math.inf)


def add_mask(block: Block, pairs: torch.Tensor, attn_mask: torch.Tensor) -> None:
    """Add the call's float mask to the logits, or hide the pairs that a boolean one hides."""
    group, first = block.group, block.group.runs[0]
    keys = group.base + first.offset + block.start
    indices = (
        slice(first.entry, first.entry + first.count) if group.is_uniform else [run.entry for run in group.sequences],
        group.heads,
        slice(block.row, block.row + block.num_queries),
        slice(keys, keys + block.num_keys),
    )
    for dim, index in enumerate(indices):
        if attn_mask.shape[dim] > 1:
            attn_mask = attn_mask[(slice(None),) * dim + (index,)]
    pairs = pairs[:, :, : block.num_queries, : block.num_keys]
    if attn_mask.dtype == torch.bool:
        hide(pairs, *limits(attn_mask, pairs.dtype))
    else:
        pairs.add_(attn_mask)


def dropout(block: Block) -> torch.Tensor | None:
    """Return dropout's factors of the probabilities, as matrices; None without dropout."""
    call, group = block.call, block.group
    seed, origins, dropout_p = call.tensors.dropout_seed, call.tensors.dropout_origins, call.spec.dropout_p
    if seed is None:
        return None
    runs = group.sequences
    origin = [(run.number, 0, 0, 0) for run in runs]  # as what dropout counts sequence, head, first query and first key
    if origins is not None:
        by_sequence = origins[:, 0].tolist()
        origin = [tuple(by_sequence[run.number]) for run in runs]
    keys = [group.base + run.offset + block.start + first for run, (*_, first) in zip(runs, origin, strict=True)]
    counts = torch.tensor(origin, device=seed.device)[:, :3]
    sequence, head, query = counts[:, :, None, None, None].unbind(1)
    head = head + torch.arange(group.heads.start, group.heads.stop, device=seed.device)[:, None, None]
    query = query + torch.arange(block.row, block.row + block.num_rows, device=seed.device)[:, None]
    if len(set(keys)) == 1:
        keep = keep_mask(seed, dropout_p, sequence, head, query, slice(keys[0], keys[0] + block.num_columns))
    else:
        parts = zip(sequence, head, query, keys, strict=True)
        keep = torch.stack([keep_mask(seed, dropout_p, s, h, q, slice(k, k + block.num_columns)) for s, h, q, k in parts])
    return keep.to(call.dtype).mul_(keep_scale(dropout_p)).reshape(block.matrix_shape)
