"""What the README and the docstrings show runs, and what the README says of support is so."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from triton_relattn import can_run_triton, functional, fused_relative_attention, kernels, merging, positions, tables
from triton_relattn.__main__ import main
from triton_relattn._core.implementations import IMPLEMENTATIONS, MAX_TRITON_WIDTH, TRITON_DTYPES
from triton_relattn.integrations.transformers import families, replacement, supported_families
from triton_relattn.nn import attention, table

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_readme_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, as one would type them."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    shapes = []
    for example in examples:
        exec(example, names)
        shapes.append(names["out"].shape)
    assert names["table"].grad.any()
    heads, model = (1, 8, 1024, 64), (2, 100, 512)
    assert shapes == [heads, heads, model, (2, 60, 512), heads, (1, 100, 1024), heads]
    assert (tmp_path / "maps.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("module", [functional, positions, tables, merging, table, attention, replacement, families])
def test_docstring_examples(module: Any) -> None:
    if module is replacement:
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    names = {"torch": torch, "fused_relative_attention": fused_relative_attention}
    result = doctest.testmod(module, extraglobs=names)
    assert result.attempted > 0 and result.failed == 0


def test_readme_support_table() -> None:
    """Its columns are the implementations, its dtypes and widths those of the predicate that decides."""
    rows = {
        cells[0]: cells[1:]
        for line in README.splitlines()
        if line.startswith("|")
        for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
    }
    assert [name.strip('`"') for name in rows[""]] == list(IMPLEMENTATIONS)
    assert {dtype for dtype in (torch.float16, torch.bfloat16, torch.float32) if dtype in TRITON_DTYPES} == set(TRITON_DTYPES)
    assert rows["float16, bfloat16, float32"] == ["yes", "yes", "yes"] and rows["float64"] == ["no", "yes", "yes"]
    assert rows["widths of query and value"][0] == f"up to {MAX_TRITON_WIDTH} each"
    assert rows["width of rel_query"][0] == f"up to {MAX_TRITON_WIDTH}"


def test_readme_names_every_family() -> None:
    table = README.split("\n| family |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in table.splitlines()[2:]]
    assert rows == [[family.name, family.adds] for family in supported_families()]


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
