"""What docs/long-audio.md says is computed, and its formulas are the bytes that stock and enabled models allocate."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench.report import longest
from bench.report.longest import EAGER, ENCODERS, Encoder
from tests.libraries.standins import needs
from triton_relattn import enable
from triton_relattn.integrations.report import _Counter

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "long-audio.md").read_text()
SMALL: dict[str, Any] = {"layers": 2, "width": 128, "channels": 32, "parameters": 0.0}
FRAMES, NEAR = 8192, 0.05


def test_the_table_of_long_audio() -> None:
    assert f"<!-- begin longest: python -m bench.report.longest -->\n{longest.table()}\n\n<!-- end -->" in PAGE


@pytest.mark.parametrize("way", longest.WAYS)
@pytest.mark.parametrize("ours", [False, True])
def test_the_longest_audio_fits(way: str, ours: bool) -> None:
    count, per_parameter = longest.WAYS[way]
    for encoder in ENCODERS:
        frames = round(longest.longest(encoder, way, ours, 40) / encoder.factor / longest.HOP)
        room = 40 * longest.GIBIBYTE - per_parameter * encoder.parameters
        assert count(encoder, frames, ours) <= room < count(encoder, frames + 1, ours)


def parakeet(encoder: Encoder, dropout: float) -> Any:
    """A Parakeet encoder from transformers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": encoder.width, "num_hidden_layers": encoder.layers, "num_attention_heads": encoder.heads}
    sizes |= {"intermediate_size": 4 * encoder.width, "subsampling_conv_channels": encoder.channels}
    names = ("dropout", "dropout_positions", "attention_dropout", "activation_dropout", "layerdrop")
    config = transformers.ParakeetEncoderConfig(**sizes, **dict.fromkeys(names, dropout))
    return transformers.ParakeetEncoder(config)


def conformer(encoder: Encoder, dropout: float) -> Any:
    """A Conformer from NeMo."""
    from tests.libraries.models import nemo

    sizes: dict[str, Any] = {"n_layers": encoder.layers, "d_model": encoder.width, "n_heads": encoder.heads}
    sizes |= {"feat_in": longest.MEL, "subsampling": "striding" if encoder.factor == 4 else "dw_striding"}
    sizes |= {"subsampling_factor": encoder.factor, "subsampling_conv_channels": encoder.channels}
    return nemo(**sizes, dropout=dropout, dropout_att=dropout)


def allocated(encoder: Encoder, ours: bool, way: str, dropout: float = 0.0, frames: int = FRAMES, device: str = "meta") -> int:
    """Peak bytes of the tensors, in training after a call that has made the sinusoids. SDPA's GPU kernels allocate nothing per
    pair; the meta device's version does in bfloat16, in float32."""
    is_nemo, dtype = encoder.pairs is EAGER, torch.bfloat16 if way.endswith("bfloat16") else torch.float32
    model, mel = (conformer if is_nemo else parakeet)(encoder, dropout), encoder.factor * frames
    if ours:
        assert enable(model)
    if way == "checkpointed":
        model.gradient_checkpointing_enable()
    model.to(device, dtype)
    signal = torch.zeros((1, longest.MEL, mel) if is_nemo else (1, mel, longest.MEL), device=device, dtype=dtype)
    given = {"audio_signal": signal, "length": torch.tensor([mel], device=device)} if is_nemo else {"input_features": signal}
    for train in (False, True) if way in ("training", "checkpointed") else (False,):
        model.train(train)
        with pytest.MonkeyPatch.context() as patch, _Counter() as counter, torch.set_grad_enabled(train):
            if dtype == torch.bfloat16:
                patch.setattr(nn.functional, "scaled_dot_product_attention", lambda query, *_, **__: torch.empty_like(query))
            out: Any = model(**given)
            if train:
                (out[0] if isinstance(out, tuple) else out.last_hidden_state).sum().backward()
    return counter.peak


WAYS = ("inference", "training", "checkpointed", "inference in bfloat16")
NEMO = [
    pytest.param(encoder, way, dropout, marks=needs("nemo"), id=f"nemo-{encoder.name}-{way}-{dropout}")
    for encoder in ENCODERS
    if encoder.pairs is EAGER
    for way in WAYS
    for dropout in (0.0, 0.1)
    if way != "checkpointed" and not (dropout and way == "inference in bfloat16")
]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize("ours", [False, True], ids=["stock", "enabled"])
@pytest.mark.parametrize(("encoder", "way", "dropout"), [*((ENCODERS[-1], way, 0.0) for way in WAYS), *NEMO])
def test_the_formulas_are_what_is_allocated(encoder: Encoder, way: str, dropout: float, ours: bool) -> None:
    """Within 5 %, counted on the meta device. In NeMo a dropout mask has 4 bytes per element, and sinusoids cover the longest
    call so far; transformers would keep a mask, except in SDPA's GPU kernels."""
    encoder = replace(encoder, **SMALL)
    if way == "inference in bfloat16":
        expected = longest.WAYS[way][0](encoder, FRAMES, ours)
    elif way == "inference":
        expected = longest.forward(encoder, FRAMES, ours)
    else:
        counted = replace(encoder, positions=2) if encoder.pairs is EAGER else encoder
        mask = 4 if dropout else 0
        expected = longest.training(counted, FRAMES, ours, way == "checkpointed", mask=mask, gpu=False)
    assert allocated(encoder, ours, way, dropout) == pytest.approx(expected, rel=NEAR)


def test_the_formulas_on_a_cpu() -> None:
    encoder = replace(ENCODERS[-1], **SMALL | {"width": 32})
    peak = allocated(encoder, False, "inference", frames=512, device="cpu")
    assert peak == pytest.approx(longest.forward(encoder, 512, False), rel=NEAR)


def test_the_measured_hour() -> None:
    with open(ROOT / "bench" / "results" / "cpu" / "models_hour.csv") as file:
        rows = {(row["method"], row["direction"]): row for row in csv.DictReader(file)}
    for direction, name in (("forward", "forward"), ("forward+backward", "forward and backward")):
        row = rows["triton_relattn", direction]
        measured = f"{float(row['p50_ms']) / 1e3:.0f} s | {int(row['peak_bytes']) / 2**30:.2f} GiB"
        assert f"| enabled, {name} | {measured} |" in PAGE
    assert rows["eager", "forward"]["status"].removeprefix("out of memory: ") in PAGE
