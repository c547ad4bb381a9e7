"""Small masks in place of the (B, 1, Nq, Nk) of transformers: (B, 1, 1, Nk) for encoders, (B, Nk) for causal models.

An encoder passes its config to transformers to get its mask. The config names the attention implementation, and with it the
function that makes masks. The encoders of enabled models have a view of their config that names a function of this file. All
else in the view is the config's. What these functions return knows the mask of the config's own implementation.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AttentionMaskInterface
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # before transformers 5.2
    _active_collector = None

from ..calls import is_graph
from ..compact import STOCK_READS, Compact, are_plain
from ..enabled import IMPLEMENTATION

PADDING, PADDING_IF_THAT_IS_ALL = "triton_relattn_padding", "triton_relattn_padding_if_that_is_all"
SHOWN, HIDDEN = "triton_relattn_shown", "triton_relattn_hidden"
"""Names of the functions below for transformers, in place of an attention implementation's."""
COLLECTS = _active_collector is not None
"""Whether transformers collects attention weights around the layers."""


def collects_weights() -> bool:
    """Return whether the weights of this call are collected, which only the stock forward computes."""
    if not COLLECTS or (torch.compiler.is_compiling() and not _active_collector.compiling):  # whose ContextVar cannot be traced
        return False
    return any("attentions" in names for names in _active_collector.get() or ())


STOCK_READS.append(collects_weights)


def stock_mask(arguments: dict[str, Any]) -> Any:
    """Return the mask that the stock encoder has; where the config names ours, that of eager attention."""
    config = arguments["config"]
    name = getattr(config, "stock", config)._attn_implementation
    name = "eager" if name == IMPLEMENTATION else name
    return ALL_MASK_ATTENTION_FUNCTIONS[name](**arguments)


def with_dense(kind: type[Compact], small: torch.Tensor | None, arguments: dict[str, Any]) -> Any:
    """Return a small mask that knows the stock one, as a tensor in any case."""
    given = {**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    if isinstance(given.get("q_offset"), torch.Tensor):  # a static cache counts on in it, before the mask is needed
        given["q_offset"] = given["q_offset"].clone()
    return kind.of(small, lambda _: stock_mask(given))


class Padding(Compact):
    """A mask of padding (B, 1, 1, N), bool, of which layers also ask which keys or queries are hidden from all."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mask = args[0] if args else None
        if isinstance(mask, Padding) and not mask.is_written:
            if func == torch.Tensor.dtype.__get__:  # type: ignore[attr-defined]
                return torch.bool
            if func == torch.Tensor.__invert__:
                return cls.of(None if mask.small is None else ~mask.small, lambda _: ~mask.dense())
            if func is torch.all and kwargs == {"dim": 2} and not mask.is_none:
                return mask._plain().all(2)  # a key is hidden from all queries if it is padding
            if func is torch.all:
                return Compact.of(None, lambda _: torch.all(mask.dense(), *args[1:], **(kwargs or {})))
        return super().__torch_function__(func, types, args, kwargs)


def real_keys(arguments: dict[str, Any], is_needed: bool) -> torch.Tensor | None:
    """Return the mask (B, 1, 1, Nk), True where a key is not padding; without padding None, unless it is needed."""
    real, first = arguments["attention_mask"], arguments["kv_offset"]
    end = first + arguments["kv_length"]
    if real is None:
        shape = arguments["batch_size"], 1, 1, arguments["kv_length"]
        return torch.ones(shape, dtype=torch.bool, device=arguments.get("device")) if is_needed else None
    if end > real.shape[-1]:  # keys to come, of a static cache
        real = pad(real, (0, end - real.shape[-1]))
    return real[:, None, None, first:end].bool()  # type: ignore[no-any-return]


def padding(**arguments: Any) -> Any:
    """Return the mask (B, 1, 1, Nk) of an encoder whose attention knows all else that is hidden.

    Attention without any mask is the stock forward's, so under torch.compile, where None is no small form, there is always one.
    """
    if is_graph():
        return stock_mask(arguments)
    return with_dense(Padding, real_keys(arguments, is_needed=are_plain()), arguments)


def padding_if_that_is_all(*, is_needed: bool = False, is_inverted: bool = False, **arguments: Any) -> Any:
    """Return (B, 1, 1, Nk) for full attention, and (B, Nk) for causal attention, whose windows the modules know themselves.

    Everything else (packed sequences, a user's mask functions) gives the bool mask (B, 1, Nq, Nk) of sdpa. So a mask of four
    dimensions tells attention modules all that is hidden, even if a user has given it.

    is_needed: without padding the mask is all True, not None, as for causal attention under torch.compile (see padding()).
    is_inverted: it is True where a key is hidden.
    """
    if is_graph():
        return stock_mask(arguments)
    function = arguments["mask_function"]
    is_full = function is bidirectional_mask_function
    is_window = arguments.get("local_size") is not None and arguments.get("allow_is_causal_skip", False)
    if is_full or is_window or function is causal_mask_function:
        mask = real_keys(arguments, is_needed or (are_plain() and not is_full))
        if mask is None and is_full:  # as stock encoders may have it
            return None
        mask = mask if mask is None or is_full else mask[:, 0, 0]
    else:
        mask = sdpa_mask(**{**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    return with_dense(Compact, ~mask if is_inverted and mask is not None else mask, arguments)


MASK_FUNCTIONS: dict[str, Callable[..., Any]] = {
    PADDING: padding,
    PADDING_IF_THAT_IS_ALL: padding_if_that_is_all,
    SHOWN: functools.partial(padding_if_that_is_all, is_needed=True),
    HIDDEN: functools.partial(padding_if_that_is_all, is_needed=True, is_inverted=True),
}
for name, mask_function in MASK_FUNCTIONS.items():
    AttentionMaskInterface.register(name, mask_function)


EAGER = types.SimpleNamespace(_attn_implementation="eager")
"""In place of the config of a module that has none."""


def example(
    config: Any,
    batch: int,
    length: int,
    real: torch.Tensor | None,
    is_causal: bool = False,
    window: int | None = None,
    name: str = PADDING_IF_THAT_IS_ALL,
) -> Any:
    """Return the mask that an encoder with this function passes to attention, to compare that. real: (B, N), bool, or None."""
    causal = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    arguments: dict[str, Any] = {
        "batch_size": batch,
        "kv_length": length,
        "kv_offset": 0,
        "mask_function": causal if is_causal else bidirectional_mask_function,
        "attention_mask": real,
        "allow_is_causal_skip": is_causal,
        "allow_is_bidirectional_skip": True,
        "local_size": window,
        "dtype": torch.float64,  # what is compared is in float64, or made of it
        "config": config if hasattr(config, "_attn_implementation") else EAGER,
        "use_vmap": False,
    }
    if "q_length" in inspect.signature(sdpa_mask).parameters:
        arguments |= {"q_length": length, "q_offset": 0, "device": torch.get_default_device()}
    else:  # before transformers 5.4
        arguments["cache_position"] = torch.arange(length)
    return ALL_MASK_ATTENTION_FUNCTIONS[name](**arguments)


@functools.cache
def _view_class(config_class: type, mask_function: str) -> type:
    """Make a config class whose instances share all attributes of another config, ``stock``, but name mask_function."""

    def get_text_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        text = self.stock.get_text_config(*args, **kwargs)
        return self if text is self.stock else self.text if self.text is not None and text is self.text.stock else text

    def set_implementation(self: Any, value: Any) -> None:
        self.stock._attn_implementation = value

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return view, (self.stock, mask_function)

    attributes = {
        "__slots__": ("stock", "text"),
        "_attn_implementation": property(lambda self: mask_function, set_implementation),
        "get_text_config": get_text_config,
        "__copy__": lambda self: view(copy.copy(self.stock), mask_function),
        "__reduce_ex__": __reduce_ex__,
    }
    return type(config_class.__name__, (config_class,), attributes)


def view(config: Any, mask_function: str) -> Any:
    """Return a view of config with another mask function. Attributes that are set in one of the two are set in both."""
    config_class: Any = type(config)
    made: Any = object.__new__(_view_class(config_class, mask_function))
    object.__setattr__(made, "__dict__", config.__dict__)
    object.__setattr__(made, "stock", config)
    text = config.get_text_config()
    # Made now, because classes cannot be made while torch.compile traces a model.
    object.__setattr__(made, "text", None if text is config else view(text, mask_function))
    return made
