"""One door to all integrations: :func:`enable` and :func:`disable` for any model."""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from . import replacement, structure
from .calls import CALLS, Calls
from .comparison import Refused, compared, first_line
from .progress import progress
from .report import LIBRARY, STRUCTURE, Report, Row
from .structure import memory
from .structure.kind import ATTRIBUTE, Reading, kind_in

LIBRARIES = ("transformers", "nemo", "espnet", "speechbrain", "fairseq2", "x_transformers")


def enable(model: Any, *, lengths: int | Sequence[int] = 4096, check_calls: bool = True) -> Report:
    """Let the relative attention in any torch model run on the operator, where that computes the same. The model is changed
    in place.

    It is found in two ways. By its class, in models of transformers, NeMo, ESPnet, CosyVoice, SpeechBrain, fairseq2 and
    x-transformers. By its structure, in any other module: the names and shapes of its parameters and children, and the
    arguments of its forward; these kinds are known:

    - vectors for keys and values in a window, with a proximal bias (VITS: RVC, GPT-SoVITS, so-vits-svc, piper, coqui, ...);
    - Transformer-XL's terms with projected positions (ESPnet's Conformer: FunASR, chatterbox, copies in recipes);
    - the same with features of the distance (Enformer, Borzoi);
    - decomposed positions on a grid (SAM, ViTDet: segment-anything, cellpose, timm, mmdet, detectron2);
    - an embedding of clipped distances (Shaw et al.: lucidrains' conformer);
    - a row for each distance to the past (Music Transformer);
    - a bias by bucket that a layer makes of its own embedding (T5).

    Before a module is replaced for its structure, its forward and ours run side by side, with the module's settings and random
    weights, in float64 on the CPU: outputs and the gradients of inputs and parameters, at several lengths, with and without
    masks, agree to 2**-30 of the largest number (1e-9); in training mode both drop weights with the same probability. It takes a
    fraction of a second for the first module of a class, a tenth of that for each other one. What disagrees stays as it is.

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
    an enabled model are enabled; of modules found by their structure the first calls are compared again.

    What differs from the stock model: dropout drops other weights, as many; attention weights that a module keeps for pictures
    (``attn``) are None; rows of queries that no key is shown to are zero, which are rows of padding. For libraries the ``enable``
    of each (``triton_relattn.integrations.transformers``, ...) has its own list. A call with arguments that were not compared
    (another kind of cache, cross attention) is the stock class's.

    Raises:
        ValueError: nothing in model has relative attention of these kinds.
        RuntimeError: all modules that have it were refused; the message has the reasons.
        TypeError: model is no module and holds none.

    Example:
        >>> from transformers import VitsConfig, VitsModel
        >>> model = VitsModel(VitsConfig(num_hidden_layers=1, hidden_size=32, flow_size=32, num_attention_heads=2))
        >>> dict(enable(model))
        {'text_encoder.encoder': 'VitsEncoder', 'text_encoder.encoder.layers.0.attention': 'VitsAttention'}
    """
    lengths = (lengths,) if isinstance(lengths, int) else tuple(lengths)
    rows: list[Row] = []
    modules: dict[str, nn.Module] = {}
    enabled_before = False
    for prefix, root in _roots(model):
        found, before = _enable(root, lengths, check_calls)
        enabled_before |= before
        for row in found:
            name = f"{prefix}.{row.name}".strip(".")
            rows.append(dataclasses.replace(row, name=name))
            modules[name] = root.get_submodule(row.name)
    if not rows and not enabled_before:
        raise ValueError(
            f"{type(model).__name__} has no relative attention that triton_relattn knows: neither a class of "
            f"{', '.join(LIBRARIES)} nor a module of the kinds that help(triton_relattn.enable) lists"
        )
    report = Report(rows, lengths, modules)
    if report.left and not report and not enabled_before:
        raise RuntimeError(f"no module of {type(model).__name__} was enabled, and it is as it was. {report}")
    if report.left:
        count = f"{len(report.left)} of {len(rows)} modules with relative attention"
        warnings.warn(
            f"enable left {count} as they were; print what it returns for all reasons. {report.reasons()[0]}", stacklevel=2
        )
    return report


def disable(model: Any) -> dict[str, str]:
    """Undo :func:`enable` in a model, or in the modules that an object holds.

    Returns:
        The names of the modules that are stock again, and of their classes; empty if none was enabled.

    Raises:
        TypeError: model is no module and holds none.
    """
    restored: dict[str, str] = {}
    for prefix, root in _roots(model):
        found: dict[str, str] = {}
        for library in _libraries(root):
            found |= replacement.disable(root, library)
        for name, each in root.named_modules():
            vars(each).pop(CALLS, None)
            if (kind := kind_in(each)) is not None:
                kind.restore(each)
                found[name] = kind.stock.__name__
        restored |= {f"{prefix}.{name}".strip("."): each for name, each in found.items()}
    return restored


def _roots(model: Any) -> list[tuple[str, nn.Module]]:
    """The modules that an object is or holds, with the names of the attributes that hold them."""
    if isinstance(model, nn.Module):
        return [("", model)]
    if isinstance(model, str):
        raise TypeError(f"enable wants a model, got the string {model[:60]!r}: load it first, and pass the module")
    if isinstance(model, type):
        raise TypeError(f"enable wants a model, got the class {model.__name__}: make one, and pass that")
    if isinstance(model, Mapping) and model and all(isinstance(each, torch.Tensor) for each in model.values()):
        raise TypeError("enable wants a model, got a state_dict: load it into the module that it is of, and pass that module")
    held = model if isinstance(model, Mapping) else {**getattr(model, "__dict__", {}), **_components(model)}
    found = {str(name): each for name, each in held.items() if isinstance(each, nn.Module)}
    if not found:
        raise TypeError(f"enable wants a torch.nn.Module, or an object that holds some, got {type(model).__name__}")
    return list(found.items())


def _components(model: Any) -> dict[str, Any]:
    """The parts of a pipeline of diffusers."""
    parts = getattr(model, "components", None)
    return parts if isinstance(parts, dict) else {}


def _libraries(root: nn.Module) -> Iterator[replacement.Library]:
    """The libraries whose classes occur in a model."""
    packages = {base.__module__.partition(".")[0] for each in root.modules() for base in type(each).__mro__}
    for name in LIBRARIES:
        library: replacement.Library = importlib.import_module(f".{name}", __package__).LIBRARY
        if packages & {each.stock.partition(".")[0] for each in library.sources}:
            yield library


def _enable(root: nn.Module, lengths: tuple[int, ...], check_calls: bool) -> tuple[list[Row], bool]:
    """Enable a module and all inside; return the rows, and whether some were enabled before."""
    rows: list[Row] = []
    before = any(kind_in(each) is not None for each in root.modules())
    modules = dict(root.named_modules())
    done: set[str] = set()
    for library in _libraries(root):
        try:
            stock = replacement.classes_in(root, library)
        except RuntimeError as error:
            files = {each.stock for each in library.sources}
            rows += _left({name: each for name, each in modules.items() if type(each).__module__ in files}, error)
            continue
        ours = {name for name, each in modules.items() if type(each) in stock.values()}
        meant = {name for name, each in modules.items() if replacement.is_replaced(each, stock)}
        before |= bool(ours)
        done |= ours | meant
        if not meant:
            continue
        try:
            replaced = replacement.enable(root, library)
        except (RuntimeError, ValueError) as error:
            rows += _left({name: modules[name] for name in sorted(meant)}, error)
            continue
        for name, stock_name in replaced.items():
            source = replacement.source_of(library, modules[name])
            rows.append(Row(name, stock_name, source.title, LIBRARY, None, _at_least(source, name, modules[name], lengths)))
    readings: dict[Any, Reading] = {}
    chosen: list[tuple[nn.Module, type[nn.Module]]] = []
    others = [name for name, module in modules.items() if name not in done and kind_in(module) is None]
    for name in progress(others, "comparing modules with their stock forward"):
        found = _by_structure(name, modules[name], modules.get(name.rpartition(".")[0]), lengths, readings)
        if found is not None:
            rows.append(found[0])
            chosen += [(modules[name], found[1])] if found[1] is not None else []
    for module, own in chosen:
        module.__class__ = own
        vars(module)[CALLS] = Calls(check_calls)
    return rows, before


def _at_least(source: replacement.Source, name: str, module: nn.Module, lengths: tuple[int, ...]) -> tuple[tuple[int, None], ...]:
    """The bytes of one tensor that the stock attention of a library makes, float32; nothing if that is not known of the
    module.
    """
    if not any(word in type(module).__name__ for word in ("Attention", "MHA")) or "EncDec" in name:
        return ()
    places = ((module, each) for each in ("num_heads", "num_attention_heads", "n_heads", "h", "heads"))
    found = (getattr(*each, None) for each in (*places, (getattr(module, "config", None), "num_attention_heads")))
    heads = next((each for each in found if isinstance(each, int)), 0)
    return tuple((4 * heads * source.columns * length**2, None) for length in lengths) if heads and source.columns else ()


def _left(modules: dict[str, nn.Module], reason: Exception) -> list[Row]:
    """The rows of a library's modules that are not replaced."""
    return [Row(name, type(each).__name__, "of a library", LIBRARY, reason=str(reason)) for name, each in modules.items()]


def _by_structure(
    name: str, module: nn.Module, parent: nn.Module | None, lengths: tuple[int, ...], found: dict[Any, Reading]
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
        if "forward" in vars(module):
            raise Refused("it has a forward of its own, as hooks leave it: call enable before that")
        if any(hasattr(each, "device_mesh") for each in module.parameters(recurse=False)):
            raise Refused("it is sharded: call enable before that")
        reading, difference = compared(kind, module, found.get((kind, stock)))
        found[kind, stock] = reading
        ours = structure.made(kind, stock, reading)  # type: ignore[arg-type]
        try:
            object.__new__(stock).__class__ = ours
        except TypeError as error:  # a class with __slots__
            raise Refused(f"its class cannot be exchanged: {error}") from error
        of = getattr(ours, ATTRIBUTE)
        sizes = [tuple(memory.of_forward(of, module, each, parent, by_ours) for by_ours in (False, True)) for each in lengths]
        return Row(name, stock.__name__, title, STRUCTURE, difference, tuple(sizes)), ours  # type: ignore[arg-type]
    except Refused as refused:
        return Row(name, stock.__name__, title, STRUCTURE, reason=str(refused)), None
    except Exception as error:  # a module of the user may raise anything
        return Row(name, stock.__name__, title, STRUCTURE, reason=f"{type(error).__name__}: {first_line(error)}"), None
