"""Drafts: how forward.py, backward.py and grid write down a plan.

What decides gets a draft's tensors, of which all is known but their addresses (``Slot``), and writes down what a call does:

    draft = Draft(key)
    out = draft.new(query.shape, query.dtype)                      an allocation
    draft.launch("forward", forward_kernel, config, grid, {"outs": out.strided, ...})
    return draft.compile(out)                                      a Template

``compile`` finds the kernels among those that Triton has compiled for numbers of the same kind, or compiles them. One that does
not fit the GPU is found then, and a smaller tile takes its place. Sizes are symbols (sizes.py): a template has them as functions
of those of a call.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from .._core.watchers import ALIGNMENT, Facts, facts_of, plain_keys
from .config import architectures, selection
from .config.tile_config import TileConfig
from .plan import Compiled, DoesNotFit, Key, Launch, Surroundings, Template
from .sizes import Size, fixed, plain

LAUNCH_OPTIONS = {"enable_fp_fusion": True}
"""Passed to every launch: Triton 3.9 warns where it is left out, because 3.10 changes the default."""
SCRATCH_ALIGNMENT = 128
NOTHING = 0  # the cell that has None for good

_compiled: dict[tuple[Any, ...], Compiled] = {}  # by all that Triton compiles for

Strided = tuple["Slot", tuple[int, ...]]
"""A tensor as the kernels take it, with its strides."""


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


class Draft:
    """What a call does, so far. Its methods write it down."""

    def __init__(self, key: Key) -> None:
        self.key = key
        tensors = [None if facts is None else Facts(*facts) for facts in key.tensors]
        self.device = next(facts.device for facts in tensors if facts is not None)
        self.cells: list[Any] = [None]  # arguments and parts of arguments: constants, and what a call fills in
        self.addresses: list[int] = []  # cells of the tensors, those given and those allocated, in their order
        self.allocations: list[Any] = []  # shape, strides, dtype
        self.scratch: list[tuple[Slot, int]] = []  # with its first byte
        self.scratch_bytes = self.zeroed_bytes = 0
        self.workspace_bytes = 0  # of the scratch memory
        self.views: list[tuple[Slot, int]] = []  # with the cell of what it is a view of
        self.groups: list[tuple[int, Any, Any]] = []  # cell, function that picks its parts, type
        self.known: dict[int, tuple[Any, int]] = {}  # groups by their identity, and their cells
        self.kinds: dict[int, tuple[Any, Any]] = {}  # the same, and what Triton compiles for of them
        self.launches: list[Launch] = []
        self.grids: list[tuple[int, ...]] = []
        self.described: list[list[Any]] = []  # arguments of the launches
        self.preparations: list[tuple[Callable[..., object], tuple[Slot, ...]]] = []
        self.endings: list[tuple[Callable[..., object], tuple[Slot, ...]]] = []
        self.present = [at for at, facts in enumerate(tensors) if facts is not None]
        given = [None if of is None else self._tensor(of.shape, of.strides, of.dtype, of.alignment) for of in tensors]
        self.given = tuple(  # a tensor that is more than its numbers is copied
            slot if slot is None or facts is None or facts.keys in plain_keys(facts.device) else self.copied(slot)
            for slot, facts in zip(given, tensors, strict=True)
        )
        self.selected: dict[str, dict[str, str]] = {}  # by kernel: the conditions for which a configuration was selected

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

    def new_like(self, slot: Slot, width: int | None = None) -> Slot:
        """Allocate a tensor like another in shape, dtype and memory order, (B, N, H, width) or (B, H, N, width); tables are
        contiguous. width: in place of the last size."""
        shape = (*slot.shape[:-1], slot.shape[-1] if width is None else width)
        if len(shape) < 4 or slot.strides[1] >= slot.strides[2]:
            return self.new(shape, slot.dtype)
        batch, heads, length, width = shape
        by_batch, by_row, by_head, step = contiguous_strides((batch, length, heads, width))
        return self.new(shape, slot.dtype, (by_batch, by_head, by_row, step))

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

    def contiguous(self, slot: Slot | None) -> Slot | None:
        """Return a tensor as kernels take those without strides: its elements side by side."""
        if slot is None:
            return None
        dimensions = zip(slot.shape, slot.strides, contiguous_strides(slot.shape), strict=True)
        is_contiguous = all(size == 1 or stride == usual for size, stride, usual in dimensions)
        return slot if is_contiguous else self.copied(slot)

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
            if argument.isupper():  # a constant
                value = fixed(value)
                cells.append(self._cell(value))
            else:
                cells.append(self._argument(value))
            described.append(value)
        self.launches.append(Launch(name, kernel, _pick(cells), options))
        self.grids.append((*grid, 1, 1)[:3])
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

    def compile(self, *results: Slot | None) -> Template:
        """Compile the kernels, unless something else than Triton runs them. OutOfResources: one does not fit the GPU, whose
        configuration was not selected."""
        assert not any(slot is not None and slot.source is None for slot in results)
        if self.key.surroundings.launcher != "another":
            for launch, grid, arguments in zip(self.launches, self.grids, self.described, strict=True):
                self._compile(launch, grid, arguments)
        shared = {
            "launches": self.launches,
            "addresses": self.addresses,
            "groups": self.groups,
            "present": self.present,
            "results": tuple(None if slot is None else slot.source for slot in results),
            "device": self.device,
            "gpu": self.key.surroundings.gpu,
            "is_direct": self.key.surroundings.launcher == "plan",
        }
        sized = (
            self.cells,
            self.grids,
            self.allocations,
            [(slot.cell, start, slot.shape, slot.dtype) for slot, start in self.scratch],
            self.scratch_bytes,
            self.zeroed_bytes,
            self.workspace_bytes,
            [(view.cell, of, view.shape, view.strides) for view, of in self.views],
            *[
                [(function, [(slot.source, slot.shape, slot.strides) for slot in slots]) for function, slots in calls]
                for calls in (self.preparations, self.endings)
            ],
        )
        return Template(shared, sized)

    def _compile(self, launch: Launch, grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        """Find the kernel of a launch among those that are compiled, or compile it."""
        around = self.key.surroundings
        kinds = [
            value if name.isupper() else self._kind(value, is_compiled_for)
            for name, value, is_compiled_for in zip(launch.kernel.arg_names, arguments, _specialized(launch.kernel), strict=True)
        ]
        key = launch.kernel, around.gpu, around.launcher, *launch.options.items(), *kinds
        if key not in _compiled:
            try:
                _compiled[key] = launch.compile(plain(grid), plain(list(arguments)))
            except OutOfResources as error:
                if launch.name not in self.selected:
                    raise
                if selection.tables(around.arch) is around.tables:  # else another plan has found that
                    selection.take_smaller(launch.name, around.arch, self.selected[launch.name], error)
                raise DoesNotFit from None
        launch.run, launch.function, launch.metadata = _compiled[key]

    def _kind(self, value: Any, is_compiled_for: bool = True) -> Any:
        """Return what Triton compiles for of an argument. is_compiled_for, False: of a number only how it is passed."""
        if isinstance(value, (int, Size)) and not isinstance(value, bool):
            bits = 32 if -(2**31) <= value < 2**31 else 64
            return (value == 1, value % ALIGNMENT == 0, bits) if is_compiled_for else bits
        if isinstance(value, Slot):
            return value.dtype, value.alignment
        if isinstance(value, tuple):
            if id(value) not in self.kinds:
                self.kinds[id(value)] = value, tuple([self._kind(part) for part in value])
            return self.kinds[id(value)][1]
        return type(value)


def described(tensors: Sequence[torch.Tensor | None], arch: str | None = None) -> Draft:
    """Return a draft that describes tensors, which may be on "meta", and launches nothing: to ask what a call on their GPU, or on
    the largest of another architecture, would do."""
    device = tensors[0].device  # type: ignore[union-attr]
    count = architectures.multiprocessors(device) if arch is None else architectures.architecture_of(arch).multiprocessors
    arch = arch or architectures.architecture(device)
    around = Surroundings(arch, count, selection.tables(arch), torch.get_float32_matmul_precision(), None, "another", None)
    facts = tuple(None if tensor is None else facts_of(tensor) for tensor in tensors)
    return Draft(Key(described, facts, (), around))


def strided(tensor: Slot | None) -> Strided | None:
    """Return a tensor that may not be there as the kernels take it."""
    return None if tensor is None else tensor.strided


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


@functools.cache
def _specialized(kernel: Any) -> tuple[bool, ...]:
    """Return of which arguments of a kernel Triton compiles for the value of a number."""
    return tuple(not parameter.do_not_specialize for parameter in kernel.params)
