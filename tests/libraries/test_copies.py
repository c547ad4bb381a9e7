"""Attention that enable() finds by its structure: equal outputs and gradients, and the memory that the docs state."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.enable.models import Sizes, assert_same, computed, varied
from tests.enable.stock import enable, refusal
from tests.libraries.copies import COPIES, Copy, chatterbox, funasr, load_class, states, timm
from tests.libraries.standins import is_installed
from tests.tolerance import assert_near
from triton_relattn import disable

DOCS = Path(__file__).parents[2] / "docs" / "enable.md"
all_copies = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            copy,
            id=copy.name,
            marks=pytest.mark.skipif(not is_installed(copy.package), reason="not installed: make test-libraries"),
        )
        for copy in COPIES
    ],
)


@all_copies
def test_copies_are_equal(kind: Copy) -> None:
    """The encoder, or the attention if the package has no encoder, in float64."""
    torch.manual_seed(0)
    model = varied(kind.build(**kind.small)).double().eval()
    given = kind.given()
    expected = computed(model, nn.Module.__call__, *given, counts=kind.counts)
    report = enable(model)
    assert report and not report.left, str(report)
    with Sizes() as sizes:
        ours = computed(model, nn.Module.__call__, *given, counts=kind.counts)
    assert sizes.ours
    assert_same(ours, expected)
    assert disable(model) == dict(report)


@all_copies
def test_memory_in_the_docs(kind: Copy) -> None:
    """A layer's memory at the usual size is quadratic before, linear after, and as docs/enable.md states."""
    with torch.device("meta"):
        model = kind.build(**kind.usual)
    report = enable(model, lengths=(kind.at // 2, kind.at))
    rows = [row for row in report.rows if not row.reason]
    assert rows and not report.left, str(report)
    (_, short), (before, after) = max((row.memory for row in rows), key=lambda memory: memory[1][0] or 0)
    assert before is not None and after is not None and short is not None
    assert after < 2.3 * short and before > 5 * after
    line = next(row for row in DOCS.read_text().splitlines() if row.startswith(f"| {kind.name} "))
    found = re.search(r"\| ([\d,]+) \| ([\d,]+) MiB \| ([\d.,]+) MiB \|$", line)
    measured = f"| {kind.at:,} | {before / 2**20:,.0f} MiB | {after / 2**20:,.0f} MiB |"
    assert found and found[0] == measured, f"{kind.name}: {measured}"


@pytest.mark.skipif(not is_installed("funasr"), reason="not installed: make test-libraries")
def test_funasr_s_other_classes() -> None:
    """The older shift is replaced if it has no terms for the future; chunked attention is not."""
    funasr(n_head=2, n_feat=16, dropout_rate=0.0)
    file = "funasr.models.transformer.attention"
    legacy, chunks = (
        load_class(file, "LegacyRelPositionMultiHeadedAttention"),
        load_class(file, "RelPositionMultiHeadedAttentionChunk"),
    )
    assert enable(legacy(2, 16, 0.1, zero_triu=True))
    assert "differs by" in refusal(legacy(2, 16, 0.1))
    assert refusal(chunks(2, 16, 0.1))
    exported = load_class(file, "RelPosMultiHeadedAttentionExport")
    assert enable(exported(load_class(file, "RelPositionMultiHeadedAttention")(2, 16, 0.1)))


@pytest.mark.skipif(not is_installed("chatterbox"), reason="not installed: make test-libraries")
def test_chatterbox_with_a_cache() -> None:
    torch.manual_seed(0)
    model = varied(chatterbox(n_head=2, n_feat=16, dropout_rate=0.0)).double().eval()
    x, positions, cache = states(1, 512, 16), states(1, 2 * 518 - 1, 16), states(1, 2, 6, 16)
    mask = torch.ones(1, 1, 518, dtype=torch.bool)
    for given, is_ours in (((x, x, x, mask, positions, cache), True), ((x, x, x, mask[..., :512], states(1, 512, 16)), False)):
        disable(model)
        expected = model(*given)
        enable(model)
        with Sizes() as sizes:
            found = model(*given)
        assert sizes.ours or not is_ours
        for ours, stock in zip(found, expected, strict=True):
            assert_near("the enabled model", ours, stock)


@pytest.mark.skipif(not is_installed("timm"), reason="not installed: make test-libraries")
def test_timm_s_other_models() -> None:
    """Recognised attention that is not replaced gets a message with advice."""
    timm(img_size=28, patch_size=4, embed_dim=24, depth=1, num_heads=2, use_rel_pos=True)
    swin = load_class("timm.models.swin_transformer", "SwinTransformer")
    message = refusal(swin(img_size=32, embed_dim=8, depths=(1, 1), num_heads=(2, 2), window_size=4))
    assert "scaled_dot_product_attention" in message
    settings = load_class("timm.models.mvitv2", "MultiScaleVitCfg")(depths=(1, 1), embed_dim=(24, 48), num_heads=(1, 2))
    assert "pools queries and keys" in refusal(load_class("timm.models.mvitv2", "MultiScaleVit")(settings, img_size=32))
