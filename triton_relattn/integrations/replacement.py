"""Replacement of the classes of a model's modules, and its undoing: one mechanism for all libraries."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import nn

from . import known, proof


class Source(NamedTuple):
    """A module of a library, by name, and the module here that has classes in place of some of its classes.

    Both are names, so that nothing is imported before a model is met that is made of it. The module here has ``CLASSES``: stock
    classes, and for each the one in its place, derived from it; or a function ``classes`` that makes them for the name of the
    library's module. title: of the family, for messages; sources that share it are proven together. columns: the stock attention
    makes a tensor (B, H, N, columns * N); 0: of that size none, or not in all layers.
    """

    stock: str
    ours: str
    title: str
    columns: int = 0

    def classes(self) -> dict[type, type]:
        """Return the stock classes, each with the one in its place. This imports both modules."""
        module = importlib.import_module(self.ours)
        found: dict[type, type] = module.classes(self.stock) if hasattr(module, "classes") else module.CLASSES
        return found


class Library(NamedTuple):
    """A library whose classes are replaced.

    sources: of these. names: says in an error which they are. cases: the module here whose ``cases(stock)`` returns small models
    of the module of a source. beside: other modules of the library that ours stand on.
    """

    sources: tuple[Source, ...]
    names: str
    cases: str
    beside: tuple[str, ...] = ()

    def modules(self, *sources: Source) -> tuple[str, ...]:
        """Return the names of the library's modules that the classes of sources were written against."""
        return (*(each.stock for each in sources), *self.beside)


def enable(module: nn.Module, library: Library, prove: bool = True) -> dict[str, str]:
    """Give the modules inside module the classes that replace theirs.

    Args:
        prove: compare small models, enabled, with the stock ones first, if the library's files are not those of a known version.

    Returns:
        The names of the modules, as ``module.named_modules()`` has them, and of their stock classes. Empty if all of it already
        was replaced.

    Raises:
        ValueError: nothing in module is of those classes, or a module to replace has a ``forward`` of its own.
        RuntimeError: the library's files are not those of a known version, and small models differ from the stock ones.
    """
    classes = classes_in(module, library)
    replaced = {name: each for name, each in module.named_modules() if is_replaced(each, classes)}
    if not replaced and not any(type(each) in classes.values() for each in module.modules()):
        raise ValueError(f"{type(module).__name__} has no relative attention of a known {library.names}")
    for name, each in replaced.items():
        if "forward" in vars(each):
            raise ValueError(
                f"{name} ({type(each).__name__}) has a forward of its own, as hooks leave it: call enable before that"
            )
    if prove:
        stock = {type(each) for each in replaced.values()}
        files = {each.__module__ for each in stock}
        met = [each for each in library.sources if each.stock in files]
        for title in dict.fromkeys(each.title for each in met):
            together = [each for each in met if each.title == title]
            if not known.are_known(library.modules(*together)):
                _prove(library, together, stock)
    return _change_classes(replaced, classes)


def disable(module: nn.Module, library: Library) -> dict[str, str]:
    """Undo :func:`enable` in module and all inside it.

    Returns:
        The names of the modules that are stock again, and of their classes; empty if none was enabled.
    """
    classes = {ours: stock for stock, ours in classes_in(module, library).items()}
    return _change_classes({name: each for name, each in module.named_modules() if type(each) in classes}, classes)


class Enable(Protocol):
    def __call__(self, module: nn.Module, prove: bool = True) -> dict[str, str]: ...


class Disable(Protocol):
    def __call__(self, module: nn.Module) -> dict[str, str]: ...


ENABLE = """{summary}

Args:
    module: {module} Other models of the same class stay as they are. Checkpoints, parameters and hooks do, too.
    prove: with files of the library that are not those of a tested version, compare a small model with the stock one first,
        once; False skips that.

Returns:
    What was replaced: the names of the modules, as ``module.named_modules()`` has them, and of their classes. Empty if all of it
    already was.

{text}

Raises:
    ValueError: nothing in module is of these classes, or a module to replace has a ``forward`` of its own.
    RuntimeError: the small model differs, or cannot be compared; module is as it was.

Example:
{example}
"""
DISABLE = """Undo :func:`enable` in module and all inside it.

Returns:
    The names of the modules that are stock again, and of their classes; empty if none was enabled.
"""


def functions(library: Library, package: str, *, summary: str, module: str, text: str, example: str) -> tuple[Enable, Disable]:
    """Return the functions enable and disable of a library, with their docstrings."""

    def enable_library(module: nn.Module, prove: bool = True) -> dict[str, str]:
        return enable(module, library, prove)

    def disable_library(module: nn.Module) -> dict[str, str]:
        return disable(module, library)

    lines = "\n".join(f"    {line}" for line in example.strip().splitlines())
    enable_library.__doc__ = ENABLE.format(summary=summary, module=module, text=text.strip(), example=lines)
    disable_library.__doc__ = DISABLE
    for name, function in (("enable", enable_library), ("disable", disable_library)):
        function.__name__ = function.__qualname__ = name
        function.__module__ = package
    return enable_library, disable_library


def source_of(library: Library, module: nn.Module) -> Source:
    """Return the source that a module's class, or the stock class behind it, is of."""
    files = {each.__module__ for each in type(module).__mro__}
    return next(each for each in library.sources if each.stock in files)


def classes_in(module: nn.Module, library: Library) -> dict[type, type]:
    """Return the stock classes of the library that occur in module, each with the class here that replaces it.

    Raises:
        RuntimeError: the module here cannot be imported with this version of the library, which is not a known one.
    """
    kinds = {type(each) for each in module.modules()}
    # Of a class that is in place already, the last base is the stock class.
    files = {stock.__module__ for kind in kinds for stock in (kind, kind.__bases__[-1])}
    found: dict[type, type] = {}
    for source in library.sources:
        if source.stock in files:
            try:
                found |= source.classes()
            except (ImportError, AttributeError) as error:
                if known.are_known(library.modules(source)):
                    raise
                raise RuntimeError(_refusal(source, f"{type(error).__name__}: {error}", skip=False)) from error
    return found


def _prove(library: Library, sources: Sequence[Source], stock: set[type]) -> None:
    """Compare small models of sources with themselves enabled, unless that was done before.

    stock: the classes that are to be replaced. Those of these sources must occur in a small model.

    Raises:
        RuntimeError: they differ, or cannot be compared.
    """
    source = sources[0]
    identity = known.identity(library.modules(*sources), source.ours)
    if identity is not None and proof.is_remembered(identity):
        return
    name = f"{source.title}, of {_library(source)} {known.installed_version(source.stock)}"
    warnings.warn(
        f"{name}, has other source files than in the versions that triton_relattn was tested with ({_versions(source)}): "
        "comparing small models, enabled, with the stock ones, which takes seconds, once",
        stacklevel=4,
    )
    covered: set[type] = set()

    def change(model: nn.Module) -> None:
        before = {name: type(each) for name, each in model.named_modules()}
        covered.update(before[name] for name in enable(model, library, prove=False))

    try:
        error = proof.prove(cases_of(library, source), change)
        if missing := {each for each in stock - covered if each.__module__ in {each.stock for each in sources}}:
            raise proof.Disproved(f"no small model has {', '.join(sorted(each.__name__ for each in missing))}")
    except proof.Disproved as disproved:
        raise RuntimeError(_refusal(source, str(disproved))) from disproved
    if identity is not None:
        proof.remember(identity, f"{name}: the largest difference was {error:.1e}")


def cases_of(library: Library, source: Source) -> Sequence[proof.Case]:
    """Return the small models of a source, and what is computed with them."""
    cases: Callable[[str], Sequence[proof.Case]] = importlib.import_module(library.cases).cases
    return cases(source.stock)


def _library(source: Source) -> str:
    return known.DISTRIBUTIONS[source.stock.partition(".")[0]]


def _versions(source: Source) -> str:
    return ", ".join(known.versions(source.stock)) or "none"


def _refusal(source: Source, reason: str, skip: bool = True) -> str:
    """Say why a model is not enabled, and what may be done; skip: whether prove=False is of use."""
    library, versions = _library(source), known.versions(source.stock)
    ours = source.ours.removeprefix(f"{__package__}.").partition(".")[0]
    install = f'Install a version that is known: pip install "{library}=={versions[-1]}". ' if versions else ""
    return (
        f"{source.title} was not enabled, and the model is as it was: {library} {known.installed_version(source.stock)} has "
        f"other source files than the versions that are known ({_versions(source)}), and ours do not fit it. "
        f"{reason}. {install}Please report it"
        + (
            f"; triton_relattn.integrations.{ours}.enable(model, prove=False) skips the comparison, at your own risk"
            if skip
            else ""
        )
    )


def is_replaced(module: nn.Module, classes: dict[type, type]) -> bool:
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
