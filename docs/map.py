"""Write docs/map.md, the map of the repository, from the first lines of the modules' docstrings: ``python docs/map.py``."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "map.md"
FOLDERS = ("triton_relattn", "bench", "examples", "hub", "tools", "tests")
WIDTH = 80
HEAD = """\
# Map of the repository

The first paragraph of each module's docstring, which `python docs/map.py`
collects.
"""


def summary(path: Path) -> str:
    """Return the first paragraph of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(docstring.partition("\n\n")[0].split()).replace("``", "`")


def entries(folder: Path) -> Iterator[str]:
    """Yield a heading for a folder and a line per module, then the same for the folders in it."""
    modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    about = summary(folder / "__init__.py") if (folder / "__init__.py").exists() else ""
    if modules:
        yield f"\n## {folder.relative_to(ROOT)}\n"
        if about:
            yield textwrap.fill(about, WIDTH, break_on_hyphens=False) + "\n"
        for path in modules:
            line = f"- `{path.name}`: {summary(path)}"
            yield textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
    for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
        yield from entries(inner)


def text() -> str:
    """Return the page."""
    return HEAD + "\n".join(line for name in FOLDERS for line in entries(ROOT / name)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text())
