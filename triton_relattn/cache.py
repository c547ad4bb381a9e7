"""Where the package keeps a user's files."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder of the user's profiles and of what examples keep; it need not exist."""
    if folder := os.environ.get("TRITON_RELATTN_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "triton_relattn"
