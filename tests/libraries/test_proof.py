"""Libraries of versions that were not tested are compared with the stock models, as in ``tests/cpu/test_proof.py``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests import sources
from tests.libraries.models import SOURCES, Model, entry
from tests.libraries.standins import is_installed
from triton_relattn.integrations import known, proof, replacement

SETTINGS: dict[str, dict[str, Any]] = {"x": {"rel_pos_bias": True}, "fairseq2": {"kind": "shaw"}}
every_library = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            entry(name, **SETTINGS.get(name, {})),
            id=name,
            marks=pytest.mark.skipif(not is_installed(SOURCES[name][1]), reason="not installed: make test-libraries"),
        )
        for name in SOURCES
    ],
)


@pytest.fixture(autouse=True)
def unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No file of a library is known, and nothing is remembered."""
    monkeypatch.setenv("TRITON_RELATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(proof, "_passed", {})
    monkeypatch.setattr(known, "are_known", lambda modules: False)


@every_library
def test_it_can_be_proven(kind: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once; and small models have every class that is replaced."""
    model = kind.make()
    with pytest.warns(UserWarning, match="has other source files"):
        assert kind.integration.enable(model)
    kind.integration.disable(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kind.integration.enable(model)
    library, package = kind.integration.LIBRARY, SOURCES[kind.name][1]
    met = [each for each in library.sources if sources.file_of(each.stock) and each.stock.startswith(package.rstrip("2"))]
    assert met
    for title in {each.title for each in met}:
        together = [each for each in met if each.title == title]
        monkeypatch.setattr(known, "identity", lambda *_: None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            replacement._prove(library, together, {c for each in together for c in each.classes()})


@every_library
def test_another_scale_is_refused(kind: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if what the operator computes had another meaning in the library's new version."""
    model = kind.make()
    types = [type(each) for each in model.modules()]
    compare = proof.compare

    def changed(name: str, ours: proof.Results, stock: proof.Results) -> float:
        return compare(name, {what: each * (1 + 1e-8) for what, each in ours.items()}, stock)

    monkeypatch.setattr(proof, "compare", changed)
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match=rf"pip install .{kind.distribution}==.*prove=False"):
        kind.integration.enable(model)
    assert [type(each) for each in model.modules()] == types
    assert kind.integration.enable(model, prove=False)


def test_known_sources_are_those_that_are_installed() -> None:
    recorded: Any = sources.recorded()
    for row in sources.installed():
        assert row in recorded or row[0] == "transformers", row
