"""Enabled models that generate: the same tokens and the same numbers, with caches of all kinds, and with masks of the user's.

No call that they make is one that is hardly meant: each says where its queries stand.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from tests.tolerance import assert_near

pytest.importorskip("transformers")

from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from bench.families import FAMILIES
from tests.cpu.models import (
    LENGTH,
    PADDED,
    WHOLE,
    arguments,
    assert_same,
    both,
    build,
    counted,
    in_float64,
    padding_first,
    real,
    results,
    writer,
)
from triton_relattn.integrations import in_place
from triton_relattn.integrations.transformers import enable

pytestmark = pytest.mark.filterwarnings("error:.*(query_offset|positions=|attn_mask)")
WRITERS = [name for name, family in FAMILIES.items() if family.writer]
SEQ2SEQ = ["t5", "mt5", "umt5", "switch_transformers", "longt5"]
"""Models that read with an encoder and write with a decoder; the other writers do both at once."""
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


def ways(quick: tuple[str, str], hows: Iterable[str] = HOW) -> list[Any]:
    """Families, and of some entries of HOW those that the stock models support; all but one are thorough."""
    return [
        pytest.param(name, how, id=f"{name}-{how}", marks=[pytest.mark.thorough] * ((name, how) != quick))
        for name in WRITERS
        for how in hows
        if not (name in NO_STATIC_CACHE and "static" in how)
    ]


@pytest.mark.parametrize(("name", "how"), ways(("t5", "cache")))
def test_generation(name: str, how: str) -> None:
    generate_the_same(name, how)


@pytest.mark.parametrize(("name", "how"), ways(("t5", "static"), ("cache", "static")))
def test_generation_with_both(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours reads the prompt, stock forwards read the single tokens after it, as where models are small."""
    monkeypatch.setattr(in_place.InPlace, "fewest", 500)
    generate_the_same(name, how)


def generate_the_same(name: str, how: str) -> None:
    """Generation gives the same tokens, with and without a mask and left padding."""
    # With a static cache the stock model cannot read more tokens than its window.
    changes: dict[str, Any] = {"sliding_window_size": 40} if name.startswith("inkling2") and "static" in how else {}
    model = writer(name, **changes)
    torch.manual_seed(1)
    tokens = torch.randint(1, 50, (2, 12))
    masks = [None, *(padding_first(count, 12) for count in (0, 5))]
    given = [{"attention_mask": mask, "max_new_tokens": 14, **GREEDY, **HOW[how]} for mask in masks]
    stock = [model.generate(tokens, **settings) for settings in given]
    enable(model)
    for settings, expected in zip(given, stock, strict=True):
        assert torch.equal(model.generate(tokens, **settings), expected)
    assert len(set(stock[1][0, -14:].tolist())) == 14


@pytest.mark.parametrize("name", ["t5", "umt5", "bloom", "falcon"])
@pytest.mark.parametrize("is_trained", [False, True], ids=["generate", "train"])
def test_calls_with_a_cache_are_compared(name: str, is_trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, with a graph and without; of a cache no more is copied than the layer's own part."""
    model = writer(name)
    report = enable(model, check_calls=True)
    copies: list[str] = []
    deepcopy = copy.deepcopy

    def counted_deepcopy(value: Any, *memo: Any) -> Any:
        copies.extend([type(value).__name__] if "Cache" in type(value).__name__ else [])
        return deepcopy(value, *memo)

    monkeypatch.setattr(copy, "deepcopy", counted_deepcopy)
    torch.manual_seed(1)
    tokens = torch.randint(1, 50, (2, 12))
    if is_trained:
        model.train()(input_ids=tokens, labels=tokens, use_cache=True).loss.backward()
    else:
        model.generate(tokens, max_new_tokens=3, **GREEDY)
    calls = report.calls()
    assert calls.compared > 0 and not copies and not calls.not_compared and not calls.differing


def test_what_raises_behind_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys may be in the cache already: the stock forward would append them again, so the error is the caller's."""
    model = writer("bloom")
    enable(model, check_calls=False)

    def fails(*_: Any, **__: Any) -> Any:
        raise IndexError("planted")

    attention = next(part for part in model.modules() if "Attention" in type(part).__name__)
    monkeypatch.setattr(type(attention)._triton_relattn, "function", fails)
    with pytest.raises(IndexError, match="planted"):
        model(torch.randint(1, 50, (2, 12)), use_cache=True)


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


QUERY, KEY = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
MASKS = {
    "causal": KEY <= QUERY,  # also in sliding layers: this mask does not ask for their window
    "prefix": (KEY <= QUERY) | (KEY < 12),  # a prefix that is visible from all positions
    "everything": torch.ones(LENGTH, LENGTH, dtype=torch.bool),
    "documents": (KEY <= QUERY) & ((KEY < 20) == (QUERY < 20)),
    "a-row-for-all": KEY[None] < 30,  # (1, Nk): visible to all queries, including earlier ones
}
TAKE_MASKS = [*SEQ2SEQ, "pix2struct", "inkling", "inkling2", "mpt"]  # BLOOM and Falcon do not accept one


def as_numbers(visible: torch.Tensor) -> torch.Tensor:
    """(2, 1, Nq, Nk), the dtype's lowest number where a key is hidden."""
    lowest = torch.finfo(torch.float64).min
    return torch.zeros(2, 1, *visible.shape, dtype=torch.float64).masked_fill(~visible, lowest)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "prefix") for name in TAKE_MASKS),
        *(("inkling", kind) for kind in MASKS if kind not in ("prefix", "a-row-for-all")),
        *((name, kind) for name in ("t5", "mpt", "inkling2") for kind in ("everything", "a-row-for-all")),
    ],
)
def test_a_mask_of_the_users(name: str, kind: str) -> None:
    """A mask (B, 1, Nq, Nk) is used unchanged in all layers: no causal mask is added to it."""
    model = build(name, torch.float64)
    given = arguments(name, model, WHOLE)
    mask = "decoder_attention_mask" if "decoder_attention_mask" in given else "attention_mask"
    given[mask] = as_numbers(MASKS[kind])
    with in_float64():
        ours, stock = both(model, given)
        assert_same(ours, stock)


@pytest.mark.parametrize(
    ("name", "holes"),
    [("inkling", True), *(pytest.param(name, False, marks=pytest.mark.thorough) for name in (*WRITERS, "pix2struct"))],
)
def test_padding_first(name: str, holes: bool) -> None:
    """Padding may come first, or anywhere with holes."""
    model = build(name, torch.float64)
    given = arguments(name, model, WHOLE)
    for argument in given:
        if argument.endswith("attention_mask"):
            given[argument] = padding_first(14 if argument == "decoder_attention_mask" else 5)
            given[argument] *= (torch.rand(2, LENGTH) > 0.3).long() if holes else 1
    counts = given.get("decoder_attention_mask", given["attention_mask"])[..., None].bool()
    with in_float64():
        assert_same(*both(model, given, counts))


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*WRITERS, "pix2struct"])
def test_decoders_in_both_directions(name: str) -> None:
    model = build(name, torch.float64)
    model.get_submodule("decoder" if name in SEQ2SEQ else "").config.is_causal = False
    with in_float64():
        assert_same(*both(model, arguments(name, model, PADDED), real(PADDED)))


@pytest.mark.parametrize("ends", [[20], [7, 9, 30]])
def test_packed_sequences(ends: list[int]) -> None:
    """Positions that restart begin a new sequence."""
    model = build("inkling", torch.float64)
    tokens = arguments("inkling", model, WHOLE)["input_ids"]
    pieces = torch.tensor([0, *ends, LENGTH]).diff().tolist()
    packed = {"input_ids": tokens, "position_ids": torch.cat([torch.arange(piece) for piece in pieces]).expand(2, -1)}
    with in_float64():
        ours, stock = both(model, packed)
        unpacked = results(model, {"input_ids": tokens})
    assert_same(ours, stock)
    assert (unpacked["out"] - stock["out"]).abs().max() > 0.1


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
