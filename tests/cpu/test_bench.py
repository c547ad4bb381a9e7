"""The benchmarks: every verb that needs no kernels runs, and what goes wrong is in the rows and in the exit status."""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from tests.tolerance import assert_near, tolerance_of, within

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from bench import models
from bench.__main__ import VERBS, main
from bench.cases import attention as cases
from bench.cases import methods
from bench.cases.attention import Case
from bench.cases.configurations import shown
from bench.cases.methods import METHODS, OURS, Method
from bench.families import FAMILIES
from bench.measure import point, timing
from bench.report import summary
from bench.report.figures import STYLES, ticks_of
from bench.report.rows import STAMP, read
from bench.verbs import accuracy, memory, speed, verify
from triton_relattn import RelativePositions, fused_relative_attention
from triton_relattn.kernels.config import selection

CASE = Case(1, 2, 64, 16, dtype="fp32")
SMALL = ["--cases", "small", "--no-verify", "--device", "cpu"]


@pytest.fixture(autouse=True)
def memory_as_before() -> Iterator[None]:
    """The verbs limit the memory of their process, which other tests share."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


def in_process(case: Case, method: str, direction: str, memory_limit: int) -> dict[str, Any]:
    """Instead of a process of its own, made-up bytes: ours linear, the others quadratic and above the limit from 96 on."""
    if method != OURS and case.length >= 96:
        return {"status": f"{timing.OUT_OF_MEMORY}: more than {memory_limit}"}
    return {"status": "ok", "peak_bytes": 1000 * case.length ** (1 if method == OURS else 2)}


def ladder(monkeypatch: pytest.MonkeyPatch, *lengths: int) -> None:
    monkeypatch.setitem(cases.GROUPS, "small", [CASE.resized(length) for length in lengths])


def test_every_verb_has_its_module(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS:
        with pytest.raises(SystemExit) as ended:
            main([verb, "--help"])
        assert ended.value.code == 0 and f"python -m bench {verb}" in capsys.readouterr().out


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*METHODS, *cases.GROUPS, "valid configurations", "b1 h8 n16384 d64 full fp32"))
    lines = [line for line in printed.splitlines() if line.split()[:1] == ["forward"]]
    for coverage, line in zip(("no table", "full"), lines, strict=True):
        assert line.endswith(shown(selection.select("forward", "sm_90", torch.bfloat16, 64, coverage)))


def test_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows for every method and direction, those that cannot run included; each says where it comes from."""
    files = ["--csv", str(tmp_path / "speed.csv"), "--json", str(tmp_path / "speed.json")]
    assert main(["speed", *SMALL, "--lengths", "96", "--seconds", "0", *files]) == 0
    rows = read(tmp_path / "speed.csv")
    assert {(row["method"], row["direction"]) for row in rows} == {(m, d) for m in METHODS for d in memory.DIRECTIONS}
    assert json.loads((tmp_path / "speed.json").read_text())[0]["method"] == rows[0]["method"] == OURS
    statuses = {row["method"]: row["status"] for row in rows}
    assert [name for name, status in statuses.items() if status == "ok"] == [
        *(OURS, "plain", "sdpa", "shaw_gather", "gather", "dense_bias")
    ]
    assert statuses["skewing"] == "does not apply: needs a row for every distance"
    assert statuses["flex_attention"] == "does not apply: needs a GPU"
    for row in rows:
        assert all(row[name] for name in STAMP), row
        if row["status"] == "ok":
            assert 0 < float(row["p20_ms"]) <= float(row["p50_ms"]) <= float(row["p80_ms"]) and int(row["rounds"]) >= 3
            within("error", float(row["error"]), tolerance_of(torch.float32))
            assert float(row["error"]) > 0 and row["checked_against"] == "float64" and row["verified"] == "no"
    assert rows[0]["config"] == "blockwise"
    printed = capsys.readouterr().out
    assert "b1 h2 n96 d16 r9 causal fp32" in printed and "dense_bias" in printed


def test_wrong_and_broken_methods_get_no_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A result that is off, an error, a lack of memory and a missing package are rows, and the first two an exit status."""

    def of(run: Any) -> Method:
        return Method("baseline", "made up", run, lambda case, device: None)

    def off(case: Case) -> Any:
        return lambda inputs: 1.01 * methods.ours(case)(inputs)

    def broken(case: Case) -> Any:
        raise RuntimeError("two\nlines")

    def greedy(case: Case) -> Any:
        return lambda inputs: torch.empty(1 << 50)

    def missing(case: Case) -> Any:
        raise ImportError("no package")

    for name, run in (("off", off), ("broken", broken), ("greedy", greedy), ("missing", missing)):
        monkeypatch.setitem(METHODS, name, of(run))
    ladder(monkeypatch, 32, 64)
    path = tmp_path / "speed.csv"
    assert main(["speed", *SMALL, "--methods", "off,broken,greedy,missing", "--seconds", "0", "--csv", str(path)]) == 1
    rows = [row for row in read(path) if row["direction"] == "forward"]
    assert not any(row["p50_ms"] for row in rows)
    short, long = ({row["method"]: row["status"] for row in rows if row["seqlen"] == length} for length in ("32", "64"))
    assert short["off"].startswith("wrong: differs from float64 by 0.01")
    assert short["broken"] == "failed: RuntimeError: two lines"
    assert short["greedy"] == "out of memory" and long["greedy"] == "not tried: out of memory at 32"
    assert short["missing"] == long["missing"] == "cannot run: ImportError: no package"
    assert "off, forward, b1 h2 n32 d16 full fp32: wrong" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_red_gate_prints_no_number(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """speed and memory run the tests first, and measure nothing if one fails; verify says so."""
    test = tmp_path / "test_red.py"
    test.write_text("def test_red():\n    assert False, 'because'\n")
    monkeypatch.setattr(verify, "TESTS", [str(test)])
    for verb in ("speed", "memory"):
        assert main([verb, "--cases", "small", "--device", "cpu", "--csv", str(tmp_path / "rows.csv")]) == 1
        printed = capsys.readouterr().out
        assert "because" in printed and "p50" not in printed and " ms" not in printed
        assert not (tmp_path / "rows.csv").exists()
    assert main(["verify", "--device", "cpu"]) != 0
    test.write_text("def test_green():\n    pass\n")
    assert main(["verify", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.endswith("all pass\n")


def test_without_pytest_the_gate_says_what_helps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(verify.importlib.util, "find_spec", lambda _: None)
    assert main(["verify", "--device", "cpu"]) == 1
    assert "pip install pytest" in capsys.readouterr().out


def test_a_call_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """--shape takes the place of the cases, in time and in memory."""
    monkeypatch.setattr(point, "measure_in_own_process", in_process)
    own = [
        "--shape",
        "b2,h4,n20,d8,kv2",
        "--shape",
        "n12,d16,q1,h2",
        "--table",
        "5",
        "--dtype",
        "fp32",
        "--causal",
        "--device",
        "cpu",
    ]
    for verb, more in (("speed", ["--seconds", "0"]), ("memory", [])):
        path = tmp_path / f"{verb}.csv"
        assert main([verb, *own, "--no-verify", "--methods", f"{OURS},sdpa", "--csv", str(path), *more]) == 0
        cases = {row["case"] for row in read(path)}
        assert cases == {"b2 h4:2 n20 d8 r5 causal fp32", "b1 h2 n1:12 d16 r5 causal fp32"}
    for shape, why in (("b2,h4", "has no length"), ("b2,x4,n5", "'x4' is no size"), ("n0", "'n0' is no size")):
        with pytest.raises(SystemExit):
            main(["speed", "--shape", shape])
        assert why in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["speed", "--shape", "n5", "--table", "4"])
    assert "odd number of rows" in capsys.readouterr().err


def test_the_gate_tests_what_is_measured() -> None:
    root = Path(__file__).parents[2]
    assert len(verify.TESTS) >= 4 and all((root / test).exists() for test in verify.TESTS)


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
    case = CASE.resized(4096)
    scores = 2 * 4096**2 * 4
    dense, ours = (point.measure_in_own_process(case, method, "forward", 8 << 30) for method in ("gather", OURS))
    assert dense["status"] == ours["status"] == "ok"
    assert dense["peak_bytes"] > 2 * scores > 8 * ours["peak_bytes"] > 0
    limited = point.measure_in_own_process(case.resized(16384), "gather", "forward", 1 << 30)
    assert limited == {"status": "out of memory: more than 1 GiB"}


@pytest.mark.parametrize(("code", "status"), [(-9, "out of memory: ended by the system"), (3, "failed: ended with 3")])
def test_a_process_that_dies_is_a_row(code: int, status: str) -> None:
    assert point.in_own_process(die, (code,), None) == {"status": status}


def test_a_process_that_takes_too_long_is_a_row() -> None:
    assert point.in_own_process(wait, (60.0,), 0.5) == {"status": "stopped: no result after 0 s"}


def die(code: int) -> Any:
    """End this process by a signal, or with an exit status."""
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def wait(seconds: float) -> dict[str, Any]:
    time.sleep(seconds)
    return {}


def test_memory_goes_on_past_the_failures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(point, "measure_in_own_process", in_process)
    ladder(monkeypatch, 8, 16, 32, 64, 96, 128)
    path = tmp_path / "memory.csv"
    assert main(["memory", *SMALL, "--methods", f"{OURS},gather", "--csv", str(path)]) == 0
    status = {(row["method"], row["seqlen"]): row["status"].partition(":")[0] for row in read(path)}
    assert [status[OURS, length] for length in ("32", "64", "96", "128")] == ["ok"] * 4
    assert [status["gather", length] for length in ("32", "64", "96", "128")] == ["ok", "ok", "out of memory", "not tried"]
    printed = capsys.readouterr().out
    assert "n^1.00" in printed and "n^2.00" in printed and "gather, forward, b1 h2 n96" in printed


def test_exponent() -> None:
    """The exponent is fitted to the longer half of the lengths: the overhead of short ones does not count."""
    lengths = (256, 512, 1024, 2048, 4096, 8192)
    assert summary.exponent([(n, 10**8 / n + 5.0 * n**2) for n in lengths]) == pytest.approx(2, abs=0.01)
    assert summary.exponent([(256, 3.0)]) is None and summary.exponent([]) is None
    few = [(n, 5.0 * n**2) for n in (1000, 2000, 4000)]
    assert summary.exponent(few) is None, "a law of lengths that are near to each other"
    assert summary.exponent([(500, 5.0 * 500**2), *few]) == pytest.approx(2)


@pytest.mark.parametrize("smallest", [1000, 0, -4096])
def test_plot_from_csv_alone(smallest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a peak of a short length is nothing, or less than what was there before: it is left out."""
    ladder(monkeypatch, 32, 64)

    def measured(case: Case, *others: Any) -> dict[str, Any]:
        return {"status": "ok", "peak_bytes": smallest} if case.length == 32 else in_process(case, *others)

    monkeypatch.setattr(point, "measure_in_own_process", measured)
    files = {verb: str(tmp_path / f"{verb}.csv") for verb in ("speed", "memory")}
    of_verb = {"speed": ["--seconds", "0"], "memory": []}
    for verb, path in files.items():
        assert main([verb, *SMALL, "--methods", f"{OURS},gather,sdpa", "--csv", path, *of_verb[verb]]) == 0
    assert main(["plot", *files.values(), "--out", str(tmp_path / "figures")]) == 0
    for verb in files:
        assert (tmp_path / "figures" / f"{verb}.png").read_bytes().startswith(b"\x89PNG")


def test_committed_results_draw_the_figures(tmp_path: Path) -> None:
    """The documentation's figures and tables come from the committed rows, which have all baselines, both directions and one
    commit."""
    folder = Path(__file__).parents[2] / "bench" / "results" / "cpu"
    paths = [folder / "speed.csv", folder / "memory.csv"]
    for path in paths:
        with path.open() as file:
            assert tuple(csv.DictReader(file).fieldnames or ()) == (*speed.COLUMNS, *STAMP)
        rows = read(path)
        assert {row["seqlen"] for row in rows} == {str(512 << k) for k in range(6)}
        on_cpu = [name for name, method in METHODS.items() if method.why_not(cases.GROUPS["cpu"][0], "cpu") is None]
        assert {(row["method"], row["direction"]) for row in rows} >= {(m, d) for m in on_cpu for d in memory.DIRECTIONS}
        assert len({row["commit"] for row in rows}) == 1
        assert {row["verified"] for row in rows if row["verb"] == "speed"} <= {"yes"}
    assert main(["plot", *map(str, paths), "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"speed.png", "memory.png"}
    page = (folder.parents[2] / "docs" / "benchmarks.md").read_text()
    assert summary.markdown([row for path in paths for row in read(path)]) in page


def test_committed_results_of_models(tmp_path: Path) -> None:
    """Ours is right and the leanest at the longest length, or as lean as stock models that are linear, too (Granite Speech 5) or
    have their peak elsewhere (Phi-4's convolutions); the table of docs/transformers.md is made of them."""
    path = Path(__file__).parents[2] / "bench" / "results" / "cpu" / "models.csv"
    rows = read(path)
    measured = {row["case"] for row in rows}
    assert {"wav2vec2_bert", "vits", "inkling", "gemma4"} <= measured <= set(FAMILIES)
    for name in measured:
        ours, *others = (
            summary.points([row for row in rows if row["case"] == name], method, "forward+backward", "peak_bytes")
            for method in models.METHODS
        )
        factor = 1.05 if name in ("granite_speech5", "phi4_multimodal") else 1
        assert all(dict(ours)[points[-1][0]] < factor * points[-1][1] for points in others if points), name
    assert {row["status"] for row in rows if row["method"] == OURS} == {"ok"}
    assert main(["plot", str(path), "--out", str(tmp_path)]) == 0
    page = (path.parents[3] / "docs" / "transformers.md").read_text()
    lines = set(page.splitlines())
    for file in ("models.csv", "models_short.csv"):  # some of the families stand in the page
        head, rule, *body = summary.models(read(path.with_name(file))).splitlines()
        assert {head, rule} <= lines and sum(line in lines for line in body) >= 8, file
    assert summary.ratios(read(path.with_name("models_bf16.csv"))) in page


def test_models_of_which_nothing_can_be_drawn(tmp_path: Path) -> None:
    """Forward alone is in the table and in no figure."""
    rows = read(Path(__file__).parents[2] / "bench" / "results" / "cpu" / "models.csv")
    path = tmp_path / "models.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerow(rows[0] | {"direction": "forward"})
    assert main(["plot", str(path), "--out", str(tmp_path)]) == 0
    assert [each.name for each in tmp_path.iterdir()] == ["models.csv"]


def test_committed_results_in_bfloat16() -> None:
    """The table of docs/benchmarks.md; at every size ours take at most 2.8 times as long as SDPA without a term."""
    rows = read(Path(__file__).parents[2] / "bench" / "results" / "cpu" / "short_bf16.csv")
    assert {row["dtype"] for row in rows} == {"bf16"} and {row["status"] for row in rows if row["method"] == OURS} == {"ok"}
    times = {(row["group"], row["case"], row["direction"], row["method"]): float(row["p50_ms"]) for row in rows if row["p50_ms"]}
    for (group, case, direction, method), milliseconds in times.items():
        assert method != OURS or milliseconds < 2.8 * times[group, case, direction, "sdpa"], case
    assert summary.beside_dense(rows) in (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()


def test_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table compares errors: ours is smaller than the others' in bfloat16 and as good in float32; a failure is a row."""
    arguments = ["--cases", "sharp,near_12800", "--dtypes", "bf16,fp32", "--length", "70"]
    assert main(["accuracy", *arguments, "--csv", str(tmp_path / "rows.csv"), "--device", "cpu"]) == 0
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
    assert main(["accuracy", *arguments, "--implementation", "triton", "--methods", "triton_relattn"]) == 0
    assert "cannot run here" in capsys.readouterr().out


def test_committed_results_of_accuracy() -> None:
    """Every case, in float16 and float32 the kernels too; the table of docs/numerics.md."""
    path = Path(__file__).parents[2] / "bench" / "results" / "cpu" / "accuracy.csv"
    rows = read(path)
    assert {row["status"] for row in rows} == {"ok"}
    methods_of = {
        "bf16": {"triton_relattn (blockwise)", "eager", "sdpa"},
        "fp16": {"triton_relattn (blockwise)", "triton_relattn (triton)", "eager", "sdpa"},
    }
    for case in accuracy.CASES:
        for dtype in ("bf16", "fp16", "fp32"):
            found = {row["method"] for row in rows if (row["case"], row["dtype"]) == (case, dtype)}
            assert found == methods_of.get(dtype, methods_of["fp16"]), (case, dtype)
    assert accuracy.markdown(rows) in (path.parents[3] / "docs" / "numerics.md").read_text()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "case",
    [CASE, CASE.resized(64, is_causal=True), CASE.resized(64, rows=9), CASE.resized(64, p2c=True), CASE.resized(64, bias=True)],
    ids=str,
)
def test_flex_attention_is_set_up_right(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """flex_attention, which is compiled on a GPU, gives the right result when it is not compiled."""
    monkeypatch.setattr(methods, "_compiled_flex_attention", lambda: flex_attention)
    inputs, d_out = case.inputs("cpu")
    inputs = inputs.map(torch.Tensor.detach)
    expected, _ = timing.golden(case, inputs, d_out, "cpu", True)
    within("out", timing.distance([METHODS["flex_attention"].make(case)(inputs)], expected[:1]), tolerance_of(torch.float32))


def test_every_method_has_a_style() -> None:
    """Else there would be no figure of a run that has measured it."""
    assert STYLES.keys() == METHODS.keys()


def test_a_dense_bias_is_set_up_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """SDPA with the bias of each pair as its mask computes the case of a bias alone, by whatever backend."""
    case = Case(2, 3, 40, 16, bias=True, rows=9, dtype="fp32")
    monkeypatch.setattr(torch.nn.attention.SDPBackend, "CUDNN_ATTENTION", torch.nn.attention.SDPBackend.MATH, raising=False)
    inputs, d_out = case.inputs("cpu")
    expected, _ = timing.golden(case, inputs, d_out, "cpu", True)
    method = METHODS["sdpa_bias_efficient"]
    assert method.why_not(case, "cpu") == "needs a GPU" and method.why_not(case, "cuda") is None
    assert method.why_not(replace(case, bias=False), "cuda") == "needs a bias alone, all keys seen"
    with torch.no_grad(), mock.patch("torch.nn.attention.sdpa_kernel", lambda _: contextlib.nullcontext()):
        out = method.make(case)(inputs)
    within("out", timing.distance([out], expected[:1]), tolerance_of(torch.float32))


@pytest.mark.parametrize("case", [CASE, CASE.resized(64, rows=9)], ids=str)
def test_tables_of_the_peers(case: Case) -> None:
    """Both packages look a row up by i - j; the rows that theirs gives are those that ours does, distance by distance."""
    inputs, _ = case.inputs("cpu")
    j_minus_i = torch.arange(1 - case.length, case.length)
    row, _ = case.positions.rows(j_minus_i)
    expected = inputs.table[row]
    table, span = methods.flashdeberta_table(inputs.table, case.heads)
    slots = (-j_minus_i + span).clamp(0, 2 * span - 1)
    assert table.shape == (1, case.heads, 2 * span, case.head_dim) and torch.equal(table[0, 0][slots], expected)
    turned = methods.disentangled_flash_slots(case)  # of i - j = 1 - N, ..., N - 1
    assert torch.equal(inputs.table.flip(0)[turned.long()], expected.flip(0))


def test_what_a_case_is() -> None:
    """Sizes, tables and floating-point operations."""
    causal = Case(1, 64, 8192, 128, True, 1024, key_heads=8, rel_dim=16, outside="zero")
    assert str(causal) == "b1 h64:8 n8192 d128 dr16 r1024 zero causal bf16" and not causal.is_plain
    inputs = causal.empty()
    assert inputs.table.shape == (1024, 16) and inputs.rel_query is not None and inputs.rel_query.shape == (1, 64, 8192, 16)
    assert Case(1, 1, 64, 16, True).num_rows == 64 and Case(1, 1, 64, 16).num_rows == 127
    plain, useful = CASE.flops("forward", True)
    assert plain == 4 * 2 * 64**2 * 16 and useful == 1.5 * plain
    plain, useful = CASE.flops("backward", True)
    assert plain == 10 * 2 * 64**2 * 16 and useful == 1.6 * plain
    deberta = CASE.resized(64, p2c=True)
    assert str(deberta) == "b1 h2 n64 d16 full p2c fp32" and not deberta.is_plain
    assert deberta.flops("forward", True)[1] == 2 * plain / 2.5 and deberta.flops("forward", False)[1] == plain / 2.5
    assert deberta.columns()["table"] == "full p2c" and deberta.empty().p2c is not None
    assert CASE.flops("forward", False)[0] == CASE.flops("forward", False)[1]


def test_golden_is_the_reference() -> None:
    """The golden result, which methods are checked against, is dense attention in float64."""
    inputs, d_out = CASE.inputs("cpu")
    (out, *_), against = timing.golden(CASE, inputs, d_out, "cpu", True)
    exact = inputs.map(lambda tensor: tensor.detach().double())
    expected: Any = fused_relative_attention(*exact[:4], positions=CASE.positions, implementation="reference")
    assert against == "float64" and out.dtype == torch.float64
    assert_near("out", out, expected)


def models_of(*words: str) -> list[str]:
    return ["models", "--small", "--device", "cpu", "--seconds", "0", *words]


@pytest.mark.thorough
def test_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stock and ours, in a process of their own: rows for every direction, checked, and a figure and a table of them."""
    pytest.importorskip("transformers")
    path = tmp_path / "models.csv"
    assert main(models_of("--families", "parakeet_attention", "--lengths", "48,24", "--csv", str(path))) == 0
    rows = read(path)
    assert [(row["seqlen"], row["method"], row["direction"]) for row in rows] == [
        (length, method, direction)
        for length in ("24", "48")
        for method in models.METHODS
        for direction in ("forward", "forward+backward")
    ]
    for row in rows:
        assert row["status"] == "ok" and all(row[name] for name in STAMP), row
        within("error", float(row["error"]), tolerance_of(torch.float32))
        assert float(row["error"]) > 0 and row["checked_against"] == "float64"
        assert 0 < float(row["p20_ms"]) <= float(row["p80_ms"])
    assert main(["plot", str(path), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "models.png").read_bytes().startswith(b"\x89PNG")
    assert "| parakeet_attention | 48 |" in capsys.readouterr().out


@pytest.mark.thorough
def test_batches_of_short_sequences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Times alone, against the one implementation that computes what the model means to, and the ratio of each size."""
    pytest.importorskip("transformers")
    path = tmp_path / "models.csv"
    words = ("--lengths", "24,16", "--batches", "3,2", "--methods", "triton_relattn,stock", "--no-memory", "--rounds", "3")
    assert main(models_of("--families", "seamless_m4t_v2", *words, "--csv", str(path))) == 0
    rows = read(path)
    assert [(row["seqlen"], row["batch"], row["method"]) for row in rows[::2]] == [
        (length, batch, method) for length in ("16", "24") for batch in ("2", "3") for method in (OURS, "sdpa")
    ]
    assert all(row["status"] == "ok" and row["rounds"] == "3" and not row["peak_bytes"] for row in rows)
    times = {(row["method"], row["direction"]): float(row["p50_ms"]) for row in rows[-4:]}
    expected = [f"{times['sdpa', each] / times[OURS, each]:.2f}" for each in ("forward", "forward+backward")]
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if line.startswith("| seamless_m4t_v2 | sdpa |"))
    assert [line.split("|")[column].strip() for column in (6, 10)] == expected  # of the last of four sizes
    assert "geometric mean" in shown and "| model | length | triton_relattn |" not in shown
    assert main(["plot", str(path), "--out", str(tmp_path)]) == 0 and not (tmp_path / "models.png").exists()
    assert line in capsys.readouterr().out


def test_too_little_memory_for_a_batch() -> None:
    """Larger ones are not tried, what has been measured stays; what does not apply stays so, too."""
    options = argparse.Namespace(memory_limit=2**30)
    small, large = models.Size(16, 2), models.Size(16, 3)
    points = [(size, "eager", "forward") for size in (small, large)] + [(large, "sdpa", "forward")]
    found: models.Found = {point: {"status": "ok"} for point in points[:2]} | {points[2]: {"status": "does not apply"}}
    failed: dict[str, str] = {}

    def fail() -> None:
        raise MemoryError

    for each in points:
        models.try_it(fail, each, found, failed, options)
    assert [each["status"] for each in found.values()] == [
        "out of memory: more than 1 GiB",
        "not tried: out of memory: more than 1 GiB at 16 x 2",
        "does not apply",
    ]


def test_a_model_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One row too far to the past, and sdpa that is missing."""
    pytest.importorskip("transformers")
    from triton_relattn.integrations.transformers import vits

    def shifted(first: int, last: int, outside: Any) -> RelativePositions:
        return RelativePositions(first - 1, last - 1, outside=outside)

    def in_this_process(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
        return models.measure(FAMILIES[name], options)

    monkeypatch.setattr(vits, "RelativePositions", shifted)
    monkeypatch.setattr(models, "in_own_process", in_this_process)
    path = tmp_path / "models.csv"
    assert main(models_of("--families", "vits", "--lengths", "24", "--directions", "forward", "--csv", str(path))) == 1
    ours, eager, sdpa = read(path)
    assert ours["status"].startswith("wrong: out is off by") and not ours["p50_ms"]
    assert eager["status"] == "ok" and eager["p20_ms"]
    assert sdpa["status"] == "does not apply: the model has none" and not sdpa["p50_ms"]


def test_a_decode_step_is_the_last_query() -> None:
    """A decode step has the table term of the sequence's last query; methods that need all queries do not apply to it."""
    whole = Case(2, 2, 9, 8, dtype="fp32")
    step = whole.resized(9, num_queries=1)
    assert str(step) == "b2 h2 n1:9 d8 full fp32" and step.resized(9, num_queries=None) == whole
    inputs, _ = whole.inputs("cpu")
    last = inputs._replace(query=inputs.query[:, :, -1:])
    expected = METHODS[OURS].make(whole)(inputs)[:, :, -1:]
    assert_near("last", METHODS[OURS].make(step)(last), expected)
    assert METHODS["gather"].why_not(step, "cpu") and METHODS["sdpa"].why_not(step, "cpu") is None


def test_ticks_of_a_peak_that_nobody_saw() -> None:
    """0 bytes above the inputs has no place on a logarithmic axis; the others have."""
    assert ticks_of([0.0, 2.0**21, 0.0], "bytes") == ticks_of([2.0**21], "bytes")
    assert ticks_of([0.0], "bytes")[0][0] == 2**20
