"""What make gpu says of the times that it has measured: questions and answers, and the counters of ncu."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from bench.cases.configurations import shown
from bench.gpu.counters import rows_of
from bench.gpu.questions import GATHERS, NONE, ROTATES, SPILLS, answers, questions
from bench.gpu.report import Report
from bench.report.rows import read
from triton_relattn.kernels.config import selection

TIMES = {("forward", shown(SPILLS)): 1.0, ("forward", shown(NONE)): 2.0, ("forward", shown(ROTATES)): 1.0}
TIMES |= {("forward", shown(GATHERS)): 1.05, ("dq", "one"): 3.0, ("dq_from_ds", "other"): 1.0}


def test_answers(tmp_path: Path) -> None:
    """Each by its ratio; what was not measured is not answered."""
    (tmp_path / "raw").mkdir()
    options = argparse.Namespace(results=tmp_path, raw=tmp_path / "raw", device="cpu", arch="sm_90")
    times = TIMES | {("host", "launch cache"): 0.2, ("gpu", "speech"): 0.1}
    text = answers(questions("one", "other"), times, Report(options, "questions"))
    rows = {row["case"]: row for row in read(tmp_path / "raw" / "checks.csv")}
    assert [(row["value"], row["message"].partition(":")[0]) for row in rows.values()] == [
        ("0.500", "yes"),
        ("1.050", "no"),
        ("3.000", "yes"),
        ("", "not answered"),
        ("2.000", "yes"),
    ]
    assert rows["Is the launch cache needed?"]["message"] == "not answered: there is no time of host, Triton's search"
    assert "registers.py and band_registers.py go" in text and "bwd_dq_from_ds.py, delta.py" in text


def test_files_that_answers_name_exist() -> None:
    package = Path(__file__).parents[2] / "triton_relattn"
    for name in ("registers.py", "band_registers.py"):
        assert (package / "kernels" / "tile" / name).is_file()
    for name in ("kernels/bwd_dq_from_ds.py", "kernels/delta.py", "_core/residual.py", "kernels/launching.py"):
        assert (package / name).is_file()
    assert (package / "kernels" / "config" / "defaults.csv").is_file()
    assert selection.select("forward", "sm_90", torch.bfloat16, 64, "full") == NONE != SPILLS


def test_counters_are_read() -> None:
    """ncu prints a table among other lines; numbers may have commas."""
    lines = [
        "==PROF== Connected to process 1",
        "call",
        '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"',
        '"0","forward_kernel(a, b)","lts__t_bytes.sum","byte","1,234"',
        '"0","forward_kernel(a, b)","another","","1"',
        "==PROF== Disconnected",
    ]
    assert list(rows_of(lines)) == [("forward_kernel", "lts__t_bytes.sum", "1234", "byte")]
    assert list(rows_of(["==ERROR== no permission"])) == []
