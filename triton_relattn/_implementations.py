"""The implementations of attention, over a sequence and on a grid, and the choice of one for a call.

triton      kernels, on a GPU or in Triton's interpreter
blockwise   plain torch, block by block: linear memory on any device
reference   plain torch, densely: every step is a line of the formula, and autograd differentiates it
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch

from ._blockwise import attention, grids
from ._core.cache import digest, fingerprints, recall, remember
from ._core.dtypes import compute_dtype, keeps_residual, new_like, without_autocast
from ._core.spec import AttentionSpec, AttentionTensors, GridTensors
from ._core.warn import untraced, warn_once
from ._reference import resolved_reference

Tensors: TypeAlias = AttentionTensors | GridTensors
Spec: TypeAlias = Any  # AttentionSpec with AttentionTensors, GridSpec with GridTensors
Results: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Of a forward: out (B, Hq, Nq, Dv), lse (B, Hq, Nq), and for the backward softmax_stats (B, Hq, 2, Nq) and extra; None where
there is none."""
Saved: TypeAlias = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""For a backward: out, softmax_stats and extra, None where they were not saved."""
Gradients: TypeAlias = tuple[torch.Tensor | None, ...]
"""Of the tensors that are differentiable, in their order; None where none is needed or the tensor is absent."""


class Implementation:
    """One way to compute attention, over a sequence and on a grid; its methods get records that have been validated."""

    name: str
    saves_stats = False  # whether the backward needs out and softmax_stats
    saves_extra: Callable[[AttentionTensors, AttentionSpec], bool]  # whether the backward should have extra: save_extra below
    empty_results: Callable[[Tensors, Spec, bool], Results]  # (tensors, spec, save_extra), also of tensors without memory
    forward: Callable[[Tensors, Spec, bool], Results]  # (tensors, spec, save_extra)
    backward: Callable[[torch.Tensor, torch.Tensor | None, Saved, Tensors, Spec, Sequence[bool]], Gradients]

    def prepared(self, tensors: AttentionTensors, spec: AttentionSpec, save_extra: bool) -> Callable[..., Results]:
        """Return the forward of calls of one kind, as a function of the tensors one by one."""
        return lambda *given: self.forward(AttentionTensors(*given), spec, save_extra)

    def surroundings(self, query: torch.Tensor) -> Any:
        """Return what else than the tensors and the spec a prepared forward depends on."""
        return None

    def why_not(self, query: torch.Tensor, value: torch.Tensor, rel_query: torch.Tensor | None = None) -> str | None:
        """Return why it cannot serve these tensors, with what to do about it; None if it can."""
        return None


class Reference(Implementation):
    """The formula, in O(Nq * Nk) memory. It is no operator: autograd sees each of its steps."""

    name = "reference"

    def attend(self, tensors: AttentionTensors, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse."""
        with without_autocast(tensors.query.device):
            return resolved_reference(tensors, spec)


class Blockwise(Implementation):
    """Plain torch, whose backward needs no statistics. extra of short calls: the probabilities (B, Hq, Nq, Nk)."""

    name = "blockwise"

    def saves_extra(self, tensors: AttentionTensors, spec: AttentionSpec) -> bool:
        # Not while torch.compile traces: it would have to fix the sizes.
        return not torch.compiler.is_compiling() and attention.keeps_probs(tensors, spec)

    def empty_results(self, tensors: Tensors, spec: Spec, save_extra: bool) -> Results:
        if isinstance(tensors, GridTensors):
            return grids.new_out(tensors), None, None, None
        out = new_like(tensors.query, tensors.value.shape[-1])
        return out, attention.new_lse(tensors, spec), None, self._empty_probs(tensors, spec, save_extra)

    def forward(self, tensors: Tensors, spec: Spec, save_extra: bool) -> Results:
        if isinstance(tensors, GridTensors):
            return grids.forward(tensors, spec.scale, spec.dropout_p), None, None, None
        probs = self._empty_probs(tensors, spec, save_extra)
        out, lse = attention.forward(tensors, spec, probs)  # products are written into tensors, out of reach of autocast
        return out, lse, None, probs

    def backward(
        self,
        d_out: torch.Tensor,
        d_lse: torch.Tensor | None,
        saved: Saved,
        tensors: Tensors,
        spec: Spec,
        needs_grad: Sequence[bool],
    ) -> Gradients:
        with without_autocast(tensors.query.device):
            if isinstance(tensors, GridTensors):
                return grids.backward(d_out, tensors, spec.scale, spec.dropout_p, needs_grad)
            _, _, probs = saved
            return attention.backward(d_out, d_lse, tensors, spec, needs_grad, probs)

    def _empty_probs(self, tensors: AttentionTensors, spec: AttentionSpec, save_extra: bool) -> torch.Tensor | None:
        """Allocate the probabilities, if they are saved."""
        query = tensors.query
        if not save_extra:
            return None
        # Of keys outside a block's window they are 0: the backward, whose blocks depend on the number of threads, may read them.
        new = query.new_empty if max(spec.window_left, spec.window_right) < 0 else query.new_zeros
        return new((*query.shape[:3], tensors.key.shape[2]), dtype=compute_dtype(query.dtype))


MAX_TRITON_WIDTH = 256
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Triton(Implementation):
    """The Triton kernels. extra of some calls: the residual of out (_core/dtypes.py)."""

    name = "triton"
    saves_stats = True

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

    def saves_extra(self, tensors: AttentionTensors, spec: AttentionSpec) -> bool:
        return keeps_residual(tensors)

    def prepared(self, tensors: AttentionTensors, spec: AttentionSpec, save_extra: bool) -> Callable[..., Results]:
        if _on_gpu_of(tensors.query) is not HERE:
            return super().prepared(tensors, spec, save_extra)
        return _kernels().forward.prepared(tensors, spec, save_extra)  # type: ignore[no-any-return]

    def surroundings(self, query: torch.Tensor) -> Any:
        return _kernels().plan.surroundings(query.device)

    def empty_results(self, tensors: Tensors, spec: Spec, save_extra: bool) -> Results:
        query, value_width, dtype = tensors.query, tensors.value.shape[-1], compute_dtype(tensors.query.dtype)
        softmax_stats = query.new_empty((*query.shape[:2], 2, query.shape[2]), dtype=dtype)
        if isinstance(tensors, GridTensors):
            return query.new_empty(*query.shape[:3], value_width), None, softmax_stats, None
        out, lse = new_like(query, value_width), query.new_empty(query.shape[:3], dtype=dtype) if spec.with_lse else None
        return out, lse, softmax_stats, torch.empty_like(out) if save_extra else None

    def forward(self, tensors: Tensors, spec: Spec, save_extra: bool) -> Results:
        kernels = _kernels()
        with _on_gpu_of(tensors.query):
            if isinstance(tensors, GridTensors):
                out, softmax_stats = kernels.grid_forward.forward(tensors, spec.scale, spec.dropout_p)
                return out, None, softmax_stats, None
            return kernels.forward.forward(tensors, spec, keeps_residual=save_extra)  # type: ignore[no-any-return]

    def backward(
        self,
        d_out: torch.Tensor,
        d_lse: torch.Tensor | None,
        saved: Saved,
        tensors: Tensors,
        spec: Spec,
        needs_grad: Sequence[bool],
    ) -> Gradients:
        kernels, (out, softmax_stats, residual) = _kernels(), saved
        with _on_gpu_of(d_out):
            if isinstance(tensors, GridTensors):
                call = tensors, spec.scale, spec.dropout_p, needs_grad
                return kernels.grid_backward.backward(d_out, out, softmax_stats, *call)  # type: ignore[no-any-return]
            given = d_out, d_lse, out, softmax_stats, tensors, spec, needs_grad
            return kernels.backward.backward(*given, residual=residual)  # type: ignore[no-any-return]


HERE: AbstractContextManager[None] = nullcontext()


def _on_gpu_of(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Return a context in which a tensor's GPU is the current one; HERE if it is already."""
    device = tensor.device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return HERE
    return torch.cuda.device(device)  # type: ignore[return-value]


@functools.cache
def _kernels() -> Any:
    """Import the kernels, which needs triton, when they are first used."""
    from .kernels import backward, forward, plan
    from .kernels.grid import backward as grid_backward
    from .kernels.grid import forward as grid_forward

    return SimpleNamespace(forward=forward, backward=backward, plan=plan, grid_forward=grid_forward, grid_backward=grid_backward)


TRITON, BLOCKWISE, REFERENCE = Triton(), Blockwise(), Reference()
IMPLEMENTATIONS: dict[str, Implementation] = {
    implementation.name: implementation for implementation in (TRITON, BLOCKWISE, REFERENCE)
}
"""By name, as the argument ``implementation`` and the operators' schemas have it."""


# The choice.


def choose_implementation(
    name: str | None, query: torch.Tensor, value: torch.Tensor, rel_query: torch.Tensor | None = None
) -> Implementation:
    """Return the implementation asked for, or by default triton on a GPU that can run it, else blockwise. A GPU that gets
    blockwise by default, a Triton newer than the tests, and a GPU that nobody has checked come with a warning, once in a process.
    There is no silent fallback for one that is asked for."""
    if name is None:
        if query.device.type != "cuda":
            return BLOCKWISE
        if reason := TRITON.why_not(query, value, rel_query):
            _warn_blockwise(reason)
            return BLOCKWISE
        warn_unchecked(query.device)
    elif name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None or one of {tuple(IMPLEMENTATIONS)}, got {name!r}")
    elif reason := IMPLEMENTATIONS[name].why_not(query, value, rel_query):
        raise _refusal(name, reason)
    implementation = TRITON if name is None else IMPLEMENTATIONS[name]
    if implementation is TRITON:
        _warn_untested_triton(query.device)
    return implementation


def can_run_triton(
    query: torch.Tensor,
    value: torch.Tensor,
    rel_query: torch.Tensor | None = None,
    *,
    raise_error: bool = False,
) -> bool:
    """Return whether the Triton kernels can serve tensors of this device, dtype and width.

    Raises:
        NotImplementedError: with ``raise_error=True``, if they cannot; the message says why and what to do.
    """
    reason = TRITON.why_not(query, value, rel_query)
    if reason is not None and raise_error:
        raise _refusal(TRITON.name, reason)
    return reason is None


def _refusal(name: str, reason: str) -> NotImplementedError:
    return NotImplementedError(f'implementation="{name}" cannot run here: {reason}. implementation=None picks one that can.')


@untraced
def _warn_blockwise(reason: str) -> None:
    """Warn that a GPU gets blockwise. That is expected for float64, but usually a mistake if Triton does not load."""
    text = f'a call on a GPU is computed by "blockwise", in plain torch, since the Triton kernels cannot serve it: {reason}. '
    warn_once(reason, text + 'implementation="blockwise" asks for that without this warning')


# Whether the kernels can run here, and whether anybody has tested them with this Triton and on this GPU.

NO_TRITON = (
    "the package triton is not installed. On Linux, torch's builds for NVIDIA, ROCm and XPU each bring their own: install torch "
    "again from its index for your GPU. On Windows: pip install triton-windows. Beside torch's build for CPUs, to run the "
    "kernels in Triton's interpreter: pip install triton"
)


@untraced
def _why_no_kernels(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the Triton kernels cannot serve a device and a dtype, with what to do about it; None if they can."""
    try:
        from .kernels import kernels_are_interpreted

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


NEWEST_TRITON = (3, 9)  # the newest version of Triton that the tests have compiled every kernel with; see docs/versions.md


@functools.cache
def _untested_triton() -> str | None:
    """Return the version of Triton if it is newer than the newest that the kernels were tested with; else None."""
    import triton

    numbers = re.match(r"(\d+)\.(\d+)", triton.__version__)  # a development version may have none
    is_newer = numbers is not None and tuple(map(int, numbers.groups())) > NEWEST_TRITON
    return triton.__version__ if is_newer else None


@untraced
def _warn_untested_triton(device: torch.device) -> None:
    """Warn that kernels on a GPU are compiled by a Triton that came after the tests. They may be slow there, or even wrong."""
    version = _untested_triton()
    if version is None or device.type != "cuda":
        return
    from .kernels import kernels_are_interpreted

    if not kernels_are_interpreted():
        newest = ".".join(map(str, NEWEST_TRITON))
        text = f"Triton {version} is newer than {newest}, the newest that the kernels were tested with. "
        cure = 'Check them on this GPU ("make gpu" in a clone of triton_relattn), or use implementation="blockwise"'
        warn_once("untested triton", text + cure)


CHECKED = "checked"  # the folder that remembers checks, in that of the user's files


@functools.cache
def hardware_identity(device: torch.device) -> str:
    """Return a name for all that a check depends on: the GPU, torch, Triton, and the files of this package."""
    import triton

    gpu = torch.cuda.get_device_properties(device).name, torch.cuda.get_device_capability(device)
    ours = digest(fingerprints(Path(__file__).parent.rglob("*.py")))[:16]
    return " ".join(map(str, (*gpu, torch.__version__, triton.__version__, ours)))


@functools.cache
def is_checked(device: torch.device) -> bool:
    """Return whether ``python -m triton_relattn check`` had passed here with these versions when it was first asked for."""
    return recall(CHECKED, hardware_identity(device)) is not None


def remember_check(device: torch.device) -> bool:
    """Remember that a check has passed; return whether the user's folder could be written."""
    remembered = remember(CHECKED, hardware_identity(device), "passed")
    is_checked.cache_clear()
    return remembered


@untraced
def warn_unchecked(device: torch.device) -> None:
    """Warn once that kernels run by default on a GPU where no check has passed."""
    if is_checked(device):
        return
    warn_once(
        "unchecked",
        "the Triton kernels have not been checked on this GPU. Earlier versions were tested on an H100 and an H200 (Triton 3.6), "
        "this one in an emulator of the compiled code and in Triton's interpreter. "
        'Check them on this GPU: "python -m triton_relattn check" takes a few minutes and ends this warning. '
        'implementation="triton" uses them without it, implementation="blockwise" computes in plain PyTorch',
    )
