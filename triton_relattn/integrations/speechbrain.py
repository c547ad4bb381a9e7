"""SpeechBrain's ``RelPosMHAXL`` on :func:`triton_relattn.fused_relative_attention`, and the masks of its ``TransformerASR``."""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any, ClassVar

import torch
from torch import nn

from ..positions import RelativePositions
from .enable import disable, enable
from .in_place import InPlace
from .libraries import Library, Source, WithFunctions
from .masks import ChunkedWindow
from .operators import attend, drop_probability, join_heads, split_heads

__all__ = ["disable", "enable"]

TRANSFORMER = "speechbrain.lobes.models.transformer.TransformerASR"

LEFT = 5
"""The window of a comparison."""


class RelPosMHAXL(InPlace):
    """(q_i + u) . k_j + (q_i + v) . R[j - i], both over sqrt(embed_dim); R, a row per distance and head, projected sinusoids."""

    @staticmethod
    def applies(module: Any) -> bool:
        """Return whether the stock class has a forward: with another width of values it has none."""
        return bool(module._qkv_same_embed_dim)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pos_embs: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        attn_mask: torch.Tensor | ChunkedWindow | None = None,
        return_attn_weights: bool = True,
    ) -> Any:
        """query (B, Nq, C), key and value (B, Nk, C), pos_embs (1, 2Nk - 1, C); bool masks are True of what is hidden."""
        states = self._query_key_value(query, key, value)
        queries = query.shape[1]
        operator = functools.partial(
            attend,
            rel_keys=split_heads(self.linear_pos(pos_embs), self.head_dim),
            u=self.pos_bias_u.view(self.num_heads, self.head_dim),  # its memory is that of (heads, width)
            v=self.pos_bias_v.view(self.num_heads, self.head_dim),
            # Row 0 is of the most distant past: stock attention shifts query i's row for key j to j - i + Nq - 1.
            positions=RelativePositions(1 - queries, pos_embs.shape[1] - queries, "error"),
            scale=self.scale,
            dropout_p=drop_probability(self.dropout_att),
        )
        real = None if key_padding_mask is None else ~key_padding_mask.bool()
        if isinstance(attn_mask, ChunkedWindow):
            window = ChunkedWindow(real=real, left=attn_mask.left, right=attn_mask.right, chunk=attn_mask.chunk)
            out = window.attend(operator, *states)
        else:
            out = operator(*states, attn_mask=self._shown(real, attn_mask, states[0]))
        out = self.out_proj(join_heads(out))
        return (out, None) if return_attn_weights else out

    @staticmethod
    def counted(mask: torch.Tensor) -> torch.Tensor | None:
        return None

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        states, rows = torch.randn(batch, length, self.embed_dim), torch.randn(1, 2 * length - 1, self.embed_dim)
        given = {"query": states, "key": states, "value": states, "pos_embs": rows}
        if real is None:
            return given
        behind = torch.arange(length)[:, None] - torch.arange(length)
        window = ChunkedWindow(left=LEFT, right=0, make=lambda: (behind > LEFT) | (behind < 0))
        return {**given, "key_padding_mask": ~real, "attn_mask": window}

    def _query_key_value(self, *states: torch.Tensor) -> list[torch.Tensor]:
        """Return (B, H, N, D) each. Of one tensor the weights are read as (H, 3, D); of several, as (3, H, D)."""
        query, key, value = states
        if (query is key or torch.equal(query, key)) and (key is value or torch.equal(key, value)):
            parts = nn.functional.linear(query, self.in_proj_weight).unflatten(-1, (self.num_heads, -1)).chunk(3, -1)
            projected = [part.transpose(1, 2) for part in parts]
        else:
            weights = self.in_proj_weight.chunk(3)
            projected = [
                split_heads(nn.functional.linear(part, weight), self.head_dim)
                for part, weight in zip(states, weights, strict=True)
            ]
        if self.vbias is not None:
            projected[2] = projected[2] + self.value_bias_weight.view(self.num_heads, 1, self.head_dim)
        return projected

    def _shown(self, real: torch.Tensor | None, attn_mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
        """Return both masks as one of the operator."""
        shown = None if real is None else real[:, None, None]
        if attn_mask is None:
            return shown
        mask = attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask.unflatten(0, (-1, self.num_heads))
        if mask.dtype == torch.bool:
            return ~mask if shown is None else shown & ~mask
        mask = mask.to(query.dtype)
        return mask if shown is None else mask.masked_fill(~shown, -torch.inf)


def make_masks(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Return what ``make_transformer_src_tgt_masks`` does, but no mask (T, T) of what the encoder's attention sees."""
    stock = importlib.import_module(TRANSFORMER).make_transformer_src_tgt_masks
    given = inspect.signature(stock).bind(*args, **kwargs).arguments
    causal, dynchunktrain_config = given.pop("causal", False), given.pop("dynchunktrain_config", None)
    src_padding, tgt_padding, _, tgt_mask = stock(**given)

    def make() -> Any:
        return stock(*args, **kwargs)[2]

    window = None
    if causal:
        window = ChunkedWindow(right=0, make=make)
    elif dynchunktrain_config is not None:
        left = dynchunktrain_config.left_context_size_frames()
        window = ChunkedWindow(left=-1 if left is None else left, right=0, chunk=dynchunktrain_config.chunk_size, make=make)
    return src_padding, tgt_padding, window, tgt_mask


class TransformerASR(WithFunctions):
    """Model that passes causality and chunks to the attention of its Conformer, instead of a mask (T, T)."""

    methods = ("forward", "encode")
    functions: ClassVar[dict[str, Any]] = {"make_transformer_src_tgt_masks": make_masks}

    @staticmethod
    def applies(module: Any) -> bool:
        return module.attention_type == "RelPosMHAXL" and type(module.encoder).__name__ == "ConformerEncoder"

    def takes_small_masks(self) -> bool:
        return super().takes_small_masks() and all(isinstance(layer.mha_layer, RelPosMHAXL) for layer in self.encoder.layers)


SOURCES = (
    Source("speechbrain.nnet.attention", "SpeechBrain's Conformer", {"RelPosMHAXL": RelPosMHAXL}),
    Source(TRANSFORMER, "SpeechBrain's Conformer", {"TransformerASR": TransformerASR}),
)
LIBRARY = Library("speechbrain", __name__, SOURCES)
