"""Jagged nested tensors (B, H, N, D): their sequences lie one after the other, as packed calls take them."""

from __future__ import annotations

from typing import Any

import torch

from ._core.arguments import Arguments


def is_jagged(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_nested and tensor.layout is torch.jagged


def packed(arguments: Arguments) -> Arguments:
    """Return the packed call for jagged query, key and value; TypeError or ValueError says what does not fit."""
    if arguments.attn_mask is not None or arguments.key_lengths is not None:
        raise TypeError("jagged tensors take no attn_mask and no key_lengths: the lengths are part of the tensors")
    query: Any = arguments.query
    key: Any = arguments.key
    value, rel_query = arguments.value, arguments.rel_query
    values: dict[str, Any] = {"query": _values("query", query), "key": _values("key", key), "value": _values("value", value)}
    _require_same_lengths("value", value, "key", key)
    if is_jagged(rel_query):
        values["rel_query"] = _values("rel_query", rel_query)
        _require_same_lengths("rel_query", rel_query, "query", query)
    longest = [int(offsets.diff().max()) if len(offsets) > 1 else 0 for offsets in (query.offsets(), key.offsets())]
    return arguments._replace(
        **values,
        is_packed=True,
        cu_seqlens_q=query.offsets(),
        cu_seqlens_k=key.offsets(),
        max_seqlen_q=longest[0],
        max_seqlen_k=longest[1],
    )


def jagged(result: torch.Tensor, query: Any) -> torch.Tensor:
    """Return out or lse of a packed call, (total, H, ...), as a jagged tensor (B, H, N, ...) with query's lengths."""
    return torch.nested.nested_tensor_from_jagged(result, query.offsets()).transpose(1, 2)


def _values(name: str, tensor: Any) -> torch.Tensor:
    """Return the sequences of a jagged tensor, (total, H, D)."""
    if not is_jagged(tensor) or tensor.dim() != 4 or tensor.transpose(1, 2)._ragged_idx != 1:
        raise TypeError(f"{name} must be jagged as query is: a (B, N, H, D) of layout torch.jagged, transposed to (B, H, N, D)")
    if tensor.lengths() is not None:
        raise ValueError(
            f"{name} has holes between its sequences, as torch.nested.narrow leaves them; "
            "torch.nested.as_nested_tensor(list(tensor.unbind()), layout=torch.jagged) has none"
        )
    return tensor.transpose(1, 2).values()  # type: ignore[no-any-return]


def _require_same_lengths(name: str, tensor: Any, other_name: str, other: Any) -> None:
    offsets, other_offsets = tensor.offsets(), other.offsets()
    if offsets is not other_offsets and not torch.equal(offsets, other_offsets):
        lengths, other_lengths = offsets.diff().tolist(), other_offsets.diff().tolist()
        raise ValueError(f"{name}'s sequences must be as long as {other_name}'s, got {lengths} and {other_lengths}")
