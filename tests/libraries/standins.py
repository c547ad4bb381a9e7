"""Import single source files of a library without the other packages that it imports.

The libraries import hundreds of packages; the tested classes need few of them. The ``__init__.py`` of a bare package is not run,
so that its modules can be imported one by one. From an absent package any name can be imported, as a class without a function.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any, ClassVar

import pytest


def is_installed(package: str) -> bool:
    """Whether a package is installed, or was made bare."""
    return package in sys.modules or importlib.util.find_spec(package) is not None


def needs(*packages: str) -> Any:
    """Mark a test that is skipped where packages are not installed."""
    missing = [package for package in packages if not is_installed(package)]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (make test-libraries)")


class _Absent(types.ModuleType):
    """A module whose attributes are classes that take any arguments, and can be used as decorators."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        methods: dict[str, Any] = {
            "__init__": lambda self, *_, **__: None,
            "__call__": lambda self, *given, **_: given[0] if given else None,
            "__class_getitem__": lambda cls, _: cls,
        }
        setattr(self, name, type(name, (), {**methods, "__module__": self.__name__}))
        return vars(self)[name]


class _Empty(Loader):
    """Makes a module of a kind, and runs no code in it."""

    def __init__(self, kind: type[types.ModuleType]) -> None:
        self.kind = kind

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return self.kind(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _StandIns(PathFinder):
    """Finds absent and bare packages."""

    absent: ClassVar[set[str]] = set()
    bare: ClassVar[set[str]] = set()

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if any(f"{name}.".startswith(f"{package}.") for package in cls.absent):
            return ModuleSpec(name, _Empty(_Absent), is_package=True)
        spec = super().find_spec(name, path, target) if name in cls.bare else None
        if spec is not None:
            spec.loader = _Empty(types.ModuleType)
        return spec


def bare(*packages: str) -> None:
    """Let modules of packages be imported without running the packages' ``__init__.py``."""
    _StandIns.bare |= set(packages)
    if _StandIns not in sys.meta_path:
        sys.meta_path.insert(0, _StandIns)


def absent(*packages: str) -> None:
    """Let any name be imported from packages or modules that are not installed, or import too much."""
    _StandIns.absent |= set(packages)
    bare()


def load(name: str) -> Any:
    """An attribute of a module, ``package.module.attribute``. Packages around the module are bare."""
    module, _, attribute = name.rpartition(".")
    bare(*(module[: found.start()] for found in re.finditer(r"\.", module)))
    return getattr(importlib.import_module(module), attribute)
