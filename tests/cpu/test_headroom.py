"""The program that lists checks close to their allowance: its settings, which rows it keeps, and seeds that are shifted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import headroom

ROOT = Path(__file__).parents[2]


def test_files() -> None:
    """No file is named that is not there, and all others of the two folders are run."""
    every = {path.name for folder in headroom.FOLDERS for path in (ROOT / folder).glob("test_*.py")}
    listed = {Path(file).name for file in headroom.files()}
    assert listed == every - headroom.WITHOUT_NUMBERS
    assert all((ROOT / file).exists() for file in headroom.files())
    elsewhere = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert elsewhere >= headroom.WITHOUT_NUMBERS


def test_settings() -> None:
    """With one thread and with two: the processor as it is, and the oldest."""
    found = headroom.settings()
    assert found[0].environment == {} and found[0].threads == 1 and {each.threads for each in found} == {1, 2}
    oldest = [each.environment for each in found if each.name == "the oldest"]
    assert len(oldest) == 2 and all(each["ATEN_CPU_CAPABILITY"] == "default" for each in oldest)


def test_which_rows_are_kept() -> None:
    """A check that fails counts if its test failed, too; a test that wants it to fail passes."""
    setting = headroom.settings()[0]
    rows = [
        ["test_a", "out", "1.0", "2.0", "0.5", "0"],
        ["test_b", "out", "3.0", "2.0", "1.5", "1"],
        ["test_c", "out", "3.0", "2.0", "1.5", "1"],
    ]
    kept = list(headroom.worst(rows, ["test_c - AssertionError"], setting, 3))
    assert [(each.test, each.ratio, each.seed) for each in kept] == [("test_a", 0.5, 3), ("test_c", 1.5, 3)]
    assert [each._replace(ratio=ratio).is_close for each in kept for ratio in (0.51, 0.76)] == [True, True, False, True]


@pytest.mark.thorough
def test_seeds_are_shifted() -> None:
    program = """
import torch
from tests.conftest import shift_seeds
shift_seeds(5)
torch.manual_seed(1)
generator = torch.Generator().manual_seed(2)
print(torch.initial_seed(), generator.initial_seed(), torch.rand(1, generator=generator).item() >= 0)
"""
    child = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert child.stdout.split() == ["6", "7", "True"]


@pytest.mark.thorough
def test_run(tmp_path: Path) -> None:
    """With one file and two settings, all checks are counted, and none is above half."""
    command = [sys.executable, "-m", "tests.headroom", "tests/cpu/test_merging.py", "--seeds", "2", "--share", "1", "--jobs", "1"]
    command += ["--csv", str(tmp_path / "checks.csv")]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout + child.stderr
    lines = child.stdout.splitlines()
    assert [line.partition("]")[0] for line in lines[:-1]] == ["[1/2", "[2/2"] and "0 too close to their allowance" in lines[-1]
    assert (tmp_path / "checks.csv").read_text().count("\n") > 1
