"""Jagged nested tensors: their sequences are packed already, one after the other, as the packed function takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def is_jagged(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_nested and tensor.layout is torch.jagged


def attend_jagged(
    attend_packed: Callable[..., Any], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *tables: Any, **options: Any
) -> Any:
    """Call a packed function for jagged tensors (B, H, N, D), each a transposed (B, N, H, D) whose N differs by sequence.

    Returns:
        out as query is; with return_lse also lse, jagged, (B, H, N).

    Raises:
        TypeError: not all three are such tensors, or an argument is one that packed calls do not have.
        ValueError: there are holes between sequences, or value's or rel_query's have other lengths than key's or query's.
    """
    packed, offsets = [], list[torch.Tensor]()
    given: tuple[tuple[str, Any], ...] = (("query", query), ("key", key), ("value", value))
    for name, tensor in given:
        if not is_jagged(tensor) or tensor.dim() != 4 or tensor.transpose(1, 2)._ragged_idx != 1:
            raise TypeError(
                f"{name} must be jagged as query is: a (B, N, H, D) of layout torch.jagged, transposed to (B, H, N, D)"
            )
        _require_packed(name, tensor)
        packed.append(tensor.transpose(1, 2).values())
        offsets.append(tensor.offsets())
    _require_same_lengths("value", value, "key", key)
    if options.get("attn_mask") is not None or options.get("key_lengths") is not None:
        raise TypeError("jagged tensors take no attn_mask and no key_lengths: the lengths are part of the tensors")
    options = {name: each for name, each in options.items() if name not in ("attn_mask", "key_lengths")}
    rel_query: Any = options.get("rel_query")
    if is_jagged(rel_query):
        _require_packed("rel_query", rel_query)
        _require_same_lengths("rel_query", rel_query, "query", query)
        options["rel_query"] = rel_query.transpose(1, 2).values()
    longest = [int(each.diff().max()) if len(each) > 1 else 0 for each in offsets[:2]]
    result = attend_packed(
        *packed,
        *tables,
        cu_seqlens_q=offsets[0],
        cu_seqlens_k=offsets[1],
        max_seqlen_q=longest[0],
        max_seqlen_k=longest[1],
        **options,
    )
    if not options.get("return_lse"):
        return torch.nested.nested_tensor_from_jagged(result, offsets[0]).transpose(1, 2)
    out, lse = result
    return tuple(torch.nested.nested_tensor_from_jagged(each, offsets[0]).transpose(1, 2) for each in (out, lse.T))


def _require_packed(name: str, tensor: Any) -> None:
    if tensor.lengths() is not None:
        raise ValueError(
            f"{name} has holes between its sequences, as torch.nested.narrow leaves them; "
            "torch.nested.as_nested_tensor(list(tensor.unbind()), layout=torch.jagged) has none"
        )


def _require_same_lengths(name: str, tensor: Any, other_name: str, other: Any) -> None:
    offsets, others = tensor.offsets(), other.offsets()
    if offsets is not others and not torch.equal(offsets, others):
        lengths = [each.diff().tolist() for each in (offsets, others)]
        raise ValueError(f"{name}'s sequences must be as long as {other_name}'s, got {lengths[0]} and {lengths[1]}")
