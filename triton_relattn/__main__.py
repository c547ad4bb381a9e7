"""What the demo runs on, and which implementation serves it."""

from __future__ import annotations

import importlib.metadata
import platform
import textwrap
from dataclasses import dataclass

import torch

from .. import __version__
from ..backends import can_run_triton, choose_implementation


@dataclass(frozen=True)
class Environment:
    """Versions, device and the choice of implementation."""

    python: str
    torch: str
    triton: str
    package: str
    device: str
    """"cpu" or "cuda"."""
    device_name: str
    threads: int
    implementation: str
    """What ``implementation=None`` picks here."""
    reason: str

    def __str__(self) -> str:
        lines = (
            f"triton_relattn {self.package}, torch {self.torch}, triton {self.triton}, Python {self.python}",
            f"device: {self.device_name}",
            f"implementation: {self.implementation}. {self.reason}",
        )
        return "\n".join(textwrap.fill(line, 110, initial_indent="  ", subsequent_indent="    ") for line in lines)


def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    capability = torch.backends.cpu.get_cpu_capability()
    return f"CPU, {platform.machine()} ({capability}), {torch.get_num_threads()} threads"


def describe(device: str, width: int) -> Environment:
    """The environment on ``device`` ("cpu" or "cuda"), with the implementation chosen for float32 heads of ``width``."""
    probe = torch.empty(1, 1, 1, width, device=device)
    implementation = choose_implementation(None, probe, probe)
    reason = "The Triton kernels can serve this device."
    if implementation != "triton":
        try:
            can_run_triton(probe, probe, raise_error=True)
            reason = "Triton's interpreter is for tests only."
        except RuntimeError as error:
            reason = str(error)
    return Environment(
        python=platform.python_version(),
        torch=torch.__version__,
        triton=_triton_version(),
        package=__version__,
        device=device,
        device_name=_device_name(device),
        threads=torch.get_num_threads(),
        implementation=implementation,
        reason=reason,
    )
