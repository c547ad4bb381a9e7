"""A bias by distance, between the module that has it and attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from ..compact import dense_of, rows


class Bias:
    """Arguments of the operator that make a bias for the last queries of some keys.

    Whatever is done with it that is not known here is done with the stock tensor, (H, Nq, Nk) or (B, H, Nq, Nk).
    """

    def __init__(self, queries: int, keys: int, **term: Any) -> None:
        self.queries, self.keys, self.term = queries, keys, term

    def dense(self) -> torch.Tensor:
        """Return the stock tensor."""
        size, positions = (self.queries, self.keys, self.keys - self.queries), self.term["positions"]
        if "rel_bias" in self.term:
            return rows(self.term["rel_bias"], positions, *size)
        scores = self.term["rel_query"] @ self.term["rel_key"].mT  # (B, H, Nq, R)
        number = torch.arange(positions.num_rows, device=scores.device)
        slots = rows(number, positions, *size)
        distance = torch.arange(size[1], device=scores.device) - torch.arange(size[0], device=scores.device)[:, None] - size[2]
        inside = (distance >= positions.first) & (distance <= positions.last)
        return scores.gather(-1, slots.expand(*scores.shape[:-1], -1)).where(inside, 0.0)

    def cast(self, dtype: torch.dtype) -> Bias:
        changed = {name: each.to(dtype) if isinstance(each, torch.Tensor) else each for name, each in self.term.items()}
        return Bias(self.queries, self.keys, **changed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __add__(self, other: Any) -> torch.Tensor:
        return self.dense() + dense_of(other)

    __radd__ = __add__

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is pad and not any(args[1]):  # by as many keys of a memory as there are
            return args[0]
        return function(*map(dense_of, args), **{name: dense_of(each) for name, each in (kwargs or {}).items()})
