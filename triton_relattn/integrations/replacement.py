"""Classes in place of stock classes: which calls ours computes, and how a model's modules get their new class and lose it."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
import types
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from . import calls
from .calls import CALLS, Calls
from .compact import Compact, dense_of, is_small
from .comparison import Sample

ATTRIBUTE = "_triton_relattn"
"""What the class in place of a stock class has, and no other: a :class:`Replacement`."""
NAMES = {"cache": ("cache", "past_key_values", "layer_past")}
"""The names that stock classes have for an argument of ours: versions of transformers differ, and so do its families."""

HARMLESS = {
    "position_ids": "a relative term knows positions by their difference, and a packed batch is in the mask that they make",
    "cache_position": "as position_ids: the name of older versions",
    "use_cache": "whether the model makes a cache; attention uses the one that it gets",
    "is_causal": "served, or the same as the module's own: another one is the stock forward's",
    "output_attentions": "if it is true the call is the stock forward's",
    "output_hidden_states": "for the model around attention",
    "output_router_logits": "for the model around attention",
    "return_dict": "for the model around attention",
    "num_items_in_batch": "for the loss",
}
"""Arguments that a stock forward takes in its ``**kwargs``, which no result of its attention depends on; and why so.

Not here: cu_seq_lens_q and the like, seq_idx, block_table (packed batches without a mask), head_mask, softcap, s_aux,
sliding_window.
"""


class Replacement:
    """Ours in place of a stock class's forward, for the calls that ours serves.

    All other calls are the stock forward's: those with an argument that ours does not know, what is traced or exported, and on a
    CPU so few scores that the stock forward is faster.

    stock: the class. ours: a class derived from InPlace, or a kind of structure/. What both have is called with the module first:
    serves, pairs, passed_on, prepare, ... forward: ours. names: our names for the stock forward's arguments. harmless: arguments
    that have no effect on the result. mask: the stock forward's name for the mask. constants: arguments without a gradient.
    """

    def __init__(
        self,
        stock: type[nn.Module],
        ours: Any,
        forward: Callable[..., Any],
        names: Mapping[str, str],
        *,
        harmless: Collection[str] = (),
        mask: str = "",
    ) -> None:
        parameters = list(inspect.signature(stock.forward).parameters.values())[1:]
        self.stock, self.ours, self.function, self.names = stock, ours, forward, dict(names)
        self.harmless, self.mask, self.constants = frozenset(harmless), mask, frozenset((mask, *ours.constants))
        self.positional = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        self.defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
        needed = {names[each.name] for each in parameters if each.name in names and each.name not in self.defaults}
        signature = inspect.signature(forward).parameters.values()
        self.required = needed | {each.name for each in signature if each.default is each.empty and each.name in names.values()}
        self.forward_takes, self.serves_takes, self.pairs_takes = (
            _parameters(each) for each in (forward, ours.serves, ours.pairs)
        )

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by the stock forward's names."""
        return {**dict(zip(self.positional, args, strict=False)), **kwargs}

    def translate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Return the arguments of a call by our names; None if ours does not know one of them, or lacks one."""
        if len(args) > len(self.positional):
            return None
        given: dict[str, Any] = {}
        harmless: dict[str, Any] = {}
        for name, value in self.bind(args, kwargs).items():
            if name in self.names:
                if value is not None or self.names[name] not in given:  # versions of a library have several names for one
                    given[self.names[name]] = value
            elif name in self.harmless:
                harmless[name] = value
            elif value is not self.defaults.get(name):
                return None
        return {**given, **harmless} if all(name in given for name in self.required) else None

    def is_served(self, module: Any, given: dict[str, Any]) -> bool:
        """Return whether ours computes a call."""
        if given.get("output_attentions") or (given.get("is_causal") and getattr(module, "is_causal", None) is False):
            return False
        for child in module._modules.values():  # hooks may change the attention weights, which ours does not compute
            if "Dropout" in type(child).__name__ and (child._forward_hooks or child._forward_pre_hooks):
                return False
        mask = given.get(self.names.get(self.mask, self.mask))
        if isinstance(mask, torch.Tensor) and mask.requires_grad:  # the operator gives a mask no gradient
            return False
        if any(isinstance(each, Compact) and each.is_written for each in given.values()):
            return False
        return all(is_small(given.get(name)) for name in self.ours.small) and bool(
            self.ours.serves(module, **_taken(given, self.serves_takes))
        )

    def run(self, module: Any, given: dict[str, Any]) -> Any:
        """Compute what the stock forward returns."""
        small = {name: each.small if isinstance(each, Compact) else each for name, each in given.items()}
        result = self.function(module, **_taken(small, self.forward_takes))
        if type(result) is tuple:  # what is passed on as it came knows its dense form
            passed = {id(small[name]): each for name, each in given.items() if isinstance(each, Compact) and not each.is_none}
            result = tuple(passed.get(id(each), each) for each in result)
        return self.ours.passed_on(module, result, given)

    def forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a call by ours or by the stock forward."""
        if calls.is_graph():
            return self.by_stock(module, args, kwargs)
        given = self.translate(args, kwargs)
        if torch.compiler.is_compiling():
            is_ours = given is not None and self.is_served(module, given)
            return self.run(module, given) if is_ours else self.by_stock(module, args, kwargs)  # type: ignore[arg-type]
        found = calls.calls_of(module)
        found.inside += 1
        try:
            if given is not None:
                pairs = int(self.ours.pairs(module, **_taken(given, self.pairs_takes)))
                is_large = pairs >= self.ours.fewest or any(
                    isinstance(each, torch.Tensor) and each.device.type != "cpu" for each in given.values()
                )
                if is_large and self.is_served(module, given):
                    if calls.agrees(self, module, args, kwargs, pairs):
                        return self.run(module, given)
                    restore(module)
                    warnings.warn(
                        f"triton_relattn: {self.stock.__qualname__} differs from the stock forward in this call and uses its "
                        f"stock class again: {found.differs}. Results of earlier calls like this one may also be wrong",
                        stacklevel=3,
                    )
            return self.by_stock(module, args, kwargs)
        finally:
            found.inside -= 1

    def by_stock(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a call by the stock forward."""
        return self.stock.forward(module, *map(dense_of, args), **{name: dense_of(each) for name, each in kwargs.items()})

    def by_ours(self, module: Any, kwargs: dict[str, Any]) -> Any:
        """Compute a call by ours, to compare it.

        Raises:
            NotImplementedError: it is not one that ours serves.
        """
        given = self.translate((), kwargs)
        if given is None or not self.is_served(module, given):
            raise NotImplementedError("a call with these arguments is the stock forward's")
        return self.run(module, given)

    def prepare(self, module: Any) -> None:
        """Change a shadow for the comparison: what the module has kept of earlier calls, and dropout that is its own."""
        if isinstance(self.ours, type):
            module.__class__ = self.ours
        self.ours.prepare(module)
        self.ours.without_dropout(module)

    def samples(self, module: Any, is_light: bool) -> Iterator[Sample]:
        """Yield arguments for the comparison of a module, the smallest first. is_light: a similar module was compared."""
        return self.ours.samples(module, is_light)  # type: ignore[no-any-return]

    def results(self, returned: Any) -> Any:
        """Return what is compared of what a forward returns."""
        return self.ours.results(dense_of(returned))

    def counted(self, arguments: dict[str, Any]) -> torch.Tensor | None:
        """Return which positions of the output see a key, with as many dimensions as the output; None: all, or not known."""
        mask = dense_of(arguments.get(self.mask))
        if not isinstance(mask, torch.Tensor) or mask.numel() == 0 or (found := self.ours.counted(mask)) is None:
            return None
        return found[:, : self.ours.positions_of(arguments)]  # type: ignore[no-any-return]  # blocks may be longer


def _parameters(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the names of a function's parameters; None if it takes any."""
    parameters = inspect.signature(function).parameters
    return None if any(each.kind is each.VAR_KEYWORD for each in parameters.values()) else frozenset(parameters)


def _taken(given: dict[str, Any], names: frozenset[str] | None) -> dict[str, Any]:
    """Return those of the arguments of a call that a function has; names: of its parameters, None: it takes any."""
    return given if names is None else {name: each for name, each in given.items() if name in names}


def set_attribute(stock: type[nn.Module], module: Any, name: str, value: Any) -> None:
    """Set an attribute of an enabled module as its stock class does, and have its next calls compared."""
    stock.__setattr__(module, name, value)
    if name != "training" and (found := vars(module).get(CALLS)) is not None:
        found.changed()


def argument_name(function: Any, name: str) -> str:
    """Return the name that function has for an argument of ours.

    Raises:
        TypeError: it has none of the names in NAMES.
    """
    parameters = inspect.signature(function).parameters
    for each in NAMES[name]:
        if each in parameters:
            return each
    raise TypeError(f"{function.__qualname__} has no argument for {name}: none of {', '.join(NAMES[name])}")


class PassesOn:
    """Mixin, in place of the class that is the last base, of modules that only pass on masks or positions to attention."""

    passes_on = True
    stock_class: type[nn.Module]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        stock: Any = cls.__bases__[-1]
        if issubclass(stock, nn.Module) and not issubclass(stock, PassesOn):  # else it is derived from ours, as FSDP2 does
            cls.stock_class = stock

    def on_enable(self) -> None:
        """Change the module when it gets this class."""

    def on_disable(self) -> None:
        """Undo that."""

    def __setstate__(self: Any, state: Any) -> None:
        """Of a copy, and of what was loaded."""
        super().__setstate__(state)  # type: ignore[misc]
        for each in self.modules():
            if getattr(each, "passes_on", False):
                surround(each, self.modules())


def surround(passing: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Have attention among modules know what passes small masks on to it."""
    for each in modules:
        if (found := vars(each).get(CALLS)) is not None and not getattr(each, "passes_on", False):
            found.around.append(weakref.ref(passing))


def stock_of(module: nn.Module) -> type[nn.Module] | None:
    """Return the stock class of an enabled module; None if it is not enabled."""
    if (replacement := getattr(type(module), ATTRIBUTE, None)) is not None:
        return replacement.stock  # type: ignore[no-any-return]
    return module.stock_class if isinstance(module, PassesOn) else None


class Source(NamedTuple):
    """A module of a library, by name, and the module here that has classes in place of some of its classes.

    Both are names, so that nothing is imported before a model needs it. The module here has ``CLASSES``: stock
    classes, and for each the one in its place, derived from it; or a function ``classes`` that makes them for the name of the
    library's module. title: of the family, for reports.
    """

    stock: str
    ours: str
    title: str

    def classes(self) -> dict[type, type]:
        """Return the stock classes, each with the one in its place. This imports both modules."""
        module = importlib.import_module(self.ours)
        found: dict[type, type] = module.classes(self.stock) if hasattr(module, "classes") else module.CLASSES
        return found


class Match(NamedTuple):
    """A module of a library that has, or passes on to, relative attention. ours: the class for it; None: reason says why not."""

    title: str
    ours: type | None
    reason: str = ""


@dataclass(frozen=True)
class Library:
    """A library whose classes are replaced. package: as pip knows it. oldest: the first version that is served."""

    package: str
    sources: tuple[Source, ...]
    oldest: str = ""

    def matches(self, modules: dict[str, nn.Module]) -> dict[str, Match]:
        """Return what of a model's modules is of this library's classes, by name."""
        found: dict[str, Match] = {}
        files = {base.__module__ for module in modules.values() for base in type(module).__mro__}
        for source in self.sources:
            if source.stock not in files:
                continue
            try:
                if _numbers(installed_version(self.package)) < _numbers(self.oldest):
                    raise RuntimeError(f"it is too old: versions from {self.oldest} on are served")
                classes = source.classes()
            except (ImportError, AttributeError, TypeError, RuntimeError) as error:
                reason = f"{self.package} {installed_version(self.package)}: {error}"
                for name, module in modules.items():
                    if type(module).__module__ == source.stock and re.search("Attention|MHA|Attend", type(module).__name__):
                        found[name] = Match(source.title, None, reason)
                continue
            for name, module in modules.items():
                ours = classes.get(type(module))
                if ours is not None and getattr(ours, "applies", lambda _: True)(module):
                    found[name] = Match(source.title, ours)
                elif ours is None and stock_of(module) is None:
                    base = next((each for each in type(module).__mro__ if each in classes), None)
                    if base is not None and ATTRIBUTE in vars(classes[base]):
                        reason = f"its class is derived from {base.__name__}, which is served, and what it changes is not known"
                        found[name] = Match(source.title, None, reason)
        return found


def installed_version(package: str) -> str:
    """Return the version of an installed package, "?" if it has none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "?"


def _numbers(version: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", version)[:2]]


def change_classes(classes: dict[str, type], modules: dict[str, nn.Module], check_calls: bool) -> dict[str, Calls]:
    """Give modules their new classes: all of them, or none if one raises. Return the records of their calls."""
    changed: list[nn.Module] = []
    records: dict[str, Calls] = {}
    try:
        for name, ours in classes.items():
            module = modules[name]
            changed.append(module)
            module.__class__ = ours
            if ATTRIBUTE in vars(ours):
                records[name] = vars(module)[CALLS] = Calls(check_calls)
            if isinstance(module, PassesOn):
                module.on_enable()
        for module in changed:
            if getattr(module, "passes_on", False):
                surround(module, module.modules() if isinstance(module, PassesOn) else changed)
    except BaseException:
        for module in changed:
            restore(module)
        raise
    return records


def restore(module: nn.Module) -> None:
    """Give an enabled module its stock class back; also what passes small masks on to it, since those are for ours alone."""
    stock = stock_of(module)
    if stock is None:
        return
    if isinstance(module, PassesOn):
        module.on_disable()
    for reference in getattr(vars(module).pop(CALLS, None), "around", ()):
        if (encoder := reference()) is not None:
            restore(encoder)
    mark = "stock_class" if isinstance(module, PassesOn) else ATTRIBUTE  # of our class
    own = type(module)
    if mark in vars(own):
        module.__class__ = stock
    else:  # torch.nn.utils.parametrize or FSDP2 has given it a class derived from ours
        own.__bases__ = tuple(stock if mark in vars(base) else base for base in own.__bases__)


def with_names(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Return function with other values for names of its module: for a model that calls what makes masks by a module's name.

    The code stays the library's own, and the library's module as it is.
    """
    changed = types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__, function.__closure__
    )
    changed.__kwdefaults__ = function.__kwdefaults__
    return changed
