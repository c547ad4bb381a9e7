"""The classes of libraries that are replaced, as data: the stock class, the class in its place, and the oldest version served.

Where a stock class stays but for a function that it calls, the data is that function (:class:`WithFunctions`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from torch import nn

from .calls import is_graph
from .enabled import LIBRARY, Match, PassesOn
from .replacement import Ours

NAMES = {"cache": ("cache", "past_key_values", "layer_past")}
"""The names that stock classes have for an argument of ours: versions of transformers differ, and so do its families."""


class Source(NamedTuple):
    """A module of a library, the title of its family in reports, and its classes that are replaced.

    classes: by the name of a stock class ours, as ``module.Class`` in the library's folder here, so that nothing is imported
    before a model needs it; or the class itself.
    """

    module: str
    title: str
    classes: Mapping[str, str | type]

    def load(self, folder: str) -> dict[type, type[Ours]]:
        """Import the stock classes and ours; folder: the library's package here."""
        stock = importlib.import_module(self.module)
        loaded: dict[type, Any] = {}
        for name, ours in self.classes.items():
            if isinstance(ours, str):
                module, _, class_name = ours.rpartition(".")
                ours = getattr(importlib.import_module(f"{folder}.{module}"), class_name)
            loaded[getattr(stock, name)] = ours
        return loaded


class Library(NamedTuple):
    """A library whose classes are replaced: its name for pip, its module here, its sources, and the oldest version served."""

    package: str
    folder: str
    sources: tuple[Source, ...]
    oldest: str = ""

    def find(self, modules: dict[str, nn.Module]) -> dict[str, Match | None]:
        """Return which of the stock modules of a model are of this library's classes, by name; None: without a term of ours."""
        found: dict[str, Match | None] = {}
        files = {base.__module__ for module in modules.values() for base in type(module).__mro__}
        for source in self.sources:
            if source.module not in files:
                continue
            version = installed_version(self.package)
            try:
                if _numbers(version) < _numbers(self.oldest):
                    raise RuntimeError(f"it is too old: versions from {self.oldest} on are served")
                classes = source.load(self.folder)
            except (ImportError, AttributeError, TypeError, RuntimeError) as error:
                for name, module in modules.items():
                    if type(module).__module__ == source.module and re.search("Attention|MHA|Attend", type(module).__name__):
                        found[name] = Match(source.title, LIBRARY, reason=f"{self.package} {version}: {error}")
                continue
            for name, module in modules.items():
                base = next((base for base in type(module).__mro__ if base in classes), None)
                if base is None:
                    continue
                ours = classes[base]
                if base is type(module):
                    reason = ours.why_not(module)
                    match = Match(ours.titled(module, source.title), LIBRARY, None if reason else ours, reason)
                    found[name] = match if ours.applies(module) else None
                elif not issubclass(ours, PassesOn):
                    reason = f"its class is derived from {base.__name__}, which is served, and what it changes is not known"
                    found[name] = Match(source.title, LIBRARY, reason=reason)
        return found


def installed_version(package: str) -> str:
    """Return the version of an installed package, "?" if it has none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "?"


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def cache_name(function: Any) -> str:
    """Return the name that function has for its cache, or raise TypeError if it has none of those in NAMES."""
    parameters = inspect.signature(function).parameters
    for candidate in NAMES["cache"]:
        if candidate in parameters:
            return candidate
    raise TypeError(f"{function.__qualname__} has no argument for a cache: none of {', '.join(NAMES['cache'])}")


def with_globals(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Return function with other values for names of its module, which itself stays as it is."""
    others = {**function.__globals__, **names}
    others.pop("__name__", None)  # by which torch.compile would look names up in the module
    changed = types.FunctionType(function.__code__, others, function.__name__, function.__defaults__, function.__closure__)
    changed.__kwdefaults__ = function.__kwdefaults__
    return changed


class WithFunctions(PassesOn):
    """Mixin of classes whose methods are the stock class's, and call functions of ours in place of some of their file."""

    methods: tuple[str, ...] = ("forward",)
    functions: ClassVar[dict[str, Any]] = {}
    """By the names of the stock functions; those of ours make small masks."""

    def takes_small_masks(self) -> bool:
        """Return whether all attention inside is ours, outside a graph."""
        return not is_graph()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "stock_class" not in vars(cls):
            return
        for name in cls.methods:
            stock = getattr(cls.stock_class, name)
            setattr(cls, name, cls._either(stock, with_globals(stock, **cls.functions)))

    @staticmethod
    def _either(stock: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def method(self: WithFunctions, *args: Any, **kwargs: Any) -> Any:
            return (ours if self.takes_small_masks() else stock)(self, *args, **kwargs)

        return method
