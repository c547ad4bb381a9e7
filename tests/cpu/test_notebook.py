"""The notebook in examples/ runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def test_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The cells run in order, without % commands. They assert that results match the stock model's."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(re.sub(r"^%.*\n", "", "".join(cell["source"]), flags=re.MULTILINE), names)
    assert names["replaced"] and 2 * names["fused_mib"] < names["stock_mib"] and len(names["figure"].axes) == 6
    assert capsys.readouterr().out.count("MiB") == 2 and not list(tmp_path.iterdir())
