"""The verbs ``compile`` and ``tune`` of ``python -m bench``, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tqdm")

from bench import compile as verb
from bench import tune
from bench.__main__ import main
from bench.cases import attention as cases
from bench.report.rows import STAMP, read
from triton_relattn.kernels.config import profiles, selection
from triton_relattn.kernels.config.selection import TileConfig

TASK = tune.Task(cases.Case(1, 2, 300, 64), True, "forward", "sm_90")


@pytest.mark.thorough
def test_compile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row per kernel, in the order in which they were asked for, and a summary."""
    path = tmp_path / "rows.csv"
    wanted = ("--targets", "sm_90,gfx942", "--features", "none,full", "--kernels", "forward", "--head-dims", "64")
    assert main(["compile", *wanted, "--jobs", "1", "--csv", str(path)]) == 0
    rows = read(path)
    assert list(rows[0]) == [*verb.COLUMNS, *STAMP]
    assert [(row["target"], row["features"]) for row in rows] == [(a, b) for a in ("sm_90", "gfx942") for b in ("none", "full")]
    for row in rows:
        assert (row["kernel"], row["fits"], row["status"], row["device"]) == ("forward", "True", "ok", "compiled, not run")
        assert 32 < int(row["registers"]) <= 512 and int(row["spill_bytes"]) <= 256 and int(row["shared_bytes"]) > 1024
        assert 0 < int(row["shuffles"]) < int(row["loop_instructions"]) and int(row["matrix_instructions"]) >= 8
        assert (float(row["loop_ratio"]) > 1) == (row["features"] == "full")
    printed = capsys.readouterr().out
    assert "gfx942, full" in printed and "4 of 4 kernels" in printed


def test_kernels_that_do_not_compile_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such\ninstruction")

    monkeypatch.setattr(verb, "compiled", fail)
    row = verb.row(verb.KernelCase("dtable", "sm_120", "fp16", 32, "t5"))
    assert row["status"] == "RuntimeError: no such instruction" and row["block_m"] > 0 and "registers" not in row


@pytest.mark.thorough
def test_tune_ranks_and_says_that_nothing_was_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cases.GROUPS, "small", [TASK.case])
    monkeypatch.setattr(selection, "candidates", lambda *_: [TileConfig(64, 32, 4, 2), TileConfig(128, 128, 4, 2)])
    path = tmp_path / "tune.csv"
    arguments = ["--cases", "small", "--kernels", "forward", "--reach", "9", "--jobs", "1", "--target", "sm_90"]
    assert main(["tune", *arguments, "--csv", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "nothing is run, checked or timed" in printed and "no profile was written" in printed
    assert not profiles.user_profile_path("sm_90").exists()
    rows = [row for row in read(path) if row["coverage"] == "full"]
    assert [(row["is_default"], row["is_chosen"], row["status"]) for row in rows] == [
        (is_default, "False", "ok") for is_default in ("True", "False", "False")
    ]
    assert not any(row["p50_ms"] or row["error"] for row in rows)
    costs = [float(row["instructions_per_score"]) for row in rows]
    assert costs[1:] == sorted(costs[1:]) and min(costs) > 0
