"""Plans: what a call does, decided once for all calls of its kind.

A kind of call is a ``Key``: everything that a decision may depend on, each tensor by its facts. What decides (plan_forward in
forward.py, plan_backward in backward.py, and two in grid) gets the key and nothing else, so that a plan cannot depend on anything
that the key does not have. It writes a draft (draft.py).

    plan = find(plan_forward, tensors, (spec, config, keeps_residual))    a key and a lookup
    out, lse, ... = plan(*tensors)                                allocations, addresses, launches

A key that differs from another in sizes alone gets its plan from the same ``Template`` if they lead to the same decisions: a new
length computes a few hundred numbers. Otherwise something is decided, and kernels are compiled if Triton has none for numbers of
the same kind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from .._core.spec import AttentionSpec
from .._core.watchers import ALIGNMENT, facts_of
from . import kernels_are_interpreted
from .config import architectures, selection
from .config.selection import Tables
from .sizes import Notes, plain

MOST_PLANS = 1024  # kept; a plan has some 5 KB, and no tensor
MOST_TEMPLATES = 64  # of calls that differ in sizes alone

Compiled = tuple[Callable[..., None], Any, Any]
"""A kernel's launcher, its function on the GPU, and its metadata, as Triton's launcher takes them."""


class Surroundings(NamedTuple):
    """What a decision depends on besides the call."""

    arch: str
    multiprocessors: int
    tables: Tables
    float32_precision: str  # torch.get_float32_matmul_precision
    gpu: Any  # Triton's number of the current GPU, on which kernels are loaded
    launcher: str  # see launcher()
    ptx_options: str | None


class Key(NamedTuple):
    """A kind of call. tensors: their Facts. options: what the function that decides takes besides."""

    decide: Callable[[Key], Template]
    tensors: tuple[tuple[Any, ...] | None, ...]
    options: tuple[Any, ...]
    surroundings: Surroundings


class Launch:
    """A kernel, and how it gets its arguments."""

    __slots__ = ("function", "kernel", "metadata", "name", "options", "pick", "run")

    def __init__(self, name: str, kernel: Any, pick: Any, options: Any) -> None:
        self.name, self.kernel, self.pick, self.options = name, kernel, pick, options
        self.run: Any = None
        self.function = self.metadata = None

    def compile(self, grid: tuple[int, ...], arguments: Sequence[Any]) -> Compiled:
        """Let Triton find or compile the kernel for arguments of this kind, and load it."""
        compiled = self.kernel.warmup(*arguments, grid=grid, **self.options)
        return compiled.run, compiled.function, compiled.packed_metadata


class Plan:
    """A kind of call: allocations, launches, results. Calling it runs the call."""

    # The same for all sizes
    launches: list[Launch]
    addresses: list[int]  # cells of the tensors, those given and those allocated, in their order
    groups: list[tuple[int, Any, Any]]  # cell, function that picks its parts, type
    present: list[int]  # which of the tensors are given
    results: tuple[int | None, ...]
    device: torch.device
    gpu: Any
    is_direct: bool

    def __init__(self, shared: dict[str, Any], sized: Sequence[Any]) -> None:
        self.__dict__.update(shared)
        self.cells: list[Any]  # arguments and parts of arguments: constants, and what a call fills in
        (
            self.cells,
            self.grids,
            self.allocations,  # shape, strides, dtype
            self.scratch,  # cell, first byte, shape, dtype
            self.scratch_bytes,
            self.zeroed_bytes,
            self.workspace_bytes,
            self.views,  # cell, cell of what it is a view of, shape, strides
            self.preparations,
            self.endings,
        ) = sized

    def __call__(self, *given: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Run the call. given: in the order of the key's."""
        tensors: list[Any] = [given[at] for at in self.present]
        device = self.device
        for shape, strides, dtype in self.allocations:
            tensors.append(torch.empty_strided(shape, strides, dtype=dtype, device=device))
        scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=device) if self.scratch_bytes else None
        if self.zeroed_bytes:
            scratch[: self.zeroed_bytes].zero_()  # type: ignore[index]
        for function, slots in self.preparations:
            function(*(_tensor_of(*slot, tensors) for slot in slots))
        if self.is_direct:
            self._launch_addresses(tensors, scratch)
        else:
            self._launch_tensors(tensors, scratch)
        for function, slots in self.endings:
            function(*(_tensor_of(*slot, tensors) for slot in slots))
        return [None if at is None else tensors[at] for at in self.results]

    def _launch_addresses(self, tensors: list[Any], scratch: torch.Tensor | None) -> None:
        """Launch compiled kernels with addresses, past Triton's search for a kernel."""
        cells = self.cells.copy()
        for cell, tensor in zip(self.addresses, tensors, strict=True):
            cells[cell] = tensor.data_ptr()
        remainder = 0
        for cell in self.addresses[len(self.present) :]:
            remainder |= cells[cell]
        if scratch is not None:
            base = scratch.data_ptr()
            remainder |= base
            for cell, start, _, _ in self.scratch:
                cells[cell] = base + start
        if remainder % ALIGNMENT:
            raise RuntimeError(f"torch allocates at addresses that are no multiples of {ALIGNMENT}, which the kernels need")
        for cell, of, _, _ in self.views:
            cells[cell] = cells[of]
        for cell, pick, _ in self.groups:
            cells[cell] = pick(cells)
        stream = driver.active.get_current_stream(self.gpu)
        for launch, grid in zip(self.launches, self.grids, strict=True):
            launch.run(*grid, stream, launch.function, launch.metadata, None, None, None, *launch.pick(cells))

    def _launch_tensors(self, tensors: list[Any], scratch: torch.Tensor | None) -> None:
        """Launch with tensors, as Triton's users do: for its interpreter, its hooks, and tools that watch it."""
        cells = self.cells.copy()
        for cell, tensor in zip(self.addresses, tensors, strict=True):
            cells[cell] = tensor
        for cell, start, shape, dtype in self.scratch:
            count = torch.Size(shape).numel()
            cells[cell] = scratch[start : start + count * dtype.itemsize].view(dtype).view(shape)  # type: ignore[index]
        for cell, of, shape, strides in self.views:
            cells[cell] = cells[of].as_strided(shape, strides)
        for cell, pick, make in self.groups:
            cells[cell] = make(pick(cells))
        for launch, grid in zip(self.launches, self.grids, strict=True):
            launch.kernel[grid](*launch.pick(cells), **launch.options)


def _tensor_of(source: int, shape: tuple[int, ...], strides: tuple[int, ...], tensors: list[Any]) -> torch.Tensor:
    tensor: torch.Tensor = tensors[source]
    return tensor if tensor.shape == shape else tensor.as_strided(shape, strides)


class Template:
    """Plans of calls for whose sizes the same was decided. sized: what depends on them, with symbols."""

    def __init__(self, shared: dict[str, Any], sized: Sequence[Any]) -> None:
        self.shared, self.sized = shared, sized
        self.notes: Notes | None = None  # of how it was made
        self.numbers: Callable[[Sequence[int]], Any] | None = None

    def first(self) -> Plan:
        """Return the plan for the sizes for which it was made."""
        return Plan(self.shared, plain(self.sized))

    def plan(self, sizes: Sequence[int]) -> Plan | None:
        """Return the plan for other sizes, None if they lead to other decisions."""
        if self.numbers is None:
            assert self.notes is not None
            self.numbers = self.notes.function(self.sized)
            self.notes, self.sized = None, ()  # no longer needed
        numbers = self.numbers(sizes)
        return None if numbers is None else Plan(self.shared, numbers)


class DoesNotFit(Exception):
    """A kernel does not fit the GPU, and calls of its kind have a smaller configuration from now on."""


# The plans that there are.

_plans: dict[tuple[Any, ...], Plan] = {}  # by Key
_templates: dict[tuple[Any, ...], list[Template]] = {}  # by Key without sizes
_making = threading.RLock()
_run, _compiled_run = JITFunction.run, CompiledKernel.__dict__["run"]


def launcher() -> str:
    """Return who launches kernels: "plan", if Triton does no more than launch; "Triton", if somebody watches or debugs its
    launches (and on AMD's GPUs, for which it also compiles by the sizes of tensors); "another" in its place, as its
    interpreter."""
    runtime = knobs.runtime
    if kernels_are_interpreted() or JITFunction.run is not _run or CompiledKernel.__dict__["run"] is not _compiled_run:
        return "another"
    is_watched = (
        runtime.debug
        or runtime.launch_enter_hook.calls
        or runtime.launch_exit_hook.calls
        or runtime.add_stages_inspection_hook is not None
        or knobs.compilation.instrumentation_mode
        or torch.version.hip is not None
    )
    return "Triton" if is_watched else "plan"


def surroundings(device: torch.device) -> Surroundings:
    """Return what decisions about calls on a device depend on now."""
    arch = architectures.architecture(device)
    return Surroundings(
        arch,
        architectures.multiprocessors(device),
        selection.tables(arch),
        torch.get_float32_matmul_precision(),
        None if kernels_are_interpreted() else driver.active.get_current_device(),
        launcher(),
        architectures.ptx_options(arch),
    )


def find(decide: Callable[[Key], Template], tensors: Sequence[torch.Tensor | None], options: tuple[Any, ...]) -> Plan:
    """Return the plan of a call, whose first tensor is on the GPU: a new one if there is none."""
    facts = tuple([None if tensor is None else facts_of(tensor) for tensor in tensors])
    key = decide, facts, options, surroundings(tensors[0].device)  # type: ignore[union-attr]
    return _plans.get(key) or _made(Key(*key))


def _made(key: Key) -> Plan:
    """Make a plan, in one thread at a time: several that compile at once confuse Python's parser. For a selected configuration
    that does not fit the GPU a smaller one is selected, from now on."""
    with _making:
        while (plan := _plans.get(key)) is None:
            try:
                plan = _kept(_plans, key, _planned(key))
            except DoesNotFit:
                around = key.surroundings
                key = key._replace(surroundings=around._replace(tables=selection.tables(around.arch)))
    return plan


def _planned(key: Key) -> Plan:
    """Return a new plan: by a template of calls that differ in sizes alone, or by a decision."""
    sizes: list[int] = []
    kind = _with_sizes(key, sizes.append)
    templates = _templates.get(kind)
    if templates is None:
        templates = _kept(_templates, kind, [])
    for template in templates:
        if (plan := template.plan(sizes)) is not None:
            templates.remove(template)
            break
    else:
        template = _decided(key, sizes)
        plan = template.first()
    templates.insert(0, template)  # the last used first
    del templates[MOST_TEMPLATES:]
    return plan


def _decided(key: Key, sizes: Sequence[int]) -> Template:
    """Decide with symbols in place of sizes."""
    notes = Notes(sizes)
    symbols = iter(notes.sizes)
    template = key.decide(_with_sizes(key, lambda _: next(symbols)))
    template.notes = notes
    return template


def _kept(kept: dict[Any, Any], key: Key, value: Any) -> Any:
    """Keep something new by a key, and forget the oldest if that is too much."""
    if len(kept) >= MOST_PLANS:
        del kept[next(iter(kept))]
    kept[key] = value
    return value


def _with_sizes(key: Key, replaced: Callable[..., Any]) -> Key:
    """Return a key with something else in place of each size: of tensors' shapes and strides, and the integers of its
    specification, which are lengths and positions."""
    tensors = []
    for facts in key.tensors:
        if facts is not None:
            keys, shape, strides, *others = facts
            facts = keys, tuple(map(replaced, shape)), tuple(map(replaced, strides)), *others
        tensors.append(facts)
    options = [
        AttentionSpec(*[replaced(value) if type(value) is int else value for value in option])
        if isinstance(option, AttentionSpec)
        else option
        for option in key.options
    ]
    return Key(key.decide, tuple(tensors), tuple(options), key.surroundings)
