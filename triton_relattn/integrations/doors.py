"""The functions enable and disable of one library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .._core.names import with_names
from .report import Report

ENABLE = """{summary}

:func:`triton_relattn.enable` does the same for models of all libraries, and says how modules are compared before.

Args:
    module: {module} Other models of the same class stay as they are; so do checkpoints, parameters and hooks.
    lengths: for which the report counts memory, in positions.
    check_calls: whether some of your calls are compared with the stock forward.

Returns:
    The report of :func:`triton_relattn.enable`: a dict of the names of the modules, as ``module.named_modules()`` has them, and
    of their stock classes. Empty if all of it was enabled before.

{text}

Raises:
    ValueError: nothing in module is of these classes.
    RuntimeError: all modules that are were refused; the message has the reasons.
    TypeError: module is no module and holds none; lengths that are not integers.

Example:
{example}
"""
DISABLE = """Undo :func:`enable` in module and all inside it.

Returns:
    The names of the modules that are stock again, and of their classes; empty if none was enabled.
"""


def functions(
    package: str, *, summary: str, module: str, text: str, example: str
) -> tuple[Callable[..., Report], Callable[[Any], dict[str, str]]]:
    """Return the functions enable and disable of a library, with their docstrings."""
    from . import every

    @with_names
    def enable(module: Any, *, lengths: int | Sequence[int] = 4096, check_calls: bool = True) -> Report:
        return every.enable_in(module, lengths, check_calls, (package.rpartition(".")[2],), structures=False)

    def disable(module: Any) -> dict[str, str]:
        return every.disable(module)

    lines = "\n".join(f"    {line}" for line in example.strip().splitlines())
    enable.__doc__ = ENABLE.format(summary=summary, module=module, text=text.strip(), example=lines)
    disable.__doc__ = DISABLE
    for function in (enable, disable):
        function.__qualname__, function.__module__ = function.__name__, package
    return enable, disable
