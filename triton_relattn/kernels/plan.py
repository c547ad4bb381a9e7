"""Plans: what a call does, decided once for all calls of its kind.

A kind of call is a ``Key``: everything that a decision may depend on, each tensor by its facts. What decides (plan_forward in
forward.py, plan_backward in backward.py, and two in grid) gets the key and nothing else, so that a plan cannot depend on anything
that the key does not have. It writes down what a call does, with tensors of which all is known but their addresses: ``Slot``.

    plan = find(plan_forward, tensors, (spec, keeps_residual))    a key and a lookup; a new key gets a plan
    out, lse, ... = plan(*tensors)                                allocations, addresses, launches

Making a plan compiles its kernels, or finds those that Triton has compiled for numbers of the same kind: a new length costs a
plan, and compiles nothing. A kernel that does not fit the GPU is found then, and a smaller tile takes its place.
"""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from .._core.watchers import ALIGNMENT, Facts, facts_of, plain_keys
from . import kernels_are_interpreted
from .config import architectures, selection
from .config.selection import Tables
from .config.tile_config import TileConfig
from .fences import ptx_options

LAUNCH_OPTIONS = {"enable_fp_fusion": True}
"""Passed to every launch: Triton 3.9 warns where it is left out, because 3.10 changes the default."""
SCRATCH_ALIGNMENT = 128
NOTHING = 0  # the cell that has None for good
MOST_PLANS = 1024  # kept; a plan has some 10 KB, and no tensor

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

    decide: Callable[[Key], Plan]
    tensors: tuple[tuple[Any, ...] | None, ...]
    options: tuple[Any, ...]
    surroundings: Surroundings


class Slot:
    """A tensor of a plan. cell: where a call has its address. source: the tensor whose memory it is, None of a part of the
    scratch memory."""

    __slots__ = ("alignment", "cell", "dtype", "shape", "source", "strided", "strides")

    def __init__(
        self,
        cell: int,
        source: int | None,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        alignment: int = 0,
    ) -> None:
        self.cell, self.source, self.dtype, self.alignment = cell, source, dtype, alignment
        self.shape, self.strides = tuple(shape), tuple(strides)
        self.strided = self, self.strides  # as kernels take it

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return self.dtype.itemsize

    # What Triton asks when it compiles for an argument

    def data_ptr(self) -> int:
        return self.alignment

    def ptr_range(self) -> int:
        reach = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (reach + 1) * self.element_size()


class Launch:
    """A kernel with its grid and its arguments, the cells that have them."""

    __slots__ = ("config", "function", "grid", "kernel", "metadata", "name", "options", "pick", "run")

    def __init__(self, name: str, kernel: Any, config: TileConfig | None, grid: tuple[int, ...], pick: Any, options: Any) -> None:
        self.name, self.kernel, self.config, self.grid, self.pick, self.options = name, kernel, config, grid, pick, options
        self.run: Any = None
        self.function = self.metadata = None

    def compile(self, arguments: Sequence[Any]) -> Compiled:
        """Let Triton find or compile the kernel for arguments of this kind, and load it."""
        compiled = self.kernel.warmup(*arguments, grid=self.grid, **self.options)
        return compiled.run, compiled.function, compiled.packed_metadata


class Plan:
    """A kind of call: allocations, launches, results. Made by its methods up to ``compile``; then called."""

    def __init__(self, key: Key) -> None:
        self.key, self.is_direct = key, key.surroundings.launcher == "plan"
        tensors = [None if facts is None else Facts(*facts) for facts in key.tensors]
        self.device = next(facts.device for facts in tensors if facts is not None)
        self.cells: list[Any] = [None]  # arguments and parts of arguments: constants, and what a call fills in
        self.addresses: list[int] = []  # cells of the tensors, those given and those allocated, in their order
        self.allocations: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = []
        self.scratch: list[tuple[Slot, int]] = []  # with its first byte
        self.scratch_bytes = self.zeroed_bytes = 0
        self.views: list[tuple[Slot, int]] = []  # with the cell of what it is a view of
        self.groups: list[tuple[int, Any, Any]] = []  # cell, function that picks its parts, type
        self.known: dict[int, tuple[Any, int]] = {}  # groups by their identity, and their cells
        self.kinds: dict[int, tuple[Any, Any]] = {}  # the same, and what Triton compiles for of them
        self.launches: list[Launch] = []
        self.described: list[list[Any]] = []  # arguments of the launches, until they are compiled
        self.preparations: list[tuple[Callable[..., object], tuple[Slot, ...]]] = []
        self.endings: list[tuple[Callable[..., object], tuple[Slot, ...]]] = []
        self.results: tuple[int | None, ...] = ()
        self.present = [at for at, facts in enumerate(tensors) if facts is not None]
        given = [None if of is None else self._tensor(of.shape, of.strides, of.dtype, of.alignment) for of in tensors]
        self.given = tuple(  # a tensor that is more than its numbers is copied
            slot if slot is None or facts is None or facts.keys in plain_keys(facts.device) else self.copied(slot)
            for slot, facts in zip(given, tensors, strict=True)
        )
        self.workspace_bytes = 0  # of the scratch memory
        self.selected: dict[str, dict[str, str]] = {}  # by kernel: the conditions for which a configuration was selected

    # To make a plan.

    def _cell(self, content: Any) -> int:
        self.cells.append(content)
        return len(self.cells) - 1

    def _tensor(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, alignment: int = 0) -> Slot:
        self.addresses.append(self._cell(None))
        return Slot(self.addresses[-1], len(self.addresses) - 1, shape, strides, dtype, alignment)

    def new(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Slot:
        """Allocate a tensor."""
        slot = self._tensor(shape, contiguous_strides(shape) if strides is None else strides, dtype)
        self.allocations.append((slot.shape, slot.strides, dtype))
        return slot

    def temporary(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, zeroed: bool = False) -> Slot:
        """Allocate a tensor in the memory that all of them share until the call ends."""
        slot = Slot(self._cell(None), None, shape, contiguous_strides(shape), dtype)
        size = max(-(-slot.numel() * slot.element_size() // SCRATCH_ALIGNMENT), 1) * SCRATCH_ALIGNMENT
        if zeroed:  # those come first
            self.scratch = [(other, start + size) for other, start in self.scratch]
            self.scratch.append((slot, 0))
            self.zeroed_bytes += size
        else:
            self.scratch.append((slot, self.scratch_bytes))
        self.scratch_bytes += size
        return slot

    def view(self, slot: Slot, shape: Sequence[int], strides: Sequence[int]) -> Slot:
        """Describe the memory of a tensor, from its beginning, in another way."""
        view = Slot(self._cell(None), slot.source, shape, strides, slot.dtype, slot.alignment)
        self.views.append((view, slot.cell))
        return view

    def copied(self, slot: Slot, strides: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Slot:
        """Copy a tensor before the launches."""
        copy = self.new(slot.shape, dtype or slot.dtype, strides)
        self.prepare(torch.Tensor.copy_, copy, slot)
        return copy

    def prepare(self, function: Callable[..., object], *slots: Slot) -> None:
        """Call a function with tensors before the launches. They must be tensors of their own, or views of such."""
        self.preparations.append((function, slots))

    def end(self, function: Callable[..., object], *slots: Slot) -> None:
        """Call a function with tensors after the launches."""
        self.endings.append((function, slots))

    def launch(self, name: str, kernel: Any, config: TileConfig | None, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
        """Launch a kernel. config, None: with Triton's default of warps."""
        options: dict[str, Any] = dict(LAUNCH_OPTIONS)
        if config is not None:
            options |= {"num_warps": config.num_warps, "num_stages": config.num_stages}
            if config.max_registers is not None:
                options["maxnreg"] = config.max_registers
        if self.key.surroundings.ptx_options is not None:
            options["ptx_options"] = self.key.surroundings.ptx_options
        described, cells = [], []
        for argument in kernel.arg_names:
            value = arguments[argument]
            described.append(value)
            cells.append(self._cell(value) if argument.isupper() else self._argument(value))  # constants have capitals
        self.launches.append(Launch(name, kernel, config, (*grid, 1, 1)[:3], _pick(cells), options))
        self.described.append(described)

    def _argument(self, value: Any) -> int:
        """Return the cell that has an argument, or part of one, when a call launches."""
        if isinstance(value, Slot):
            return value.cell
        if value is None:
            return NOTHING
        if not isinstance(value, tuple) or _is_constant(value):
            return self._cell(value)
        if id(value) not in self.known:
            if type(value) is tuple and isinstance(value[0], Slot):  # with its strides
                parts = [value[0].cell, self._cell(value[1])]
            else:
                parts = [self._argument(part) for part in value]
            self.known[id(value)] = value, self._cell(None)
            self.groups.append((self.known[id(value)][1], _pick(parts), getattr(value, "_make", tuple)))
        return self.known[id(value)][1]

    def compile(self, *results: Slot | None) -> Plan:
        """Compile the kernels, unless something else than Triton runs them. OutOfResources: one does not fit the GPU, whose
        configuration was not selected."""
        self.results = tuple(None if slot is None else slot.source for slot in results)
        assert not any(slot is not None and slot.source is None for slot in results)
        if self.key.surroundings.launcher != "another":
            for launch, arguments in zip(self.launches, self.described, strict=True):
                self._compile(launch, arguments)
        self.described, self.known, self.kinds = [], {}, {}
        return self

    def _compile(self, launch: Launch, arguments: Sequence[Any]) -> None:
        """Find the kernel of a launch among those that are compiled, or compile it."""
        around = self.key.surroundings
        kinds = [
            value if name.isupper() else self._kind(value, is_compiled_for)
            for name, value, is_compiled_for in zip(launch.kernel.arg_names, arguments, _specialized(launch.kernel), strict=True)
        ]
        key = launch.kernel, around.gpu, around.launcher, *launch.options.items(), *kinds
        if key not in _compiled:
            try:
                _compiled[key] = launch.compile(arguments)
            except OutOfResources as error:
                if launch.name not in self.selected:
                    raise
                if selection.tables(around.arch) is around.tables:  # else another plan has found that
                    selection.take_smaller(launch.name, around.arch, self.selected[launch.name], error)
                raise DoesNotFit from None
        launch.run, launch.function, launch.metadata = _compiled[key]

    def _kind(self, value: Any, is_compiled_for: bool = True) -> Any:
        """Return what Triton compiles for of an argument. is_compiled_for, False: of a number only how it is passed."""
        if isinstance(value, int) and not isinstance(value, bool):
            bits = 32 if -(2**31) <= value < 2**31 else 64
            return (value == 1, value % ALIGNMENT == 0, bits) if is_compiled_for else bits
        if isinstance(value, Slot):
            return value.dtype, value.alignment
        if isinstance(value, tuple):
            if id(value) not in self.kinds:
                self.kinds[id(value)] = value, tuple([self._kind(part) for part in value])
            return self.kinds[id(value)][1]
        return type(value)

    # To call it.

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
            function(*(_tensor_of(slot, tensors) for slot in slots))
        if self.is_direct:
            self._launch_addresses(tensors, scratch)
        else:
            self._launch_tensors(tensors, scratch)
        for function, slots in self.endings:
            function(*(_tensor_of(slot, tensors) for slot in slots))
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
            for slot, start in self.scratch:
                cells[slot.cell] = base + start
        if remainder % ALIGNMENT:
            raise RuntimeError(f"torch allocates at addresses that are no multiples of {ALIGNMENT}, which the kernels need")
        for view, of in self.views:
            cells[view.cell] = cells[of]
        for cell, pick, _ in self.groups:
            cells[cell] = pick(cells)
        stream = driver.active.get_current_stream(self.key.surroundings.gpu)
        for launch in self.launches:
            launch.run(*launch.grid, stream, launch.function, launch.metadata, None, None, None, *launch.pick(cells))

    def _launch_tensors(self, tensors: list[Any], scratch: torch.Tensor | None) -> None:
        """Launch with tensors, as Triton's users do: for its interpreter, its hooks, and tools that watch it."""
        cells = self.cells.copy()
        for cell, tensor in zip(self.addresses, tensors, strict=True):
            cells[cell] = tensor
        for slot, start in self.scratch:
            size = slot.numel() * slot.element_size()
            cells[slot.cell] = scratch[start : start + size].view(slot.dtype).view(slot.shape)  # type: ignore[index]
        for view, of in self.views:
            cells[view.cell] = cells[of].as_strided(view.shape, view.strides)
        for cell, pick, make in self.groups:
            cells[cell] = make(pick(cells))
        for launch in self.launches:
            launch.kernel[launch.grid](*launch.pick(cells), **launch.options)


class DoesNotFit(Exception):
    """A kernel does not fit the GPU, and calls of its kind have a smaller configuration from now on."""


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _pick(cells: Sequence[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """Return a function that returns the contents of these cells."""
    if len(cells) == 1:
        return lambda contents: (contents[cells[0]],)
    return operator.itemgetter(*cells)


def _is_constant(value: tuple[Any, ...]) -> bool:
    """Return whether a group has no tensors."""
    for part in value:
        if isinstance(part, Slot) or (isinstance(part, tuple) and not _is_constant(part)):
            return False
    return True


def _tensor_of(slot: Slot, tensors: list[Any]) -> torch.Tensor:
    tensor: torch.Tensor = tensors[slot.source]  # type: ignore[index]
    return tensor if tensor.shape == slot.shape else tensor.as_strided(slot.shape, slot.strides)


@functools.cache
def _specialized(kernel: Any) -> tuple[bool, ...]:
    """Return of which arguments of a kernel Triton compiles for the value of a number."""
    return tuple(not parameter.do_not_specialize for parameter in kernel.params)


# The plans that there are.

_plans: dict[tuple[Any, ...], Plan] = {}  # by Key
_compiled: dict[tuple[Any, ...], Compiled] = {}  # by all that Triton compiles for
_making = threading.RLock()
_run, _compiled_run = JITFunction.run, CompiledKernel.__dict__["run"]


def launcher() -> str:
    """Return who launches kernels: "plan", if Triton does no more than launch; "Triton", if somebody watches or debugs its
    launches (and on AMD's GPUs, for which it compiles by the sizes of tensors, too); "another" in its place, as its
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
        ptx_options(arch),
    )


def find(decide: Callable[[Key], Plan], tensors: Sequence[torch.Tensor | None], options: tuple[Any, ...]) -> Plan:
    """Return the plan of a call, whose first tensor is on the GPU: a new one if there is none."""
    facts = tuple([None if tensor is None else facts_of(tensor) for tensor in tensors])
    key = decide, facts, options, surroundings(tensors[0].device)  # type: ignore[union-attr]
    return _plans.get(key) or _made(Key(*key))


def described(tensors: Sequence[torch.Tensor | None], arch: str | None = None) -> Plan:
    """Return a plan that describes tensors, which may be on "meta", and launches nothing: to ask what a call on their GPU, or on
    the largest of another architecture, would do."""
    device = tensors[0].device  # type: ignore[union-attr]
    count = architectures.multiprocessors(device) if arch is None else architectures.architecture_of(arch).multiprocessors
    arch = arch or architectures.architecture(device)
    around = Surroundings(arch, count, selection.tables(arch), torch.get_float32_matmul_precision(), None, "another", None)
    return Plan(Key(Plan, tuple(None if tensor is None else facts_of(tensor) for tensor in tensors), (), around))


def _made(key: Key) -> Plan:
    """Make a plan, in one thread at a time: several that compile at once confuse Python's parser. For a selected configuration
    that does not fit the GPU a smaller one is selected, from now on."""
    with _making:
        while (plan := _plans.get(key)) is None:
            try:
                plan = key.decide(key)
            except DoesNotFit:
                around = key.surroundings
                key = key._replace(surroundings=around._replace(tables=selection.tables(around.arch)))
                continue
            if len(_plans) >= MOST_PLANS:
                del _plans[next(iter(_plans))]
            _plans[key] = plan
    return plan
