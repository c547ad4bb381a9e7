"""The encoder of Nemotron ASR streaming, a FastConformer that sees chunks of frames."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.models.nemotron_asr_streaming import modeling_nemotron_asr_streaming as stock

from ...positions import RelativePositions
from ..calls import is_graph
from ..compact import Compact, to_dense
from ..enabled import PassesOn
from ..libraries import cache_name
from ..masks import ChunkedWindow
from ..operators import attend, join_heads, split_heads
from .base import Attention, Encoder, first_position, query_key_value, sees_a_key
from .masks import PADDING

CACHE = cache_name(stock.NemotronAsrStreamingEncoderBlock.forward)


class StreamingAttention(Attention):
    """(q_i + u) . k_j + (q_i + v) . R[j - i], both scaled, R projected sinusoids; a frame sees its chunk and some before."""

    small, needs = ("attention_mask",), ("chunks",)
    constants = ("position_embeddings",)  # of which all sequences have the same

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        chunks: tuple[int, int] = (1, 0),
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, Nq, C), position_embeddings (B, 2Nk - 1, C), attention_mask bool (B, 1, 1, Nk), chunks as below."""
        query, key, value = query_key_value(self, hidden_states)
        first, forgotten = first_in_chunks(chunks, cache, self.layer_idx, query.shape[2])
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        real = key.new_ones(len(key), key.shape[2], dtype=torch.bool) if attention_mask is None else attention_mask[:, 0, 0]
        window = chunk_window(real, chunks, first, forgotten)
        key, value = (pad(states, (0, 0, forgotten, 0)) for states in (key, value))

        differ = self.training and self.config.dropout_positions > 0
        last = (position_embeddings.shape[1] - 1) // 2
        left, right = window.window
        ends = max(-last, -left), min(last, right)
        rows = position_embeddings[slice(None) if differ else slice(1), last + ends[0] : last + ends[1] + 1]
        operator = functools.partial(
            attend,
            rel_keys=split_heads(self.relative_k_proj(rows), self.head_dim),
            u=self.bias_u,
            v=self.bias_v,
            positions=RelativePositions(*ends),
            scale=self.scaling,
            dropout_p=self.attention_dropout if self.training else 0.0,
            enable_gqa=True,
        )
        return self.o_proj(join_heads(window.attend(operator, query, key, value))), None

    def keys_per_query(self, keys: int) -> int:
        return min(keys, self.config.sliding_window + 1)  # type: ignore[no-any-return]

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        size, left = chunks = 4, 2
        chunk = torch.arange(length) // size
        behind = chunk[:, None] - chunk
        near = ((behind >= 0) & (behind <= left))[None, None]
        small = torch.ones(batch, 1, 1, length).bool() if real is None else real[:, None, None]
        rows = torch.randn(1, 2 * length - 1, self.config.hidden_size).expand(batch, -1, -1)
        return {
            "hidden_states": torch.randn(batch, length, self.config.hidden_size),
            "position_embeddings": rows,
            "attention_mask": Compact.of(small, lambda small: small & near),
            "chunks": chunks,
        }


def first_in_chunks(chunks: tuple[int, int], cache: Any, layer: int, queries: int) -> tuple[int, int]:
    """Return the first query's position in its chunks, and how many keys of the first one the cache has forgotten."""
    first_key = 0 if cache is None else cache.get_mask_sizes(queries, layer)[1]
    forgotten = first_key % chunks[0]
    return int(first_position(cache, layer)) - first_key + forgotten, forgotten


def chunk_window(real: torch.Tensor, chunks: tuple[int, int], first: int, forgotten: int) -> ChunkedWindow:
    """Return what queries see of keys (B, Nk), True of frames, before which there are some that were forgotten."""
    size, left = chunks
    return ChunkedWindow(real=pad(real, (forgotten, 0)), left=left * size, right=0, chunk=size, first=first)


class StreamingBlock(PassesOn):
    """Layer that sets frames without a real frame to zero before the convolution: the stock mask (B, 1, N, N) shows them."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        all_masked_rows: torch.Tensor | None = None,
        chunks: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """hidden_states (B, Nq, C), attention_mask bool (B, 1, 1, Nk)."""
        small = attention_mask.small if isinstance(attention_mask, Compact) else attention_mask
        if small is None and attention_mask is not None:
            all_masked_rows = None  # without padding, each frame sees itself
        elif small is not None and small.shape[2] == 1 and chunks is not None:
            queries = hidden_states.shape[1]
            offsets = first_in_chunks(chunks, kwargs.get(CACHE), self.self_attn.layer_idx, queries)
            all_masked_rows = ~sees_a_key(chunk_window(small[:, 0, 0], chunks, *offsets), queries)[:, None]
        given = {"attention_mask": attention_mask, "all_masked_rows": to_dense(all_masked_rows)}
        if chunks is not None:
            kwargs["chunks"] = chunks
        return super().forward(hidden_states, **given, **kwargs)  # type: ignore[misc, no-any-return]


class StreamingEncoder(Encoder):
    """Encoder with a mask of padding only; chunks, which the stock mask (B, 1, N, N) shows, go to its attention."""

    mask_function = PADDING

    def forward(self, *args: Any, num_lookahead_tokens: int | None = None, **kwargs: Any) -> Any:
        if not is_graph():
            left, right = self._resolve_attn_context(num_lookahead_tokens)
            if left >= 0:  # else all chunks see all before them
                kwargs["chunks"] = (right + 1, left // (right + 1))
        return super().forward(*args, num_lookahead_tokens=num_lookahead_tokens, **kwargs)  # type: ignore[misc]
