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


def fingerprints(paths: Iterable[Path]) -> list[str]:
    """Return a fingerprint of the text of every file, whatever ends its lines, in the order of their paths."""
    texts = (path.read_bytes().replace(b"\r\n", b"\n") for path in sorted(paths))
    return [hashlib.sha256(text).hexdigest()[:16] for text in texts]


def digest(*parts: object) -> str:
    """Return a name for plain values, different for different values."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def recall(folder: str, name: str) -> str | None:
    """Return the text under a name in a folder of the user's files; None if there is none."""
    path = _file(folder, name)
    try:
        text = "" if path is None else path.read_text()
    except (OSError, UnicodeDecodeError):
        return None
    return text.removeprefix(name).strip() if text.startswith(name) else None


def remember(folder: str, name: str, text: str) -> bool:
    """Write a text under a name, in one step; return whether the file could be written. A link is not written to."""
    path = _file(folder, name)
    if path is None or path.is_symlink():
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(f"{name}\n{text}\n")
        os.replace(file.name, path)
    except OSError:
        return False
    return True


def _file(folder: str, name: str) -> Path | None:
    cache = cache_folder()
    return None if cache is None else cache / folder / f"{digest(name)[:32]}.txt"
