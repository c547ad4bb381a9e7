"""What all kinds share: how a stock module is read, what its forward shows, arguments of a comparison, the class in its place."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from ..comparison import Refused as Refused
from ..comparison import Sample, cloned_arguments, described, model_dtype, run, values
from ..in_place import FEWEST
from ..in_place import padded as padded
from ..operators import drop_probability, split_heads
from ..replacement import Ours, Replacement
from ..shadow import copied, projections
from .roles import MASK, POSITIONS, argument_roles

SHOWN, HIDDEN, ADDED = "not 0 where a query sees a key", "0 where a query sees a key", "added to the scores"
"""What a mask of a stock module can mean."""
LOW = -1e4
"""A number that hides a key if it is added to its score."""
OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that torch's own class has."""
PLAIN = bool, int, float, str
HOLDERS = list, dict, set, OrderedDict, deque, defaultdict, Counter


@dataclass(frozen=True)
class Layout:
    """How a stock module is read: what its attributes and arguments stand for. A comparison has to confirm it.

    roles, arguments: names of attributes and arguments, each with its role. options: what else the kind has to know. channels: of
    the states. drops: the child that drops attention weights, or the attribute that has the probability; drops_out: the child
    that drops elements of the output. returns: what is in the tuple that the forward returns; empty: it returns a tensor.
    """

    roles: tuple[tuple[str, str], ...]
    arguments: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, Any], ...]
    channels: int
    heads: int
    drops: str | None = None
    drops_out: str | None = None
    returns: tuple[str, ...] = ()

    def argument(self, role: str) -> str | None:
        """Return the name of the argument with this role."""
        return next((name for name, its_role in self.arguments if its_role == role), None)

    def __str__(self) -> str:
        has_mask = self.argument(MASK) is not None
        return ", ".join(f"{name}: {value}" for name, value in self.options if name != MASK or has_mask)


Reading = tuple[dict[str, str], dict[str, tuple[Any, ...]]]
"""Names of a module's attributes by role, and what each option may be, the likeliest first."""


class Kind(Ours):
    """A way in which attention is relative, for a stock class with a layout: :meth:`compute` takes the place of its forward.

    Its arguments come by role. It computes the calls that it :meth:`serves`; all others are the stock forward's. The class in
    place of the stock class has no attributes but the Replacement with this object, so that no name of a user's module is taken.
    """

    title: ClassVar[str]
    state_roles: ClassVar[tuple[str, ...]] = ("states",)
    """The roles of the first arguments."""
    meanings: ClassVar[tuple[str, ...]] = (SHOWN, HIDDEN)
    """What a mask may mean; none: a forward with a mask is of another kind."""
    fewest = FEWEST
    lacks_weights = False
    keeps: ClassVar[tuple[str, ...]] = ("attn",)
    """Attributes where stock forwards leave attention weights, of which ours leaves None."""

    def __init__(self, stock: type[nn.Module], layout: Layout) -> None:
        self.stock, self.layout = stock, layout
        self.roles, self.options = dict(layout.roles), dict(layout.options)
        self.casts = (*self.state_roles, POSITIONS)

    @classmethod
    def read(cls, module: nn.Module) -> Reading | None:
        """Return how a module may be read; None: it is of another kind. Refused: it is, and cannot be served."""
        raise NotImplementedError

    @classmethod
    def channels(cls, module: nn.Module, roles: dict[str, str]) -> tuple[int, int]:
        """Return the width of the states, and of the heads together."""
        role = next(role for role in ("query", "qkv", "out") if role in roles)
        channels, projected = projections(module)[roles[role]]
        return channels, projected // (3 if role == "qkv" else 1)

    @classmethod
    def arguments(cls, forward: Any) -> Iterator[dict[str, str]]:
        """Yield the roles that a forward's arguments may have."""
        for roles in argument_roles(forward, cls.state_roles):
            if cls.meanings or set(roles.values()) == set(cls.state_roles):
                yield roles

    @classmethod
    def layouts(cls, module: nn.Module) -> Iterator[Layout]:
        """Yield how a module may be read; nothing if it is not of this kind."""
        if (reading := cls.read(module)) is None:
            return
        roles, choices = reading
        channels, projected = cls.channels(module, roles)
        for arguments in cls.arguments(type(module).forward):
            meanings = cls.meanings if MASK in arguments.values() else (None,)
            for chosen in itertools.product(*choices.values(), meanings):
                options = dict(zip([*choices, MASK], chosen, strict=True))
                heads = projected // options["width"]
                yield Layout(tuple(roles.items()), tuple(arguments.items()), tuple(options.items()), channels, heads)

    @classmethod
    def candidates(cls, module: Any, model: Any) -> Iterator[tuple[str, Callable[[], Replacement]]]:
        """Yield descriptions of the replacements for a module, and functions that return them. model: its shadow."""
        stock = type(module)
        for layout in cls.layouts(module):
            yield f" (read as {layout})", lambda layout=layout: cls.replacement(stock, observed(cls, layout, model))  # type: ignore[misc]

    @classmethod
    def replacement(cls, stock: type[nn.Module], layout: Layout) -> Replacement:
        """Return ours in place of a stock class with a layout."""
        kind: Any = cls(stock, layout)
        return Replacement(stock, kind, kind.compute, dict(layout.arguments), mask=layout.argument(MASK) or "")

    # Arguments of a comparison.

    def sizes(self, module: Any) -> Iterable[tuple[int, int]]:
        """Return batches and lengths that are compared, the smallest that tell layouts apart first."""
        raise NotImplementedError

    def states(self, batch: int, length: int) -> torch.Tensor:
        return self.swap(torch.randn(batch, length, self.layout.channels))

    def masks(self, batch: int, length: int) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield masks of the stock module, each with its name: the one for a count of memory first."""
        yield "", None
        yield " with padding", self.stock_mask(padded(batch, length))

    def stock_mask(self, visible: torch.Tensor) -> torch.Tensor:
        """Return the mask of the stock module for what queries see, bool."""
        means = self.options[MASK]
        if means == ADDED:  # which has to broadcast to (B, H, N, N) by itself
            visible = visible[:, None] if visible.dim() == 3 else visible
            return torch.zeros(visible.shape).masked_fill(~visible, -1e9)
        return visible if means == SHOWN else ~visible

    def example(self, module: Any, batch: int, length: int, mask: torch.Tensor | None) -> dict[str, Any]:
        """Return arguments of the stock forward."""
        given: dict[str, Any] = {
            name: self.states(batch, length) for name, role in self.layout.arguments if role in self.state_roles
        }
        name = self.layout.argument(MASK)
        return given if name is None or mask is None else {**given, name: mask}

    def samples(self, module: Any, is_light: bool) -> Iterator[Sample]:
        for batch, length in self.sizes(module):
            masks = self.masks(batch, length) if self.layout.argument(MASK) else [("", None)]
            for name, mask in masks:
                given = self.example(module, batch, length, mask)
                yield Sample(f"{batch} sequences of {length}{name}", given, (length, length))

    def at_length(self, module: Any, length: int, parent: Any) -> dict[str, Any]:
        return self.example(module, 1, length, next(self.masks(1, length))[1])

    @classmethod
    def prepare_model(cls, model: Any) -> None:
        """Give the dropout modules of a shadow different probabilities, so that none is taken for another."""
        for number, dropout in enumerate(child for child in model.modules() if isinstance(child, nn.Dropout)):
            dropout.p = 0.05 * (number % 15 + 1)

    def without_dropout(self, module: Any) -> None:
        pass

    # Calls.

    def serves(self, module: Any, **given: Any) -> bool:
        """Return whether a call, its arguments by role, is one that was compared."""
        drops, mask = getattr(module, self.layout.drops) if self.layout.drops else 0.0, given.get(MASK)
        if mask is not None and self.options[MASK] == ADDED and not mask.is_floating_point():  # a boolean mask that is added
            return False
        return isinstance(drops, (nn.Dropout, float)) and self.accepts(module, **given)

    def accepts(self, *args: Any, **given: Any) -> bool:
        """Return whether the shapes of a call are among those that were compared."""
        raise NotImplementedError

    def compute(self, *args: Any, **given: Any) -> Any:
        """Compute what the stock forward returns."""
        raise NotImplementedError

    def passed_on(self, module: Any, result: Any, given: dict[str, Any]) -> Any:
        """Return a result in a tuple as the stock forward has it."""
        more = self.layout.returns[1:]
        return (result, *(None for _ in more)) if isinstance(result, torch.Tensor) and self.layout.returns else result

    def pairs(self, module: Any, **given: Any) -> int:
        states = self.swap(given["states"] if "states" in given else given["query"])
        positions = states.numel() // max(states.shape[0] * self.layout.channels, 1)
        return int(states.shape[0] * self.layout.heads * positions**2)

    def one_sequence(self, arguments: dict[str, Any], pairs: int) -> tuple[dict[str, Any], int] | None:
        """Return the arguments of the first sequence alone, by the stock forward's names, and its pairs; None if there is one, or
        sequences are not the first dimension."""
        states = next(arguments[name] for name, role in self.layout.arguments if role in self.state_roles)
        if (batch := states.shape[0]) <= 1 or 0 in (self.options.get("swapped") or ()):
            return None
        tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor) and value.dim() > 1}
        return arguments | {name: value[:1] for name, value in tensors.items() if value.shape[0] == batch}, pairs // batch

    def num_positions(self, given: dict[str, Any]) -> None:
        """A mask has no more positions than the output."""

    def counted(self, mask: torch.Tensor) -> torch.Tensor | None:
        visible: Any = self.attn_mask(mask)
        visible = (visible > LOW if visible.is_floating_point() else visible).any(-1)  # (B, 1 or H, 1 or N)
        return self.swap(visible.any(1)[..., None]) if visible.shape[1] == 1 else None

    def part(self, module: Any, role: str) -> Any:
        """Return the child or the parameter that has a role."""
        return getattr(module, self.roles[role])

    def swap(self, states: torch.Tensor) -> torch.Tensor:
        """Return states (B, N, C) as the stock module has them, or the other way round."""
        swapped = self.options.get("swapped")
        return states.transpose(*swapped) if swapped else states

    def project(self, module: Any, **states: torch.Tensor) -> list[torch.Tensor]:
        """Return heads (B, H, N, D) by the projections with these roles."""
        return [split_heads(self.swap(self.part(module, role)(value)), self.options["width"]) for role, value in states.items()]

    def attn_mask(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Return the operator's mask of the stock module's: (B, N), (B, 1 or N, N) or (B, 1 or H, 1 or N, N)."""
        if mask is None or mask.numel() == 0:
            return None
        mask = mask[:, None, None] if mask.dim() == 2 else mask[:, None] if mask.dim() == 3 else mask
        means = self.options[MASK]
        return mask if means == ADDED else mask != 0 if means == SHOWN else mask == 0

    def dropout_p(self, module: Any) -> float:
        """Return the probability with which attention weights are dropped now."""
        drops = getattr(module, self.layout.drops) if self.layout.drops else 0.0
        return drop_probability(drops) if isinstance(drops, nn.Module) else drops if module.training else 0.0

    def output(self, module: Any, states: torch.Tensor) -> torch.Tensor:
        """Return the states (B, ..., H * D) behind the output's projection, and its dropout, if it has one."""
        out: torch.Tensor = self.part(module, "out")(self.swap(states))
        if isinstance(vars(module).get("attn"), torch.Tensor):
            module.attn = None  # the weights that stock classes leave there, (B, H, N, N)
        return getattr(module, self.layout.drops_out)(out) if self.layout.drops_out else out


def hides_future(mask: torch.Tensor, visible: Any) -> bool:
    """Return whether a mask hides all keys behind each query; visible: the operator's mask of it, of which the last query is at
    the last key. A compiler cannot know, nor can a tensor without values.
    """
    if torch.compiler.is_compiling() or type(mask) is not torch.Tensor:
        return False
    if mask.is_meta:  # memory is counted
        return True
    queries, keys = visible.shape[-2:]
    future = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).triu_(1 + keys - queries)
    return not bool(((visible > LOW if visible.is_floating_point() else visible) & future).any())


def observed(kind: type[Kind], layout: Layout, model: Any) -> Layout:
    """Return a layout with what a shadow drops and returns; raise Refused if what it computes depends on calls before."""
    stock = type(model)
    replacement = kind.replacement(stock, layout)
    sample = next(replacement.ours.samples(model, False))
    model, shapes, probabilities = copied(model), dict[str, torch.Size](), list[float]()
    dropouts = {name: child for name, child in model.named_children() if isinstance(child, nn.Dropout)}
    for name, child in dropouts.items():
        child.register_forward_pre_hook(lambda _, given, name=name: shapes.__setitem__(name, given[0].shape))
    for training in (True, False):
        model.train(training)
        runs, states = [], []
        with torch.no_grad():
            dtype = model_dtype(model)
            for _ in range(2):  # the first one may fill a cache
                runs.append(run(replacement, model, cloned_arguments(sample, dtype), False, dtype))
                states.append(_state(model))
        before, after = states
        returned = runs[0][0]
        returns = described(returned, sample)
        probabilities += runs[0][1]
        changed = [name for name in {**before, **after} if name not in kind.keeps and before.get(name) != after.get(name)]
        if changed or not torch.equal(*(values(out)[0] for out, _ in runs)):
            what = ", ".join(changed) or "something on which what it computes next depends"
            raise Refused(f"its forward changes {what}, which ours does not")
    weights = [name for name, shape in shapes.items() if len(shape) >= 3 and shape[-2:] == sample.pairs]
    weights = weights or [name for name in dropouts if name not in shapes]  # torch's fused attention takes its probability
    weights = weights or [name for name, value in vars(model).items() if type(value) is float and value in probabilities]
    size = values(returned)[0].numel()
    others = [name for name, shape in shapes.items() if name not in weights and shape.numel() == size]
    return replace(layout, drops=next(iter(weights), None), drops_out=next(iter(others), None), returns=returns)


def _state(model: nn.Module) -> dict[str, Any]:
    """Return what a forward may change, by name: the attributes of a module and its children, what lists and objects among them
    hold, how often buffers were changed, and globals of their files that hold other objects."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        found |= {prefix + name: _held(value) for name, value in vars(module).items() if name not in OF_MODULES}
        found |= {prefix + name: buffer._version for name, buffer in module._buffers.items() if buffer is not None}
    for function in (value for base in type(model).__mro__ for value in vars(base).values() if inspect.isfunction(value)):
        if not (function.__module__ or "").startswith("torch."):
            names = set(function.__code__.co_names) & function.__globals__.keys()
            found |= {name: _held(function.__globals__[name]) for name in names if type(function.__globals__[name]) in HOLDERS}
    return found


def _held(value: Any, depth: int = 2) -> Any:
    """Return what tells whether a value was changed: numbers themselves, the identity of others, and of what these hold."""
    if isinstance(value, PLAIN):
        return value
    items: Iterable[Any] = ()
    if type(value) in HOLDERS:
        items = itertools.chain.from_iterable(value.items()) if isinstance(value, dict) else value
    elif not isinstance(value, (torch.Tensor, nn.Module, type)):
        items = getattr(value, "__dict__", {}).values()
    return id(value), *(_held(item, depth - 1) for item in items if depth > 0)
