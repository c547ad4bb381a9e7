"""What classes of all families share: attention, and the encoders that pass masks and positions to it."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import pad

from ..compact import STOCK_READS
from ..enable import enable
from ..enabled import PassesOn
from ..in_place import InPlace
from ..masks import ChunkedWindow
from ..operators import fused_relative_attention, split_heads
from ..packing import Packing
from ..shadow import projections
from ..structure.grid import DecomposedPositions
from ..structure.transformer_xl import ProjectedPositions
from . import masks
from .masks import COLLECTS, PADDING_IF_THAT_IS_ALL, collects_weights, view

_ASKED: list[bool] = []
STOCK_READS.append(lambda: bool(_ASKED))


OTHER_IN_EAGER = "SeamlessM4Tv2ConformerSelfAttention", "NemotronAsrStreamingEncoderAttention"
"""Stock attention whose models have other results in eager than in sdpa, whatever the module alone computes: the first one adds
a boolean mask, so that a key that is no padding counts e times one that is."""


class Attention(InPlace):
    """Mixin, in place of a class of transformers. While weights are collected, calls are the stock forward's."""

    @staticmethod
    def why_not(module: Any) -> str:
        implementation = getattr(getattr(module, "config", None), "_attn_implementation", "")
        if type(module).__name__ in OTHER_IN_EAGER and implementation == "eager":
            return 'with attn_implementation="eager" this model computes something else; set_attn_implementation("sdpa") first'
        return ""

    def serves(self) -> bool:  # type: ignore[override]
        return not wants_weights(self)

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        (width, _), *_ = projections(self).values()  # type: ignore[arg-type]
        mask = masks.example(getattr(self, "config", None), batch, length, real)
        return {"hidden_states": torch.randn(batch, length, width), "attention_mask": mask}

    def prepare(self) -> None:
        """An implementation that needs a GPU is compared as sdpa."""
        config = getattr(self, "config", None)
        if getattr(config, "_attn_implementation", "eager") not in ("eager", "sdpa"):
            self.config = copy.copy(config)
            self.config._attn_implementation = "sdpa"


def wants_weights(module: Any) -> bool:
    """Return whether attention weights are asked for, which only the stock forward computes."""
    if COLLECTS:
        return collects_weights()
    return not torch.compiler.is_compiling() and getattr(getattr(module, "config", None), "output_attentions", False)


class ChunkedAttention(Attention):
    """Mixin: the stock forward computes chunks of queries, or blocks, with ``context_size`` keys each."""

    def keys_per_query(self, keys: int) -> int:
        return min(keys, self.context_size)  # type: ignore[no-any-return]


class KindOfTransformers:
    """Mixin of kinds of structure/ that compute classes of transformers."""

    fewest = property(lambda self: InPlace.fewest)  # as of the other classes of transformers, also on a grid

    def serves(self, module: Any, **given: Any) -> bool:
        return not wants_weights(module) and super().serves(module, **given)  # type: ignore[misc]


class FastSpeech2ConformerAttention(KindOfTransformers, ProjectedPositions):
    """Its mask is one of padding, (B, 1, N)."""

    def masks(self, batch: int, length: int) -> Iterator[tuple[str, torch.Tensor | None]]:
        return itertools.islice(super().masks(batch, length), 2)


class GridAttention(KindOfTransformers, DecomposedPositions):
    """Tokens that pad a window are keys as all others."""

    @staticmethod
    def applies(module: Any) -> bool:
        return hasattr(module, "rel_pos_h")


def query_key_value(module: Any, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Project states (B, N, C) by the module's projections to query, key and value, (B, H, N, D) each."""
    projections = module.q_proj, module.k_proj, module.v_proj
    query, key, value = (split_heads(projection(states), module.head_dim) for projection in projections)
    return query, key, value


def additive_mask(attention_mask: Any, dtype: torch.dtype) -> Any:
    """Return a mask as transformers' eager attention adds it to logits of dtype: the lowest number where a key is hidden; or the
    Packing of a batch."""
    if attention_mask is None or isinstance(attention_mask, Packing):
        return attention_mask
    # Beside the lowest number all logits vanish: a query whose keys are all hidden sees them evenly. Logits are float32 at least,
    # beside which -65504, the lowest number of float16, is not low enough.
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
    root = key.shape[2] ** -0.5  # of both factors, so that float16 holds the sum
    covariance = (root * (key - key.mean(2, keepdim=True))).mT @ (root * (value - mean).detach())
    change = scale * (query @ covariance)
    return mean + (change - change.detach())


def attending(mask: torch.Tensor) -> torch.Tensor:
    """Return which queries attend, (B, 1, N, 1): of a mask (B, 1, 1, N) of padding, or (B, 1, N, N), those with a key."""
    return mask.mT if mask.shape[2] == 1 else mask.any(-1, keepdim=True)


def sees_a_key(window: ChunkedWindow, queries: int) -> torch.Tensor:
    """Return which queries see a real key, (B, Nq), bool."""
    assert window.real is not None
    start = (torch.arange(queries, device=window.real.device) + window.first) // window.chunk * window.chunk
    first = torch.zeros_like(start) if window.left < 0 else (start - window.left).clamp(min=0)
    end = (start + window.chunk + window.right).clamp(max=window.real.shape[1])
    count = pad(window.real.cumsum(1), (1, 0))  # of real keys before a position
    return count[:, end] > count[:, first]


def first_position(cache: Any, layer: int) -> Any:
    """Return the position of the first new query, an int or a tensor, before the layer's cache is updated."""
    if cache is None:
        return 0
    position = (getattr(cache, "get_query_offset", None) or cache.get_seq_length)(layer)  # the latter before transformers 5.23
    # A static cache counts in a tensor that it changes in place.
    return position.clone() if isinstance(position, torch.Tensor) else position


def update_cache(cache: Any, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Append new keys and values to a layer's cache; return all of them, and the position of the first new query."""
    offset = first_position(cache, layer)
    if cache is not None:
        key, value = cache.update(key, value, layer)
    return key, value, offset


def hides_future(attention_mask: torch.Tensor | None, is_causal: bool | None, config: Any) -> bool:
    """Return whether a causal model's attention has to hide the future itself; a mask (B, 1, Nq, Nk) does so already."""
    if attention_mask is not None and attention_mask.dim() == 4:
        return False
    return (getattr(config, "is_causal", True) if is_causal is None else is_causal) is not False


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    query_offset: Any = 0,
    **options: Any,
) -> Any:
    """Compute attention of a causal model; the mask is padding, (B, Nk), or has all that queries see, (B, 1, Nq, Nk)."""
    if attention_mask is not None and attention_mask.dim() == 2:
        attention_mask = attention_mask[:, None, None, :]
    if isinstance(query_offset, torch.Tensor):
        query_offset = query_offset.expand(len(query))
    return fused_relative_attention(
        query, key, value, attn_mask=attention_mask, query_offset=query_offset, enable_gqa=True, **options
    )


def with_weights(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that passes on what stock attention takes if weights are asked for as output_attentions."""

    @functools.wraps(forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("output_attentions")
        if asked is None:
            asked = getattr(getattr(self, "config", None), "output_attentions", False)
        if not asked:
            return forward(self, *args, **kwargs)
        _ASKED.append(True)
        try:
            return forward(self, *args, **kwargs)
        finally:
            _ASKED.pop()

    return run


class Encoder(PassesOn):
    """Mixin of encoders that pass on small masks: by a function that their config names, or, without one, their own."""

    mask_function: str | None = PADDING_IF_THAT_IS_ALL

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "stock_class" in vars(cls):
            cls.forward = with_weights(cls.forward)  # type: ignore[attr-defined]

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        """Make a model of an enabled model's class, and enable it. Its config may be that of the enabled model."""
        super().__init__(getattr(config, "stock", config), *args, **kwargs)  # type: ignore[call-arg]
        self.__class__ = self.stock_class
        enable(self, lengths=())

    def on_enable(self: Any) -> None:
        if self.mask_function and hasattr(self, "config"):
            self.config = view(self.config, self.mask_function)

    def on_disable(self: Any) -> None:
        if self.mask_function and hasattr(self, "config"):
            self.config = getattr(self.config, "stock", self.config)  # unless it was replaced meanwhile
