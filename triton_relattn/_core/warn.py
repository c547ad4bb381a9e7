"""Warnings that are given once in a process, and functions that torch.compile calls while it traces, instead of tracing them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
_given: set[str] = set()


def warn_once(about: str, text: str, stacklevel: int = 2, category: type[Warning] = RuntimeWarning) -> None:
    """Warn, unless this process has warned about the same thing before."""
    if about not in _given:
        _given.add(about)
        warnings.warn(text, category, stacklevel=stacklevel + 1)


def was_given(about: str) -> bool:
    """Return whether this process has warned about something."""
    return about in _given


def untraced(function: Function) -> Function:
    """Let torch.compile call a function while it traces. torch.compiler.assume_constant_result would import torch._dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
