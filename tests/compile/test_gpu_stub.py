"""bench/gpu/check.sh and measure.sh without a GPU: every part on a stub of the driver, with times that are made up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from bench.gpu.__main__ import DEFAULT, PARTS, why_not
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
        summary = done.stdout[done.stdout.index("== summary") :].splitlines()
        assert len(summary) <= 30 and " 0 of " in f" {summary[-1]}"
        files = [path.name for path in (tmp_path / script).iterdir()]
        assert len(files) <= 8 and {"log.txt", "environment.json", "checks.csv", "results.csv"} <= set(files)
    outcomes = [json.loads((tmp_path / "state" / f"part-{part}.json").read_text()) for part in DEFAULT]
    assert all(outcome["is_done"] and outcome["failed"] == outcome["left"] == 0 for outcome in outcomes)
    assert all(outcome["rows"] for outcome in outcomes if outcome["part"] != "sanitizer")
    rows = read(tmp_path / "measure" / "results.csv")
    assert {row["device"] for row in rows} == {NAME}
    assert {row["verb"] for row in rows} == {"speed", "memory", "kernels"}
    assert {"sdpa_flash", "sdpa_cudnn", "flex_attention", "gather"} <= {row["method"] for row in rows if row["p50_ms"]}
    assert (tmp_path / "state" / "timed.txt").read_text() and (tmp_path / "measure" / "speed-d64.png").exists()
    assert "memory.png" in files and set(PARTS) - set(DEFAULT) == {"diagnosis", "compile flex"}


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["", ":always"], ids=["mended", "not mended"])
def test_a_kernel_that_is_wrong(how: str, tmp_path: Path) -> None:
    """The diagnosis names it. If fewer stages mend it they are used from then on, and it is timed; else only others are."""
    fault = {FAULT: f"forward{how}"}
    done = run("check", tmp_path, "smoke,questions", **fault)
    assert done.returncode == 1 and "not asked" in done.stdout
    finding, state = done.stdout.splitlines()[-1], tmp_path / "state"
    assert finding.startswith("finding: forward at width 64 is wrong")
    assert ("mended by one stage" in finding) == (not how) and ("nothing that was tried mends it" in finding) == bool(how)
    assert (state / "wrong.txt").exists() == bool(how) and bool(list(state.glob("profiles/*.csv"))) == (not how)
    run("measure", tmp_path, "speed", **fault)
    rows = [row for row in read(tmp_path / "measure" / "results.csv") if row["p50_ms"]]
    assert ("triton_relattn" in {row["method"] for row in rows}) == (not how) and "sdpa_flash" in {row["method"] for row in rows}
    for row in rows:
        if row["method"] == "triton_relattn" and row["direction"] == "forward":
            assert " s1 " in row["config"], row["config"]


@pytest.mark.thorough
def test_a_cache_of_kernels_travels(tmp_path: Path) -> None:
    """Another clone with another path of Triton finds all that was compiled, and adds nothing."""
    clone, site, cache = tmp_path / "clone", tmp_path / "site", tmp_path / "cache"
    for folder in ("triton_relattn", "bench", "tools"):
        shutil.copytree(ROOT / folder, clone / folder, ignore=shutil.ignore_patterns("__pycache__"))
    site.mkdir()
    (site / "triton").symlink_to(Path(triton.__file__).parent)
    found = []
    for root in (ROOT, clone):
        environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "TRITON_STORE_BINARY_ONLY": "1"}
        environment |= {"PYTHONPATH": str(site)} if root is clone else {}
        command = [sys.executable, "-m", "bench.gpu", "--stub", "--most", "1", "--parts", "smoke", "--results"]
        done = subprocess.run(
            [*command, str(tmp_path / root.name)], cwd=root, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(sorted(path.relative_to(cache) for path in cache.rglob("*") if path.is_file()))
    assert len(found[0]) > 20 and found[0] == found[1] and "0 kernels compiled" in done.stdout


def test_the_stub_is_for_machines_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert why_not(True) == "there is a GPU: --stub is for machines without" and why_not(False) is None
