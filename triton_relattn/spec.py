"""The scalars of one attention call, resolved: what every implementation gets besides tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionSpec:
    """All that is not a tensor. Field names and types are also the operator's schema (see ops.py)."""

    scale: float
    """Factor of q.k and of the relative term."""
    first: int
    """Relative position of the table's row 0."""
    last: int
    """Relative position of the table's last row."""
    clamp: bool
    """Beyond first and last: the end row (True) or no relative term (False)."""
    is_causal: bool
    """Keys with a positive relative position are hidden."""
    query_offset: int
    """Query i stands at key position i + query_offset."""

    def visible_keys(self, last_query: int, num_keys: int) -> int:
        """How many of the ``num_keys`` keys, from the first on, queries up to ``last_query`` can see."""
        if not self.is_causal:
            return num_keys
        return max(0, min(num_keys, last_query + self.query_offset + 1))

    def outside(self, num_queries: int, num_keys: int) -> str:
        """What lies beyond the table: "clamp", "zero", or "none" if it has a row for every visible pair."""
        farthest_past = -(num_queries - 1) - self.query_offset
        farthest_future = num_keys - 1 - self.query_offset
        if self.is_causal:
            farthest_future = min(farthest_future, 0)
        if self.first <= farthest_past and farthest_future <= self.last:
            return "none"
        return "clamp" if self.clamp else "zero"
