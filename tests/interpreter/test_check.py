"""``python -m triton_relattn check`` in Triton's interpreter, and the warning that a passed check ends."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from triton_relattn import _implementations as implementations
from triton_relattn import check
from triton_relattn._core import warn

LENGTH, GPU = 33, torch.device("cuda", 0)


@pytest.mark.parametrize("call", check.CALLS, ids=lambda call: re.sub(r"\W+", "-", call.name))
def test_calls_pass(call: check.Call) -> None:
    status, details = check._checked(call, "cpu", LENGTH, torch.float16)
    assert status == "ok", details
    assert "out" in details and "d_query" in details


@pytest.fixture
def one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "CALLS", check.CALLS[-2:-1])


def test_all_of_it(one_call: None, capsys: pytest.CaptureFixture[str]) -> None:
    """The report of one call and one grid."""
    assert check.main("cpu", LENGTH, torch.float16) == 0
    printed = capsys.readouterr().out
    assert "ok     one query after a cache" in printed and "ok     positions on a grid" in printed and "all right" in printed


@pytest.mark.parametrize("fault", ["wrong", "other bits", "an error", "on a grid"])
def test_faults_fail(one_call: None, fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    name = "decomposed_relative_attention" if fault == "on a grid" else "fused_relative_attention"
    attend, calls = getattr(check, name), 0

    def faulty(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if fault == "an error":
            raise RuntimeError("out of registers")
        result = attend(*args, **kwargs)
        if fault == "on a grid":
            return result * (1.02 if kwargs["implementation"] == "triton" else 1.0)
        return result[0] * (1.02 if fault == "wrong" or calls > 1 else 1.0), result[1]

    monkeypatch.setattr(check, name, faulty)
    assert check.main("cpu", LENGTH, torch.float16) == 1
    printed = capsys.readouterr().out
    expected = {
        "wrong": "FAILED one query after a cache\n         out",
        "other bits": "a second run gives other bits: out",
        "an error": "RuntimeError: out of registers",
        "on a grid": "FAILED positions on a grid (SAM)\n         out",
    }
    assert expected[fault] in printed and 'implementation="blockwise"' in printed


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An A100 as torch describes it, with no remembered checks."""
    monkeypatch.setenv("TRITON_RELATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="NVIDIA A100"))
    forget(monkeypatch)
    yield
    forget(monkeypatch)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop all caches, as in a new process."""
    monkeypatch.setattr(warn, "_given", set())
    implementations.hardware_identity.cache_clear()
    implementations.is_checked.cache_clear()


def warned() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        implementations.warn_unchecked(GPU)
    return [str(warning.message) for warning in caught]


def test_a_check_ends_the_warning(a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check ends the warning for this GPU and these versions; otherwise the warning is given once per process."""
    (message,) = warned()
    assert '"python -m triton_relattn check" takes a few minutes' in message and warned() == []
    assert implementations.remember_check(GPU)
    forget(monkeypatch)
    assert warned() == []
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    forget(monkeypatch)
    assert warned() == [message]


def test_a_folder_that_cannot_be_written(a_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A check is not stored there, nor through a link to another file."""
    implementations.remember_check(GPU)
    (stored,) = (tmp_path / "checked").iterdir()
    stored.unlink()
    (tmp_path / "other").write_text("kept")
    stored.symlink_to(tmp_path / "other")
    assert not implementations.remember_check(GPU) and (tmp_path / "other").read_text() == "kept"
    monkeypatch.setenv("TRITON_RELATTN_CACHE", str(tmp_path / "other"))
    assert not implementations.remember_check(GPU)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main() == 2
    assert "There is no GPU here" in capsys.readouterr().out
