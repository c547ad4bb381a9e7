"""bench/gpu/check.sh and measure.sh on a stub of the driver, with invented times."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu.__main__ import PARTS, why_not
from bench.gpu.stub import FAULT, NAME, NOTE
from bench.report.rows import ROOT, read
from tests.conftest import PATIENCE

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def run(script: str, folder: Path, parts: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script, with one case of each part."""
    environment |= {
        "PYTHON": sys.executable,
        "RELATTN_OPTIONS": "--stub --most 1",
        "RELATTN_STATE": str(folder / "state"),
        "RELATTN_BEFORE": str(ROOT),
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", os.path.expanduser("~/.triton/cache")),
    }
    seconds = str(int(10 * PATIENCE))  # enough for all parts on a busy machine
    command = ["bash", str(ROOT / "bench" / "gpu" / f"{script}.sh"), str(folder / script), seconds, parts]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=2 * PATIENCE, check=False
    )
    assert NOTE in done.stdout and "Traceback" not in done.stdout, done.stdout + done.stderr
    return done


@pytest.mark.thorough
def test_all_parts(tmp_path: Path) -> None:
    """All parts run without errors, and results name the stub as their device."""
    parts_run, left_out = 0, list[str]()
    for script, parts in (("check", ""), ("measure", ""), ("measure", "baselines,tests,sanitizer")):
        done = run(script, tmp_path, parts)
        assert done.returncode == 0, done.stdout + done.stderr
        *_, (failed, count) = re.findall(r"(\d+) of (\d+) parts failed", done.stdout)
        assert int(failed) == 0 and "cut off" not in done.stdout
        parts_run += int(count)
        left_out += re.findall(r"^(\w+): left out", done.stdout, re.MULTILINE)
    assert parts_run == len(PARTS) and set(left_out) <= {"sanitizer"}
    rows = read(tmp_path / "measure" / "results.csv")
    assert {row["device"] for row in rows} == {NAME} and {row["verb"] for row in rows} == {"speed", "memory"}
    assert {path.name for path in (tmp_path / "measure").iterdir()} == {
        "log.txt",
        "environment.json",
        "checks.csv",
        "results.csv",
        "tuned.csv",
    }


@pytest.mark.thorough
def test_a_kernel_that_is_wrong(tmp_path: Path) -> None:
    """The summary names the calls with a wrong kernel, which are not timed."""
    done = run("check", tmp_path, "correctness", **{FAULT: "d_rel_key"})
    assert done.returncode == 1 and "1 of 1 parts failed: correctness" in done.stdout
    assert "not timed, since checks failed: b1 h1 n1 d64 full bf16" in done.stdout
    run("measure", tmp_path, "speed")
    rows = [row for row in read(tmp_path / "measure" / "results.csv") if row["p50_ms"]]
    assert {row["method"] for row in rows} == {"plain", "sdpa_flash", "sdpa_cudnn"}


def test_the_stub_is_for_machines_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert why_not(True) == "there is a GPU: --stub is for machines without" and why_not(False) is None
