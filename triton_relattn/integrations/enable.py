"""One door to all integrations: :func:`enable` and :func:`disable` for any model."""

from __future__ import annotations

import dataclasses
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
from .comparison import Refused, compared, compared_class, first_line
from .report import LIBRARY, STRUCTURE, Report, Row, count_bytes

LIBRARIES = ("transformers", "nemo", "espnet", "speechbrain", "x_transformers")
PASSES_ON = "passes masks and positions"


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
    chosen: dict[str, type] = {}
    enabled_before = False
    seen: set[int] = set()  # modules that an object holds by several names
    for prefix, root in _roots(model):
        found, ours, before = _compared(root, lengths, libraries, structures, seen)
        seen |= {id(each) for each in root.modules()}
        enabled_before |= before
        for row in found:
            name = f"{prefix}.{row.name}".strip(".")
            rows.append(dataclasses.replace(row, name=name))
            modules[name] = root.get_submodule(row.name)
            if row.name in ours:
                chosen[name] = ours[row.name]
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
    report.calls_by_name = replacement.change_classes(chosen, modules, check_calls)
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
        enabled = {name: each for name, each in root.named_modules() if replacement.stock_of(each) is not None}
        restored |= {f"{prefix}.{name}".strip("."): replacement.stock_of(each).__name__ for name, each in enabled.items()}  # type: ignore[union-attr]
        for each in enabled.values():
            replacement.restore(each)
    return restored


def _roots(model: Any) -> list[tuple[str, nn.Module]]:
    """The modules that an object is or holds, with the names of the attributes that hold them."""
    if isinstance(model, nn.Module):
        return [("", model)]
    if isinstance(model, str):
        raise TypeError(f"enable expects a model, got the string {model[:60]!r}: load it first and pass the module")
    if isinstance(model, type):
        raise TypeError(f"enable expects a model, got the class {model.__name__}: create an instance and pass that")
    if isinstance(model, Mapping) and model and all(isinstance(each, torch.Tensor) for each in model.values()):
        raise TypeError("enable expects a model, got a state_dict: load it into its module and pass the module")
    held = model if isinstance(model, Mapping) else {**getattr(model, "__dict__", {}), **_components(model)}
    found = {str(name): each for name, each in held.items() if isinstance(each, nn.Module)}
    if not found:
        raise TypeError(f"enable expects a torch.nn.Module, or an object that holds some, got {type(model).__name__}")
    return list(found.items())


def _components(model: Any) -> dict[str, Any]:
    """The parts of a pipeline of diffusers."""
    parts = getattr(model, "components", None)
    return parts if isinstance(parts, dict) else {}


def _compared(
    root: nn.Module, lengths: tuple[int, ...], libraries: Sequence[str], structures: bool, seen: set[int]
) -> tuple[list[Row], dict[str, type], bool]:
    """Compare all modules of a model but those that were seen.

    Returns:
        The rows, the classes of ours for the modules that agree, and whether some are enabled.
    """
    modules = {name: each for name, each in root.named_modules() if id(each) not in seen}
    enabled = {name for name, each in modules.items() if replacement.stock_of(each) is not None}
    packages = {base.__module__.partition(".")[0] for each in modules.values() for base in type(each).__mro__}
    met: dict[str, replacement.Met] = {}
    for name in libraries:
        library: replacement.Library = importlib.import_module(f".{name}", __package__).LIBRARY
        if packages & {each.stock.partition(".")[0] for each in library.sources}:
            met |= library.met(modules)
    rows: dict[str, Row] = {}
    chosen: dict[str, type] = {}
    known: dict[Any, Any] = {}
    for name in _progress(list(modules), "comparing modules with their stock forward"):
        parent = modules.get(name.rpartition(".")[0])
        if name in enabled or (name not in met and not structures):
            continue
        if name in met:
            found = _by_class(name, modules[name], met[name], lengths, known)
        else:
            found = _by_structure(name, modules[name], parent, lengths, known)
        if found is not None:
            rows[name] = found[0]
            if found[1] is not None:
                chosen[name] = found[1]
    served = tuple({type(modules[name]) for name in chosen if name in met})
    for name, each in met.items():
        if each.ours is not None and issubclass(each.ours, replacement.PassesOn):
            inside = [name in chosen for name, module in _inside(name, modules) if isinstance(module, served)]
            if inside and all(inside):  # small masks and positions are for ours alone
                chosen[name] = each.ours
                rows[name] = Row(name, type(modules[name]).__name__, PASSES_ON, LIBRARY)
    return [rows[name] for name in modules if name in rows], chosen, bool(enabled)


def _inside(name: str, modules: dict[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and those inside it, with their names."""
    return ((each, module) for each, module in modules.items() if not name or each == name or each.startswith(f"{name}."))


def _why_not(module: nn.Module) -> str:
    """Return why a module's class cannot be exchanged; nothing if it can."""
    if "forward" in vars(module):
        return "its forward was replaced (by a hook?); call enable first"
    if any(hasattr(each, "device_mesh") for each in module.parameters(recurse=False)):
        return "it is sharded; call enable first"
    return ""


def _by_class(
    name: str, module: nn.Module, met: replacement.Met, lengths: tuple[int, ...], known: dict[Any, Any]
) -> tuple[Row, type[nn.Module] | None] | None:
    """Return the row of a module of a library, and the class in place of its own if it computes the same; None if it only passes
    on masks.

    known: classes of which a module was compared.
    """
    stock, ours, reason = type(module), met.ours, met.reason
    if ours is not None and issubclass(ours, replacement.PassesOn):
        return None
    reason = reason or _why_not(module)
    if ours is None or reason:
        return Row(name, stock.__name__, met.title, LIBRARY, reason=reason), None
    of: Any = getattr(ours, replacement.ATTRIBUTE)
    try:
        difference = compared_class(of, module, stock in known)
    except Refused as refused:
        return Row(name, stock.__name__, met.title, LIBRARY, reason=str(refused)), None
    known[stock] = True
    sizes = count_bytes(of, module, lengths)
    return Row(name, stock.__name__, met.title, LIBRARY, difference, sizes), ours  # type: ignore[return-value]


def _by_structure(
    name: str, module: nn.Module, parent: nn.Module | None, lengths: tuple[int, ...], found: dict[Any, Any]
) -> tuple[Row, type[nn.Module] | None] | None:
    """Return the row of a module of a kind, and the class in place of its own if it computes the same; None if it is of no kind.

    found: readings of modules by kind and class, which are tried first.
    """
    if type(module).__module__.startswith("torch.nn."):
        return None
    stock, title = type(module), "relative attention"
    try:
        kind = structure.kind_of(module)
    except Refused as refused:
        return Row(name, stock.__name__, title, STRUCTURE, reason=str(refused)), None
    except Exception:  # an attribute may raise anything, and the module is most likely something else
        return None
    if kind is None:
        other = structure.not_served(module)
        return None if other is None else (Row(name, stock.__name__, other.title, STRUCTURE, reason=other.instead), None)
    title = kind.title
    try:
        if reason := _why_not(module):
            raise Refused(reason)
        reading, difference = compared(kind, module, found.get((kind, stock)))
        found[kind, stock] = reading
        ours = structure.made(kind, stock, reading)  # type: ignore[arg-type]
        try:
            object.__new__(stock).__class__ = ours
        except TypeError as error:  # a class with __slots__
            raise Refused(f"its class cannot be exchanged: {error}") from error
        sizes = count_bytes(getattr(ours, replacement.ATTRIBUTE), module, lengths, parent)
        return Row(name, stock.__name__, title, STRUCTURE, difference, sizes), ours
    except Refused as refused:
        return Row(name, stock.__name__, title, STRUCTURE, reason=str(refused)), None
    except Exception as error:  # a module of the user may raise anything
        return Row(name, stock.__name__, title, STRUCTURE, reason=f"{type(error).__name__}: {first_line(error)}"), None


T = TypeVar("T")
SECONDS = 2.0
"""How long nothing is shown."""
WIDTH = 30


def _progress(items: Sequence[T], label: str) -> Iterator[T]:
    """Yield items; from SECONDS on a bar shows how many are done, if the errors go to a terminal."""
    start, shown = time.monotonic(), False
    for number, each in enumerate(items, 1):
        yield each
        if sys.stderr.isatty() and time.monotonic() - start > SECONDS:
            shown, done = True, WIDTH * number // len(items)
            print(f"\r{label} [{'#' * done:{WIDTH}}] {number}/{len(items)}", end="", file=sys.stderr, flush=True)
    if shown:
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

    @with_names
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
    return enable_module, disable_module
