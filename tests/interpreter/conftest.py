"""Triton's interpreter, made three times as fast and independent of the processor, and a fixture that guards kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

from tests.interpreter.guard import Launch, guarded

call_and_patch = interpreter.InterpretedFunction.__call__
called: set[int] = set()


def call_device_function(function: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    """Triton's own, except that only the first call patches triton.language, which takes half of the time.

    The patches of the launch and of the first call stay until the launch ends.
    """
    if id(function) not in called:
        called.add(id(function))
        return call_and_patch(function, *args, **kwargs)
    return function.rewrite()(*args, **kwargs)


numpy_dtype = interpreter._get_np_dtype
numpy_dtypes: dict[Any, Any] = {}


def cached_numpy_dtype(dtype: Any) -> Any:
    """Triton's own with a cache."""
    element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    if isinstance(element, tl.pointer_type):
        return numpy_dtype(element)
    if element not in numpy_dtypes:
        numpy_dtypes[element] = numpy_dtype(element)
    return numpy_dtypes[element]


def create_dot(_: Any, a: Any, b: Any, acc: Any, *_precision: Any) -> Any:
    """Triton's own, with products rounded once.

    An element of a matrix unit's product does not depend on its place in the tile. The kernels rely on that: for large logits the
    backward's scores must equal the forward's. numpy's float32 products depend on it on some processors, such as AMD's Zen 3.
    """
    product = np.matmul(a.data, b.data, dtype=np.float64)
    return interpreter.TensorHandle(product.astype(acc.data.dtype) + acc.data, acc.dtype.scalar)


unwrap = core._unwrap_if_constexpr


def unwrap_named(value: Any) -> Any:
    """Triton's own, which in Triton 3.6 turns the named tuples that a constexpr function gets into plain ones."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(unwrap_named, value))
    return unwrap(value)


def change_interpreter(patch: pytest.MonkeyPatch) -> None:
    """Make the interpreter fast and its products exact. Integer overflow is only checked in guarded kernels."""
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    patch.setattr(core, "_unwrap_if_constexpr", unwrap_named)
    patch.setattr(interpreter.InterpretedFunction, "__call__", call_device_function)
    patch.setattr(interpreter, "_get_np_dtype", cached_numpy_dtype)
    patch.setattr(interpreter.interpreter_builder, "options", options)
    patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def changed_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    change_interpreter(monkeypatch)


@pytest.fixture
def guarded_kernels() -> Iterator[list[Launch]]:
    """All launches of the test, which fails if one of them makes a forbidden access."""
    with guarded() as launches:
        yield launches
