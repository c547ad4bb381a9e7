"""The parts of ``make gpu``: crashes, hangs, too much output, no time; what is judged how. None of it needs a GPU."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.cases.attention import Case, choose
from bench.cases.methods import ours
from bench.gpu import __main__ as gpu
from bench.gpu import kernels, questions, workers
from bench.gpu import report as reports
from bench.gpu.__main__ import DEFAULT, PARTS, SUMMARY_LINES, Run
from bench.gpu.checks import further_cases, run_case, standing_for_all
from bench.gpu.counters import rows_of
from bench.gpu.report import Outcome, Report, State, kind_of, outcome_of, outcome_path
from bench.gpu.rest import verdict_of_tests
from bench.gpu.speed import measure_case, speed_cases, table_of
from bench.gpu.workers import MOST_OUTPUT, Lost, spread, watch
from bench.measure import timing
from tests.tolerance import assert_near
from triton_relattn.kernels.introspect import TileConfig


def act(what: str) -> tuple[str, int]:
    """Do what an item says, in a worker; return it, and the process."""
    if what == "raise":
        raise ValueError("two\nlines")
    if what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
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
    items = ["one", "raise", "two", "crash", "three", "break", "four"]
    found = dict(spread(act, items, 1, soon()))
    assert list(found) == items
    assert found["raise"] == Lost("ValueError: two lines") and found["crash"] == Lost("crashed: signal SIGSEGV")
    processes = {item: each[1] for item, each in found.items() if not isinstance(each, Lost)}
    assert processes["one"] == processes["two"] and processes["three"] == processes["break"]
    assert len({processes[item] for item in ("two", "three", "four")}) == 3


@pytest.mark.thorough
def test_workers_that_hang_and_those_at_the_deadline() -> None:
    """An item is given up after a while, the rest is done; at the deadline work in progress is ended, and nothing else begins."""
    found = dict(spread(act, ["hang", "one"], 1, soon(), patience=30.0))
    assert found["hang"] == Lost("no result after 30 s") and not isinstance(found["one"], Lost)
    began = time.monotonic()
    assert list(spread(act, ["hang", "one"], 1, soon(3.0))) == []
    assert time.monotonic() - began < 30
    assert list(spread(act, ["one"], 2, soon(-1.0))) == [] == list(spread(act, ["one"], 0, soon(-1.0)))


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


def test_watch_ends_what_does_not_want_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ignores SIGTERM, and one that it has started and that holds its output."""
    monkeypatch.setattr(workers, "GRACE", 1.0)
    lines: list[str] = []
    text = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    assert watch(program(f"{text}; time.sleep(600)"), 3.0, lines.append) is None
    assert watch(program(text), 60.0, lines.append) == 0  # ends, and leaves its child behind
    until = soon(30.0)
    while any(map(runs, lines)) and time.monotonic() < until:
        time.sleep(0.1)
    assert len(lines) == 2 and not any(map(runs, lines))


def runs(process: str) -> bool:
    try:
        return " Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


def test_watch_does_not_pass_on_everything() -> None:
    """Neither many lines nor one without an end; the program does not have to wait for anybody to read."""
    lines: list[str] = []
    text = "line = 'x' * 1000\nfor _ in range(20000): print(line)\nsys.stdout.write('y' * 20_000_000)\nsys.exit(5)"
    assert watch(program(text), 120.0, lines.append) == 5
    assert sum(map(len, lines)) < MOST_OUTPUT + 10_000 and "the rest is left out" in lines[-1]


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Of a run on a GPU that nobody asks anything."""
    monkeypatch.setattr(reports, "stamp", lambda _: {})
    (tmp_path / "environment.json").write_text("{}")
    found = gpu.parse(["--results", str(tmp_path), "--seconds", "60", "--jobs", "1"])
    found.arch = "sm_90"
    return found


def leaves(outcome: Outcome, state: Path, then: str = "pass") -> list[str]:
    """A part that leaves this behind, and then does something."""
    path, text = str(outcome_path(state, outcome.part)), json.dumps(asdict(outcome))
    return program(f"open({path!r}, 'w').write({text!r}); print('a line', flush=True); {then}")


def test_parts_are_judged_one_by_one(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A crash, a hang, and a part that had no time: the others go on, and each is listed; at most thirty lines in the end."""
    monkeypatch.setattr(gpu, "GRACE", 0.0)
    run = Run(options)
    fine: dict[str, Any] = {"rows": 3, "is_done": True}
    crash = "os.kill(os.getpid(), signal.SIGSEGV)"
    parts: dict[str, tuple[Outcome, str, str]] = {
        "good": (Outcome("good", **fine), "pass", "ok"),
        "wrong": (Outcome("wrong", **fine, failed=1, errors=["case=one status=FAILED"] * 40), "pass", "FAILED, 1 of 3"),
        "crash": (Outcome("crash", rows=2), crash, "crashed: signal SIGSEGV"),
        "quits": (Outcome("quits", rows=2), "pass", "crashed: exit status 0"),  # without having come to its end
        "hang": (Outcome("hang", rows=2), "time.sleep(600)", "cut off after"),
        "slow": (Outcome("slow", **fine, left=4), "pass", "cut off after"),
        "nothing": (Outcome("nothing", is_done=True, note="there is no pytest"), "pass", "left out"),
    }
    for part, (outcome, then, _) in parts.items():
        command = leaves(outcome, options.state, then)
        monkeypatch.setattr(gpu, "command_of", lambda *_, command=command: command)
        run.run(part, 4.0)
    run.run("late", 0.5)
    for outcome, (*_, status) in zip(run.outcomes, parts.values(), strict=False):
        assert outcome.status.startswith(status), outcome
    assert {outcome.part for outcome in run.outcomes if outcome.has_failed} == {"wrong", "crash", "quits"}
    printed = capsys.readouterr().out
    assert printed.count("a line") == 7 and (options.results / "log.txt").read_text() == printed
    run.state.put("finding", {"text": "forward is wrong", "mended": False})
    summary = run.summary().splitlines()
    assert "    wrong: case=one status=FAILED" in summary and "3 of 8 parts failed: wrong, crash, quits" in summary
    assert len(summary) <= SUMMARY_LINES and summary[-1] == "finding: forward is wrong" and run.status() == 1


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
def test_exit_status(outcomes: Sequence[Outcome], status: int, options: argparse.Namespace) -> None:
    run = Run(options)
    run.outcomes = list(outcomes)
    assert run.status() == status


def test_seconds(options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts share what is left; until the checks have passed enough is kept for a diagnosis, which comes when one fails."""
    options.parts, options.stub = list(DEFAULT), True
    options.seconds = sum(PARTS[part][1] for part in DEFAULT) + gpu.FOR_DIAGNOSIS
    run, given, failing = Run(options), dict[str, float](), set[str]()

    def pretend(part: str, seconds: float) -> Outcome:
        given[part] = seconds
        run.outcomes.append(Outcome(part, rows=1, failed=int(part in failing)))
        return run.outcomes[-1]

    monkeypatch.setattr(run, "run", pretend)
    run.run_all()
    assert tuple(given) == DEFAULT and given["smoke"] == pytest.approx(25, abs=1)
    given.clear()
    failing.add("smoke")
    run.run_all()
    assert tuple(given)[:3] == ("smoke", "diagnosis", "repeats") and "questions" not in given
    assert given["diagnosis"] >= gpu.FOR_DIAGNOSIS - 1


def test_what_is_wrong_is_not_timed(tmp_path: Path) -> None:
    """Calls of the kind alone: with a wrong out nothing, with a wrong gradient the forward."""
    state, case = State(tmp_path), Case(4, 32, 4096, 64)
    state.note_wrong(kind_of(case), ["d_key"])
    state.note_wrong(kind_of(case, False), ["out", "d_query"])
    longer = replace(case, batch=1, length=16384)
    assert state.wrong_directions(kind_of(longer)) == {"backward", "forward+backward"}
    assert state.wrong_directions(kind_of(longer, False)) == set(timing.DIRECTIONS)
    for other in (replace(case, is_causal=True), replace(case, rows=129), replace(case, head_dim=128)):
        assert state.wrong_directions(kind_of(other)) == set()
    state.forget("wrong.txt")
    assert state.wrong_directions(kind_of(case)) == set()


def test_what_is_timed_has_to_be_checked(options: argparse.Namespace) -> None:
    """The same kernel compiled for something else does not count."""
    run = Run(options)
    run.state.note_kernels("checked", {"forward a", "dkv b"})
    run.state.note_kernels("timed", {"forward a"})
    run.judge_kernels()
    assert run.outcomes == []
    run.state.note_kernels("timed", {"forward c"})
    run.judge_kernels()
    assert run.outcomes[0].has_failed and "timed but not checked: forward c" in run.summary()


def test_work_can_be_handed_to_workers() -> None:
    """All that goes to other processes, and the functions."""
    calls = [*standing_for_all(speed_cases()), *further_cases()]
    work = [calls, list(kernels.groups("sm_90")), questions.rotation_groups("sm_90")]
    functions = [run_case, kernels.measure_group, kernels.compile_group, measure_case]
    assert pickle.loads(pickle.dumps(work)) == work and pickle.loads(pickle.dumps(functions)) == functions
    assert len({call.name for call in calls}) == len(calls) > 250


def test_errors_of_others_are_not_ours(options: argparse.Namespace) -> None:
    """A method of others that raises is a row; one that computes something else, or one of ours that raises, has failed."""
    for method, status, failed in (
        ("sdpa_cudnn", "failed: RuntimeError: no kernel", 0),
        ("sdpa_cudnn", "wrong: differs from float64 by 1", 1),
        ("plain", "failed: RuntimeError: no kernel", 1),
    ):
        report = Report(options, "speed")
        row = {"verb": "speed", **choose(["long"])[0].columns(), "method": method, "direction": "forward", "status": status}
        report.add_measured(row)
        assert report.outcome.failed == failed


def test_a_part_that_raises_has_failed(options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARTS, "smoke", (fail, 40))
    gpu.run_here("smoke", options)
    outcome = outcome_of(options.state, "smoke", 0, 1.0)
    assert outcome.status == "FAILED, 1 of 1" and outcome.errors[0].startswith("RuntimeError: CUDA error")


def test_interrupted(options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "watch", lambda *_: gpu.interrupt())
    assert gpu.finish(Run(options)) == 130
    assert "interrupted" in capsys.readouterr().out


PASSED = ["tests/gpu/test_kernels.py::test_a PASSED [ 50%]", "[gw1] [100%] PASSED tests/gpu/test_kernels.py::test_b "]
WRONG = [*PASSED, "tests/gpu/test_kernels.py::test_c FAILED [ 99%]"]


@pytest.mark.parametrize(
    ("status", "lines", "expected"),
    [(0, PASSED, "ok"), (1, WRONG, "FAILED"), (None, PASSED, "ok"), (None, WRONG, "FAILED"), (2, [], "FAILED"), (5, [], "ok")],
)
def test_pytest_is_judged(status: int | None, lines: list[str], expected: str) -> None:
    """Where it was cut off, by the verdicts that it had come to."""
    row = verdict_of_tests(status, lines)
    assert row["status"] == expected and row["value"] == (2 if lines else 0)


def test_counters() -> None:
    """Rows of ncu's table are found between other lines."""
    header = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    lines = ["==PROF==", header, '"0","forward_kernel(a, b)","lts__t_bytes.sum","byte","1,234"', '"0","x","other","",""']
    assert list(rows_of(lines)) == [("forward_kernel", "lts__t_bytes.sum", "1234", "byte")]


def test_table() -> None:
    """Ours, and how many times as long it takes as the lower bounds; a dash if one was not timed."""

    def row(method: str, direction: str, milliseconds: float) -> dict[str, Any]:
        times = {f"p{percent}_ms": milliseconds for percent in (20, 50, 80)}
        return {"verb": "speed", "case": "a", "head_dim": 64, "method": method, "direction": direction, "tflops": 100.0, **times}

    rows = [
        row("triton_relattn", "forward", 3.0) | {"of_peak": 0.125},
        row("plain", "forward", 2.0),
        row("plain", "backward", 2.0),
    ]
    lines = table_of(rows, 64).splitlines()
    assert lines[-1].split() == ["a", "forward", "3", "(3-3)", "100", "12%", "1.50", "-", "-"]
    assert table_of(rows, 128) == ""


@pytest.mark.parametrize("case", [Case(3, 4, 33, 16, True, 9, "fp32", 2), Case(1, 2, 20, 16, dtype="fp32", bias=True)], ids=str)
def test_one_head_of_two_sequences(case: Case) -> None:
    """What is compared of a long call is what the whole call has there, and a wrong head of the last sequence is noticed."""
    inputs, d_out = case.inputs("cpu")
    whole, _ = timing.golden(case, inputs, d_out, "cpu", True)
    expected = timing.expected_of_heads(case, inputs, d_out, True)
    for result, each in zip(whole[:4], expected.results, strict=True):
        assert_near("a head", expected.of(result), each)
    assert expected.results[0].shape[:2] == (min(case.batch, 2), case.heads // (case.key_heads or case.heads))
    wrong = [result.clone() for result in whole]
    wrong[2][-1, 0] *= 1.5
    for results, status in ((whole, "ok"), (wrong, "wrong: differs from float64")):
        timed = timing.Timed("ours", "backward", step=timing.Step(lambda: None, lambda _, results=results: results[1:]))  # type: ignore[misc]
        timing.check(timed, expected, case)
        assert timed.found["status"].startswith(status)


def test_the_ways_of_a_question_compute_the_same() -> None:
    """A clipped table that is written out, and packed sequences."""
    for case, make in (
        (Case(2, 2, 20, 16, rows=9, dtype="fp32"), questions.written_out),
        (Case(2, 2, 20, 16, dtype="fp32"), questions.packed),
    ):
        inputs, d_out = case.inputs("cpu")
        one, other = (timing.steps(way(case), inputs, d_out, True)["forward+backward"].run() for way in (ours, make))
        assert len(one) == 5
        for result, each in zip(one, other, strict=True):
            assert_near("the other way", each, result)


def test_a_question_is_answered_by_the_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the limit on by what is above; two ways that differ are no answer."""
    times = {"dq kernel": 3.0, "from dS": 2.0}

    def time_in_turn(every: Any, *_: Any, **__: Any) -> None:
        for timed in every:
            timed.milliseconds.append(times[timed.method])

    monkeypatch.setattr(timing, "time_in_turn", time_in_turn)
    inputs = Case.inputs
    monkeypatch.setattr(Case, "inputs", lambda case, _: inputs(case, "cpu"))
    ways = (questions.Way("dq kernel"), questions.Way("from dS"))
    question = questions.Question("Does it pay?", Case(1, 1, 9, 16, dtype="fp32"), *ways, 1.5, "yes", "no")  # type: ignore[arg-type, misc]
    assert questions.ask(question)["message"].startswith("yes; 3.000 and 2.000 ms")
    assert questions.ask(replace(question, limit=1.6))["message"].startswith("no;") and question.limit == 1.5
    doubled = questions.Way("from dS", make=lambda case: lambda inputs: 2 * ours(case)(inputs))
    assert questions.ask(replace(question, second=doubled))["status"] == "failed"


def test_a_configuration_that_computes_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that cannot run."""
    tiles = [TileConfig(64, 64, 4, stages) for stages in (1, 2, 3)]

    def run_kernels(*given: Any) -> list[torch.Tensor]:
        tile = given[-1]["forward"]
        if tile.num_stages == 3:
            raise RuntimeError("too many stages")
        return [torch.ones(4) * tile.num_stages]

    launch = kernels.Launch("forward", tiles[0], lambda: None)
    monkeypatch.setattr(kernels, "run_kernels", run_kernels)
    monkeypatch.setattr(kernels, "recorded", lambda: nullcontext([launch]))
    monkeypatch.setattr(kernels, "synchronize", lambda: None)
    monkeypatch.setattr(kernels, "time_launches", lambda rows, launches: None)
    inputs = Case.inputs
    monkeypatch.setattr(Case, "inputs", lambda case, _: inputs(case, "cpu"))
    rows = kernels.measure_group(kernels.Group("forward", Case(1, 1, 20, 16), True, tuple(tiles)))
    assert [row["status"].partition(":")[0] for row in rows] == ["ok", "wrong", "cannot run"]
