"""Launches that do without Triton's search for the compiled kernel, if a launch that was alike has found it.

For each launch Triton looks at every argument, and finds the kernel by what it is compiled for: dtypes, None, alignment of
pointers, numbers that are 1 or multiples of 16, constants. Kernels here have up to a hundred arguments, in groups, and most of
them follow from the sizes and strides of a call. So a call's are described once, and the description is a key of the cache.
Calls of other lengths share a compiled kernel here as they do in Triton.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from .fences import compile_options

LAUNCH_OPTIONS = {"enable_fp_fusion": True}
"""Passed to every launch: Triton 3.9 warns where it is left out, because 3.10 changes the default."""
ALIGNMENT = 16  # Triton tells apart whether a number, or the bytes of a pointer, are a multiple of it
PLAIN = (type(None), bool, int, float, str)

_run = JITFunction.run
_compiled: dict[Any, Any] = {}
"""Compiled kernels by all that Triton compiles them for. There is one entry for each, whatever the lengths of calls are."""


def description(arguments: Iterable[Any]) -> tuple[Any, ...]:
    """Return all that a kernel may be compiled for of its arguments: of tensors dtype and alignment, of anything else its
    value."""
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


@functools.lru_cache(maxsize=4096)
def classes(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what Triton compiles a kernel for of each value of a description: of a whole number whether it is 1, whether it is
    a multiple of 16, and whether it takes 32 bits; of another number nothing but that it is one."""
    found = list[Any]()
    for each in values:
        if type(each) is int:
            found.append(1 if each == 1 else (each % ALIGNMENT == 0, has_32_bits(each)))
        elif type(each) is tuple:
            found.append(classes(each))
        else:
            found.append(float if type(each) is float else each)
    return tuple(found)


def has_32_bits(number: int) -> bool:
    """Return whether Triton passes a whole number in 32 bits."""
    return -(2**31) <= number < 2**31


_special: dict[Any, dict[str, bool]] = {}
"""By the function of a kernel: the names of its constants (True), and of the numbers that it is not specialized for (False)."""


def _cache_key(kernel: JITFunction, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a kernel is compiled for of these arguments."""
    special = _special.get(kernel.fn)
    if special is None:
        special = {each.name: each.is_constexpr for each in kernel.params if each.is_constexpr or each.do_not_specialize}
        _special[kernel.fn] = special
    found, rest = list[Any](), list[Any]()
    for name, each in arguments.items():
        if name not in special:
            rest.append(each)
        else:
            found.append(each if special[name] or each is None else has_32_bits(each))
    return (*found, classes(description(rest)))


def launch(
    kernel: Any,
    programs: tuple[int, ...],
    arguments: dict[str, Any],
    options: dict[str, Any] | None = None,
    of_call: dict[str, Any] | None = None,
    cache_key: object = None,
) -> None:
    """Launch a kernel as ``kernel[programs](**of_call, **arguments, **options, **LAUNCH_OPTIONS)`` does.

    Args:
        options: such as num_warps.
        of_call: arguments that all launches of a call have in common, which are not looked at.
        cache_key: stands for all that Triton compiles a kernel for of those.
    """
    options, of_call = options or {}, of_call or {}
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
        kernel[programs](**of_call, **arguments, **options, **compile_options(kernel), **LAUNCH_OPTIONS)
        return
    device = driver.active.get_current_device()
    key = kernel.fn, device, cache_key, *options.items(), *_cache_key(kernel, arguments)
    compiled = _compiled.get(key)
    if compiled is not None:
        stream, every = driver.active.get_current_stream(device), arguments | of_call
        compiled[(*programs, 1, 1)](*[every[name] for name in kernel.arg_names], stream=stream)
        return
    compiled = kernel[programs](**of_call, **arguments, **options, **compile_options(kernel), **LAUNCH_OPTIONS)
    if compiled is not None and compiled.metadata.target.backend == "cuda":  # AMD's are compiled for the sizes of tensors, too
        _compiled[key] = compiled
