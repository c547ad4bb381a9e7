"""What docs/long-audio.md, docs/answers.md, docs/cite.md and CITATION.cff say is computed, short, linked and consistent."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench.report import longest
from bench.report.longest import EAGER, ENCODERS, Encoder
from tests.libraries.standins import is_installed
from triton_relattn import enable
from triton_relattn.integrations.report import _Counter

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SMALL: dict[str, Any] = {"layers": 2, "width": 128, "channels": 32, "parameters": 0.0}
FRAMES, NEAR = 8192, 0.05


def page(name: str) -> str:
    return (DOCS / name).read_text()


def test_the_table_of_long_audio() -> None:
    found = re.search(
        r"<!-- begin longest: python -m bench.report.longest -->\n(.*?)\n\n<!-- end -->", page("long-audio.md"), re.DOTALL
    )
    assert found and found[1] == longest.table()


@pytest.mark.parametrize("way", longest.WAYS)
@pytest.mark.parametrize("ours", [False, True])
def test_the_longest_audio_fits(way: str, ours: bool) -> None:
    count, per_parameter = longest.WAYS[way]
    for encoder in ENCODERS:
        frames = round(longest.longest(encoder, way, ours, 40) / encoder.factor / longest.HOP)
        room = 40 * longest.GIBIBYTE - per_parameter * encoder.parameters
        assert count(encoder, frames, ours) <= room < count(encoder, frames + 1, ours)


def parakeet(encoder: Encoder, ours: bool, checkpointing: bool = False) -> nn.Module:
    """A Parakeet encoder from transformers, without dropout, which would keep a mask except in SDPA's GPU kernel."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": encoder.width, "num_hidden_layers": encoder.layers, "num_attention_heads": encoder.heads}
    sizes |= {"intermediate_size": 4 * encoder.width, "subsampling_conv_channels": encoder.channels}
    dropout = dict.fromkeys(("dropout", "dropout_positions", "attention_dropout", "activation_dropout", "layerdrop"), 0.0)
    model: nn.Module = transformers.ParakeetEncoder(transformers.ParakeetEncoderConfig(**sizes, **dropout))
    if ours:
        assert enable(model)
    if checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


def allocated(model: nn.Module, given: dict[str, torch.Tensor], train: bool) -> int:
    """Peak bytes of the tensors."""
    model.train(train)
    with _Counter() as counter, torch.set_grad_enabled(train):
        out: Any = model(**given)
        if train:
            (out[0] if isinstance(out, tuple) else out.last_hidden_state).sum().backward()
    return counter.peak


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize("ours", [False, True], ids=["stock", "enabled"])
@pytest.mark.parametrize("way", ["inference", "training", "checkpointed"])
def test_tensors_of_transformers(way: str, ours: bool) -> None:
    """The formulas are within 5 % of the allocated bytes, counted on the meta device."""
    encoder = replace(ENCODERS[-1], **SMALL)
    model = parakeet(encoder, ours, way == "checkpointed").to("meta")
    given = {"input_features": torch.empty(1, encoder.factor * FRAMES, longest.MEL, device="meta")}
    expected = longest.forward(encoder, FRAMES, ours)
    if way != "inference":
        expected = longest.training(encoder, FRAMES, ours, way == "checkpointed", mask=0, gpu=False)
    assert allocated(model, given, way != "inference") == pytest.approx(expected, rel=NEAR)


@pytest.mark.parametrize("ours", [False, True], ids=["stock", "enabled"])
def test_tensors_in_bfloat16(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """SDPA's GPU kernels allocate nothing per pair; the meta device's version does, in float32."""
    encoder = replace(ENCODERS[-1], **SMALL)
    model = parakeet(encoder, ours).to("meta", torch.bfloat16)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", lambda query, *_, **__: torch.empty_like(query))
    given = {"input_features": torch.empty(1, encoder.factor * FRAMES, longest.MEL, device="meta", dtype=torch.bfloat16)}
    count, _ = longest.WAYS["inference in bfloat16"]
    assert allocated(model, given, False) == pytest.approx(count(encoder, FRAMES, ours), rel=NEAR)


def test_tensors_of_transformers_on_a_cpu() -> None:
    encoder = replace(ENCODERS[-1], **SMALL | {"width": 32})
    given = {"input_features": torch.randn(1, encoder.factor * 512, longest.MEL)}
    assert allocated(parakeet(encoder, False), given, False) == pytest.approx(longest.forward(encoder, 512, False), rel=NEAR)


NEMO = [encoder for encoder in ENCODERS if encoder.pairs is EAGER]
needs_nemo = pytest.mark.skipif(not is_installed("nemo"), reason="not installed: make test-libraries")


def conformer(encoder: Encoder, ours: bool, dropout: float, dtype: torch.dtype) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A Conformer from NeMo on the meta device, and its input."""
    from tests.libraries.models import nemo

    sizes: dict[str, Any] = {
        "feat_in": longest.MEL,
        "n_layers": encoder.layers,
        "d_model": encoder.width,
        "n_heads": encoder.heads,
    }
    front: dict[str, Any] = {
        "subsampling": "striding" if encoder.factor == 4 else "dw_striding",
        "subsampling_factor": encoder.factor,
    }
    model = nemo(**sizes, **front, subsampling_conv_channels=encoder.channels, dropout=dropout, dropout_att=dropout)
    if ours:
        assert enable(model)
    mel = encoder.factor * FRAMES
    given = {"audio_signal": torch.empty(1, longest.MEL, mel, device="meta", dtype=dtype)}
    return model.to("meta", dtype), given | {"length": torch.tensor([mel], device="meta")}


@needs_nemo
@pytest.mark.parametrize("encoder", NEMO, ids=lambda encoder: encoder.name)
@pytest.mark.parametrize("ours", [False, True], ids=["stock", "enabled"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_tensors_of_nemo(encoder: Encoder, ours: bool, dropout: float) -> None:
    """The formulas also hold for NeMo, where a dropout mask has 4 bytes per element and sinusoids cover the longest call so
    far."""
    encoder = replace(encoder, **SMALL)
    model, given = conformer(encoder, ours, dropout, torch.float32)
    assert allocated(model, given, False) == pytest.approx(longest.forward(encoder, FRAMES, ours), rel=NEAR)
    expected = longest.training(replace(encoder, positions=2), FRAMES, ours, mask=4 if dropout else 0, gpu=False)
    assert allocated(model, given, True) == pytest.approx(expected, rel=NEAR)


@needs_nemo
@pytest.mark.parametrize("encoder", NEMO, ids=lambda encoder: encoder.name)
@pytest.mark.parametrize("ours", [False, True], ids=["stock", "enabled"])
def test_tensors_of_nemo_in_bfloat16(encoder: Encoder, ours: bool) -> None:
    encoder = replace(encoder, **SMALL)
    count, _ = longest.WAYS["inference in bfloat16"]
    assert allocated(*conformer(encoder, ours, 0.0, torch.bfloat16), False) == pytest.approx(
        count(encoder, FRAMES, ours), rel=NEAR
    )


def test_the_measured_hour() -> None:
    with open(ROOT / "bench" / "results" / "cpu" / "models_hour.csv") as file:
        rows = {(row["method"], row["direction"]): row for row in csv.DictReader(file)}
    for direction, name in (("forward", "forward"), ("forward+backward", "forward and backward")):
        row = rows["triton_relattn", direction]
        measured = f"{float(row['p50_ms']) / 1e3:.0f} s | {int(row['peak_bytes']) / 2**30:.2f} GiB"
        assert f"| enabled, {name} | {measured} |" in page("long-audio.md")
    assert rows["eager", "forward"]["status"].removeprefix("out of memory: ") in page("long-audio.md")


def test_answers_are_short_and_linked() -> None:
    answers = re.split(r"^## ", page("answers.md"), flags=re.MULTILINE)[1:]
    assert len(answers) >= 20
    for answer in answers:
        heading, _, text = answer.partition("\n")
        assert len(text.strip().splitlines()) <= 5, heading
        assert re.search(r"\]\((?!http)[\w./-]+\.md", text), heading


def bibliography() -> dict[str, dict[str, str]]:
    """The entries of docs/cite.md: key -> fields."""
    found = re.findall(r"^@\w+\{(\w+),\n(.*?)^\}", page("cite.md"), re.DOTALL | re.MULTILINE)
    return {key: dict(re.findall(r"(\w+)\s*=\s*\{(.*?)\},?\n(?=\s+\w+\s*=|\Z)", fields, re.DOTALL)) for key, fields in found}


def plain(text: str) -> str:
    """Text without the braces that protect capitals, on one line."""
    return " ".join(text.replace("{", "").replace("}", "").split())


def test_the_citation_has_the_papers() -> None:
    """CITATION.cff and docs/cite.md have the same titles, years and arXiv identifiers."""
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    entries = bibliography()
    software = entries.pop("triton_relattn")
    assert plain(software["title"]) == citation["title"] and software["version"] == citation["version"]
    assert software["year"] == str(citation["date-released"])[:4]
    assert plain(software["author"]) == citation["authors"][0]["name"]
    page_entries = {(plain(entry["title"]), int(entry["year"]), entry.get("eprint")) for entry in entries.values()}
    file_entries = {
        (reference["title"], reference["year"], reference.get("url", "").partition("arxiv.org/abs/")[2] or None)
        for reference in citation["references"]
    }
    assert page_entries == file_entries and len(page_entries) == len(entries) == len(citation["references"])


def test_every_term_has_a_paper() -> None:
    """Every row of the table in docs/models.md is in the table of docs/cite.md, and its citation keys exist."""
    models = page("models.md").split("\n| model |")[1].split("\n\n")[0]
    rows = [
        line.strip("| ").split(" | ")
        for line in page("cite.md").split("\n| model or term |")[1].split("\n\n")[0].splitlines()[2:]
    ]
    keys = {key for row in rows for key in re.findall(r"`(\w+)`", row[1])}
    assert keys == set(bibliography()) - {"triton_relattn"}
    named = "\n".join(row[0] for row in rows)
    for line in models.splitlines()[2:]:
        for name in re.findall(r"[A-Z][\w-]+(?: [A-Z0-9][\w-]*)?", line.split("|")[1].split("(")[0].split(", proj")[0]):
            assert name in named, name
