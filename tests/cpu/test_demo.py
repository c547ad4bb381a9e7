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
from bench.measure import point
from bench.report import summary
from bench.report.rows import STAMP, read
from bench.verbs.speed import COLUMNS
from examples.demo import __main__ as demo
from examples.demo.layer import compare
from examples.demo.sweep import COMPARED, DIRECTION, sweep
from examples.music import tokens
from triton_relattn._blockwise import attention as blockwise
from triton_relattn._core.spec import DIFFERENTIABLE

LIMIT = 4 << 30


def instead_of_a_process(case: Case, *_: Any) -> dict[str, Any]:
    """A point without the start of a process: milliseconds and bytes that grow with the square of the length."""
    return {"status": "ok", "p50_ms": 1.0 * case.length, "peak_bytes": (1 << 20) * case.length**2}


@pytest.mark.thorough
def test_runs_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything for real, processes included, at the shortest length that memory can be told at."""
    assert demo.main(["--device", "cpu", "--quick", "--max-length", "256", "--out", str(tmp_path)]) == 0
    rows = read(tmp_path / "demo.csv")
    assert list(rows[0]) == [*COLUMNS, *STAMP] and [row["method"] for row in rows] == list(COMPARED)
    assert all(row["status"] == "ok" and float(row["p50_ms"]) > 0 and int(row["peak_bytes"]) > 0 for row in rows)
    assert rows[0]["config"] == "blockwise"
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    printed, progress = capsys.readouterr()
    assert "BWV 253" in printed and "gradient of table" in printed and "Peak memory" in printed
    lines = progress.splitlines()
    assert len(lines) == len(COMPARED) and lines[0].startswith(f"[1/{len(COMPARED)}] {OURS}, 256: ") and "\r" not in progress


def test_a_wrong_gradient_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A table gradient that is off by a thousandth is found, named, and ends the run before anything is measured."""
    right = blockwise.backward

    def wrong(*arguments: Any) -> tuple[Any, ...]:
        gradients = dict(zip(DIFFERENTIABLE, right(*arguments), strict=True))
        assert gradients["rel_key"] is not None
        return (*(gradients | {"rel_key": 1.001 * gradients["rel_key"]}).values(),)

    monkeypatch.setattr(blockwise, "backward", wrong)
    assert demo.main(["--device", "cpu", "--max-length", "64", "--out", str(tmp_path)]) == 1
    assert "gradient of table is off by" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("factor", "problem"), [(1.0, None), (0.0, "all zero"), (float("nan"), "not finite"), (1.01, "more than")]
)
def test_compare(factor: float, problem: str | None) -> None:
    """Right passes; zero, NaN and wrong say which they are."""
    golden = torch.linspace(0.1, 1, 10, dtype=torch.float64)
    found = compare("it", factor * golden.float(), golden.float(), golden).problem
    assert found is None if problem is None else problem in str(found)


def test_what_runs_out_of_memory_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(case: Case, *others: Any) -> dict[str, Any]:
        found = instead_of_a_process(case)
        return found if found["peak_bytes"] <= LIMIT else {"status": "out of memory: more than 4 GiB"}

    monkeypatch.setattr(point, "measure_in_own_process", limited)
    rows = list(sweep([8, 32, 64, 128, 256], "fp32", "cpu", LIMIT, budget=1e6))
    statuses = {row["seqlen"]: row["status"] for row in rows if row["method"] == OURS}
    failed = "out of memory: more than 4 GiB"
    assert statuses == {8: "ok", 32: "ok", 64: "ok", 128: failed, 256: f"not tried: {failed} at 128"}
    measured = [row | {"peak_bytes": row.get("peak_bytes")} for row in rows]
    assert summary.exponent(summary.points(measured, OURS, DIRECTION, "peak_bytes")) == pytest.approx(2)


@pytest.mark.parametrize(("budget", "status"), [(0.0, "skipped: no time left"), (20.0, "skipped: would take about 32 s")])
def test_no_time_left_is_a_row(budget: float, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(point, "measure_in_own_process", lambda *_: {"status": "ok", "p50_ms": 2e3, "peak_bytes": 1})
    *_, last = sweep([16, 64], "fp32", "cpu", LIMIT, budget)
    assert last["status"].startswith(status)


def test_interrupt_keeps_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at the second point: the first is in the CSV file and in the figure."""
    calls: list[str] = []

    def interrupted(case: Case, method: str, *_: Any) -> dict[str, Any]:
        if calls:
            raise KeyboardInterrupt
        calls.append(method)
        return instead_of_a_process(case)

    monkeypatch.setattr(point, "measure_in_own_process", interrupted)
    demo.main(["--device", "cpu", "--max-length", "16", "--out", str(tmp_path)])
    assert [row["method"] for row in read(tmp_path / "demo.csv")] == [OURS]
    assert (tmp_path / "demo.png").exists()


def test_music_is_bach() -> None:
    """The first chord of BWV 253, A major over an eighth note, then another eighth in which all four voices hold."""
    music = tokens.chorales(1024)
    assert music.tokens[:4].tolist() == [73, 69, 64, 45]
    assert music.tokens[4:8].tolist() == [tokens.HOLD] * 4
    assert music.notes > 500 and len(music.tokens) == 1024


def test_missing_music_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "music21", None)
    assert demo.main(["--device", "cpu", "--max-length", "16"]) == 1
    assert "pip install music21" in capsys.readouterr().err
