"""What layers pass on to others, a mask or a position bias, as a tensor in its small form that knows its dense one.

Enabled layers read the small form. Every function of torch sees the dense form, and so does a stock layer, or code of the user.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..positions import RelativePositions

Make = Callable[[Any], Any]


class Compact(torch.Tensor):
    """A tensor whose dense form is computed when it is needed, and kept; is_written: that was written to, and differs now."""

    _make: Make
    _dense: Any
    is_none: bool
    is_written: bool

    @classmethod
    def of(cls, small: torch.Tensor | None, make: Make) -> Any:
        """Return a Compact tensor; under torch.compile small itself, and for stock modules the dense form."""
        if any(reads() for reads in STOCK_READS):
            return make(small)
        if are_plain():
            return small
        return cls._wrapped(torch.empty(0) if small is None else small, make, small is None)

    @classmethod
    def _wrapped(cls, tensor: torch.Tensor, make: Make, is_none: bool) -> Any:
        compact = tensor.as_subclass(cls)
        compact._make, compact._dense, compact.is_none, compact.is_written = make, None, is_none, False
        return compact

    @property
    def small(self) -> torch.Tensor | None:
        return None if self.is_none else self._plain()

    def _plain(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def dense(self) -> Any:
        lacks_gradient = self._dense is not None and not self._dense.requires_grad and self._plain().requires_grad
        if self._dense is None or (lacks_gradient and torch.is_grad_enabled() and not self.is_written):
            self._dense = self._make(self.small)
        return self._dense

    def changed(self, small: torch.Tensor) -> Compact:
        """Return the same of another small form."""
        return self._wrapped(small, self._make, self.is_none)  # type: ignore[no-any-return]

    def cast(self, dtype: torch.dtype) -> Compact:
        """Return the same in another dtype, for floating-point forms."""

        def converted(tensor: Any) -> Any:
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                return tensor
            with torch._C.DisableTorchFunction():  # a comparison promotes the casts of forwards, not those of what they are given
                return tensor.to(dtype)

        make = self._make
        return self._wrapped(converted(self._plain()), lambda small: converted(make(small)), self.is_none)  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        is_copy = func in COPIES or (func is torch.Tensor.view_as and first is args[-1])  # autograd makes it of what it returns
        is_same = is_copy and (func is not torch.Tensor.to or _is_move(args[1:], kwargs))
        if (is_same and not (isinstance(first, Compact) and first.is_written)) or func in OF_THE_TENSOR_ITSELF:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            return args[0].changed(result) if is_copy else args[0] if func is torch.Tensor.requires_grad_ else result
        if func is torch.Tensor.to and args[1:] == (torch.bool,) and args[0]._plain().dtype == torch.bool:
            make = args[0]._make
            return args[0]._wrapped(args[0]._plain(), lambda small: make(small).to(torch.bool), args[0].is_none)
        given: list[tuple[Compact, torch.Tensor, int]] = []

        def dense(compact: Compact) -> Any:
            tensor = compact.dense()
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
                given.append((compact, tensor, tensor._version))
            return tensor

        args, kwargs = tree_map_only(Compact, dense, (args, kwargs))
        result = func(*args, **kwargs)
        for compact, tensor, version in given:
            compact.is_written |= tensor._version != version
        return result


class TensorOnUse:
    """What our layers read in its parts, and functions of torch, methods and sums as the tensor that ``dense()`` returns."""

    def dense(self) -> torch.Tensor:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __add__(self, other: Any) -> Any:
        return self.dense() + to_dense(other)

    __radd__ = __add__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map(to_dense, args), **{name: to_dense(value) for name, value in (kwargs or {}).items()})


STOCK_READS: list[Callable[[], bool]] = []
"""Functions that return whether attention of the calls now is the stock forward's."""


def _is_move(args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether Tensor.to() is asked for another device, and not for another dtype."""
    return not kwargs.keys() - {"device", "non_blocking", "copy"} and all(
        isinstance(argument, (str, int, torch.device)) for argument in args
    )


COPIES = {torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.to}
OF_THE_TENSOR_ITSELF = {torch.Tensor.requires_grad_, torch.autograd.grad, torch.autograd.backward} | {
    getattr(torch.Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf", "grad", "device", "_backward_hooks")
}
OF_THE_TENSOR_ITSELF |= {torch.Tensor.requires_grad.__set__, torch.Tensor.retain_grad, torch.Tensor.register_hook}  # type: ignore[attr-defined]
"""Functions that see the tensor itself: those by which checkpoints and hooks pass tensors on."""


def is_small(value: Any) -> bool:
    """Return whether an argument is a small form; under torch.compile and the like, where these are plain tensors, True."""
    if isinstance(value, Compact):
        return not value.is_written
    return not isinstance(value, torch.Tensor) or are_plain()


def are_plain() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._functorch.peek_interpreter_stack() is not None


def to_dense(value: Any) -> Any:
    """Return the dense form of what has one, a Compact tensor or another object; anything else as it is."""
    return value.dense() if has_dense(value) else value


def has_dense(value: Any) -> bool:
    """Return whether a value is a small form of another."""
    return isinstance(value, Compact) or (not isinstance(value, (torch.Tensor, nn.Module)) and hasattr(value, "dense"))


def rows(table: torch.Tensor, positions: RelativePositions, queries: int, keys: int, offset: int = 0) -> torch.Tensor:
    """Return the row of each pair, (..., R) to (..., Nq, Nk), positions clipped; offset: the position of the first query."""
    query = torch.arange(queries, device=table.device)[:, None] + offset
    distance = torch.arange(keys, device=table.device) - query
    return table[..., distance.clamp(positions.first, positions.last) - positions.first]
