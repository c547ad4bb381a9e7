"""Whether the kernels have computed right numbers on a GPU: in the authors' measurements, or in a check on this machine."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from .._core.cache import digest, fingerprints, recall, remember
from .._core.untraced import untraced
from .._core.warn import warn_once

MEASURED = frozenset({(9, 0)})
"""Compute capabilities of the GPUs that have passed: bench/results/h100. They get no warning."""
FOLDER = "checked"


@functools.cache
def identity(device: torch.device) -> str:
    """Return a name for all that a check depends on: the GPU, torch, Triton, and the files of this package."""
    import triton

    gpu = torch.cuda.get_device_properties(device).name, torch.cuda.get_device_capability(device)
    ours = digest(fingerprints(Path(__file__).parents[1].rglob("*.py")))[:16]
    return " ".join(map(str, (*gpu, torch.__version__, triton.__version__, ours)))


@functools.cache
def is_checked(device: torch.device) -> bool:
    """Return whether ``python -m triton_relattn check`` had passed here with these versions when it was first asked for."""
    return recall(FOLDER, identity(device)) is not None


def remember_check(device: torch.device) -> bool:
    """Remember that a check has passed; return whether the user's folder could be written."""
    remembered = remember(FOLDER, identity(device), "passed")
    is_checked.cache_clear()
    return remembered


@untraced
def warn_of_unchecked(device: torch.device) -> None:
    """Warn once that kernels run by default on a kind of GPU that is not in MEASURED, unless a check has passed here."""
    if torch.cuda.get_device_capability(device) in MEASURED or is_checked(device):
        return
    warn_once(
        "unchecked",
        "the Triton kernels have not run on this kind of GPU. They were tested on an H100 (Triton 3.6), in an emulator of "
        "the compiled code and in Triton's interpreter. "
        'Check them on this GPU: "python -m triton_relattn check" takes a minute and ends this warning. '
        'implementation="triton" uses them without it, implementation="blockwise" computes in plain PyTorch',
        stacklevel=6,
    )
