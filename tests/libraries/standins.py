"""Import single source files of a library without the other packages that it imports.

The libraries import hundreds of packages; the tested classes need few of them. The ``__init__.py`` of a bare package is not run,
so that its modules can be imported one by one. From an absent package any name can be imported, as a class without a function.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar


def is_installed(package: str) -> bool:
    """Whether a package is installed, or was made bare."""
    return package in sys.modules or importlib.util.find_spec(package) is not None


def bare(*packages: str) -> None:
    """Let modules of packages be imported without running the packages' ``__init__.py``."""
    for name in packages:
        if name not in sys.modules:
            parent, _, own = name.rpartition(".")
            places = sys.modules[parent].__path__ if parent else sys.path
            folders = [str(Path(place) / own) for place in places if (Path(place) / own).is_dir()]
            assert folders, name
            module = types.ModuleType(name)
            module.__path__ = folders
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            sys.modules[name] = module
            if parent:
                setattr(sys.modules[parent], own, module)


class _Absent(types.ModuleType):
    """A module whose attributes are classes that take any arguments, and can be used as decorators."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        methods = {"__init__": _nothing, "__call__": _first, "__class_getitem__": _itself, "__module__": self.__name__}
        made = type(name, (), methods)
        setattr(self, name, made)
        return made


def _nothing(self: Any, *_: Any, **__: Any) -> None:
    pass


def _first(self: Any, *given: Any, **_: Any) -> Any:
    return given[0] if given else None


def _itself(cls: Any, _: Any) -> Any:
    return cls


class _AbsentPackages(importlib.machinery.PathFinder):
    """Finds modules of packages that are absent."""

    names: ClassVar[set[str]] = set()

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if any(name == package or name.startswith(f"{package}.") for package in cls.names):
            return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)
        return None


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: Any) -> Any:
        return _Absent(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def absent(*packages: str) -> None:
    """Let any name be imported from packages or modules that are not installed, or import too much."""
    _AbsentPackages.names |= set(packages)
    if _AbsentPackages not in sys.meta_path:
        sys.meta_path.insert(0, _AbsentPackages)
