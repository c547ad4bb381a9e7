"""What hides pairs of a block, and what drops them.

Logits of hidden pairs become -inf by a clamp of their bits as integers: a clamp of floats would keep a NaN; masked_fill_()
takes up to ten times as long on a CPU, more than softmax.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import torch

from .._core.dropout import keep_mask, keep_scale

if TYPE_CHECKING:
    from .cut import Block

BITS = {
    torch.float64: (torch.int64, -1 << 52),
    torch.float32: (torch.int32, -1 << 23),
    torch.bfloat16: (torch.int16, -1 << 7),
}
"""Integers of the same size, and the bits of -inf."""
Limits: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
"""The least and the largest integer that the bits of each logit may have: any, or those of -inf."""


def limits(visible: torch.Tensor, dtype: torch.dtype) -> Limits:
    """Return the limits of logits of a dtype from a mask of the pairs that are visible."""
    integers, hidden = BITS[dtype]
    ends, is_visible = torch.iinfo(integers), visible.to(integers).neg_()  # all bits are 1 where a pair is visible
    least = (is_visible & (ends.min ^ hidden)).bitwise_xor_(hidden)
    return least, (is_visible & (ends.max ^ hidden)).bitwise_xor_(hidden)


def hide(logits: torch.Tensor, least: torch.Tensor, most: torch.Tensor) -> None:
    """Set the logits of hidden pairs to -inf."""
    logits.view(least.dtype).clamp_(least, most)


def triangles(num_rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Limits, Limits]:
    """Return limits (num_rows, num_rows) for the edges of a window: of the first, pair (m, n) is visible from n = m on, of the
    second before that."""
    visible = torch.ones(num_rows, num_rows, dtype=torch.bool, device=device).triu_()
    return limits(visible, dtype), limits(~visible, dtype)


def mask(block: Block, pairs: torch.Tensor) -> None:
    """Add a float mask to the logits of the pairs, and set those of hidden pairs to -inf."""
    group, spec, given = block.group, block.call.spec, block.call.tensors.attn_mask
    if given is not None:
        add_mask(block, pairs, given)
    num_rows, num_columns = pairs.shape[2:]
    if spec.window_left >= 0:  # hides n - m < -(base + left)
        skip = block.base + spec.window_left
        stop = min(num_rows - 1 - skip, num_columns)
        if stop > 0:
            hide(pairs[..., :stop], *(each[:, skip : skip + stop] for each in block.triangles(pairs.dtype)[0]))
    if spec.window_right >= 0:  # hides n - m > right - base
        first = spec.window_right - block.base + 1
        start = max(first, 0)
        if start < block.num_seen:
            skip, count = start - first, block.num_seen - start
            hide(pairs[..., start : block.num_seen], *(each[:, skip : skip + count] for each in block.triangles(pairs.dtype)[1]))
    if not group.is_alike:
        exists = group.places[1].exists[:, None, None, block.start : block.start + num_columns]
        hide(pairs, *limits(exists, pairs.dtype))
    if block.num_seen < num_columns:
        pairs[..., block.num_seen :].fill_(-math.inf)


def add_mask(block: Block, pairs: torch.Tensor, given: torch.Tensor) -> None:
    """Add the call's float mask to the logits, or hide the pairs that a boolean one hides."""
    group, first = block.group, block.group.stack[0]
    keys = group.base + first.offset + block.start
    places = (
        slice(first.entry, first.entry + first.count) if group.is_alike else [each.entry for each in group.sequences],
        group.heads,
        slice(block.row, block.row + block.num_real),
        slice(keys, keys + block.num_seen),
    )
    for dim, place in enumerate(places):
        if given.shape[dim] > 1:
            given = given[(slice(None),) * dim + (place,)]
    pairs = pairs[:, :, : block.num_real, : block.num_seen]
    if given.dtype == torch.bool:
        hide(pairs, *limits(given, pairs.dtype))
    else:
        pairs.add_(given)


def dropout(block: Block) -> torch.Tensor | None:
    """Return dropout's factors of the probabilities, as matrices; None without dropout."""
    call, group = block.call, block.group
    seed, origins, dropout_p = call.tensors.dropout_seed, call.tensors.dropout_origins, call.spec.dropout_p
    if seed is None:
        return None
    sequences = group.sequences
    origin = [(each.number, 0, 0, 0) for each in sequences]
    if origins is not None:
        by_sequence = origins[:, 0].tolist()
        origin = [tuple(by_sequence[each.number]) for each in sequences]
    keys = [group.base + each.offset + block.start + first for each, (*_, first) in zip(sequences, origin, strict=True)]
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
