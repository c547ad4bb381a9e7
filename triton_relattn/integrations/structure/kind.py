"""What all kinds share: a class in front of the stock class whose forward it takes over, and how the stock module is read."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from .. import replacement
from ..comparison import Refused as Refused
from ..comparison import weights_dropout
from ..in_place import padded as padded
from ..operators import drop_probability
from ..replacement import ATTRIBUTE as ATTRIBUTE
from ..replacement import Replacement
from ..replacement import Sample as Sample
from ..shadow import projections
from .roles import MASK, argument_roles


@dataclass(frozen=True)
class Reading:
    """How a stock module is read: what its attributes and arguments stand for. A comparison has to confirm it.

    roles: attributes by role. arguments: roles by the name of the forward's argument. options: whatever else a kind has to know.
    drops: the child that drops attention weights, or the attribute that has the probability; drops_out: the child that drops
    elements of the output. returns: what is in the tuple that the forward returns, "tensor" or "None" each; empty: it returns a
    tensor. channels: of the states.
    """

    roles: tuple[tuple[str, str], ...]
    arguments: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, Any], ...] = ()
    drops: str | None = None
    drops_out: str | None = None
    returns: tuple[str, ...] = ()
    channels: int = 0
    heads: int = 0

    def option(self, name: str) -> Any:
        return dict(self.options)[name]

    def role(self, name: str) -> str:
        return dict(self.roles)[name]

    def argument(self, role: str) -> str | None:
        """The name of the argument with this role."""
        return next((name for name, each in self.arguments if each == role), None)


class Kind(Replacement):
    """A way in which attention is relative, and a stock class that is of it: :meth:`compute` in place of its forward.

    It computes the calls that it :meth:`serves`. All others are the stock forward's: arguments without a role that are not at
    their defaults, and shapes that were not compared.

    title: the kind's name, for the report. The class in place of the stock class has no attributes but ``ATTRIBUTE``, which is
    this object, so that none can have the name of one of the stock module's.
    """

    title: ClassVar[str]

    def __init__(self, stock: type[nn.Module], reading: Reading) -> None:
        signature = list(inspect.signature(stock.forward).parameters.values())[1:]
        self.stock, self.reading = stock, reading
        self.roles, self.options, self.arguments = dict(reading.roles), dict(reading.options), dict(reading.arguments)
        self.constants = [name for name, role in reading.arguments if role == MASK]
        self.positional = tuple(each.name for each in signature if each.kind is each.POSITIONAL_OR_KEYWORD)
        self.defaults = {each.name: each.default for each in signature if each.default is not each.empty}

    @classmethod
    def readings(cls, module: nn.Module) -> Iterator[Reading]:
        """Yield how a module may be read; nothing if it is not of this kind.

        Raises:
            Refused: it is, and no reading can serve it.
        """
        raise NotImplementedError

    @classmethod
    def examples(cls, module: Any, reading: Reading) -> Iterator[Sample]:
        """Yield arguments for the comparison, the smallest ones that tell readings apart first."""
        raise NotImplementedError

    def at_length(self, module: Any, length: int, parent: Any) -> dict[str, Any]:
        return {self.reading.argument("states"): torch.empty(1, length, taken(module, self.reading), device="meta")}  # type: ignore[dict-item]

    @classmethod
    def prepare(cls, model: Any) -> None:
        pass

    @classmethod
    def words(cls, reading: Reading) -> str:
        """What a reading takes for granted, for messages."""
        has_mask = reading.argument("mask") is not None
        return ", ".join(f"{name}: {value}" for name, value in reading.options if name != "mask" or has_mask)

    def serves(self, *args: Any, **given: Any) -> bool:
        """Return whether a call of a module, its arguments by role, is one that was compared."""
        raise NotImplementedError

    def compute(self, *args: Any, **given: Any) -> Any:
        """Compute what the stock forward returns."""
        raise NotImplementedError

    def samples(self, module: Any, is_light: bool = False) -> Iterator[Sample]:
        return self.examples(module, self.reading)

    def run(self, module: Any, given: dict[str, Any]) -> Any:
        result = self.compute(module, **given)
        alone = isinstance(result, torch.Tensor) and self.reading.returns and set(self.reading.returns[1:]) <= {"None"}
        return (result, *(None for _ in self.reading.returns[1:])) if alone else result

    def is_served(self, module: Any, given: dict[str, Any]) -> bool:
        """As in the base class: the operator gives a mask no gradient, and adds no boolean one."""
        mask = given.get(MASK)
        if not (self._may_drop(module) and self.serves(module, **given)):
            return False
        return mask is None or not (mask.requires_grad or (self.options["mask"] == ADDED and not mask.is_floating_point()))

    def _may_drop(self, module: Any) -> bool:
        """Return whether the weights, which ours does not compute, are dropped by a plain dropout, and nothing reads them."""
        if self.reading.drops is None:
            return True
        dropout = getattr(module, self.reading.drops)
        if not isinstance(dropout, nn.Module):
            return isinstance(dropout, float)
        return isinstance(dropout, nn.Dropout) and not dropout._forward_hooks and not dropout._forward_pre_hooks

    @classmethod
    def size_of(cls, module: Any, reading: Reading) -> tuple[int, int]:
        """Return the number of channels of the states, and that of heads."""
        role = "query" if "query" in dict(reading.roles) else "qkv"
        channels, made = projections(module)[reading.role(role)]
        return channels, made // reading.option("width") // (1 if role == "query" else 3)

    def pairs(self, module: Any, given: dict[str, Any]) -> int:
        states = _states(given)
        positions = states.numel() // max(states.shape[0] * self.reading.channels, 1)
        return int(states.shape[0] * self.reading.heads * positions**2)

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self.positional, args, strict=False)), **kwargs}

    def counted(self, given: dict[str, Any]) -> torch.Tensor | None:
        mask = given.get(self.reading.argument(MASK) or "")
        if mask is None or mask.numel() == 0 or self.options["mask"] == ADDED:
            return None
        seen = self.seen(mask)
        seen = seen.any(-1)  # type: ignore[union-attr]  # (B, 1 or H, 1 or N)
        return seen.any(1)[..., None] if seen.shape[1] == 1 else None

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Return the arguments of a call by their roles; None if one has none, and is not at its default."""
        if len(args) > len(self.positional):
            return None
        given = self.named(args, kwargs)
        found: dict[str, Any] = {}
        for name, role in self.arguments.items():
            if name not in given and name not in self.defaults:
                return None  # for the stock forward to say so
            found[role] = given.get(name, self.defaults.get(name))
        for name, value in given.items():
            if name not in self.arguments and value is not self.defaults.get(name):
                return None
        return found

    def part(self, module: Any, role: str) -> Any:
        """Return the child or the parameter that has a role."""
        return getattr(module, self.roles[role])

    def child(self, module: Any, role: str, states: torch.Tensor) -> torch.Tensor:
        """Call the child that has a role."""
        result: torch.Tensor = self.part(module, role)(states)
        return result

    def weights_dropout(self, module: Any) -> float:
        """Return the probability with which attention weights are dropped now."""
        dropout = getattr(module, self.reading.drops) if self.reading.drops else 0.0
        if isinstance(dropout, nn.Module):
            return weights_dropout(drop_probability(dropout))
        return weights_dropout(dropout if module.training else 0.0)

    def output(self, module: Any, states: torch.Tensor) -> torch.Tensor:
        """Return the states (B, ..., H * D) behind the output's projection, and its dropout, if it has one."""
        out = self.child(module, "out", states)
        if isinstance(vars(module).get("attn"), torch.Tensor):
            module.attn = None  # the weights that stock classes leave there, (B, H, N, N)
        return getattr(module, self.reading.drops_out)(out) if self.reading.drops_out else out

    def seen(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Return the operator's mask of the stock module's: (B, N), (B, 1 or N, N) or (B, 1 or H, 1 or N, N)."""
        if mask is None or mask.numel() == 0:
            return None
        mask = mask[:, None, None] if mask.dim() == 2 else mask[:, None] if mask.dim() == 3 else mask
        means = self.options["mask"]
        return mask if means == ADDED else mask != 0 if means == SHOWN else mask == 0


def _states(given: dict[str, Any]) -> torch.Tensor:
    """Return the first states among the arguments by role."""
    return given[next(iter(STATES & given.keys()))]  # type: ignore[no-any-return]


STATES = frozenset(("query", "states"))
"""The role of the first states."""
SHOWN, HIDDEN, ADDED = "not 0 where a query sees a key", "0 where a query sees a key", "added to the scores"
"""What a mask of a stock module can mean."""


def mask_of(seen: torch.Tensor, means: str) -> torch.Tensor:
    """The mask of a stock module for what queries see, bool."""
    if means == ADDED:  # which has to broadcast to (B, H, N, N) by itself
        seen = seen[:, None] if seen.dim() == 3 else seen
        return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -1e9)
    return seen if means == SHOWN else ~seen


def taken(module: Any, reading: Reading, role: str = "query") -> int:
    """How many channels the projection with a role takes."""
    return projections(module)[reading.role(role)][0]


def with_masks(forward: Any, states: Sequence[str], *meanings: str) -> list[tuple[dict[str, str], str]]:
    """The roles that arguments of a forward may have, each with a meaning of its mask; with the first, if it has no mask."""
    roles = argument_roles(forward, states)
    return [(each, means) for each in roles for means in (meanings if MASK in each.values() else meanings[:1])]


@functools.cache
def made(kind: type[Kind], stock: type[nn.Module], reading: Reading) -> type[nn.Module]:
    """Return the class in place of a stock class that is read so: derived from it, and called as it is."""
    of = kind(stock, reading)

    @functools.wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return of.forward(self, args, kwargs)

    def set_attribute(self: Any, name: str, value: Any) -> None:
        replacement.set_attribute(stock, self, name, value)

    def reduce(self: Any, protocol: Any) -> Any:
        """As the stock class's, so that copies and files have the stock class, and what it takes to make ours of it."""
        state = self.__getstate__() if hasattr(self, "__getstate__") else vars(self)
        return _again, (stock, kind, reading), state

    attributes: dict[str, Any] = {
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        "__setattr__": set_attribute,
        "forward": forward,
        ATTRIBUTE: of,
    }
    if stock.__reduce_ex__ is object.__reduce_ex__ and stock.__reduce__ is object.__reduce__:
        attributes["__reduce_ex__"] = reduce
    metaclass: Any = type(stock)
    found: type[nn.Module] = metaclass(stock.__name__, (nn.Module,), attributes)
    found.__bases__ = (stock,)  # not from the start: a class of the user may keep a list of those derived from it
    return found


def _again(stock: type[nn.Module], kind: type[Kind], reading: Reading) -> nn.Module:
    """Return a module without attributes of the class that a copy or a file was made of; its first calls are compared."""
    found = made(kind, stock, reading)  # type: ignore[arg-type]
    return found.__new__(found)
