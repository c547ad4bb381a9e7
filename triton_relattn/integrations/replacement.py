"""Replacement of the classes of a model's modules, and its undoing: one mechanism for all libraries."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn


class Source(NamedTuple):
    """A module of a library, by name, and the module here that has classes in place of some of its classes.

    Both are names, so that nothing is imported before a model is met that is made of it. The module here has ``CLASSES``: stock
    classes, and for each the one in its place, derived from it.
    """

    stock: str
    ours: str


def enable(module: nn.Module, sources: Iterable[Source], known: str) -> dict[str, str]:
    """Give the modules inside module the classes that replace theirs; known says in an error which those are.

    Returns:
        The names of the modules, as ``module.named_modules()`` has them, and of their stock classes. Empty if all of it already
        was replaced.

    Raises:
        ValueError: nothing in module is of those classes, or a module to replace has a ``forward`` of its own.
    """
    classes = _replacements(module, sources)
    replaced = {name: each for name, each in module.named_modules() if _is_replaced(each, classes)}
    if not replaced and not any(type(each) in classes.values() for each in module.modules()):
        raise ValueError(f"{type(module).__name__} has no relative attention of a known {known}")
    for name, each in replaced.items():
        if "forward" in vars(each):
            raise ValueError(
                f"{name} ({type(each).__name__}) has a forward of its own, as hooks leave it: call enable before that"
            )
    return _change_classes(replaced, classes)


def disable(module: nn.Module, sources: Iterable[Source]) -> dict[str, str]:
    """Undo :func:`enable` in module and all inside it.

    Returns:
        The names of the modules that are stock again, and of their classes; empty if none was enabled.
    """
    classes = {ours: stock for stock, ours in _replacements(module, sources).items()}
    return _change_classes({name: each for name, each in module.named_modules() if type(each) in classes}, classes)


def _replacements(module: nn.Module, sources: Iterable[Source]) -> dict[type, type]:
    """Return the stock classes of the sources that occur in module, each with the class here that replaces it."""
    files = {type(each).__module__ for each in module.modules()}
    found: dict[type, type] = {}
    for source in sources:
        if files & set(source):
            found |= importlib.import_module(source.ours).CLASSES
    return found


def _is_replaced(module: nn.Module, classes: dict[type, type]) -> bool:
    """Return whether to replace a module's class. Our class may exclude modules that have no relative term (``applies``)."""
    ours = classes.get(type(module))
    return ours is not None and getattr(ours, "applies", lambda _: True)(module)


def _change_classes(modules: dict[str, nn.Module], classes: dict[type, type]) -> dict[str, str]:
    """Give each module the class that classes has for its own, and return the names of modules and classes.

    Instances of both have the same attributes, but for what our class changes with ``on_enable`` and back with ``on_disable``.
    """
    for each in modules.values():
        old, new = type(each), classes[type(each)]
        getattr(old, "on_disable", _nothing)(each)
        each.__class__ = new
        getattr(new, "on_enable", _nothing)(each)
    return {name: type(each).__name__ for name, each in modules.items()}


def _nothing(_: Any) -> None:
    pass
