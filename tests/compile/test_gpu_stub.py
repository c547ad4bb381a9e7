"""bench/gpu/check.sh and measure.sh without a GPU: every part on a stub of the driver, with times that are made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu.__main__ import DEFAULT, why_not
from bench.gpu.stub import FAULT, NAME, SAYS
from bench.report.rows import ROOT, read
from tests.conftest import PATIENCE

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
NCU = """#!/bin/sh
# As NVIDIA's ncu: the names of its counters, or options, a program that it runs, and a table
[ "$1" = --query-metrics ] && { echo "lts__t_bytes  # bytes"; echo "dram__bytes_read_more"; exit; }
while [ "${1#--}" != "$1" ]; do [ "$1" = --metrics ] && metrics=$2; [ "$1" = --csv ] && shift || shift 2; done
[ "$metrics" = lts__t_bytes.sum ] || exit 1
"$@" || exit
echo '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
echo '"0","forward_kernel(a, b)","lts__t_bytes.sum","byte","1,234"'
"""


def run(script: str, folder: Path, parts: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script, with one case of each part."""
    ncu = folder / "bin" / "ncu"
    ncu.parent.mkdir(exist_ok=True)
    ncu.write_text(NCU)
    ncu.chmod(0o755)
    environment |= {
        "PATH": f"{ncu.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "RELATTN_OPTIONS": "--stub --most 1",
        "RELATTN_STATE": str(folder / "state"),
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", os.path.expanduser("~/.triton/cache")),
    }
    seconds = str(int(10 * PATIENCE))  # of which no part needs more than its share on a busy machine
    command = ["bash", str(ROOT / "bench" / "gpu" / f"{script}.sh"), str(folder / script), seconds, parts]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=2 * PATIENCE, check=False
    )
    assert SAYS in done.stdout and "Traceback" not in done.stdout, done.stdout + done.stderr
    return done


@pytest.mark.thorough
def test_all_parts(tmp_path: Path) -> None:
    """Nothing raises, what is timed was checked, and there are at most eight files; nothing claims to be of a GPU."""
    for script in ("check", "measure"):
        done = run(script, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert " 0 of " in f" {done.stdout.splitlines()[-1]}" and len(list((tmp_path / script).iterdir())) <= 8
    outcomes = [json.loads((tmp_path / "state" / f"part-{part}.json").read_text()) for part in DEFAULT]
    assert all(outcome["is_done"] and outcome["failed"] == outcome["left"] == 0 for outcome in outcomes)
    assert all(outcome["rows"] for outcome in outcomes if outcome["part"] != "sanitizer")
    rows = read(tmp_path / "measure" / "results.csv")
    assert {row["device"] for row in rows} == {NAME} and {row["verb"] for row in rows} == {"speed", "memory", "kernels"}
    assert all((tmp_path / "measure" / name).exists() for name in ("speed-d64.png", "memory.png", "log.txt", "environment.json"))


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["", ":always"], ids=["mended", "not mended"])
def test_a_kernel_that_is_wrong(how: str, tmp_path: Path) -> None:
    """The diagnosis names it. If fewer stages mend it they are used from then on, and it is timed; else only others are."""
    fault = {FAULT: f"forward{how}"}
    done = run("check", tmp_path, "smoke,questions", **fault)
    finding = done.stdout.splitlines()[-1]
    assert done.returncode == 1 and "not asked" in done.stdout
    assert finding.startswith("finding: forward at width 64 is wrong")
    assert ("mended by one stage" in finding) == (not how) and ("nothing that was tried mends it" in finding) == bool(how)
    run("measure", tmp_path, "speed", **fault)
    rows = [row for row in read(tmp_path / "measure" / "results.csv") if row["p50_ms"]]
    ours = [row for row in rows if row["method"] == "triton_relattn"]
    assert len(rows) > len(ours) and bool(ours) == (not how)
    assert all(" s1 " in row["config"] for row in ours if row["direction"] == "forward")


def test_the_stub_is_for_machines_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert why_not(True) == "there is a GPU: --stub is for machines without" and why_not(False) is None
