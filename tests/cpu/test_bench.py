"""The benchmarks: verbs that need no kernels run, what goes wrong is in the rows and in the exit status, and what the operator is
measured against computes the same."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from tests.tolerance import assert_at_most, assert_same, dtype_tolerance

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from bench import models
from bench.__main__ import main
from bench.cases import attention as cases
from bench.cases import methods
from bench.cases.attention import BIAS, Case
from bench.cases.baselines import BASELINES
from bench.cases.methods import METHODS, OURS, Method
from bench.families import FAMILIES
from bench.measure import processes, timing
from bench.report import figures
from bench.report import models as model_tables
from bench.report.rows import ROOT, STAMP, read
from bench.verbs import accuracy, compare, readme, speed
from triton_relattn import RelativePositions, fused_relative_attention
from triton_relattn.testing import forward_backward, make_inputs

CASE = Case(1, 2, 64, 16, dtype="fp32")
SMALL = "--cases small --no-verify --device cpu"
MODELS = "models --small --device cpu --seconds 0"
FLOAT32 = dtype_tolerance(torch.float32)
Rows = list[dict[str, str]]


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The verbs limit the memory of their process, which runs other tests too: that is undone. FlexAttention is not compiled,
    which takes twenty seconds per length."""
    which, resource = shutil.which, pytest.importorskip("resource")
    monkeypatch.setattr(shutil, "which", lambda name: which(name) if name in ("git", sys.executable) else None)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


class Bench:
    """Runs commands, and keeps what the last one printed."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys, self.printed = folder, capsys, ""

    def __call__(self, command: str, status: int = 0) -> Rows:
        """Run a command that ends with this status; return its rows."""
        path = self.folder / "rows.csv"
        assert main([*command.split(), "--csv", str(path)]) == status
        self.printed = self.capsys.readouterr().out
        return read(path) if path.exists() else []

    def plot(self, *files: Path) -> set[str]:
        """Draw rows, those of the last command by default; return the names of the figures."""
        assert main(["plot", *map(str, files or [self.folder / "rows.csv"]), "--out", str(self.folder)]) == 0
        self.printed = self.capsys.readouterr().out
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in self.folder.glob("*.png"))
        return {path.stem for path in self.folder.glob("*.png")}


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    return Bench(tmp_path, capsys)


def ladder(monkeypatch: pytest.MonkeyPatch, *lengths: int) -> None:
    monkeypatch.setitem(cases.GROUPS, "small", [CASE.resized(length) for length in lengths])


def in_process(case: Case, method: str, direction: str, memory_limit: int) -> dict[str, Any]:
    """Return made-up byte counts instead of starting a process: ours linear, the others quadratic and over the limit from 96
    on."""
    if method != OURS and case.length >= 96:
        return {"status": f"{timing.OUT_OF_MEMORY}: more than {memory_limit}"}
    return {"status": "ok", "peak_bytes": 1000 * case.length ** (1 if method == OURS else 2)}


def assert_measured(row: dict[str, str]) -> None:
    """A row of times: it names its source, was compared with float64, and its percentiles are in order."""
    assert row["status"] == "ok" and all(row[name] for name in STAMP) and row["checked_against"] == "float64", row
    assert 0 < float(row["p20_ms"]) <= float(row["p50_ms"]) <= float(row["p80_ms"]) and float(row["error"]) > 0
    assert_at_most("error", float(row["error"]), FLOAT32)


def test_speed(bench: Bench) -> None:
    """There is a row for every method and direction, including those that cannot run; each row names its source."""
    rows = bench(f"speed {SMALL} --lengths 96 --seconds 0")
    directions = {"forward", "forward+backward"}
    assert {(row["method"], row["direction"]) for row in rows} == {(m, d) for m in METHODS for d in directions}
    statuses = {row["method"]: row["status"] for row in rows}
    assert statuses["skewing"] == "does not apply: needs one table for the keys with a row for every distance"
    assert statuses["flex_attention"] == "cannot run: NotImplementedError: needs a C++ compiler"
    assert statuses["onnxruntime"] == "cannot run: NotImplementedError: for float32, all keys seen"
    timed = [row for row in rows if row["status"] == "ok"]
    assert {row["method"] for row in timed} == {OURS, "plain", "sdpa", "shaw_gather", "gather", "dense_bias"}
    for row in timed:
        assert_measured(row)
        assert row["verified"] == "no" and int(row["rounds"]) >= 3
    assert "b1 h2 n96 d16 r9 causal fp32" in bench.printed


def raising(error: BaseException) -> Callable[..., Any]:
    def make(*_: Any) -> Any:
        raise error

    return make


WRONG: dict[str, Callable[[Case], Any]] = {
    "off": lambda case: lambda inputs: 1.01 * methods.ours(case)(inputs),
    "broken": raising(RuntimeError("two\nlines")),
    "greedy": lambda case: lambda inputs: torch.empty(1 << 50),
    "missing": raising(ImportError("no package")),
}


def test_what_is_wrong_is_not_timed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong result, an error, running out of memory and a missing package each give a row; the first two also a failing exit
    status."""
    for name, make in WRONG.items():
        monkeypatch.setitem(METHODS, name, Method("baseline", "made up", make))
    ladder(monkeypatch, 32, 64)
    rows = [row for row in bench(f"speed {SMALL} --methods {','.join(WRONG)} --seconds 0", 1) if row["direction"] == "forward"]
    assert not any(row["p50_ms"] for row in rows)
    short, long = ({row["method"]: row["status"] for row in rows if row["seqlen"] == length} for length in ("32", "64"))
    assert short["off"].startswith("wrong: differs from float64 by 0.01")
    assert short["broken"] == "failed: RuntimeError: two lines"
    assert short["greedy"] == "out of memory" and long["greedy"] == "not tried: out of memory at 32"
    assert short["missing"] == long["missing"] == "cannot run: ImportError: no package"
    assert "off, forward, b1 h2 n32 d16 full fp32: wrong" in bench.printed


@pytest.mark.parametrize("verb", ["speed", "memory"])
def test_a_red_gate_prints_no_number(verb: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured if one of the tests of what is measured fails."""
    monkeypatch.setattr(speed, "tests_pass", lambda device: False)
    assert not bench(f"{verb} --cases small --device cpu", 1)


def test_the_gate_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests that run before a measurement exist."""
    monkeypatch.setattr(speed, "TESTS", [*speed.TESTS, "--collect-only"])
    assert speed.tests_pass("cpu")


@pytest.mark.parametrize("verb", ["speed --seconds 0", "memory"])
def test_a_call_of_ones_own(verb: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """--shape replaces the default cases, for both time and memory."""
    monkeypatch.setattr(processes, "measure_in_own_process", in_process)
    own = "--shape b2,h4,n20,d8,kv2 --shape n12d16q1h2 --table 5 --dtype fp32 --causal"
    rows = bench(f"{verb} {own} --device cpu --no-verify --methods {OURS},sdpa")
    assert {row["case"] for row in rows} == {"b2 h4:2 n20 d8 r5 causal fp32", "b1 h2 n1:12 d16 r5 causal fp32"}


def test_ctrl_c_keeps_the_rows(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, interrupt = speed.measure, raising(KeyboardInterrupt())
    monkeypatch.setattr(speed, "measure", lambda case, *others: (measure if case.length == 32 else interrupt)(case, *others))
    ladder(monkeypatch, 32, 64)
    rows = bench(f"speed {SMALL} --methods plain --seconds 0")
    assert {row["seqlen"] for row in rows} == {"32"} and "interrupted" in bench.printed


@pytest.mark.thorough
def test_memory_in_a_process_of_its_own() -> None:
    """Dense attention holds all scores at once, ours does not; running into the memory limit gives a row and does not stop the
    run."""
    case, scores = CASE.resized(4096), 2 * 4096**2 * 4
    dense, ours = (processes.measure_in_own_process(case, method, "forward", 8 << 30) for method in ("gather", OURS))
    assert dense["status"] == ours["status"] == "ok"
    assert dense["peak_bytes"] > 2 * scores > 8 * ours["peak_bytes"] > 0
    limited = processes.measure_in_own_process(case.resized(16384), "gather", "forward", 1 << 30)
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
    assert processes.in_own_process(end, (code,), None if code else 0.5) == {"status": status}


def test_memory_goes_on_past_the_failures(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods that run out of memory are not tried at longer lengths; the scaling law is fitted to the longer half of the
    lengths."""
    monkeypatch.setattr(processes, "measure_in_own_process", in_process)
    ladder(monkeypatch, 8, 16, 32, 64, 96, 128)
    rows = bench(f"memory {SMALL} --methods {OURS},gather")
    status = {(row["method"], row["seqlen"]): row["status"].partition(":")[0] for row in rows}
    assert [status[OURS, length] for length in ("32", "64", "96", "128")] == ["ok"] * 4
    assert [status["gather", length] for length in ("32", "64", "96", "128")] == ["ok", "ok", "out of memory", "not tried"]
    assert all(said in bench.printed for said in ("n^1.00", "n^2.00", "gather, forward, b1 h2 n96"))


def test_committed_rows_make_the_pages(bench: Bench) -> None:
    """Figures and tables in README and docs follow from the rows in bench/results, and every family has a display name there."""
    assert set(figures.STYLES) == {*METHODS, figures.BEST_DENSE, figures.NO_TERM} and set(model_tables.NAMES) == set(FAMILIES)
    assert main(["readme", "--out", str(bench.folder)]) == 0
    for page in readme.PAGES:
        assert (bench.folder / page).read_text() == (ROOT / page).read_text(), f"{page}: run python -m bench readme"
    drawn = "speed", "memory", "models"
    assert bench.plot(*(readme.RESULTS / f"{name}.csv" for name in drawn)) >= {*drawn}


RESULTS = sorted((ROOT / "bench" / "results").rglob("*.csv"))


@pytest.mark.thorough
@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.relative_to(ROOT / "bench" / "results").as_posix())
def test_committed_rows_are_drawn(path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file of times, peaks or models has a figure without empty panels, whose lines have one value per length, or a table
    and a line that says why not; other files are refused by what they lack."""
    panels: list[Any] = []
    save = Figure.savefig

    def save_and_keep(figure: Any, *args: Any, **kwargs: Any) -> None:
        panels.extend(figure.axes)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", save_and_keep)
    if not {row.get("verb") for row in read(path)} & {"speed", "memory", "models"}:
        with pytest.raises(SystemExit):
            bench.plot(path)
        return
    assert bool(bench.plot(path)) == bool(panels) == (path.stem not in ("models_hour", "models_short"))
    for axes in panels:
        assert axes.lines or axes.patches
        for line in axes.lines:
            assert line.get_label().startswith("_") or len(set(line.get_xdata())) == len(line.get_xdata())


def test_accuracy(bench: Bench) -> None:
    """Ours is more accurate than dense methods in bfloat16, and at least as accurate in float32."""
    rows = bench("accuracy --cases sharp,near_12800 --dtypes bf16,fp32 --length 70 --device cpu")
    assert {row["status"] for row in rows} == {"ok"}
    errors = {(row["method"], row["case"], row["dtype"]): float(row["d_table"]) for row in rows}
    ours = f"{OURS} (blockwise)"
    assert all(2 * errors[ours, "sharp", "bf16"] < errors[method, "sharp", "bf16"] for method in ("eager", "sdpa"))
    assert_at_most("sharp, fp32", errors[ours, "sharp", "fp32"], 10 * FLOAT32)  # large terms cancel
    assert accuracy.markdown(rows) in bench.printed


@pytest.mark.thorough
def test_models(bench: Bench) -> None:
    """Stock and ours are checked and measured in separate processes: rows, ratios and a figure."""
    pytest.importorskip("transformers")
    words = "--lengths 24 --batches 1,3 --methods triton_relattn,stock --rounds 3"
    rows = bench(f"{MODELS} --families seamless_m4t_v2 {words}")
    assert {(row["batch"], row["method"]) for row in rows} == {(batch, method) for batch in "13" for method in (OURS, "sdpa")}
    for row in rows:
        assert_measured(row)
    assert bench.plot() == {"models"}
    times = {row["method"]: float(row["p50_ms"]) for row in rows if (row["batch"], row["direction"]) == ("3", "forward")}
    assert f"| sdpa | {times['sdpa'] / times[OURS]:.2f} |" in bench.printed


@pytest.mark.thorough
def test_models_on_batches_of_sentences(bench: Bench) -> None:
    """Encoders alone, at shares of real tokens: packed is checked and timed where there is an encoder that packs."""
    pytest.importorskip("transformers")
    ways = (OURS, "packed", "eager")
    words = f"--lengths 40 --batches 6 --real 0.3,0.6 --methods {','.join(ways)} --no-memory"
    rows = bench(f"{MODELS} --families t5,vits --directions forward {words}")
    assert "vits: it has no encoder that packs" in bench.printed
    assert {(row["real"], row["method"]) for row in rows} == {(share, method) for share in ("0.3", "0.6") for method in ways}
    for row in rows:
        assert_measured(row)
    assert bench.plot() == {"sentences"}
    assert "| T5 | 6 x 40 | 0.30 | forward |" in bench.printed


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_lengths_of_sentences(share: float) -> None:
    """The longest has the length, and the sum is the share."""
    lengths = models.Size(200, 16, share).lengths(8)
    assert len(lengths) == 16 and max(lengths) == 200 and min(lengths) >= 1
    assert_at_most("share", abs(sum(lengths) / (16 * 200) - share), 0.01)


def test_a_model_that_is_wrong_is_not_timed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose table is read one row too far in the past is reported as wrong and not timed; a missing sdpa is reported."""
    pytest.importorskip("transformers")
    from triton_relattn.integrations import enable
    from triton_relattn.integrations.transformers import speech

    def shifted(first: int, last: int, outside: Any) -> RelativePositions:
        return RelativePositions(first - 1, last - 1, outside=outside)

    monkeypatch.setattr(speech, "RelativePositions", shifted)
    monkeypatch.setattr(enable, "compare", lambda module, ours, *_: (next(ours.candidates(module, module))[1](), 0.0))
    monkeypatch.setattr(models, "in_own_process", lambda work, arguments, timeout: work(*arguments))
    ours, eager, sdpa = bench(f"{MODELS} --families vits --lengths 24 --directions forward", 1)
    assert ours["status"].startswith("wrong: off by") and not ours["p50_ms"]
    assert eager["status"] == "ok" and eager["p20_ms"]
    assert sdpa["status"] == "does not apply: the model has none" and not sdpa["p50_ms"]


def test_new_lengths(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each length is computed once, then all are repeated; memory kept in between is measured."""
    monkeypatch.setattr(speed, "LONGEST", 160)
    monkeypatch.setattr(processes, "in_own_process", lambda work, arguments, timeout: work(*arguments))
    rows = bench("speed --new-lengths 12 --methods triton_relattn,sdpa")
    assert len(set(speed.new_lengths(11))) == 11 and set(speed.new_lengths(12)) == set(range(150, 161))
    assert [row["method"] for row in rows] == [OURS, "sdpa"] and all(row["lengths"] == "12" for row in rows)
    assert all(float(row["first_ms"]) > 0 and float(row["again_ms"]) > 0 for row in rows)
    assert "| triton_relattn | 12 |" in bench.printed


SLOW = """
import time as _time

_attend = fused_relative_attention


def fused_relative_attention(*arguments, **options):
    _time.sleep(0.1)
    return _attend(*arguments, **options)
"""


def test_compare_with_another_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each process imports the package from its own checkout; here, one checkout sleeps a tenth of a second in each call."""
    shutil.copytree(ROOT / "triton_relattn", tmp_path / "triton_relattn", ignore=shutil.ignore_patterns("__pycache__"))
    first = tmp_path / "triton_relattn" / "__init__.py"
    first.write_text(first.read_text() + SLOW)
    words = f"speed --shape b1,h1,n16,d8 --device cpu --directions forward --methods {OURS} --seconds 0".split()
    assert main(["compare", str(tmp_path), *words]) == 0
    here, there, ratio = map(float, capsys.readouterr().out.splitlines()[2].split()[-3:])
    assert there >= 100 > here and ratio < 1
    first.write_text("raise ImportError('no such thing')")
    assert main(["compare", str(tmp_path), *words]) == 1


def test_compare_with_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The commit's files exist while they are measured; an invalid name and a folder without git are errors."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    with compare.checkout("HEAD") as folder:
        assert (folder / "triton_relattn" / "__init__.py").exists() and folder != ROOT
    assert not folder.exists()
    monkeypatch.setattr(compare, "compare", lambda *_: pytest.fail("something is measured"))
    for root, message in ((ROOT, "neither a commit"), (tmp_path, "no git checkout")):
        monkeypatch.setattr(compare, "ROOT", root)
        with pytest.raises(SystemExit) as ended:
            main(["compare", "no-such-commit", "speed"])
        assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("name", "length", "num_rows"),
    [
        *((name, length, 2 * length - 1) for name in BASELINES for length in (1, 2, 17, 40)),
        *((name, 40, num_rows) for name in BASELINES if name != "skewing" for num_rows in (1, 9, 77)),
    ],
)
def test_baselines_equal_the_reference(name: str, length: int, num_rows: int, is_causal: bool) -> None:
    """Output and all gradients in float64, with a row for every distance and with fewer rows."""
    inputs = make_inputs(2, 3, length, length, 8, num_rows=num_rows, dtype=torch.float64, seed=length)
    inputs = inputs._replace(d_lse=torch.zeros_like(inputs.d_lse))

    def baseline(*tensors: Any) -> Any:
        out = BASELINES[name](*tensors[:4], is_causal)  # type: ignore[call-arg]
        return out, 0 * out.sum(-1)

    def reference(*tensors: Any) -> Any:
        return fused_relative_attention(*tensors, is_causal=is_causal, return_lse=True, implementation="reference")

    results, expected = forward_backward(baseline, inputs), forward_backward(reference, inputs)
    for result in ("out", "d_query", "d_key", "d_value", "d_rel_key"):
        assert_same(result, results[result], expected[result])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "changes",
    [{}, {"is_causal": True}, {"rows": 9}, {"terms": ("rel_key", "rel_p2c")}, {"terms": BIAS}, {"terms": BIAS, "is_alibi": True}],
    ids=str,
)
def test_methods_of_others_are_set_up_right(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention (not compiled here), SDPA with a dense bias, and ONNX Runtime, if installed, give the right result on a CPU.
    Those without a backward report that."""
    case = Case(2, 3, 40, 16, dtype="fp32").resized(40, **changes)
    monkeypatch.setattr(methods, "compiled_flex_attention", lambda: flex_attention)
    monkeypatch.setenv("CXX", sys.executable)  # any module that is installed
    inputs = case.inputs("cpu")
    expected = timing.expected_results(case, inputs).results
    names = ["flex_attention", *["sdpa_bias"] * (case.terms == BIAS)]
    if find_spec("onnxruntime") is not None and METHODS["onnxruntime"].why_not(case, "cpu") is None and not case.is_causal:
        names.append("onnxruntime")
    assert METHODS["sdpa_bias_efficient"].why_not(case, "cpu") == "needs a GPU"
    for name in names:
        assert METHODS[name].why_not(case, "cpu") is None
        function = METHODS[name].make(case)
        with torch.no_grad():
            assert_at_most(name, timing.distance([function(inputs)], expected[:1]), FLOAT32)
        if name in ("flex_attention", "onnxruntime"):
            with pytest.raises(NotImplementedError, match="has no backward on a CPU"):
                function(inputs)
