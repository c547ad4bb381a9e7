"""Interpreted kernels under guard: memory accesses that are checked, other orders of programs, poison around tensors, and a look
at launches."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from tests.check import Way
from tests.groups import flat
from tests.samples import Sample

Order = Literal["reversed", "shuffled"]
"""Orders of programs that differ from the interpreter's own."""
NO_PROGRAM, SEVERAL = -1, -2
"""Instead of a program's number."""
EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
MOST_VIOLATIONS = 100
"""A launch is stopped after this many: with lengths read from a wrong address it might not end."""


def element_addresses(tensor: torch.Tensor) -> np.ndarray:
    """The sorted addresses of a view's elements, without those between and around them."""
    offsets: Any = np.zeros(1, dtype=np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        steps: Any = np.arange(min(size, 1) if stride == 0 else size, dtype=np.int64) * stride
        offsets = (offsets[:, None] + steps).reshape(-1)
    return np.unique(offsets * tensor.element_size() + tensor.data_ptr())


def tensors_in(argument: Any) -> Iterator[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for part in argument:
            yield from tensors_in(part)


def poison_value(dtype: Any) -> Any:
    """NaN, True or the largest integer of a torch or numpy dtype; numpy's uint16 holds bfloat16, whose NaN it is."""
    if isinstance(dtype, torch.dtype):
        return math.nan if dtype.is_floating_point else True if dtype == torch.bool else torch.iinfo(dtype).max
    return math.nan if dtype.kind == "f" else True if dtype.kind == "b" else np.iinfo(dtype).max


@dataclass
class Launch:
    """The memory accesses of one launch and its violations.

    Args:
        kernel: the name.
        views: the tensors passed to it, by the names of its arguments.
    """

    kernel: str
    views: dataclasses.InitVar[list[tuple[str, torch.Tensor]]]
    loads: int = 0
    stores: int = 0
    violations: list[str] = field(default_factory=list)

    def __post_init__(self, views: list[tuple[str, torch.Tensor]]) -> None:
        # Address 0 stands for a view without elements, so that there is always one.
        addresses = [np.zeros(1, dtype=np.int64), *(element_addresses(tensor) for _, tensor in views)]
        self.names = ["null", *(name for name, _ in views)]
        sizes = np.array([0, *(tensor.element_size() for _, tensor in views)])
        self.allowed, first = np.unique(np.concatenate(addresses), return_index=True)
        self.owner = np.repeat(np.arange(len(addresses)), [len(elements) for elements in addresses])[first]
        self.size = sizes[self.owner]
        self.reader, self.writer = (np.full(len(self.allowed), NO_PROGRAM) for _ in range(2))

    def report(self, program: int, what: str) -> None:
        self.violations.append(f"{self.kernel}, program {program}: {what}")
        if len(self.violations) >= MOST_VIOLATIONS:
            raise AssertionError("stopped after too many violations: " + "\n".join(self.violations[:10]))

    def nearest(self, address: int, size: int) -> str:
        """Describe a forbidden address by the nearest element."""
        place = int(np.searchsorted(self.allowed, address))
        around = [index for index in (place - 1, place) if 0 <= index < len(self.allowed)]
        index = min(around, key=lambda candidate: abs(int(self.allowed[candidate]) - address))
        distance, name = address - int(self.allowed[index]), self.names[self.owner[index]]
        if distance == 0:
            return f"{size} bytes wide, at an element of {name}, which has {self.size[index]}"
        return f"{abs(distance)} bytes {'behind' if distance > 0 else 'before'} an element of {name}"

    def access(self, kind: str, program: int, pointers: np.ndarray, mask: np.ndarray, size: int) -> np.ndarray:
        """Record an access of elements of ``size`` bytes; return which of them are allowed."""
        addresses: Any = pointers.astype(np.int64)
        index = np.searchsorted(self.allowed, addresses).clip(max=len(self.allowed) - 1)
        inside = (self.allowed[index] == addresses) & (self.size[index] == size)
        outside = addresses[mask & ~inside]
        if outside.size:
            where = self.nearest(int(outside[0]), size)
            self.report(program, f"{outside.size} {kind}s outside all views, the first {where}")
        index = index[mask & inside]
        if kind == "load":
            self.loads += index.size
            self.conflicts(index, program, self.writer, "loads what program {} stores")
            before = self.reader[index]
            self.reader[index] = np.where((before == NO_PROGRAM) | (before == program), program, SEVERAL)
        else:
            self.stores += index.size
            if len(np.unique(index)) < index.size:
                self.report(program, f"stores twice at once to an address, of {self.names[self.owner[index[0]]]}")
            self.conflicts(index, program, self.writer, "stores where program {} stores")
            self.conflicts(index, program, self.reader, "stores what program {} loads")
            self.writer[index] = program
        return inside

    def conflicts(self, index: np.ndarray, program: int, others: np.ndarray, what: str) -> None:
        wrong = index[(others[index] != NO_PROGRAM) & (others[index] != program)]
        if wrong.size:
            other = others[wrong[0]]
            what = what.format("more than one" if other == SEVERAL else other)
            self.report(program, f"{what}, at {wrong.size} addresses, the first of {self.names[self.owner[wrong[0]]]}")


class GuardedMemory:
    """The interpreter's access to memory, all of it: what is outside a launch's views is reported, and not done.

    A load from there gives poison_value of its dtype. Atomic operations are reported and not done, wherever they are: they make
    results depend on the order of programs. What else a Triton may have is an AttributeError.
    """

    def __init__(self, memory: Any, launches: list[Launch]) -> None:
        self.memory, self.launches = memory, launches

    @property
    def program(self) -> int:
        """Return the number of the running program, in the order in which the interpreter goes through a grid."""
        builder = interpreter.interpreter_builder
        return int(np.ravel_multi_index(builder.grid_idx, builder.grid_dim))

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> np.ndarray:
        asked = np.broadcast_to(np.asarray(mask, dtype=bool), pointers.shape)
        inside = self.launches[-1].access("load", self.program, pointers, asked, dtype.itemsize)
        loaded = self.memory.load(pointers, asked & inside, other, dtype)
        return np.where(asked & ~inside, poison_value(dtype), loaded).astype(dtype) if (asked & ~inside).any() else loaded

    def store(self, pointers: Any, value: Any, mask: Any) -> None:
        asked = np.broadcast_to(np.asarray(mask, dtype=bool), pointers.shape)
        inside = self.launches[-1].access("store", self.program, pointers, asked, value.itemsize)
        self.memory.store(pointers, value, asked & inside)

    def atomic_cas(self, pointers: Any, compared: Any, value: Any, semantics: Any) -> np.ndarray:
        self.launches[-1].report(self.program, "an atomic compare-and-swap")
        return np.full_like(value, poison_value(value.dtype))

    def atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, semantics: Any) -> np.ndarray:
        self.launches[-1].report(self.program, f"an atomic {operation.name}")
        return np.full_like(value, poison_value(value.dtype))

    def arithmetic(self, left: Any, right: Any, operation: Any) -> None:
        """Report integer overflow of a sum, difference or product; faster than Triton's own check."""
        dtype = left.handle.data.dtype
        if dtype.itemsize < 8:
            exact = EXACT[operation.__name__](left.handle.data.astype(np.int64), right.handle.data.astype(np.int64))
            if not np.array_equal(exact, exact.astype(dtype)):
                self.launches[-1].report(self.program, f"an overflow of {dtype} in {operation.__name__}")


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record the accesses of all launches, and perform only those to elements of the views passed to the launch.

    Violations are accesses outside of these, an address that two programs store to, or that one loads and another stores to,
    atomic operations, and overflow of integers of up to 32 bits.
    """
    launches: list[Launch] = []
    function = interpreter.InterpretedFunction
    run = function.run

    def recorded_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = flat(dict(zip(self.arg_names, args, strict=False)) | kwargs).items()
        launches.append(Launch(self.fn.__name__, [(name, tensor) for name, argument in named for tensor in tensors_in(argument)]))
        return run(self, *args, **kwargs)

    memory = GuardedMemory(interpreter._interpreter, launches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function, "run", recorded_run)
        patch.setattr(interpreter, "_interpreter", memory)
        patch.setattr(interpreter.TritonSemantic, "binary_op_sanitize_overflow_impl", memory.arithmetic)
        yield launches


@contextmanager
def guarded() -> Iterator[list[Launch]]:
    """Record all launches, and raise an AssertionError that lists the violations at the end."""
    with recorded() as launches:
        yield launches
    violations = [violation for launch in launches for violation in launch.violations]
    if violations:
        more = [f"and {len(violations) - 10} more"] if len(violations) > 10 else []
        raise AssertionError(f"{len(violations)} violations: " + "\n".join([*violations[:10], *more]))


@contextmanager
def programs_in_order(order: Order, seed: int = 0) -> Iterator[None]:
    """Run the programs of each launch in this order."""
    builder = interpreter.interpreter_builder
    set_grid_idx = builder.set_grid_idx
    generator = np.random.default_rng(seed)
    programs: Any = None

    def elsewhere(*place: int) -> None:
        nonlocal programs
        if not any(place):
            programs = np.arange(math.prod(builder.grid_dim))
            programs = programs[::-1] if order == "reversed" else generator.permutation(programs)
        program = int(programs[np.ravel_multi_index(place, builder.grid_dim)])
        set_grid_idx(*map(int, np.unravel_index(program, builder.grid_dim)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "set_grid_idx", elsewhere)
        yield


def in_poisoned_storage(tensor: torch.Tensor, choose: random.Random) -> torch.Tensor:
    """Copy a tensor to a view of larger storage, with poison_value before, after and between the elements.

    The order of dimensions in memory, the padding at their ends and the step of the last one are random; vectors have step 1.
    """
    order = choose.sample(range(tensor.dim()), tensor.dim())
    margins = [(choose.randint(1, 3), choose.randint(1, 3)) for _ in order]
    step = choose.choice((1, 1, 2, 3)) if tensor.dim() > 1 else 1
    sizes = [before + tensor.shape[dim] + behind for dim, (before, behind) in zip(order, margins, strict=True)]
    view = tensor.new_full([*sizes, step], poison_value(tensor.dtype))[..., 0]
    for place, (dim, (before, _)) in enumerate(zip(order, margins, strict=True)):
        view = view.narrow(place, before, tensor.shape[dim])
    return view.permute([order.index(dim) for dim in range(tensor.dim())]).copy_(tensor)


@dataclass(frozen=True)
class Guarded(Way):
    """Guarded kernels in another order of programs, with poison around all tensors. Results have the bits of a plain run.

    Attributes:
        launches: those of the last call.
    """

    implementation: str = "triton"
    launches: list[Launch] = field(default_factory=list, compare=False)

    @property
    def again(self) -> Way:
        return Way(self.implementation, self.small, self.tiles)

    def placed(self, call: dict[str, Any]) -> dict[str, Any]:
        choose = random.Random(0)
        tensors = {id(value): value for value in call.values() if isinstance(value, torch.Tensor)}
        copies = {key: in_poisoned_storage(tensor, choose) for key, tensor in tensors.items()}  # one tensor may be several inputs
        return {name: copies.get(id(value), value) for name, value in call.items()}

    @contextmanager
    def computing(self, sample: Sample) -> Iterator[None]:
        """Compute the sample, and raise an AssertionError at the end if there are violations."""
        order: Order = "reversed" if sample.seed % 2 else "shuffled"
        with super().computing(sample), guarded() as launches, programs_in_order(order, sample.seed):
            yield
        self.launches[:] = launches


@contextmanager
def launches_seen_by(see: Callable[[str, dict[str, Any]], None]) -> Iterator[None]:
    """Call a function with the name of each launched kernel, without "_kernel", and its arguments, which it may change."""
    run = interpreter.InterpretedFunction.run

    def seen(self: Any, *args: Any, **options: Any) -> Any:
        named = dict(zip(self.arg_names, args, strict=False))
        see(self.fn.__name__.removesuffix("_kernel"), named)
        return run(self, *named.values(), **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "run", seen)
        yield
