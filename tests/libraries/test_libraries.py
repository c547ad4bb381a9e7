"""Enabled attention of libraries and packages: the same outputs and gradients, in linear memory, and what stays stock."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.enable.models import (
    LENGTH,
    PADDED,
    WHOLE,
    Sizes,
    assert_odd_calls_are_stock,
    assert_same,
    classes,
    in_precision,
    operators_dropout,
    output,
    runs_the_operator,
)
from tests.enable.stock import enable as enable_by_structure
from tests.libraries.models import CLASSES, ESPNET, HEADS, MEL, NEMO, STRUCTURES, Model, X, nemo, states
from tests.libraries.standins import load, needs
from tests.tolerance import assert_at_most, assert_near
from triton_relattn import disable, enable
from triton_relattn.integrations.isolation import Promoted

DOCS = Path(__file__).parents[2] / "docs" / "enable.md"


def parametrize(*models: Model) -> Any:
    """Parametrise by models; skipped if the package is not installed."""
    cases = [pytest.param(model, id=model.name, marks=needs(model.package)) for model in models]
    return pytest.mark.parametrize("kind", cases)


def named(*names: str) -> Any:
    return parametrize(*(model for model in CLASSES if model.name in names))


@pytest.mark.parametrize("lengths", [WHOLE, PADDED], ids=["whole", "padded"])
@parametrize(*CLASSES, *STRUCTURES.values())
def test_outputs_and_gradients(kind: Model, lengths: list[int]) -> None:
    """They are the stock model's in float64, of all its attention, and disable() gives its classes back."""
    model, given = kind.make(), kind.arguments([10 * length for length in lengths] if kind.usual else lengths)
    before, expected = classes(model), kind.results(model, given)
    report = kind.enable(model)
    assert report and not report.left, str(report)
    assert report.keys() == {path for (path, now), (_, was) in zip(classes(model), before, strict=True) if now is not was}
    with Sizes() as sizes:
        assert_same(kind.results(model, given), expected)
    assert sizes.ours
    assert disable(model) == dict(report) and classes(model) == before


@parametrize(*STRUCTURES.values())
def test_memory_in_the_docs(kind: Model) -> None:
    """A layer's memory at the usual size is quadratic before, linear after, and as docs/enable.md states."""
    with torch.device("meta"):
        model = kind.build(**kind.usual)
    report = kind.enable(model, lengths=(kind.at // 2, kind.at))
    rows = [row for row in report.rows if not row.reason]
    assert rows and not report.left, str(report)
    (_, short), (before, after) = max((row.memory for row in rows), key=lambda memory: memory[1][0] or 0)
    assert before is not None and after is not None and short is not None
    assert after < 2.3 * short and before > 5 * after
    line = next(row for row in DOCS.read_text().splitlines() if row.startswith(f"| {kind.name} "))
    found = re.search(r"\| ([\d,]+) \| ([\d,]+) MiB \| ([\d.,]+) MiB \|$", line)
    measured = f"| {kind.at:,} | {before / 2**20:,.0f} MiB | {after / 2**20:,.0f} MiB |"
    assert found and found[0] == measured, f"{kind.name}: {measured}"


@parametrize(*(model for model in CLASSES if model.name != "cosyvoice chunks"))  # where the user's mask is quadratic
def test_nothing_is_quadratic(kind: Model) -> None:
    """No tensor has two dimensions of the sequence's length, and the largest one grows linearly, unlike in the stock model."""
    found = {}
    for enabled, length in ((True, 600), (True, 1200), (False, 600)):
        model, given = kind.make(), kind.arguments([length, length - 7])
        if enabled:
            kind.enable(model, check_calls=False)  # no comparison with the stock forward
        with Sizes() as sizes:
            kind.results(model, given)
        squares, found[enabled, length] = sizes.squares(length - 7), max(map(math.prod, sizes.shapes))
        assert bool(squares) != enabled, squares[:3]
    assert found[True, 1200] <= 2.01 * found[True, 600]


DROPOUT = {"nemo": "dropout_att", "x T5": "attn_dropout", "speechbrain": "dropout"}
DROPOUT |= dict.fromkeys(("espnet", "cosyvoice"), "attention_dropout_rate")


@named(*DROPOUT)
def test_dropout(kind: Model) -> None:
    """With the operator's dropout mask in stock attention, results are equal."""
    model, given = kind.but(**{DROPOUT[kind.name]: 0.2}).make().train(), kind.arguments(PADDED)
    with operators_dropout(HEADS):
        expected = kind.results(model, given)
    kind.enable(model)
    ours = kind.results(model, given)
    assert_same(ours, expected)
    assert (kind.results(model.eval(), given)["out"] - ours["out"]).abs().max() > 0.01, "nothing is dropped"


@named("nemo", "speechbrain", "espnet", "cosyvoice", "x T5", "x inkling")
def test_a_part(kind: Model) -> None:
    """A single attention can be enabled or disabled; it uses the masks of the rest of the model, which makes them again."""
    model, given = kind.make(), kind.arguments(PADDED)
    expected = kind.results(model, given)
    part = model.get_submodule(next(reversed(kind.enable(model))))
    disable(model)
    assert kind.enable(part)
    assert_same(kind.results(model, given), expected)
    kind.enable(model)
    disable(part)
    assert_same(kind.results(model, given), expected)


@parametrize(*CLASSES, *STRUCTURES.values())
def test_calls_that_no_model_makes(kind: Model) -> None:
    """As before enable, if one module of a model is called on its own."""
    model, lengths = kind.make(), [10 * length for length in WHOLE] if kind.usual else WHOLE
    with Promoted():
        assert_odd_calls_are_stock(model, kind.arguments(lengths), kind.enable)


FILE = "funasr.models.transformer.attention"


def funasr(name: str, **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        return load(f"{FILE}.{name}")(2, 16, 0.1, **settings)

    return make


def swin() -> Any:
    STRUCTURES["timm, SAM"].make()
    kind = load("timm.models.swin_transformer.SwinTransformer")
    return kind(img_size=32, embed_dim=8, depths=(1, 1), num_heads=(2, 2), window_size=4)


def mvit() -> Any:
    STRUCTURES["timm, SAM"].make()
    settings = load("timm.models.mvitv2.MultiScaleVitCfg")(depths=(1, 1), embed_dim=(24, 48), num_heads=(1, 2))
    return load("timm.models.mvitv2.MultiScaleVit")(settings, img_size=32)


LEGACY = "LegacyRelPositionMultiHeadedAttention"
REFUSED: dict[str, tuple[str, Callable[[], Any], str]] = {
    "nemo, absolute": ("nemo", NEMO.but(self_attention_model="abs_pos").make, "no relative attention"),
    "espnet, future": ("espnet2", ESPNET.but(rel_pos_type="legacy", zero_triu=False).make, "without zero_triu"),
    "funasr, future": ("funasr", funasr(LEGACY), "no module .* was enabled; the model is unchanged.* differs by"),
    "funasr, chunks": ("funasr", funasr("RelPositionMultiHeadedAttentionChunk"), "the model is unchanged"),
    "timm, swin": ("timm", swin, "the model is unchanged.* scaled_dot_product_attention"),
    "timm, mvit": ("timm", mvit, "the model is unchanged.* pools queries and keys"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(package)) for name, (package, *_) in REFUSED.items()])
def test_other_attention_is_refused_with_a_reason(name: str) -> None:
    """The model stays as it is."""
    _, make, message = REFUSED[name]
    model = make()
    before = classes(model)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        enable_by_structure(model)
    assert re.search(message, " ".join(str(caught.value).split()))
    assert classes(model) == before


@needs("funasr")
def test_funasr_s_other_classes() -> None:
    """The older shift is replaced if it has no terms for the future, and so is the class for exports."""
    exported = load(f"{FILE}.RelPosMultiHeadedAttentionExport")(STRUCTURES["FunASR"].make())
    assert all(map(enable_by_structure, (funasr(LEGACY, zero_triu=True)(), exported)))


@needs("nemo")
@pytest.mark.parametrize(
    "settings", [{"att_context_size": [8, 3], "att_context_style": "chunked_limited"}, {"att_context_size": [9, 0]}]
)
def test_nemo_streaming(settings: dict[str, Any]) -> None:
    """Streaming in chunks with caches of keys and convolutions, one of which starts empty, equals the stock model."""
    outs = []
    for enabled in (False, True):
        encoder = NEMO.but(conv_context_size="causal", causal_downsampling=True, **settings).make()
        encoder.setup_streaming_params(chunk_size=4, shift_size=4)
        if enabled:
            enable(encoder)
        cache = list(encoder.get_initial_cache_state(batch_size=2, dtype=torch.float64))
        cache[2] = torch.tensor([3, 0])
        names = ("cache_last_channel", "cache_last_time", "cache_last_channel_len")
        torch.manual_seed(1)
        for _ in range(6):
            given = {"audio_signal": states(2, MEL, 4), "length": torch.tensor([4, 4])}
            with torch.no_grad(), Promoted():
                out, _, *cache = encoder(**given, **dict(zip(names, cache, strict=True)))
            outs.append(out)
    assert_near("streamed", torch.cat(outs[6:], -1), torch.cat(outs[:6], -1))


@needs("nemo")
def test_nemo_autocast() -> None:
    """Under autocast, attention is computed in the dtype of the stock class."""
    encoder, given = NEMO.make(torch.float32), in_precision(NEMO.arguments(PADDED), torch.float32)
    exact = output(encoder, given)
    with torch.autocast("cpu", torch.bfloat16):
        stock = output(encoder, given)
        enable(encoder)
        ours = output(encoder, given)
    assert ours.dtype == stock.dtype
    assert_at_most("out", (ours - exact).norm(), 2 * (stock - exact).norm() + 2 * torch.finfo(torch.bfloat16).eps * exact.norm())


@needs("x_transformers")
@pytest.mark.parametrize(
    "settings",
    [
        {"attn_num_mem_kv": 2},
        {"attn_pre_talking_heads": True},
        {"attn_selective": True, "causal": True},
        {"attn_add_zero_kv": True},
        {"attn_use_rel_proj_pos_bias": True},
        {"attn_flash": False, "attn_sigmoid": True},
        {"residual_attn": True},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_x_transformers_with_other_features(settings: dict[str, Any]) -> None:
    """With features that the operator lacks, the stock attention runs with the dense bias; so it does for weights that the model
    uses."""
    kind = X.but(rel_pos_bias=True, **settings)
    model, given = kind.make(), kind.arguments(PADDED)
    expected = kind.results(model, given)
    kind.enable(model)
    assert "residual_attn" in settings or not runs_the_operator(model, given)
    assert_same(kind.results(model, given), expected)


@needs("x_transformers")
@pytest.mark.parametrize("bias", ["rel_pos_bias", "alibi_pos_bias", "dynamic_pos_bias", "attn_use_rel_proj_pos_bias"])
@pytest.mark.parametrize("dense", [False, True])
def test_x_transformers_step_by_step(bias: str, dense: bool) -> None:
    """Decoding step by step with a cache of keys equals one call, also where stock attention adds the bias."""
    kind = X.but(causal=True, attn_pre_talking_heads=dense, **{bias: True})
    model, given = kind.make(), kind.arguments([9, 9])
    cache, steps = None, []
    with torch.no_grad(), Promoted():
        whole = output(model, given)
        assert kind.enable(model)
        for stop in range(4, 10):
            out, cache = model(given["x"][:, :stop], cache=cache, return_hiddens=True)
            steps.append(out if stop == 4 else out[:, -1:])
    assert_near("steps", torch.cat(steps, 1), whole)


FLEX = "nemo.collections.asr.modules.transformer_encoder"


def dense_flex(q: Any, k: Any, v: Any, block_mask: Any = None, score_mod: Any = None) -> Any:
    """FlexAttention with gradients on a CPU."""
    batch, head, i, j = torch.meshgrid(*map(torch.arange, (*q.shape[:3], k.shape[2])), indexing="ij")
    scores = score_mod(q @ k.mT / math.sqrt(q.shape[-1]), batch, head, i, j)
    return scores.masked_fill(~block_mask.mask_mod(batch, head, i, j), -math.inf).softmax(-1) @ v


def flex_encoder(**settings: Any) -> Any:
    nemo()
    sizes = {"feat_in": MEL, "d_model": 32, "n_heads": 2, "n_layers": 2, "drop_rate": 0.0, "subsampling": "stacking"}
    return load(f"{FLEX}.TransformerEncoder")(**sizes, subsampling_factor=2, **settings)


@needs("nemo")
@pytest.mark.parametrize("settings", [{}, {"attn_mode": "causal", "qk_norm": True, "qkv_bias": True}], ids=["full", "causal"])
def test_nemos_transformer_encoder(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are FlexAttention's, gradients those of its formula, also on a CPU, where the stock encoder has none."""
    kind = replace(NEMO, build=flex_encoder, settings=settings)
    model = kind.make()
    given = kind.arguments([2 * LENGTH, LENGTH])
    flex = output(model, given)
    with pytest.raises(NotImplementedError):
        model(**given)[0].sum().backward()
    with monkeypatch.context() as patch:
        patch.setattr(f"{FLEX}.flex_attention", dense_flex)
        expected = kind.results(model, given)
    assert len(kind.enable(model)) == 3
    ours = kind.results(model, given)
    assert_same(ours, expected)
    assert_near("FlexAttention", ours["out"], flex)
