"""``python -m bench compile``, and ``python -m bench host``, which measures the time of the host code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import compile as verb
from bench.__main__ import main
from bench.report.rows import STAMP, read
from bench.verbs import host
from triton_relattn import _implementations as implementations


@pytest.mark.thorough
def test_compile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One row per kernel, in the requested order, and a summary."""
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
@pytest.mark.parametrize("kind", host.KINDS)
def test_host_times(kind: str) -> None:
    """Parts take less time than the whole, and patches are undone."""
    before = implementations._why_no_kernels
    found = host.measure(kind, 2)
    assert implementations._why_no_kernels is before and tuple(found) == host.COLUMNS
    assert 0 < found["first kernel"] < found["forward"] < found["both"]
    assert 0 < found["first of backward"] < found["backward"] < found["both"]
