"""Classes in place of a library's attention classes: called as those are, with a forward of ours behind."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from .compact import Compact, dense_of, is_small
from .replacement import ATTRIBUTE, HARMLESS, NAMES, Replacement, Sample, set_attribute

MASKS = ("attention_mask", "mask", "attn_mask")
BATCH, LENGTHS = 2, (7, 19)
"""Sequences of a comparison, and their lengths; the last one is ``longest`` of the class."""
SHORT = 64
"""Up to this length there are two sequences, with and without padding, and further modules of a class are also compared."""


class InPlace:
    """Mixin: in place of the class that is the last base. ``forward`` of the subclass is ours. It gets each argument by our name
    for it, and the small forms of what other layers pass on.

    Arguments by position count as the stock class counts them. What our forward has no parameter for makes a call the stock
    forward's, unless it is None or in ``HARMLESS``.
    """

    passes_on = False
    """Whether it only makes positions, or a bias, for attention."""
    fewest = Replacement.fewest
    small: tuple[str, ...] = ()
    """Arguments that ours takes in their small forms alone: of others the call is the stock forward's."""
    constants: tuple[str, ...] = ()
    """Arguments that have no gradient, beside the mask."""

    @property
    def longest(self: Any) -> int:
        """The largest length that is compared: more than windows and tables have rows, if that is not too many."""
        return 40

    @staticmethod
    def applies(module: Any) -> bool:
        """Return whether a module of the stock class has a relative term that ours computes."""
        return True

    def example(self: Any, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        """Return arguments of the stock forward, on torch's default device. real: (B, N), bool, True of what is no padding."""
        raise NotImplementedError

    def serves(self: Any, **given: Any) -> bool:
        """Return whether ours computes a call; its arguments are as other layers passed them on."""
        return True

    def passed_on(self: Any, result: Any, given: dict[str, Any]) -> Any:
        """Return what ours returns, as the next layer gets it. given: arguments by our names, as other layers passed them on."""
        return result

    def pairs(self: Any, *args: Any, **given: Any) -> int:
        """Return how many scores the stock forward computes."""
        states = next(iter(given.values()))
        others, cache = given.get("key_value_states", given.get("key")), cast(Any, given.get("cache"))
        queries = states.shape[1:-1].numel()
        keys = queries if others is None else others.shape[1]
        if hasattr(cache, "get_seq_length"):
            keys += int(cache.get_seq_length(getattr(self, "layer_idx", 0) or 0))
        return int(states.shape[0] * heads_of(self) * queries * self.keys_of_a_query(keys))

    @staticmethod
    def positions_of(given: dict[str, Any]) -> int:
        """Return the number of positions of the first argument: states (B, ..., C), or a number."""
        states = next(iter(given.values()))
        return states if isinstance(states, int) else states.shape[1:-1].numel()  # type: ignore[no-any-return]

    @staticmethod
    def results(returned: Any) -> Any:
        """Return what is compared of what a forward returns."""
        return returned

    def are_weights(self: Any, shape: torch.Size, pairs: tuple[int, int]) -> bool:
        """Return whether a tensor of this shape has a number for each pair of a query and a key."""
        return len(shape) >= 3 and tuple(shape[-2:]) == pairs

    def keys_of_a_query(self: Any, keys: int) -> int:
        """Return how many keys' scores the stock forward computes for a query: all but in windows and blocks."""
        return keys

    @staticmethod
    def counted(mask: torch.Tensor) -> torch.Tensor | None:
        """Return which positions of the output are compared (B, N, 1), those that see a key; None: all.

        mask: the stock forward's.
        """
        if mask.dim() == 2:
            return mask.bool()[..., None]
        if mask.dim() < 4:
            return None
        is_added = mask.is_floating_point()
        seen = (mask > torch.finfo(mask.dtype).min / 2 if is_added else mask != 0).any(-1)  # (B, H, N) or (B, H, blocks, size)
        seen = seen.any(1).flatten(1)
        return seen[..., None] if seen.shape[-1] > 1 else None

    def prepare(self: Any) -> None:
        """Change a shadow, which the comparison runs on."""

    def without_dropout(self: Any) -> None:
        """Switch dropout of a shadow off where it is neither torch's function nor its module."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        stock: Any = cls.__bases__[-1]
        if issubclass(stock, nn.Module) and not issubclass(stock, InPlace):  # else it is derived from ours, as parametrize does
            of = ByClass(cls, stock)

            @functools.wraps(stock.forward)
            def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
                return of.forward(self, args, kwargs)

            cls.forward = forward  # type: ignore[attr-defined]
            setattr(cls, ATTRIBUTE, of)
        # Last, because layers of transformers wrap the forward that a class has by now, and look in calls for the stock names.
        super().__init_subclass__(**kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        set_attribute(getattr(type(self), ATTRIBUTE).stock, self, name, value)


class ByClass(Replacement):
    """A class of a library, and ours in place of it."""

    lacks_weights = True

    def __init__(self, ours: type[InPlace], stock: type[nn.Module]) -> None:
        signature = inspect.signature(stock.forward)
        self.ours, self.stock, self.function = ours, stock, ours.forward  # type: ignore[attr-defined]
        own = inspect.signature(self.function).parameters
        self.taken = frozenset(name for name, each in own.items() if each.kind is not each.VAR_KEYWORD)
        self.takes_more = len(self.taken) < len(own)
        self.needed = [name for name, each in list(own.items())[1:] if each.default is each.empty and name in self.taken]
        self.renamed = {theirs: name for name in self.taken for theirs in NAMES.get(name, ())}
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.positional = tuple(name for name, each in signature.parameters.items() if each.kind in by_position)[1:]
        self.stock_names = {self.renamed.get(each, each): each for each in signature.parameters}
        ignores = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
        self.harmless = frozenset(HARMLESS if ignores else HARMLESS.keys() & signature.parameters.keys())
        self.mask = next((each for each in signature.parameters if each in MASKS), "")
        self.constants = {self.mask, *ours.constants}

    @property
    def fewest(self) -> int:  # type: ignore[override]
        return self.ours.fewest

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        if len(args) > len(self.positional):
            return None
        found: dict[str, Any] = {}
        for called, value in self.named(args, kwargs).items():
            name = self.renamed.get(called, called)
            if value is None and (name in found or name not in self.taken):
                continue
            if name not in self.taken and (name not in self.harmless or (name == "output_attentions" and value)):
                return None
            if name in self.taken or self.takes_more:
                found[name] = value
        return None if any(name not in found for name in self.needed) else found

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self.positional, args, strict=False)), **kwargs}

    def is_served(self, module: Any, given: dict[str, Any]) -> bool:
        if given.get("output_attentions") or (given.get("is_causal") and getattr(module, "is_causal", None) is False):
            return False
        if any(has_hooks(each) for each in module._modules.values() if "Dropout" in type(each).__name__):
            return False  # they may change the attention weights, which ours does not compute
        mask = given.get(self.mask)
        if isinstance(mask, torch.Tensor) and mask.requires_grad:  # the operator gives a mask no gradient
            return False
        if any(isinstance(each, Compact) and each.is_written for each in given.values()):
            return False
        return all(is_small(given.get(name)) for name in module.small) and bool(module.serves(**given))

    def run(self, module: Any, given: dict[str, Any]) -> Any:
        small = {name: each.small if isinstance(each, Compact) else each for name, each in given.items()}
        result = self.function(module, **small)
        passed = {id(small[name]): each for name, each in given.items() if isinstance(each, Compact) and not each.is_none}
        if type(result) is tuple:  # what is passed on as it came knows its dense form
            result = tuple(passed.get(id(each), each) for each in result)
        return module.passed_on(result, given)

    def pairs(self, module: Any, given: dict[str, Any]) -> int:
        return int(module.pairs(**given))

    def results(self, returned: Any) -> Any:
        return self.ours.results(super().results(returned))

    def prepare(self, module: Any) -> None:
        module.__class__ = self.ours
        module.prepare()
        module.without_dropout()

    def are_weights(self, module: Any, shape: torch.Size, pairs: tuple[int, int]) -> bool:
        return bool(module.are_weights(shape, pairs))

    def without_dropout(self, module: Any) -> None:
        module.without_dropout()

    def at_length(self, module: Any, length: int, parent: Any) -> dict[str, Any]:
        return module.example(1, length, None)  # type: ignore[no-any-return]

    def counted(self, given: dict[str, Any]) -> torch.Tensor | None:
        mask = dense_of(given.get(self.mask))
        found = self.ours.counted(mask) if isinstance(mask, torch.Tensor) else None
        return None if found is None else found[:, : self.ours.positions_of(given)]  # blocks may be longer

    def samples(self, module: Any, is_light: bool = False) -> Iterator[Sample]:
        for length in sorted({*LENGTHS, module.longest}):
            if is_light and length > SHORT:
                return
            batch = BATCH if length <= SHORT else 1
            masks = (("without a mask", None), ("with padding", padded(batch, length)))
            for name, real in masks if length <= SHORT else masks[1:]:
                given = module.example(batch, length, real)
                count = module.positions_of(given)
                yield Sample(f"{count} positions, {name}", given, (count, count), self.counted(given))


def padded(batch: int, length: int) -> torch.Tensor:
    """Which positions of sequences are real (B, N), bool: at least half of each one's, and one."""
    return torch.arange(length) < torch.randint(max(length // 2, 1), length + 1, (batch,))[:, None]


def has_hooks(module: nn.Module) -> bool:
    """Return whether something sees, or changes, what a module takes or returns."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


HEADS = ("num_heads", "num_attention_heads", "n_heads", "h", "heads")


def heads_of(module: Any) -> int:
    """Return the number of heads of an attention module."""
    places = (*((module, each) for each in HEADS), *((getattr(module, "config", None), each) for each in HEADS))
    return next((each for each in (getattr(*place, None) for place in places) if isinstance(each, int)), 1)
