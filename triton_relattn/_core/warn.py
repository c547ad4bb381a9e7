"""Warnings that are given once in a process."""

from __future__ import annotations

import warnings

_given: set[str] = set()


def warn_once(about: str, text: str, stacklevel: int = 2, category: type[Warning] = RuntimeWarning) -> None:
    """Warn, unless this process has warned about the same thing before."""
    if about not in _given:
        _given.add(about)
        warnings.warn(text, category, stacklevel=stacklevel + 1)


def was_given(about: str) -> bool:
    return about in _given
