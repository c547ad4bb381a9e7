"""The notebook in examples/ runs, and what it keeps of its output is small."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]


def test_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The notebook's cells run in order, without its % commands. They assert themselves that results are the stock model's."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in CELLS:
        if cell["cell_type"] == "code":
            exec(re.sub(r"^%.*\n", "", "".join(cell["source"]), flags=re.MULTILINE), names)
    assert names["replaced"] and 2 * names["fused_mib"] < names["stock_mib"]
    assert capsys.readouterr().out.count("MiB") == 2
    assert len(names["figure"].axes) == 6 and not list(tmp_path.iterdir())


def test_output_is_small() -> None:
    """Results and one picture, as it was run last; no warnings, no paths."""
    assert NOTEBOOK.stat().st_size < 200_000
    outputs = [output for cell in CELLS for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    assert all(output["output_type"] in ("stream", "execute_result") and output.get("name") != "stderr" for output in outputs)
    assert not re.search(r"/home/|/tmp/|site-packages", NOTEBOOK.read_text())
