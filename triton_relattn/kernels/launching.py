"""Launches of compiled kernels without Triton's search for them.

At each launch Triton looks at every argument, of which kernels here have up to a hundred, in groups. All but a few follow from
what alike calls share, so the kernels that they have compiled are kept there: ``CallConstants``. On an H100, forward and
backward of a short call took the host 1.6 times as long without (Triton 3.6, bench/results/h100).
"""

from __future__ import annotations

from typing import Any

import torch
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from .fences import compile_options

LAUNCH_OPTIONS = {"enable_fp_fusion": True}
"""Passed to every launch: Triton 3.9 warns where it is left out, because 3.10 changes the default."""
ALIGNMENT = 16  # Triton tells apart whether the bytes of a pointer are a multiple of it

_run = JITFunction.run
_unspecialized: dict[Any, frozenset[str]] = {}


def specialization(argument: Any) -> Any:
    """Return all that Triton may compile for of an argument: a tensor's dtype and alignment, each member of a group, or the
    value."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNMENT
    return tuple(map(specialization, argument)) if isinstance(argument, tuple) else argument


def launch(
    kernel: Any,
    programs: tuple[int, ...],
    shared: dict[str, Any],
    arguments: dict[str, Any],
    options: dict[str, Any],
    compiled: dict[Any, Any],
    key: tuple[Any, ...],
) -> None:
    """Launch a kernel as ``kernel[programs](**shared, **arguments, **options)`` does. key stands for shared, options and what
    else Triton may compile for, but the device and the arguments; compiled has the kernels of earlier launches."""
    # Triton does no more than launch: it is neither interpreted nor replaced, nor asked to compile in another way.
    is_usual = (
        isinstance(kernel, JITFunction)
        and JITFunction.run is _run
        and not kernel.pre_run_hooks
        and not knobs.runtime.debug
        and not knobs.compilation.instrumentation_mode
        and knobs.runtime.add_stages_inspection_hook is None
    )
    if is_usual:
        names = _unspecialized.get(kernel.fn)
        if names is None:
            names = _unspecialized[kernel.fn] = frozenset(param.name for param in kernel.params if param.do_not_specialize)
        device = driver.active.get_current_device()
        values = [_width(value) if name in names else specialization(value) for name, value in arguments.items()]
        key = kernel.fn, device, *key, *values
        found = compiled.get(key)
        if found is not None:
            named = shared | arguments
            found[(*programs, 1, 1)](*[named[name] for name in kernel.arg_names], stream=driver.active.get_current_stream(device))
            return
    found = kernel[programs](**shared, **arguments, **options, **compile_options(kernel), **LAUNCH_OPTIONS)
    if is_usual and found is not None and found.metadata.target.backend == "cuda":  # AMD's are compiled for sizes of tensors, too
        compiled[key] = found


def _width(number: int | None) -> int | None:
    """Return the bits in which Triton passes a whole number that no kernel is compiled for."""
    return None if number is None else 32 if -(2**31) <= number < 2**31 else 64
