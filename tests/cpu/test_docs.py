"""The examples in README, docs/ and the docstrings run, and their statements on support, families, files and links are true."""

from __future__ import annotations

import csv
import doctest
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.cases.methods import OURS
from bench.report.rows import read
from bench.verbs import readme
from tools.cycles.machine import MACHINES
from tools.cycles.predict import SCORES
from triton_relattn import can_run_triton, functional, fused_relative_attention, grids, kernels, merging, positions, tables
from triton_relattn.__main__ import main
from triton_relattn._core.names import NOT_NEEDED, OTHER_NAMES
from triton_relattn._implementations import IMPLEMENTATIONS
from triton_relattn._implementations.kernels import MAX_TRITON_WIDTH, TRITON_DTYPES
from triton_relattn.integrations import every
from triton_relattn.integrations.transformers import families, replacement, supported_families
from triton_relattn.kernels.config.tile_config import KERNELS
from triton_relattn.nn import attention, table

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README, TRANSFORMERS, USAGE, BENCHMARKS = (
    (ROOT / name).read_text() for name in ("README.md", "docs/transformers.md", "docs/usage.md", "docs/benchmarks.md")
)
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
MODEL, LAYER, PARAKEET = (1, 8, 1024, 64), (2, 100, 512), (1, 100, 1024)
GRID = (1, 8, 24 * 32, 64)
# The shape of ``out`` after each example of a page.
EXAMPLES = {
    "README.md": [MODEL, MODEL, LAYER, PARAKEET],
    "usage.md": [MODEL, MODEL, MODEL, LAYER, LAYER],
    "decoding.md": [(1, 8, 200, 64), (1, 8, 200, 64), (1, 8, 1, 64)],
    "migrate.md": [(1, 4, 128, 32)] * 3,
    "models.md": [(2, 4, 100, 64)],
    "tables.md": [MODEL],
    "grids.md": [GRID, GRID],
    "torch.md": [(2, 60, 512), MODEL, MODEL],
    "distributed.md": [MODEL, LAYER],
    "transformers.md": [PARAKEET, (1, 4, 64)],
    "enable.md": [PARAKEET],
    "index.md": [MODEL],
}


def cells_of(line: str) -> list[str]:
    """The cells of a table's row."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def relative_links(page: str) -> list[str]:
    """Links that lead to files, without their anchors; code is no link."""
    text = re.sub(r"```.*?```|`[^`\n]*`(?!\])", "", page, flags=re.DOTALL)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"\w+:", target)]
    return [target for target in targets if target]


@pytest.mark.parametrize("page", [page for page in PAGES if PYTHON.search(page.read_text())], ids=lambda page: page.name)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, as one would type them; each page begins anew."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    shapes = []
    for example in PYTHON.findall(page.read_text()):
        exec(example, names)
        shapes.append(tuple(names["out"].shape))
    assert shapes == EXAMPLES[page.name]
    if page.name in ("README.md", "usage.md"):
        assert names["table"].grad.any()
    if page.name == "usage.md":
        assert (tmp_path / "maps.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_fits_the_page(page: Path) -> None:
    """What is wider than the site's column is cut there."""
    assert not [line for block in PYTHON.findall(page.read_text()) for line in block.splitlines() if len(line) > 88]


def test_blocks_of_the_readme_stand_alone() -> None:
    """Each imports what it uses."""
    for block in PYTHON.findall(README):
        exec(block, {})


def test_the_long_description_has_no_relative_links() -> None:
    """An index cannot follow them."""
    page = (ROOT / "PACKAGE.md").read_text()
    assert not relative_links(page) and "![" not in page
    for block in PYTHON.findall(page):
        exec(block, {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    missing = [target for target in relative_links(page.read_text()) if not (page.parent / target).exists()]
    assert not missing


def test_every_page_is_in_the_contents() -> None:
    contents = re.findall(r"```\{toctree\}\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), re.DOTALL)
    listed = {line for block in contents for line in block.splitlines() if line and not line.startswith(":")}
    assert listed == {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"}


def test_map_of_the_house() -> None:
    """Every file and folder that it names exists, and every module and folder of the package has a place in it."""
    page = (ROOT / "docs" / "development.md").read_text()
    rows = [
        cells_of(line) for line in page.split("## Map of the house")[1].split("\n## ")[0].splitlines() if line.startswith("| `")
    ]
    places = [where.strip("`") for where, _ in rows]
    assert len(places) > 20 and not [place for place in places if not (ROOT / place).exists()]
    package = {path.stem if path.suffix == ".py" else path.name for path in (ROOT / "triton_relattn").iterdir()}
    found = {Path(place).parts[1].removesuffix(".py") for place in places if place.startswith("triton_relattn/")}
    assert found == package - {"__init__", "__pycache__", "py.typed"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    """As seen from the repository, from the package, or from the page."""
    named = set(re.findall(r"`([\w.]+(?:/[\w.-]+)+\.(?:py|md|txt|csv|ipynb))`", page.read_text()))
    seen_from = (ROOT, ROOT / "triton_relattn", page.parent)
    assert not [name for name in named if not any((folder / name).exists() for folder in seen_from)]


def test_make_targets_exist() -> None:
    """Every ``make target`` that a page names is in the Makefile, and ``make help`` tells of it."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"`make ([a-z-]+)", page.read_text())}
    assert {"setup", "test", "docs", "help"} <= named | {"setup"} <= targets, named - targets
    assert set(re.findall(r"^([a-z-]+):.*?## ", makefile, re.MULTILINE)) == targets


def test_figures_are_drawn_anew(tmp_path: Path) -> None:
    """docs/figures.py still draws what docs/_static has. (Their bytes depend on the version of matplotlib.)"""
    pytest.importorskip("matplotlib")
    subprocess.run([sys.executable, ROOT / "docs" / "figures.py", "--out", tmp_path], check=True)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (ROOT / "docs" / "_static").glob("*.svg")} and len(drawn) == 3


WITH_EXAMPLES = (functional, grids, positions, tables, merging, table, attention, replacement, families, every)


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_docstring_examples(module: Any) -> None:
    if module is replacement:
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    names = {"torch": torch, "fused_relative_attention": fused_relative_attention}
    result = doctest.testmod(module, extraglobs=names)
    assert result.attempted > 0 and result.failed == 0


def test_support_table() -> None:
    """The table's columns are the implementations; its dtypes and widths are those of the predicate that chooses one."""
    rows = {
        cells[0]: cells[1:]
        for line in USAGE.split("\n## Which implementation runs\n")[1].split('`implementation="..."`')[0].splitlines()
        if line.startswith("|")
        for cells in [cells_of(line)]
    }
    assert [name.strip('`"') for name in rows[""]] == list(IMPLEMENTATIONS)
    assert {dtype for dtype in (torch.float16, torch.bfloat16, torch.float32) if dtype in TRITON_DTYPES} == set(TRITON_DTYPES)
    assert rows["float16, bfloat16, float32"] == ["yes", "yes", "yes"] and rows["float64"] == ["no", "yes", "yes"]
    assert rows["widths of query and value"][0] == f"up to {MAX_TRITON_WIDTH} each"
    assert rows["width of rel_query"][0] == f"up to {MAX_TRITON_WIDTH}"


def test_every_family_is_named() -> None:
    table = TRANSFORMERS.split("\n| family |")[1].split("\n\n")[0]
    rows = [cells_of(line) for line in table.splitlines()[2:]]
    assert [row[:2] for row in rows] == [[family.name, family.adds] for family in supported_families()]
    assert f"[{len(rows)} families](docs/transformers.md)" in README
    assert all(len(row) == 3 for row in rows)


def test_tables_have_the_columns_of_their_headings() -> None:
    """No row of one table has slipped into another."""
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            lines = block.splitlines()
            widths = {len(re.sub(r"`[^`]*`", "", line).strip().strip("|").split("|")) for line in lines[1:]}
            assert len(widths) == 1, (page.name, lines[0])


def test_errors_know_the_names_of_other_libraries() -> None:
    """An error names what each argument in the table of docs/migrate.md is called here, if it has another name."""
    lines = [line for line in (ROOT / "docs" / "migrate.md").read_text().splitlines() if line.startswith("| ")]
    spans = [span for line in lines[1:] for cell in cells_of(line)[2:] for span in re.findall(r"`(\w+)(?:=[^`]*)?`", cell)]
    known = {*OTHER_NAMES, *NOT_NEEDED, *inspect.signature(fused_relative_attention).parameters}
    assert len(set(spans)) > 10 and set(spans) <= known


def test_costs_are_those_of_the_budgets() -> None:
    """The tables under "What it costs" show tiles, spills and cycles of bench/budgets, and have all kernels that these have."""
    pytest.importorskip("triton")
    from bench.cycles.calls import STORED, designs, moved

    with (ROOT / "bench" / "budgets" / "triton-3.7.csv").open() as file:
        rows = list(csv.DictReader(file))
    budgets = {(row["kernel"], f"{row['target']}, {row['head_dim']}", row["features"]): row for row in rows}

    def cycles(*key: str) -> str:
        row = budgets.get(key, {})  # type: ignore[arg-type]
        return ", ".join(f"{int(row[name]):,}" for name in ("cycles", "far_cycles") if row.get(name))

    page = (ROOT / "triton_relattn" / "kernels" / "DERIVATION.md").read_text().split("\n## What it costs\n")[1]
    blocks = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)[:4]
    full, totals, clamped, models = ([cells_of(line) for line in block.splitlines()[2:]] for block in blocks)
    for lines, name, kernels_of_table in (
        (full, "full", (*KERNELS, "minimal")),
        (models, "transformer_xl", KERNELS),
        (clamped, "clamp", ("forward", "dq", "dkv")),
    ):
        known = {key[:2] for key in budgets if key[2] == name and key[0] in kernels_of_table}
        assert {(kernel, where) for kernel, where, *_ in lines} == known and len(lines) == len(known), name
    for kernel, where, *found in full:
        row, without = budgets[kernel, where, "full"], budgets.get((kernel, where, "none"))
        stages = row["num_stages"] + (" stage" if row["num_stages"] == "1" else " stages")
        carry = row["carry"] if kernel in ("forward", "dq") else ""  # the others do not loop over the keys
        rotation = row["rotation"] if kernel not in ("dtable", "dq_from_ds") else ""
        tile = [f"{row['block_m']} x {row['block_n']}, {row['num_warps']} warps, {stages}", carry or "-", rotation or "-"]
        ratio = "" if without is None else f"{int(row['cycles']) / int(without['cycles']):.2f}"
        figures = [f"{int(row['spill_bytes']):,}", cycles(kernel, where, "full"), cycles(kernel, where, "none"), ratio]
        assert found == [*tile, *figures], (kernel, where)
    assert [where for where, *_ in totals] == list(dict.fromkeys(where for _, where, *_ in full))
    for where, *found in totals:
        machine = MACHINES[where.split(",")[0]]
        stored = moved(SCORES * STORED, machine)  # loops that read dS take as long at least
        plain_cycles = sum(int(budgets[name, where, "none"]["cycles"]) for name in ("dq", "dkv"))
        of_kernels: dict[str, float] = {
            name: int(budgets[name, where, "full"]["cycles"]) for name in ("dq", "dkv", "dtable", "dq_from_ds")
        }
        of_kernels |= {name: max(of_kernels[name], stored) for name in ("dtable", "dq_from_ds")}
        ways = designs(of_kernels, machine)
        either = (ways["query from q.k, writing hidden"], ways["query from dS, writing hidden"])
        expected = [f"{plain_cycles:,}", *(f"{total:,.0f} ({total / plain_cycles:.2f})" for total in either)]
        assert found == expected, (where, expected)
    for kernel, where, near, far, plain in clamped:
        assert f"{near}, {far}" == cycles(kernel, where, "clamp") and plain == cycles(kernel, where, "none"), (kernel, where)
    for kernel, where, *found in models:
        names = ("shaw", "transformer_xl", "t5")
        assert found == [cycles(kernel, where, name) for name in names], (kernel, where)
    # Further down: how many times as long calls take as without a table, by the predictions of whole calls.
    times = predicted("sm_90")
    of_calls = [cells_of(line) for line in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)[4].splitlines()[2:]]
    cases = [
        *("b4 h32 n4096 d64 full", "b4 h16 n4096 d128 full", "b4 h32 n4096 d64 r129", "b4 h16 n4096 d128 r129"),
        *("b32 h8 n200 d64 full", "b8 h12 n2048 d64 r1047 p2c", "b1 h64:8 n8192 d128 dr16 r1024 zero causal"),
    ]
    for name, (_, *found) in zip(cases, of_calls, strict=True):
        both = [
            [times[f"{name} bf16", method, each] for each in ("forward", "backward", "forward+backward")]
            for method in ("triton_relattn", "plain")
        ]
        assert found == [f"{ours / plain:.2f}" for ours, plain in zip(*both, strict=True)], name


def predicted(target: str) -> dict[tuple[str, ...], float]:
    """The predicted milliseconds of calls on a GPU, by case, method and direction."""
    rows = read(ROOT / "bench" / "predictions.csv")
    calls = [row for row in rows if (row["target"], row["verb"]) == (target, "speed")]
    return {(row["case"], row["method"], row["direction"]): float(row["predicted_ms"]) for row in calls}


def test_expected_times_on_an_a100() -> None:
    """Those of the predictions, to two digits, and how many times as long as without the term."""
    page, times = (ROOT / "docs" / "kernels-cost.md").read_text().split("## Expected on an A100\n")[1], predicted("sm_80")
    lines = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)[0].splitlines()[2:]
    cases = ["b4 h32 n4096 d64 full", "b4 h16 n4096 d128 full", "b4 h32 n4096 d64 r129", "b32 h8 n200 d64 full"]
    cases += ["b32 h8 n1500 d64 full", "b8 h12 n2048 d64 r1047 p2c", "b1 h32 n16384 d64 full"]
    for name, line in zip(cases, lines, strict=True):
        ours, plain = (
            [times[f"{name} bf16", method, direction] for direction in ("forward", "backward")]
            for method in ("triton_relattn", "plain")
        )
        expected = [[float(f"{each:.2g}") for each in group] for group in (ours, plain)]
        expected.append([round(a / b, 2) for a, b in zip(ours, plain, strict=True)])
        assert [[float(each) for each in cell.split(" / ")] for cell in cells_of(line)[1:]] == expected, name


RESULTS = ROOT / "bench" / "results" / "cpu"


def test_readme_figures() -> None:
    """README's claims are those of the rows, all lengths among them."""
    assert readme.BEGIN + readme.text() + readme.END in README


OF_THE_PAPER = {650: ("108 + 1.7", "0.17 + 1.7"), 2048: ("1,100 + 16", "0.52 + 16"), 3500: ("3,100 + 49", "0.90 + 49")}
"""Huang et al., table 1: embeddings and logits of Shaw and of Huang in MB, for a layer and head, by length."""


def test_the_table_of_huang() -> None:
    """The paper's figures, beside the bytes of a row for each distance to the past, and the peak above plain attention's."""
    peaks = readme.measured("huang.csv", "forward", "peak_bytes")
    assert set(peaks) == set(OF_THE_PAPER)
    benchmarks = [cells_of(line) for line in BENCHMARKS.splitlines()]
    for length, each in peaks.items():
        ours = f"{length * 64 * 4 / 1e6:.2f} + {(each[OURS] - each['plain']) / 1e6:.1f}"
        assert [f"{length:,}", *OF_THE_PAPER[length], ours] in benchmarks, ours
        row = [f"{length:,}", *(f"{each[method] / 1e6:,.1f}" for method in ("shaw_gather", "skewing", OURS, "plain"))]
        assert row in benchmarks, row


def test_families_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--families"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["family", "adds", "to", "q", "·", "k", "since"]
    for line, family in zip(lines, supported_families(), strict=True):
        assert line.startswith(f"{family.name} ") and f" {family.adds} " in line and line.endswith(f" {family.since}")


def test_environment_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert f"torch {torch.__version__}" in printed and "device: " in printed and "implementation: " in printed
    assert all(family.name in printed for family in supported_families())


@pytest.mark.parametrize("name", ["query", "value", "rel_query"])
def test_widths_that_the_kernels_do_not_take(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The support table's limit is the predicate's, for each of the tensors that it names."""
    monkeypatch.setattr(kernels, "kernels_are_interpreted", lambda: True)
    tensors: dict[str, Any] = {each: torch.zeros(1, 1, 1, MAX_TRITON_WIDTH) for each in ("query", "value", "rel_query")}
    assert can_run_triton(**tensors)
    tensors[name] = torch.zeros(1, 1, 1, MAX_TRITON_WIDTH + 1)
    assert not can_run_triton(**tensors)
