"""The user's own calls of enabled modules: in some of them the stock forward runs beside ours, and both are compared.

Compared are the first call of each kind, the second, the fourth, the eighth, and the first ones after an attribute or a buffer of
the module was changed, on copies, without gradients and without dropout of attention weights. If they differ the module gets its
stock class back for good, and that call is the stock forward's. A module that is known by its structure alone gets ours for no
kind of call that was not compared.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from .._core.warn import first_line
from .compact import Compact, has_dense, to_dense
from .comparison import SCRIPTED_LIMIT, dropped_otherwise, is_scripted, run, values
from .isolation import random_state_restored
from .replacement import Replacement
from .shadow import cached_tensors, copied_argument, copied_tensor, shadow

CALLS = "_triton_relattn_calls"
"""The attribute of an enabled module that has its :class:`Calls`."""
MOST_BYTES = 1 << 30
"""Memory of a stock forward up to which it runs beside ours."""
SCORES = 6
"""How many tensors of the size of its scores a stock forward holds at a time, about."""
FACTOR = 3.0
"""How many times as far from the exact result as the stock forward's ours may be."""
SMALLEST = {torch.float64: 2.0**-30, torch.float32: 2.0**-16, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-8}
"""Differences that pass in any case, as a share of the largest number: the stock result may be exact by chance."""
LARGEST = {torch.bfloat16: 2.0**-2, torch.float16: 2.0**-4}
"""Differences that do not pass in any case; 2**-6 for float32 and float64."""


@dataclass
class Compared:
    """The calls of a model's modules that were compared with the stock forward, and those that could not be.

    compared: how many. not_compared: how many, by reason. differing: modules that are stock again, and how they differed.
    """

    compared: int = 0
    not_compared: Counter[str] = field(default_factory=Counter)
    differing: dict[str, str] = field(default_factory=dict)


class Calls:
    """How many calls of each kind a module has had, and which kinds ours computes; compared: of all modules of a model."""

    def __init__(
        self, is_checked: bool = True, by_structure: bool = True, name: str = "", compared: Compared | None = None
    ) -> None:
        """is_checked: whether calls are compared; by_structure: whether the module is known by its structure alone."""
        self.is_checked, self.name, self.compared = is_checked, name, compared or Compared()
        self.needs_comparison = is_checked and by_structure
        self.counts: dict[Any, int] = {}
        self.judged: dict[Any, str] = {}  # by kind: why no call could be compared; nothing if ours computes the same
        self.is_compared = False  # whether there is one that is equal, which torch.compile does not find in a dictionary
        self.versions: list[tuple[int, int]] | None = None  # of the buffers
        self.changes = self.running = 0
        self.encoders: list[Any] = []  # references to the modules that pass masks on to this one

    def changed(self) -> None:
        """Compare the next calls, whatever their kinds: an attribute of the module was set, not by its own forward."""
        if not self.running:
            self.forget()

    def forget(self) -> None:
        self.counts.clear()
        self.judged.clear()
        self.is_compared = False

    def __reduce__(self) -> Any:
        return Calls, (self.is_checked, self.needs_comparison)

    def is_due(self, kind: Any, module: nn.Module) -> bool:
        """Count a call of a kind, and return whether it is to be compared."""
        versions = [(id(buffer), 0 if buffer.is_inference() else buffer._version) for buffer in module.buffers()]
        if versions != self.versions:  # a buffer was written to; one that counts calls is not compared each time
            self.changes += self.versions is not None
            self.versions = versions
            if self.changes and _is_power_of_two(self.changes):
                self.forget()
        number = self.counts[kind] = self.counts.get(kind, 0) + 1
        return _is_power_of_two(number)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def record(module: nn.Module) -> Calls:
    """Return the record of a module's calls; of one that was loaded from a file, a new one."""
    found: Calls | None = vars(module).get(CALLS)
    if found is None:
        found = vars(module)[CALLS] = Calls()
    return found


HAS_FLAG = hasattr(torch.compiler, "_is_exporting_flag")
"""Whether there is the flag behind is_exporting(), which in graphs of torch.compile is always True in torch 2.11."""


def is_graph() -> bool:
    """Return whether the call is traced for a graph (torch.export, ONNX, torch.jit.trace), which has the stock forward."""
    if torch.compiler.is_compiling():
        return torch.compiler._is_exporting_flag if HAS_FLAG else torch.compiler.is_exporting()
    return bool(torch.jit.is_tracing() or torch.onnx.is_in_onnx_export())


class Verdict(NamedTuple):
    """Who computes a call: ours, unless there is a text: how ours differs, or why a call that has to be compared was not."""

    text: str = ""
    differs: bool = False


def judge(replacement: Replacement, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], pairs: int) -> Verdict:
    """Compare a call with so many pairs, if it is due, and return who computes it."""
    calls = record(module)
    if not calls.is_checked:
        return Verdict()
    kind, arguments = _kind(module, args, kwargs), replacement.bind(args, kwargs)
    if calls.is_due(kind, module):
        if _is_large(module, arguments, pairs) and (part := replacement.ours.one_sequence(arguments, pairs)) is not None:
            arguments, pairs = part
        difference, reason = "", _why_not(module, arguments, pairs)
        if not reason:
            try:
                difference = _difference(replacement, module, arguments)
            except Exception as error:  # of the stock forward, or of ours, which will raise it in the call itself
                reason = f"{type(error).__name__}: {first_line(error)}"
        if reason:
            calls.compared.not_compared[reason] += 1
            calls.judged.setdefault(kind, f"it was not compared: {reason}. With check_calls=False enable does without")
        else:
            calls.compared.compared += 1
            calls.judged[kind], calls.is_compared = "", not difference
        if difference:
            calls.compared.differing[calls.name] = difference
            return Verdict(difference, differs=True)
    # Of a kind whose first call another thread compares nothing is known.
    return Verdict(calls.judged.get(kind, "it was not compared") if calls.needs_comparison else "")


def _kind(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what tells calls apart: the modes of torch, and of arguments the types, dtypes and magnitudes of all sizes."""
    autocast = (torch.get_autocast_dtype(name) if torch.is_autocast_enabled(name) else None for name in ("cpu", "cuda"))
    modes = module.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast
    return modes, *map(_key, args), *((name, _key(value)) for name, value in kwargs.items())


def _key(value: Any) -> Any:
    value = value.small if isinstance(value, Compact) else value
    if isinstance(value, torch.Tensor):
        return value.dtype, *(size.bit_length() for size in value.shape)
    return value if value is None or isinstance(value, bool) else type(value)


def _is_large(module: Any, arguments: dict[str, Any], pairs: int) -> bool:
    """Return whether a stock forward needs more memory than may be used beside ours."""
    cached = [tensor for value in arguments.values() for tensor in cached_tensors(value, _layer(module, arguments))]
    copies = sum(tensor.numel() for tensor in (*module.parameters(), *cached))
    return SCORES * 8 * pairs + 8 * copies > MOST_BYTES


def _why_not(module: Any, arguments: dict[str, Any], pairs: int) -> str:
    """Return why a call is not compared; nothing if it is."""
    given = (value for value in arguments.values() if isinstance(value, torch.Tensor) and not has_dense(value))
    tensors = [*given, *module.parameters()]
    if _is_large(module, arguments, pairs):
        return f"the stock forward of a sequence needs more than {MOST_BYTES >> 20} MiB"
    if getattr(module, "_is_replica", False):
        return "it is a replica of DataParallel"
    if any(tensor.is_meta or type(tensor) not in (torch.Tensor, nn.Parameter) for tensor in tensors):
        return "its tensors have no values, or are of another class"
    if any(tensor.is_cuda for tensor in tensors) and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is captured"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func transforms it"
    return ""


def _layer(module: Any, arguments: dict[str, Any]) -> int:
    """Return the number of the layer of a cache that a call writes to; cache_offset is of layers that run several times."""
    return (getattr(module, "layer_idx", None) or 0) + (arguments.get("cache_offset") or 0)  # type: ignore[no-any-return]


def _difference(replacement: Replacement, module: Any, arguments: dict[str, Any]) -> str:
    """Return how the results of a call differ; nothing if they agree."""
    floating = (value for value in arguments.values() if isinstance(value, torch.Tensor) and value.is_floating_point())
    dtype = next((value.dtype for value in floating), torch.float32)
    wider = torch.float32 if dtype.itemsize < 4 else torch.float64
    devices = tuple({weight.device for weight in module.parameters() if weight.is_cuda})
    layer = _layer(module, arguments)

    def run_copy(is_ours: bool, exact: torch.dtype | None = None) -> tuple[Any, list[float]]:
        model = shadow(module, lambda tensor: copied_tensor(tensor, exact))
        replacement.ours.without_dropout(model)
        # What layers pass on in a small form is as exact as in its dense one, which the stock forward has in each run.
        given = {
            name: value if is_ours and has_dense(value) else copied_argument(to_dense(value), exact, layer)
            for name, value in arguments.items()
        }
        autocast = torch.autocast("cuda" if devices else "cpu", enabled=False) if exact else nullcontext()
        with random_state_restored(devices), autocast:
            return run(replacement, model, given, is_ours, exact)

    with torch.no_grad():  # also of what is passed on, whose dense form may be made below
        stock, dropped = run_copy(False)
        ours, our_dropped = run_copy(True)
        if text := dropped_otherwise(set(dropped), set(our_dropped)):  # ours may take long sequences in several calls
            return text
        try:
            exact, _ = run_copy(False, wider)  # also of float64: the stock forward may cast to float32
        except Exception:  # a function bound to the module itself has its dtype
            exact = stock
        outputs = [[to_dense(value) for value in values(returned)] for returned in (stock, ours, exact)]
    counts = replacement.counted(arguments)
    for number, (stock_out, our_out, exact_out) in enumerate(zip(*outputs, strict=True), 1):
        if not isinstance(our_out, torch.Tensor) or not isinstance(stock_out, torch.Tensor):
            continue  # attention weights, which ours does not compute
        if our_out.shape != stock_out.shape:
            return f"output {number} has the shape {tuple(our_out.shape)}, stock {tuple(stock_out.shape)}"
        exact_out = exact_out.double()
        is_counted = exact_out.isfinite() if counts is None or number > 1 else exact_out.isfinite() & counts
        errors = [((out.double() - exact_out).abs().where(is_counted, 0.0)).max().item() for out in (stock_out, our_out)]
        stock_error, our_error = errors[0] if math.isfinite(errors[0]) else 0.0, errors[1]
        size = exact_out.abs().where(is_counted, 0.0).max().item()
        smallest = SCRIPTED_LIMIT if is_scripted(replacement.stock) else SMALLEST.get(stock_out.dtype, 2.0**-16)
        allowed = max(FACTOR * stock_error, smallest * size)
        if allowed > LARGEST.get(stock_out.dtype, 2.0**-6) * size:
            text = f"its output differs by {stock_error / (size or 1.0):.1e} of the largest number from that in another precision"
            return f"the stock forward cannot be compared: {text}"
        if not our_error <= allowed:
            text = f"its output differs by {our_error / (size or 1.0):.1e} of the largest number there"
            return f"{text}, {allowed / (size or 1.0):.0e} is allowed"
    return ""
