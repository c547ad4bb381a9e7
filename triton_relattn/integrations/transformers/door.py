"""transformers' own door: ``model.set_attn_implementation("triton_relattn")``.

Classes and forwards stay the stock ones. A model's config names the implementation of attention, and transformers looks two
functions up by that name: :func:`mask` and :func:`attention`. A stock function that makes a dense bias (B, H, Nq, Nk) before
attention gives its place to one of ours (:func:`serve`), which makes the operator's arguments instead: a Compact table that T5's
layers pass on, or a :class:`Term`. Ours runs where the config names us; in all other models the stock function does.

Each module is compared once, by ``enable`` or in its first call: the stock forward with eager attention, and with ours. A module
that differs has eager attention from then on, as have calls that ask for attention weights, graphs (torch.export, ONNX) and,
on a CPU, calls with few scores. Whatever small form such a call got becomes dense, so nothing else has to know who computes.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..._core.warn import first_line, warn, warn_once
from ...positions import RelativePositions
from ..calls import CALLS, is_graph, judge
from ..compact import Compact, are_plain, rows, to_dense
from ..comparison import Refused, compare
from ..enabled import CHECKED, FEWEST, IMPLEMENTATION, is_switched, ours_or_stock
from ..in_place import MASKS, num_heads
from ..libraries import installed_version
from ..operators import fused_relative_attention
from ..packing import PackedMask
from ..replacement import HARMLESS, Replacement
from .base import Attention, additive_mask, wants_weights
from .masks import real_keys, stock_mask, with_dense

SERVED: dict[type, Comparison] = {}
"""The stock classes that go through the door, and the two ways to compute their forwards, to compare them."""
SHADOWS: dict[type, type] = {}
"""By stock class, the class of its instances that are compared, which are in SERVED as well."""
MODEL_TYPES: set[str] = set()
"""Of the configs for whose models masks are small."""


@dataclass
class Checked:
    """That a module was compared; in its attribute ``CHECKED``. Its file has to be imported to load a pickle of it.

    reason: why attention is eager's; nothing if ours computes the same. before: the implementation that ``disable`` puts back.
    """

    reason: str = ""
    before: str = "sdpa"


class Term(NamedTuple):
    """A relative term that is not computed yet. ours: returns the query and the operator's arguments; stock: the query and the
    dense bias. Both take the arguments of the stock function."""

    ours: Callable[..., Any]
    stock: Callable[..., Any]
    arguments: tuple[Any, ...]


class Call(NamedTuple):
    """A call of attention. options: of any attention function of transformers, scaling and dropout among them."""

    module: Any
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: Any
    position_bias: Any
    is_causal: bool
    options: dict[str, Any]


def is_ours(module: Any) -> bool:
    """Return whether ours computes attention of a module; before its first call it is compared."""
    if not is_switched(module) or type(module) not in SERVED or is_graph() or wants_weights(module):
        return False
    checked: Checked | None = getattr(module, CHECKED, None)
    if checked is None and torch.compiler.is_compiling():
        return _say_that_graphs_are_eager()
    return not (_check(module) if checked is None else checked).reason


@torch.compiler.assume_constant_result
def _say_that_graphs_are_eager() -> bool:
    """Say, while a graph is traced, that it has eager attention: forwards cannot be compared meanwhile."""
    about = "a graph of modules that were not compared has eager attention"
    cure = "call the model once before torch.compile, or triton_relattn.enable(model)"
    warn_once(about, f"triton_relattn: {about}: {cure}", UserWarning)
    return False


def _check(module: Any) -> Checked:
    """Compare a module, and keep what was found."""
    checked, replacement = Checked(), SERVED[type(module)]
    try:
        compare(module, replacement.ours, replacement if replacement.is_known else None)
        replacement.is_known = True
    except Exception as error:  # a module of the user may raise anything
        checked.reason = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {first_line(error)}"
        about = f"attention of {type(module).__qualname__} stays eager's: {checked.reason}"
        warn_once(about, f"triton_relattn: {about}", UserWarning)
    vars(module)[CHECKED] = checked
    return checked


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Any = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention of a module: query (B, H, Nq, D), key and value (B, H, Nk, D); returns (B, Nq, H, D), and no weights.

    position_bias: a Term; a table (H, R), Compact or, under torch.compile, plain; or dense, which is eager's unless it is the
    same for all keys. attention_mask: what mask() returns, or a user's own, which says all that is hidden.
    """
    is_causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    options = {"scaling": scaling, "dropout": dropout, **kwargs}
    call = Call(module, query, key, value, attention_mask, position_bias, is_causal, options)
    # No model of transformers passes on None where the future is hidden, but for a graph, in which masks are plain.
    is_unclear = attention_mask is None and is_causal and not are_plain()
    is_trained = isinstance(attention_mask, torch.Tensor) and attention_mask.requires_grad
    small = _small(position_bias)
    is_dense = isinstance(small, torch.Tensor) and small.dim() > 2 and small.shape[-1] > 1  # else it is the same for all keys
    if is_unclear or is_trained or is_dense or kwargs.get("output_attentions") or not is_ours(module):
        return _by_stock(call)
    if torch.compiler.is_compiling():
        return _by_ours(call)
    fewest = vars(module).get(FEWEST, ThroughTheDoor.fewest)
    if query.device.type == "cpu" and query.shape[:3].numel() * key.shape[2] < fewest:  # eager attention is faster
        return _by_stock(call)
    about = f"attention of {type(module).__qualname__} in calls like this one is eager's, because"
    return ours_or_stock(
        partial(_by_ours, call),
        partial(_by_stock, call),
        lambda text: warn_once(f"{about} {text}", f"triton_relattn: {about} {text}", UserWarning),
    )


def _by_ours(call: Call) -> tuple[torch.Tensor, None]:
    """Compute attention by the operator."""
    module, query, key, value, mask, position_bias, is_causal, options = call
    queries, keys, small = query.shape[2], key.shape[2], _small(position_bias)
    term: dict[str, Any] = {}
    if isinstance(position_bias, Term):
        query, term = position_bias.ours(module, query, key, *position_bias.arguments)
    elif small is not None and small.dim() == 2:
        term = {"rel_bias": small, "positions": _positions(module)}
    if isinstance(mask, PackedMask):
        is_causal, mask = False, mask.small
    elif isinstance(mask, Keys) and not mask.is_written:
        is_causal, mask = isinstance(mask, CausalKeys), mask.small
    elif mask is not None:
        is_causal = False
    if keys > queries and (is_causal or "positions" in term):  # queries behind the keys of a cache
        term["query_offset"] = keys - queries
    mask = mask if is_causal else additive_mask(mask, query.dtype)
    term = {"scale": options["scaling"], **term}
    out = fused_relative_attention(query, key, value, attn_mask=mask, is_causal=is_causal, dropout_p=options["dropout"], **term)
    return out.transpose(1, 2), None


def _small(position_bias: Any) -> Any:
    """Return a bias as small as it is known."""
    return position_bias.small if isinstance(position_bias, Compact) and not position_bias.is_written else position_bias


def _by_stock(call: Call) -> Any:
    """Compute attention with dense tensors, (B, H, Nq, Nk): as eager, or as sdpa in modules without a term of ours."""
    module, query, key, value, mask, position_bias, is_causal, options = call
    if isinstance(position_bias, Term):
        query, position_bias = position_bias.stock(module, query, key, *position_bias.arguments)
    elif isinstance(position_bias, torch.Tensor) and not isinstance(position_bias, Compact) and position_bias.dim() == 2:
        queries, keys = query.shape[2], key.shape[2]
        position_bias = rows(position_bias, _positions(module), queries, keys, keys - queries)[None]
    mask, position_bias = to_dense(mask), to_dense(position_bias)
    bias = {} if position_bias is None else {"position_bias": position_bias}
    wants, is_known = options.get("output_attentions") or wants_weights(module), type(module) in SERVED
    if not is_known and (bias or module.config.model_type not in MODEL_TYPES):
        about = f"{type(module).__qualname__} has no relative attention that attn_implementation={IMPLEMENTATION!r} serves"
        cure = "it runs as sdpa. triton_relattn.enable(model) knows more classes"
        warn_once(about, f"triton_relattn: {about}; {cure}", UserWarning)
    # Without a mask eager attention sees all keys, and all other implementations hide the future: then it is as before enable.
    is_sdpas = mask is None and is_causal and getattr(module, CHECKED, Checked()).before != "eager"
    files = (sys.modules[base.__module__] for base in type(module).__mro__)
    eager = next((file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward")), None)
    if eager is None or not (wants or (is_known and not is_sdpas)):
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, mask, is_causal=is_causal, **options, **bias)
    if mask is not None and mask.dtype == torch.bool:
        lowest = torch.finfo(query.dtype).min
        mask = torch.zeros((), dtype=query.dtype, device=mask.device).where(mask, lowest)
    return eager(module, query, key, value, mask, **options, **bias)


def _positions(module: Any) -> RelativePositions:
    """Return the relative positions of a table (H, R) that the layers of a module's model pass on."""
    return next(SERVED[base] for base in type(module).__mro__ if base in SERVED).ours.positions(module)  # type: ignore[no-any-return]


class Keys(Compact):
    """Which keys are no padding (B, 1, 1, Nk), bool, of which a layer may take the first ones."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__ and isinstance(args[0], Keys) and not args[0].is_written:
            mask, index = args
            everything = isinstance(index, tuple) and len(index) == 4 and all(part == slice(None) for part in index[:3])
            if everything and isinstance(index[3], slice):
                small = None if mask.small is None else mask.small[index]
                return cls.of(small, lambda _: mask.dense()[index])
        return super().__torch_function__(func, types, args, kwargs)


class CausalKeys(Keys):
    """The same where all later keys are hidden as well."""


def mask(**arguments: Any) -> Any:
    """Return which keys are no padding: Keys, CausalKeys, or, under torch.compile, plain (B, 1, 1, Nk) or None if all are.

    Whatever else is hidden (packed sequences, a user's mask functions, keys to come of a static cache) gives the mask
    (B, 1, Nq, Nk) of sdpa, as does padding in causal attention under torch.compile, where a plain mask says all that is hidden.
    """
    if arguments["config"].model_type not in MODEL_TYPES:
        return sdpa_mask(**arguments)
    if is_graph():
        return stock_mask(arguments)
    function, real = arguments["mask_function"], real_keys(arguments, is_needed=False)
    if function is bidirectional_mask_function:
        return None if real is None else with_dense(Keys, real, arguments)
    sizes = [arguments[name] for name in ("q_offset", "q_length", "kv_offset", "kv_length")]
    ends_together = not isinstance(sizes[0], torch.Tensor) and sizes[0] + sizes[1] == sizes[2] + sizes[3]
    if function is not causal_mask_function or not ends_together or (real is not None and are_plain()):
        return sdpa_mask(**{**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    return with_dense(CausalKeys, real, arguments)


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, mask)


class Comparison(Replacement):
    """A stock forward with attention of ours; what it is given stays as it is. is_known: whether a module of the class was
    compared in full, so that others are in part, as in enable."""

    is_known = False

    def run(self, module: Any, given: dict[str, Any]) -> Any:
        return _with_implementation(module, IMPLEMENTATION)(**given)


def _with_implementation(module: Any, name: str) -> Any:
    """Give a shadow of a module another implementation; its own calls are not compared."""
    vars(module).pop(CALLS, None)
    module.config = copy.copy(module.config)
    module.config._attn_implementation = name
    return module


class ThroughTheDoor(Attention):
    """How to compare a class that goes through the door: its stock forward with eager attention, and with ours."""

    keeps_class = True

    @staticmethod
    def positions(module: Any) -> RelativePositions:
        """Return the relative positions of a table (H, R) that layers pass on."""
        raise NotImplementedError

    @staticmethod
    def why_not(module: Any) -> str:
        if type(module) in SERVED:
            return ""
        return f"transformers {installed_version('transformers')} is too old: this class is served from 5.21 on"

    @staticmethod
    def stock_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        return _with_implementation(module, "eager")(*args, **kwargs)

    @classmethod
    def candidates(cls, module: Any, model: Any) -> Any:
        yield "", lambda: SERVED[type(module)]

    @classmethod
    def prepare_model(cls, model: Any) -> None:
        """Give a shadow of a module a class with these methods, and have ours compute its short calls as well."""
        _with_implementation(model, "eager").__class__ = SHADOWS[type(model)]
        vars(model)[CHECKED], vars(model)[FEWEST] = Checked(), 0

    @staticmethod
    def pairs(module: Any, hidden_states: torch.Tensor, **given: Any) -> int:  # type: ignore[override]
        others = given.get("key_value_states", given.get("encoder_hidden_states"))
        queries = hidden_states.shape[1]
        return len(hidden_states) * num_heads(module) * queries * (queries if others is None else others.shape[1])

    @staticmethod
    def switch(module: Any) -> None:
        """Have the model of a module, which was compared, compute attention by ours."""
        vars(module)[CHECKED] = Checked(before="sdpa" if is_switched(module) else module.config._attn_implementation or "eager")
        module.config._attn_implementation = IMPLEMENTATION


def serve(stock: Any, ours: type[ThroughTheDoor], model_type: str, forward: Any = None, **functions: Any) -> None:
    """Let a stock class go through the door.

    functions: by the name of a stock function, of the class or of its file, what makes ours of it. forward: the same for the
    class's forward. Older versions of transformers do not have all of them, and their class is refused by enable.
    """
    file = sys.modules[stock.__module__]
    owners = {name: stock if hasattr(stock, name) else file for name in functions}
    if not hasattr(file, "eager_attention_forward") or not all(hasattr(owner, name) for name, owner in owners.items()):
        return
    for name, owner in owners.items():
        setattr(owner, name, _either(getattr(owner, name), functions[name](getattr(owner, name))))
    parameters = inspect.signature(stock.forward).parameters.values()
    names = {item.name: item.name for item in list(parameters)[1:] if item.kind is not item.VAR_KEYWORD}
    mask = next(name for name in MASKS if name in names)
    replacement = Comparison(stock, ours, stock.forward, names, harmless=HARMLESS - names.keys(), mask=mask)
    stock.forward = _forward(replacement, stock.forward, forward(stock.forward) if forward else stock.forward)
    attributes = {"forward": stock.forward, "__module__": stock.__module__}
    SHADOWS[stock] = type(stock.__name__, (ours, stock), attributes)
    SERVED[stock] = SERVED[SHADOWS[stock]] = replacement
    MODEL_TYPES.add(model_type)


def _either(stock: Any, ours: Any) -> Any:
    """Return a function that is ours where a module's attention is, and the stock function elsewhere."""

    @functools.wraps(stock)
    def either(module: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(module, *args, **kwargs) if is_ours(module) else stock(module, *args, **kwargs)

    return either


def _forward(replacement: Comparison, stock: Any, ours: Any) -> Any:
    """Return the forward of a class: in calls that enable was asked to check, both ways run on copies before."""
    either = _either(stock, ours)

    @functools.wraps(stock)
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        record = vars(module).get(CALLS)
        if record is not None and record.is_checked and not torch.compiler.is_compiling() and is_ours(module):
            pairs = replacement.ours.pairs(module, **replacement.bind(args, kwargs))
            verdict = judge(replacement, module, args, kwargs, pairs)
            if verdict.differs:
                vars(module)[CHECKED].reason = verdict.text
                about = f"{type(module).__qualname__} differs from the stock forward in this call"
                warn(f"triton_relattn: {about} and uses its own attention again: {verdict.text}")
        return either(module, *args, **kwargs)

    return forward
