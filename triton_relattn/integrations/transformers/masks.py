"""Small masks in place of the (B, 1, Nq, Nk) of transformers: (B, 1, 1, Nk) for encoders, (B, Nk) for causal models.

An encoder passes its config to transformers to get its mask. The config names the attention implementation, and with it the
function that makes masks. The encoders of enabled models have a view of their config that names a function of this file. All
else in the view is the config's.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from transformers import AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, prepare_padding_mask, sdpa_mask

PADDING, PADDING_IF_THAT_IS_ALL = "triton_relattn_padding", "triton_relattn"
SHOWN, HIDDEN = "triton_relattn_shown", "triton_relattn_hidden"


OTHERS = {
    *(
        "batch_size",
        "q_length",
        "q_offset",
        "dtype",
        "device",
        "use_vmap",
        "config",
    ),  # of a mask for all pairs, and how to make it
    *("mask_function", "local_size", "allow_is_causal_skip", "allow_is_bidirectional_skip"),  # more than padding: not here
}
"""Arguments of transformers' functions for masks that say nothing of padding."""


def padding(*, attention_mask: torch.Tensor | None, kv_length: int, kv_offset: int, **others: Any) -> torch.Tensor | None:
    """Return the mask (B, 1, 1, Nk), True where a key is not padding; None if there is no padding."""
    if unknown := [name for name, each in others.items() if name not in OTHERS and each is not None]:
        raise TypeError(f"a mask of padding has no argument {', '.join(unknown)}: disable(model) for it")
    mask = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    return None if mask is None else mask[:, None, None, kv_offset : kv_offset + kv_length]


def padding_if_that_is_all(**arguments: Any) -> torch.Tensor | None:
    """Return :func:`padding` for full attention, and (B, Nk) for causal attention, whose windows the modules know themselves.

    Everything else (packed sequences, a user's mask functions) gives the bool mask (B, 1, Nq, Nk) of sdpa. So a mask of four
    dimensions tells attention modules all that is hidden, even if a user has given it.
    """
    function, no_more = arguments["mask_function"], arguments.get("allow_is_causal_skip", False)
    in_causal_window = arguments.get("local_size") is not None and no_more
    if function is bidirectional_mask_function:
        return padding(**arguments)
    if function is causal_mask_function or in_causal_window:
        mask = padding(**arguments)
        return None if mask is None else mask[:, 0, 0]
    return sdpa_mask(**{**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


def shown(**arguments: Any) -> torch.Tensor:
    """Return :func:`padding_if_that_is_all`; if there is no padding, a mask that is all True."""
    mask = padding_if_that_is_all(**arguments)
    if mask is None:
        mask = torch.ones(arguments["batch_size"], arguments["kv_length"], dtype=torch.bool, device=arguments["device"])
        mask = mask[:, None, None] if arguments["mask_function"] is bidirectional_mask_function else mask
    return mask


def hidden(**arguments: Any) -> torch.Tensor:
    """Return the inverse of :func:`shown`."""
    return ~shown(**arguments)


for name, function in ((PADDING, padding), (PADDING_IF_THAT_IS_ALL, padding_if_that_is_all), (SHOWN, shown), (HIDDEN, hidden)):
    AttentionMaskInterface.register(name, function)


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
