"""A bias by distance, between the module that has it and attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad


class Bias:
    """Arguments of the operator that make a bias, and how to make the stock tensor, (H, Nq, Nk) or (B, H, Nq, Nk).

    Whatever is done with it that is not known here is done with the tensor.
    """

    def __init__(self, dense: Callable[[], torch.Tensor], **term: Any) -> None:
        self.dense, self.term = dense, term

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dense":
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __add__(self, other: Any) -> torch.Tensor:
        return self.dense() + dense(other)

    __radd__ = __add__

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is pad and not any(args[1]):  # by as many keys of a memory as there are
            return args[0]
        return function(*map(dense, args), **{name: dense(each) for name, each in (kwargs or {}).items()})


def dense(bias: Any) -> Any:
    """The stock tensor of a Bias; anything else as it is."""
    return bias.dense() if isinstance(bias, Bias) else bias
