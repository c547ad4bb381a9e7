"""The implementations, each an object that is registered once, and the choice of one for a call."""

from __future__ import annotations

import torch

from .._core.untraced import untraced
from .._core.warn import warn_once
from .base import Implementation
from .blockwise import Blockwise
from .dense import Dense
from .hardware import warn_of_unchecked
from .kernels import Kernels

TRITON, BLOCKWISE = Kernels(), Blockwise()
IMPLEMENTATIONS: dict[str, Implementation] = {each.name: each for each in (TRITON, BLOCKWISE, Dense())}
"""By name, as the argument ``implementation`` and the operators' schemas have it."""


@untraced
def _warn_of_blockwise(reason: str) -> None:
    """Warn that a GPU gets blockwise. That is expected for float64, but usually a mistake if Triton does not load."""
    text = f'a call on a GPU is computed by "blockwise", in plain torch, since the Triton kernels cannot serve it: {reason}. '
    warn_once(reason, text + 'implementation="blockwise" asks for that without this warning', stacklevel=5)


def _refusal(name: str, reason: str) -> NotImplementedError:
    return NotImplementedError(f'implementation="{name}" cannot run here: {reason}. implementation=None picks one that can.')


def can_run_triton(
    query: torch.Tensor,
    value: torch.Tensor,
    rel_query: torch.Tensor | None = None,
    *,
    raise_error: bool = False,
) -> bool:
    """Return whether the Triton kernels can serve tensors of this device, dtype and width.

    Raises:
        NotImplementedError: with ``raise_error=True``, if they cannot; the message says why and what to do.
    """
    reason = TRITON.why_not(query, value, rel_query)
    if reason is not None and raise_error:
        raise _refusal(TRITON.name, reason)
    return reason is None


def choose_implementation(
    name: str | None,
    query: torch.Tensor,
    value: torch.Tensor,
    rel_query: torch.Tensor | None = None,
) -> Implementation:
    """Return the implementation to use: the one asked for, or by default triton on a GPU that can run it, else blockwise.

    On a GPU that cannot run triton the default comes with a warning that says why. Kernels on a GPU come with a warning if
    Triton is newer than the newest that they were tested with, and by default if nobody has checked them on such a GPU. Each is
    given once in a process.

    Raises:
        ValueError: an unknown name.
        NotImplementedError: one was asked for and cannot run; there is no silent fallback.
    """
    if name is None:
        if query.device.type != "cuda":
            return BLOCKWISE
        reason = TRITON.why_not(query, value, rel_query)
        if reason is not None:
            _warn_of_blockwise(reason)
            return BLOCKWISE
        TRITON.warn(query.device)
        warn_of_unchecked(query.device)
        return TRITON
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {tuple(IMPLEMENTATIONS)}, got {name!r}")
    found = IMPLEMENTATIONS[name]
    if reason := found.why_not(query, value, rel_query):
        raise _refusal(name, reason)
    found.warn(query.device)
    return found
