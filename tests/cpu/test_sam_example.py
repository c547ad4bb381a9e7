"""The example that measures a layer of SAM, on a small one."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from bench.report.rows import read
from examples.sam import main


@pytest.mark.thorough
def test_measures_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Writes rows and a figure; with --processor-time only a table."""
    assert main(["--sides", "96", "--small", "--processor-time"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["eager", "sdpa", "triton_relattn"]
    assert main(["--sides", "96,160", "--small", "--seconds", "0.1", "--out", str(tmp_path)]) == 0
    rows = read(tmp_path / "sam.csv")
    assert {row["method"] for row in rows} == {"triton_relattn", "eager", "sdpa"} and {row["status"] for row in rows} == {"ok"}
    assert {int(row["seqlen"]) for row in rows} == {36, 100} and "160 x 160" in capsys.readouterr().out
    assert (tmp_path / "sam.png").read_bytes().startswith(b"\x89PNG")
