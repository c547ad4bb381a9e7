"""The two ways to compute a call of a stock class: its own forward and ours, by the same arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from .compact import Compact, is_small, to_dense

HARMLESS = frozenset(
    (
        # A relative term knows positions by their difference, and a packed batch is in the mask that they make.
        *("position_ids", "cache_position", "use_cache"),
        # If this is true, the call is the stock forward's.
        "output_attentions",
        # For the model around attention, and for the loss.
        *("output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch"),
    )
)
"""Arguments that a stock forward takes in its ``**kwargs``, which no result of its attention depends on.

Not here: cu_seq_lens_q and the like, seq_idx, block_table (packed batches without a mask), head_mask, softcap, s_aux,
sliding_window.
"""


class Ours:
    """What is there in place of a stock class: attention (InPlace, Kind), or what passes masks on to attention (PassesOn)."""

    passes_on = False
    """Whether it only makes masks, positions, or a bias, for attention."""
    keeps_class = False
    """Whether modules keep their class: they get ours by the attention implementation that their config names."""
    lacks_weights = True
    """Whether ours returns None where the stock forward returns attention weights."""
    casts: tuple[str, ...] = ()
    """Arguments, by our names, that the stock forward casts to the dtype of its weights."""
    small: tuple[str, ...] = ()
    """Arguments that ours takes in their small forms alone: of others the call is the stock forward's."""
    needs: tuple[str, ...] = ()
    """Arguments that every model passes: a module that is called on its own without one is the stock forward's."""
    constants: tuple[str, ...] = ()
    """Arguments that have no gradient, beside the mask."""

    @staticmethod
    def applies(module: Any) -> bool:
        """Return whether a module of the stock class has a relative term that ours computes."""
        return True

    @staticmethod
    def why_not(module: Any) -> str:
        """Return why ours does not compute what a module does in its model, which its comparison alone would not show."""
        return ""

    @staticmethod
    def titled(module: Any, title: str) -> str:
        """Return what a module computes, title: of its family."""
        return title


class Replacement:
    """The two ways to compute a call of a stock class: its own forward, and ours, which serves some calls.

    stock: the class; ``stock_forward`` of ours may compute its calls with other functions. ours: a class derived from InPlace, or
    a Kind, whose functions are called with the module first. function: our forward. names: our names for the stock forward's
    arguments. harmless: arguments that have no effect on the result. mask: the stock forward's name for the mask. constants:
    arguments without a gradient.
    """

    def __init__(
        self,
        stock: type[nn.Module],
        ours: Any,
        forward: Callable[..., Any],
        names: Mapping[str, str],
        *,
        harmless: Collection[str] = (),
        mask: str = "",
    ) -> None:
        parameters = list(inspect.signature(stock.forward).parameters.values())[1:]
        self.stock, self.ours, self.function, self.names = stock, ours, forward, dict(names)
        self.harmless, self.mask, self.constants = frozenset(harmless), mask, frozenset((mask, *ours.constants))
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.positional = [item.name for item in parameters if item.kind in by_position]
        self.defaults = {item.name: item.default for item in parameters if item.default is not item.empty}
        needed = {names[item.name] for item in parameters if item.name in names and item.name not in self.defaults}
        own = inspect.signature(forward).parameters.values()
        self.required = needed | {item.name for item in own if item.default is item.empty and item.name in names.values()}
        self.forward_takes, self.serves_takes, self.pairs_takes = map(_taken, (forward, ours.serves, ours.pairs))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by the stock forward's names, in its order: the first ones are the states."""
        given = {**dict(zip(self.positional, args, strict=False)), **kwargs}
        return {name: given.pop(name) for name in self.positional if name in given} | given

    def translate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Return the arguments of a call by our names; None if ours does not know one of them, or lacks one."""
        if len(args) > len(self.positional):
            return None
        given: dict[str, Any] = {}
        harmless: dict[str, Any] = {}
        for name, value in self.bind(args, kwargs).items():
            if name in self.names:
                if value is not None or self.names[name] not in given:  # versions of a library have several names for one
                    given[self.names[name]] = value
            elif name in self.harmless:
                harmless[name] = value
            elif value is not self.defaults.get(name):
                return None
        return {**given, **harmless} if all(name in given for name in self.required) else None

    def is_served(self, module: Any, given: dict[str, Any]) -> bool:
        """Return whether ours computes a call."""
        if given.get("output_attentions"):
            return False
        if any(given.get(name) is None for name in self.ours.needs):
            return False
        mask = given.get(self.names.get(self.mask, self.mask))
        if isinstance(mask, torch.Tensor) and mask.requires_grad:  # the operator gives a mask no gradient
            return False
        if any(isinstance(value, Compact) and value.is_written for value in given.values()):
            return False
        are_small = all(is_small(given.get(name)) for name in self.ours.small)
        return are_small and bool(self.ours.serves(module, **self.serves_takes(given)))

    def run(self, module: Any, given: dict[str, Any]) -> Any:
        """Compute what the stock forward returns."""
        small = {name: value.small if isinstance(value, Compact) else value for name, value in given.items()}
        small |= _cast(module, {name: small.get(name) for name in self.ours.casts})
        result = self.function(module, **self.forward_takes(small))
        if type(result) is tuple:  # what is passed on as it came knows its dense form
            passed = {id(small[name]): value for name, value in given.items() if isinstance(value, Compact) and not value.is_none}
            result = tuple(passed.get(id(value), value) for value in result)
        return self.ours.passed_on(module, result, given)

    def by_stock(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a call by the stock forward."""
        forward = getattr(self.ours, "stock_forward", None) or self.stock.forward  # that which the class has now
        return forward(module, *map(to_dense, args), **{name: to_dense(value) for name, value in kwargs.items()})

    def by_ours(self, module: Any, kwargs: dict[str, Any]) -> Any:
        """Compute a call by ours, to compare it; raise NotImplementedError if ours does not serve it."""
        given = self.translate((), kwargs)
        if given is None or not self.is_served(module, given):
            raise NotImplementedError("a call with these arguments is the stock forward's")
        return self.run(module, given)

    def counted(self, arguments: dict[str, Any]) -> torch.Tensor | None:
        """Return which positions of the output see a key, with as many dimensions as the output; None: all, or not known."""
        mask = to_dense(arguments.get(self.mask))
        if not isinstance(mask, torch.Tensor) or mask.numel() == 0 or (visible := self.ours.counted(mask)) is None:
            return None
        return visible[:, : self.ours.num_positions(arguments)]  # type: ignore[no-any-return]  # blocks may be longer


FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _cast(module: nn.Module, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return arguments of another dtype than a module's weights in theirs: the stock forward casts them, or refuses them."""
    dtype = next((weight.dtype for weight in module.parameters()), None)
    others = {name: value for name, value in given.items() if isinstance(value, torch.Tensor) and value.dtype in FLOATING}
    others = {name: value for name, value in others.items() if value.dtype != dtype}
    if not others or dtype not in FLOATING or any(weight.dtype != dtype for weight in module.parameters()):
        return {}
    # Autocast casts by itself.
    return {name: value.to(dtype) for name, value in others.items() if not torch.is_autocast_enabled(value.device.type)}


def _taken(function: Callable[..., Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that returns those of a call's arguments that function takes."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict
    names = frozenset(parameters)
    return lambda given: {name: value for name, value in given.items() if name in names}
