"""The benchmarks: verbs that need no kernels run, and what goes wrong is in the rows and in the exit status."""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tolerance import tolerance_of, within

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from bench import models
from bench.__main__ import main
from bench.cases import attention as cases
from bench.cases import methods
from bench.cases.attention import Case
from bench.cases.methods import METHODS, OURS, Method
from bench.families import FAMILIES
from bench.measure import point, timing
from bench.report import figures, gpu
from bench.report import models as of_models
from bench.report.rows import ROOT, STAMP, read
from bench.verbs import accuracy, readme, speed, verify
from bench.verbs import lengths as new_lengths
from triton_relattn import RelativePositions

CASE = Case(1, 2, 64, 16, dtype="fp32")
SMALL = ["--cases", "small", "--no-verify", "--device", "cpu"]
PNG = b"\x89PNG"


@pytest.fixture(autouse=True)
def memory_as_before() -> Iterator[None]:
    """The verbs limit the memory of their process, which other tests share."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention would be compiled for twenty seconds a length."""
    monkeypatch.setattr("shutil.which", lambda name: None)


def ladder(monkeypatch: pytest.MonkeyPatch, *lengths: int) -> None:
    monkeypatch.setitem(cases.GROUPS, "small", [CASE.resized(length) for length in lengths])


def in_process(case: Case, method: str, direction: str, memory_limit: int) -> dict[str, Any]:
    """Instead of a process of its own, made-up bytes: ours linear, the others quadratic and above the limit from 96 on."""
    if method != OURS and case.length >= 96:
        return {"status": f"{timing.OUT_OF_MEMORY}: more than {memory_limit}"}
    return {"status": "ok", "peak_bytes": 1000 * case.length ** (1 if method == OURS else 2)}


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*METHODS, *cases.GROUPS, "valid configurations", "b1 h8 n16384 d64 full fp32"))


def test_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows for every method and direction, those that cannot run included; each says where it comes from."""
    files = ["--csv", str(tmp_path / "speed.csv"), "--json", str(tmp_path / "speed.json")]
    assert main(["speed", *SMALL, "--lengths", "96", "--seconds", "0", *files]) == 0
    rows = read(tmp_path / "speed.csv")
    directions = {"forward", "forward+backward"}
    assert {(row["method"], row["direction"]) for row in rows} == {(m, d) for m in METHODS for d in directions}
    assert json.loads((tmp_path / "speed.json").read_text())[0]["method"] == rows[0]["method"] == OURS
    statuses = {row["method"]: row["status"] for row in rows}
    assert statuses["skewing"] == "does not apply: needs a row for every distance"
    assert statuses["flex_attention"] == "does not apply: needs a C++ compiler"
    assert statuses["onnxruntime"] == "does not apply: for a CPU, in float32, all keys seen"
    timed = [row for row in rows if row["status"] == "ok"]
    assert {row["method"] for row in timed} == {OURS, "plain", "sdpa", "shaw_gather", "gather", "dense_bias"}
    for row in timed:
        assert all(row[name] for name in STAMP) and row["verified"] == "no"
        assert 0 < float(row["p20_ms"]) <= float(row["p50_ms"]) <= float(row["p80_ms"]) and int(row["rounds"]) >= 3
        assert row["checked_against"] == "float64" and float(row["error"]) > 0
        within("error", float(row["error"]), tolerance_of(torch.float32))
    assert "b1 h2 n96 d16 r9 causal fp32" in capsys.readouterr().out


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A result that is off, an error, a lack of memory and a missing package are rows, and the first two an exit status."""

    def raising(error: Exception) -> Any:
        def make(case: Case) -> Any:
            raise error

        return make

    made = {
        "off": lambda case: lambda inputs: 1.01 * methods.ours(case)(inputs),
        "broken": raising(RuntimeError("two\nlines")),
        "greedy": lambda case: lambda inputs: torch.empty(1 << 50),
        "missing": raising(ImportError("no package")),
    }
    for name, make in made.items():
        monkeypatch.setitem(METHODS, name, Method("baseline", "made up", make, lambda case, device: None))
    ladder(monkeypatch, 32, 64)
    path = tmp_path / "speed.csv"
    assert main(["speed", *SMALL, "--methods", ",".join(made), "--seconds", "0", "--csv", str(path)]) == 1
    rows = [row for row in read(path) if row["direction"] == "forward"]
    assert not any(row["p50_ms"] for row in rows)
    short, long = ({row["method"]: row["status"] for row in rows if row["seqlen"] == length} for length in ("32", "64"))
    assert short["off"].startswith("wrong: differs from float64 by 0.01")
    assert short["broken"] == "failed: RuntimeError: two lines"
    assert short["greedy"] == "out of memory" and long["greedy"] == "not tried: out of memory at 32"
    assert short["missing"] == long["missing"] == "cannot run: ImportError: no package"
    assert "off, forward, b1 h2 n32 d16 full fp32: wrong" in capsys.readouterr().out


def test_a_red_gate_prints_no_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """speed and memory measure nothing if one of the tests of what they measure fails."""
    monkeypatch.setattr(verify, "gate", lambda device: 1)
    for verb in ("speed", "memory"):
        assert main([verb, "--cases", "small", "--device", "cpu", "--csv", str(tmp_path / "rows.csv")]) == 1
        assert not (tmp_path / "rows.csv").exists()


def test_a_call_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--shape takes the place of the cases, in time and in memory."""
    monkeypatch.setattr(point, "measure_in_own_process", in_process)
    own = ["--shape", "b2,h4,n20,d8,kv2", "--shape", "n12d16q1h2", "--table", "5", "--dtype", "fp32", "--causal"]
    for verb, more in (("speed", ["--seconds", "0"]), ("memory", [])):
        path = tmp_path / f"{verb}.csv"
        words = [*own, "--device", "cpu", "--no-verify", "--methods", f"{OURS},sdpa", "--csv", str(path), *more]
        assert main([verb, *words]) == 0
        assert {row["case"] for row in read(path)} == {"b2 h4:2 n20 d8 r5 causal fp32", "b1 h2 n1:12 d16 r5 causal fp32"}


def test_ctrl_c_keeps_the_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measure = speed.measure

    def interrupted(case: Case, *others: Any) -> Any:
        if case.length > 32:
            raise KeyboardInterrupt
        return measure(case, *others)

    monkeypatch.setattr(speed, "measure", interrupted)
    ladder(monkeypatch, 32, 64)
    main(["speed", *SMALL, "--methods", "plain", "--seconds", "0", "--csv", str(tmp_path / "speed.csv")])
    assert {row["seqlen"] for row in read(tmp_path / "speed.csv")} == {"32"}
    assert "interrupted" in capsys.readouterr().out


@pytest.mark.thorough
def test_memory_in_a_process_of_its_own() -> None:
    """Dense attention holds all scores at once, ours does not; where memory is limited that is a row, not the end."""
    case, scores = CASE.resized(4096), 2 * 4096**2 * 4
    dense, ours = (point.measure_in_own_process(case, method, "forward", 8 << 30) for method in ("gather", OURS))
    assert dense["status"] == ours["status"] == "ok"
    assert dense["peak_bytes"] > 2 * scores > 8 * ours["peak_bytes"] > 0
    limited = point.measure_in_own_process(case.resized(16384), "gather", "forward", 1 << 30)
    assert limited == {"status": "out of memory: more than 1 GiB"}


def end(code: int) -> Any:
    """End this process by a signal or with an exit status; 0: sleep."""
    if code < 0:
        os.kill(os.getpid(), -code)
    if code == 0:
        time.sleep(60)
    os._exit(code)


@pytest.mark.parametrize(
    ("code", "status"),
    [(-9, "out of memory: ended by the system"), (3, "failed: ended with 3"), (0, "stopped: no result after 0 s")],
)
def test_a_process_that_dies_or_hangs_is_a_row(code: int, status: str) -> None:
    assert point.in_own_process(end, (code,), None if code else 0.5) == {"status": status}


def test_memory_goes_on_past_the_failures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What lacks memory is not tried at longer lengths; the law is that of the longer half of the lengths."""
    monkeypatch.setattr(point, "measure_in_own_process", in_process)
    ladder(monkeypatch, 8, 16, 32, 64, 96, 128)
    path = tmp_path / "memory.csv"
    assert main(["memory", *SMALL, "--methods", f"{OURS},gather", "--csv", str(path)]) == 0
    status = {(row["method"], row["seqlen"]): row["status"].partition(":")[0] for row in read(path)}
    assert [status[OURS, length] for length in ("32", "64", "96", "128")] == ["ok"] * 4
    assert [status["gather", length] for length in ("32", "64", "96", "128")] == ["ok", "ok", "out of memory", "not tried"]
    printed = capsys.readouterr().out
    assert "n^1.00" in printed and "n^2.00" in printed and "gather, forward, b1 h2 n96" in printed


def test_every_method_has_a_style_and_every_family_a_name() -> None:
    assert set(figures.STYLES) == set(METHODS)
    assert set(of_models.NAMES) == set(FAMILIES) and len(set(of_models.NAMES.values())) == len(FAMILIES)


def test_figures_show_the_best_dense_method() -> None:
    """At each length the least of them; a title names the worst and the best ratio; memory ends where it ends for all."""
    found = {
        (OURS, 64): 2.0, (OURS, 128): 4.0, (OURS, 256): 8.0,
        ("gather", 64): 3.0, ("skewing", 64): 2.5, ("gather", 128): 20.0, ("skewing", 128): 30.0,
    }  # fmt: skip
    rows = [
        {"method": method, "direction": "forward", "seqlen": str(length), "p50_ms": str(value), "status": "ok"}
        for (method, length), value in found.items()
    ]
    lacking = {"direction": "forward", "p50_ms": "", "status": "out of memory"}
    rows += [{"method": method, "seqlen": "256", **lacking} for method in ("gather", "skewing")]
    points = figures.lines(rows, "forward", "p50_ms", figures.LEADING)
    assert list(points) == [OURS, figures.BEST_DENSE] and points[figures.BEST_DENSE] == [(64, 2.5), (128, 20.0)]
    assert figures.finding(points, "as long", "Time") == "Dense takes 1.2 to 5.0 times as long"
    assert figures.finding({OURS: points[OURS]}, "as long", "Time") == "Time"
    assert figures.failures(rows, "forward", figures.LEADING) == {figures.BEST_DENSE: 256}
    assert figures.failures(rows[:-1], "forward", figures.LEADING) == {}


def test_claims_are_of_all_lengths() -> None:
    """README's and the benchmarks' page name the worst and the best measured length, the longest one included."""
    times: dict[tuple[str, str], dict[str, float]] = {}
    for row in read(readme.RESULTS / "speed.csv"):
        if row["status"] == "ok":
            times.setdefault((row["direction"], row["seqlen"]), {})[row["method"]] = float(row["p50_ms"])
    for direction in ("forward", "forward+backward"):
        ratios = [of[OURS] / of["sdpa"] for (each, _), of in times.items() if each == direction]
        said = f"{min(ratios):.1f} to {max(ratios):.1f}"
        assert said in readme.claims() and said in readme.first(), (direction, said)


def test_rows_of_a_gpu_that_the_host_held_up_are_marked() -> None:
    """The median has to be far above the fastest fifth; a long queue alone delays nothing, nor do rows without a spread."""
    row = {"p50_ms": "1.2", "p20_ms": "1.0", "waits_for_host": "yes"}
    assert gpu.median(row) == "1.20 †"
    for changed in ({"p50_ms": "1.05"}, {"waits_for_host": "no"}, {"p20_ms": ""}):
        assert not gpu.is_held_up(row | changed)


def test_times_that_did_not_repeat_are_marked() -> None:
    """A second run's median of the same call differed by more than a tenth; of those that the host held up they say that."""
    again = {key: float(row["p50_ms"]) for key, row in gpu.timed(run="again").items()}
    found = dict[str, int]()
    for key, row in gpu.timed("long").items():
        ratio = float(row["p50_ms"]) / again.get(key, float(row["p50_ms"]))
        mark = gpu.median(row).partition(" ")[2]
        assert mark == ("†" if gpu.is_held_up(row) else "‡" * (max(ratio, 1 / ratio) > 1.1)), key
        found[mark] = found.get(mark, 0) + 1
    assert found.keys() == {"", "†", "‡"}


def test_claims_of_a_gpu() -> None:
    """README's ratios are those of its calls, losses as well; dense methods are compared with ours in the same call and run."""
    rows = read(gpu.RESULTS / "measure" / "results.csv")
    times = {
        (row["group"], row["case"], row["method"], row["direction"]): row["p50_ms"] for row in rows if row["verb"] == "speed"
    }

    def ratio(group: str, case: str, direction: str, method: str, of: str) -> str:
        first, second = (float(times[group, case, each, direction]) for each in (method, of))
        return f"{first / second:.1f}"

    said = " ".join(readme.PARTS["gpu"]().split())
    for batch, length in ((16, 1024), (4, 4096), (1, 16384)):
        case = f"b{batch} h32 n{length} d64 full bf16"
        forward, both = (ratio("long", case, each, OURS, "sdpa_flash") for each in ("forward", "forward+backward"))
        found = re.search(
            rf"\| {batch} x {length:,} tokens \| [\d.]+ ms(?: †)? \| ([\d.]+) \| [\d.]+ ms(?: †)? \| ([\d.]+) \|", said
        )
        assert found and found.groups() == (forward, both)
    of_dense = (("b16 h32 n1024", "shaw_gather", "shaw_gather"), ("b2 h32 n4096", "dense_bias", "gather"))
    for number, direction in enumerate(("forward", "forward+backward")):
        slower = [ratio("dense", f"{case} d64 full bf16", direction, each[number], OURS) for case, *each in of_dense]
        assert f"{slower[0]}x and {slower[1]}x" in said


def test_calls_that_earlier_kernels_computed_faster_are_named() -> None:
    before, rows = (
        gpu.timed(run="before"),
        {key: row for group in ("long", "speech", "t5") for key, row in gpu.timed(group).items()},
    )
    keys = [key for key in before if key[1:] == (OURS, "forward+backward")]
    slower = [key for key in keys if gpu.over(rows[key], before[key]) > gpu.GAIN]
    page = gpu.earlier()
    assert f"in {len(slower)} of the {len(keys)} calls" in page and 0 < len(slower) < len(keys)
    assert all(f"| {gpu.call_of(rows[key])} |" in page for key in slower)


@pytest.mark.parametrize("smallest", [1000, 0, -4096])
def test_plot_from_csv_alone(smallest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a peak of a short length is nothing, or less than what was there before."""
    ladder(monkeypatch, 32, 64)

    def measured(case: Case, *others: Any) -> dict[str, Any]:
        return {"status": "ok", "peak_bytes": smallest} if case.length == 32 else in_process(case, *others)

    monkeypatch.setattr(point, "measure_in_own_process", measured)
    path = tmp_path / "memory.csv"
    assert main(["memory", *SMALL, "--methods", f"{OURS},gather,sdpa", "--csv", str(path)]) == 0
    assert main(["plot", str(path), "--out", str(tmp_path / "figures")]) == 0
    assert (tmp_path / "figures" / "memory.png").read_bytes().startswith(PNG)


def test_committed_rows_make_the_pages(tmp_path: Path) -> None:
    """Figures and tables of README and docs are what the rows in bench/results give."""
    assert main(["readme", "--out", str(tmp_path)]) == 0
    for page in readme.PAGES:
        assert (tmp_path / page).read_text() == (ROOT / page).read_text(), f"{page}: run python -m bench readme"
    files = [str(readme.RESULTS / f"{name}.csv") for name in ("speed", "memory", "models")]
    assert main(["plot", *files, "--out", str(tmp_path)]) == 0
    assert all((tmp_path / f"{name}.png").read_bytes().startswith(PNG) for name in ("speed", "memory", "models"))


def test_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table compares errors: ours is smaller than the others' in bfloat16 and as good in float32; a failure is a row."""
    arguments = ["--cases", "sharp,near_12800", "--dtypes", "bf16,fp32", "--length", "70", "--device", "cpu"]
    assert main(["accuracy", *arguments, "--csv", str(tmp_path / "rows.csv")]) == 0
    rows = read(tmp_path / "rows.csv")
    assert {row["status"] for row in rows} == {"ok"} and all(row["commit"] and row["torch"] for row in rows)
    ours, eager, sdpa = (
        {(row["case"], row["dtype"]): [float(row[name]) for name in accuracy.RESULTS] for row in rows if row["method"] == method}
        for method in ("triton_relattn (blockwise)", "eager", "sdpa")
    )
    assert all(2 * error < other for error, other in zip(ours["sharp", "bf16"][1:], eager["sharp", "bf16"][1:], strict=True))
    assert 5 * ours["sharp", "bf16"][-1] < sdpa["sharp", "bf16"][-1]
    within("sharp, fp32", ours["sharp", "fp32"][-1], 10 * tolerance_of(torch.float32))  # of terms that cancel
    assert ours["near_12800", "bf16"][0] < 0.01 < 0.5 < eager["near_12800", "bf16"][0]
    assert accuracy.markdown(rows) in capsys.readouterr().out
    assert main(["accuracy", *arguments, "--implementation", "triton", "--methods", OURS]) == 0
    assert "cannot run here" in capsys.readouterr().out


def models_of(*words: str) -> list[str]:
    return ["models", "--small", "--device", "cpu", "--seconds", "0", *words]


@pytest.mark.thorough
def test_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stock and ours, checked, in a process of their own: a figure, a table, and the ratios of batches."""
    pytest.importorskip("transformers")
    path = tmp_path / "models.csv"
    assert main(models_of("--families", "parakeet_attention", "--lengths", "48,24", "--csv", str(path))) == 0
    words = ("--lengths", "24", "--batches", "3", "--methods", "triton_relattn,stock", "--no-memory", "--rounds", "3")
    assert main(models_of("--families", "seamless_m4t_v2", *words, "--csv", str(path), "--append")) == 0
    rows = read(path)
    assert {(row["seqlen"], row["batch"], row["method"]) for row in rows} == {
        *((length, "1", method) for length in ("24", "48") for method in models.METHODS),
        *(("24", "3", method) for method in (OURS, "sdpa")),
    }
    for row in rows:
        assert row["status"] == "ok" and all(row[name] for name in STAMP) and row["checked_against"] == "float64", row
        within("error", float(row["error"]), tolerance_of(torch.float32))
        assert float(row["error"]) > 0 and 0 < float(row["p20_ms"]) <= float(row["p80_ms"])
    capsys.readouterr()
    assert main(["plot", str(path), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "models.png").read_bytes().startswith(PNG)
    shown = capsys.readouterr().out
    times = {row["method"]: float(row["p50_ms"]) for row in rows if (row["batch"], row["direction"]) == ("3", "forward")}
    assert "| Parakeet, attention | 48 |" in shown and f"| sdpa | {times['sdpa'] / times[OURS]:.2f} |" in shown


def test_a_model_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One row too far to the past, and sdpa that is missing."""
    pytest.importorskip("transformers")
    from triton_relattn.integrations import enable
    from triton_relattn.integrations.transformers import vits

    def shifted(first: int, last: int, outside: Any) -> RelativePositions:
        return RelativePositions(first - 1, last - 1, outside=outside)

    def in_this_process(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
        return models.measure(FAMILIES[name], options)

    monkeypatch.setattr(vits, "RelativePositions", shifted)
    monkeypatch.setattr(enable, "compare", lambda module, candidates, *_: (candidates(module)[0][1](), 0.0))
    monkeypatch.setattr(models, "in_own_process", in_this_process)
    path = tmp_path / "models.csv"
    assert main(models_of("--families", "vits", "--lengths", "24", "--directions", "forward", "--csv", str(path))) == 1
    ours, eager, sdpa = read(path)
    assert ours["status"].startswith("wrong: out is off by") and not ours["p50_ms"]
    assert eager["status"] == "ok" and eager["p20_ms"]
    assert sdpa["status"] == "does not apply: the model has none" and not sdpa["p50_ms"]


def test_lengths_never_met(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each length is computed once, and then all of them again; the memory kept is in between."""
    monkeypatch.setattr(new_lengths, "LONGEST", 160)
    monkeypatch.setattr(point, "in_own_process", lambda work, arguments, timeout: work(*arguments))
    path = tmp_path / "lengths.csv"
    assert main(["lengths", "--count", "12", "--methods", "triton_relattn,sdpa", "--csv", str(path)]) == 0
    assert len(set(new_lengths.lengths(11))) == 11 and set(new_lengths.lengths(12)) == set(range(150, 161))
    rows = read(path)
    assert [row["method"] for row in rows] == [OURS, "sdpa"] and all(row["lengths"] == "12" for row in rows)
    assert all(float(row["first_ms"]) > 0 and float(row["again_ms"]) > 0 for row in rows)
    assert "| triton_relattn | 12 |" in capsys.readouterr().out
