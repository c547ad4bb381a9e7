"""The choice of an implementation. One predicate decides whether the kernels can serve a call, and says why not."""

from __future__ import annotations

import functools
import re

import torch

from .untraced import untraced
from .warn import warn_once

IMPLEMENTATIONS = ("triton", "blockwise", "reference")
MAX_TRITON_WIDTH = 256
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NO_TRITON = (
    "the package triton is not installed. On Linux, torch's builds for NVIDIA, ROCm and XPU each bring their own: install torch "
    "again from its index for your GPU. On Windows: pip install triton-windows. Beside torch's build for CPUs, to run the "
    "kernels in Triton's interpreter: pip install triton"
)
NEWEST_TRITON = (3, 9)
"""The newest version of Triton that the tests have compiled every kernel with; see docs/versions.md."""
WITH_FENCES = (3, 7, 1)
"""The first that has the fences on Hopper that attention on a grid needs: docs/versions.md."""


@untraced
def _why_no_kernels(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the Triton kernels cannot serve a device and a dtype, with what to do about it; None if they can."""
    try:
        from ..kernels import kernels_are_interpreted

        interpreted = kernels_are_interpreted()
    except Exception as error:  # a damaged or an old triton may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == "triton":
            return NO_TRITON
        return f"the kernels cannot be loaded: {type(error).__name__}: {error}"
    if interpreted:
        if dtype == torch.bfloat16:
            return "Triton's interpreter computes bfloat16 wrongly; use float16 or float32 there, or a GPU"
    elif device.type != "cuda":
        return (
            f"the tensors are on {device}, not on a GPU; move them there, or set TRITON_INTERPRET=1 before the first "
            "import of triton and triton_relattn.kernels to run the kernels in Triton's (slow) interpreter"
        )
    elif torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} has no bfloat16 matrix units; compute capability 8.0 is needed"
    if dtype not in TRITON_DTYPES:
        return f"the kernels compute in float16, bfloat16 and float32, not in {dtype}"
    return None


def _why_not_triton(
    query: torch.Tensor, value: torch.Tensor, rel_query: torch.Tensor | None, on_grid: bool = False
) -> str | None:
    """Return why the Triton kernels cannot serve these tensors, with what to do about it; None if they can."""
    if reason := _why_no_kernels(query.device, query.dtype):
        return reason
    if on_grid and (reason := _why_not_on_a_grid(query.device)):
        return reason
    widths = {"query": query.shape[-1], "value": value.shape[-1]}
    if rel_query is not None:
        widths["rel_query"] = rel_query.shape[-1]
    if max(widths.values()) > MAX_TRITON_WIDTH:
        got = ", ".join(f"{width} ({name})" for name, width in widths.items())
        return f"the kernels take head widths up to {MAX_TRITON_WIDTH}, got {got}"
    return None


def _triton_version() -> tuple[int, ...] | None:
    """Return major, minor and patch of Triton; None if its name has no such numbers."""
    import triton

    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", triton.__version__)
    return None if found is None else tuple(int(each or 0) for each in found.groups())


def lacks_fences() -> bool:
    """Return whether Triton leaves out most fences on Hopper between stores to shared memory and products that read it."""
    version = _triton_version()
    return version is not None and version < WITH_FENCES


@untraced
def _why_not_on_a_grid(device: torch.device) -> str | None:
    """Return why a GPU may get wrong numbers for attention on a grid, with what to do about it; None if it does not."""
    if device.type != "cuda" or torch.version.hip is not None or not lacks_fences():
        return None
    if torch.cuda.get_device_capability(device)[0] != 9:
        return None
    return (
        "on Hopper, this version of Triton leaves out fences that attention on a grid needs; install a torch that brings "
        f"{'.'.join(map(str, WITH_FENCES))} or newer"
    )


@untraced
def _warn_of_blockwise(reason: str) -> None:
    """Warn that a GPU gets blockwise. Float64 may be meant, but a triton that does not load hardly is."""
    text = f'a call on a GPU is computed by "blockwise", in plain torch, since the Triton kernels cannot serve it: {reason}. '
    warn_once(reason, text + 'implementation="blockwise" asks for that without this warning', stacklevel=5)


@functools.cache
def _untested_triton() -> str | None:
    """Return the version of Triton if it is newer than the newest that the kernels were tested with; else None."""
    import triton

    version = _triton_version()
    is_newer = version is not None and version[:2] > NEWEST_TRITON
    return triton.__version__ if is_newer else None


@untraced
def _warn_of_untested_triton(device: torch.device) -> None:
    """Warn that kernels on a GPU are compiled by a Triton that came after the tests. They may be slow there, or even wrong."""
    version = _untested_triton()
    if version is None or device.type != "cuda":
        return
    from ..kernels import kernels_are_interpreted

    if not kernels_are_interpreted():
        newest = ".".join(map(str, NEWEST_TRITON))
        text = f"Triton {version} is newer than {newest}, the newest that the kernels were tested with. "
        cure = 'Check them on this GPU ("make gpu" in a clone of triton_relattn), or use implementation="blockwise"'
        warn_once("untested triton", text + cure, stacklevel=5)


def can_run_triton(
    query: torch.Tensor,
    value: torch.Tensor,
    rel_query: torch.Tensor | None = None,
    *,
    raise_error: bool = False,
    on_grid: bool = False,
) -> bool:
    """Return whether the Triton kernels can serve tensors of this device, dtype and width.

    Args:
        on_grid: whether those of attention on a grid can.

    Raises:
        NotImplementedError: with ``raise_error=True``, if they cannot; the message says why and what to do.
    """
    reason = _why_not_triton(query, value, rel_query, on_grid)
    if reason is not None and raise_error:
        raise NotImplementedError(f'implementation="triton" cannot run here: {reason}. implementation=None picks one that can.')
    return reason is None


def choose_implementation(
    implementation: str | None,
    query: torch.Tensor,
    value: torch.Tensor,
    rel_query: torch.Tensor | None = None,
    on_grid: bool = False,
) -> str:
    """Return the implementation to use: the one asked for, or by default triton on a GPU that can run it, else blockwise.

    On a GPU that cannot run triton the default comes with a warning that says why. Kernels on a GPU come with a warning if Triton
    is newer than the newest that they were tested with. Each is given once in a process.

    Raises:
        ValueError: an unknown name.
        NotImplementedError: "triton" was asked for and cannot run; there is no silent fallback.
    """
    if implementation is None:
        if query.device.type != "cuda":
            return "blockwise"
        reason = _why_not_triton(query, value, rel_query, on_grid)
        if reason is None:
            _warn_of_untested_triton(query.device)
            return "triton"
        _warn_of_blockwise(reason)
        return "blockwise"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {IMPLEMENTATIONS}, got {implementation!r}")
    if implementation == "triton":
        can_run_triton(query, value, rel_query, raise_error=True, on_grid=on_grid)
        _warn_of_untested_triton(query.device)
    return implementation
