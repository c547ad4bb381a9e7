"""Enabled modules: who computes their calls, and how modules get a class in place of their stock class, and lose it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from .._core.warn import first_line, warn, warn_once
from . import calls
from .calls import CALLS, Calls, Compared, Verdict
from .replacement import Ours, Replacement

ATTRIBUTE = "_triton_relattn"
"""What the class in place of a stock class has, and no other: a :class:`Replacement`."""
CHECKED, IMPLEMENTATION = "_triton_relattn_checked", "triton_relattn"
"""The attribute of a module that keeps its class, and gets ours by the attention implementation that its config names."""
FEWEST = "_triton_relattn_fewest"
"""The attribute of a shadow's modules: scores of a call on a CPU from which on ours computes it, instead of the usual number."""
MODES = "training", "_is_torch_compile"
"""Attributes that change nothing that is compared: a call's mode is part of its kind, and torch.compile sets the other."""
LIBRARY, STRUCTURE = "library", "structure"
"""How a module was found: by its class, or by its parameters, children and arguments."""


class Match(NamedTuple):
    """A stock module with relative attention; ours, an InPlace, PassesOn or Kind, may replace it, or a reason says why not."""

    title: str
    found_by: str
    ours: Any = None
    reason: str = ""

    @property
    def passes_on(self) -> bool:
        return isinstance(self.ours, type) and issubclass(self.ours, PassesOn)

    @property
    def packs_only(self) -> bool:
        return self.passes_on and self.ours.packs_only  # type: ignore[no-any-return]


def compute(replacement: Replacement, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a call by ours, if it serves the call and is not known to differ; else by the stock forward."""
    if calls.is_graph():
        return replacement.by_stock(module, args, kwargs)
    given, record = replacement.translate(args, kwargs), calls.record(module)
    if torch.compiler.is_compiling():  # a graph is not compared: calls before it have to be
        may_be_ours = given is not None and not has_hooks(module) and (not record.needs_comparison or record.is_compared)
        is_ours = may_be_ours and replacement.is_served(module, given)  # type: ignore[arg-type]
        return replacement.run(module, given) if is_ours else replacement.by_stock(module, args, kwargs)  # type: ignore[arg-type]
    stock = partial(replacement.by_stock, module, args, kwargs)
    record.running += 1
    try:
        if given is None:
            return stock()
        pairs = int(replacement.ours.pairs(module, **replacement.pairs_takes(given)))
        tensors = (value for value in given.values() if isinstance(value, torch.Tensor))
        fewest = vars(module).get(FEWEST, replacement.ours.fewest)
        is_large = pairs >= fewest or any(tensor.device.type != "cpu" for tensor in tensors)
        if not (is_large and replacement.is_served(module, given)):
            return stock()
        if has_hooks(module):
            verdict = Verdict("a part of it, or torch for all modules, has hooks")
        else:
            verdict = calls.judge(replacement, module, args, kwargs, pairs)
        if verdict.differs:
            restore(module)
            about = f"{replacement.stock.__qualname__} differs from the stock forward in this call"
            about += f" and uses its stock class again: {verdict.text}"
            warn(f"triton_relattn: {about}. Results of earlier calls like this one may also be wrong")
            return stock()
        if verdict.text:
            _say(replacement, verdict.text)
            return stock()
        ours = partial(replacement.run, module, given)
        if hasattr(given.get("cache"), "update"):  # ours may have appended keys, and the stock forward would do so again
            return ours()
        return ours_or_stock(ours, stock, partial(_say, replacement))
    finally:
        record.running -= 1


def ours_or_stock(ours: Callable[[], Any], stock: Callable[[], Any], say: Callable[[str], None]) -> Any:
    """Return what ours returns; where it raises, what the stock one does, whose own error counts if it raises as well."""
    try:
        return ours()
    except torch.OutOfMemoryError:  # the stock one needs more
        raise
    except Exception as error:
        text = f"ours raises {type(error).__name__}: {first_line(error)}"
    result = stock()
    say(text)
    return result


def _say(replacement: Replacement, reason: str) -> None:
    """Say once why calls are not computed by ours."""
    about = f"calls of {replacement.stock.__qualname__} like this one are computed by its stock forward, because {reason}"
    warn_once(about, f"triton_relattn: {about}", UserWarning)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a part of a module, or torch for all modules, has hooks: they may read or change what ours does not
    compute."""
    if _global_forward_hooks or _global_forward_pre_hooks:
        return True
    children = [child for child in module._modules.values() if child is not None]
    return any(child._forward_hooks or child._forward_pre_hooks or has_hooks(child) for child in children)


class PassesOn(Ours):
    """Mixin of classes in place of those of modules that only pass masks or positions on to attention."""

    passes_on = True
    packs_only = False
    """Whether the class is there to leave padding out, and for nothing else."""
    stock_class: type[nn.Module]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return an attribute of the stock class."""

    def on_enable(self) -> None:
        """Change the module when it gets this class."""

    def on_disable(self) -> None:
        """Undo that."""

    def __setstate__(self: Any, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        for module in self.modules():
            if getattr(module, "passes_on", False):
                link_encoder(module, self.modules())


def link_encoder(encoder: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Have attention among modules know what passes small masks on to it."""
    for module in modules:
        if (record := vars(module).get(CALLS)) is not None and not getattr(module, "passes_on", False):
            record.encoders.append(weakref.ref(encoder))


def _enabled_class(stock: Any, ours: Any, layout: Any) -> type[nn.Module]:
    """Return the class in place of a stock class: derived from it and from ours, and called as it is. layout: of a Kind."""

    def reduce(self: Any, protocol: Any) -> Any:
        """As the stock class's, so that copies and files have the stock class, and what it takes to make ours of it."""
        state = self.__getstate__() if hasattr(self, "__getstate__") else vars(self)
        return _new_instance, (stock, ours, layout), state

    attributes: dict[str, Any] = {name: getattr(stock, name) for name in ("__module__", "__qualname__", "__doc__")}
    if stock.__reduce_ex__ is object.__reduce_ex__ and stock.__reduce__ is object.__reduce__:
        attributes["__reduce_ex__"] = reduce
    if issubclass(ours, PassesOn):
        attributes["stock_class"] = stock
    else:
        replacement: Replacement = ours.replacement(stock, layout)

        @functools.wraps(stock.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return compute(replacement, self, args, kwargs)

        def set_attribute(self: Any, name: str, value: Any) -> None:
            """Set an attribute as the stock class does, and have the next calls compared."""
            stock.__setattr__(self, name, value)
            if name not in MODES and (record := vars(self).get(CALLS)) is not None:
                record.changed()

        attributes |= {ATTRIBUTE: replacement, "forward": forward, "__setattr__": set_attribute}
    metaclass: Any = type(stock)
    if layout is None:
        return metaclass(stock.__name__, (ours, stock), attributes)  # type: ignore[no-any-return]
    found: type[nn.Module] = metaclass(stock.__name__, (nn.Module,), attributes)
    found.__bases__ = (stock,)  # not from the start: a class of the user may keep a list of those derived from it
    return found


enabled_class: Callable[[Any, Any, Any], type[nn.Module]] = functools.cache(_enabled_class)


def _new_instance(stock: type[nn.Module], ours: Any, layout: Any) -> nn.Module:
    """Return a module without attributes, for a copy or a file; its first calls are compared."""
    found = enabled_class(stock, ours, layout)
    return found.__new__(found)


def is_switched(module: nn.Module) -> bool:
    """Return whether a module's config names our attention implementation."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None) == IMPLEMENTATION


def stock_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the stock class of an enabled module; None if it is not enabled."""
    if CHECKED in vars(module) and is_switched(module):
        return type(module)
    if (replacement := getattr(type(module), ATTRIBUTE, None)) is not None:
        return replacement.stock  # type: ignore[no-any-return]
    return module.stock_class if isinstance(module, PassesOn) else None


def change_classes(
    classes: dict[str, type], modules: dict[str, nn.Module], checks: Mapping[str, tuple[bool, bool]], compared: Compared
) -> None:
    """Give modules their new classes: all of them, or none if one raises. checks: whether their calls are compared, and whether
    they are known by their structure alone; compared: where calls are counted."""
    changed: list[nn.Module] = []
    try:
        for name, ours in classes.items():
            module = modules[name]
            changed.append(module)
            if keeps_class := getattr(ours, "keeps_class", False):
                ours.switch(module)  # type: ignore[attr-defined]
            else:
                module.__class__ = ours
            if keeps_class or ATTRIBUTE in vars(ours):
                vars(module)[CALLS] = Calls(*checks[name], name, compared)
            if isinstance(module, PassesOn):
                module.on_enable()
        for module in changed:
            if getattr(module, "passes_on", False):
                link_encoder(module, module.modules() if isinstance(module, PassesOn) else changed)
    except BaseException:
        for module in changed:
            restore(module)
        raise


def restore(module: Any) -> None:
    """Give an enabled module its stock class back; also what passes small masks on to it, since those are for ours alone."""
    if (checked := vars(module).pop(CHECKED, None)) is not None:
        vars(module).pop(CALLS, None)
        if is_switched(module):  # the first one of those that share a config changes it
            module.config._attn_implementation = checked.before
        return
    stock = stock_class(module)
    if stock is None:
        return
    if isinstance(module, PassesOn):
        module.on_disable()
    for reference in getattr(vars(module).pop(CALLS, None), "encoders", ()):
        if (encoder := reference()) is not None:
            restore(encoder)
    mark = "stock_class" if isinstance(module, PassesOn) else ATTRIBUTE  # of our class
    own = type(module)
    if mark in vars(own):
        module.__class__ = stock
    else:  # torch.nn.utils.parametrize or FSDP2 has given it a class derived from ours
        own.__bases__ = tuple(stock if mark in vars(base) else base for base in own.__bases__)
