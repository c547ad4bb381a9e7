"""The guards report faulty kernels. tests/interpreter/test_calls.py runs the package's kernels under them."""

from __future__ import annotations

import math
import random
from contextlib import nullcontext
from typing import Literal

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from tests.interpreter.guard import GuardedMemory, guarded, in_poisoned_storage, poison_value, programs_in_order, recorded


@triton.jit
def copy_kernel(source, target, length, step, SHIFT: tl.constexpr, STRIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """target[i] = source[i * STRIDE + SHIFT], for the 16 elements of each program from program * step on."""
    offsets = tl.program_id(0) * step + tl.arange(0, 16)
    loaded = tl.load(source + offsets * STRIDE + SHIFT, mask=offsets < length)
    tl.store(target + offsets, loaded, mask=offsets < length)


@triton.jit
def previous_kernel(values):  # type: ignore[no-untyped-def]
    """values[program + 1] = values[program] + 1."""
    program = tl.program_id(0)
    tl.store(values + program + 1, tl.load(values + program) + 1)


@triton.jit
def odd_kernel(values, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Do KIND, one of several forbidden things."""
    offsets = tl.arange(0, 16)
    if KIND == "add":
        tl.atomic_add(values + offsets, 1.0)
    if KIND == "swap":
        tl.atomic_cas(values.to(tl.pointer_type(tl.int32)), 0, 7)
    if KIND == "twice":
        tl.store(values + offsets // 2, 1.0)
    if KIND == "wide":
        tl.store((values + offsets).to(tl.pointer_type(tl.int64)), offsets.to(tl.int64))
    if KIND == "overflow":
        tl.store(values + offsets + offsets * 0x7FFF_FFFF * 0, 1.0)
    if KIND == "null":
        tl.store(values + offsets - values.to(tl.int64) // 4, 1.0)


COPIES: dict[str, tuple[int, int, int, int, str | None]] = {
    # step, shift, stride, targets, violation
    "right": (16, 0, 2, 50, None),
    "load beyond": (16, 2, 2, 50, "program 3: 1 loads outside all views, the first 8 bytes behind an element of source"),
    "load before": (16, -2, 2, 50, "program 0: 1 loads outside all views, the first 8 bytes before an element of source"),
    "load between": (16, 0, 1, 50, "program 0: 8 loads outside all views, the first 4 bytes behind an element of source"),
    "store beyond": (16, 0, 2, 47, "program 2: 1 stores outside all views, the first 4 bytes behind an element of target"),
    "two writers": (15, 0, 2, 50, "program 1: stores where program 0 stores, at 1 addresses, the first of target"),
}


@pytest.mark.parametrize("case", COPIES)
def test_forbidden_accesses(case: str) -> None:
    """They are reported, in an error at the end, and not done."""
    step, shift, stride, targets, expected = COPIES[case]
    source, storage = torch.ones(104, 2)[2:52, 0], torch.zeros(targets + 128)
    target = storage[64 : 64 + targets]
    with pytest.raises(AssertionError, match=f"violations: copy_kernel, {expected}") if expected else nullcontext(), guarded():
        copy_kernel[(4,)](source, target, 50, step, SHIFT=shift, STRIDE=stride)
    assert not storage[:64].any() and not storage[64 + targets :].any()
    assert target.isnan().any() == (expected is not None and "loads" in expected)


@pytest.mark.parametrize("order", [None, "reversed"])
def test_a_program_that_reads_what_another_writes(order: Literal["reversed"] | None) -> None:
    """The program that runs second reports it; in another order the result differs."""
    values = torch.zeros(5)
    with recorded() as launches, programs_in_order(order) if order else nullcontext():
        previous_kernel[(4,)](values)
    assert values.tolist() == ([0, 1, 1, 1, 1] if order else [0, 1, 2, 3, 4])
    what = "program 2: stores what program 3 loads" if order else "program 1: loads what program 0 stores"
    assert len(launches[0].violations) == 3
    assert launches[0].violations[0] == f"previous_kernel, {what}, at 1 addresses, the first of values"


FORBIDDEN = {
    "add": "an atomic FADD",
    "swap": "an atomic compare-and-swap",
    "twice": "stores twice at once to an address, of values",
    "wide": "16 stores outside all views, the first 8 bytes wide, at an element of values, which has 4",
    "overflow": "an overflow of int32 in mul",
    "null": "16 stores outside all views, the first 4 bytes wide, at an element of null, which has 0",
}


@pytest.mark.parametrize("kind", FORBIDDEN)
def test_forbidden_operations(kind: str) -> None:
    values = torch.zeros(16)
    with recorded() as launches:
        odd_kernel[(1,)](values, KIND=kind)
    assert launches[0].violations == [f"odd_kernel, program 0: {FORBIDDEN[kind]}"]
    assert kind in ("twice", "overflow") or not values.any()


def test_a_launch_is_stopped() -> None:
    """A launch ends after many violations: with a length read from a wrong address it might not end otherwise."""
    values = torch.zeros(300)
    with pytest.raises(InterpreterError, match="stopped after too many violations"), recorded() as launches:
        previous_kernel[(299,)](values)
    assert len(launches[0].violations) == 100 and values[-1] == 0


def test_all_memory_operations_are_guarded() -> None:
    """The interpreter has no memory operations except those that the guard replaces."""
    members = vars(interpreter._interpreter)
    others = {name for name, member in members.items() if isinstance(member, type) or name[:2] == "__" or name[:3] == "fma"}
    functions = {name for name, member in members.items() if callable(member)} - others
    assert functions == {"load", "store", "atomic_cas", "atomic_rmw"}
    assert all(hasattr(GuardedMemory, name) for name in ("load", "store", "atomic_cas", "atomic_rmw"))


@triton.jit
def place_kernel(order, counter):  # type: ignore[no-untyped-def]
    """order[counter++] = this program's number in a grid of (2, 3, 4)."""
    place = (tl.program_id(0) * 3 + tl.program_id(1)) * 4 + tl.program_id(2)
    count = tl.load(counter)
    tl.store(order + count, place)
    tl.store(counter, count + 1)


def test_orders() -> None:
    """Each program runs once; two shuffled launches differ."""
    found = []
    for order in (None, "reversed", "shuffled"):
        with programs_in_order(order) if order else nullcontext():  # type: ignore[arg-type]
            for _ in range(2):
                places, counter = torch.zeros(24, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
                place_kernel[(2, 3, 4)](places, counter)
                found.append(places.tolist())
    natural = list(range(24))
    assert found[:4] == [natural, natural, natural[::-1], natural[::-1]] and all(sorted(order) == natural for order in found)
    assert len(set(map(tuple, found))) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(7,), (3, 1), (2, 3, 4, 5), (0, 4)])
def test_storage_is_poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The view has the values, and all elements of the storage outside of it are poisoned, before and after each row."""
    numbers = torch.arange(math.prod(shape)).view(shape).remainder(2).to(dtype)
    for seed in range(8):
        view = in_poisoned_storage(numbers, random.Random(seed))
        assert torch.equal(view, numbers) and (len(shape) > 1 or view.is_contiguous())
        storage = view.as_strided((view.untyped_storage().nbytes() // view.element_size(),), (1,), 0)
        inside = torch.zeros(storage.shape, dtype=torch.bool)
        inside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
        around = storage[~inside]
        assert inside.sum() == view.numel() and not inside[0] and not inside[-1]
        assert (around.isnan() if dtype.is_floating_point else around == poison_value(dtype)).all()
