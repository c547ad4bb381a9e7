"""The examples in README, docs/ and the docstrings run, what the pages say of arguments, families and papers is true, and their
English and lines are as CONTRIBUTING.md asks.

That links lead somewhere and every page is in the contents is checked by ``make docs``.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from triton_relattn import fused_relative_attention
from triton_relattn.__main__ import main
from triton_relattn.integrations.transformers import supported_families

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "PACKAGE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
FURTHER = """CHANGELOG.md SECURITY.md examples/README.md bench/gpu/README.md hub/files/CARD.md tools/*/README.md .github/*.md
    triton_relattn/kernels/*.md"""
MARKDOWN = [*PAGES, *(path for name in FURTHER.split() for path in sorted(ROOT.glob(name)))]
every_page = pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: page.relative_to(ROOT).as_posix())
AVOIDED = re.compile(
    r"\banew\b|\bonce more\b|\btold\b|\bhand(?:s|ed)? on\b|\bas many\b|\btoo(?=[.;:)]|$)|\bin turn\b|\bnot there\b|\bfor each\b"
    r"|\b(?:is|are) made\b|\bwhat is left\b|\bas it stands\b|\bstands? at\b|\bprove[nd]\b|\bbut for\b|\bas \w+ has it\b"
    r"|\btruth values\b|\bnumbers to add\b|\bmasks? of numbers\b|\bof the \w+ of the \w+ of\b",
    re.IGNORECASE,
)
"""Phrases that a native engineer would not use."""
LEGITIMATE = re.compile(r"\bfor each (?:other|in)\b")
ATOM = re.compile(r"(?:`+[^`]*`+|!?\[[^\]]*\]\([^)]*\)|<[^>]+>|\S)+")
"""Text without a possible line break: a word, a code span, a link."""


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def cells_of(line: str) -> list[str]:
    """The cells of a table's row."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def table(name: str, first: str) -> list[list[str]]:
    """The rows of the table of a page whose first column has this heading."""
    return [cells_of(line) for line in text_of(f"docs/{name}").split(f"\n| {first} |")[1].split("\n\n")[0].splitlines()[2:]]


@pytest.mark.parametrize("page", [page for page in PAGES if PYTHON.search(page.read_text())], ids=lambda page: page.name)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example of a page runs alone, as a reader copies it."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    for example in PYTHON.findall(page.read_text()):
        names: dict[str, Any] = {}
        exec(example, names)
        assert "out" not in names or names["out"].isfinite().all()
        assert max(map(len, example.splitlines())) <= 88, "what is wider than the site's column is cut there"


def avoided(text: str) -> list[str]:
    """The phrases in a text for which English has better ones, with their context."""
    text = LEGITIMATE.sub("", " ".join(text.split()))
    return [text[max(0, found.start() - 40) : found.end() + 40] for found in AVOIDED.finditer(text)]


@every_page
def test_wording_of_pages(page: Path) -> None:
    """Of the changelog, only the newest section is checked."""
    text = page.read_text()
    assert not avoided(text.split("\n## ")[1] if page.name == "CHANGELOG.md" else text)


SAYING = ("warn", "warn_once", "add_argument", "ArgumentParser", "Parser")


def test_wording_of_messages() -> None:
    """Wording of errors, warnings and command-line help."""
    for path in sorted((ROOT / "triton_relattn").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Raise) or called in SAYING:
                parts = [str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant)]
                assert not avoided(" ".join(parts)), f"{path}:{node.lineno}"  # type: ignore[attr-defined]


@every_page
def test_width_of_lines(page: Path) -> None:
    """At most 80 columns, 88 for code. Table rows and unbreakable text may be wider."""
    in_code, wide = False, []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        is_code = in_code or line.startswith("    ")
        breakable = is_code or len(ATOM.findall(re.sub(r"^\s*([-*]|\d+\.)\s", "", line))) > 1
        if len(line) > (88 if is_code else 80) and breakable and not line.lstrip().startswith("|"):
            wide.append(f"{number}: {line}")
    assert not wide


MODULES = ("functional", "grids", "positions", "tables", "merging", "testing", "nn.table", "nn.attention", "integrations.enable")
OF_TRANSFORMERS = ("integrations.transformers.families",)


@pytest.mark.parametrize("name", (*MODULES, *OF_TRANSFORMERS))
def test_docstring_examples(name: str) -> None:
    if name in OF_TRANSFORMERS:
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    names = {"torch": torch, "fused_relative_attention": fused_relative_attention}
    result = doctest.testmod(importlib.import_module(f"triton_relattn.{name}"), extraglobs=names)
    assert result.attempted > 0 and result.failed == 0


def test_the_long_description_has_no_relative_links() -> None:
    """A package index cannot resolve them."""
    page = text_of("PACKAGE.md")
    assert "![" not in page and not re.search(r"\]\((?!\w+:|#)", page)


def test_make_targets_exist() -> None:
    """Every ``make target`` that a page names exists in the Makefile, and ``make help`` lists it."""
    helped = set(re.findall(r"^([a-z-]+):.*?## ", text_of("Makefile"), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"(?:`|^    )make ([a-z-]+)", page.read_text(), re.MULTILINE)}
    assert {"setup", "test", "docs"} <= named <= helped, named - helped


def test_the_map_is_up_to_date() -> None:
    """docs/map.py would leave docs/map.md unchanged."""
    program = "import sys; sys.path.insert(0, 'docs'); import map; sys.stdout.write(map.text())"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == text_of("docs/map.md"), "run python docs/map.py"


@pytest.mark.thorough
def test_figures_are_drawn(tmp_path: Path) -> None:
    """docs/figures.py draws exactly the figures in docs/_static. (Their bytes depend on the version of matplotlib.)"""
    pytest.importorskip("matplotlib")
    subprocess.run([sys.executable, ROOT / "docs" / "figures.py", "--out", tmp_path], check=True)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in (ROOT / "docs" / "_static").glob("*.svg")}


def test_every_family_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Every family is listed in docs/transformers.md, in README and on the command line."""
    rows, families = table("transformers.md", "family"), supported_families()
    assert [row[:2] for row in rows] == [[family.name, family.adds] for family in families]
    assert f"[{len(rows)} families](docs/transformers.md)" in " ".join(text_of("README.md").split())
    assert main(["--families"]) == 0
    for line, family in zip(capsys.readouterr().out.splitlines()[1:], families, strict=True):
        assert line.startswith(f"{family.name} ") and f" {family.adds} " in line and line.endswith(f" {family.since}")


def test_environment_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert f"torch {torch.__version__}" in printed and "device: " in printed and "implementation: " in printed


def test_names_of_other_libraries_are_explained() -> None:
    """For each argument in the table of docs/migrate.md, the error names its equivalent here or says that it is not needed."""
    lines = [line for line in text_of("docs/migrate.md").splitlines() if line.startswith("| ")]
    names = {name for line in lines[1:] for cell in cells_of(line)[2:] for name in re.findall(r"`(\w+)(?:=[^`]*)?`", cell)}
    others = names - set(inspect.signature(fused_relative_attention).parameters)
    assert len(others) >= 5
    tensor, attend = torch.zeros(1, 1, 4, 8), fused_relative_attention
    for name in others:
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'; .*"):
            attend(tensor, tensor, tensor, **{name: 1})  # type: ignore[call-overload]


def test_the_first_screen_fits_a_phone() -> None:
    """README has a hundred lines at most, and the words that a table cannot break are no wider than a phone's screen."""
    lines = text_of("README.md").splitlines()
    assert len(lines) <= 100
    rows = [cells_of(re.sub(r"\]\([^)]*\)|[*\[]", "", line)) for line in lines if line.startswith("|")]
    assert rows
    for row in rows:
        assert sum(max(map(len, cell.split() or [""])) + 2 for cell in row) <= 48, row


def test_answers_are_short_and_linked() -> None:
    answers = re.split(r"^## ", text_of("docs/answers.md"), flags=re.MULTILINE)[1:]
    assert len(answers) >= 20
    for answer in answers:
        heading, _, text = answer.partition("\n")
        assert len(text.strip().splitlines()) <= 5, heading
        assert re.search(r"\]\((?!http)[\w./-]+\.md", text), heading


def bibliography() -> dict[str, dict[str, str]]:
    """The entries of docs/cite.md: key -> fields."""
    found = re.findall(r"^@\w+\{(\w+),\n(.*?)^\}", text_of("docs/cite.md"), re.DOTALL | re.MULTILINE)
    return {key: dict(re.findall(r"(\w+)\s*=\s*\{(.*?)\},?\n(?=\s+\w+\s*=|\Z)", fields, re.DOTALL)) for key, fields in found}


def plain(text: str) -> str:
    """Text without the braces that protect capitals, on one line."""
    return " ".join(text.replace("{", "").replace("}", "").split())


def test_the_citation_has_the_papers() -> None:
    """CITATION.cff and docs/cite.md have the same titles, years and arXiv identifiers."""
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load(text_of("CITATION.cff"))
    assert citation["cff-version"] == "1.2.0"
    entries = bibliography()
    software = entries.pop("triton_relattn")
    assert plain(software["title"]) == citation["title"] and software["version"] == citation["version"]
    assert software["year"] == str(citation["date-released"])[:4]
    assert plain(software["author"]) == citation["authors"][0]["name"]
    page_entries = {(plain(entry["title"]), int(entry["year"]), entry.get("eprint")) for entry in entries.values()}
    file_entries = {
        (reference["title"], reference["year"], reference.get("url", "").partition("arxiv.org/abs/")[2] or None)
        for reference in citation["references"]
    }
    assert page_entries == file_entries and len(page_entries) == len(entries) == len(citation["references"])


def test_every_term_has_a_paper() -> None:
    """Every row of the table in docs/models.md is in the table of docs/cite.md, and its citation keys exist."""
    rows = table("cite.md", "model or term")
    assert {key for row in rows for key in re.findall(r"`(\w+)`", row[1])} == set(bibliography()) - {"triton_relattn"}
    named = "\n".join(row[0] for row in rows)
    for model, *_ in table("models.md", "model"):
        for name in re.findall(r"[A-Z][\w-]+(?: [A-Z0-9][\w-]*)?", model.split("(")[0].split(", proj")[0]):
            assert name in named, name
