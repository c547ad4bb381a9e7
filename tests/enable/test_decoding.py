"""Enabled models that generate: the same tokens and the same numbers, with caches of all kinds.

No call that they make is one that is hardly meant: each says where its queries stand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
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
    exactly,
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


PIECES = (9, 1, 15, 12)
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


def in_pieces(
    model: Any, argument: str, pieces: Iterable[torch.Tensor], cache: Any = None, more: Callable[[int, int], Any] = lambda *_: {}
) -> torch.Tensor:
    """What a model returns for pieces of a sequence. more: other arguments for the piece from one position to another."""
    past, outs, start = {"past_key_values": cache}, list[torch.Tensor](), 0
    with torch.no_grad(), exactly(model):
        for piece in pieces:
            stop = start + piece.shape[1]
            made = model(**{argument: piece}, **more(start, stop), **past, use_cache=True)
            past = {key: made[key] for key in ("past_key_values", "padding_cache") if key in made}
            outs, start = [*outs, made[0]], stop
    return torch.cat(outs, 1)


def cut(name: str, given: dict[str, Any]) -> tuple[str, torch.Tensor]:
    """What comes in pieces, its name first; its mask is left out."""
    argument = (FAMILIES[name].pieces or ("decoder_input_ids" if name in SEQ2SEQ else "input_ids",))[0]
    given.pop("decoder_attention_mask" if argument.startswith("decoder") else "attention_mask")
    return argument, given.pop(argument)


@pytest.mark.parametrize(
    ("name", "kind", "padding"),
    [
        pytest.param(
            *(name, kind, padding), id=f"{name}-{kind}-{padding}", marks=[pytest.mark.thorough] * (name not in ("t5", "inkling"))
        )
        for name in [*WRITERS, "pop2piano", "pix2struct"]  # the last two without a language-modelling head, with their own cache
        for kind in ("dynamic", "static", "own")
        for padding in ((0,) if name in SEQ2SEQ or kind == "own" else (0, 5))
        if (kind == "own") == (name not in WRITERS)
        and (kind != "static" or name not in (*NO_STATIC_CACHE, *["bloom"] * (padding > 0)))
    ],
)
def test_pieces_of_a_sequence(name: str, kind: str, padding: int) -> None:
    """A sequence fed in pieces matches the stock model and the whole sequence at once; later tokens in a piece stay hidden."""
    model = build(name, torch.float64) if kind == "own" else writer(name, torch.float64)
    config = (model.decoder if name in SEQ2SEQ else model).config
    given = arguments(name, model, PADDED)
    argument, tokens = cut(name, given)
    other = tokens.clone()
    other[:, -1] = other[:, -1] % 49 + 1
    mask = padding_first(padding)

    def run(tokens: torch.Tensor, *sizes: int) -> torch.Tensor:
        make: Any = {"dynamic": DynamicCache, "static": partial(StaticCache, max_cache_len=LENGTH + 5)}.get(kind)
        cache = make and make(config=config)
        cache = EncoderDecoderCache(cache, DynamicCache(config=config)) if name in SEQ2SEQ else cache
        shown = lambda _, stop: {**given, **({"attention_mask": mask[:, :stop]} if padding else {})}  # noqa: E731
        return in_pieces(model, argument, tokens.split(sizes, 1), cache, shown)

    stock = run(tokens, *PIECES)
    enable(model)
    ours, changed, whole = run(tokens, *PIECES), run(other, *PIECES), run(tokens, LENGTH)
    shown = mask[..., None].bool()
    assert_near("beside the stock model", counted(ours, shown), counted(stock, shown))
    assert_near("beside the whole", ours[:, padding:], whole[:, padding:])
    assert_near("what is unseen", changed[:, :-1], ours[:, :-1])
    assert not torch.equal(changed[:, -1], ours[:, -1])


def test_a_static_cache_that_counts_in_place() -> None:
    """Matches the stock model. The cache updates its length tensor in place, and Inkling's stock model reads it afterwards, so
    its terms are those of later queries."""
    model = writer("inkling", torch.float64, local_layer_ids=[1])
    pieces = torch.randint(1, 50, (2, 40)).split([20, 19, 1], 1)
    stock = in_pieces(model, "input_ids", pieces, StaticCache(model.config, max_cache_len=64))
    enable(model)
    assert_near("ours", in_pieces(model, "input_ids", pieces, StaticCache(model.config, max_cache_len=64)), stock)


@pytest.mark.filterwarnings("ignore:.*attn_mask hides")  # as a mask does with later pieces
@pytest.mark.thorough
@pytest.mark.parametrize("lookahead", [0, 3, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_streaming(lookahead: int, masked: bool) -> None:
    """Nemotron with sliding caches, in pieces that begin and end within chunks; masks count from position 0."""
    model = build("nemotron_asr_streaming", torch.float64, sliding_window=9)
    argument, features = cut("nemotron_asr_streaming", arguments("nemotron_asr_streaming", model, WHOLE))

    def run() -> torch.Tensor:
        def more(start: int, stop: int) -> dict[str, Any]:
            mask = {"attention_mask": torch.ones(2, stop - start, dtype=torch.bool)} if masked else {}
            return {"num_lookahead_tokens": lookahead, **mask}

        return in_pieces(model, argument, features.split([25, 32, 16, 8, 64, 144], 1), None, more)

    stock = run()
    enable(model)
    ours = run()
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
