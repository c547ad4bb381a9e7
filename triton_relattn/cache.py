"""Where the package keeps a user's files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """The folder of the user's profiles and of what examples keep; it need not exist."""
    if folder := os.environ.get("TRITON_RELATTN_CACHE"):
        return Path(folder)
    home = os.path.expanduser("~")  # as it is if the user has none
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(tempfile.gettempdir() if home == "~" else home, ".cache")
    return Path(caches) / "triton_relattn"
