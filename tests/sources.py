"""Write the fingerprints of the libraries that are installed: ``python -m tests.sources``, once its tests pass with them.

Rows of other versions stay. ``--drop nemo_toolkit==3.0.0`` takes those of a version out.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

from triton_relattn._core.cache import fingerprint_of
from triton_relattn.integrations.known import DISTRIBUTIONS, FILE
from triton_relattn.integrations.replacement import Library

LIBRARIES = ("transformers", "nemo", "espnet", "speechbrain", "fairseq2", "x_transformers")
COLUMNS = ("library", "version", "module", "fingerprint")
Row = tuple[str, ...]


def library(name: str) -> Library:
    found: Library = importlib.import_module(f"triton_relattn.integrations.{name}").LIBRARY
    return found


def modules() -> list[str]:
    """All modules of libraries that the package was written against."""
    return sorted({each for name in LIBRARIES for source in library(name).sources for each in library(name).modules(source)})


def file_of(module: str) -> Path | None:
    """The file of a module, which need not be fit to be imported."""
    top, *parts = module.split(".")
    spec = importlib.machinery.PathFinder.find_spec(top)
    places = [Path(place).joinpath(*parts) for place in (spec.submodule_search_locations or ()) if spec] if spec else []
    files = [each.with_suffix(".py") for each in places if each.with_suffix(".py").is_file()]
    return files[0] if files else None


def installed() -> Iterator[Row]:
    for module in modules():
        distribution, path = DISTRIBUTIONS[module.partition(".")[0]], file_of(module)
        if path is not None:
            yield distribution, importlib.metadata.version(distribution), module, fingerprint_of(path.read_bytes())


def recorded() -> list[Row]:
    if not FILE.exists():
        return []
    with FILE.open(newline="") as file:
        return [tuple(row[column] for column in COLUMNS) for row in csv.DictReader(file)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sources", description=__doc__)
    parser.add_argument("--drop", nargs="*", default=[], metavar="LIBRARY==VERSION")
    dropped = {tuple(each.split("==")) for each in parser.parse_args().drop}
    here = list(installed())
    new, names = {row[:2] for row in here}, set(modules())
    kept = [row for row in recorded() if row[:2] not in new | dropped and row[2] in names]
    with FILE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([COLUMNS, *sorted([*kept, *(row for row in here if row[:2] not in dropped)])])
    for name, version in sorted(new):
        print(f"{name} {version}: {sum(row[:2] == (name, version) for row in here)} files", file=sys.stderr)


if __name__ == "__main__":
    main()
