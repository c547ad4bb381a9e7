"""Launches that do without Triton's search for the compiled kernel, if a launch that was alike has found it.

For each launch Triton looks at every argument, and finds the kernel by what it is compiled for: dtypes, None, alignment of
pointers, numbers that are 1 or multiples of 16, constants. Kernels here have up to a hundred arguments, in groups, and most of
them follow from the sizes and strides of a call. So these are described once for each call, and stand for what Triton looks at.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

LAUNCH_OPTIONS = {"enable_fp_fusion": True}
"""Passed to every launch: Triton 3.9 warns where it is left out, because 3.10 changes the default."""
MOST_COMPILED = 4096
ALIGNMENT = 16  # bytes; Triton tells apart whether a pointer is a multiple of it
PLAIN = (type(None), bool, int, float, str)

_run = JITFunction.run
_compiled: dict[Any, Any] = {}
"""Compiled kernels by all that Triton compiles them for, and more: by every number, where its divisors would do."""


def description(arguments: Iterable[Any]) -> tuple[Any, ...]:
    """Return what a kernel may be compiled for of its arguments: of tensors dtype and alignment, of anything else its value."""
    found, rest = list[Any](), list(arguments)
    for each in rest:
        kind = type(each)
        if kind in PLAIN or (kind is tuple and type(each[0]) in PLAIN):
            found.append(each)
        elif kind is tuple:
            tensor, strides = each
            found += tensor.dtype, tensor.data_ptr() % ALIGNMENT, strides
        elif isinstance(each, tuple):  # a group of arguments, which comes last
            rest += each
        else:
            found += each.dtype, each.data_ptr() % ALIGNMENT
    return tuple(found)


def as_compiled(kernel: Any, arguments: dict[str, Any]) -> list[Any]:
    """Return arguments as Triton compiles the kernel for them: of numbers that it does not specialize only their type. There are
    as many of these as parts of a call."""
    general, found = getattr(kernel, "do_not_specialize", ()), []
    for name, each in arguments.items():
        has_32_bits = type(each) is int and -(2**31) <= each < 2**31
        found.append("i32" if has_32_bits and name in general else each)
    return found


def launch(kernel: Any, programs: tuple[int, ...], arguments: dict[str, Any], likeness: tuple[Any, ...]) -> None:
    """Launch a kernel as ``kernel[programs](**arguments, **LAUNCH_OPTIONS)`` does.

    Args:
        arguments: and options.
        likeness: stands for all that Triton compiles the kernel for: arguments whose likeness is the same are alike.
    """
    # Triton does no more than launch: it is neither interpreted nor replaced, nor told to compile in another way.
    is_usual = (
        isinstance(kernel, JITFunction)
        and JITFunction.run is _run
        and not kernel.pre_run_hooks
        and not knobs.runtime.debug
        and not knobs.compilation.instrumentation_mode
        and knobs.runtime.add_stages_inspection_hook is None
    )
    if not is_usual:
        kernel[programs](**arguments, **LAUNCH_OPTIONS)
        return
    device = driver.active.get_current_device()
    key = kernel, device, *arguments, *likeness
    compiled = _compiled.get(key)
    if compiled is not None:
        stream = driver.active.get_current_stream(device)
        compiled[(*programs, 1, 1)](*[arguments[name] for name in kernel.arg_names], stream=stream)
        return
    compiled = kernel[programs](**arguments, **LAUNCH_OPTIONS)
    if compiled is not None and compiled.metadata.target.backend == "cuda":  # AMD's are compiled for the sizes of tensors, too
        if len(_compiled) >= MOST_COMPILED:
            _compiled.clear()
        _compiled[key] = compiled
