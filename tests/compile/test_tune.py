"""The search for configurations without a GPU: a ranking by what the compiled kernels take, and no profile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("tqdm")

from bench import tune
from bench.__main__ import main
from bench.cases import attention as cases
from bench.report.rows import read
from triton_relattn.kernels import tuning
from triton_relattn.kernels.config import profiles, selection
from triton_relattn.kernels.config.selection import TileConfig

TASK = tune.Task(cases.Case(1, 2, 300, 64), True, "forward", "sm_90")


@pytest.mark.thorough
def test_ranks_and_says_that_nothing_was_timed(
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
    assert [row["is_default"] for row in rows] == ["True", "False", "False"]
    assert {row["is_chosen"] for row in rows} == {"False"} and not any(row["p50_ms"] or row["error"] for row in rows)
    assert rows[0]["status"] == "ok" and float(rows[0]["instructions_per_score"]) > 0 and int(rows[0]["registers"]) > 0
    assert {row["status"] for row in rows} == {"ok"} and all(float(row["cycles"]) > 0 for row in rows)
    large = next(row for row in rows if row["block_n"] == "128")
    assert int(large["spill_bytes"]) > 1000  # which costs more than half the tile
    assert [float(row["cycles"]) for row in rows[1:]] == sorted(float(row["cycles"]) for row in rows[1:])


def test_candidates_begin_with_the_default_and_stay_near() -> None:
    tiles = tune.candidates(TASK, 2)
    assert tiles[0] == selection.select("forward", "sm_90", torch.bfloat16, 64, "full")
    assert len(tiles) == len(set(tiles)) > 10
    assert {tuning.steps_apart(tiles[0], tile) for tile in tiles[1:]} == {1, 2}
    assert all(tile.why_invalid("sm_90", True) is None for tile in tiles)
    assert len(tune.candidates(TASK, 100)) == len(selection.candidates("forward", "sm_90", True))


def test_a_task_has_the_conditions_of_its_launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A call gets the configuration that the search has saved for a case of its size; a longer call does not."""
    monkeypatch.setenv("TRITON_RELATTN_CACHE", str(tmp_path))
    tuned = profiles.Row(TASK.conditions, TileConfig(32, 16, 2, 1), 1.0, 2.0)
    profiles.save(profiles.user_profile_path("sm_90"), "sm_90", [tuned])
    selection.forget()
    try:
        assert TASK.call.tile("forward") == TileConfig(32, 16, 2, 1)
        longer = tune.Task(TASK.case.resized(3000), True, "forward", "sm_90")
        assert longer.call.tile("forward") == longer.default == TASK.default
    finally:
        selection.forget()


def test_one_task_for_a_row() -> None:
    """Cases of the same bucket of lengths are one task; the dtable kernel needs a table."""
    some = [cases.Case(1, 2, length, 64) for length in (300, 400, 600)]
    tasks = tune.tasks_of(some, selection.KERNELS, "sm_90")
    assert len(tasks) == 2 * (4 + 3) and len({task.conditions for task in tasks}) == len(tasks)
