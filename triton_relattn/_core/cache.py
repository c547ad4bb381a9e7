"""The folder in which the package keeps a user's files."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


def cache_folder() -> Path | None:
    """Return the folder of the user's profiles and of the examples' files; it need not exist. None for a user without a home.

    There is no fallback to a folder that others may write to, since the files there could be theirs.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.path.expanduser(os.environ.get("TRITON_RELATTN_CACHE") or os.path.join(caches, "triton_relattn"))
    return None if folder.startswith("~") else Path(folder)


def fingerprint_of(source: bytes) -> str:
    """Return the fingerprint of a file's text, whatever ends its lines."""
    return hashlib.sha256(source.replace(b"\r\n", b"\n")).hexdigest()[:16]


def fingerprints(paths: Iterable[Path]) -> list[str]:
    """Return the fingerprints of files, in the order of their paths."""
    return [fingerprint_of(path.read_bytes()) for path in sorted(paths)]


def digest(*parts: object) -> str:
    """Return a name for plain values: another one for other values."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def recall(folder: str, name: str) -> str | None:
    """Return what was remembered under a name in a folder of the user's files; None if nothing was."""
    path = _file(folder, name)
    try:
        text = "" if path is None else path.read_text()
    except (OSError, UnicodeDecodeError):
        return None
    return text.removeprefix(name).strip() if text.startswith(name) else None


def remember(folder: str, name: str, said: str) -> bool:
    """Remember what was said under a name, in one step; return whether the file could be written. A link is not written to."""
    path = _file(folder, name)
    if path is None or path.is_symlink():
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(f"{name}\n{said}\n")
        os.replace(file.name, path)
    except OSError:
        return False
    return True


def _file(folder: str, name: str) -> Path | None:
    cache = cache_folder()
    return None if cache is None else cache / folder / f"{digest(name)[:32]}.txt"
