"""The main job: it runs, writes what it says, and fails when a result is wrong."""

from __future__ import annotations

import csv
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("music21")
pytest.importorskip("tqdm")

from triton_relattn.demo.methods import HEAD_DIM, METHODS, OURS

from bench.measure.memory import Measurement
from bench.report import text as report
from examples.demo import __main__ as run
from examples.demo import sweep
from examples.demo.layer import compare
from examples.music import tokens as music
from triton_relattn import blockwise
from triton_relattn.__main__ import describe
from triton_relattn.spec import DIFFERENTIABLE

COLUMNS = "method implementation device dtype batch heads head_dim length milliseconds peak_bytes status torch triton".split()
QUADRATIC_BYTES = 1 << 20


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        reader = csv.DictReader(file)
        assert reader.fieldnames == COLUMNS
        return list(reader)


def instead_of_a_process(method: str, length: int, dtype: str, timeout: float) -> Measurement:
    """A point without the start of a process: milliseconds and bytes that grow with the square of the length."""
    return Measurement(1.0 * length, QUADRATIC_BYTES * length**2)


def test_runs_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything for real, processes included, at the shortest length that memory can be told at."""
    assert run.main(["--device", "cpu", "--quick", "--max-length", "256", "--out", str(tmp_path)]) == 0
    rows = rows_of(tmp_path / "demo.csv")
    assert [row["method"] for row in rows] == list(METHODS)
    assert all(row["status"] == "ok" and float(row["milliseconds"]) > 0 and int(row["peak_bytes"]) > 0 for row in rows)
    assert rows[0]["implementation"] == "blockwise"
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "BWV 253" in printed and "gradient of table" in printed and "peak memory" in printed


def test_a_wrong_gradient_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A table gradient that is off by a thousandth is found, named, and ends the run before anything is measured."""
    right = blockwise.backward

    def wrong(*arguments: Any) -> tuple[Any, ...]:
        gradients = dict(zip(DIFFERENTIABLE, right(*arguments), strict=True))
        assert gradients["rel_key"] is not None
        return (*(gradients | {"rel_key": 1.001 * gradients["rel_key"]}).values(),)

    monkeypatch.setattr(blockwise, "backward", wrong)
    assert run.main(["--device", "cpu", "--max-length", "64", "--out", str(tmp_path)]) == 1
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


def test_points_beyond_the_memory_limit_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A point that is predicted to need more than the limit is not run; its row says how much it would need."""
    monkeypatch.setattr(sweep, "_in_own_process", instead_of_a_process)
    rows = list(sweep.sweep(describe("cpu", HEAD_DIM), [32, 64, 128], "float32", budget=1e6))
    statuses = {row.length: row.status for row in rows if row.method == OURS}
    assert statuses == {32: "ok", 64: "ok", 128: "skipped: would need about 16 GiB"}
    assert report.exponent(report.measured(rows, OURS, "peak_bytes")) == pytest.approx(2)


def test_no_time_left_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_in_own_process", instead_of_a_process)
    rows = list(sweep.sweep(describe("cpu", HEAD_DIM), [16], "float32", budget=0.0))
    assert [row.status for row in rows] == ["skipped: no time left"] * len(METHODS)


@pytest.mark.parametrize(
    ("returncode", "stderr", "status"),
    [(-9, "", "out of memory: ended by the system"), (1, "Traceback\nValueError: no", "failed: ValueError: no")],
)
def test_a_process_that_dies_is_a_row(monkeypatch: pytest.MonkeyPatch, returncode: int, stderr: str, status: str) -> None:
    def dies(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], returncode, stdout="", stderr=stderr)

    monkeypatch.setattr(subprocess, "run", dies)
    assert sweep._in_own_process(OURS, 16, "float32", 1.0) == Measurement(None, None, status)


def test_interrupt_keeps_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at the second point: the first is in the CSV file and in the figure."""
    calls: list[str] = []

    def interrupted(method: str, length: int, dtype: str, timeout: float) -> Measurement:
        if calls:
            raise KeyboardInterrupt
        calls.append(method)
        return instead_of_a_process(method, length, dtype, timeout)

    monkeypatch.setattr(sweep, "_in_own_process", interrupted)
    run.main(["--device", "cpu", "--max-length", "16", "--out", str(tmp_path)])
    assert [row["method"] for row in rows_of(tmp_path / "demo.csv")] == [OURS]
    assert (tmp_path / "demo.png").exists()


def test_music_is_bach() -> None:
    """The first chord of BWV 253, A major over an eighth note, then another eighth in which all four voices hold."""
    tokens = music.chorales(1024)
    assert tokens.tokens[:4].tolist() == [73, 69, 64, 45]
    assert tokens.tokens[4:8].tolist() == [music.HOLD] * 4
    assert tokens.notes > 500 and len(tokens.tokens) == 1024


def test_missing_music_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "music21", None)
    assert run.main(["--device", "cpu", "--max-length", "16"]) == 1
    assert 'pip install "triton_relattn[demo]"' in capsys.readouterr().err


def test_csv_has_a_column_for_every_field() -> None:
    assert [field.name for field in dataclasses.fields(sweep.Row)] == COLUMNS
