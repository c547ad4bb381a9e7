"""Whether the kernels have computed right numbers on a GPU before: that of the authors' measurements, or in a check on
this machine.
"""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

import torch

from .._core.cache import cache_folder
from .._core.untraced import untraced
from .._core.warn import warn_once

MEASURED: frozenset[tuple[int, int]] = frozenset()
"""Compute capabilities of which bench/results has a run of ``make gpu`` that passed. Their GPUs get no warning."""


@functools.cache
def identity(device: torch.device) -> str:
    """Return a name for all that a check depends on: the GPU, torch, Triton, and the files of this package."""
    import triton

    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    properties = torch.cuda.get_device_properties(device)
    return " ".join(
        (
            properties.name,
            str(torch.cuda.get_device_capability(device)),
            torch.__version__,
            triton.__version__,
            digest.hexdigest()[:16],
        )
    )


def _file(name: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / "checked" / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.txt"


@functools.cache
def is_checked(device: torch.device) -> bool:
    """Return whether ``python -m triton_relattn check`` had passed for this GPU and these versions when it was first
    asked for.
    """
    name = identity(device)
    path = _file(name)
    try:
        return path is not None and path.read_text().startswith(name)
    except (OSError, UnicodeDecodeError):
        return False


def remember(device: torch.device, said: str) -> bool:
    """Remember that a check has passed; return whether the user's folder could be written."""
    name = identity(device)
    path = _file(name)
    if path is None:
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", opener=_not_through_a_link) as file:
            file.write(f"{name}\n{said}\n")
    except OSError:
        return False
    is_checked.cache_clear()
    return True


def _not_through_a_link(path: str, flags: int) -> int:
    """Open a file that is no link."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)


@untraced
def warn_of_unchecked(device: torch.device) -> None:
    """Warn once that kernels run by default on a GPU of a kind on which nobody has checked them."""
    if torch.cuda.get_device_capability(device) in MEASURED or is_checked(device):
        return
    warn_once(
        "unchecked",
        "the Triton kernels have been tested in an emulator of the compiled code and in Triton's "
        "interpreter, not on hardware yet. "
        'Check them on this GPU: "python -m triton_relattn check" takes a minute and ends this warning. '
        'implementation="triton" asks for them without it, implementation="blockwise" computes in plain torch',
        stacklevel=6,
    )
