"""Enabled models that generate: the same tokens and the same numbers, with caches of all kinds.

No call that they make is one that is hardly meant: each says where its queries stand.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
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
    attentions,
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
its first layer has a window; with another first layer Inkling has one."""
Mask = Callable[[int, int], dict[str, Any]]
"""The mask of a piece, by where it starts and stops."""


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


def in_pieces(model: Any, given: dict[str, Any], argument: str, sizes: Sequence[int], mask: Mask, **past: Any) -> Any:
    """The outputs for an argument that comes in pieces of these sizes, with the caches that earlier calls return."""
    pieces, outs, stop = given[argument].split(sizes, 1), list[torch.Tensor](), 0
    for piece in pieces:
        start, stop = stop, stop + piece.shape[1]
        made = model(**{**given, argument: piece, **mask(start, stop), **past})
        past |= {name: made[name] for name in ("past_key_values", "padding_cache") if name in made}
        outs.append(made[0])
    return torch.cat(outs, 1)


CACHED = [
    *((name, kind, padding, {}) for name in WRITERS for kind in ("dynamic", "static") for padding in (0, 5)),
    *((name, "dynamic", 0, {}) for name in ("pop2piano", "pix2struct")),  # decoders without a language-modelling head
    # The cache updates its length in place, and the stock model reads it afterwards: its terms, and so ours, are those of later
    # queries, unlike those of the whole.
    ("inkling", "static", 0, {"local_layer_ids": [1]}),
]


@pytest.mark.parametrize(
    ("name", "kind", "padding", "changes"),
    [
        pytest.param(
            *case,
            id="-".join(map(str, case[:3])) + "-full" * bool(case[3]),
            marks=[pytest.mark.thorough] * (case[0] not in ("t5", "inkling")),
        )
        for case in CACHED
        if not (case[2] and case[0] in SEQ2SEQ)
        and not (case[1] == "static" and case[0] in (*NO_STATIC_CACHE, *["bloom"] * (case[2] > 0)) and not case[3])
    ],
)
def test_pieces_of_a_sequence(name: str, kind: str, padding: int, changes: dict[str, Any]) -> None:
    """A sequence fed in pieces matches the stock model and the whole sequence at once; later tokens in a piece stay hidden."""
    model = writer(name, torch.float64, **changes) if name in WRITERS else build(name, torch.float64)
    given = arguments(name, model, PADDED)
    prefix = "decoder_" if "decoder_input_ids" in given else ""
    argument, config, shown = f"{prefix}input_ids", (model.decoder if prefix else model).config, padding_first(padding)
    del given[f"{prefix}attention_mask"]
    tokens = given[argument]
    other = torch.cat([tokens[:, :-1], tokens[:, -1:] % 49 + 1], 1)

    def mask(start: int, stop: int) -> dict[str, Any]:
        return {"attention_mask": shown[:, :stop]} if padding else {}

    def logits(tokens: torch.Tensor) -> Any:
        cache: Any = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config, max_cache_len=LENGTH + 5)
        cache = EncoderDecoderCache(cache, DynamicCache(config=config)) if prefix else cache
        past = {"past_key_values": cache} if name in WRITERS else {"use_cache": True}
        return in_pieces(model, {**given, argument: tokens}, argument, (9, 1, 15, 11, 1), mask, **past)

    with torch.no_grad(), exactly(model):
        stock = logits(tokens)
        enable(model)
        ours, changed, whole = logits(tokens), logits(other), model(**given, **mask(0, LENGTH), use_cache=False)[0]
    assert_near("beside the stock model", counted(ours, shown[..., None].bool()), counted(stock, shown[..., None].bool()))
    if not changes:
        assert_near("beside the whole", ours[:, padding:], whole[:, padding:])
    assert_near("what is unseen", changed[:, :-1], ours[:, :-1])
    assert not torch.equal(changed[:, -1], ours[:, -1])


@pytest.mark.parametrize("name", ["mpt", pytest.param("bloom", marks=pytest.mark.thorough)])
def test_a_layer_with_a_hook_after_ours(name: str) -> None:
    """It is stock; a static cache counts in place, so its mask comes after the first layer has counted."""
    model = writer(name, torch.float64)
    tokens = arguments(name, model, PADDED)["input_ids"]

    def logits() -> Any:
        cache = StaticCache(model.config, max_cache_len=LENGTH + 5)
        return in_pieces(model, {"input_ids": tokens}, "input_ids", (9, 1, 15, 11, 1), lambda *_: {}, past_key_values=cache)

    with torch.no_grad(), exactly(model):
        stock = logits()
        last = attentions(model, enable(model))[-1]
        next(last.children()).register_forward_hook(lambda *_: None)
        assert_near("logits", logits(), stock)


@pytest.mark.thorough
@pytest.mark.parametrize("lookahead", [0, 3, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_streaming(lookahead: int, masked: bool) -> None:
    """Nemotron with sliding caches, in pieces that begin and end within chunks; masks count from position 0."""
    name = "nemotron_asr_streaming"
    model = build(name, torch.float64, sliding_window=9)
    argument, sizes = FAMILIES[name].pieces or ("", ())
    given = {argument: arguments(name, model, WHOLE)[argument], "num_lookahead_tokens": lookahead, "use_cache": True}

    def mask(start: int, stop: int) -> dict[str, Any]:
        return {"attention_mask": torch.ones(2, stop - start, dtype=torch.bool)} if masked else {}

    with torch.no_grad(), exactly(model), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "attn_mask hides")  # as such a mask does with later pieces
        stock = in_pieces(model, given, argument, sizes, mask)
        enable(model)
        ours = in_pieces(model, given, argument, sizes, mask)
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
