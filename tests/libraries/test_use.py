"""Use of enabled models of libraries: streaming with caches, autocast, and settings that keep the stock classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.enable.models import LENGTH, PADDED, assert_same, in_float64, output, results, runs_the_operator
from tests.libraries.models import entry
from tests.libraries.standins import is_installed
from tests.tolerance import assert_at_most, assert_near


def needs(package: str) -> Any:
    return pytest.mark.skipif(not is_installed(package), reason=f"{package} is not installed: make test-libraries")


@needs("nemo")
@pytest.mark.parametrize(
    "settings", [{"att_context_size": [8, 3], "att_context_style": "chunked_limited"}, {"att_context_size": [9, 0]}]
)
def test_nemo_streaming(settings: dict[str, Any]) -> None:
    """Streaming in chunks with caches of keys and convolutions, one of which starts empty, equals the stock model."""
    kind = entry("nemo", conv_context_size="causal", causal_downsampling=True, **settings)
    outs = []
    for enabled in (False, True):
        encoder = kind.make()
        encoder.setup_streaming_params(chunk_size=4, shift_size=4)
        if enabled:
            kind.integration.enable(encoder)
        cache = list(encoder.get_initial_cache_state(batch_size=2, dtype=torch.float64))
        cache[2] = torch.tensor([3, 0])
        made = []
        torch.manual_seed(1)
        for _ in range(6):
            signal = torch.randn(2, 20, 4, dtype=torch.float64)
            with torch.no_grad(), in_float64():
                out, _, *cache = encoder(
                    audio_signal=signal,
                    length=torch.tensor([4, 4]),
                    cache_last_channel=cache[0],
                    cache_last_time=cache[1],
                    cache_last_channel_len=cache[2],
                )
            made.append(out)
        outs.append(torch.cat(made, -1))
    assert_near("streamed", outs[1], outs[0])


@needs("nemo")
def test_nemo_attention_of_another_kind() -> None:
    """Other attention is refused; an encoder with one disabled layer gets its masks again."""
    kind = entry("nemo", self_attention_model="abs_pos")
    with pytest.raises(ValueError, match="no relative attention"):
        kind.integration.enable(kind.make())
    kind = entry("nemo")
    encoder, given = kind.make(), kind.arguments(LENGTH, PADDED)
    kind.integration.enable(encoder)
    kind.integration.disable(encoder.layers[0])
    mixed = output(encoder, given)
    kind.integration.disable(encoder)
    assert_near("mixed", mixed, output(encoder, given))


@needs("nemo")
def test_nemo_autocast() -> None:
    """Under autocast, attention is computed in the dtype of the stock class."""
    kind = entry("nemo")
    encoder, given = kind.make(torch.float32), kind.arguments(LENGTH, PADDED, torch.float32)
    exact = output(encoder, given)
    with torch.autocast("cpu", torch.bfloat16):
        stock = output(encoder, given)
        kind.integration.enable(encoder)
        ours = output(encoder, given)
    assert ours.dtype == stock.dtype
    assert_at_most("out", (ours - exact).norm(), 2 * (stock - exact).norm() + 2 * torch.finfo(torch.bfloat16).eps * exact.norm())


@needs("espnet2")
def test_espnet_legacy_that_looks_ahead_stays() -> None:
    kind = entry("espnet", rel_pos_type="legacy", zero_triu=False)
    model, given = kind.make(), kind.arguments(LENGTH, PADDED)
    with pytest.raises(ValueError, match="no relative attention"):
        kind.integration.enable(model)
    assert not runs_the_operator(model, given)


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
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_x_transformers_with_other_features(settings: dict[str, Any]) -> None:
    """With features that the operator lacks, the stock attention runs with the dense bias."""
    kind = entry("x", rel_pos_bias=True, **settings)
    model, given = kind.make(), kind.arguments(LENGTH, PADDED)
    with in_float64():
        stock = results(model, given)
    kind.integration.enable(model)
    assert not runs_the_operator(model, given)
    with in_float64():
        assert_same(results(model, given), stock)


@needs("x_transformers")
@pytest.mark.parametrize("bias", ["rel_pos_bias", "alibi_pos_bias", "dynamic_pos_bias", "attn_use_rel_proj_pos_bias"])
def test_x_transformers_step_by_step(bias: str) -> None:
    """Decoding step by step with a cache of keys equals one call."""
    kind = entry("x", causal=True, **{bias: True})
    model, given = kind.make(), kind.arguments(9, [9, 9])
    whole = output(model, given)
    assert kind.integration.enable(model)
    cache, steps = None, []
    for stop in range(4, 10):
        with torch.no_grad():
            out, cache = model(given["x"][:, :stop], cache=cache, return_hiddens=True)
        steps.append(out if stop == 4 else out[:, -1:])
    assert_near("steps", torch.cat(steps, 1), whole)


@needs("x_transformers")
def test_x_transformers_residual_attention() -> None:
    """Attention weights that the model uses come from the stock attention."""
    kind = entry("x", rel_pos_bias=True, residual_attn=True)
    model, given = kind.make(), kind.arguments(LENGTH, PADDED)
    with in_float64():
        stock = results(model, given)
        kind.integration.enable(model)
        assert_same(results(model, given), stock)
