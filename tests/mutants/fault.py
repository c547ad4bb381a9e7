"""Faults, and how they are put into a copy of the repository."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class StaleFault(Exception):
    """A text that a fault replaces is not in its file, or not as often as it should be."""


@dataclass(frozen=True)
class Change:
    """One text of a file, and what takes its place."""

    file: str
    old: str
    new: str
    times: int = 1
    """How often the text is there; all are replaced."""


@dataclass(frozen=True)
class Fault:
    """Something that a person might have written instead, and that is wrong."""

    name: str
    effect: str
    """The wrong behaviour, in a line."""
    tests: tuple[str, ...]
    """Arguments of pytest for the tests to begin with: fast ones, most likely to notice. All in one folder."""
    changes: tuple[Change, ...]

    @property
    def folder(self) -> str:
        """All tests of the same kind, for a fault that the first do not notice."""
        return "/".join(self.tests[0].split("/")[:2])

    def changed(self, root: Path) -> dict[str, str]:
        """The files of the repository at root with the fault, by name.

        Raises:
            StaleFault: it does not apply.
        """
        texts: dict[str, str] = {}
        for change in self.changes:
            path = root / change.file
            if not path.is_file():
                raise StaleFault(f"there is no {change.file}")
            text = texts.get(change.file) or path.read_text()
            if (found := text.count(change.old)) != change.times:
                raise StaleFault(f"{change.file} has {found} times, not {change.times}: {change.old!r}")
            texts[change.file] = text.replace(change.old, change.new)
        return texts

    def apply(self, root: Path) -> None:
        for file, text in self.changed(root).items():
            (root / file).write_text(text)
