"""``python -m triton_relattn check``, in Triton's interpreter."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from triton_relattn import check

LENGTH = 33


@pytest.mark.parametrize("call", check.CALLS, ids=lambda call: re.sub(r"\W+", "-", call.name))
def test_calls_pass(call: check.Call) -> None:
    status, details = check._checked(call, "cpu", LENGTH, torch.float16)
    assert status == "ok", details
    assert "out" in details and "d_query" in details


def test_the_grid_passes() -> None:
    assert check._on_a_grid("cpu", 6, torch.float16) == ("ok", "")


@pytest.fixture
def one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "CALLS", check.CALLS[-2:-1])
    monkeypatch.setattr(check, "_on_a_grid", lambda *_: ("ok", ""))


def test_all_of_it(one_call: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main("cpu", LENGTH, torch.float16) == 0
    said = capsys.readouterr().out
    assert "ok     one query after a cache" in said and "all right" in said


@pytest.mark.parametrize("fault", ["wrong", "other bits", "an error"])
def test_faults_fail(one_call: None, fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    attend, calls = check.fused_relative_attention, 0

    def faulty(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if fault == "an error":
            raise RuntimeError("out of registers")
        out, lse = attend(*args, **kwargs)
        return out * (1.02 if fault == "wrong" or calls > 1 else 1.0), lse

    monkeypatch.setattr(check, "fused_relative_attention", faulty)
    assert check.main("cpu", LENGTH, torch.float16) == 1
    said = capsys.readouterr().out
    expected = {"wrong": "out", "other bits": "a second time gives other bits: out", "an error": "RuntimeError: out of registers"}
    assert "FAILED one query after a cache" in said and expected[fault] in said and 'implementation="blockwise"' in said


def test_faults_on_a_grid_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = check.decomposed_relative_attention

    def faulty(*args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = attend(*args, **kwargs)
        return out * (1.02 if kwargs["implementation"] == "triton" else 1.0)

    monkeypatch.setattr(check, "decomposed_relative_attention", faulty)
    assert check._on_a_grid("cpu", 6, torch.float16)[0] == "FAILED"
