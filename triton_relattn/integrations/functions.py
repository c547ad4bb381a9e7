"""A function of a library in which a name means another function."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


def with_names(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Return function with other values for names of its module: for a model that calls what makes masks by a module's name.

    The code stays the library's own, and the library's module as it is.
    """
    changed = types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__, function.__closure__
    )
    changed.__kwdefaults__ = function.__kwdefaults__
    return changed
