"""The parts of ``make gpu``: crashes, hangs, no time; what is wrong is neither passed nor timed. None of it needs a GPU.

bench/gpu/check.sh and measure.sh run on a stub of the driver, with invented times.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bench.cases.attention import P2C, TRANSFORMER_XL, Case
from bench.gpu import __main__ as gpu
from bench.gpu import checks
from bench.gpu import report as reports
from bench.gpu.__main__ import PARTS, SUMMARY_LINES, Run, why_not
from bench.gpu.report import CUT_OFF, ERROR, FAILED, LEFT_OUT, OK, kind, wrong_kinds
from bench.gpu.stub import FAULT, NAME, NOTE
from bench.gpu.workers import Lost, spread
from bench.measure import timing
from bench.report.rows import ROOT, read
from tests.conftest import PATIENCE
from tests.tolerance import assert_near


def act(what: str) -> tuple[str, int]:
    """Do what an item asks for, inside a worker; return the item and the process."""
    if what == "raise":
        raise ValueError("two\nlines")
    if what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "hang":
        time.sleep(600)
    if what == "break":  # as after an illegal memory access: everything later in this process also fails
        torch.cuda.is_initialized = lambda: True
        torch.cuda.synchronize = fail  # type: ignore[assignment]
    return what, os.getpid()


def fail(*_: Any) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.thorough
def test_workers() -> None:
    """A failing item does not affect the results of the others; a broken worker is replaced; everything ends at the deadline."""
    items = ["one", "raise", "two", "crash", "three", "break", "four", "hang"]
    found = dict(spread(act, items, 1, time.monotonic() + 300, patience=30.0))
    assert list(found) == items and found["raise"] == Lost("ValueError: two lines")
    assert (found["crash"], found["hang"]) == (Lost("crashed: signal SIGSEGV"), Lost("no result after 30 s"))
    processes = {item: result[1] for item, result in found.items() if not isinstance(result, Lost)}
    assert processes["one"] == processes["two"] and processes["three"] == processes["break"]
    assert len({processes[item] for item in ("two", "three", "four")}) == 3
    assert list(spread(act, ["hang", "one"], 1, time.monotonic() + 3)) == []


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Options of a run whose report does not query a GPU."""
    monkeypatch.setattr(reports, "stamp", lambda _: {})
    (tmp_path / "environment.json").write_text("{}")
    return gpu.parse(["--results", str(tmp_path), "--state", str(tmp_path), "--seconds", "60", "--jobs", "1"])


@pytest.mark.thorough
def test_parts_are_judged_one_by_one(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a crash, a hang, or a part that ran out of time, the others still run and every part is listed, in at most thirty
    lines."""
    monkeypatch.setattr(gpu, "GRACE", 0.0)
    run = Run(options)
    parts = {
        "good": ("print('fine')", "ended in"),
        "wrong": (f"[print({ERROR!r}) for _ in range(40)]; sys.exit({FAILED})", "FAILED, 40 rows, ended in"),
        "crash": ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed: signal SIGSEGV"),
        "raises": ("raise ValueError", "crashed: exit status 1"),  # a crash without a failing row
        "hang": ("time.sleep(600)", "cut off after"),
        "slow": (f"sys.exit({CUT_OFF})", "cut off after"),
        "nothing": (f"sys.exit({LEFT_OUT})", "left out"),
    }
    statuses = []
    for part, (does, _) in parts.items():
        command = [sys.executable, "-c", f"import os, signal, sys, time; {does}"]
        monkeypatch.setattr(gpu, "part_command", lambda *_, command=command: command)
        run.run(part, 4.0)
        statuses.append(run.status())
    run.run("late", 0.5)
    for outcome, (_, status) in zip(run.outcomes, parts.values(), strict=False):
        assert str(outcome).startswith(status), outcome
    assert statuses[0] == OK and set(statuses[1:]) == {FAILED}
    run.outcomes = [outcome for outcome in run.outcomes if not outcome.has_failed]
    assert len(run.outcomes) == 5 and run.status() == CUT_OFF
    assert len(run.summary().splitlines()) <= SUMMARY_LINES
    assert capsys.readouterr().out == (options.results / "log.txt").read_text()


def test_what_a_check_found_to_be_wrong_is_not_timed(options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the failing kind are excluded from timing at any length, and no other calls are."""
    monkeypatch.setattr(checks.Check, "run", lambda *_: [{"case": "", "status": "FAILED", "message": "d_key"}])
    case, options.jobs = Case(4, 32, 4096, 64), 0
    checks.check_all([next(checks.stand_ins(case))], options, reports.Report(options, "correctness"), time.monotonic() + 60)
    wrong = wrong_kinds(options.state) or set()
    assert kind(replace(case, batch=1, length=16384)) in wrong
    for other in (case.without_table(), replace(case, is_causal=True), replace(case, rows=129), replace(case, head_dim=128)):
        assert kind(other) not in wrong


ONE_HEAD = {
    "grouped heads": Case(3, 4, 33, 16, True, 9, "fp32", 2),
    "grouped heads, own query": Case(2, 4, 33, 16, True, 9, "fp32", 2, rel_dim=8, outside="zero"),
    "a bias": Case(1, 2, 20, 16, dtype="fp32", terms=("rel_bias",)),
    "tables of a head": Case(2, 4, 33, 16, dtype="fp32", **TRANSFORMER_XL),
    "two tables": Case(2, 4, 33, 16, dtype="fp32", terms=P2C),
}


@pytest.mark.parametrize("case", ONE_HEAD.values(), ids=ONE_HEAD)
def test_one_head_of_two_sequences(case: Case) -> None:
    """The head that is compared in a long call equals that head of the whole call, and a wrong head of the last sequence is
    detected."""
    inputs = case.inputs("cpu")
    whole = timing.expected_results(case, inputs).results
    expected = timing.expected_of_one_head(case, inputs)
    for result, head in zip(whole[:4], expected.results, strict=True):
        assert_near("a head", expected.part(result), head)
    wrong = [result.clone() for result in whole]
    wrong[2][-1, 0] *= 1.5
    for results, status in ((whole, "ok"), (wrong, "wrong: differs from float64")):
        timed = timing.Timed("ours", "backward", step=timing.Step(lambda: None, lambda _, results=results: results[1:]))  # type: ignore[misc]
        timing.check(timed, expected, case)
        assert timed.found["status"].startswith(status)


def test_a_call_that_did_not_run_again_did_not_repeat(options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """If time runs out after the first run, the call counts neither as passed nor as failed."""
    runs = iter([(51, ""), (0, ""), (51, "run 3: out")])
    monkeypatch.setattr(checks, "differences", lambda *_: next(runs))
    monkeypatch.setattr(Case, "inputs", lambda *_: None)
    report = reports.Report(options, "repeats")
    options.most = 3
    checks.repeats(options, report, 0.0)
    assert [row["status"] for row in report.checks.rows] == ["ok", "not run", "FAILED"]
    assert report.status == FAILED


# On the stub.


without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def run_script(script: str, folder: Path, parts: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
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


@without_a_gpu
@pytest.mark.thorough
def test_all_parts_run_on_a_stub(tmp_path: Path) -> None:
    """All parts run without errors, and results name the stub as their device."""
    parts_run, left_out = 0, list[str]()
    for script, parts in (("check", ""), ("measure", ""), ("measure", "baselines,tests,sanitizer")):
        done = run_script(script, tmp_path, parts)
        assert done.returncode == 0, done.stdout + done.stderr
        *_, (failed, count) = re.findall(r"(\d+) of (\d+) parts failed", done.stdout)
        assert int(failed) == 0 and "cut off" not in done.stdout
        parts_run += int(count)
        left_out += re.findall(r"^(\w+): left out", done.stdout, re.MULTILINE)
    assert parts_run == len(PARTS) and set(left_out) <= {"sanitizer"}
    rows = read(tmp_path / "measure" / "results.csv")
    assert {row["device"] for row in rows} == {NAME} and {row["verb"] for row in rows} == {"speed", "memory"}
    files = {"log.txt", "environment.json", "checks.csv", "results.csv", "tuned.csv"}
    assert {path.name for path in (tmp_path / "measure").iterdir()} == files


@without_a_gpu
@pytest.mark.thorough
def test_a_kernel_that_is_wrong_is_not_timed(tmp_path: Path) -> None:
    """The summary names the calls with a wrong kernel, which are not timed."""
    done = run_script("check", tmp_path, "correctness", **{FAULT: "d_rel_key"})
    assert done.returncode == 1 and "1 of 1 parts failed: correctness" in done.stdout
    assert "not timed, since checks failed: b1 h1 n1 d64 full bf16" in done.stdout
    run_script("measure", tmp_path, "speed")
    rows = [row for row in read(tmp_path / "measure" / "results.csv") if row["p50_ms"]]
    assert {row["method"] for row in rows} == {"plain", "sdpa_flash", "sdpa_cudnn"}


@without_a_gpu
def test_the_stub_is_for_machines_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert why_not(True) == "there is a GPU: --stub is for machines without" and why_not(False) is None
