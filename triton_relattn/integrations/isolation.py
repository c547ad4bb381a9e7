"""What surrounds a forward that is compared: its dropout, its casts to float32, and the state of the process."""

from __future__ import annotations

import contextvars
import inspect
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

T = TypeVar("T")
_RANDOM_STATE = threading.RLock()
_MULTI_HEAD = inspect.signature(nn.functional.multi_head_attention_forward)
_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class _Noted(threading.local):
    """The probabilities with which the forward that is compared now drops attention weights; None if none is compared."""

    probabilities: list[float] | None = None


_NOTED = _Noted()


def weights_dropout(p: float) -> float:
    """Return the probability with which ours drops attention weights: in a comparison 0, and p is noted."""
    if _NOTED.probabilities is None:
        return p
    if p > 0:
        _NOTED.probabilities.append(p)
    return 0.0


def are_shares(tensor: torch.Tensor) -> bool:
    """Return whether a tensor may be attention weights: no number is negative, and no row's sum is more than one, or all sums
    along another dimension are one.
    """
    if tensor.dim() < 3 or bool((tensor < 0).any()):
        return False
    if not bool((tensor.detach().sum(-1, dtype=torch.float32) > 1.05).any()):
        return True
    return any(bool(((tensor.detach().sum(dim) - 1).abs() < 1e-3).all()) for dim in range(tensor.dim() - 1))


class Dropout(TorchFunctionMode):
    """Dropout of attention weights does nothing and is noted; other dropout multiplies by a pattern that both forwards share."""

    def __init__(self) -> None:
        self.noted = list[float]()
        super().__init__()

    def __enter__(self) -> Any:
        _NOTED.probabilities = self.noted
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _NOTED.probabilities = None
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (nn.functional.dropout, torch.dropout):
            given = {**dict(zip(("input", "p", "training", "train"), args, strict=False)), **kwargs}
            states, p = given["input"], given.get("p", 0.5)
            if not given.get("training", given.get("train", True)) or p == 0:
                return states
            if are_shares(states):
                self.noted.append(p)
                return states
            pattern = torch.linspace(1 - p, 1 + p, states.numel(), dtype=states.dtype, device=states.device)
            return states * pattern.view(states.shape)
        if func is nn.functional.multi_head_attention_forward:
            given = _MULTI_HEAD.bind(*args, **kwargs).arguments
            if given.get("training", True):
                weights_dropout(given["dropout_p"])
            return func(**{**given, "dropout_p": 0.0})
        if func is nn.functional.scaled_dot_product_attention:
            given = {**dict(zip(_SDPA, args, strict=False)), **kwargs}
            weights_dropout(given.pop("dropout_p", 0.0))
            return func(**given)
        return func(*args, **kwargs)


class Promoted(TorchFunctionMode):
    """Casts to float32 give float64, so that a forward in float64 computes in float64 alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def in_own_thread(function: Callable[[], T]) -> T:
    """Call function in a thread, without the caller's modes, autocast and default device; random states are put back."""
    threads = torch.get_num_threads()

    def call() -> T:
        torch.set_num_threads(threads)  # a new thread starts with all of the machine's
        with random_state_restored(()):
            torch.default_generator.manual_seed(0)
            return function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.Context().run, call).result()


@contextmanager
def random_state_restored(devices: tuple[torch.device, ...]) -> Iterator[None]:
    """Put back the random states of torch, Python and NumPy. They are the process's: one thread does so at a time."""
    with _RANDOM_STATE, torch.random.fork_rng(devices=devices):
        drawn, numpy = random.getstate(), sys.modules.get("numpy")
        state = numpy.random.get_state() if numpy else None
        try:
            yield
        finally:
            random.setstate(drawn)
            if numpy:
                numpy.random.set_state(state)
