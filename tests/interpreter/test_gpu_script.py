"""The measurements on a GPU, run at toy sizes without one."""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import tune
from bench.cases.attention import choose
from bench.gpu import __main__ as gpu
from bench.gpu import measurements
from bench.gpu.__main__ import PARTS, main
from bench.gpu.measurements import TINY
from bench.gpu.report import COLUMNS, PACKED, RESULTS, Outcome, Report, outcome_of
from bench.gpu.variants import Group
from bench.measure import timing
from bench.report.rows import Table, read, stamp
from tests.conftest import PATIENCE
from triton_relattn._reference import reference_attention
from triton_relattn.kernels import tuning
from triton_relattn.kernels.config import profiles
from triton_relattn.kernels.config.selection import TileConfig

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "bench.gpu", "--device", "cpu", "--tiny"]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        assert reader.fieldnames == COLUMNS[path.name]
    return rows


def unpacked(folder: Path) -> Path:
    """The folder of what is packed in the end."""
    with tarfile.open(folder / PACKED) as packed:
        packed.extractall(folder / "raw", filter="data")
    return folder / "raw"


def here(folder: Path, *parts: str) -> dict[str, Outcome]:
    """Run parts in this process; what became of them."""
    (folder / "raw").mkdir(parents=True, exist_ok=True)
    arguments = ["--results", str(folder), "--here", str(folder / "raw"), "--device", "cpu", "--tiny", "--reach", "1"]
    assert main([*arguments, "--parts", ",".join(parts), "--seconds", "600"]) == 0
    return {part: outcome_of(folder / "raw", part, 0, 1.0) for part in parts}


@pytest.mark.thorough
def test_all_parts(tmp_path: Path) -> None:
    parts = [part for part in PARTS if part != "tests"]  # they need a GPU
    outcomes = here(tmp_path, *parts)
    left_out = {part for part, outcome in outcomes.items() if outcome.status == "left out"}
    assert left_out == {"sanitizer", "counters", "graphs"}  # which need a GPU
    assert {outcome.status for part, outcome in outcomes.items() if part not in left_out} == {"ok"}
    raw = tmp_path / "raw"
    assert {path.name for path in tmp_path.iterdir()} == {"raw", "results.csv", "profile.csv", "profile.csv.lock"}
    judged = {f"part-{part}.json" for part in parts}
    assert {path.name for path in raw.iterdir()} == {*COLUMNS, *judged, "environment.json", "tune.csv"}
    assert json.loads((raw / "environment.json").read_text())["torch"] == torch.__version__
    rows = {name: rows_of(raw / name) for name in COLUMNS}
    assert all(row["status"] == "ok" for some in rows.values() for row in some)

    correctness = [row for row in rows["correctness.csv"] if row["part"] == "correctness"]
    assert [row["sharp"] for row in rows["correctness.csv"] if row["part"] == "smoke"] == ["False", "True"]
    assert {row["table"] for row in correctness} == {"full", "clamped", "zero", "none"}
    assert {row["dtype"] for row in correctness} == {"float16", "float32"}
    for row in correctness:
        absent = {
            name for name, there in (("d_rel_key", row["table"] != "none"), ("d_rel_p2c", row["p2c"] == "True")) if not there
        }
        assert {name for name in RESULTS if not row[name]} == absent
    assert {row["p2c"] for row in correctness} == {"True", "False"}
    kernels = Counter(row["kernel"] for row in rows["configs.csv"])
    assert kernels == {"forward": 10, "dq": 10, "dkv": 10, "dtable": 8, "dp2c": 2, "dq_from_ds": 4}
    assert all(row["config"] for row in rows["configs.csv"])
    of_parts = {"repeats": 4, "host": 6, "roofs": 6, "workspaces": 3, "questions": 5}
    assert Counter(row["part"] for row in rows["checks.csv"]) == of_parts
    (unanswered,) = [row for row in rows["checks.csv"] if not row["value"]]
    assert unanswered["message"] == "not answered: there is no time of gpu, speech"
    assert all(float(row["value"]) > 0 for row in rows["checks.csv"] if row is not unanswered)

    measured = read(tmp_path / "results.csv")
    assert {row["verb"] for row in measured} == {"speed", "memory", "kernels"}
    of_ours = {row["direction"] for row in measured if (row["verb"], row["method"]) == ("speed", "triton_relattn")}
    assert of_ours == {*timing.DIRECTIONS, *timing.PARTS}
    assert {row["verified"] for row in measured if row["verb"] != "kernels"} == {"yes"}
    assert all(row["p50_ms"] for row in measured if (row["verb"], row["status"]) == ("speed", "ok"))
    biases = {row["method"] for row in measured if row["table"] == "full bias" and row["status"] == "ok"}
    assert biases == {"triton_relattn", "plain", "sdpa"}
    flex = [row for row in measured if row["method"] == "flex_attention"]
    assert flex and all(row["status"] == "does not apply: needs a GPU" for row in flex)

    pytest.importorskip("matplotlib")
    assert "| forward |" in gpu.draw(argparse.Namespace(results=tmp_path))
    assert all((tmp_path / f"{verb}.png").read_bytes().startswith(b"\x89PNG") for verb in ("speed", "memory"))

    alone = [row for row in measured if row["verb"] == "kernels"]
    smoke = [(row["method"], row["direction"]) for row in alone[:7]]
    assert smoke == [
        *(("plain", f"{kernel} kernel") for kernel in ("forward", "dq", "dkv")),
        *(("triton_relattn", f"{kernel} kernel") for kernel in ("forward", "dkv", "dtable", "dq_from_ds")),
    ]
    assert all(row["status"] == "ok" and float(row["p50_ms"]) > 0 for row in alone)
    assert len({row["config"] for row in alone[7:]}) > 5  # variants
    assert all(float(row["error"]) < 0.02 for row in alone[7:])


@pytest.mark.thorough
def test_as_processes(tmp_path: Path) -> None:
    """Parts in processes of their own, and workers in theirs; a second run adds to the files of the first."""
    for parts, jobs in (("smoke,host", "2"), ("correctness,sanitizer", "1")):
        command = [*COMMAND, "--results", str(tmp_path), "--parts", parts, "--jobs", jobs, "--seconds", "600"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        summary = done.stdout.partition("== summary")[2]
        assert "0 of 2 parts failed\n0 were cut off" in summary
        assert all(part in summary for part in parts.split(","))
    assert {path.name for path in tmp_path.iterdir()} == {"log.txt", "results.csv", PACKED}
    raw = unpacked(tmp_path)
    assert {path.name for path in raw.iterdir()} == {
        *("correctness.csv", "checks.csv", "environment.json"),
        *(f"part-{part}.json" for part in ("correctness", "sanitizer")),
    }
    assert {row["part"] for row in rows_of(raw / "checks.csv")} == {"host"}
    assert len((tmp_path / "log.txt").read_text().split("== summary")) == 3


def test_a_kernel_that_is_wrong_or_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the selected one: what differs from it has failed and is not timed, what does not fit has not failed."""
    from bench.gpu import kernels

    run = kernels.run_kernels

    def changed(tensors: Any, spec: Any, d_out: Any, tiles: Any) -> Any:
        if tiles.get("dkv") == TileConfig(32, 32, 4, 1):
            raise RuntimeError("out of resource: shared memory")
        out, *gradients = run(tensors, spec, d_out, tiles)
        wrong = tiles.get("dkv") == TileConfig(16, 16, 4, 1)
        return [out, *((1.1 * gradient if wrong else gradient) for gradient in gradients)]

    monkeypatch.setattr(kernels, "run_kernels", changed)
    tiles = tuple(TileConfig(size, size, 4, 1) for size in (64, 32, 16))
    rows = kernels.measure_group(Group("dkv", kernels.TINY, True, tiles), "cpu", 0.0)
    assert [row["status"].partition(":")[0] for row in rows] == ["ok", "cannot run", "wrong"]
    assert ["p50_ms" in row for row in rows] == [True, False, False]
    for folder, order in (("selected", tiles), ("cannot run", (tiles[1], tiles[0], tiles[2]))):
        group = Group("dkv", kernels.case_of(64, "full"), True, order)
        monkeypatch.setattr(kernels, "groups", lambda _, group=group: [group])
        outcome = here(tmp_path / folder, "variants")["variants"]
        assert (outcome.status, outcome.note) == ("FAILED, 1 of 3", "1 of 1 kernels")
        assert "cannot run: RuntimeError: out of resource" in capsys.readouterr().out


def test_only_one_kernel_runs() -> None:
    from bench.gpu import kernels

    inputs, d_out = kernels.TINY.inputs("cpu")
    tensors, spec = kernels.TINY.resolved(inputs)
    with kernels.recorded("dkv") as launches:
        kernels.run_kernels(tensors, spec, d_out, {"dkv": TileConfig(32, 32, 4, 1)})
    assert [(launch.name, launch.config.block_m) for launch in launches] == [("dkv", 32)]


@pytest.mark.parametrize("name", ["long", "inkling", "deberta"])
def test_a_case_is_verified_by_a_short_call(name: str) -> None:
    """With grouped heads and a query of its own, or a second table, too."""
    case = choose([name])[-1]
    case = replace(measurements.small(case), length=48, heads=8 if case.key_heads else 1, dtype="fp16", head_dim=16, batch=1)
    case = replace(case, key_heads=2 if case.key_heads else None, rows=case.rows and 21)
    assert measurements.verified(case, "cpu") == {}


def test_what_is_wrong_is_not_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By case, and by method: plain attention may be right where a table is not."""

    def problems(case: Any, has_table: bool, device: str) -> str:
        return "d_rel_key exceeds the budget" if has_table and case.rows else ""

    monkeypatch.setattr(measurements, "problems_of", problems)
    outcome = here(tmp_path, "speed")["speed"]
    assert outcome.failed == 1 and "d_rel_key exceeds the budget" in outcome.errors[0]
    rows = [row for row in read(tmp_path / "results.csv") if row["direction"] == "forward"]
    found = {(row["table"], row["method"]): row["verified"] for row in rows}
    assert found["clamp 9", "triton_relattn"] == "no" and found["clamp 9", "plain"] == "yes"
    assert found["full", "triton_relattn"] == "yes"


def test_the_search_checks_and_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest right one of several configurations goes into the profile; a wrong one does not, however fast it is."""
    task = tune.Task(TINY[0], True, "forward", "sm_90")
    tiles = [TileConfig(64, 64, 4, 1), TileConfig(32, 32, 4, 1), TileConfig(16, 16, 4, 1), TileConfig(64, 32, 4, 1)]
    milliseconds = dict(zip(tiles, (10.0, 5.0, 3.0, 9.9), strict=True))
    forward = tuning.forward

    def wrong_in_small_tiles(tensors: Any, spec: Any, config: TileConfig | None = None, **options: Any) -> Any:
        out, *others = forward(tensors, spec, config, **options)
        return (1.01 * out if config == tiles[2] else out), *others

    def instead_of_time(every: Sequence[timing.Timed], *_: object) -> None:
        for timed in every:
            if timed.is_ok:
                timed.milliseconds.append(milliseconds[timed.step.before()])

    monkeypatch.setattr(tune, "candidates", lambda *_: tiles)
    monkeypatch.setattr(tuning, "forward", wrong_in_small_tiles)
    monkeypatch.setattr(timing, "time_in_turn", instead_of_time)
    tune._small_call.cache_clear()
    options = argparse.Namespace(reach=1, timed=4, seconds=0.0, device="cpu", no_verify=True, profile=tmp_path / "profile.csv")
    results = Table(tune.COLUMNS, stamp("sm_90"), tmp_path / "tune.csv")
    tune.tune(task, options, lambda _, tiles: [{"status": "ok", "instructions_per_score": 1.0} for _ in tiles], results)
    rows = {(int(row["block_m"]), int(row["block_n"])): row for row in read(tmp_path / "tune.csv")}
    assert rows[16, 16]["status"].startswith("wrong") and not rows[16, 16]["p50_ms"]
    assert [tile for tile, row in rows.items() if row["is_chosen"] == "True"] == [(32, 32)]
    assert profiles.load(options.profile, "sm_90") == [profiles.Row(task.conditions, tiles[1], 5.0, 10.0)]

    milliseconds[tiles[1]] = 9.9  # as good as the default
    tune.tune(task, options, lambda _, tiles: [{"status": "ok", "instructions_per_score": 1.0} for _ in tiles], results)
    assert profiles.load(options.profile, "sm_90") == [profiles.Row(task.conditions, tiles[0], 10.0, 10.0)]
    assert tune.unknown([task], options.profile) == []


def test_failures_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong result and a kernel that raises, and an exit status that says so."""
    from bench.gpu import checks

    def wrong(*tensors: torch.Tensor, **arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = reference_attention(*tensors)
        return out * 1.01, lse

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of resource:\nshared memory")

    case = checks.Checked("none", False, "float16", num_queries=5, num_keys=5)
    monkeypatch.setattr(checks, "correctness_cases", lambda tiny: [case])
    for function, status in ((wrong, "FAILED, 2 of 2"), (broken, "FAILED, 2 of 2")):
        monkeypatch.setattr(checks, "OURS", function)
        assert here(tmp_path, "correctness")["correctness"].status == status
    rows = rows_of(tmp_path / "raw" / "correctness.csv")
    assert [row["status"] for row in rows] == ["FAILED", "FAILED", "error", "error"]
    assert "exceeds the budget" in rows[0]["message"]
    assert rows[2]["message"] == "RuntimeError: out of resource: shared memory"
    assert "failed: part=correctness" in capsys.readouterr().out


def test_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items that there is no time for are counted: the part is cut off."""
    monkeypatch.setattr(gpu.time, "monotonic", lambda monotonic=gpu.time.monotonic: monotonic() + 1e6)
    options = argparse.Namespace(results=tmp_path, raw=tmp_path, device="cpu", arch="interpreter", jobs=0, tiny=True)
    options = argparse.Namespace(**vars(options), seconds=1.0, reach=1, dtype="float16", parts=[])
    for part in ("correctness", "configs", "variants", "host", "memory", "speed", "tune"):
        report = Report(options, part)
        PARTS[part][0](options, report, gpu.time.monotonic() - 1.0)
        report.done(report.outcome.note)
        outcome = outcome_of(tmp_path, part, 0, 1.0)
        assert outcome.status == "cut off after 1 s", part


SANITIZER = """#!/bin/sh
# As compute-sanitizer: --tool, its name, --error-exitcode, a number, and the program
[ "$PYTORCH_NO_CUDA_MEMORY_CACHING" = 1 ] || exit 3
case "$2" in
    {broken}) echo "========= Error: device not supported"; exit 1 ;;
    {finding}) echo "call: one"; echo "========= ERROR SUMMARY: 2 errors"; exit "$4" ;;
esac
shift 4
[ "$1" = --report-api-errors ] && shift 2
"$@" && echo "========= ERROR SUMMARY: 0 errors"
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("broken", "finding"), [("none", "racecheck"), ("racecheck", "memcheck")])
def test_sanitizer(
    broken: str, finding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Findings of memcheck are failures; those of racecheck may be false; a tool that cannot work here has not failed."""
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.write_text(SANITIZER.format(broken=broken, finding=finding))
    program.chmod(0o755)
    outcome = here(tmp_path / "results", "sanitizer")["sanitizer"]
    assert (outcome.status, outcome.note) == ("left out", "there is no compute-sanitizer")
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    outcome = here(tmp_path / "results", "sanitizer")["sanitizer"]
    assert (outcome.failed, outcome.cut_off) == ((1, 0) if finding == "memcheck" else (0, 1))
    rows = {row["case"]: row for row in rows_of(tmp_path / "results" / "raw" / "checks.csv")}
    assert rows[finding]["status"].startswith("FAILED" if finding == "memcheck" else "cut off: it found hazards")
    assert rows[finding]["value"] == "1" and "2 errors" in rows[finding]["message"]
    if broken == "racecheck":
        assert "racecheck cannot work here: ========= Error: device not supported" in capsys.readouterr().out
        assert set(rows) == {finding}
    else:
        assert (rows["memcheck"]["status"], rows["memcheck"]["value"]) == ("ok", "7")


@pytest.mark.thorough
def test_a_slow_sanitizer_has_not_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither before its first call nor after it; nor has it passed."""
    program = tmp_path / "compute-sanitizer"
    program.write_text('#!/bin/sh\n[ "$2" = memcheck ] || echo "call: one: ok"\nexec sleep 600\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "raw").mkdir()
    arguments = ["--results", str(tmp_path), "--here", str(tmp_path / "raw"), "--device", "cpu", "--tiny"]
    assert main([*arguments, "--parts", "sanitizer", "--seconds", "4"]) == 0
    outcome = outcome_of(tmp_path / "raw", "sanitizer", 0, 4.0)
    assert outcome.failed == 0 and outcome.cut_off == 2 and outcome.status == "cut off after 4 s"
    rows = rows_of(tmp_path / "raw" / "checks.csv")
    assert [(row["status"].startswith("cut off after"), row["value"]) for row in rows] == [(True, "0"), (True, "1")]


def test_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--results", str(tmp_path / "results")]) == 2
    assert capsys.readouterr().out == "no GPU: torch.cuda.is_available() is false\n"
    assert not (tmp_path / "results").exists()


@pytest.mark.thorough
def test_interrupted_with_several_processes(tmp_path: Path) -> None:
    """Rows that there are stay, and the end is said."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*COMMAND, "--results", str(tmp_path), "--jobs", "1", "--parts", "variants,configs", "--seconds", "600"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + PATIENCE
    while not (tmp_path / "results.csv").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, output
    assert "interrupted\n" in output and "0 of 1 parts failed" in output
    rows = read(tmp_path / "results.csv")
    assert rows and all(row["status"] == "ok" for row in rows)
    assert (unpacked(tmp_path) / "part-variants.json").exists()


@pytest.mark.thorough
def test_what_a_part_has_started_ends_with_it(tmp_path: Path) -> None:
    """Programs in groups of their own, too."""
    program, number = tmp_path / "compute-sanitizer", tmp_path / "number"
    program.write_text(f"#!/bin/sh\necho $$ > {number}.new; mv {number}.new {number}\nexec sleep 600\n")
    program.chmod(0o755)
    (tmp_path / "raw").mkdir()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = [*COMMAND, "--results", str(tmp_path), "--here", str(tmp_path / "raw"), "--parts", "sanitizer"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + PATIENCE
    while not number.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    process.communicate(timeout=PATIENCE)
    deadline = time.monotonic() + 30  # somebody else has to take notice of its end, which a busy machine may put off
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(int(number.read_text()), 0)
            time.sleep(0.05)


def test_parts_are_known(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--results", str(tmp_path), "--parts", "correctness,nonsense"])
    first = ["smoke", "questions", "roofs", "variants", "correctness", "speed", "flex", "counters"]
    then = ["tests", "configs", "memory", "workspaces", "graphs", "host", "repeats", "sanitizer", "tune"]
    assert list(PARTS) == [*first, *then]
