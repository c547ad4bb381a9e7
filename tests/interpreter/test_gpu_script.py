"""The measurements on a GPU, run at toy sizes without one."""

from __future__ import annotations

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import timing, tune
from bench.gpu.__main__ import PARTS, main
from bench.gpu.measurements import TINY
from bench.gpu.report import COLUMNS, PACKED, RESULTS
from bench.rows import Table, read, stamp
from triton_relattn.kernels import profiles
from triton_relattn.kernels.configs import TileConfig

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "bench.gpu", "--device", "cpu", "--tiny"]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        assert reader.fieldnames == COLUMNS[path.name]
    return rows


def unpacked(folder: Path) -> Path:
    """The folder of what is packed in the end."""
    with tarfile.open(folder / PACKED) as packed:
        packed.extractall(folder / "raw", filter="data")
    return folder / "raw"


def test_all_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = signal.getsignal(signal.SIGTERM)
    arguments = ["--results", str(tmp_path), "--device", "cpu", "--tiny", "--reach", "1"]
    parts = [part for part in PARTS if part != "tests"]  # they need a GPU
    try:
        for some in (parts[:3], parts[3:]):  # in two runs: the second adds to the files
            assert main([*arguments, "--parts", ",".join(some)]) == 0, capsys.readouterr().out
    finally:
        signal.signal(signal.SIGTERM, kept)
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"log.txt", "results.csv", "speed.png", "memory.png", "profile.json", PACKED}
    raw = unpacked(tmp_path)
    assert {path.name for path in raw.iterdir()} == {*COLUMNS, "environment.json", "tune.csv"}
    assert json.loads((raw / "environment.json").read_text())["torch"] == torch.__version__
    rows = {name: rows_of(raw / name) for name in COLUMNS}
    assert all(row["status"] == "ok" for some in rows.values() for row in some)

    correctness = rows["correctness.csv"]
    assert {row["table"] for row in correctness} == {"full", "clamped", "zero", "none"}
    assert {row["dtype"] for row in correctness} == {"float16", "float32"}
    assert all(bool(row[name]) == (name != "d_rel_key" or row["table"] != "none") for row in correctness for name in RESULTS)
    kernels = Counter(row["kernel"] for row in rows["configs.csv"])
    assert kernels == {"forward": 8, "rows": 8, "columns": 8, "table": 6, "diagonals": 6}
    assert all(row["config"] for row in rows["configs.csv"])
    assert Counter(row["part"] for row in rows["checks.csv"]) == {"repeats": 4, "host": 6}
    assert all(float(row["value"]) > 0 for row in rows["checks.csv"])

    measured = read(tmp_path / "results.csv")
    assert {row["verb"] for row in measured} == {"speed", "memory"}
    of_ours = {row["direction"] for row in measured if (row["verb"], row["method"]) == ("speed", "triton_relattn")}
    assert of_ours == {*timing.DIRECTIONS, *timing.PARTS}
    assert {row["verified"] for row in measured} == {"no"}  # correctness was checked in another run
    assert all(row["p50_ms"] for row in measured if (row["verb"], row["status"]) == ("speed", "ok"))


def test_the_search_checks_and_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several configurations the fastest right one goes into the profile; a wrong one does not, however fast it is."""
    task = tune.Task(TINY[0], True, "forward", "sm_90")
    tiles = [TileConfig(64, 64, 4, 1), TileConfig(32, 32, 4, 1), TileConfig(16, 16, 4, 1), TileConfig(64, 32, 4, 1)]
    milliseconds = dict(zip(tiles, (10.0, 5.0, 3.0, 9.9), strict=True))
    forward = tune.forward

    def wrong_in_small_tiles(tensors: Any, spec: Any, config: TileConfig | None = None) -> Any:
        out, *others = forward(tensors, spec, config)
        return (1.01 * out if config == tiles[2] else out), *others

    def instead_of_time(every: Sequence[timing.Timed], *_: object) -> None:
        for timed in every:
            if timed.is_ok:
                timed.milliseconds.append(milliseconds[timed.step.before()])

    monkeypatch.setattr(tune, "candidates", lambda *_: tiles)
    monkeypatch.setattr(tune, "forward", wrong_in_small_tiles)
    monkeypatch.setattr(timing, "time_in_turn", instead_of_time)
    tune._small_call.cache_clear()
    options = argparse.Namespace(reach=1, timed=4, seconds=0.0, device="cpu", no_verify=True, profile=tmp_path / "profile.json")
    results = Table(tune.COLUMNS, stamp("sm_90"), tmp_path / "tune.csv")
    tune.tune(task, options, lambda _, tiles: [{"status": "ok", "instructions_per_score": 1.0} for _ in tiles], results)
    rows = {(int(row["block_m"]), int(row["block_n"])): row for row in read(tmp_path / "tune.csv")}
    assert rows[16, 16]["status"].startswith("wrong") and not rows[16, 16]["p50_ms"]
    assert [tile for tile, row in rows.items() if row["is_chosen"] == "True"] == [(32, 32)]
    assert profiles.load(options.profile) == {task.key: tiles[1]}

    milliseconds[tiles[1]] = 9.9  # as good as the default
    tune.tune(task, options, lambda _, tiles: [{"status": "ok", "instructions_per_score": 1.0} for _ in tiles], results)
    assert profiles.load(options.profile) == {task.key: tiles[0]}
    assert tune.unknown([task], options.profile) == []


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
    rows = rows_of(unpacked(tmp_path) / "correctness.csv")
    assert [row["status"] for row in rows] == ["FAILED", "FAILED", "error", "error"]
    assert "exceeds the budget" in rows[0]["message"]
    assert rows[2]["message"] == "RuntimeError: out of resource: shared memory"
    assert "2 failed" in capsys.readouterr().out


SANITIZER = """#!/bin/sh
# As compute-sanitizer: --tool, its name, --error-exitcode, a number, and the program
[ "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 ] || exit 3
case "$2" in
    {broken}) echo "========= Error: device not supported"; exit 1 ;;
    {finding}) echo "call: one"; echo "========= ERROR SUMMARY: 2 errors"; exit "$4" ;;
esac
shift 4
"$@" && echo "========= ERROR SUMMARY: 0 errors"
"""


@pytest.mark.parametrize(("broken", "finding"), [("none", "racecheck"), ("racecheck", "memcheck")])
def test_sanitizer(
    broken: str, finding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a tool finds is a failure, that it cannot work here is none; without one the part is left out."""
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.write_text(SANITIZER.format(broken=broken, finding=finding))
    program.chmod(0o755)
    arguments = ["--results", str(tmp_path / "results"), "--device", "cpu", "--tiny", "--parts", "sanitizer"]
    assert main(arguments) == 0
    assert "there is no compute-sanitizer" in capsys.readouterr().out
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    assert main(arguments) == 1
    rows = {row["case"]: row for row in rows_of(unpacked(tmp_path / "results") / "checks.csv")}
    assert (rows[finding]["status"], rows[finding]["value"]) == ("FAILED", "1") and "2 errors" in rows[finding]["message"]
    if broken == "racecheck":
        assert "racecheck cannot work here: ========= Error: device not supported" in capsys.readouterr().out
        assert set(rows) == {finding}
    else:
        assert (rows["memcheck"]["status"], rows["memcheck"]["value"]) == ("ok", "6")


def test_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--results", str(tmp_path / "results")]) == 2
    assert capsys.readouterr().out == "no GPU: torch.cuda.is_available() is false\n"
    assert not (tmp_path / "results").exists()


def test_interrupted_with_several_processes(tmp_path: Path) -> None:
    """What was done is kept, and the end is said."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*COMMAND, "--results", str(tmp_path), "--jobs", "2", "--parts", "correctness,configs"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "raw" / "correctness.csv").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "interrupted\n0 failed" in output
    assert all(row["status"] == "ok" for row in rows_of(unpacked(tmp_path) / "correctness.csv"))


def test_parts_are_known(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--results", str(tmp_path), "--parts", "correctness,nonsense"])
    assert list(PARTS) == ["tests", "correctness", "configs", "sanitizer", "repeats", "speed", "memory", "host", "tune"]
    assert sum(share for _, share in PARTS.values()) == pytest.approx(1)
