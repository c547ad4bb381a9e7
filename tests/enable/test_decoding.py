"""Enabled models that generate: the same tokens and the same numbers, with caches of all kinds.

No call that they make is one that is hardly meant: each says where its queries stand.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.tolerance import assert_near

pytest.importorskip("transformers")

from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from bench.families import FAMILIES
from tests.enable.models import (
    LENGTH,
    PADDED,
    SEQ2SEQ,
    WHOLE,
    WRITERS,
    arguments,
    build,
    counted,
    in_float64,
    padding_first,
    through_the_door,
    writer,
)
from triton_relattn.integrations import in_place
from triton_relattn.integrations.transformers import enable

pytestmark = pytest.mark.filterwarnings("error:.*(query_offset|positions=|attn_mask)")
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "no_repeat_ngram_size": 1}
HOW: dict[str, dict[str, Any]] = {
    "cache": {},
    "no-cache": {"use_cache": False},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 2},
    "static-beams": {"num_beams": 2, "cache_implementation": "static"},
}
NO_STATIC_CACHE = ("falcon", "inkling")
"""Families without a static cache: the stock model has fewer biases than the cache has keys (so has BLOOM's with padding), or
its first layer has a window. Inkling's is in test_a_static_cache_that_counts_in_place."""


GENERATED: dict[str, tuple[str, str, int, Callable[[Any], Any]]] = {}
GENERATED |= {f"{name}-{how}": (name, how, 0, enable) for name in WRITERS for how in HOW}
GENERATED |= {f"{name}-{how}-long-calls": (name, how, 500, enable) for name in WRITERS for how in ("cache", "static")}
GENERATED |= {f"t5-{how}-door": ("t5", how, 0, through_the_door) for how in ("cache", "static")}
QUICK = ("t5-cache", "t5-static-long-calls", "t5-cache-door", "t5-static-door")


@pytest.mark.parametrize(
    ("name", "how", "fewest", "switch"),
    [
        pytest.param(*case, id=what, marks=[pytest.mark.thorough] * (what not in QUICK))
        for what, case in GENERATED.items()
        if not (case[0] in NO_STATIC_CACHE and "static" in what)
    ],
)
def test_generation(name: str, how: str, fewest: int, switch: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens, with and without a mask and left padding, also where ours reads the prompt, and stock forwards read the
    single tokens after it, as in small models (fewest: scores of a call that is ours)."""
    monkeypatch.setattr(in_place.InPlace, "fewest", fewest)
    # With a static cache the stock model cannot read more tokens than its window.
    changes: dict[str, Any] = {"sliding_window_size": 40} if name.startswith("inkling2") and "static" in how else {}
    model = writer(name, **changes)
    torch.manual_seed(1)
    tokens = torch.randint(1, 50, (2, 12))
    masks = [None, *(padding_first(count, 12) for count in (0, 5))]
    given = [{"attention_mask": mask, "max_new_tokens": 14, **GREEDY, **HOW[how]} for mask in masks]
    stock = [model.generate(tokens, **settings) for settings in given]
    switch(model)
    for settings, expected in zip(given, stock, strict=True):
        assert torch.equal(model.generate(tokens, **settings), expected)
    assert len(set(stock[1][0, -14:].tolist())) == 14


PIECES = ((0, 9), (9, 10), (10, 25), (25, LENGTH))


@pytest.mark.parametrize(
    ("name", "kind", "padding"),
    [
        pytest.param(
            *(name, kind, padding), id=f"{name}-{kind}-{padding}", marks=[pytest.mark.thorough] * (name not in ("t5", "inkling"))
        )
        for name in WRITERS
        for kind in ("dynamic", "static")
        for padding in ((0,) if name in SEQ2SEQ else (0, 5))
        if kind == "dynamic" or name not in (*NO_STATIC_CACHE, *["bloom"] * (padding > 0))
    ],
)
def test_pieces_of_a_sequence(name: str, kind: str, padding: int) -> None:
    """A sequence fed in pieces matches the stock model and the whole sequence at once; later tokens in a piece stay hidden."""
    model = writer(name, torch.float64)
    seq2seq = name in SEQ2SEQ
    config = (model.decoder if seq2seq else model).config
    given = arguments(name, model, PADDED)
    tokens = given.pop("decoder_input_ids" if seq2seq else "input_ids")
    if seq2seq:
        del given["decoder_attention_mask"]
    other = tokens.clone()
    other[:, -1] = other[:, -1] % 49 + 1
    mask = padding_first(padding)

    def logits(tokens: torch.Tensor, cache: Any, start: int = 0, stop: int = LENGTH) -> torch.Tensor:
        piece = tokens[:, start:stop]
        if seq2seq:
            return model(**given, decoder_input_ids=piece, past_key_values=cache).logits  # type: ignore[no-any-return]
        return model(piece, attention_mask=mask[:, :stop] if padding else None, past_key_values=cache).logits  # type: ignore[no-any-return]

    def in_pieces(tokens: torch.Tensor) -> torch.Tensor:
        cache: Any = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config, max_cache_len=LENGTH + 5)
        cache = EncoderDecoderCache(cache, DynamicCache(config=config)) if seq2seq else cache
        return torch.cat([logits(tokens, cache, *piece) for piece in PIECES], 1)

    with torch.no_grad(), in_float64():
        stock = in_pieces(tokens)
        enable(model)
        ours, changed, whole = in_pieces(tokens), in_pieces(other), logits(tokens, None)
    shown = mask[..., None].bool()
    assert_near("beside the stock model", counted(ours, shown), counted(stock, shown))
    assert_near("beside the whole", ours[:, padding:], whole[:, padding:])
    assert_near("what is unseen", changed[:, :-1], ours[:, :-1])
    assert not torch.equal(changed[:, -1], ours[:, -1])


def test_a_static_cache_that_counts_in_place() -> None:
    """Matches the stock model. The cache updates its length tensor in place, and Inkling's stock model reads it afterwards, so
    its terms are those of later queries."""
    model = writer("inkling", torch.float64, local_layer_ids=[1])
    tokens = torch.randint(1, 50, (2, 40))

    def in_pieces(tokens: torch.Tensor) -> torch.Tensor:
        past = StaticCache(model.config, max_cache_len=64)
        pieces = ((0, 20), (20, 39), (39, 40))
        return torch.cat([model(tokens[:, slice(*piece)], past_key_values=past).logits for piece in pieces], 1)

    with torch.no_grad(), in_float64():
        stock = in_pieces(tokens)
        enable(model)
        assert_near("ours", in_pieces(tokens), stock)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["pop2piano", "pix2struct"])
def test_pieces_of_decoders_without_a_writer(name: str) -> None:
    """Decoders without a language-modelling head, with a cache of their own."""
    model = build(name, torch.float64)
    argument, sizes = FAMILIES[name].pieces or ("", ())
    given = arguments(name, model, WHOLE)
    whole = given.pop(argument)
    given.pop("decoder_attention_mask" if argument.startswith("decoder") else "attention_mask")

    def in_pieces() -> torch.Tensor:
        past: dict[str, Any] = {}
        outs: list[torch.Tensor] = []
        for piece in whole.split(list(sizes), 1):
            made = model(**given, **{argument: piece}, **past, use_cache=True)
            past = {"past_key_values": made.past_key_values}
            outs.append(made[0])
        return torch.cat(outs, 1)

    with torch.no_grad(), in_float64():
        stock = in_pieces()
        enable(model)
        assert_near("ours", in_pieces(), stock)


@pytest.mark.thorough
@pytest.mark.parametrize("lookahead", [0, 3, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_streaming(lookahead: int, masked: bool) -> None:
    """Nemotron with sliding caches, in pieces that begin and end within chunks; masks count from position 0."""
    model = build("nemotron_asr_streaming", torch.float64, sliding_window=9)
    features = arguments("nemotron_asr_streaming", model, WHOLE)["input_features"]

    def in_pieces() -> torch.Tensor:
        past: dict[str, Any] = {}
        frames: list[torch.Tensor] = []
        for piece in features.split([25, 32, 16, 8, 64, 144], 1):
            mask = {"attention_mask": torch.ones(piece.shape[:2], dtype=torch.bool)} if masked else {}
            made = model(piece, num_lookahead_tokens=lookahead, use_cache=True, **mask, **past)
            past = {"past_key_values": made.past_key_values, "padding_cache": made.padding_cache}
            frames.append(made.last_hidden_state)
        return torch.cat(frames, 1)

    with torch.no_grad(), in_float64(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "attn_mask hides")  # as such a mask does with later pieces
        stock = in_pieces()
        enable(model)
        ours = in_pieces()
    assert ours.shape == (2, LENGTH, 32)
    assert_near("ours", ours, stock)


def test_compiled_steps() -> None:
    """With a static cache, one graph serves all steps."""
    model = writer("t5")
    given = arguments("t5", model, PADDED)
    tokens, encoder_mask = given["decoder_input_ids"], given["attention_mask"]
    enable(model)
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
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
        return torch.cat([result.logits for result in (read, *written)], 1)

    torch._dynamo.reset()
    with torch.no_grad():
        expected = steps(model)
        assert_near("steps", steps(torch.compile(model, backend=backend, fullgraph=True)), expected)
    assert len(graphs) == 1
