"""What all kinds share: a class in front of the stock class whose forward it takes over, and how the stock module is read."""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from ..._core.untraced import untraced
from ..heads import drop_probability
from . import sources
from .roles import MASK, argument_roles, projections, widths
from .state import ATTRIBUTE, State, name_of, state_of


class Refused(Exception):
    """A module is of a kind, and is left as it is; the message says why."""


class Sample(NamedTuple):
    """Arguments of a forward, to compare two with.

    name: for messages. given: by the stock forward's names. pairs: how many queries and keys there are. counts: positions of the
    output that are compared, as bool, with as many dimensions as the output; None: all.
    """

    name: str
    given: dict[str, Any]
    pairs: tuple[int, int]
    counts: torch.Tensor | None = None


@dataclass(frozen=True)
class Reading:
    """How a stock module is read: what its attributes and arguments stand for. A proof has to confirm it.

    roles: attributes by role. arguments: roles by the name of the forward's argument. options: whatever else a kind has to know.
    drops: the child that drops attention weights; drops_out: the one that drops numbers of the output. returns: what is in the
    tuple that the forward returns, "tensor" or "None" each; empty: it returns a tensor. state: a name for the module's state,
    without what a forward leaves there; see state.py. left: names of that.
    """

    roles: tuple[tuple[str, str], ...]
    arguments: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, Any], ...] = ()
    drops: str | None = None
    drops_out: str | None = None
    returns: tuple[str, ...] = ()
    state: str = ""
    left: tuple[str, ...] = ()

    def option(self, name: str) -> Any:
        return dict(self.options)[name]

    def role(self, name: str) -> str:
        return dict(self.roles)[name]

    def argument(self, role: str) -> str | None:
        """The name of the argument with this role."""
        return next((name for name, each in self.arguments if each == role), None)


class Kind:
    """A way in which attention is relative, and a stock class that is of it: :meth:`compute` in place of the stock forward.

    It computes the calls that it :meth:`serves`. All others are the stock forward's: arguments without a role that are not at
    their defaults, shapes that were not proven, a module in another state, and on a CPU so few scores that the stock
    forward is faster.

    title: the kind's name, for the report. The class in place of the stock class has no attributes but ``ATTRIBUTE``, which is
    this object, so that none can have the name of one of the stock module's. noted: in a proof no weights are dropped, and the
    probabilities of it are noted here.
    """

    title: ClassVar[str]
    fewest: ClassVar[int] = 1 << 19
    """Scores of a call on a CPU from which on ours is no slower than the stock forward, which keeps all smaller calls. Measured
    with the packages of docs/enable.md, 1 and 8 sequences of 32 to 512 positions: below it was faster, by up to a factor of two.
    """

    def __init__(self, stock: type[nn.Module], reading: Reading) -> None:
        signature = list(inspect.signature(stock.forward).parameters.values())[1:]
        self.stock, self.reading = stock, reading
        self.roles, self.options, self.arguments = dict(reading.roles), dict(reading.options), dict(reading.arguments)
        self.positional = tuple(each.name for each in signature if each.kind is each.POSITIONAL_OR_KEYWORD)
        self.defaults = {each.name: each.default for each in signature if each.default is not each.empty}
        self.noted: list[float] | None = None
        self.states = weakref.WeakKeyDictionary[Any, State]()

    @classmethod
    def readings(cls, module: nn.Module) -> Iterator[Reading]:
        """How a module may be read; nothing if it is not of this kind.

        Raises:
            Refused: it is, and no reading can serve it.
        """
        raise NotImplementedError

    @classmethod
    def samples(cls, module: Any, reading: Reading) -> Iterator[Sample]:
        """Arguments for the proof, the smallest ones that tell readings apart first."""
        raise NotImplementedError

    @classmethod
    def at_length(cls, module: Any, reading: Reading, length: int, parent: Any) -> dict[str, Any]:
        """Arguments of one sequence of this length, without values: on the device "meta". parent: the module around it."""
        return {reading.argument("states"): torch.empty(1, length, taken(module, reading), device="meta")}  # type: ignore[dict-item]

    @classmethod
    def words(cls, reading: Reading) -> str:
        """What a reading takes for granted, for messages."""
        has_mask = reading.argument("mask") is not None
        return ", ".join(f"{name}: {value}" for name, value in reading.options if name != "mask" or has_mask)

    @classmethod
    def prepare(cls, model: Any) -> None:
        """Take from a copy for the proof what the module it is of has kept of earlier calls."""

    def serves(self, *args: Any, **given: Any) -> bool:
        """Whether a call of a module, its arguments by role, is one that the proof was of."""
        raise NotImplementedError

    def compute(self, *args: Any, **given: Any) -> Any:
        """What the stock forward returns."""
        raise NotImplementedError

    def forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = self._by_role(args, kwargs)
        if given is None or not self._is_as_proven(module) or self._is_small(module, given) or not self.serves(module, **given):
            return self.stock.forward(module, *args, **kwargs)
        mask = given.get(MASK)
        if mask is not None and not self._takes(mask, given):
            return self.stock.forward(module, *args, **kwargs)
        result = self.compute(module, **given)
        alone = isinstance(result, torch.Tensor) and self.reading.returns and set(self.reading.returns[1:]) <= {"None"}
        return (result, *(None for _ in self.reading.returns[1:])) if alone else result

    def _takes(self, mask: torch.Tensor, given: dict[str, Any]) -> bool:
        """Whether a mask is one of those that the proof was of: the operator gives it no gradient, and adds no truth values."""
        if mask.requires_grad or (self.options.get("mask") == ADDED and not mask.is_floating_point()):
            return False
        return mask.dim() != 2 or mask.shape[0] == _states(given).shape[0]

    def _is_as_proven(self, module: Any) -> bool:
        """Whether the module is as the proof was of, and nothing watches the weights that ours does not make."""
        if self.noted is None and not _is_in_state(self, module):
            return False
        if self.reading.drops is None:
            return True
        dropout = getattr(module, self.reading.drops)
        return isinstance(dropout, nn.Dropout) and not dropout._forward_hooks and not dropout._forward_pre_hooks

    def _is_small(self, module: Any, given: dict[str, Any]) -> bool:
        """Whether a call has so few scores that the stock forward is faster."""
        states = _states(given)
        if self.noted is not None or states.device.type != "cpu":
            return False
        channels, made = widths(self.part(module, next(role for role in ("query", "qkv") if role in self.roles)))  # type: ignore[misc]
        heads = made // self.options["width"] // (1 if "query" in self.roles else 3)
        positions = states.numel() // (states.shape[0] * channels)
        return bool(states.shape[0] * heads * positions**2 < self.fewest)

    def _by_role(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """The arguments of a call by their roles; None if one has none, and is not at its default."""
        if len(args) > len(self.positional):
            return None
        given = {**dict(zip(self.positional, args, strict=False)), **kwargs}
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
        """The child or the parameter that has a role."""
        return getattr(module, self.roles[role])

    def child(self, module: Any, role: str, states: torch.Tensor) -> torch.Tensor:
        """Call the child that has a role."""
        result: torch.Tensor = self.part(module, role)(states)
        return result

    def weights_dropout(self, module: Any) -> float:
        """The probability with which attention weights are dropped now."""
        p = drop_probability(getattr(module, self.reading.drops)) if self.reading.drops else 0.0
        if self.noted is None:
            return p
        if p > 0:
            self.noted.append(p)
        return 0.0

    def output(self, module: Any, states: torch.Tensor) -> torch.Tensor:
        """The states (B, ..., H * D) behind the output's projection, and its dropout, if it has one."""
        out = self.child(module, "out", states)
        if "attn" in vars(module):
            module.attn = None  # the weights that stock classes leave there, (B, H, N, N)
        return getattr(module, self.reading.drops_out)(out) if self.reading.drops_out else out

    def seen(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """The operator's mask of the stock module's: (B, N), (B, 1 or N, N) or (B, 1 or H, 1 or N, N)."""
        if mask is None or mask.numel() == 0:
            return None
        mask = mask[:, None, None] if mask.dim() == 2 else mask[:, None] if mask.dim() == 3 else mask
        means = self.options["mask"]
        return mask if means == ADDED else mask != 0 if means == SHOWN else mask == 0


def _states(given: dict[str, Any]) -> torch.Tensor:
    """The first states among the arguments by role."""
    return given[next(iter(STATES & given.keys()))]  # type: ignore[no-any-return]


@untraced
def _is_in_state(of: Kind, module: Any) -> bool:
    """Whether a module is in the state that was proven. A compiler asks once, while it traces."""
    left = of.reading.left
    now = {name: value for name, value in state_of(module, exact=False).items() if name not in left}
    if of.states.get(module) == now:
        return True
    if not any(each.is_meta for each in module.parameters()) and name_of(state_of(module), left) != of.reading.state:
        return False
    of.states[module] = now
    return True


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


def padded(batch: int, length: int) -> torch.Tensor:
    """Which positions of sequences are real (B, N), bool: at least half of each one's, and one."""
    return torch.arange(length) < torch.randint(max(length // 2, 1), length + 1, (batch,))[:, None]


def with_masks(forward: Any, states: Sequence[str], *meanings: str) -> list[tuple[dict[str, str], str]]:
    """The roles that arguments of a forward may have, each with a meaning of its mask; with the first, if it has no mask."""
    roles = argument_roles(forward, states)
    return [(each, means) for each in roles for means in (meanings if MASK in each.values() else meanings[:1])]


@functools.cache
def made(kind: type[Kind], stock: type[nn.Module], reading: Reading) -> type[nn.Module]:
    """Return the class in place of a stock class that is read so: derived from it, and called as it is."""
    return class_of(kind(stock, reading))


def class_of(of: Kind) -> type[nn.Module]:
    """Return a new class in place of the stock class of a kind."""
    kind, stock, reading = type(of), of.stock, of.reading

    @functools.wraps(stock.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return of.forward(self, args, kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        """As the stock class's, so that copies and files have the stock class, and what it takes to make ours of it."""
        state = self.__getstate__() if hasattr(self, "__getstate__") else vars(self)
        return _again, (stock, kind, reading, sources.of_class(stock)), state  # type: ignore[arg-type]

    attributes = {
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        "__reduce_ex__": reduce,
        "forward": forward,
        ATTRIBUTE: of,
    }
    return type(stock.__name__, (stock,), attributes)


def kind_in(module: nn.Module) -> Kind | None:
    """The kind in whose class a module is now; None if it is not enabled by its structure."""
    return vars(type(module)).get(ATTRIBUTE)


def _again(stock: type[nn.Module], kind: type[Kind], reading: Reading, source: str | None) -> nn.Module:
    """A module without attributes of the class that a copy or a file was made of."""
    if sources.of_class(stock) == source:  # type: ignore[arg-type]
        stock = made(kind, stock, reading)  # type: ignore[arg-type]
    else:
        warnings.warn(
            f"{stock.__qualname__} is another than when it was saved: it was loaded as it is, not enabled", stacklevel=2
        )
    return stock.__new__(stock)  # type: ignore[no-any-return]
