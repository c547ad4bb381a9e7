"""The example that measures a layer of SAM, on a small one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from bench.report.rows import read
from examples.sam import main


def test_processor_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sides", "96", "--small", "--processor-time"]) == 0
    heading, _, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["96", "x", "96", "forward", "forward+backward"]
    assert [line.split()[0] for line in lines] == ["eager", "sdpa", "triton_relattn"]
    assert all(len(re.findall(r"\d m?s\b", line)) == 2 for line in lines)


@pytest.mark.thorough
def test_measures_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sides", "96,160", "--small", "--seconds", "0.1", "--out", str(tmp_path)]) == 0
    rows = read(tmp_path / "sam.csv")
    assert {row["method"] for row in rows} == {"triton_relattn", "eager", "sdpa"} and {row["status"] for row in rows} == {"ok"}
    assert {int(row["seqlen"]) for row in rows} == {36, 100}
    printed = capsys.readouterr().out
    assert "96 x 96" in printed and "160 x 160" in printed
    assert (tmp_path / "sam.png").read_bytes().startswith(b"\x89PNG") and not (tmp_path / "models.png").exists()
