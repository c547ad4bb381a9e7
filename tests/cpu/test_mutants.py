"""The known faults apply, generated ones are valid, and what tries them tells what became of them."""

from __future__ import annotations

import functools
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_collection_modifyitems
from tests.mutants import __main__ as command
from tests.mutants.__main__ import ROOT, generated
from tests.mutants.catalogue import FAULTS
from tests.witnesses import read_witnesses, write_witnesses
from tools.mutants import runner
from tools.mutants.fault import Change, Fault, StaleFault, folder_of
from tools.mutants.generate import faults as faults_of
from tools.mutants.runner import BROKEN, CAUGHT, STALE, SURVIVED, Outcome, Runner, TestRun


def test_names() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(names) == len(set(names)) >= 60
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in names)
    assert all(fault.effect and "\n" not in fault.effect for fault in FAULTS)


@functools.cache
def compiled(file: str) -> CodeType:
    return compile((ROOT / file).read_text(), file, "exec")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_applies(fault: Fault) -> None:
    """Each text that a fault replaces occurs as often as it says, and the changed file is valid Python that differs."""
    for file, text in fault.changed(ROOT).items():
        assert compile(text, file, "exec") != compiled(file)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_tests_to_begin_with_are_there(fault: Fault) -> None:
    paths = [argument.partition("::") for argument in fault.tests if argument.startswith("tests/")]
    assert paths and len({folder_of(file) for file, _, _ in paths}) == 1
    for file, _, test in paths:
        assert folder_of(file) in ("tests/compile", "tests/cpu", "tests/interpreter", "tests/implementations", "tests/emulator")
        assert f"def {test.partition('[')[0]}" in (ROOT / file).read_text()


# A small repository: one function, a test of the right name, and one beside it.

SOURCE = "def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n"
FIRST = "from triton_relattn import double\n\n\ndef test_first():\n    assert double(2) == 4, 'not twice two'\n"
OTHER = """from triton_relattn import half


def test_other():
    assert half(4) == 2


def test_wrong():
    assert half(1) == 1
"""
IN_FIRST = ("tests/cpu/test_first.py",)


def fault(name: str, old: str, new: str, tests: tuple[str, ...] = IN_FIRST, **others: Any) -> Fault:
    return Fault(name, "something", tests, (Change("triton_relattn/__init__.py", old, new, **others),))


@pytest.fixture
def small(tmp_path: Path) -> Runner:
    for file, text in {
        "triton_relattn/__init__.py": SOURCE,
        "tests/cpu/test_first.py": FIRST,
        "tests/cpu/test_other.py": OTHER,
        "tests/cpu/test_mutants.py": "raise AssertionError\n",
        "ignored.py": "",
        ".gitignore": "ignored.py\n",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return Runner(tmp_path, "triton_relattn", ignored=("tests/cpu/test_mutants.py",))


def test_stale_faults(small: Runner) -> None:
    for each, message in (
        (fault("gone", "3 * x", "4 * x"), "has 0 times, not 1: '3 \\* x'"),
        (fault("twice", "return", "yield"), "has 2 times, not 1"),
        (Fault("no_file", "something", IN_FIRST, (Change("gone.py", "a", "b"),)), "gone.py has 0 times"),
    ):
        outcome = small.attempt(each)
        assert outcome.status == STALE and re.search(message, outcome.detail)
        with pytest.raises(StaleFault):
            each.apply(small.root)
    assert fault("both", "return", "yield", times=2).changed(small.root) == {
        "triton_relattn/__init__.py": SOURCE.replace("return", "yield")
    }


def test_copies_are_of_the_source_alone_and_are_imported(small: Runner) -> None:
    with runner.copied(small.root) as copy:
        assert (copy / "triton_relattn/__init__.py").read_text() == SOURCE and not (copy / "ignored.py").exists()
        assert small.imported_from(copy) == copy / "triton_relattn/__init__.py"


def test_caught_and_confirmed(small: Runner) -> None:
    """By a test that says what is wrong; the repository stays as it is."""
    outcome = small.attempt(fault("thrice", "2 * x", "3 * x"))
    assert (outcome.status, outcome.test) == (CAUGHT, "tests/cpu/test_first.py::test_first")
    assert "not twice two" in outcome.detail and outcome.seconds > 0
    assert (small.root / "triton_relattn/__init__.py").read_text() == SOURCE
    wrong = "tests/cpu/test_other.py::test_wrong"
    assert small.failing_anyway([outcome.test, wrong]) == {wrong}


def test_environments(small: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests get the variables of the texts that their names contain, and not those of this process that are not for them."""
    monkeypatch.setenv("TRITON_INTERPRET", "this process")
    small.variables = {"tests/interpreter": {"TRITON_INTERPRET": "1"}, "[triton": {"KERNELS": "1"}}
    assert "TRITON_INTERPRET" not in small.environment(["tests/cpu/test_first.py"])
    of_both = small.environment(["tests/interpreter", "tests/both/test_a.py::test_a[triton]"])
    assert of_both["TRITON_INTERPRET"] == of_both["KERNELS"] == "1"
    of_one = small.environment(["tests/both/test_a.py::test_a[triton]"])
    assert of_one["KERNELS"] == "1" and "TRITON_INTERPRET" not in of_one


class Replayed(Runner):
    """Pytest ends as the test says, by what it runs."""

    ends: dict[str, TestRun]

    def pytest(self, arguments: Any, cwd: Path, tests: Any, seconds: float) -> TestRun:
        return self.ends[list(arguments)[-1]]

    def check_imports(self) -> None:
        pass


PASSED, FAILED = TestRun(0, {}, "1 passed"), TestRun(1, {"tests/cpu/test_first.py::test_first": "wrong"}, "1 failed")


@pytest.mark.parametrize(
    ("quick", "folder", "status", "detail"),
    [
        (FAILED, PASSED, CAUGHT, "wrong"),
        (PASSED, FAILED, CAUGHT, "wrong"),
        (PASSED, PASSED, SURVIVED, "all of tests/cpu"),
        (TestRun(-11, {}, ""), PASSED, CAUGHT, "ended by signal 11"),
        (TestRun(-11, FAILED.failures, "1 failed"), PASSED, CAUGHT, "wrong"),
        (TestRun(4, {}, "ERROR: not found: test_first"), PASSED, BROKEN, "ERROR: not found: test_first"),
        (PASSED, TestRun(None, {}, "no end after 3600 s"), BROKEN, "no end after 3600 s"),
    ],
    ids=["first", "folder", "survived", "crash", "failed_and_crash", "no_test", "no_end"],
)
def test_what_becomes_of_a_fault(small: Runner, quick: TestRun, folder: TestRun, status: str, detail: str) -> None:
    replayed = Replayed(small.root, "triton_relattn")
    replayed.ends = {IN_FIRST[0]: quick, "tests/cpu": folder}
    outcome = replayed.attempt(fault("thrice", "2 * x", "3 * x"))
    assert (outcome.status, outcome.detail) == (status, detail)


def test_too_long(small: Runner) -> None:
    status, output = small.run(("-c", "import time; time.sleep(60)"), small.root, (), 0.1)
    assert status is None and output == "no end after 0 s" and not small.processes


@pytest.mark.parametrize(
    ("status", "failing_anyway", "expected"),
    [(CAUGHT, set(), 0), (CAUGHT, {"test_a"}, 1), (SURVIVED, set(), 1), (STALE, set(), 1), (BROKEN, set(), 1)],
)
def test_exit_status(
    status: str, failing_anyway: set[str], expected: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 only if every fault was caught by a test that passes without it."""
    faults = [fault("one", "a", "b"), fault("two", "a", "b")]
    ends = {"one": Outcome(faults[0], CAUGHT, "test_b"), "two": Outcome(faults[1], status, "test_a" if status == CAUGHT else "")}
    replayed = Replayed(ROOT, "triton_relattn")
    monkeypatch.setattr(replayed, "attempt", lambda fault: ends[fault.name])
    monkeypatch.setattr(replayed, "failing_anyway", lambda tests: failing_anyway & set(tests))
    assert command.main([], replayed, faults) == expected
    output = capsys.readouterr().out
    assert f"{2 - expected} of 2 caught" in output and (expected == 0 or status in output or "fails without" in output)


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The rows so far stay."""
    faults = [fault("one", "a", "b"), fault("two", "a", "b")]
    replayed = Replayed(ROOT, "triton_relattn")

    def attempt(each: Fault) -> Outcome:
        if each.name == "two":
            raise KeyboardInterrupt
        return Outcome(each, CAUGHT, "test_a")

    monkeypatch.setattr(replayed, "attempt", attempt)
    assert command.main([], replayed, faults) == 130
    output = capsys.readouterr().out
    assert "test_a" in output and "1 of 2 caught, interrupted" in output and replayed.stopped


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list", "--only", "sign-of-r,far-ends-swapped"]) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["sign-of-r", "far-ends-swapped"]
    with pytest.raises(SystemExit):
        command.main(["--only", "nonsense"])


@dataclass(frozen=True)
class Item:
    """A test as pytest has collected it."""

    nodeid: str
    is_thorough: bool = False

    def get_closest_marker(self, name: str) -> str | None:
        return name if self.is_thorough and name == "thorough" else None


def test_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """--share keeps the same cases of every test, one in so many and at least one, and no test that is marked thorough.

    --rest keeps the others: all, or one in so many, and other ones for each part.
    """
    monkeypatch.setattr("tests.conftest.read_witnesses", set)
    items = [Item(f"a.py::test_a[{number}]") for number in range(10)] + [Item("a.py::test_b"), Item("a.py::test_c", True)]
    dropped: list[Item] = []
    options: dict[str, Any] = {"--share": 3, "--rest": None}
    config: Any = SimpleNamespace(
        getoption=options.get, hook=SimpleNamespace(pytest_deselected=lambda items: dropped.extend(items))
    )
    kept: list[Any] = list(items)
    pytest_collection_modifyitems(config, kept)
    assert [item.nodeid.partition("[")[0] for item in kept] == ["a.py::test_a"] * 4 + ["a.py::test_b"]
    assert sorted(kept + dropped, key=items.index) == items
    options["--rest"] = 1
    rest: list[Any] = list(items)
    pytest_collection_modifyitems(config, rest)
    assert rest == [item for item in items if item not in kept]
    options["--rest"], thirds = 3, []
    for part in range(7, 10):
        options["--part"] = part
        third: list[Any] = list(items)
        pytest_collection_modifyitems(config, third)
        assert third == sorted(third, key=items.index) and len(third) in (len(rest) // 3, len(rest) // 3 + 1)
        thirds += third
    assert sorted(thirds, key=items.index) == rest
    options["--rest"] = options["--part"] = None
    again: list[Any] = items[::-1]
    pytest_collection_modifyitems(config, again)
    assert set(again) == set(kept)
    # Witnesses are kept before others, and all of them.
    for witnesses in (["3"], ["1", "3", "5", "7", "8"]):
        names = {f"a.py::test_a[{number}]" for number in witnesses}
        monkeypatch.setattr("tests.conftest.read_witnesses", lambda names=names: names)
        again = list(items)
        pytest_collection_modifyitems(config, again)
        found = {item.nodeid for item in again if "test_a" in item.nodeid}
        assert names <= found and len(found) == max(4, len(names))


def test_witnesses() -> None:
    """Each is there."""
    for test in read_witnesses():
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), test


def test_witnesses_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that noticed join those that did before."""
    monkeypatch.setattr("tests.witnesses.FILE", tmp_path / "witnesses.txt")
    write_witnesses(["b.py::test_b"])
    replayed = Replayed(ROOT, "triton_relattn")
    monkeypatch.setattr(replayed, "attempt", lambda fault: Outcome(fault, CAUGHT, "a.py::test_a"))
    monkeypatch.setattr(replayed, "failing_anyway", lambda tests: set())
    assert command.main(["--record"], replayed, FAULTS[:1]) == 0
    assert read_witnesses() == {"a.py::test_a", "b.py::test_b"}


# Faults that are named by tokens, and faults that are generated.


@pytest.mark.parametrize(
    "text",
    [
        "def f(a, b):\n    return call(a, b) + 1\n",
        "def f(a, b):\n    return call(\n        a,  # the first\n        b,\n    ) + 1\n",
    ],
)
def test_a_fault_survives_a_formatter_and_a_move(text: str, tmp_path: Path) -> None:
    (tmp_path / "package/inner").mkdir(parents=True)
    (tmp_path / "package/inner/moved.py").write_text(text)
    (tmp_path / "package/other.py").write_text("call = max\n")
    change = Change("package", "call(a, b) + 1", "call(a, b) - 1")
    changed = Fault("off", "by two", IN_FIRST, (change,)).changed(tmp_path)
    assert changed == {"package/inner/moved.py": "def f(a, b):\n    return call(a, b) - 1\n"}


GENERATED = {
    "def f(a: int = 1) -> int:\n    return a < 2\n": {"a <= 2", "a < 3"},
    "x = -a + b * (c or d)\n": {"a + b * (c or d)", "-a - b * (c or d)", "-a + b / (c or d)", "-a + b * (c and d)"},
    "if not a:\n    f(min(a, b))\n": {"if a", "if not (not a)", "    pass", "max(a, b)"},
    "x += 1\n": {"pass", "x += 2"},
    "a = b is not c\n": {"b is c"},
    'é = f"{a + 1}" + "ü" * (a - 1)\n': {'"ü" / (a - 1)', '"ü" * (a + 1)', '"ü" * (a - 2)'},
    'raise ValueError(1)\nassert a < b\nt: "int | None" = True\n': {"= False"},
}


@pytest.mark.parametrize(("text", "expected"), GENERATED.items())
def test_generated_faults(text: str, expected: set[str], tmp_path: Path) -> None:
    """Each is one change, and those that the text should have are all that it has."""
    (tmp_path / "source.py").write_text(text)
    changed = [
        Fault(str(each), "", (), (each.edit,), ("tests/cpu",)).changed(tmp_path) for each in faults_of(tmp_path, "source.py")
    ]
    assert len(changed) == len(expected)
    for part in expected:
        assert sum(part in texts["source.py"] for texts in changed) == 1, part


def test_generated_faults_of_the_package() -> None:
    """As many as are asked for, the same for the same seed, each with the folders whose tests reach the file."""
    drawn = generated(ROOT, 20, 1)
    assert drawn == generated(ROOT, 20, 1) != generated(ROOT, 20, 2) and len(drawn) == 20
    assert all(len(each.changed(ROOT)) == 1 for each in drawn)
    assert {each.folders for each in generated(ROOT, 5, 1, "triton_relattn/_blockwise")} == {("tests/cpu tests/implementations",)}
