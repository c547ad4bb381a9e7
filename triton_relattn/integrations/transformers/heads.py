"""Common parts of the attention modules of the families."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import EncoderDecoderCache

from .. import in_place
from ..operators import drop_probability as drop_probability
from ..operators import fused_relative_attention
from ..operators import join_heads as join_heads
from ..operators import split_heads as split_heads
from .masks import COLLECTS, collects_weights


class InPlace(in_place.InPlace):
    """Mixin, in place of a class of transformers. While weights are collected, calls are the stock forward's."""

    config: Any

    def serves(self: Any, **given: Any) -> bool:
        if COLLECTS:
            return not collects_weights()
        return torch.compiler.is_compiling() or not getattr(getattr(self, "config", None), "output_attentions", False)

    def prepare(self: Any) -> None:
        """An implementation that needs a GPU is compared as sdpa."""
        config = getattr(self, "config", None)
        if getattr(config, "_attn_implementation", "eager") not in ("eager", "sdpa"):
            self.config = copy.copy(config)
            self.config._attn_implementation = "sdpa"


def query_key_value(module: Any, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Project states (B, N, C) by the module's projections to query, key and value, (B, H, N, D) each."""
    projections = module.q_proj, module.k_proj, module.v_proj
    query, key, value = (split_heads(projection(states), module.head_dim) for projection in projections)
    return query, key, value


def added(attention_mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a mask as transformers' eager attention adds it to the logits of dtype: the lowest number where a key is hidden.

    Beside that number all logits vanish. So a query whose keys are all hidden sees them evenly, in the operator as in eager. The
    operator's logits are float32 at least, beside which -65504, the lowest number of float16, is not low enough.
    """
    if attention_mask is None:
        return None
    wide = torch.promote_types(dtype, torch.float32)
    lowest = torch.finfo(wide).min
    if attention_mask.dtype == torch.bool:
        return torch.zeros((), dtype=wide, device=attention_mask.device).where(attention_mask, lowest)
    if attention_mask.dtype == torch.float16:
        return attention_mask.float().masked_fill(attention_mask == torch.finfo(torch.float16).min, lowest)
    return attention_mask


def attend_evenly(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the output of queries whose keys are all hidden: the mean of the values.

    In eager, q.k is added to the lowest number. It vanishes there, but its gradient passes through the addition. This function
    has the same gradient: where all logits are equal, the derivative of softmax is the covariance of keys and values.

    For models that read rows of padding: Nemotron H Omni takes one behind Parakeet's last frame, and a convolution of Seamless
    M4T v2 mixes them with real frames.
    """
    mean = value.mean(2, keepdim=True)
    if not torch.is_grad_enabled():
        return mean.expand(-1, -1, query.shape[2], -1)
    each = key.shape[2] ** -0.5  # of both factors, so that float16 holds the sum
    covariance = (each * (key - key.mean(2, keepdim=True))).mT @ (each * (value - mean).detach())
    change = scale * (query @ covariance)
    return mean + (change - change.detach())


def first_position(cache: Any, layer: int) -> Any:
    """Return the position of the first new query, which is how many keys a layer's cache has seen: an int or a tensor.

    Call it before the cache is updated. A static cache counts in a tensor that it changes in place; a copy is returned.
    """
    if cache is None:
        return 0
    seen = (getattr(cache, "get_query_offset", None) or cache.get_seq_length)(layer)  # before transformers 5.23 it has no other
    return seen.clone() if isinstance(seen, torch.Tensor) else seen


def with_past(cache: Any, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Append new keys and values to a layer's cache; return all of them, and the position of the first new query."""
    offset = first_position(cache, layer)
    if cache is not None:
        key, value = cache.update(key, value, layer)
    return key, value, offset


def is_causal(attention_mask: torch.Tensor | None, asked: dict[str, Any], config: Any) -> bool:
    """Return whether the attention of a causal model has to hide the future itself. A mask (B, 1, Nq, Nk) does so already.

    asked: the arguments of the call. They, or the config, can make a model attend in both directions.
    """
    of_all = attention_mask is not None and attention_mask.dim() == 4
    return not of_all and asked.get("is_causal", getattr(config, "is_causal", True)) is not False


def attend_to_past(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    sinks: torch.Tensor | None = None,
    query_offset: Any = 0,
    **term: Any,
) -> torch.Tensor:
    """Compute attention of a causal model, whose mask is padding, (B, Nk), or has all that its queries see, (B, 1, Nq, Nk).

    Queries that see no key get zeros.

    sinks: (B, H, Nq), a further logit of each query with a value of zero: it takes a share of the weights.
    """
    if attention_mask is not None and attention_mask.dim() == 2:
        attention_mask = attention_mask[:, None, None, :]
    result: Any = fused_relative_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        query_offset=query_offset.expand(len(query)) if isinstance(query_offset, torch.Tensor) else query_offset,
        enable_gqa=True,
        return_lse=sinks is not None,
        **term,
    )
    if sinks is None:
        return result
    out, lse = result
    share: torch.Tensor = torch.sigmoid(lse - sinks).to(out.dtype)
    return out * share[..., None]


def keys_and_values(
    module: Any, make: Sequence[Any], own: torch.Tensor, others: torch.Tensor | None, cache: Any, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values, (B, H, Nk, width) each: of the module's own states and its cache, or in cross attention of others.

    make: the projections of key and value. An ``EncoderDecoderCache`` also keeps those of cross attention, after the first call.
    """
    of_both = isinstance(cache, EncoderDecoderCache)
    if of_both and others is not None and cache.is_updated.get(module.layer_idx):
        layer = cache.cross_attention_cache.layers[module.layer_idx]
        return layer.keys, layer.values
    states = own if others is None else others
    key, value = (split_heads(projection(states), width) for projection in make)
    if cache is None:
        return key, value
    if of_both and others is not None:
        cache.is_updated[module.layer_idx] = True
    part = cache if not of_both else cache.self_attention_cache if others is None else cache.cross_attention_cache
    found: tuple[torch.Tensor, torch.Tensor] = part.update(key, value, module.layer_idx)
    return found
