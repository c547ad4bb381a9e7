"""Enable and disable for any model, and those of one library."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import operator
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from .._core.names import with_names
from . import replacement, structure
from .comparison import Refused, compare, first_line
from .replacement import Library, Match, Replacement
from .report import LIBRARY, STRUCTURE, Report, Row, count_bytes

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
        search = _Search({name: each for name, each in root.named_modules() if id(each) not in visited}, lengths)
        search.run(libraries, structures)
        visited |= {id(each) for each in root.modules()}
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
    report.calls_by_name = replacement.change_classes(classes, modules, check_calls)
    return report


def _checked(lengths: Any) -> tuple[int, ...]:
    """Return lengths as integers."""
    try:
        found = tuple(map(operator.index, lengths if isinstance(lengths, Iterable) else (lengths,)))
    except TypeError:
        raise TypeError(f"lengths must be an int, or several in a sequence, got {lengths!r}") from None
    if min(found, default=1) < 1:
        raise ValueError(f"lengths must be positive, got {lengths!r}")
    return found


def disable(model: Any) -> dict[str, str]:
    """Undo :func:`enable` in a model, or in the modules that an object holds.

    Returns:
        The names of the modules that are stock again, and of their classes; empty if none was enabled.

    Raises:
        TypeError: model is no module and holds none.
    """
    restored: dict[str, str] = {}
    for prefix, root in _roots(model):
        enabled = {name: (module, stock) for name, module in root.named_modules() if (stock := replacement.stock_of(module))}
        for name, (module, stock) in enabled.items():
            restored[f"{prefix}.{name}".strip(".")] = stock.__name__
            replacement.restore(module)
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
        if model and all(isinstance(each, torch.Tensor) for each in model.values()):
            raise TypeError("enable expects a model, got a state_dict: load it into its module and pass the module")
        attributes = model
    else:
        components = getattr(model, "components", None)  # of a pipeline of diffusers
        attributes = {**getattr(model, "__dict__", {}), **(components if isinstance(components, dict) else {})}
    found = [(str(name), each) for name, each in attributes.items() if isinstance(each, nn.Module)]
    if not found:
        raise TypeError(f"enable expects a torch.nn.Module, or an object that holds some, got {type(model).__name__}")
    return found


class _Search:
    """The relative attention among modules: rows for the report, and classes for what computes the same when it is replaced."""

    def __init__(self, modules: dict[str, nn.Module], lengths: tuple[int, ...]) -> None:
        self.modules, self.lengths = modules, lengths
        self.enabled = {name for name, module in modules.items() if replacement.stock_of(module) is not None}
        self.rows: dict[str, Row] = {}
        self.classes: dict[str, type] = {}
        self.compared: dict[Any, Replacement] = {}  # the last one that replaces a module of a class: the next one's first guess

    def run(self, libraries: Sequence[str], structures: bool) -> None:
        """Compare all modules with what may replace them."""
        matches = self._matches(libraries)
        for name in _progress(list(self.modules), "comparing modules with their stock forward"):
            if name in self.enabled:
                continue
            if name not in matches:
                if structures and not type(self.modules[name]).__module__.startswith("torch.nn."):
                    self._by_structure(name)
            elif not _only_passes_on(matches[name]):
                self._by_class(name, matches[name])
        served = tuple({type(self.modules[name]) for name in self.classes if name in matches})
        for name, match in matches.items():
            if _only_passes_on(match):
                path = f"{name}." if name else ""
                inside = [each for each in self.modules if each == name or each.startswith(path)]
                attention = [each in self.classes for each in inside if isinstance(self.modules[each], served)]
                if attention and all(attention):  # small masks and positions are for ours alone
                    self.classes[name] = match.ours  # type: ignore[assignment]
                    self.rows[name] = Row(name, type(self.modules[name]).__name__, PASSES_ON, LIBRARY)
        self.rows = {name: self.rows[name] for name in self.modules if name in self.rows}

    def _matches(self, libraries: Sequence[str]) -> dict[str, Match]:
        """Return what is of a library's classes, by name."""
        packages = {base.__module__.partition(".")[0] for module in self.modules.values() for base in type(module).__mro__}
        found: dict[str, Match] = {}
        for name in libraries:
            library: Library = importlib.import_module(f".{name}", __package__).LIBRARY
            if packages & {source.stock.partition(".")[0] for source in library.sources}:
                found |= library.matches(self.modules)
        return found

    def _by_class(self, name: str, match: Match) -> None:
        """Compare a module of a library with the class for it."""
        module = self.modules[name]
        stock = type(module)

        def compare_with_class() -> tuple[type, Replacement, float]:
            if match.ours is None:
                raise Refused(match.reason)
            ours: Replacement = getattr(match.ours, replacement.ATTRIBUTE)
            similar = ours if stock in self.compared else None
            return match.ours, *compare(module, lambda _: [("", lambda: ours)], ours.prepare, similar)

        self._compare(name, match.title, LIBRARY, stock, compare_with_class)

    def _by_structure(self, name: str) -> None:
        """Compare a module with what replaces its kind, if it is of one."""
        module = self.modules[name]
        stock = type(module)
        try:
            kind = structure.kind_of(module)
        except Refused as refused:
            self.rows[name] = Row(name, stock.__name__, "relative attention", STRUCTURE, reason=str(refused))
            return
        except Exception:  # an attribute may raise anything, and the module is most likely something else
            return
        if kind is None:
            if (other := structure.recognised(module)) is not None:
                self.rows[name] = Row(name, stock.__name__, other.title, STRUCTURE, reason=other.instead)
            return

        def candidates(model: Any) -> Iterator[tuple[str, Callable[[], Replacement]]]:
            for layout in kind.layouts(module):
                make = functools.partial(structure.observed, kind, layout, model)
                yield f" (read as {layout})", lambda make=make: kind(stock, make()).replacement()  # type: ignore[misc]

        def compare_with_kind() -> tuple[type, Replacement, float]:
            ours, difference = compare(module, candidates, kind.prepare, self.compared.get((kind, stock)))
            new = structure.enabled_class(kind, stock, ours.ours.layout)  # type: ignore[arg-type]
            try:
                object.__new__(stock).__class__ = new
            except TypeError as error:  # a class with __slots__
                raise Refused(f"its class cannot be exchanged: {error}") from error
            return new, ours, difference

        self._compare(name, kind.title, STRUCTURE, (kind, stock), compare_with_kind)

    def _compare(
        self, name: str, title: str, found: str, key: Any, function: Callable[[], tuple[type, Replacement, float]]
    ) -> None:
        """Add the row of a module, and the class in place of its own if it computes the same. key: of similar modules."""
        module = self.modules[name]
        stock = type(module).__name__
        try:
            if "forward" in vars(module):
                raise Refused("its forward was replaced (by a hook?); call enable first")
            if any(hasattr(each, "device_mesh") for each in module.parameters(recurse=False)):
                raise Refused("it is sharded; call enable first")
            self.classes[name], self.compared[key], difference = function()
        except Exception as error:  # a module of the user may raise anything
            reason = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {first_line(error)}"
            self.rows[name] = Row(name, stock, title, found, reason=reason)
            return
        sizes = count_bytes(self.compared[key], module, self.lengths, self.modules.get(name.rpartition(".")[0]))
        self.rows[name] = Row(name, stock, title, found, difference, sizes)


def _only_passes_on(match: Match) -> bool:
    """Return whether a module only passes masks and positions on to attention."""
    return match.ours is not None and issubclass(match.ours, replacement.PassesOn)


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


ENABLE = """{summary}

:func:`triton_relattn.enable` does the same for models of all libraries, and says how modules are compared before.

Args:
    module: {module} Other models of the same class stay as they are; so do checkpoints, parameters and hooks.
    lengths: for which the report counts memory, in positions.
    check_calls: whether some of your calls are compared with the stock forward.

Returns:
    The report of :func:`triton_relattn.enable`: a dict of the names of the modules, as ``module.named_modules()`` has them, and
    of their stock classes. Empty if all of it was enabled before.

{text}

Raises:
    ValueError: nothing in module is of these classes.
    RuntimeError: all modules that are were refused; the message has the reasons.
    TypeError: module is no module and holds none; lengths that are not integers.

Example:
{example}
"""
DISABLE = """Undo :func:`enable` in module and all inside it.

Returns:
    The names of the modules that are stock again, and of their classes; empty if none was enabled.
"""


def functions(
    package: str, *, summary: str, module: str, text: str, example: str
) -> tuple[Callable[..., Report], Callable[[Any], dict[str, str]]]:
    """Return the functions enable and disable of a library, with their docstrings."""

    def enable_module(module: Any, *, lengths: int | Sequence[int] = 4096, check_calls: bool = True) -> Report:
        return enable_in(module, lengths, check_calls, (package.rpartition(".")[2],), structures=False)

    def disable_module(module: Any) -> dict[str, str]:
        return disable(module)

    lines = "\n".join(f"    {line}" for line in example.strip().splitlines())
    enable_module.__doc__ = ENABLE.format(summary=summary, module=module, text=text.strip(), example=lines)
    disable_module.__doc__ = DISABLE
    for name, function in (("enable", enable_module), ("disable", disable_module)):
        function.__name__ = function.__qualname__ = name
        function.__module__ = package
    return with_names(enable_module), disable_module
