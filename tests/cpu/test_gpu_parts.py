"""Troubles of the parts of ``make gpu``: crashes, hangs, too much output, no time. None of it needs a GPU."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.cases.attention import choose
from bench.gpu import __main__ as gpu
from bench.gpu import report as reports
from bench.gpu import workers
from bench.gpu.__main__ import PARTS, Run, judge_tests, marked_tests
from bench.gpu.report import Outcome, Report, outcome_of, outcome_path, pack, unpack
from bench.gpu.workers import MOST_OUTPUT, Lost, spread, watch

ROOT = Path(__file__).parents[2]


def act(what: str) -> tuple[str, int]:
    """Do what an item says, in a worker; return it, and the process."""
    if what == "raise":
        raise ValueError("two\nlines")
    if what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "leave":
        os._exit(7)
    if what == "hang":
        time.sleep(600)
    if what == "break":  # as after an illegal access: whatever follows in this process fails, too
        torch.cuda.is_initialized = lambda: True
        torch.cuda.synchronize = fail  # type: ignore[assignment]
    return what, os.getpid()


def fail(*_: Any) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def soon(seconds: float = 300.0) -> float:
    return time.monotonic() + seconds


@pytest.mark.thorough
def test_workers() -> None:
    """Whatever happens to one item, the others have results; a worker that cannot go on is replaced."""
    items = ["one", "raise", "two", "crash", "three", "leave", "four", "break", "five"]
    found = dict(spread(act, items, 1, soon()))
    assert list(found) == items
    assert found["raise"] == Lost("ValueError: two lines")
    assert found["crash"] == Lost("crashed: signal SIGSEGV") and found["leave"] == Lost("crashed: exit status 7")
    processes = {item: each[1] for item, each in found.items() if not isinstance(each, Lost)}
    assert list(processes) == ["one", "two", "three", "four", "break", "five"]
    assert processes["one"] == processes["two"] and processes["four"] == processes["break"]
    assert len({processes[item] for item in ("two", "three", "four", "five")}) == 4


@pytest.mark.thorough
def test_workers_that_hang() -> None:
    """The item is given up after a while, the rest is done."""
    found = dict(spread(act, ["hang", "one", "two"], 1, soon(), patience=12.0))
    assert found["hang"] == Lost("no result after 12 s")
    assert [found[item][0] for item in ("one", "two")] == ["one", "two"]  # type: ignore[index]


@pytest.mark.thorough
def test_workers_at_the_deadline() -> None:
    """Work in progress is ended, and nothing else begins."""
    began = time.monotonic()
    assert list(spread(act, ["hang", "one"], 1, soon(3.0))) == []
    assert time.monotonic() - began < 30
    assert list(spread(act, ["one"], 2, soon(-1.0))) == [] == list(spread(act, ["one"], 0, soon(-1.0)))


@pytest.mark.thorough
def test_items_are_taken_when_they_are_needed() -> None:
    """So that an item can tell what has become of those before it."""
    taken, done = list[Any](), list[str]()

    def items() -> Any:
        for item in ("one", "two"):
            taken.append((item, list(done)))
            yield item

    for item, _ in spread(act, items(), 1, soon()):
        done.append(item)
    assert taken == [("one", []), ("two", ["one"])]
    assert [item for item, _ in spread(act, ["one", "two"], 0, soon())] == ["one", "two"]


def program(text: str) -> list[str]:
    return [sys.executable, "-c", f"import os, signal, subprocess, sys, time\n{text}"]


@pytest.mark.parametrize(
    ("text", "status", "heard"),
    [
        ("print('one'); print('two', file=sys.stderr); sys.exit(3)", 3, ["one", "two"]),
        ("print('one', flush=True); os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, ["one"]),
        ("print('one', flush=True); time.sleep(600)", None, ["one"]),
        ("sys.stdout.buffer.write(b'\\xff\\n')", 0, ["\ufffd"]),
    ],
    ids=["ends", "crashes", "hangs", "is not text"],
)
def test_watch(text: str, status: int | None, heard: list[str]) -> None:
    lines: list[str] = []
    began = time.monotonic()
    assert watch(program(text), 3.0 if status is None else 60.0, lines.append) == status
    assert sorted(lines) == sorted(heard) and time.monotonic() - began < 50


@pytest.mark.thorough
def test_watch_ends_what_does_not_want_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ignores SIGTERM, and one that it has started and that holds its output."""
    monkeypatch.setattr(workers, "GRACE", 1.0)
    lines: list[str] = []
    text = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True)"
    )
    assert watch(program(f"{text}; time.sleep(600)"), 3.0, lines.append) is None
    assert watch(program(text), 60.0, lines.append) == 0  # ends, and leaves its child behind
    assert len(lines) == 2
    until = soon(30.0)
    while any(map(runs, lines)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(map(runs, lines))


def runs(process: str) -> bool:
    try:
        return " Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


def test_watch_does_not_pass_on_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither many lines nor one without an end; the program does not have to wait for anybody to read."""
    lines: list[str] = []
    text = "line = 'x' * 1000\nfor _ in range(20000): print(line)\nsys.stdout.write('y' * 20_000_000)\nsys.exit(5)"
    assert watch(program(text), 120.0, lines.append) == 5
    assert sum(map(len, lines)) < MOST_OUTPUT + 10_000 and "the rest is left out" in lines[-1]
    monkeypatch.setattr(workers, "MOST_OUTPUT", 10)
    lines.clear()
    watch(program("print('abcdefgh'); print('ijklmnop'); print('qrst')"), 60.0, lines.append)
    assert lines == ["abcdefgh", "ijklmnop", "... more than 10 characters: the rest is left out"]


def options_in(folder: Path, **changes: Any) -> argparse.Namespace:
    (folder / "raw").mkdir(parents=True, exist_ok=True)
    usual = {"results": folder, "raw": folder / "raw", "device": "cpu", "arch": "sm_90", "jobs": 0, "tiny": True, "seconds": 60.0}
    return argparse.Namespace(
        **{**usual, "parts": ["smoke"], "reach": 1, "dtype": "float16", "until": None, "stub": False, **changes}
    )


def leaves(outcome: Outcome, then: str = "") -> list[str]:
    """A part that leaves this behind, in the folder that its first argument names, and then does something."""
    path, text = outcome_path(Path("."), outcome.part).name, json.dumps(asdict(outcome))
    return program(
        f"open(os.path.join(sys.argv[1], {path!r}), 'w').write({text!r}); print('a line', flush=True); {then or 'pass'}"
    )


@pytest.mark.thorough
def test_parts_are_judged_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A crash, a hang, and a part that had no time: the others go on, and each is told."""
    monkeypatch.setattr(gpu, "GRACE", 0.0)
    options = options_in(tmp_path)
    run = Run(options)
    fine: dict[str, Any] = {"rows": 3, "is_done": True}
    parts: dict[str, tuple[list[str], str]] = {
        "good": (leaves(Outcome("good", **fine)), "ok"),
        "wrong": (leaves(Outcome("wrong", **fine, failed=1, errors=["case=one status=FAILED"])), "FAILED, 1 of 3"),
        "crash": (leaves(Outcome("crash", rows=2), "os.kill(os.getpid(), signal.SIGSEGV)"), "crashed: signal SIGSEGV"),
        "at once": (program("sys.exit(1)"), "crashed: exit status 1"),
        "quits": (leaves(Outcome("quits", rows=2)), "crashed: exit status 0"),  # without having come to its end
        "crash at the end": (leaves(Outcome("crash at the end", **fine), "os.abort()"), "crashed: signal SIGABRT"),
        "hang": (leaves(Outcome("hang", rows=2), "time.sleep(600)"), "cut off after"),
        "wrong hang": (leaves(Outcome("wrong hang", rows=2, failed=2), "time.sleep(600)"), "FAILED, 2 of 2, cut off after"),
        "slow": (leaves(Outcome("slow", **fine, left=4)), "cut off after"),
        "slow tool": (leaves(Outcome("slow tool", **fine, cut_off=1)), "cut off after"),
        "nothing": (leaves(Outcome("nothing", is_done=True, note="there is no pytest")), "left out"),
    }
    for part, (command, _) in parts.items():
        run.run(part, lambda _, command=command: [*command, str(options.raw)], 4.0)  # type: ignore[misc]
    run.run("late", lambda _: program("pass"), 0.5)
    for outcome, (_, status) in zip(run.outcomes, parts.values(), strict=False):
        assert outcome.status.startswith(status), outcome
    failed = {outcome.part for outcome in run.outcomes if outcome.has_failed}
    assert failed == {"wrong", "crash", "at once", "quits", "crash at the end", "wrong hang"}
    assert {outcome.part for outcome in run.outcomes if outcome.is_cut_off} == {"hang", "wrong hang", "slow", "slow tool", "late"}
    summary = run.summary()
    assert "case=one status=FAILED" in summary and "6 of 12 parts failed: wrong, crash" in summary
    assert "4 were cut off: hang, slow, slow tool, late" in summary and "there is no pytest" in summary
    printed = capsys.readouterr().out
    assert printed.count("a line") == 10 and (tmp_path / "log.txt").read_text() == printed


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        ([Outcome("a", rows=1)], 0),
        ([Outcome("a", rows=1), Outcome("b", rows=1, left=1)], 3),
        ([Outcome("a", rows=1, ended="cut off after 9 s")], 3),
        ([Outcome("a", rows=1, left=1), Outcome("b", rows=1, failed=1)], 1),
        ([Outcome("a", ended="crashed: signal SIGBUS")], 1),
    ],
)
def test_exit_status(outcomes: Sequence[Outcome], status: int, tmp_path: Path) -> None:
    run = Run(options_in(tmp_path))
    run.outcomes = list(outcomes)
    assert run.status() == status


def test_seconds_that_are_left_go_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of what is left, not of the whole."""
    given: dict[str, float] = {}
    run = Run(options_in(tmp_path, parts=list(PARTS), seconds=float(sum(share for _, share in PARTS.values()))))
    monkeypatch.setattr(run, "run", lambda part, command, seconds: given.setdefault(part, seconds))
    run.run_all()
    assert list(given) == list(PARTS) and next(iter(given)) == "smoke"
    assert given["smoke"] == pytest.approx(40, abs=1) and given["tune"] == pytest.approx(run.options.seconds, abs=1)
    run.started -= run.options.seconds - 10  # they were slow
    given.clear()
    run.run_all()
    assert max(given.values()) <= 10


def test_imports_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is told when it ends, not how long it has from the time that torch is there."""
    monkeypatch.setattr(gpu.selection, "architecture", lambda _: "sm_90")
    monkeypatch.setattr(gpu, "why_not", lambda *_: None)
    options = gpu.parse(["--results", str(tmp_path), "--device", "cpu"])
    options.raw = tmp_path
    before = time.monotonic()
    command = gpu.command_of("smoke", options, 40.0)
    deadlines: list[float] = []
    monkeypatch.setitem(PARTS, "smoke", (lambda _options, _report, deadline: deadlines.append(deadline), 40))
    assert gpu.main(command[command.index("bench.gpu") + 1 :]) == 0
    assert deadlines[0] - before == pytest.approx(40, abs=1)


def test_errors_of_others_are_not_ours(tmp_path: Path) -> None:
    """A method of others that raises is a row; one that computes something else, or one of ours that raises, has failed."""
    case = choose(["long"])[0]
    for method, status, failed in (
        ("sdpa_cudnn", "failed: RuntimeError: no kernel", 0),
        ("sdpa_cudnn", "wrong: differs from float64 by 1", 1),
        ("plain", "failed: RuntimeError: no kernel", 1),
    ):
        report = Report(options_in(tmp_path), "speed")
        row = {"verb": "speed", **case.columns(), "method": method, "direction": "forward", "status": status}
        report.add_measured(row)
        assert report.outcome.failed == failed


def test_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows that there are get packed, and the end is said."""
    options = options_in(tmp_path)
    (options.raw / "rows.csv").write_text("a\n")
    run = Run(options)
    monkeypatch.setattr(gpu, "watch", lambda *_: gpu.interrupt())
    assert gpu.finish(run) == 130
    assert "smoke           0 s     0 rows  interrupted" in capsys.readouterr().out
    with tarfile.open(tmp_path / reports.PACKED) as packed:
        assert packed.getnames() == ["rows.csv"]


def test_files_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is too large loses its middle; what is too much together is left out, the largest first."""
    monkeypatch.setattr(reports, "LARGEST_FILE", 1 << 16)
    monkeypatch.setattr(reports, "LARGEST_PACKED", 100_000)
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "rows.csv").write_text("a,b\n")
    (raw / "long.txt").write_bytes(b"begins" + b"x" * (1 << 17) + b"ends")
    for name in ("first", "second"):
        (raw / name).write_bytes(os.urandom(60_000))
    said = pack(tmp_path, raw)
    assert said[0].startswith("long.txt has 131082 bytes") and len(said) == 3
    assert [text.split()[0] for text in said[1:]] == ["long.txt", "second"] and "together the files are too large" in said[2]
    assert (tmp_path / reports.PACKED).stat().st_size <= 100_000
    again = tmp_path / "again"
    again.mkdir()
    unpack(tmp_path, again)
    assert {path.name for path in again.iterdir()} == {"rows.csv", "first"}
    assert (again / "rows.csv").read_text() == "a,b\n" and (raw / "long.txt").read_bytes().endswith(b"xends")


def test_outcomes_of_earlier_runs_do_not_count(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    outcome_path(raw, "smoke").write_text(json.dumps(asdict(Outcome("smoke", rows=9, is_done=True))))
    (raw / "checks.csv").write_text("part\n")
    pack(tmp_path, raw)
    again = tmp_path / "again"
    again.mkdir()
    unpack(tmp_path, again)
    assert [path.name for path in again.iterdir()] == ["checks.csv"]
    assert outcome_of(again, "smoke", -9, 1.0).status == "crashed: signal SIGKILL"
    (tmp_path / reports.PACKED).write_bytes(b"cut sho")
    unpack(tmp_path, again)  # nothing can be read from it


PYTEST_LINES = ["tests/gpu/test_kernels.py::test_a PASSED [ 50%]", "[gw1] [100%] PASSED tests/gpu/test_kernels.py::test_b "]
WRONG_LINES = [*PYTEST_LINES, "tests/gpu/test_kernels.py::test_c FAILED [ 99%]", "FAILED tests/gpu/test_kernels.py::test_c - no"]


@pytest.mark.parametrize(
    ("status", "lines", "expected"),
    [
        (0, [*PYTEST_LINES, "2 passed"], "ok"),
        (1, [*WRONG_LINES, "1 failed, 2 passed"], "FAILED, 1 of 1"),
        (None, PYTEST_LINES, "cut off after 9 s"),
        (None, WRONG_LINES[:3], "FAILED, 1 of 1"),
        (2, ["ERROR tests/gpu/test_kernels.py - ImportError"], "FAILED, 1 of 1"),
        (5, ["no tests ran"], "FAILED, 1 of 1"),
        (-signal.SIGSEGV, PYTEST_LINES, "FAILED, 1 of 1"),
        (None, [], "cut off after 9 s"),
    ],
)
def test_pytest_is_judged(status: int | None, lines: list[str], expected: str, tmp_path: Path) -> None:
    report = Report(options_in(tmp_path), "tests")
    judge_tests(status, lines, report)
    outcome = outcome_of(tmp_path / "raw", "tests", 0, 9.0)
    assert outcome.status == expected
    if status == 0:
        assert outcome.note == "2 passed, 0 did not"


def test_without_pytest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda _: None)
    report = Report(options_in(tmp_path), "tests")
    marked_tests(options_in(tmp_path), report, soon())
    assert (report.outcome.status, report.outcome.note) == ("left out", "there is no pytest")
    (tmp_path / "results.csv").write_text("verb\n")
    assert gpu.draw(options_in(tmp_path)) == "there is no matplotlib: no figures"


def test_a_part_that_raises_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PARTS, "smoke", (fail, 40))
    gpu.run_here("smoke", options_in(tmp_path))
    outcome = outcome_of(tmp_path / "raw", "smoke", 0, 1.0)
    assert outcome.status == "FAILED, 1 of 1" and outcome.errors[0].startswith("RuntimeError: CUDA error")
    assert "Traceback" in capsys.readouterr().out


BLOCKED = """import sys
for name in ("pytest", "matplotlib", "tqdm", "hypothesis", "xdist", "transformers", "music21", "expecttest"):
    sys.modules[name] = None
"""


@pytest.mark.thorough
def test_torch_triton_and_numpy_are_enough(tmp_path: Path) -> None:
    """The program runs a part where no other package is, and says so if there is no GPU."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bench.gpu", "--results", str(tmp_path / "results"), "--parts", "tests,host"]
    small = {**environment, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [*command, "--device", "cpu", "--tiny"], cwd=ROOT, env=small, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "there is no pytest" in done.stdout and "0 of 2 parts failed" in done.stdout
    if not torch.cuda.is_available():
        environment.pop("TRITON_INTERPRET", None)
        without = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert (without.returncode, without.stdout) == (2, "no GPU: torch.cuda.is_available() is false\n")
