"""No argument of an enabled class is lost: it is served under the name that the stock class has for it, or refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from transformers import DynamicCache, EncoderDecoderCache
from transformers.models.t5 import modeling_t5 as stock_t5

from bench.families import FAMILIES
from tests.cpu.models import PADDED, arguments, build, forward
from tests.cpu.test_transformers_decoders import WRITERS, writer
from tests.tolerance import assert_near
from triton_relattn.integrations.arguments import HARMLESS, NAMES, StockArguments, argument_name
from triton_relattn.integrations.transformers import LIBRARY, enable, t5
from triton_relattn.integrations.transformers.masks import padding

HAND_ON = {
    *("InklingModel", "MptModel", "NemotronAsrStreamingEncoder", "NemotronAsrStreamingEncoderBlock", "ParakeetEncoder"),
    *("SeamlessM4Tv2ConformerEncoder", "Inkling2TextModel"),
}
"""Classes whose forward gives what it does not know to the modules inside."""


def classes() -> Iterator[Any]:
    """Stock classes and ours, of all families, that have a forward of their own."""
    for source in LIBRARY.sources:
        replaced: dict[Any, Any] = source.classes()
        for stock, ours in replaced.items():
            if ours.forward is not stock.forward:
                yield pytest.param(stock, ours, id=f"{stock.__module__.rpartition('.modeling_')[2]}-{stock.__name__}")


every_class = pytest.mark.parametrize(("stock", "ours"), [*classes()])


@every_class
def test_our_forward_knows_what_the_stock_class_takes(stock: Any, ours: Any) -> None:
    """Whatever the version of transformers: each parameter of the stock forward is one of ours, or goes on to the stock class."""
    theirs, own = inspect.signature(stock.forward).parameters, inspect.signature(inspect.unwrap(ours.forward)).parameters
    assert inspect.signature(ours.forward).parameters.keys() == theirs.keys()
    known = set(own).union(*(NAMES[name] for name in own if name in NAMES))
    unknown = [name for name, each in theirs.items() if each.kind is not each.VAR_KEYWORD and name not in known]
    assert not unknown or ours.__name__ in HAND_ON


@every_class
def test_an_unknown_argument_is_refused(stock: Any, ours: Any) -> None:
    """By its name, before anything is computed."""
    if ours.__name__ in HAND_ON:
        pytest.skip("hands it on: test_an_unknown_argument_of_a_model")
    assert issubclass(ours, StockArguments)
    blank = object.__new__(ours)
    with pytest.raises(TypeError, match=r"\bkv\b"):
        ours.forward(blank, kv=torch.ones(1))
    with pytest.raises(TypeError, match="arguments by position"):
        ours.forward(blank, *range(20))


@pytest.mark.parametrize("name", FAMILIES)
def test_an_unknown_argument_of_a_model(name: str) -> None:
    """If the stock model hands it to its attention, the enabled one raises; never do both differ in silence."""
    model = build(name)
    given = {**arguments(name, model, PADDED), "kv": torch.ones(1)}
    met: list[str] = []

    def note(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        met.extend(each for each in kwargs if each == "kv")

    enabled = enable(model)
    attention = [model.get_submodule(each) for each, kind in enabled.items() if "Attention" in kind]
    assert attention
    for each in attention:
        each.register_forward_pre_hook(note, with_kwargs=True)
    try:
        forward(model, given)
    except TypeError as error:
        assert "kv" in str(error)
    else:
        assert not met


@pytest.mark.parametrize("name", WRITERS)
def test_twelve_tokens(name: str) -> None:
    """Greedy, with a cache that is asked for by default: each step has one token, and the tokens are the stock model's."""
    model = writer(name)
    torch.manual_seed(2)
    tokens = torch.randint(1, 50, (2, 7))
    given = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "no_repeat_ngram_size": 1}
    stock = model.generate(tokens, **given)
    enable(model)
    assert torch.equal(model.generate(tokens, **given), stock)
    assert torch.equal(model.generate(tokens, **given, use_cache=False), stock)


class Renamed(stock_t5.T5Attention):
    """T5's attention in a later version, which has another name for the cache."""

    def forward(  # type: ignore[no-untyped-def]
        self, hidden_states, mask=None, key_value_states=None, position_bias=None, kv=None, **kwargs
    ):
        given = {argument_name(stock_t5.T5Attention.forward, "cache"): kv, **kwargs}
        return super().forward(hidden_states, mask, key_value_states, position_bias, **given)


class Enabled(t5.BucketedAttention, Renamed):  # type: ignore[misc]
    pass


def rename(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Rename the cache, as the layers of a later version would."""
    return args, {"kv" if name in NAMES["cache"] else name: each for name, each in kwargs.items()}


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_name_of_a_later_version(use_cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call with a cache raises, with the name, where an enabled model would generate other tokens."""
    model = writer("t5")
    given = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "use_cache": use_cache}
    tokens = torch.randint(1, 50, (2, 7))
    before = model.generate(tokens, **given)
    for each in model.modules():
        if isinstance(each, stock_t5.T5Attention):
            each.__class__ = Renamed
            each.register_forward_pre_hook(rename, with_kwargs=True)
    assert torch.equal(model.generate(tokens, **given), before)
    monkeypatch.setitem(t5.CLASSES, Renamed, Enabled)
    monkeypatch.setattr(t5.T5Stack, "attention", (t5.T5Attention, Enabled))
    assert "T5Stack" in enable(model).values()
    if not use_cache:
        assert torch.equal(model.generate(tokens, **given), before)
        return
    with pytest.raises(TypeError, match=r"Enabled is enabled, and its forward has no argument kv\b"):
        model.generate(tokens, **given)


@pytest.mark.parametrize("called", [*NAMES["cache"], "by position"])
def test_names_of_a_cache(called: str) -> None:
    """Each is served, whatever the version."""
    attention = build("t5").decoder.block[0].layer[0].SelfAttention
    enable(attention)
    states = torch.randn(2, 6, 32)
    outs, cache = [], EncoderDecoderCache(DynamicCache(), DynamicCache())
    for part in states.split((4, 2), 1):
        out = attention(part, None, None, None, cache) if called == "by position" else attention(part, **{called: cache})
        outs.append(out[0])
    assert_near("steps", torch.cat(outs, 1), attention(states)[0])
    assert cache.get_seq_length() == 6


def test_an_argument_twice() -> None:
    """The same one under two names, or by position and by name."""
    attention = build("t5").decoder.block[0].layer[0].SelfAttention
    enable(attention)
    states, cache = torch.randn(1, 3, 32), EncoderDecoderCache(DynamicCache(), DynamicCache())
    with pytest.raises(TypeError, match="cache twice, one of them as past_key_values"):
        attention(states, cache=cache, past_key_values=cache)
    with pytest.raises(TypeError, match="hidden_states twice"):
        attention(states, hidden_states=states)
    attention(states, cache=None, past_key_values=cache)
    assert cache.get_seq_length() == 3


PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "block_table")


@pytest.mark.parametrize("argument", [*PACKED, "head_mask", "layer_head_mask", "softcap", "s_aux", "sliding_window", "scaling"])
@pytest.mark.parametrize("name", ["t5", "mpt", "bloom", "wav2vec2_bert", "parakeet"])
def test_arguments_that_change_results(name: str, argument: str) -> None:
    """They are of a packed batch, or of another softmax. None asks for nothing."""
    enabled = enable(model := build(name))
    attention = next(model.get_submodule(each) for each, kind in enabled.items() if "Attention" in kind)
    with pytest.raises(TypeError, match=rf"\b{argument}\b"):
        attention(torch.randn(1, 3, 32), **{argument: torch.tensor([0, 3])})
    with pytest.raises(Exception) as raised:
        attention(None, **{argument: None})
    assert argument not in str(raised.value)


def test_harmless_arguments() -> None:
    """They change nothing; and each is in the list with its reason."""
    assert all(HARMLESS.values())
    attention = build("t5").encoder.block[0].layer[0].SelfAttention
    states = torch.randn(2, 6, 32)
    given = dict.fromkeys(HARMLESS, False) | {"position_ids": torch.arange(6)[None], "num_items_in_batch": torch.tensor(2)}
    expected = attention(states, **{**given, "output_attentions": None})[0]
    enable(attention)
    assert_near("out", attention(states, **given)[0], expected)
    with pytest.raises(ValueError, match="output_attentions"):
        attention(states, output_attentions=True)


def test_causality_that_is_asked_for() -> None:
    """An encoder's attention does not become causal, so that is refused."""
    model = build("t5")
    encoder, decoder = (part.block[0].layer[0].SelfAttention for part in (model.encoder, model.decoder))
    enable(model)
    decoder(torch.randn(1, 4, 32), is_causal=True)
    with pytest.raises(ValueError, match="attends in both directions"):
        encoder(torch.randn(1, 4, 32), is_causal=True)


def test_a_name_that_is_not_known() -> None:
    """A stock module that our classes call has to have one of the known names: else there is no import."""
    assert argument_name(lambda layer_past: None, "cache") == "layer_past"
    with pytest.raises(TypeError, match="no argument that is known to be cache: none of cache, past_key_values, layer_past"):
        argument_name(lambda kv: None, "cache")


def test_masks_are_made_of_all_arguments() -> None:
    given: dict[str, Any] = {"attention_mask": torch.tensor([[1, 1, 0]]).bool(), "kv_length": 3, "kv_offset": 0}
    mask = padding(**given, q_length=3, block_size=None)
    assert mask is not None and mask.tolist() == [[[[True, True, False]]]]
    with pytest.raises(TypeError, match="block_size"):
        padding(**given, block_size=4)
    with pytest.raises(TypeError, match="kv_offset"):
        padding(attention_mask=given["attention_mask"], kv_length=3)  # type: ignore[call-arg]
