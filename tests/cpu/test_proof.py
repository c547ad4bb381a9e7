"""Models of versions of a library that were not tested are compared with the stock ones before they are enabled."""

from __future__ import annotations

import importlib
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import transformers

from bench.families import FAMILIES
from tests import sources
from tests.cpu.models import build
from triton_relattn.integrations import known, proof, replacement
from triton_relattn.integrations.transformers import LIBRARY, disable, enable

BLOOM = "transformers.models.bloom.modeling_bloom"
UNKNOWN = "0" * 16
T5 = next(each for each in LIBRARY.sources if each.title == "T5")


@pytest.fixture(autouse=True)
def caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A folder of the user's files that is empty, and nothing that is remembered of other tests, or by them."""
    monkeypatch.setenv("TRITON_RELATTN_CACHE", str(tmp_path / "user"))
    monkeypatch.setattr(proof, "_passed", {})
    known.are_known.cache_clear()
    yield
    monkeypatch.undo()
    known.are_known.cache_clear()


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The proofs that were run, by the name of their first case."""
    run: list[str] = []
    prove = proof.prove

    def counted(cases: Any, change: Any) -> float:
        run.append(cases[0].name)
        return prove(cases, change)

    monkeypatch.setattr(proof, "prove", counted)
    return run


def change_source(monkeypatch: pytest.MonkeyPatch, module: str, fingerprint: str | None = UNKNOWN) -> None:
    """Let a module of a library have another file than any that is known."""
    read = known.fingerprint
    monkeypatch.setattr(known, "fingerprint", lambda name: fingerprint if name == module else read(name))
    known.are_known.cache_clear()


def change_forward(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    """Let BLOOM's blocks call their attention in another way: change gets the stock forward, and what it is called with."""
    stock = importlib.import_module(BLOOM)
    forward = stock.BloomBlock.forward
    monkeypatch.setattr(stock.BloomBlock, "forward", lambda self, *args, **kwargs: change(forward, self, *args, **kwargs))
    change_source(monkeypatch, BLOOM)


def harmless(forward: Any, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return forward(self, *args, **kwargs)


def renamed(forward: Any, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The cache comes by another name, as from transformers 5.24 on."""
    attention: Any = self.self_attention
    call = attention.forward
    ours = type(attention).__module__.startswith("triton_relattn")

    def attend(*given: Any, layer_past: Any = None, **named: Any) -> Any:
        return call(*given, **({"a_new_name": layer_past} if ours else {"layer_past": layer_past}), **named)

    attention.forward = attend
    try:
        return forward(self, *args, **kwargs)
    finally:
        del attention.forward


def scaled(forward: Any, self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The stock attention has another scale, which ours does not read."""
    attention: Any = self.self_attention
    if type(attention).__module__.startswith("triton_relattn"):
        return forward(self, hidden_states, *args, **kwargs)
    attention.inv_norm_factor *= 1 + 1e-6
    try:
        return forward(self, hidden_states, *args, **kwargs)
    finally:
        attention.inv_norm_factor /= 1 + 1e-6


def raising(forward: Any, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if type(self.self_attention).__module__.startswith("triton_relattn"):
        raise TypeError("forward() got an unexpected keyword argument")
    return forward(self, *args, **kwargs)


def test_a_harmless_change_is_proven_once(monkeypatch: pytest.MonkeyPatch, proofs: list[str]) -> None:
    """With a line that says so; the next process, and the next model, need no proof. A change of our own files needs one."""
    change_forward(monkeypatch, harmless)
    with pytest.warns(UserWarning, match=rf"BLOOM, of transformers {transformers.__version__}, has .*5\.23\.0"):
        assert enable(build("bloom"))
    assert proofs == ["bloom"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert enable(build("bloom"))
        proof._passed.clear()  # as another process has it
        assert enable(build("bloom"))
    assert proofs == ["bloom"]
    proof._passed.clear()
    monkeypatch.setattr("triton_relattn.__version__", "another")
    with pytest.warns(UserWarning, match="BLOOM"):
        assert enable(build("bloom"))
    assert proofs == ["bloom", "bloom"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (renamed, "the enabled model raises TypeError: BloomAttention is enabled, and its forward has no argument a_new_name"),
        (scaled, r"bloom, without padding: the output differs by \d\.\de-0\d of the largest number there, 9e-10 is allowed"),
        (raising, r"bloom: the enabled model raises TypeError: forward\(\) got an unexpected keyword argument"),
    ],
    ids=["the-cache-has-another-name", "the-scale-differs", "it-raises"],
)
def test_a_change_that_matters_is_refused(change: Any, message: str, monkeypatch: pytest.MonkeyPatch, proofs: list[str]) -> None:
    """With the names of the family and the versions, what differs, and what to do; the model stays as it was, and usable."""
    change_forward(monkeypatch, change)
    model = build("bloom")
    types, config = [type(each) for each in model.modules()], model.config
    versions = known.versions(BLOOM)
    for _ in range(2):  # a failure is not remembered
        with pytest.warns(UserWarning), pytest.raises(RuntimeError, match=message) as refused:
            enable(model)
    said = str(refused.value)
    assert f"transformers {transformers.__version__} has other source files" in said and ", ".join(versions) in said
    assert said.startswith("BLOOM was not enabled") and f'pip install "transformers=={versions[-1]}"' in said
    assert "enable(model, prove=False)" in said
    assert [type(each) for each in model.modules()] == types and model.config is config
    assert proofs == ["bloom", "bloom"]
    assert enable(model, prove=False) and len(proofs) == 2  # at one's own risk
    assert disable(model)


def test_known_sources_are_not_proven(proofs: list[str]) -> None:
    for name in FAMILIES:
        assert enable(build(name)), name
    assert proofs == []


def test_a_file_beside_counts(monkeypatch: pytest.MonkeyPatch, proofs: list[str]) -> None:
    change_source(monkeypatch, "transformers.masking_utils")
    with pytest.warns(UserWarning, match="BLOOM"):
        enable(build("bloom"))
    assert proofs == ["bloom"]


def test_files_of_two_versions_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is known, but not together."""
    files = {"a": {"1": {"5.23.0"}}, "b": {"2": {"5.24.0"}, "3": {"5.23.0", "5.24.0"}}}
    monkeypatch.setattr(known, "known_sources", lambda: files)
    for b, expected in (("2", False), ("3", True)):
        monkeypatch.setattr(known, "fingerprint", {"a": "1", "b": b}.get)
        known.are_known.cache_clear()
        assert known.are_known(("a", "b")) == expected


def test_a_file_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, proofs: list[str]) -> None:
    """It is no known one, and there is no name to remember it by."""
    change_source(monkeypatch, BLOOM, None)
    for _ in range(2):
        with pytest.warns(UserWarning, match="BLOOM"):
            assert enable(build("bloom"))
    assert len(proofs) == 2


@pytest.mark.parametrize("state", ["unwritable", "corrupt"])
def test_the_folder_may_be_spoilt(state: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, proofs: list[str]) -> None:
    change_source(monkeypatch, BLOOM)
    user = tmp_path / "user"
    if state == "unwritable":
        user.write_text("no folder")
    with pytest.warns(UserWarning, match="BLOOM"):
        enable(build("bloom"))
    if state == "corrupt":
        (file,) = (user / "proofs").iterdir()
        assert "BLOOM" in file.read_text()
        file.write_bytes(b"\xff" * 100)
    proof._passed.clear()
    with pytest.warns(UserWarning, match="BLOOM"):
        enable(build("bloom"))
    assert len(proofs) == 2


def test_ours_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a version that has no class of a name any more."""
    module = build("bloom")
    change_source(monkeypatch, BLOOM)
    load = importlib.import_module

    def fail(name: str, *args: Any) -> Any:
        if name.endswith("integrations.transformers.bloom"):
            raise AttributeError("module has no attribute 'BloomAttention'")
        return load(name, *args)

    monkeypatch.setattr(replacement.importlib, "import_module", fail)
    with pytest.raises(RuntimeError, match=r"BLOOM was not enabled.*no attribute 'BloomAttention'.*pip install"):
        enable(module)


def test_a_class_without_a_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class is replaced if it was compared, not because another one of its file was."""
    change_source(monkeypatch, BLOOM)
    cases = replacement.cases_of
    monkeypatch.setattr(replacement, "cases_of", lambda library, source: cases(library, T5))
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="no small model has BloomAttention, BloomModel"):
        enable(build("bloom"))


CONTEXTS: dict[str, Callable[[], Any]] = {
    "nothing": nullcontext,
    "meta": lambda: torch.device("meta"),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_what_the_caller_has_set_stays(name: str, monkeypatch: pytest.MonkeyPatch, proofs: list[str]) -> None:
    """And has no effect on the proof."""

    def state() -> list[Any]:
        drawn: Any = np.random.get_state()
        numbers = [torch.get_rng_state().tolist(), random.getstate(), drawn[1].tolist()]
        return [*numbers, torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(), *modes()]

    def modes() -> list[Any]:
        return [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"), warnings.filters[:]]

    change_source(monkeypatch, BLOOM)
    model, threads = build("bloom"), torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with warnings.catch_warnings(), CONTEXTS[name]():
            warnings.simplefilter("ignore")
            before = state()
            assert enable(model)
            assert state() == before
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)
    assert proofs == ["bloom"]


def test_threads_of_a_proof() -> None:
    """As many as the caller has, not as many as the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert proof.apart(torch.get_num_threads) == 1
    finally:
        torch.set_num_threads(threads)


def test_comparison() -> None:
    """It is as strict as it says, tensor by tensor, and NaN is no agreement."""
    ones = torch.ones(3, dtype=torch.float64)
    assert proof.compare("m", {"out": ones + 0.9 * proof.LIMIT}, {"out": ones}) > 0.8 * proof.LIMIT
    for wrong in (ones + 1.1 * proof.LIMIT, ones * torch.nan, ones[:2]):
        with pytest.raises(proof.Disproved, match="m: out"):
            proof.compare("m", {"out": wrong}, {"out": ones})
    with pytest.raises(proof.Disproved, match="not the same results: more"):
        proof.compare("m", {"out": ones, "more": ones}, {"out": ones})
    tiny, share = 1e-20, 1e-2  # a gradient that cancels to nothing is measured by a hundredth of the largest
    small = {proof.GRADIENT + "a": ones, proof.GRADIENT + "b": tiny * ones}
    assert proof.compare("m", {**small, proof.GRADIENT + "b": 2 * tiny * ones}, small) < 10 * tiny / share


@pytest.mark.parametrize("source", LIBRARY.sources, ids=lambda source: source.stock.rpartition(".")[2].removeprefix("modeling_"))
def test_every_family_can_be_proven(source: replacement.Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its small models have every class that is replaced."""
    change_source(monkeypatch, source.stock)
    classes = set(source.classes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replacement._prove(LIBRARY, [source], classes)


def test_known_sources_are_those_that_are_installed() -> None:
    """All rows of versions that are tested are there and right: ``python -m tests.sources`` writes them."""
    recorded, names = sources.recorded(), sources.modules()
    assert recorded == sorted(set(recorded)) and {row[2] for row in recorded} <= set(names)
    here = [row for row in sources.installed() if row[:2] in {each[:2] for each in recorded}]
    assert [row for row in here if row not in recorded] == []
    version = ("transformers", transformers.__version__)
    assert {row[2] for row in recorded if row[:2] == version} == {each for each in names if each.startswith("transformers.")}


def test_tested_versions_are_known() -> None:
    root = Path(__file__).parents[2]
    pinned = [
        line.split("#")[0].strip()
        for name in ("constraints.txt", "constraints-oldest.txt", "requirements-libraries.txt")
        for line in (root / name).read_text().splitlines()
    ]
    tested = {line for line in pinned if line.split("==")[0] in known.DISTRIBUTIONS.values()}
    assert len(tested) >= 7
    assert tested <= {"==".join(row[:2]) for row in sources.recorded()}
