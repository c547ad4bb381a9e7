"""How much memory the tensors of a forward take, counted without computing it: on torch's device "meta"."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..comparison import apart, with_random_weights
from .kind import Kind


class _Counter(TorchDispatchMode):
    """Counts the bytes of tensors that operators make, and their largest sum at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.met: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                if storage._cdata not in known and storage._cdata not in self.met:
                    self.met.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def _freed(self, key: int, size: int) -> None:
        self.met.discard(key)
        self.now -= size


def of_forward(of: Kind, module: Any, length: int, parent: Any, by_ours: bool) -> int | None:
    """Return the largest number of bytes that tensors of one sequence's forward take at a time, in float32, beside its weights.

    by_ours: of ours; else of the stock forward. What the operator keeps for the time of a call in blocks is not counted. None if
    the forward needs values.
    """

    def count() -> int | None:
        try:
            model = with_random_weights(module, "meta").eval()
            of.prepare(model)
            given = of.at_length(model, of.reading, length, parent)
            with torch.no_grad(), torch.device("meta"), _Counter() as counter:
                of.ours(model, given) if by_ours else of.stock.forward(model, **given)
            return counter.peak
        except Exception:  # a stock forward may raise anything
            return None

    return apart(count)
