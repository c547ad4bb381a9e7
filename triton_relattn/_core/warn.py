"""Warnings that are given once in a process, errors in one line, and functions that torch.compile calls while it traces."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
OURS = (f"{__name__.partition('.')[0]}.", "torch.nn.modules.")
"""How the names of modules begin that are no user's."""
_given: set[str] = set()


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the user's line that led here, however many calls of ours are between."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(OURS):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def warn_once(about: str, text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn, unless this process has warned about the same thing before."""
    if about not in _given:
        _given.add(about)
        warn(text, category)


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]


def was_given(about: str) -> bool:
    """Return whether this process has warned about something."""
    return about in _given


def untraced(function: Function) -> Function:
    """Let torch.compile call a function while it traces. torch.compiler.assume_constant_result would import torch._dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
