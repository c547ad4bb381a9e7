"""Small masks from transformers, which by itself makes (B, 1, Nq, Nk): (B, 1, 1, Nk) for encoders, (B, Nk) for causal models.

An encoder asks transformers for its mask with its config, which names the attention implementation and by it the function that
makes masks. The encoders of enabled models have a view of their config that names one of ours; all else in it is the config's.
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


def padding(attention_mask: torch.Tensor | None, kv_length: int, kv_offset: int = 0, **_: Any) -> torch.Tensor | None:
    """(B, 1, 1, Nk), True where a key is none of the padding; None: there is no padding."""
    mask = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    return None if mask is None else mask[:, None, None, kv_offset : kv_offset + kv_length]


def padding_if_that_is_all(**arguments: Any) -> torch.Tensor | None:
    """:func:`padding` for full attention; (B, Nk) for causal attention, also in a window, of which the modules know.

    For all else that is combined (packed sequences, mask functions of a user) the bool mask (B, 1, Nq, Nk) of sdpa. So what
    attention modules see in a mask of four dimensions is all that there is, also if a user has given it.
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
    """:func:`padding_if_that_is_all`, also if there is none: all of it is True."""
    mask = padding_if_that_is_all(**arguments)
    if mask is None:
        mask = torch.ones(arguments["batch_size"], arguments["kv_length"], dtype=torch.bool, device=arguments["device"])
        mask = mask[:, None, None] if arguments["mask_function"] is bidirectional_mask_function else mask
    return mask


def hidden(**arguments: Any) -> torch.Tensor:
    """The opposite of :func:`shown`."""
    return ~shown(**arguments)


for name, function in ((PADDING, padding), (PADDING_IF_THAT_IS_ALL, padding_if_that_is_all), (SHOWN, shown), (HIDDEN, hidden)):
    AttentionMaskInterface.register(name, function)


@functools.cache
def _view_class(config_class: type, mask_function: str) -> type:
    """Base class of configs that share all attributes of another one, ``stock``, but name mask_function."""

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
    """config with another mask function; whatever is set in one of the two is set in both."""
    config_class: Any = type(config)
    made: Any = object.__new__(_view_class(config_class, mask_function))
    object.__setattr__(made, "__dict__", config.__dict__)
    object.__setattr__(made, "stock", config)
    text = config.get_text_config()
    # Now, as classes cannot be made while torch.compile traces a model.
    object.__setattr__(made, "text", None if text is config else view(text, mask_function))
    return made
