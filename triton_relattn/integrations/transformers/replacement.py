"""The library transformers: its files, and ours for them."""

from __future__ import annotations

from .. import replacement
from .families import FAMILIES
from .rows import ROWS

SOURCES = tuple(
    replacement.Source(
        f"transformers.models.{each.folder}.modeling_{each.folder}",
        f"{__package__}.{'rows' if each.folder in ROWS else each.folder}",
        f"{each.name}: {each.adds}",
    )
    for each in FAMILIES
    if each.inside is None
)
LIBRARY = replacement.Library("transformers", SOURCES, oldest="5.0")
