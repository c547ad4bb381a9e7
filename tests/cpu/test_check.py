"""The warning of unchecked kernels, and what is remembered of a check; the check itself is tested in Triton's interpreter."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from triton_relattn import check
from triton_relattn._core import warn
from triton_relattn._implementations import hardware

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As torch describes one; nothing is remembered."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_RELATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(warn, "_given", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="NVIDIA H100"))
    hardware.identity.cache_clear()
    hardware.is_checked.cache_clear()
    yield
    hardware.identity.cache_clear()
    hardware.is_checked.cache_clear()


def test_unchecked_kernels_warn_once() -> None:
    with pytest.warns(RuntimeWarning, match='"python -m triton_relattn check" takes a minute') as caught:
        hardware.warn_of_unchecked(GPU)
    assert 'implementation="blockwise"' in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hardware.warn_of_unchecked(GPU)


def test_a_check_ends_the_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """For this GPU, with these versions."""
    assert not hardware.is_checked(GPU)
    assert hardware.remember_check(GPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hardware.warn_of_unchecked(GPU)
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    hardware.identity.cache_clear()
    hardware.is_checked.cache_clear()
    assert not hardware.is_checked(GPU)


def test_gpus_that_were_measured_do_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "MEASURED", frozenset({(9, 0)}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hardware.warn_of_unchecked(GPU)


def test_measured_gpus_have_results() -> None:
    """Only a committed run may silence the warning."""
    results = Path(__file__).parents[2] / "bench" / "results"
    runs = [each for each in results.iterdir() if each.name != "cpu" and (each / "summary.json").exists()]
    assert len(hardware.MEASURED) <= len(runs)


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_RELATTN_CACHE", str(tmp_path / "file"))
    assert not hardware.remember_check(GPU)
    link = tmp_path / "other"
    monkeypatch.setenv("TRITON_RELATTN_CACHE", str(tmp_path))
    hardware.remember_check(GPU)
    (stored,) = (tmp_path / "checked").iterdir()
    stored.unlink()
    link.write_text("kept")
    stored.symlink_to(link)
    assert not hardware.remember_check(GPU) and link.read_text() == "kept"


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main() == 2
    assert "There is no GPU here" in capsys.readouterr().out
