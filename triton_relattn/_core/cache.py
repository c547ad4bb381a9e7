"""The folder in which the package keeps a user's files."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """Return the folder of the user's profiles and of the examples' files; it need not exist. None for a user without a home.

    There is no fallback to a folder that others may write to, since the files there could be theirs.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.path.expanduser(os.environ.get("TRITON_RELATTN_CACHE") or os.path.join(caches, "triton_relattn"))
    return None if folder.startswith("~") else Path(folder)
