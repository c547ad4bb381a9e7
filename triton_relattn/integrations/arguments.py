"""Arguments of enabled classes: bound by the names that the stock class has for them, and none of them lost.

A library renames arguments, and a forward with ``**kwargs`` does not notice. So the names are read from the stock class.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

NAMES = {"cache": ("cache", "past_key_values", "layer_past")}
"""The names that stock classes have for an argument of ours: transformers 5.23 and 5.24 differ, and so do its families."""

HARMLESS = {
    "position_ids": "a relative term knows positions by their difference, and a packed batch is in the mask that they make",
    "cache_position": "as position_ids: the name of transformers 4",
    "use_cache": "whether the model makes a cache; attention uses the one that it gets",
    "is_causal": "served, or the same as the module's own: is_causal=True is refused where the module sees both sides",
    "output_attentions": "refuse_weights raises if it is true",
    "output_hidden_states": "for the model around attention",
    "output_router_logits": "for the model around attention",
    "return_dict": "for the model around attention",
    "num_items_in_batch": "for the loss",
}
"""Arguments that a stock forward takes in its ``**kwargs``, which no result of its attention depends on; and why so.

Not here: cu_seq_lens_q and the like, seq_idx, block_table (packed batches without a mask), head_mask, softcap, s_aux,
sliding_window.
"""


class StockArguments:
    """Mixin: our forward is called as that of the stock class, the last base, and gets each argument by our name for it.

    Arguments by position count as the stock class counts them. What our forward has no parameter for raises TypeError with its
    name, unless it is None or in ``HARMLESS``; so does all of it if the stock forward has no ``**kwargs``, either.

    hands_on: the forward gives its ``**kwargs`` to the stock class, or to other modules, which then are the ones to refuse them.
    """

    def __init_subclass__(cls, hands_on: bool = False, **kwargs: Any) -> None:
        stock: Any = cls.__bases__[-1]
        ours: Any = getattr(cls, "forward", None)
        if issubclass(stock, nn.Module) and ours is not stock.forward:
            cls.forward = as_stock(ours, stock, hands_on)  # type: ignore[attr-defined]
        # Last, because layers of transformers wrap the forward that a class has by now, and look in calls for the stock names.
        super().__init_subclass__(**kwargs)


def argument_name(function: Callable[..., Any], name: str) -> str:
    """Return the name that function has for an argument of ours.

    Raises:
        TypeError: it has none that is known.
    """
    parameters = inspect.signature(function).parameters
    for each in NAMES[name]:
        if each in parameters:
            return each
    raise TypeError(f"{function.__qualname__} has no argument that is known to be {name}: none of {', '.join(NAMES[name])}")


def as_stock(ours: Callable[..., Any], stock: type[nn.Module], hands_on: bool) -> Callable[..., Any]:
    """Return a forward with the signature of the stock class's that calls ours."""
    signature, own = inspect.signature(stock.forward), inspect.signature(ours).parameters
    taken = frozenset(name for name, each in own.items() if each.kind is not inspect.Parameter.VAR_KEYWORD)
    renamed = {theirs: name for name in taken for theirs in NAMES.get(name, ())}
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [renamed.get(name, name) for name, each in signature.parameters.items() if each.kind in by_position]
    positional, everything = tuple(names[1:]), len(taken) < len(own)
    ignores = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())
    harmless = frozenset(HARMLESS if ignores else ())

    @functools.wraps(ours)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > len(positional):
            raise TypeError(f"{type(self).__name__} takes {len(positional)} arguments by position, got {len(args)}")
        given = dict(zip(positional, args, strict=False))
        for called, value in kwargs.items():
            name = renamed.get(called, called)
            if value is not None and given.get(name) is not None:
                raise TypeError(f"{type(self).__name__} got {name} twice, one of them as {called}")
            if value is not None or name not in given:
                given[name] = value
        if hands_on:
            return ours(self, **given)
        lost = [name for name, value in given.items() if name not in taken and name not in harmless]
        lost = lost if not ignores else [name for name in lost if given[name] is not None]
        if lost:
            raise TypeError(
                f"{type(self).__name__} is enabled, and its forward has no argument {', '.join(lost)}: the result could be "
                f"another than that of {stock.__module__}; disable(model) for calls with it"
            )
        if given.get("is_causal") and getattr(self, "is_causal", None) is False:
            raise ValueError(f"is_causal=True: this {type(self).__name__} attends in both directions; disable(model) for it")
        return ours(self, **{name: value for name, value in given.items() if name in taken or (everything and name in harmless)})

    forward.__signature__ = signature  # type: ignore[attr-defined]
    return forward
