"""make gpu without a GPU: every part runs on a stub of the driver, with times that are made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from bench.gpu.__main__ import PARTS, why_not
from bench.gpu.report import PACKED
from bench.gpu.stub import NAME, SAYS
from bench.report.rows import read
from tests.conftest import PATIENCE

ROOT = Path(__file__).parents[2]
NCU = """#!/bin/sh
# As NVIDIA's ncu: the names of its counters, or options, a program that it runs, and a table
[ "$1" = --query-metrics ] && { echo lts__t_bytes; echo dram__bytes_read; exit; }
while [ "${1#--}" != "$1" ]; do [ "$1" = --csv ] && shift || shift 2; done
"$@" || exit
echo '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
echo '"0","forward_kernel(a, b)","lts__t_bytes.sum","byte","1,234"'
"""


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("part", PARTS)
def test_no_part_raises(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writes its files, and the summary says that nothing is real."""
    ncu = tmp_path / "bin" / "ncu"
    ncu.parent.mkdir()
    ncu.write_text(NCU)
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ncu.parent}{os.pathsep}{os.environ['PATH']}")
    command = [sys.executable, "-m", "bench.gpu", "--stub", "--results", str(tmp_path), "--parts", part, "--reach", "1"]
    done = subprocess.run(
        [*command, "--seconds", str(PATIENCE)], cwd=ROOT, capture_output=True, text=True, timeout=2 * PATIENCE, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert SAYS in done.stdout and "0 of 1 parts failed" in done.stdout and "Traceback" not in done.stdout
    with tarfile.open(tmp_path / PACKED) as packed:
        packed.extractall(tmp_path / "raw", filter="data")
    outcome = json.loads((tmp_path / "raw" / f"part-{part}.json").read_text())
    assert outcome["failed"] == outcome["left"] == 0 and outcome["is_done"]
    assert outcome["rows"] == 1 if part == "counters" else outcome["rows"] > 0 or part in ("tests", "sanitizer")
    assert (tmp_path / "log.txt").read_text().strip() in done.stdout
    if part in ("smoke", "variants", "speed", "memory", "flex"):
        rows = read(tmp_path / "results.csv")
        assert rows and {row["device"] for row in rows} == {NAME}
        assert all(row["p50_ms"] or row["verb"] == "memory" for row in rows if row["status"] == "ok")


def test_the_stub_is_for_machines_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert why_not("cuda", stub=True) == "there is a GPU: --stub is for machines without" and why_not("cuda") is None
