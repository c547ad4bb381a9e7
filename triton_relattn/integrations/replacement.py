"""Classes in place of stock classes: which calls of them ours computes, and how a model's modules get them and lose them."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from . import calls
from .calls import CALLS, Calls
from .compact import dense_of

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


class Sample(NamedTuple):
    """Arguments of a forward, to compare two with.

    name: for messages. given: by the stock forward's names. pairs: how many queries and keys there are. counts: positions of the
    output that are compared, as bool, with as many dimensions as the output; None: all.
    """

    name: str
    given: dict[str, Any]
    pairs: tuple[int, int]
    counts: torch.Tensor | None = None


class Replacement:
    """A forward in place of a stock class's, for the calls that it serves. All others are the stock forward's: with arguments
    that ours has not, what is traced or exported, and on a CPU so few scores that the stock forward is faster.

    stock: the class. constants: arguments that have no gradient, as masks.
    """

    stock: type[nn.Module]
    constants: Collection[str] = ()
    lacks_weights = False
    """Whether ours may return None where the stock forward returns attention weights."""
    fewest = 1 << 19
    """Scores of a call on a CPU from which on ours is no slower than the stock forward, which keeps all smaller calls. Measured
    with the packages of docs/enable.md, 1 and 8 sequences of 32 to 512 positions: below it was faster, by up to a factor of two.
    """

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Return the arguments of a call by the names that ours has for them; None if it has none for one of them."""
        raise NotImplementedError

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by the stock forward's names."""
        raise NotImplementedError

    def is_served(self, module: Any, given: dict[str, Any]) -> bool:
        """Return whether ours computes a call."""
        raise NotImplementedError

    def pairs(self, module: Any, given: dict[str, Any]) -> int:
        """Return the number of scores of a call."""
        raise NotImplementedError

    def is_on_gpu(self, given: dict[str, Any]) -> bool:
        """Return whether a call is not the CPU's."""
        return next((each.device.type != "cpu" for each in given.values() if isinstance(each, torch.Tensor)), False)

    def run(self, module: Any, given: dict[str, Any]) -> Any:
        """Compute what the stock forward returns."""
        raise NotImplementedError

    def samples(self, module: Any, is_light: bool = False) -> Iterator[Sample]:
        """Yield arguments for the comparison of a module, the smallest first. is_light: another one of its class was compared."""
        raise NotImplementedError

    def at_length(self, module: Any, length: int, parent: Any) -> dict[str, Any]:
        """Return arguments of the stock forward for one sequence, without values. parent: the module around this one."""
        raise NotImplementedError

    def prepare(self, module: Any) -> None:
        """Change a shadow for the comparison: what the module has kept of earlier calls."""

    def are_weights(self, module: Any, shape: torch.Size, pairs: tuple[int, int]) -> bool:
        """Return whether a tensor of this shape has a number for each pair of a query and a key."""
        return len(shape) >= 3 and tuple(shape[-2:]) == pairs

    def without_dropout(self, module: Any) -> None:
        """Switch dropout of a shadow off where it is neither torch's function nor its module."""

    def results(self, returned: Any) -> Any:
        """Return what is compared of what a forward returns."""
        return dense_of(returned)

    def counted(self, given: dict[str, Any]) -> torch.Tensor | None:
        """Return which positions of the output see a key, with as many dimensions as the output; None: all, or not known.

        given: by the stock forward's names.
        """
        raise NotImplementedError

    def forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a call by ours or by the stock forward."""
        if calls.is_graph():
            return self.by_stock(module, args, kwargs)
        given = self.given(args, kwargs)
        if torch.compiler.is_compiling():
            if given is not None and self.is_served(module, given):
                return self.run(module, given)
            return self.by_stock(module, args, kwargs)
        found = calls.calls_of(module)
        found.inside += 1
        try:
            if given is not None:
                pairs = self.pairs(module, given)
                if (pairs >= self.fewest or self.is_on_gpu(given)) and self.is_served(module, given):
                    if calls.agrees(self, module, args, kwargs, pairs):
                        return self.run(module, given)
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
        given = self.given((), kwargs)
        if given is None or not self.is_served(module, given):
            raise NotImplementedError("a call with these arguments is the stock forward's")
        return self.run(module, given)

    def restore(self, module: nn.Module) -> None:
        """Give a module its stock class back; also what passes small masks on to it, since those are for ours alone."""
        for each in getattr(vars(module).get(CALLS), "around", ()):
            if (encoder := each()) is not None:
                restore(encoder)
        vars(module).pop(CALLS, None)
        _to_stock(module, self.stock, ATTRIBUTE)


def set_attribute(stock: type[nn.Module], module: Any, name: str, value: Any) -> None:
    """Set an attribute of an enabled module as its stock class does, and have its next calls compared."""
    stock.__setattr__(module, name, value)
    if name != "training" and (found := vars(module).get(CALLS)) is not None:
        found.changed()


def in_place(module: nn.Module) -> Replacement | None:
    """Return what stands in place of a module's stock class; None if it is not enabled."""
    return getattr(type(module), ATTRIBUTE, None)


def argument_name(function: Any, name: str) -> str:
    """Return the name that function has for an argument of ours.

    Raises:
        TypeError: it has none that is known.
    """
    parameters = inspect.signature(function).parameters
    for each in NAMES[name]:
        if each in parameters:
            return each
    raise TypeError(f"{function.__qualname__} has no argument that is known to be {name}: none of {', '.join(NAMES[name])}")


class PassesOn:
    """Mixin, in place of the class that is the last base, of modules that only pass on masks or positions to attention."""

    passes_on = True
    stock_class: type[nn.Module]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        stock: Any = cls.__bases__[-1]
        if issubclass(stock, nn.Module) and not issubclass(stock, PassesOn):  # else it is derived from ours, as FSDP2 does
            cls.stock_class = stock

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
    if (of := getattr(type(module), ATTRIBUTE, None)) is not None:
        return of.stock  # type: ignore[no-any-return]
    return module.stock_class if isinstance(module, PassesOn) else None


class Source(NamedTuple):
    """A module of a library, by name, and the module here that has classes in place of some of its classes.

    Both are names, so that nothing is imported before a model is met that is made of it. The module here has ``CLASSES``: stock
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


class Met(NamedTuple):
    """A module of a library that has, or passes on to, relative attention.

    ours: the class for it; None: there is none, and reason says why.
    """

    title: str
    ours: type | None
    reason: str = ""


@dataclass(frozen=True)
class Library:
    """A library whose classes are replaced. package: as pip knows it. oldest: the first version that is served."""

    package: str
    sources: tuple[Source, ...]
    oldest: str = ""

    def met(self, modules: dict[str, nn.Module]) -> dict[str, Met]:
        """Return what of a model's modules is of this library's classes, by name."""
        found: dict[str, Met] = {}
        files = {base.__module__ for module in modules.values() for base in type(module).__mro__}
        for source in self.sources:
            if source.stock not in files:
                continue
            try:
                self._require()
                classes = source.classes()
            except (ImportError, AttributeError, TypeError, RuntimeError) as error:
                reason = f"{self.package} {installed_version(self.package)}: {error}"
                for name, module in modules.items():
                    if type(module).__module__ == source.stock and ATTENTION.search(type(module).__name__):
                        found[name] = Met(source.title, None, reason)
                continue
            for name, module in modules.items():
                ours = classes.get(type(module))
                if ours is not None and getattr(ours, "applies", lambda _: True)(module):
                    found[name] = Met(source.title, ours)
                elif stock_of(module) is None and (
                    base := next((each for each in type(module).__mro__ if each in classes), None)
                ):
                    if ours is None and ATTRIBUTE in vars(classes[base]):
                        reason = f"its class is derived from {base.__name__}, which is served, and what it changes is not known"
                        found[name] = Met(source.title, None, reason)
        return found

    def _require(self) -> None:
        """Raise RuntimeError if the installed version is too old."""
        version = installed_version(self.package)
        if self.oldest and _numbers(version) < _numbers(self.oldest):
            raise RuntimeError(f"it is too old: versions from {self.oldest} on are served")


ATTENTION = re.compile("Attention|MHA|Attend")


def installed_version(package: str) -> str:
    """Return the version of an installed package, "?" if it has none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "?"


def _numbers(version: str) -> list[int]:
    return [int(each) for each in re.findall(r"\d+", version)[:2]]


def change_classes(classes: dict[str, type], modules: dict[str, nn.Module], check_calls: bool) -> dict[str, Calls]:
    """Give modules their new classes: all of them, or none if one raises. Return what is known of their calls, nothing yet."""
    done: list[nn.Module] = []
    found: dict[str, Calls] = {}
    try:
        for name, ours in classes.items():
            module = modules[name]
            done.append(module)
            module.__class__ = ours
            if ATTRIBUTE in vars(ours):
                found[name] = vars(module)[CALLS] = Calls(check_calls)
            getattr(ours, "on_enable", _nothing)(module)
        for module in done:
            if getattr(module, "passes_on", False):
                surround(module, module.modules() if isinstance(module, PassesOn) else done)
    except BaseException:
        for module in done:
            restore(module)
        raise
    return found


def restore(module: nn.Module) -> type[nn.Module] | None:
    """Give an enabled module its stock class back, and return that; None if it was not enabled."""
    stock = stock_of(module)
    if (of := in_place(module)) is not None:
        of.restore(module)
    elif stock is not None:
        getattr(type(module), "on_disable", _nothing)(module)
        _to_stock(module, stock, "stock_class")
    return stock


def _to_stock(module: nn.Module, stock: type[nn.Module], mark: str) -> None:
    """Give a module its stock class. mark: the attribute by which our class is known."""
    own = type(module)
    if mark in vars(own):
        module.__class__ = stock
    else:  # torch.nn.utils.parametrize or FSDP2 has given it a class derived from ours
        own.__bases__ = tuple(stock if mark in vars(each) else each for each in own.__bases__)


def _nothing(_: Any) -> None:
    pass


def with_names(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Return function with other values for names of its module: for a model that calls what makes masks by a module's name.

    The code stays the library's own, and the library's module as it is.
    """
    changed = types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__, function.__closure__
    )
    changed.__kwdefaults__ = function.__kwdefaults__
    return changed
