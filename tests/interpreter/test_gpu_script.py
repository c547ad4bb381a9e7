"""The measurements on a GPU, run at toy sizes without one."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from bench.gpu.__main__ import PARTS, main
from bench.gpu.report import COLUMNS, RESULTS

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "bench.gpu", "--device", "cpu", "--tiny"]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        assert reader.fieldnames == COLUMNS[path.name]
    return rows


def test_all_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["--results", str(tmp_path), "--device", "cpu", "--tiny"]) == 0, capsys.readouterr().out
    finally:
        signal.signal(signal.SIGTERM, kept)
    assert {path.name for path in tmp_path.iterdir()} == {*COLUMNS, "environment.json", "log.txt"}
    assert (tmp_path / "log.txt").read_text() == capsys.readouterr().out
    assert json.loads((tmp_path / "environment.json").read_text())["torch"] == torch.__version__
    rows = {name: rows_of(tmp_path / name) for name in COLUMNS}
    assert all(row["status"] == "ok" for some in rows.values() for row in some)

    correctness = rows["correctness.csv"]
    assert {row["table"] for row in correctness} == {"full", "clamped", "zero", "none"}
    assert {row["dtype"] for row in correctness} == {"float16", "float32"}
    assert all(bool(row[name]) == (name != "d_rel_key" or row["table"] != "none") for row in correctness for name in RESULTS)
    kernels = Counter(row["kernel"] for row in rows["configs.csv"])
    assert kernels == {"forward": 8, "rows": 8, "columns": 8, "table": 6}
    assert all(row["config"] for row in rows["configs.csv"])
    assert Counter(row["part"] for row in rows["checks.csv"]) == {"repeats": 4, "host": 8}
    assert all(float(row["value"]) > 0 for row in rows["checks.csv"])

    speed = rows["speed.csv"]
    ours = {"forward", "rows", "rows+columns", "backward", "forward+backward", "columns", "table"}
    assert {row["direction"] for row in speed if row["variant"] == "clipped"} == ours
    assert {row["direction"] for row in speed if row["variant"] == "plain"} == ours - {"table"}
    assert {row["direction"] for row in speed if row["variant"] == "sdpa"} == {"forward", "forward+backward"}
    assert all(row["p50_ms"] and row["commit"] is not None and row["device"] for row in speed)
    forward, backward, both = (
        float(row["tflops"]) * float(row["p50_ms"])
        for name in ("forward", "backward", "forward+backward")
        for row in speed
        if (row["variant"], row["direction"]) == ("full", name)
    )
    assert [backward / forward, both / forward] == pytest.approx([2.5, 3.5], rel=0.01)


def test_failures_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong result and a kernel that raises, and an exit status that says so."""
    from bench.gpu import checks

    def wrong(*tensors: torch.Tensor, **arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = checks.reference_attention(*tensors)
        return out * 1.01, lse

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of resource:\nshared memory")

    case = checks.Case("none", False, "float16", num_queries=5, num_keys=5)
    monkeypatch.setattr(checks, "correctness_cases", lambda tiny: [case])
    monkeypatch.setattr(checks, "OURS", wrong)
    arguments = ["--results", str(tmp_path), "--device", "cpu", "--tiny", "--parts", "correctness"]
    assert main(arguments) == 1
    monkeypatch.setattr(checks, "OURS", broken)
    assert main(arguments) == 1
    rows = rows_of(tmp_path / "correctness.csv")
    assert [row["status"] for row in rows] == ["FAILED", "FAILED", "error", "error"]
    assert "exceeds the budget" in rows[0]["message"]
    assert rows[2]["message"] == "RuntimeError: out of resource: shared memory"
    assert "2 failed" in capsys.readouterr().out


def test_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--results", str(tmp_path / "results")]) == 2
    assert capsys.readouterr().out == "no GPU: torch.cuda.is_available() is false\n"
    assert not (tmp_path / "results").exists()


def test_interrupted_with_several_processes(tmp_path: Path) -> None:
    """What was done is kept, and the end is said."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*COMMAND, "--results", str(tmp_path), "--jobs", "2"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "correctness.csv").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "interrupted\n0 failed" in output
    assert all(row["status"] == "ok" for row in rows_of(tmp_path / "correctness.csv"))


def test_parts_are_known(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--results", str(tmp_path), "--parts", "correctness,nonsense"])
    assert list(PARTS) == ["correctness", "configs", "repeats", "speed", "host"]
