"""Faults, and how they are applied to a copy of a repository.

A change finds code by its tokens. Line breaks, comments, indentation and trailing commas do not matter, nor does the file if the
change names a folder: a fault still applies after code was formatted or moved.
"""

from __future__ import annotations

import io
import tokenize
from dataclasses import dataclass
from pathlib import Path

LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.COMMENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}
CLOSING = (")", "]", "}")


class StaleFault(Exception):
    """The code that a fault replaces does not exist, or not as often as expected."""


@dataclass(frozen=True)
class Token:
    text: str
    start: int
    end: int


def tokens(text: str) -> list[Token]:
    """The significant tokens of Python code, or of a fragment, with their offsets."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[Token] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in LAYOUT:
                continue
            if token.string in CLOSING and found and found[-1].text == ",":
                found.pop()
            (first, column), (last, end) = token.start, token.end
            found.append(Token(token.string, starts[first - 1] + column, starts[last - 1] + end))
    except (tokenize.TokenError, IndentationError):  # a part of a statement: its brackets or blocks have no end
        pass
    return found


@dataclass(frozen=True)
class Change:
    """Code in a file or below a folder, and its replacement."""

    place: str
    old: str
    new: str
    times: int = 1
    """The number of occurrences, all of which are replaced."""

    def apply(self, root: Path, texts: dict[str, str]) -> None:
        """Change the texts of files, by name; missing ones are read from the repository at root.

        Raises:
            StaleFault: the code is not there, or not as often.
        """
        place = root / self.place
        paths = [place] if place.is_file() else sorted(place.rglob("*.py"))
        wanted = [token.text for token in tokens(self.old)]
        count = 0
        for path in paths:
            file = path.relative_to(root).as_posix()
            text = texts.get(file) or path.read_text()
            present = tokens(text)
            names = [token.text for token in present]
            starts = [index for index in range(len(names) - len(wanted) + 1) if names[index : index + len(wanted)] == wanted]
            for index in reversed(starts):
                text = text[: present[index].start] + self.new + text[present[index + len(wanted) - 1].end :]
            if starts:
                texts[file] = text
                count += len(starts)
        if count != self.times:
            raise StaleFault(f"{self.place} has {count} times, not {self.times}: {self.old!r}")


@dataclass(frozen=True)
class Edit:
    """A range of a file, by offsets, and its replacement."""

    file: str
    start: int
    end: int
    new: str

    def apply(self, root: Path, texts: dict[str, str]) -> None:
        text = texts.get(self.file) or (root / self.file).read_text()
        texts[self.file] = text[: self.start] + self.new + text[self.end :]


@dataclass(frozen=True)
class Fault:
    """A plausible mistake in the code."""

    name: str
    effect: str
    """The wrong behaviour, in a line."""
    tests: tuple[str, ...]
    """Arguments of pytest for the first tests to run: fast and likely to fail, all in one folder."""
    changes: tuple[Change | Edit, ...]
    folders: tuple[str, ...] = ()
    """Folders of tests to run next; folders separated by blanks share a process. By default the folder of the first test."""

    @property
    def stages(self) -> list[tuple[str, ...]]:
        """Tests that share a process, in the order in which they run."""
        first = [self.tests] if self.tests else []
        return first + [tuple(folders.split()) for folders in self.folders or (test_folder(self.tests[0]),)]

    def changed(self, root: Path) -> dict[str, str]:
        """The files of the repository at root that the fault changes, by name, with the fault.

        Raises:
            StaleFault: it does not apply.
        """
        texts: dict[str, str] = {}
        for change in self.changes:
            change.apply(root, texts)
        return texts

    def apply(self, root: Path) -> None:
        for file, text in self.changed(root).items():
            (root / file).write_text(text)


def test_folder(test: str) -> str:
    """The folder of a test, two levels deep: tests of one folder share a process."""
    return "/".join(test.split("/")[:2])
