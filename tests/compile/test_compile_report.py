"""The verb ``compile`` of ``python -m bench``."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import pytest

from bench import compile as verb
from bench.report.rows import STAMP, read

COLUMNS = (
    "kernel,target,dtype,head_dim,rel_dim,features,block_m,block_n,num_warps,num_stages,carry,rotation,max_registers,registers,spill_bytes,shared_bytes,fits,"
    "loop_instructions,plain_loop_instructions,loop_ratio,matrix_instructions,shuffles,programs,cycles,far_cycles,wgmma_products,"
    "wgmma_groups,limit,status"
).split(",")


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.thorough
def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row per kernel, in the order in which they were asked for, and a summary."""
    path = tmp_path / "rows.csv"
    wanted = ("--targets", "sm_90,gfx942", "--features", "none,full", "--kernels", "forward", "--head-dims", "64")
    assert verb.run(options(*wanted, "--jobs", "1", "--csv", str(path))) == 0
    assert next(csv.reader(path.open())) == [*COLUMNS, *STAMP]
    rows = read(path)
    assert [(row["target"], row["features"]) for row in rows] == [
        (target, name) for target in ("sm_90", "gfx942") for name in ("none", "full")
    ]
    for row in rows:
        assert (row["kernel"], row["dtype"], row["head_dim"], row["fits"], row["status"]) == (
            "forward",
            "bf16",
            "64",
            "True",
            "ok",
        )
        assert 32 < int(row["registers"]) <= 512 and int(row["spill_bytes"]) <= 256 and int(row["shared_bytes"]) > 1024
        assert 0 < int(row["shuffles"]) < int(row["loop_instructions"]) and int(row["matrix_instructions"]) >= 8
        assert (row["rel_dim"], row["loop_ratio"] == "1") == (("64", False) if row["features"] == "full" else ("", True))
        assert 1 <= float(row["loop_ratio"]) < 3
        ratio = int(row["loop_instructions"]) / int(row["plain_loop_instructions"])
        assert float(row["loop_ratio"]) == pytest.approx(ratio, rel=1e-3)
        assert (float(row["cycles"] or 0) > 128) == (row["target"] == "sm_90") and row["far_cycles"] == ""
        assert row["wgmma_products"] == row["wgmma_groups"] and ("%" in row["limit"]) == (row["target"] == "sm_90")
        assert row["device"] == "compiled, not run"
    printed = capsys.readouterr().out
    assert "gfx942, full" in printed and "4 of 4 kernels" in printed


def test_kernels_that_do_not_compile_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such\ninstruction")

    monkeypatch.setattr(verb, "compiled", fail)
    row = verb.row(verb.KernelCase("dtable", "sm_120", "fp16", 32, "t5"))
    assert row["status"] == "RuntimeError: no such instruction" and row["block_m"] > 0 and "registers" not in row


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--targets", "sm_90,sm_12"), "sm_12"),
        (("--features", "fuller"), "fuller"),
        (("--kernels", "forward,backward"), "backward"),
        (("--dtypes", "int8"), "int8"),
        (("--head-dims", "64,many"), "many"),
    ],
)
def test_unknown_names(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options(*words)
    assert f"unknown: {message}; there are" in capsys.readouterr().err


def test_budget_keeps_what_was_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the same kernel are replaced, others stay, failures are left out."""
    monkeypatch.setattr(verb, "BUDGET", tmp_path / "budgets" / "triton.csv")
    first, second = verb.KernelCase("dq", "sm_90", "bf16", 64, "t5"), verb.KernelCase("dq", "sm_80", "bf16", 64, "t5")

    def row(case: verb.KernelCase, registers: int, status: str = "ok") -> dict[str, Any]:
        return {**vars(case), **dict.fromkeys(verb.COUNTS, 1), "registers": registers, "status": status}

    verb.write_budget([row(first, 100), row(second, 200)])
    verb.write_budget([row(first, 110), row(second, 0, "RuntimeError")])
    assert {case: row["registers"] for case, row in verb.budgets().items()} == {first: "110", second: "200"}
