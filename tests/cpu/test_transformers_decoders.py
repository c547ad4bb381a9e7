"""Enabled models that generate: the same tokens and the same numbers, with caches of all kinds, and with masks of the user's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tolerance import assert_near

pytest.importorskip("transformers")

from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from bench.families import FAMILIES
from tests.cpu.models import LENGTH, PADDED, arguments, assert_same, both, build, in_float64, real, varied
from triton_relattn._core import doubts
from triton_relattn.integrations.proof import counted
from triton_relattn.integrations.transformers import disable, enable

# Models that read with an encoder and write with a decoder, and models that do both at once.
SEQ2SEQ = {
    "t5": "T5ForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration",
    "umt5": "UMT5ForConditionalGeneration",
    "switch_transformers": "SwitchTransformersForConditionalGeneration",
    "longt5": "LongT5ForConditionalGeneration",
}
DECODERS = {
    "inkling2": "Inkling2ForCausalLM",
    "bloom": "BloomForCausalLM",
    "mpt": "MptForCausalLM",
    "falcon": "FalconForCausalLM",
}
WRITERS = {**SEQ2SEQ, **DECODERS}


@pytest.fixture(autouse=True)
def no_doubts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call that a model makes is one that is hardly meant: each says where its queries stand."""

    def doubted(about: str, text: str, *_: Any) -> None:
        raise AssertionError(f"{about}: {text}")

    monkeypatch.setattr(doubts, "warn_once", doubted)


def writer(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A small model with a head for tokens, no parameter of which is zero."""
    import transformers

    family = FAMILIES[name]
    torch.manual_seed(0)
    sizes = {**family.small, **dict.fromkeys(family.layers, 2), **changes}
    config = getattr(transformers, family.config)(**sizes)
    config.eos_token_id = config.bos_token_id = None
    model = getattr(transformers, WRITERS[name])._from_config(config, attn_implementation=family.stock[0])
    return varied(model).eval().to(dtype)


def padding_first(count: int, length: int = LENGTH) -> torch.Tensor:
    """(2, length), 0 of the first tokens of the first sequence."""
    return (torch.arange(length) >= torch.tensor([[count], [0]])).long()


NO_STATIC_CACHE = ("falcon",)
"""Families without a static cache: the stock model has fewer biases than the cache has keys. (So has BLOOM's with padding.)"""
HOW: dict[str, dict[str, Any]] = {
    "cache": {},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "beams": {"num_beams": 2},
    "beams and static cache": {"num_beams": 2, "cache_implementation": "static"},
}


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", WRITERS)
def test_generation(name: str, how: str, padding: int) -> None:
    """The same tokens, in batches that are padded on the left."""
    if name in NO_STATIC_CACHE and "static" in how:
        pytest.skip("nor has the stock model")
    # The stock model cannot read more with a static cache than its window.
    changes: dict[str, Any] = {"sliding_window_size": 40} if name == "inkling2" and "static" in how else {}
    model = writer(name, **changes)
    torch.manual_seed(1)
    tokens = torch.randint(1, 50, (2, 12))
    given = {"attention_mask": padding_first(padding, 12), "max_new_tokens": 14, "do_sample": False, **HOW[how]}
    given |= {"pad_token_id": 0, "eos_token_id": None, "no_repeat_ngram_size": 1}
    stock = model.generate(tokens, **given)
    enable(model)
    ours = model.generate(tokens, **given)
    assert torch.equal(ours, stock)
    assert len(set(ours[0, -14:].tolist())) == 14


PIECES = ((0, 9), (9, 10), (10, 25), (25, LENGTH))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", SEQ2SEQ)
def test_pieces_of_a_decoders_sequence(name: str, kind: str) -> None:
    """Each after what came before; as all at once, and what comes later in a piece stays unseen."""
    model = writer(name, torch.float64)
    given = arguments(name, model, PADDED)
    decoded = given.pop("decoder_input_ids")
    del given["decoder_attention_mask"]
    other = decoded.clone()
    other[:, -1] = other[:, -1] % 49 + 1

    def in_pieces(tokens: torch.Tensor) -> torch.Tensor:
        config = model.decoder.config

        def make() -> Any:
            return DynamicCache(config=config) if kind == "dynamic" else StaticCache(config, max_cache_len=LENGTH + 5)

        cache = EncoderDecoderCache(make(), DynamicCache(config=config))
        logits: list[torch.Tensor] = []
        for piece in PIECES:
            made = model(**given, decoder_input_ids=tokens[:, slice(*piece)], past_key_values=cache)
            logits.append(made.logits)
        return torch.cat(logits, 1)

    with torch.no_grad(), in_float64():
        stock = in_pieces(decoded)
        enable(model)
        ours, changed = in_pieces(decoded), in_pieces(other)
        whole = model(**given, decoder_input_ids=decoded).logits
    assert_near("ours", ours, stock)
    assert_near("ours, beside the whole", ours, whole)
    assert_near("what is unseen", changed[:, :-1], ours[:, :-1])
    assert not torch.equal(changed[:, -1], ours[:, -1])


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_pieces_of_a_sequence(name: str, kind: str, padding: int) -> None:
    """As the stock model's, and all at once; what comes later in a piece stays unseen."""
    if kind == "static" and name in (*NO_STATIC_CACHE, *["bloom"] * (padding > 0)):
        pytest.skip("nor has the stock model")
    model = writer(name, torch.float64)
    tokens, mask = torch.randint(1, 50, (2, LENGTH)), padding_first(padding)
    other = tokens.clone()
    other[:, -1] = other[:, -1] % 49 + 1

    def in_pieces(tokens: torch.Tensor) -> torch.Tensor:
        config = model.config
        cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config, max_cache_len=LENGTH + 5)
        logits: list[torch.Tensor] = []
        for start, stop in PIECES:
            seen = mask[:, :stop] if padding else None
            logits.append(model(tokens[:, start:stop], attention_mask=seen, past_key_values=cache).logits)
        return torch.cat(logits, 1)

    with torch.no_grad(), in_float64():
        stock = in_pieces(tokens)
        enable(model)
        ours, changed = in_pieces(tokens), in_pieces(other)
        whole = model(tokens, attention_mask=mask).logits
    shown = mask[..., None].bool()
    assert_near("ours", counted(ours, shown), counted(stock, shown))
    assert_near("ours, beside the whole", ours[:, padding:], whole[:, padding:])
    assert_near("what is unseen", changed[:, :-1], ours[:, :-1])
    assert not torch.equal(changed[:, -1], ours[:, -1])


QUERY, KEY = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
MASKS = {
    "prefix": (KEY <= QUERY) | (KEY < 12),  # a prefix that is seen from all positions
    "everything": torch.ones(LENGTH, LENGTH, dtype=torch.bool),
    "a row for all": KEY[None] < 30,  # (1, Nk): seen by all queries, earlier ones too
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", [*SEQ2SEQ, "pix2struct", "inkling2", "mpt"])  # BLOOM and Falcon take none
def test_a_mask_of_the_users(name: str, kind: str) -> None:
    """(B, 1, Nq, Nk), used as it is: there is no causality but in it."""
    model = build(name, torch.float64)
    given = arguments(name, model, [LENGTH, LENGTH])
    numbers = torch.zeros(2, 1, *MASKS[kind].shape, dtype=torch.float64)
    mask = "decoder_attention_mask" if "decoder_attention_mask" in given else "attention_mask"
    given[mask] = numbers.masked_fill(~MASKS[kind], torch.finfo(torch.float64).min)
    with in_float64():
        assert_same(*both(model, given))


@pytest.mark.parametrize("name", [*WRITERS, "pix2struct"])
def test_padding_first(name: str) -> None:
    """Padding may come first."""
    model = build(name, torch.float64)
    given = arguments(name, model, [LENGTH, LENGTH])
    for each in given:
        if each.endswith("attention_mask"):
            given[each] = padding_first(14 if each == "decoder_attention_mask" else 5)
    counts = padding_first(14 if "decoder_attention_mask" in given else 5)[..., None].bool()
    with in_float64():
        assert_same(*both(model, given, counts))


@pytest.mark.parametrize("name", [*WRITERS, "pix2struct"])
def test_decoders_in_both_directions(name: str) -> None:
    model = build(name, torch.float64)
    model.get_submodule("decoder" if name in SEQ2SEQ else "").config.is_causal = False
    given = arguments(name, model, PADDED)
    with in_float64():
        assert_same(*both(model, given, real(PADDED)))


def test_what_t5_hands_on() -> None:
    """A row for each distance that differs, whatever the length; stock attention's (1, H, Nq, Nk) is refused."""
    model = build("t5")
    first, second = model.encoder.block[0].layer[0].SelfAttention, model.encoder.block[1].layer[0].SelfAttention
    enable(model)
    bias = first(torch.randn(1, 90, 32))[1]
    assert bias.shape == (4, 25) and bias.requires_grad
    assert model.decoder.block[0].layer[0].SelfAttention.table(torch.device("cpu")).shape == (4, 13)
    assert second(torch.randn(1, 90, 32), position_bias=bias)[1] is bias
    assert (
        model.decoder.block[0].layer[1].EncDecAttention(torch.randn(1, 3, 32), key_value_states=torch.randn(1, 5, 32))[1] is None
    )
    with pytest.raises(ValueError, match="enable or disable the model as a whole"):
        second(torch.randn(1, 90, 32), position_bias=torch.zeros(1, 4, 90, 90))
    disable(first)
    with pytest.raises(RuntimeError):
        disable(second)
        second(torch.randn(1, 90, 32), position_bias=bias)


def test_compiled_steps() -> None:
    """With a static cache, one graph serves all steps."""
    model = writer("t5")
    given = arguments("t5", model, PADDED)
    tokens, encoder_mask = given["decoder_input_ids"], given["attention_mask"]
    enable(model)
    graphs: list[Any] = []

    def counted(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    def steps(step: Any) -> torch.Tensor:
        config = model.decoder.config
        cache = EncoderDecoderCache(StaticCache(config, max_cache_len=20), DynamicCache(config=config))
        read = model(given["input_ids"], encoder_mask, decoder_input_ids=tokens[:, :5], past_key_values=cache)
        encoded = (read.encoder_last_hidden_state,)
        written = [
            step(None, encoder_mask, decoder_input_ids=tokens[:, i : i + 1], encoder_outputs=encoded, past_key_values=cache)
            for i in range(5, 12)
        ]
        return torch.cat([each.logits for each in (read, *written)], 1)

    torch._dynamo.reset()
    with torch.no_grad():
        expected = steps(model)
        assert_near("steps", steps(torch.compile(model, backend=counted, fullgraph=True)), expected)
    assert len(graphs) == 1
