"""The source files of libraries that this package was tested with: a fingerprint of each, by version, in ``known_sources.csv``.

``python -m tests.sources`` writes that file.
"""

from __future__ import annotations

import csv
import functools
import importlib
import importlib.metadata
import importlib.util
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from .._core.cache import digest, fingerprint_of, fingerprints

FILE = Path(__file__).with_name("known_sources.csv")
DISTRIBUTIONS = {
    "transformers": "transformers",
    "nemo": "nemo_toolkit",
    "espnet": "espnet",
    "espnet2": "espnet",
    "cosyvoice": "cosyvoice-minicpmo",
    "speechbrain": "speechbrain",
    "fairseq2": "fairseq2",
    "x_transformers": "x-transformers",
}
"""The distribution for pip of each package in Python."""


@functools.cache
def fingerprint(module: str) -> str | None:
    """Return the fingerprint of a module's file; None if there is no such module, or its file is out of reach."""
    try:
        made = importlib.import_module(module)
        return fingerprint_of(made.__spec__.loader.get_data(made.__file__))  # type: ignore[union-attr]
    except (ImportError, AttributeError, OSError, TypeError):
        return None


@functools.cache
def known_sources() -> dict[str, dict[str, set[str]]]:
    """Return the versions that have a file, by the module's name and the file's fingerprint."""
    known: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    with FILE.open(newline="") as file:
        for row in csv.DictReader(file):
            known[row["module"]][row["fingerprint"]].add(row["version"])
    return known


def versions(module: str) -> list[str]:
    """Return the versions of a module's library that are known, oldest first."""
    found = set().union(*known_sources()[module].values()) if module in known_sources() else set()
    return sorted(found, key=lambda each: [int(part) if part.isdigit() else -1 for part in each.split(".")])


@functools.cache
def are_known(modules: tuple[str, ...]) -> bool:
    """Return whether there is a known version that has all of these modules as they are here."""
    known = known_sources()
    having = [known[each].get(fingerprint(each) or "", set()) if each in known else set() for each in modules]
    return bool(set.intersection(*having))


def installed_version(module: str) -> str:
    """Return the version of a module's library, as pip knows it."""
    try:
        return importlib.metadata.version(DISTRIBUTIONS[module.partition(".")[0]])
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"


def identity(modules: Iterable[str], ours: str) -> str | None:
    """Return a name for the state of a library's modules and of our files that act in their place; None if a file has no
    fingerprint.

    ours: one of our modules. All files of its folder count, and those that all libraries share.
    """
    stock = [(each, fingerprint(each)) for each in modules]
    if not all(each for _, each in stock):
        return None
    shared = Path(__file__).parent
    folder = shared.joinpath(*ours.removeprefix(f"{__package__}.").split(".")[:-1])
    from .. import __version__  # the package's root imports from below, not the other way round

    own = [fingerprints(place.glob("*.py")) for place in sorted({shared, folder})]
    return digest(__version__, stock, own)
