"""Time of the host: both checkouts are measured, and nothing is left changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.__main__ import main
from bench.verbs import host
from triton_relattn import _implementations as implementations

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
def test_two_checkouts_in_turn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "triton_relattn").mkdir()
    asked, inner = [], host.in_checkout

    def in_checkout(folder: Path, kind: str, calls: int) -> dict[str, float]:
        asked.append((kind, folder.name))
        return inner(folder, kind, calls) if len(asked) == 1 else dict.fromkeys(host.COLUMNS, 100.0 - len(asked))

    monkeypatch.setattr(host, "in_checkout", in_checkout)
    assert main(["host", "--calls", "2", "--rounds", "2", "--beside", str(tmp_path)]) == 0
    assert asked == [(kind, folder) for kind in host.KINDS for folder in (ROOT.name, tmp_path.name)] * 2
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 6 and lines[-1].split()[-1] == "88"  # the least of both rounds


@pytest.mark.thorough
@pytest.mark.parametrize("kind", host.KINDS)
def test_what_is_measured(kind: str) -> None:
    """Parts are not longer than the whole."""
    kept = implementations._why_no_kernels
    found = host.measure(kind, 2)
    assert implementations._why_no_kernels is kept and tuple(found) == host.COLUMNS
    assert 0 < found["first kernel"] < found["forward"] < found["both"]
    assert 0 < found["first of backward"] < found["backward"] < found["both"]
