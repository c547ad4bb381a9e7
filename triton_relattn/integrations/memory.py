"""How much memory the tensors of a forward take, counted without computing it: on torch's device "meta"."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .comparison import apart, with_random_weights
from .replacement import Replacement
from .shadow import shadow


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


def count_bytes(of: Replacement, module: nn.Module, lengths: tuple[int, ...], parent: Any = None) -> tuple[tuple[Any, Any], ...]:
    """Return how many bytes the tensors of one sequence's forward take at most at a time, in float32, beside the weights.

    For each length, of the stock forward and of ours; None if the forward needs values.

    What the operator keeps for the time of a call in blocks is not counted. parent: the module around it.
    """

    def count(model: Any, length: int, by_ours: bool) -> int | None:
        try:
            run = shadow(model, lambda tensor: tensor)  # a forward may keep what it makes
            of.prepare(run)
            given = of.at_length(run, length, parent)
            with torch.no_grad(), _Counter() as counter:
                of.by_ours(run, given) if by_ours else of.by_stock(run, (), given)
            return counter.peak
        except Exception:  # a stock forward may raise anything
            return None

    def count_all() -> tuple[tuple[Any, Any], ...]:
        model = with_random_weights(module, "meta").eval()
        with torch.device("meta"):
            return tuple((count(model, length, False), count(model, length, True)) for length in lengths)

    return apart(count_all)
