"""Where the package keeps a user's files."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """The folder of the user's profiles and of what examples keep; it need not exist. None for a user without a home.

    No folder that others may write takes its place: what is found there would be theirs.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.path.expanduser(os.environ.get("TRITON_RELATTN_CACHE") or os.path.join(caches, "triton_relattn"))
    return None if folder.startswith("~") else Path(folder)
