"""The demo: it runs, writes what it says, and fails when a result is wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("music21")
pytest.importorskip("tqdm")

from bench.cases.attention import Case
from bench.cases.methods import OURS
from bench.measure import processes
from bench.report.rows import read
from examples.demo import __main__ as demo
from examples.demo import layer
from examples.demo.sweep import COMPARED, sweep
from examples.music import tokens

LIMIT = 4 << 30


def point_without_process(case: Case, *_: Any) -> dict[str, Any]:
    """A measured point without starting a process: milliseconds and bytes that grow with the length, up to a limit."""
    peak = (1 << 20) * case.length**2
    return {"status": "ok", "p50_ms": 1.0 * case.length, "peak_bytes": peak} if peak <= LIMIT else {"status": "out of memory"}


@pytest.mark.thorough
def test_runs_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real run, including its processes, at the shortest length at which memory can be measured."""
    assert demo.main(["--device", "cpu", "--quick", "--max-length", "256", "--out", str(tmp_path)]) == 0
    rows = read(tmp_path / "demo.csv")
    assert [row["method"] for row in rows] == list(COMPARED)
    assert all(row["status"] == "ok" and float(row["p50_ms"]) > 0 and int(row["peak_bytes"]) > 0 for row in rows)
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "BWV 253" in printed and "gradient of table" in printed and "Peak memory" in printed


@pytest.mark.parametrize(
    ("factor", "problem"), [(1.001, "more than"), (0.0, "all zero"), (float("nan"), "not finite")], ids=["off", "zero", "NaN"]
)
def test_a_wrong_gradient_fails(
    factor: float, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table gradient that is wrong by a thousandth is detected, named, and stops the run before any measurement."""
    attend: Any = layer.fused_relative_attention

    def wrong(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor, **others: Any) -> Any:
        if table.requires_grad and table.dtype != torch.float64 and others.get("implementation") != "reference":
            table = table * 1.0
            table.register_hook(lambda gradient: factor * gradient)
        return attend(query, key, value, table, **others)

    monkeypatch.setattr(layer, "fused_relative_attention", wrong)
    assert demo.main(["--device", "cpu", "--max-length", "64", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "gradient of table" in said and problem in said and not list(tmp_path.iterdir())


def test_what_runs_out_of_memory_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "measure_in_own_process", point_without_process)
    statuses = {
        row["seqlen"]: row["status"]
        for row in sweep([8, 64, 128, 256], "fp32", "cpu", LIMIT, budget=1e6)
        if row["method"] == OURS
    }
    assert statuses == {8: "ok", 64: "ok", 128: "out of memory", 256: "not tried: out of memory at 128"}


def test_music_is_bach(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The first chord of BWV 253, A major over an eighth note, then another eighth; without music21 it says what to install."""
    music = tokens.chorales(1024)
    assert music.tokens[:8].tolist() == [73, 69, 64, 45, *[tokens.HOLD] * 4] and len(music.tokens) == 1024
    monkeypatch.setitem(sys.modules, "music21", None)
    assert demo.main(["--device", "cpu", "--max-length", "16"]) == 1
    assert "pip install music21" in capsys.readouterr().err
