"""A class in place of a stock class: which calls ours computes, and how modules get their new class and lose it."""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from .._core.warn import warn_once
from . import calls
from .calls import CALLS, Calls, Compared, Verdict
from .compact import Compact, is_small, to_dense
from .comparison import first_line

ATTRIBUTE = "_triton_relattn"
"""What the class in place of a stock class has, and no other: a :class:`Replacement`."""
CHECKED, IMPLEMENTATION = "_triton_relattn_checked", "triton_relattn"
"""The attribute of a module that keeps its class, and gets ours by the attention implementation that its config names."""
MODES = "training", "_is_torch_compile"
"""Attributes that change nothing that is compared: a call's mode is part of its kind, and torch.compile sets the other."""
LIBRARY, STRUCTURE = "library", "structure"
"""How a module was found: by its class, or by its parameters, children and arguments."""

HARMLESS = frozenset(
    (
        # A relative term knows positions by their difference, and a packed batch is in the mask that they make.
        *("position_ids", "cache_position", "use_cache"),
        # If this is true, or is_causal without a mask or not the module's own, the call is the stock forward's.
        *("output_attentions", "is_causal"),
        # For the model around attention, and for the loss.
        *("output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch"),
    )
)
"""Arguments that a stock forward takes in its ``**kwargs``, which no result of its attention depends on.

Not here: cu_seq_lens_q and the like, seq_idx, block_table (packed batches without a mask), head_mask, softcap, s_aux,
sliding_window.
"""


class Match(NamedTuple):
    """A stock module with relative attention; ours, an InPlace, PassesOn or Kind, may replace it, or a reason says why not."""

    title: str
    found_by: str
    ours: Any = None
    reason: str = ""

    @property
    def passes_on(self) -> bool:
        return isinstance(self.ours, type) and issubclass(self.ours, PassesOn)


class Replacement:
    """Ours in place of a stock class's forward, for the calls that ours serves; all others are the stock forward's.

    stock: the class; ``stock_forward`` of ours may compute its calls with other functions. ours: a class derived from InPlace, or
    a Kind, whose functions are called with the module
    first. function: our forward. names: our names for the stock forward's arguments. harmless: arguments that have no effect on
    the result. mask: the stock forward's name for the mask. constants: arguments without a gradient.
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
        """Return the arguments of a call by the stock forward's names."""
        return {**dict(zip(self.positional, args, strict=False)), **kwargs}

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
        mask = given.get(self.names.get(self.mask, self.mask))
        if given.get("is_causal") and (mask is None or getattr(module, "is_causal", None) is False):  # in place of a mask
            return False
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

    def forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a call by ours or by the stock forward."""
        if calls.is_graph():
            return self.by_stock(module, args, kwargs)
        given, record = self.translate(args, kwargs), calls.record(module)
        if torch.compiler.is_compiling():  # a graph is not compared: calls before it have to be
            may_be_ours = given is not None and not has_hooks(module) and (not record.needs_comparison or record.is_compared)
            is_ours = may_be_ours and self.is_served(module, given)  # type: ignore[arg-type]
            return self.run(module, given) if is_ours else self.by_stock(module, args, kwargs)  # type: ignore[arg-type]
        record.running += 1
        try:
            if given is not None:
                pairs = int(self.ours.pairs(module, **self.pairs_takes(given)))
                tensors = (value for value in given.values() if isinstance(value, torch.Tensor))
                is_large = pairs >= self.ours.fewest or any(tensor.device.type != "cpu" for tensor in tensors)
                if is_large and self.is_served(module, given):
                    if has_hooks(module):
                        verdict = Verdict("a part of it, or torch for all modules, has hooks")
                    else:
                        verdict = calls.judge(self, module, args, kwargs, pairs)
                    if not verdict.text:
                        return self._run_or_stock(module, args, kwargs, given)
                    if not verdict.differs:
                        self._say(verdict.text)
                    else:
                        restore(module)
                        warnings.warn(
                            f"triton_relattn: {self.stock.__qualname__} differs from the stock forward in this call and uses its "
                            f"stock class again: {verdict.text}. Results of earlier calls like this one may also be wrong",
                            stacklevel=3,
                        )
            return self.by_stock(module, args, kwargs)
        finally:
            record.running -= 1

    def _run_or_stock(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: dict[str, Any]) -> Any:
        """Compute a call by ours; where that raises, by the stock forward, whose own error counts if it raises as well."""
        try:
            return self.run(module, given)
        except torch.OutOfMemoryError:  # the stock forward needs more
            raise
        except Exception as error:
            if hasattr(given.get("cache"), "update"):  # ours may have appended keys, and the stock forward would do so again
                raise
            text = f"{type(error).__name__}: {first_line(error)}"
        result = self.by_stock(module, args, kwargs)
        self._say(f"ours raises {text}", 5)
        return result

    def _say(self, reason: str, stacklevel: int = 4) -> None:
        """Say once why calls are not computed by ours."""
        about = f"calls of {self.stock.__qualname__} like this one are computed by its stock forward, because {reason}"
        warn_once(about, f"triton_relattn: {about}", stacklevel, UserWarning)

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


def has_hooks(module: nn.Module) -> bool:
    """Return whether a part of a module, or torch for all modules, has hooks: they may read or change what ours does not
    compute."""
    if _global_forward_hooks or _global_forward_pre_hooks:
        return True
    children = [child for child in module._modules.values() if child is not None]
    return any(child._forward_hooks or child._forward_pre_hooks or has_hooks(child) for child in children)


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


class PassesOn:
    """Mixin of classes in place of those of modules that only pass masks or positions on to attention."""

    passes_on = True
    stock_class: type[nn.Module]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return an attribute of the stock class."""

    def on_enable(self) -> None:
        """Change the module when it gets this class."""

    def on_disable(self) -> None:
        """Undo that."""

    def __setstate__(self: Any, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        for module in self.modules():
            if getattr(module, "passes_on", False):
                link_encoder(module, self.modules())


def link_encoder(encoder: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Have attention among modules know what passes small masks on to it."""
    for module in modules:
        if (record := vars(module).get(CALLS)) is not None and not getattr(module, "passes_on", False):
            record.encoders.append(weakref.ref(encoder))


def _enabled_class(stock: Any, ours: Any, layout: Any) -> type[nn.Module]:
    """Return the class in place of a stock class: derived from it and from ours, and called as it is. layout: of a Kind."""

    def reduce(self: Any, protocol: Any) -> Any:
        """As the stock class's, so that copies and files have the stock class, and what it takes to make ours of it."""
        state = self.__getstate__() if hasattr(self, "__getstate__") else vars(self)
        return _new_instance, (stock, ours, layout), state

    attributes: dict[str, Any] = {name: getattr(stock, name) for name in ("__module__", "__qualname__", "__doc__")}
    if stock.__reduce_ex__ is object.__reduce_ex__ and stock.__reduce__ is object.__reduce__:
        attributes["__reduce_ex__"] = reduce
    if issubclass(ours, PassesOn):
        attributes["stock_class"] = stock
    else:
        replacement: Replacement = ours.replacement(stock, layout)

        @functools.wraps(stock.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return replacement.forward(self, args, kwargs)

        def set_attribute(self: Any, name: str, value: Any) -> None:
            """Set an attribute as the stock class does, and have the next calls compared."""
            stock.__setattr__(self, name, value)
            if name not in MODES and (record := vars(self).get(CALLS)) is not None:
                record.changed()

        attributes |= {ATTRIBUTE: replacement, "forward": forward, "__setattr__": set_attribute}
    metaclass: Any = type(stock)
    if layout is None:
        return metaclass(stock.__name__, (ours, stock), attributes)  # type: ignore[no-any-return]
    found: type[nn.Module] = metaclass(stock.__name__, (nn.Module,), attributes)
    found.__bases__ = (stock,)  # not from the start: a class of the user may keep a list of those derived from it
    return found


enabled_class: Callable[[Any, Any, Any], type[nn.Module]] = functools.cache(_enabled_class)


def _new_instance(stock: type[nn.Module], ours: Any, layout: Any) -> nn.Module:
    """Return a module without attributes, for a copy or a file; its first calls are compared."""
    found = enabled_class(stock, ours, layout)
    return found.__new__(found)


def is_switched(module: nn.Module) -> bool:
    """Return whether a module's config names our attention implementation."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None) == IMPLEMENTATION


def stock_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the stock class of an enabled module; None if it is not enabled."""
    if CHECKED in vars(module) and is_switched(module):
        return type(module)
    if (replacement := getattr(type(module), ATTRIBUTE, None)) is not None:
        return replacement.stock  # type: ignore[no-any-return]
    return module.stock_class if isinstance(module, PassesOn) else None


def change_classes(
    classes: dict[str, type], modules: dict[str, nn.Module], checks: Mapping[str, tuple[bool, bool]], compared: Compared
) -> None:
    """Give modules their new classes: all of them, or none if one raises. checks: whether their calls are compared, and whether
    they are known by their structure alone; compared: where calls are counted."""
    changed: list[nn.Module] = []
    try:
        for name, ours in classes.items():
            module = modules[name]
            changed.append(module)
            if getattr(ours, "is_switched", False):
                ours.switch(module)  # type: ignore[attr-defined]
            else:
                module.__class__ = ours
            if getattr(ours, "is_switched", False) or ATTRIBUTE in vars(ours):
                vars(module)[CALLS] = Calls(*checks[name], name, compared)
            if isinstance(module, PassesOn):
                module.on_enable()
        for module in changed:
            if getattr(module, "passes_on", False):
                link_encoder(module, module.modules() if isinstance(module, PassesOn) else changed)
    except BaseException:
        for module in changed:
            restore(module)
        raise


def restore(module: Any) -> None:
    """Give an enabled module its stock class back; also what passes small masks on to it, since those are for ours alone."""
    stock = stock_class(module)
    if stock is None:
        return
    if (checked := vars(module).pop(CHECKED, None)) is not None:
        vars(module).pop(CALLS, None)
        module.config._attn_implementation = checked.before
        return
    if isinstance(module, PassesOn):
        module.on_disable()
    for reference in getattr(vars(module).pop(CALLS, None), "encoders", ()):
        if (encoder := reference()) is not None:
            restore(encoder)
    mark = "stock_class" if isinstance(module, PassesOn) else ATTRIBUTE  # of our class
    own = type(module)
    if mark in vars(own):
        module.__class__ = stock
    else:  # torch.nn.utils.parametrize or FSDP2 has given it a class derived from ours
        own.__bases__ = tuple(stock if mark in vars(base) else base for base in own.__bases__)
