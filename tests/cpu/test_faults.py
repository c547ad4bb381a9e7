"""Failures around the kernels: folders that cannot be used, profiles of another GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import PATIENCE

pytest.importorskip("triton")

from bench.cases.features import call
from bench.compiled import recorded_launches
from triton_relattn._core.cache import cache_folder
from triton_relattn.kernels.config import fitting, profiles, selection
from triton_relattn.kernels.config.profiles import Conditions, Row
from triton_relattn.kernels.config.selection import TileConfig
from triton_relattn.kernels.forward import forward

ARCH = "sm_90"
ROOT = Path(__file__).parents[2]
ROW = Row(Conditions(kernel="forward", coverage="no table"), TileConfig(32, 32, 8, 3))


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_RELATTN_CACHE", str(tmp_path / "cache"))
    selection.forget()
    fitting._replacements.clear()
    yield
    selection.forget()
    fitting._replacements.clear()


def select() -> TileConfig:
    return selection.select("forward", ARCH, torch.bfloat16, 64, length=100)


def test_a_folder_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user other than root: a warning that names the file, and the default."""
    profiles.save(profiles.user_profile_path(ARCH), ARCH, [ROW])

    read = Path.read_bytes

    def denied(path: Path) -> bytes:
        if path == profiles.user_profile_path(ARCH):
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.warns(RuntimeWarning, match=r"profile-sm_90.*is ignored: .*Permission denied"):
        assert select() == selection.select("forward", ARCH, torch.bfloat16, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        select()  # once


def test_a_folder_that_may_not_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the system that names the folder or the file, and what there is stays."""
    path = profiles.user_profile_path(ARCH)
    profiles.save(path, ARCH, [ROW])
    before = path.read_bytes()
    opened = open

    def denied(file: object, mode: str = "r", *others: object, **options: object) -> object:
        if "r" not in mode:
            raise PermissionError(13, "Permission denied", str(file))
        return opened(file, mode, *others, **options)  # type: ignore[call-overload]

    monkeypatch.setattr("builtins.open", denied)
    with pytest.raises(PermissionError, match="profile-sm_90"):
        profiles.save(path, ARCH, [ROW])
    monkeypatch.undo()
    assert path.read_bytes() == before


@pytest.mark.parametrize("folder", ["/dev/null", "/dev/null/folder", "/proc/1/nothing", "a\0b"], ids=repr)
def test_a_folder_that_cannot_be(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls take the default."""
    if "\0" in folder:
        monkeypatch.setattr(profiles, "cache_folder", lambda: Path(folder))
    else:
        monkeypatch.setenv("TRITON_RELATTN_CACHE", folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert select() == selection.select("forward", ARCH, torch.bfloat16, 64)
    with pytest.raises((OSError, ValueError)):
        profiles.save(profiles.user_profile_path(ARCH), ARCH, [ROW])


@pytest.mark.parametrize("name", ["HOME", "TRITON_RELATTN_CACHE", "XDG_CACHE_HOME"])
def test_an_empty_name_is_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_RELATTN_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv(name, "")
    assert cache_folder() == Path(os.path.expanduser("~"), ".cache", "triton_relattn")


@pytest.mark.parametrize("name", ["TRITON_RELATTN_CACHE", "XDG_CACHE_HOME"])
def test_a_home_is_expanded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_RELATTN_CACHE", "")
    monkeypatch.setenv("HOME", "/of/user")
    monkeypatch.setenv(name, "~/folder")
    assert cache_folder() == Path("/of/user/folder", *(() if name == "TRITON_RELATTN_CACHE" else ("triton_relattn",)))


@pytest.mark.parametrize("folder", ["", "~/folder"])
def test_no_home(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no profiles, neither in the folder of temporary files, which is everybody's, nor in one whose name is "~"."""
    monkeypatch.setenv("TRITON_RELATTN_CACHE", folder)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where neither HOME nor the list of users has one
    assert cache_folder() is None and profiles.user_profile_path(ARCH) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select() == selection.select("forward", ARCH, torch.bfloat16, 64)
    monkeypatch.setenv("TRITON_RELATTN_CACHE", "/of/user")
    assert cache_folder() == Path("/of/user")


TUNER = """
import argparse, sys
from pathlib import Path
from bench import tune
from bench.cases import attention as cases
from bench.report.rows import Table

def compile_one(task, config):
    return {"status": "ok", "instructions_per_score": 1.0}

def time_all(task, rows, ranked, device, seconds):
    for number, row in enumerate(rows):
        row |= {"p50_ms": 1.0 + number}

tune.compile_one, tune.time_all = compile_one, time_all
options = argparse.Namespace(device="cuda", reach=1, timed=2, seconds=0, no_verify=True, profile=Path(sys.argv[1]))
table = Table(tune.COLUMNS, {name: "here" for name in tune.STAMP}, None, None)
case = cases.Case(1, 2, 300, 64)
tasks = tune.tasks_of([case.resized(length) for length in (300, 1000, 3000)], tune.selection.KERNELS, "sm_90")
print(flush=True)
sys.stdin.readline()
for task in tasks[int(sys.argv[2]) :: 2] + tasks[:3]:
    tune.tune(task, options, map, table)
"""


@pytest.mark.thorough
def test_two_processes_tune_at_once(tmp_path: Path) -> None:
    """The profile has the configurations that either process finds, and those that both find."""
    from bench import tune
    from bench.cases import attention as cases

    path = tmp_path / "of" / "both.csv"
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "error::RuntimeWarning", "-c", TUNER, str(path), which],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for which in "01"
    ]
    for child in children:
        assert child.stdout is not None and child.stdout.readline()  # both have imported what they need
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    for child in children:
        child.communicate(timeout=PATIENCE)
        assert child.returncode == 0
    resized = [cases.Case(1, 2, 300, 64).resized(length) for length in (300, 1000, 3000)]
    tasks = tune.tasks_of(resized, selection.KERNELS, ARCH)
    found = {row.conditions: row.config for row in profiles.load(path, ARCH)}
    assert found == {task.conditions: task.default for task in tasks} and len(tasks) == 22
    assert sorted(path.parent.iterdir()) == [path, path.with_name("both.csv.lock")]


@pytest.mark.parametrize(
    ("arch", "config", "reason"),
    [
        ("sm_90", TileConfig(64, 64, 64, 2), "num_warps must be at most 32"),
        ("gfx942", TileConfig(64, 64, 32, 2), "num_warps must be at most 16"),
        ("sm_90", TileConfig(64, 64, 4, 0), "num_stages must lie in"),
        ("sm_90", TileConfig(64, 64, 4, 10**6), "num_stages must lie in"),
        ("sm_90", TileConfig(64, 64, -4, 1), "num_warps must be a power of two"),
    ],
)
def test_a_profile_that_no_gpu_can_serve(arch: str, config: TileConfig, reason: str, tmp_path: Path) -> None:
    """Numbers of threads or stages that no GPU has are refused, and not saved."""
    assert reason in str(config.why_invalid(arch, True))
    with pytest.raises(ValueError, match=reason):
        profiles.save(tmp_path / "profile.csv", arch, [Row(ROW.conditions, config)])


def test_a_profile_that_does_not_fit_this_gpu() -> None:
    """A valid configuration of another GPU: smaller ones take its place, with a warning each, once."""
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.errors import OutOfResources

    tensors, spec = call("none", torch.bfloat16, 64, length=256)
    large, limit = TileConfig(128, 128, 8, 2), 60_000
    profiles.save(profiles.user_profile_path(ARCH), ARCH, [Row(ROW.conditions, large)])
    selection.forget()
    assert select() == large
    with recorded_launches(ARCH) as launches:
        record = CompiledKernel.run

        def run(kernel: CompiledKernel) -> object:
            if kernel.metadata.shared > limit:
                raise OutOfResources(kernel.metadata.shared, limit, "shared memory")
            return record.fget(kernel)

        CompiledKernel.run = property(run)
        with pytest.warns(RuntimeWarning, match=r"forward: TileConfig\(block_m=128, block_n=128, .* is used instead"):
            forward(tensors, spec)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            forward(tensors, spec)
    assert [launch.name for launch in launches] == ["forward", "forward"]
    assert all(launch.kernel.metadata.shared <= limit for launch in launches)
    assert select() == large  # what has taken its place is of this process only
