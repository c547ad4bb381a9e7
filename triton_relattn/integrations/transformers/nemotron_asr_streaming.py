"""The encoder of Nemotron ASR streaming, a FastConformer that sees chunks of frames."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad
from transformers.models.nemotron_asr_streaming import modeling_nemotron_asr_streaming as stock

from ...positions import RelativePositions
from ..calls import is_graph
from ..compact import Compact, dense_of
from ..operators import attend, join_heads, split_heads
from ..replacement import PassesOn, argument_name
from .attention import Attention, first_position, query_key_value
from .encoder import Encoder
from .masks import PADDING

CACHE = argument_name(stock.NemotronAsrStreamingEncoderBlock.forward, "cache")


class StreamingAttention(Attention):
    """(q_i + u) . k_j + (q_i + v) . R[j - i], both scaled; a frame sees its chunk and some chunks before it.

    Each chunk of queries is a batch entry, with a copy of the keys that it sees. R, a row per distance and head, is made of
    sinusoids; only the rows of distances that are seen are projected.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        chunks: tuple[int, int] | None = None,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states (B, Nq, C), position_embeddings (B, 2Nk - 1, C), attention_mask bool (B, 1, 1, Nk), True of frames."""
        query, key, value = query_key_value(self, hidden_states)
        parts = Chunks(chunks, cache, self.layer_idx, query.shape[2])
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if attention_mask is None:
            attention_mask = key.new_ones(len(key), 1, 1, key.shape[2], dtype=torch.bool)
        mask = parts.split_keys(attention_mask.mT).mT.flatten(0, 1)
        query = parts.split_queries(query).flatten(0, 1)
        key, value = (parts.split_keys(states).flatten(0, 1) for states in (key, value))

        differ = self.training and self.config.dropout_positions > 0
        last = (position_embeddings.shape[1] - 1) // 2
        ends = max(-last, 1 - parts.num_keys), min(last, parts.size - 1)
        rows = position_embeddings[slice(None) if differ else slice(1), last + ends[0] : last + ends[1] + 1]
        rel_keys = split_heads(self.relative_k_proj(rows), self.head_dim)
        out = attend(
            query,
            key,
            value,
            rel_keys,
            self.bias_u,
            self.bias_v,
            RelativePositions(*ends),
            self.scaling,
            attn_mask=mask,
            query_offset=parts.left * parts.size,
            dropout_p=self.attention_dropout if self.training else 0.0,
            enable_gqa=True,
        )
        return self.o_proj(join_heads(parts.join(out))), None

    small = ("attention_mask",)

    def serves(self, **given: Any) -> bool:
        return super().serves(**given) and given.get("chunks") is not None

    def keys_of_a_query(self, keys: int) -> int:
        return min(keys, self.config.sliding_window + 1)  # type: ignore[no-any-return]

    constants = ("position_embeddings",)  # of which all sequences have the same

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


class Chunks:
    """Queries in chunks that are counted from position 0, each with the keys of its own and of some chunks before it.

    A cache may have forgotten the first of these keys, and the first chunk may have begun before the first query.
    """

    def __init__(self, sizes: tuple[int, int] | None, cache: Any, layer: int, queries: int) -> None:
        """Count chunks. Call this before the cache is updated.

        sizes: length of a chunk, and number of chunks that a query sees before its own; None: there is one chunk.
        """
        first = int(first_position(cache, layer))
        self.first_key = 0 if cache is None else cache.get_mask_sizes(queries, layer)[1]
        self.size, self.left = sizes or (first + queries, 0)
        self.queries, self.before = queries, first % self.size
        self.count = -(-(self.before + queries) // self.size)
        self.start = first - self.before - self.left * self.size
        self.num_keys = (self.left + 1) * self.size

    def split_keys(self, states: torch.Tensor) -> torch.Tensor:
        """Cut (B, H, Nk, D) into (B, chunks, H, num_keys, D), with zeros for keys that do not exist."""
        missing = self.first_key - self.start
        after = (self.left + self.count) * self.size - missing - states.shape[2]
        return pad(states, (0, 0, missing, after)).unfold(2, self.num_keys, self.size).permute(0, 2, 1, 4, 3)

    def split_queries(self, states: torch.Tensor) -> torch.Tensor:
        """Cut (B, H, Nq, D) into (B, chunks, H, size, D)."""
        after = self.count * self.size - self.before - self.queries
        return pad(states, (0, 0, self.before, after)).unflatten(2, (self.count, self.size)).transpose(1, 2)

    def join(self, out: torch.Tensor) -> torch.Tensor:
        """Join (B * chunks, H, size, D) to (B, H, Nq, D)."""
        out = out.unflatten(0, (-1, self.count)).transpose(1, 2).flatten(2, 3)
        return out[:, :, self.before : self.before + self.queries]


class StreamingBlock(PassesOn):
    """Layer in which frames that see no real frame are set to zero before the convolution. The stock encoder finds these frames
    in its (B, 1, N, N) mask."""

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
            parts = Chunks(chunks, kwargs.get(CACHE), self.self_attn.layer_idx, hidden_states.shape[1])
            sees = parts.split_keys(small.mT).any(3, keepdim=True).expand(-1, -1, -1, parts.size, -1)
            all_masked_rows = ~parts.join(sees.flatten(0, 1))[..., 0]
        given = {"attention_mask": attention_mask, "all_masked_rows": dense_of(all_masked_rows)}
        out: torch.Tensor = super().forward(hidden_states, **given, **kwargs, **({} if chunks is None else {"chunks": chunks}))
        return out


class StreamingEncoder(Encoder):
    """Encoder with a mask of padding only; it passes the chunks, which the stock encoder puts in a mask (B, 1, N, N), to its
    attention."""

    mask_function = PADDING

    def forward(self, *args: Any, num_lookahead_tokens: int | None = None, **kwargs: Any) -> Any:
        if not is_graph():
            left, right = self._resolve_attn_context(num_lookahead_tokens)
            if left >= 0:  # else all chunks see all before them
                kwargs["chunks"] = (right + 1, left // (right + 1))
        return super().forward(*args, num_lookahead_tokens=num_lookahead_tokens, **kwargs)
