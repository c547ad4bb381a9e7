"""Conformers of Wav2Vec2-BERT, Wav2Vec2-Conformer and both Seamless M4T."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers.models.seamless_m4t import modeling_seamless_m4t as seamless_m4t
from transformers.models.wav2vec2_bert import modeling_wav2vec2_bert as wav2vec2_bert
from transformers.models.wav2vec2_conformer import modeling_wav2vec2_conformer as wav2vec2_conformer

from ...positions import RelativePositions
from ..calls import is_graph
from ..compact import Compact
from ..enabled import IMPLEMENTATION
from ..masks import ChunkedWindow
from ..operators import folded, fused_relative_attention, join_heads, split_heads
from . import masks
from .base import Attention, Encoder, additive_mask, attend_evenly, sees_a_key
from .door import Term, ThroughTheDoor, serve


def with_its_term(module: Any, title: str) -> str:
    """Return the title of a family, or the same with what this module has in place of its term."""
    if hasattr(module, "linear_pos") or hasattr(module, "distance_embedding"):
        return title
    is_rotary = module.position_embeddings_type == "rotary"
    return f"{title.partition(':')[0]}: {'rotary positions, no relative term' if is_rotary else 'no positions'}"


class ConformerAttention(ThroughTheDoor):
    """Attention by ``position_embeddings_type``:

    .. code-block:: text

        "relative_key"   q_i . E[clamp(j - i, -left, right)], scaled as q_i . k_j; E (left + right + 1, D), shared by the heads
        "relative"       (q_i + u) . k_j + (q_i + v) . R[j - i], scaled; R, a row per distance and head, projected sinusoids
        "rotary", None   plain attention
    """

    titled = staticmethod(with_its_term)

    @property
    def longest(self) -> int:
        return max(getattr(self, "left_max_position_embeddings", 0) or 0, 30) + 10

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        mask = masks.example(self.config, batch, length, real, name=IMPLEMENTATION)
        given = {**super().example(batch, length, real), "attention_mask": mask}
        if self.position_embeddings_type == "relative":
            given["relative_position_embeddings"] = torch.randn(1, 2 * length - 1, self.linear_q.in_features)
        if self.position_embeddings_type == "rotary":
            given["relative_position_embeddings"] = torch.randn(2, length, 1, 1, self.head_size)
        return given


def projected(module: Any, query: torch.Tensor, key: torch.Tensor, embeddings: torch.Tensor) -> Any:
    """Return the query and the term of embeddings (1, 2N - 1, C)."""
    rel_key, last = split_heads(module.linear_pos(embeddings), module.head_size)[0], key.shape[2] - 1
    positions = RelativePositions(-last, last)
    return folded(query, rel_key, module.pos_bias_u, module.pos_bias_v, positions, module.scaling)


def clipped(module: Any, query: torch.Tensor, key: torch.Tensor) -> Any:
    """Return the query and the term of the module's own table."""
    return query, clipped_term(module, query)


def clipped_term(module: Any, query: torch.Tensor) -> dict[str, Any]:
    rows = torch.arange(module.distance_embedding.num_embeddings, device=query.device)
    positions = RelativePositions(-module.left_max_position_embeddings, module.right_max_position_embeddings)
    return {"rel_key": module.distance_embedding(rows).to(query.dtype), "positions": positions}


def in_place_of(ours: Any) -> Any:
    """Return a function of a stock function that makes a dense bias, which returns one that makes a Term of ours."""

    def of_stock(stock: Any) -> Any:
        def run(module: Any, query: torch.Tensor, key: torch.Tensor, *arguments: Any) -> Any:
            if any(argument is None for argument in arguments):  # which the stock function refuses
                return stock(module, query, key, *arguments)
            return query, Term(ours, stock, arguments)

        return run

    return of_stock


XL = {"_apply_relative_position_encoding": in_place_of(projected)}
SHAW = {"_apply_relative_key_position_encoding": in_place_of(clipped)}
serve(wav2vec2_bert.Wav2Vec2BertSelfAttention, ConformerAttention, "wav2vec2-bert", **XL, **SHAW)
serve(wav2vec2_conformer.Wav2Vec2ConformerSelfAttention, ConformerAttention, "wav2vec2-conformer", **XL)
serve(seamless_m4t.SeamlessM4TConformerSelfAttention, ConformerAttention, "seamless_m4t", **XL)


class SeamlessM4Tv2Attention(Attention):
    """q_i . E[clamp(j - i, -left, right)], scaled as q_i . k_j; E (left + right + 1, D), shared by the heads; in chunks."""

    titled = staticmethod(with_its_term)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, chunks: tuple[int, int] | None = None
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, N, C), chunks: size, number seen before (-1: all)."""
        projections = self.linear_q, self.linear_k, self.linear_v
        query, key, value = (split_heads(project(hidden_states), self.head_size) for project in projections)
        scale = getattr(self, "scaling", self.head_size**-0.5)  # transformers 5.20 and earlier have none
        term: dict[str, Any] = {"dropout_p": self.dropout.p if self.training else 0.0, "scale": scale}
        if self.position_embeddings_type == "relative_key":
            term |= clipped_term(self, query)
        if chunks is None or chunks[0] >= query.shape[2]:
            out: Any = fused_relative_attention(query, key, value, attn_mask=additive_mask(attention_mask, query.dtype), **term)
        else:
            size, left = chunks
            real = None if attention_mask is None else attention_mask[:, 0, 0]
            window = ChunkedWindow(real=real, left=max(left * size, -1), right=0, chunk=size)
            out = window.attend(functools.partial(fused_relative_attention, **term), query, key, value)
            if real is not None:
                # The adapter's convolution mixes queries from which padding hides all with real ones: they see all keys evenly,
                # also those of other chunks.
                visible = sees_a_key(window, query.shape[2])[:, None, :, None]
                out = torch.where(visible, out, attend_evenly(query, key, value, scale))
        return self.linear_out(join_heads(out)), None

    longest = ConformerAttention.longest


class SeamlessMask(Compact):
    """A mask of padding, in place of one of chunks (B, 1, N, N), which transformers knows as complete by its four dimensions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.shape.__get__:  # type: ignore[attr-defined]
            return (1, 1, 1, 1) if args[0].is_none else args[0].small.shape
        return super().__torch_function__(func, types, args, kwargs)


class SeamlessM4Tv2Encoder(Encoder):
    """Encoder that passes the chunks, which the stock encoder puts in a mask (B, 1, N, N), to its attention."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        size, left = self.config.speech_encoder_chunk_size, self.config.speech_encoder_left_chunk_num
        chunks = None if size is None else (size, left)
        return super().forward(hidden_states, attention_mask, chunks=chunks, **kwargs)  # type: ignore[misc]

    def _apply_chunk_attention(self, attention_mask: torch.Tensor | None, hidden_states: torch.Tensor) -> Any:
        make = super()._apply_chunk_attention  # type: ignore[misc]
        if is_graph():
            return make(attention_mask, hidden_states)
        small = None if attention_mask is None else attention_mask[:, None, None].bool()
        return SeamlessMask.of(small, lambda _: make(attention_mask, hidden_states))
