"""Functions that torch.compile calls while it traces, instead of tracing them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """Make torch.compile call a function while it traces, and take the result as a constant.

    ``torch.compiler.assume_constant_result`` does the same, but imports torch._dynamo for it, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
