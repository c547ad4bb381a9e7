"""The cases that prove a family: its small models, with and without padding, and step by step where there is a cache."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ... import proof
from ...small import LENGTH as LENGTH
from ...small import LENGTHS
from . import EVERY
from .family import Family
from .inputs import exist

# What makes a family's attention easier to get wrong: a limit of the logits that is felt.
SHARPER: dict[str, dict[str, Any]] = {"gemma4": {"attention_logit_cap": 3.0}}
READ, WRITTEN = 9, 6
"""Tokens that a writer is given, and that it adds."""


def cases(stock: str) -> tuple[proof.Case, ...]:
    """Return the cases of all small models of a module of transformers."""
    made: list[proof.Case] = []
    for family in EVERY:
        if stock == f"transformers.models.{family.folder}.modeling_{family.folder}":
            runs = {name: functools.partial(_results, family, lengths) for name, lengths in LENGTHS.items()}
            if family.pieces:
                runs["in pieces, with a cache"] = functools.partial(_in_pieces, family)
            made.append(proof.Case(family.name, functools.partial(small_model, family), runs))
            for variant in family.variants:
                name = f"{family.name} with {', '.join(f'{key}={each}' for key, each in variant.items())}"
                made.append(proof.Case(name, functools.partial(small_model, family, **variant), runs))
            if family.writer:
                steps = {f"{padding} tokens of padding first": functools.partial(_written, padding) for padding in (0, 4)}
                writer = functools.partial(small_model, family, make=family.find(family.writer))
                made.append(proof.Case(f"{family.writer} that writes with a cache", writer, steps))
            if family.around:
                made.append(
                    proof.Case(f"{family.name}, inside a model", functools.partial(small_model, family, make=family.around), runs)
                )
    return tuple(made)


def small_model(family: Family, layers: int = 2, **changes: Any) -> Any:
    """Return a small model of a family in float64, no parameter of which is zero."""
    return proof.varied(family.build(small=True, layers=layers, **{**SHARPER.get(family.name, {}), **changes}))


def arguments(family: Family, model: nn.Module, lengths: list[int]) -> dict[str, Any]:
    torch.default_generator.manual_seed(1)
    return family.make(model, LENGTH, lengths)


def _results(family: Family, lengths: list[int], model: nn.Module) -> proof.Results:
    counts = None if family.padding_matters else exist(torch.tensor(lengths), LENGTH)[..., None]
    return proof.results(model, arguments(family, model, lengths), counts)


def _in_pieces(family: Family, model: nn.Module) -> proof.Results:
    """Return the outputs of a sequence that comes in pieces, each with the caches that came with the one before it."""
    name, sizes = family.pieces or ("", ())
    given = proof.copied(arguments(family, model, [LENGTH, LENGTH]))
    whole = given.pop(name)
    given.pop("decoder_attention_mask" if name.startswith("decoder") else "attention_mask")
    cache: dict[str, Any] = {}
    outs: list[torch.Tensor] = []
    with torch.no_grad(), proof.float32_is_float64():
        for piece in whole.split(list(sizes), 1):
            made = model(**given, **{name: piece}, **cache, use_cache=True)
            outs.append(proof.main_output(made))
            # Versions have other names for caches, which are the same in what a model returns and takes.
            cache = {key: each for key, each in made.items() if key == "past_key_values" or "cache" in key}
    if not cache:
        raise proof.Disproved(f"{family.name}: no cache is returned")
    return {f"the output of piece {number}": each for number, each in enumerate(outs)}


def _written(padding: int, model: Any) -> proof.Results:
    """Return the tokens that a model writes, and the logits of each, by transformers' own loop."""
    model.generation_config.eos_token_id = None
    torch.default_generator.manual_seed(1)
    tokens = torch.randint(1, 50, (2, READ))
    mask = (torch.arange(READ) >= torch.tensor([[padding], [0]])).long()
    with torch.no_grad(), proof.float32_is_float64():
        made = model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=WRITTEN,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
            no_repeat_ngram_size=1,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return {**{f"the logits of token {number}": each for number, each in enumerate(made.logits)}, "the tokens": made.sequences}
