"""Enable and disable for any model. A module that has relative attention takes this way:

enable                                  all modules of the model; who knows them?
Library.find (libraries.py)             by its class, or
structure.find (structure/__init__.py)  by its parameters, children and arguments: a Match, with ours in its place
compare (comparison.py)                 the stock forward and ours, on a shadow of the module with random weights (shadow.py)
enabled_class (enabled.py)              a class derived from the stock one, which change_classes gives the module
Report (report.py)                      what was replaced, and what was left and why

A call of it then takes this one:

compute (enabled.py)                    ours or the stock forward?
translate, is_served (replacement.py)   our names for the arguments; whether ours computes such calls
judge (calls.py)                        in some calls both run, and are compared
run (replacement.py)                    the forward of ours: an InPlace (in_place.py) or a Kind (structure/kind.py)

Classes that keep theirs get ours by the attention implementation that their config names (transformers/door.py).
"""

from __future__ import annotations

import dataclasses
import importlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .._core.names import with_names
from .._core.warn import first_line, warn
from . import structure
from .comparison import Refused, compare
from .enabled import LIBRARY, STRUCTURE, Match, PassesOn, change_classes, enabled_class, restore, stock_class
from .libraries import Library
from .packing import NOT_PACKED, Packs, pack
from .replacement import Replacement
from .report import Report, Row, count_bytes

LIBRARIES = {
    "transformers": ("transformers",),
    "nemo": ("nemo",),
    "espnet": ("espnet", "espnet2", "cosyvoice"),
    "speechbrain": ("speechbrain",),
    "x_transformers": ("x_transformers",),
}
"""By our file or folder of a library, the packages of its classes."""
PASSES_ON = "passes masks and positions"
BY_STRUCTURE = (
    "it is known by its structure alone. by_structure=True serves it, after a comparison: say so if its class computes what it "
    "looks like"
)


@with_names
def enable(
    model: Any,
    *,
    by_structure: bool = False,
    packed: bool = False,
    check_calls: bool | None = None,
    lengths: int | Sequence[int] = 4096,
) -> Report:
    """Let the relative attention in a torch model run on the operator, where that computes the same. The model is changed in
    place.

    **Classes of libraries** are served by their names, in models of transformers, NeMo, ESPnet, CosyVoice, SpeechBrain and
    x-transformers. Versions differ, so each module is compared once, here: its forward and ours, with the module's settings and
    random weights, in float64 on the CPU; outputs and all gradients agree to 2**-30 of the largest number (1e-9).

    **Any other module** is known by its structure alone: the names and shapes of its parameters and children, and the arguments
    of its forward. Such modules are listed, and served if ``by_structure`` is true: with it you say that their classes compute
    what they look like. They are compared here, and in your calls: the first of each kind, the second, the fourth, and so on.
    No comparison notices state that changes the formula later, attention weights that a forward keeps for others, a rule for
    training or gradients alone in a call, or one that begins at a length that was not tried. These kinds are known:

    - vectors for keys and values in a window, with a proximal bias (VITS: RVC, GPT-SoVITS, so-vits-svc, piper, coqui, ...);
    - Transformer-XL's terms with projected positions (ESPnet's Conformer: FunASR, chatterbox, copies in recipes);
    - the same with features of the distance (Enformer, Borzoi);
    - decomposed positions on a grid (SAM, ViTDet: segment-anything, cellpose, timm, mmdet, detectron2);
    - an embedding of clipped distances (Shaw et al.: lucidrains' conformer);
    - a row per distance to the past (Music Transformer);
    - a bias by bucket, times a gate, that the first layer makes (WavLM: torchaudio, BEATs, copies in programs for voices).

    What disagrees stays as it is; if a call does, the module is the stock class's again, and a warning says so. docs/enable.md
    says what is compared, and what differs from the stock model: random streams of dropout, attention weights, rows of padding.
    Calls with arguments that were not compared, or while a part of the module has hooks, are the stock class's.

    Args:
        model: a module, or any object that holds some, as a pipeline does: those among its attributes and ``components``.
        by_structure: whether modules of unknown classes are served.
        packed: whether encoders of sentences (T5, DeBERTa, MPNet) run on the real tokens of a batch alone, where at most nine
            tenths are real: padded tensors in and out, (1, total, C) in between. Each is compared with itself, padded.
        check_calls: which modules' calls are compared. None: those that are known by their structure alone; True: all; False:
            none.
        lengths: for which the report counts memory, in positions.

    Returns:
        A dict of the replaced modules: their names and those of their classes; empty if all were replaced before. It prints as
        a table with what each one computes, the difference that was found and the memory of a layer. ``rows`` has the same as
        numbers, ``left`` the modules that were recognised and not replaced, with the reason; if there are any, a warning says so.

    Parameters, ``state_dict``, hooks and ``isinstance`` stay: a module gets a class derived from its own, or keeps it where its
    config names the attention implementation ("triton_relattn"; T5's family and others of transformers). Pickles and copies of
    an enabled model are enabled.

    Raises:
        ValueError: nothing in model has relative attention of these kinds.
        RuntimeError: all modules that have it were refused, or are known by their structure alone; the message has the reasons.
        TypeError: model is no module and holds none; lengths that are not integers.

    Example:
        >>> from transformers import VitsConfig, VitsModel
        >>> model = VitsModel(VitsConfig(num_hidden_layers=1, hidden_size=32, flow_size=32, num_attention_heads=2))
        >>> dict(enable(model))
        {'text_encoder.encoder': 'VitsEncoder', 'text_encoder.encoder.layers.0.attention': 'VitsAttention'}
    """
    checked = _checked(lengths)
    modules = _modules(model)
    stock = {path: module for path, module in modules.items() if stock_class(module) is None}
    enabled_before = len(stock) < len(modules)
    matches = _find(stock, by_structure, packed)
    rows, classes = _compare(matches, modules, checked)  # all of it before any class is changed
    if not rows and not enabled_before:
        raise ValueError(
            f"{type(model).__name__} has no relative attention that triton_relattn knows: neither a class of "
            f"{', '.join(LIBRARIES)} nor a module of the kinds that help(triton_relattn.enable) lists"
        )
    report = Report(rows, checked)
    if report.left and not report and not enabled_before:
        raise RuntimeError(f"no module of {type(model).__name__} was enabled; the model is unchanged. {report}")
    if report.left:
        count = f"{len(report.left)} of {len(rows)} modules with relative attention"
        warn(f"enable left {count} unchanged; print its report for all reasons. {report.reasons()[0]}")
    unknown = {path: matches[path].found_by == STRUCTURE for path in classes}
    checks = {path: (is_unknown if check_calls is None else check_calls, is_unknown) for path, is_unknown in unknown.items()}
    change_classes(classes, modules, checks, report.calls())
    if packed:
        try:
            _pack(modules, report)
        except BaseException:
            for path in classes:
                restore(modules[path])
            raise
    return report


def _pack(modules: dict[str, nn.Module], report: Report) -> None:
    """Let the encoders among modules leave padding out, those for which that changes nothing."""
    for path, module in modules.items():
        name = type(module).__name__
        if isinstance(module, Packs):
            try:
                report.packed[path] = pack(module)
            except Exception as error:  # a module of the user may raise anything
                report.packed[path] = first_line(error)
                if module.packs_only:
                    restore(module)
        elif name in NOT_PACKED and not getattr(module, "is_decoder", False):
            report.packed[path] = NOT_PACKED[name]
    if not report.packs:
        reasons = [str(reason) for reason in report.packed.values()]
        reason = (reasons or ["it has no encoder of a class that is known to compute the same without padding"])[0]
        warn(f"enable(packed=True) packs nothing: {reason}")


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
    enabled = {path: (module, stock) for path, module in _modules(model).items() if (stock := stock_class(module))}
    for module, _ in enabled.values():
        restore(module)
    return {path: stock.__name__ for path, (_, stock) in enabled.items()}


def _modules(model: Any) -> dict[str, nn.Module]:
    """Return all modules of a model, or of those that an object holds, by their paths."""
    if isinstance(model, nn.Module):
        return dict(model.named_modules())
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
    found: dict[int, tuple[str, nn.Module]] = {}  # an object may hold a module by several names
    for name, value in attributes.items():
        if isinstance(value, nn.Module):
            for path, module in value.named_modules():
                found.setdefault(id(module), (f"{name}.{path}".strip("."), module))
    if not found:
        raise TypeError(f"enable expects a torch.nn.Module, or an object that holds some, got {type(model).__name__}")
    return dict(found.values())


def _find(modules: dict[str, nn.Module], by_structure: bool, packed: bool) -> dict[str, Match]:
    """Return what has relative attention; no library is imported that no module is of."""
    packages = {base.__module__.partition(".")[0] for module in modules.values() for base in type(module).__mro__}
    by_class: dict[str, Match | None] = {}
    for name, of_library in LIBRARIES.items():
        if packages.intersection(of_library):
            library: Library = importlib.import_module(f".{name}", __package__).LIBRARY
            by_class |= library.find(modules)
    found = {path: by_class[path] if path in by_class else structure.find(module) for path, module in modules.items()}
    matches = {path: match for path, match in found.items() if match is not None and (packed or not match.packs_only)}
    for path, match in matches.items():
        if match.found_by == STRUCTURE and match.ours is not None and not by_structure:
            matches[path] = match._replace(ours=None, reason=BY_STRUCTURE)
    return matches


def _compare(
    matches: dict[str, Match], modules: dict[str, nn.Module], lengths: tuple[int, ...]
) -> tuple[list[Row], dict[str, type]]:
    """Return rows for the report, and the classes in place of those of modules that ours computes as they do."""
    rows: dict[str, Row] = {}
    classes: dict[str, type] = {}
    similar: dict[Any, Replacement] = {}  # what replaced the last module of a class: the next one's first candidate
    for path, match in matches.items():
        if match.passes_on:
            continue
        module, stock = modules[path], type(modules[path])
        row, key = Row(path, stock.__name__, match.title, match.found_by), (match.ours, stock)
        try:
            if "forward" in vars(module):
                raise Refused("its forward was replaced (by a hook?); call enable first")
            if any(hasattr(weight, "device_mesh") for weight in module.parameters(recurse=False)):
                raise Refused("it is sharded; call enable first")
            if match.ours is None:
                raise Refused(match.reason)
            replacement, difference = compare(module, match.ours, similar.get(key))
            new = match.ours
            if not new.keeps_class:
                new = enabled_class(stock, match.ours, getattr(replacement.ours, "layout", None))
                try:
                    object.__new__(stock).__class__ = new
                except TypeError as error:  # a class with __slots__
                    raise Refused(f"its class cannot be exchanged: {error}") from error
        except Exception as error:  # a module of the user may raise anything
            reason = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {first_line(error)}"
            rows[path] = dataclasses.replace(row, reason=reason)
            continue
        classes[path], similar[key] = new, replacement
        memory = count_bytes(replacement, module, lengths, modules.get(path.rpartition(".")[0]))
        rows[path] = dataclasses.replace(row, error=difference, memory=memory)
    # What passes small masks and positions on is replaced where all attention inside it is: they are for ours alone.
    enabled = {path for path, module in modules.items() if path not in matches and stock_class(module) is not None}
    served = tuple({type(modules[path]) for path in classes if matches[path].found_by == LIBRARY})
    served += tuple({type(modules[path]) for path in enabled if not isinstance(modules[path], PassesOn)})
    for path, match in matches.items():
        if match.passes_on:
            inside = [part for part in modules if not path or part == path or part.startswith(f"{path}.")]
            attention = [part in classes or part in enabled for part in inside if isinstance(modules[part], served)]
            if attention and all(attention):
                classes[path] = enabled_class(type(modules[path]), match.ours, None)
                rows[path] = Row(path, type(modules[path]).__name__, PASSES_ON, LIBRARY)
    return [rows[path] for path in modules if path in rows], classes
