"""A guard around kernels in the interpreter: which addresses they read and write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter


def element_addresses(tensor: torch.Tensor) -> np.ndarray:
    """The addresses of a view's elements, sorted; what lies between them or around them is not among these."""
    offsets: Any = np.zeros(1, dtype=np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        steps: Any = np.arange(1 if stride == 0 else size, dtype=np.int64) * stride
        offsets = (offsets[:, None] + steps).reshape(-1)
    return np.unique(offsets * tensor.element_size() + tensor.data_ptr())


def tensors_in(arguments: Any) -> Iterator[torch.Tensor]:
    if isinstance(arguments, torch.Tensor):
        yield arguments
    elif isinstance(arguments, (tuple, list)):
        for argument in arguments:
            yield from tensors_in(argument)


@dataclass
class Launch:
    """What one launch accessed, and what of that it should not have."""

    kernel: str
    allowed: np.ndarray
    loads: int = 0
    stores: int = 0
    writers: dict[int, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def access(self, kind: str, program: int, addresses: np.ndarray) -> None:
        where = np.searchsorted(self.allowed, addresses).clip(max=len(self.allowed) - 1)
        outside = int((self.allowed[where] != addresses).sum())
        if outside:
            self.violations.append(f"{self.kernel}, program {program}: {outside} {kind}s outside all views")
        if kind == "load":
            self.loads += len(addresses)
            return
        self.stores += len(addresses)
        if len(np.unique(addresses)) < len(addresses):
            self.violations.append(f"{self.kernel}, program {program}: stores twice to an address at once")
        for address in addresses.tolist():
            writer = self.writers.setdefault(address, program)
            if writer != program:
                self.violations.append(f"{self.kernel}: programs {writer} and {program} store to the same address")


@contextmanager
def guarded() -> Iterator[list[Launch]]:
    """Check every load and store of all launches within against the views that the launch was given, and record them.

    The violations: an access to something that is no element of those views, and two programs that store to one address.
    """
    launches: list[Launch] = []
    builder, function = interpreter.InterpreterBuilder, interpreter.InterpretedFunction
    run, load, store = function.run, builder.create_masked_load, builder.create_masked_store

    def guarded_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        views = [element_addresses(tensor) for tensor in tensors_in([*args, *kwargs.values()])]
        launches.append(Launch(self.fn.__name__, np.unique(np.concatenate(views))))
        return run(self, *args, **kwargs)

    def access(kind: str, self: Any, pointers: Any, mask: Any) -> None:
        addresses = pointers.data.astype(np.int64)[np.broadcast_to(mask.data, pointers.data.shape)]
        launches[-1].access(kind, self.grid_idx[0], addresses)

    def guarded_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        access("load", self, pointers, mask)
        return load(self, pointers, mask, *rest)

    def guarded_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        access("store", self, pointers, mask)
        return store(self, pointers, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function, "run", guarded_run)
        patch.setattr(builder, "create_masked_load", guarded_load)
        patch.setattr(builder, "create_masked_store", guarded_store)
        yield launches
