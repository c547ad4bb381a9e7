"""Enable and disable for any model: modules with relative attention are found, compared, and given their new class."""

from __future__ import annotations

import dataclasses
import importlib
import operator
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from .._core.names import with_names
from . import structure
from .comparison import Refused, compare, first_line
from .libraries import Library
from .replacement import LIBRARY, Match, Replacement, change_classes, restore, stock_class
from .report import Report, Row, count_bytes

LIBRARIES = ("transformers", "nemo", "espnet", "speechbrain", "x_transformers")
PASSES_ON = "passes masks and positions"
T = TypeVar("T")


@with_names
def enable(model: Any, *, lengths: int | Sequence[int] = 4096, check_calls: bool = True) -> Report:
    """Let the relative attention in any torch model run on the operator, where that computes the same. The model is changed
    in place.

    It is found in two ways. By its class, in models of transformers, NeMo, ESPnet, CosyVoice, SpeechBrain and
    x-transformers. By its structure, in any other module: the names and shapes of its parameters and children, and the
    arguments of its forward; these kinds are known:

    - vectors for keys and values in a window, with a proximal bias (VITS: RVC, GPT-SoVITS, so-vits-svc, piper, coqui, ...);
    - Transformer-XL's terms with projected positions (ESPnet's Conformer: FunASR, chatterbox, copies in recipes);
    - the same with features of the distance (Enformer, Borzoi);
    - decomposed positions on a grid (SAM, ViTDet: segment-anything, cellpose, timm, mmdet, detectron2);
    - an embedding of clipped distances (Shaw et al.: lucidrains' conformer);
    - a row per distance to the past (Music Transformer);
    - a bias by bucket that a layer makes of its own embedding (T5).

    Before a module is replaced, its forward and ours run side by side, with the module's settings and random weights, in float64
    on the CPU: outputs and the gradients of inputs and parameters, at several lengths, with and without masks, agree to 2**-30 of
    the largest number (1e-9); in training mode both drop weights with the same probability. It takes a fraction of a second for
    the first module of a class, a tenth of that for each other one. What disagrees stays as it is. Masks and positions that
    modules pass on know what stock ones would have passed on, for layers that are stock.

    Then some of your own calls are also compared, before ours computes them: the first of each kind, the second, the fourth, the
    eighth, and so on, if the stock forward takes at most 256 MiB. If they differ the module is the stock class's again, and a
    warning says so. ``report.calls()`` counts them.

    Args:
        model: a module, or any object that holds some, as a pipeline does: those among its attributes and ``components``.
        lengths: for which the report counts memory, in positions.
        check_calls: whether calls are compared.

    Returns:
        A dict of the replaced modules: their names and those of their classes; empty if all were replaced before. It prints as
        a table with what each one computes, the difference that was found and the memory of a layer. ``rows`` has the same as
        numbers, ``left`` the modules that were recognised and not replaced, with the reason; if there are any, a warning says so.

    Parameters, ``state_dict``, hooks and ``isinstance`` stay: a module gets a class derived from its own. Pickles and copies of
    an enabled model are enabled; their first calls are compared again.

    What differs from the stock model: dropout has the same rate and a different random stream; attention weights that a module
    keeps for plots (``attn``) are None; rows of queries that see no key, which are padding, are zero. For libraries the
    ``enable`` of each (``triton_relattn.integrations.transformers``, ...) has its own list. A call with arguments that were not
    compared (another kind of cache, cross attention) uses the stock class.

    Raises:
        ValueError: nothing in model has relative attention of these kinds.
        RuntimeError: all modules that have it were refused; the message has the reasons.
        TypeError: model is no module and holds none; lengths that are not integers.

    Example:
        >>> from transformers import VitsConfig, VitsModel
        >>> model = VitsModel(VitsConfig(num_hidden_layers=1, hidden_size=32, flow_size=32, num_attention_heads=2))
        >>> dict(enable(model))
        {'text_encoder.encoder': 'VitsEncoder', 'text_encoder.encoder.layers.0.attention': 'VitsAttention'}
    """
    return enable_in(model, lengths, check_calls, LIBRARIES)


def enable_in(
    model: Any, lengths: int | Sequence[int], check_calls: bool, libraries: Sequence[str], structures: bool = True
) -> Report:
    """Enable what a model has of some libraries, and what is found by its structure.

    All is compared before any class is changed.
    """
    lengths = _checked(lengths)
    rows: list[Row] = []
    modules: dict[str, nn.Module] = {}
    classes: dict[str, type] = {}
    enabled_before = False
    visited: set[int] = set()  # an object may hold a module by several names
    for prefix, root in _roots(model):
        search = _Search({name: part for name, part in root.named_modules() if id(part) not in visited}, lengths)
        search.run(libraries, structures)
        visited |= {id(part) for part in root.modules()}
        enabled_before |= bool(search.enabled)
        for name, row in search.rows.items():
            path = f"{prefix}.{name}".strip(".")
            rows.append(dataclasses.replace(row, name=path))
            modules[path] = search.modules[name]
            if name in search.classes:
                classes[path] = search.classes[name]
    if not rows and not enabled_before:
        kinds = " nor a module of the kinds that help(triton_relattn.enable) lists" if structures else ""
        raise ValueError(
            f"{type(model).__name__} has no relative attention that triton_relattn knows: neither a class of "
            f"{', '.join(libraries)}{kinds}"
        )
    report = Report(rows, lengths)
    if report.left and not report and not enabled_before:
        raise RuntimeError(f"no module of {type(model).__name__} was enabled; the model is unchanged. {report}")
    if report.left:
        count = f"{len(report.left)} of {len(rows)} modules with relative attention"
        warnings.warn(f"enable left {count} unchanged; print its report for all reasons. {report.reasons()[0]}", stacklevel=4)
    change_classes(classes, modules, check_calls, report.calls())
    return report


def _checked(lengths: Any) -> tuple[int, ...]:
    """Return lengths as integers."""
    try:
        checked = tuple(map(operator.index, lengths if isinstance(lengths, Iterable) else (lengths,)))
    except TypeError:
        raise TypeError(f"lengths must be an int, or several in a sequence, got {lengths!r}") from None
    if min(checked, default=1) < 1:
        raise ValueError(f"lengths must be positive, got {lengths!r}")
    return checked


def disable(model: Any) -> dict[str, str]:
    """Undo :func:`enable` in a model, or in the modules that an object holds.

    Returns:
        The names of the modules that are stock again, and of their classes; empty if none was enabled.

    Raises:
        TypeError: model is no module and holds none.
    """
    restored: dict[str, str] = {}
    for prefix, root in _roots(model):
        enabled = {name: (module, stock) for name, module in root.named_modules() if (stock := stock_class(module))}
        for name, (module, stock) in enabled.items():
            restored[f"{prefix}.{name}".strip(".")] = stock.__name__
            restore(module)
    return restored


def _roots(model: Any) -> list[tuple[str, nn.Module]]:
    """Return the modules that an object is or holds, with the names of the attributes that hold them."""
    if isinstance(model, nn.Module):
        return [("", model)]
    if isinstance(model, str):
        raise TypeError(f"enable expects a model, got the string {model[:60]!r}: load it first and pass the module")
    if isinstance(model, type):
        raise TypeError(f"enable expects a model, got the class {model.__name__}: create an instance and pass that")
    if isinstance(model, Mapping):
        if model and all(isinstance(value, torch.Tensor) for value in model.values()):
            raise TypeError("enable expects a model, got a state_dict: load it into its module and pass the module")
        attributes = model
    else:
        components = getattr(model, "components", None)  # of a pipeline of diffusers
        attributes = {**getattr(model, "__dict__", {}), **(components if isinstance(components, dict) else {})}
    roots = [(str(name), value) for name, value in attributes.items() if isinstance(value, nn.Module)]
    if not roots:
        raise TypeError(f"enable expects a torch.nn.Module, or an object that holds some, got {type(model).__name__}")
    return roots


class _Search:
    """The relative attention among modules: rows for the report, and classes for what computes the same when it is replaced."""

    def __init__(self, modules: dict[str, nn.Module], lengths: tuple[int, ...]) -> None:
        self.modules, self.lengths = modules, lengths
        self.enabled = {name for name, module in modules.items() if stock_class(module) is not None}
        self.rows: dict[str, Row] = {}
        self.classes: dict[str, type] = {}
        self.similar: dict[Any, Replacement] = {}  # what replaced the last module of a class: the next one's first candidate

    def run(self, libraries: Sequence[str], structures: bool) -> None:
        """Find relative attention, by class and by structure, and compare it with what may replace it."""
        by_class = self._find_by_class(libraries)
        for name in _progress(list(self.modules), "comparing modules with their stock forward"):
            if name in self.enabled:
                continue
            match = by_class.get(name)
            if match is None and structures:
                match = structure.find(self.modules[name])
            if match is not None and not match.passes_on:
                self._compare(name, match)
        # What passes small masks and positions on is replaced where all attention inside it is: they are for ours alone.
        served = tuple({type(self.modules[name]) for name in self.classes if name in by_class})
        for name, match in by_class.items():
            if match.passes_on:
                path = f"{name}." if name else ""
                inside = [part for part in self.modules if part == name or part.startswith(path)]
                attention = [part in self.classes for part in inside if isinstance(self.modules[part], served)]
                if attention and all(attention):
                    self.classes[name] = match.ours
                    self.rows[name] = Row(name, type(self.modules[name]).__name__, PASSES_ON, LIBRARY)
        self.rows = {name: self.rows[name] for name in self.modules if name in self.rows}

    def _find_by_class(self, libraries: Sequence[str]) -> dict[str, Match]:
        """Return what is of a library's classes, by name; no library is imported that the model is not of."""
        packages = {base.__module__.partition(".")[0] for module in self.modules.values() for base in type(module).__mro__}
        matches: dict[str, Match] = {}
        for name in libraries:
            library: Library = importlib.import_module(f".{name}", __package__).LIBRARY
            if packages & {source.module.partition(".")[0] for source in library.sources}:
                matches |= library.find(self.modules)
        return matches

    def _compare(self, name: str, match: Match) -> None:
        """Add the row of a module, and the class in place of its own if that computes the same."""
        module = self.modules[name]
        stock, key = type(module), (match.ours, type(module))
        row = Row(name, stock.__name__, match.title, match.found_by)
        try:
            if "forward" in vars(module):
                raise Refused("its forward was replaced (by a hook?); call enable first")
            if any(hasattr(weight, "device_mesh") for weight in module.parameters(recurse=False)):
                raise Refused("it is sharded; call enable first")
            if match.ours is None:
                raise Refused(match.reason)
            replacement, difference = compare(module, match.ours, self.similar.get(key))
            new = replacement.ours.replacing_class()
            try:
                object.__new__(stock).__class__ = new
            except TypeError as error:  # a class with __slots__
                raise Refused(f"its class cannot be exchanged: {error}") from error
        except Exception as error:  # a module of the user may raise anything
            reason = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {first_line(error)}"
            self.rows[name] = dataclasses.replace(row, reason=reason)
            return
        self.classes[name], self.similar[key] = new, replacement
        memory = count_bytes(replacement, module, self.lengths, self.modules.get(name.rpartition(".")[0]))
        self.rows[name] = dataclasses.replace(row, error=difference, memory=memory)


def _progress(items: Sequence[T], label: str) -> Iterator[T]:
    """Yield items; after two seconds a bar on the terminal shows how many are done."""
    start, width, is_shown = time.monotonic(), 30, False
    for number, item in enumerate(items, 1):
        yield item
        if sys.stderr.isatty() and time.monotonic() - start > 2:
            is_shown, bar = True, "#" * (width * number // len(items))
            print(f"\r{label} [{bar:{width}}] {number}/{len(items)}", end="", file=sys.stderr, flush=True)
    if is_shown:
        print(file=sys.stderr)
