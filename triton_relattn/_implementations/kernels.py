"""The Triton kernels as an implementation: whether they can serve a call, and if not why; forward and backward."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

import torch

from .._core.dtypes import compute_dtype, new_like
from .._core.grids import GridTensors
from .._core.residual import keeps_residual
from .._core.spec import AttentionSpec, AttentionTensors
from .._core.untraced import untraced
from .._core.warn import warn_once
from .base import Gradients, Implementation, Results, Saved

MAX_TRITON_WIDTH = 256
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NO_TRITON = (
    "the package triton is not installed. On Linux, torch's builds for NVIDIA, ROCm and XPU each bring their own: install torch "
    "again from its index for your GPU. On Windows: pip install triton-windows. Beside torch's build for CPUs, to run the "
    "kernels in Triton's interpreter: pip install triton"
)
NEWEST_TRITON = (3, 9)
"""The newest version of Triton that the tests have compiled every kernel with; see docs/versions.md."""


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


def _triton_version() -> tuple[int, ...] | None:
    """Return major, minor and patch of Triton; None if its name has no such numbers."""
    import triton

    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", triton.__version__)
    return None if found is None else tuple(int(each or 0) for each in found.groups())


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
        warn_once("untested triton", text + cure, stacklevel=6)


class Kernels(Implementation):
    """The Triton kernels. They save out and the softmax statistics for the backward, and for some calls the residual of out."""

    name = "triton"
    saves_statistics = True

    def why_not(self, query: torch.Tensor, value: torch.Tensor, rel_query: torch.Tensor | None = None) -> str | None:
        if reason := _why_no_kernels(query.device, query.dtype):
            return reason
        widths = {"query": query.shape[-1], "value": value.shape[-1]}
        if rel_query is not None:
            widths["rel_query"] = rel_query.shape[-1]
        if max(widths.values()) > MAX_TRITON_WIDTH:
            got = ", ".join(f"{width} ({name})" for name, width in widths.items())
            return f"the kernels take head widths up to {MAX_TRITON_WIDTH}, got {got}"
        return None

    def warn(self, device: torch.device) -> None:
        _warn_of_untested_triton(device)

    def keeps(self, tensors: AttentionTensors, spec: AttentionSpec) -> bool:
        return keeps_residual(tensors)

    def empty_results(self, tensors: AttentionTensors, spec: AttentionSpec, keeps: bool) -> Results:
        query, dtype = tensors.query, compute_dtype(tensors.query.dtype)
        out = new_like(query, tensors.value.shape[-1])
        statistics = query.new_empty((*query.shape[:2], 2, query.shape[2]), dtype=dtype)
        return Results(
            out, query.new_empty(query.shape[:3], dtype=dtype), statistics, torch.empty_like(out) if keeps else query.new_empty(0)
        )

    def forward(self, tensors: AttentionTensors, spec: AttentionSpec, keeps: bool) -> Results:
        from ..kernels.forward import forward

        with torch.cuda.device_of(tensors.query):
            out, lse, softmax_stats, residual = forward(tensors, spec, keeps_residual=keeps)
        return Results(out, lse, softmax_stats, tensors.query.new_empty(0) if residual is None else residual)

    def backward(
        self,
        d_out: torch.Tensor,
        d_lse: torch.Tensor | None,
        saved: Saved,
        tensors: AttentionTensors,
        spec: AttentionSpec,
        wanted: Sequence[bool],
    ) -> Gradients:
        from ..kernels.backward import backward

        with torch.cuda.device_of(tensors.query):
            return backward(d_out, d_lse, saved.out, saved.softmax_stats, tensors, spec, wanted, residual=saved.kept)

    def empty_grid_results(self, tensors: GridTensors) -> tuple[torch.Tensor, torch.Tensor]:
        batch, heads, length, _ = tensors.query.shape
        out = tensors.query.new_empty(batch, heads, length, tensors.value.shape[3])
        return out, tensors.query.new_empty((batch, heads, 2, length), dtype=torch.float32)

    def grid_forward(self, tensors: GridTensors, scale: float, dropout_p: float) -> tuple[torch.Tensor, torch.Tensor]:
        from ..kernels.grid.forward import forward

        with torch.cuda.device_of(tensors.query):
            return forward(tensors, scale, dropout_p)

    def grid_backward(
        self,
        d_out: torch.Tensor,
        out: torch.Tensor | None,
        softmax_stats: torch.Tensor,
        tensors: GridTensors,
        scale: float,
        dropout_p: float,
        wanted: Sequence[bool],
    ) -> Gradients:
        from ..kernels.grid.backward import backward

        with torch.cuda.device_of(d_out):
            return backward(d_out, out, softmax_stats, tensors, scale, dropout_p, wanted)
