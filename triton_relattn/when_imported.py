"""Work that is done when, and only if, another module is imported: what it needs must not make our own import slow."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Finder(MetaPathFinder):
    """Finds one module as everybody else does, with a loader that has the work done afterwards."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self.name, self.work, self.searching = name, work, threading.local()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name or getattr(self.searching, "now", False):
            return None
        self.searching.now = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.searching.now = False
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderAndWork(spec.loader, self)
        return spec


class _LoaderAndWork(Loader):
    """A module's own loader, and the work after it; a wrapper, since modules may share a loader."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self.loader, self.finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
            self.finder.work()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def when_imported(name: str, work: Callable[[], None]) -> None:
    """Do the work now if the module has been imported, else once it is."""
    if name in sys.modules:
        work()
    else:
        sys.meta_path.insert(0, _Finder(name, work))
