"""How Sphinx builds the documentation: ``make docs``."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sphinx.pycode import ModuleAnalyzer  # noqa: E402

import triton_relattn  # noqa: E402

project = "triton_relattn"
author = "The triton_relattn authors"
version = release = triton_relattn.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_rtype = False
napoleon_use_param = False
myst_heading_anchors = 3
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!triton_relattn).*|triton_relattn\.testing\.Inputs")
]  # classes of torch and others, which only a network could look up

html_theme = "furo"
html_title = f"triton_relattn {version}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_show_sphinx = html_show_copyright = False

# Files of the repository that pages include: a link to one of them leads to the page.
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "versions.md",
    "examples/README.md": "examples.md",
}
LINK = re.compile(r"\]\((?!\w+:|#)([^)\s]+)")
LOADED = re.compile(r"""(?:<(?:script|img|link)\b[^>]*?(?:src|href)=|url\(|@import\s+)["']?(https?:)?//[^"')\s>]*""")


def redirect_links(app: Any, path: Path, parent: str, content: list[str]) -> None:
    """Rewrite the relative links of an included file, which lies elsewhere: to pages, or to files as seen from here."""
    folder = Path(app.srcdir, path).resolve().parent

    def redirected(match: re.Match[str]) -> str:
        target = (folder / match[1]).resolve()
        page = PAGES.get(target.relative_to(ROOT).as_posix())
        return "](" + (page or os.path.relpath(target, app.srcdir))

    content[0] = LINK.sub(redirected, content[0])


def offer_downloads(app: Any, docname: str, content: list[str]) -> None:
    """Have links to Markdown of the repository that is no page, which GitHub shows, lead to the file."""
    content[0] = content[0].replace("](../triton_relattn/kernels/DERIVATION.md", "](path:../triton_relattn/kernels/DERIVATION.md")


def require_offline(app: Any, error: Exception | None) -> None:
    """Refuse a build with a page, style sheet or script that loads anything from the network."""
    if error is not None or app.builder.format != "html":
        return
    for path in sorted(Path(app.outdir).rglob("*")):
        if path.suffix in (".html", ".css") and (found := LOADED.search(path.read_text(encoding="utf-8"))):
            raise RuntimeError(f"{path} loads {found.group()} from the network; the documentation has to work without one")


def show_implementations() -> None:
    """Have autodoc show the signature of the implementation, with all keywords and their defaults, in place of overloads."""
    analyzer = ModuleAnalyzer.for_module("triton_relattn.functional")
    analyzer.analyze()
    analyzer.overloads.clear()


def without_catchers(app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None) -> Any:
    """Leave out of a signature the parameters that catch wrong arguments in order to say what is meant."""
    return signature and re.sub(r"\*others: [\w.~]+", "*", re.sub(r", \*\*unknown: [\w.~]+", "", signature)), returns


def setup(app: Any) -> None:
    show_implementations()
    app.connect("autodoc-process-signature", without_catchers)
    app.connect("source-read", offer_downloads)
    app.connect("include-read", redirect_links)
    app.connect("build-finished", require_offline)
