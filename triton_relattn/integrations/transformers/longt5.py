"""LongT5 with local attention; where its encoder has transient-global attention, its decoder."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.longt5 import modeling_longt5 as stock

from ... import tables
from ...positions import RelativePositions
from ..compact import Compact, rows
from ..operators import fused_relative_attention
from .encoder import Encoder
from .heads import InPlace, join_heads, split_heads
from .t5 import BucketedAttention


class LongT5Attention(BucketedAttention, stock.LongT5Attention):
    """Attention of the decoder."""


class LongT5LocalAttention(InPlace, stock.LongT5LocalAttention):
    """q_i . k_j + b[bucket(j - i)], not scaled, in a window; the first layer makes b and passes it on.

    The stock path computes it in blocks of queries, each with the blocks around it.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states (B, N, C), position_bias (H, R), mask bool (B, 1, blocks, size, 3 * size)."""
        passed = position_bias
        if position_bias is None and self.has_relative_attention_bias:
            position_bias = self._table(hidden_states.device)
            passed = self._passed_on(position_bias, mask)
        query, key, value = (
            split_heads(projection(hidden_states), self.key_value_proj_dim) for projection in (self.q, self.k, self.v)
        )
        term: dict[str, Any] = {}
        if position_bias is not None:
            term = {"rel_bias": position_bias, "positions": RelativePositions(-self.local_radius, self.local_radius)}
        seen = None
        if mask is not None:  # a frame that is not padding sees itself
            seen = mask[:, 0].diagonal(self.block_len, dim1=-2, dim2=-1).flatten(1)[:, : hidden_states.shape[1]]
        out: Any = fused_relative_attention(
            query,
            key,
            value,
            attn_mask=None if seen is None else seen[:, None, None, :],
            window_size=(self.local_radius, self.local_radius),
            scale=1.0,
            dropout_p=self.dropout if self.training else 0.0,
            **term,
        )
        return self.o(join_heads(out)), passed

    small = ("position_bias",)

    def serves(self, mask: torch.Tensor | None = None, **given: Any) -> bool:
        """Return whether ours computes a call: without a mask stock attention sees all of three blocks."""
        return super().serves(**given) and mask is not None

    def are_weights(self, shape: torch.Size, pairs: tuple[int, int]) -> bool:
        return shape[-2:] == (self.block_len, 3 * self.block_len)

    def keys_of_a_query(self, keys: int) -> int:
        return min(keys, 3 * self.block_len)

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        real = torch.ones(batch, length).bool() if real is None else real
        mask = stock._get_local_attention_mask(real, self.block_len, real.device)
        given: dict[str, Any] = {"hidden_states": torch.randn(batch, length, self.d_model), "mask": mask}
        if not self.has_relative_attention_bias:
            given["position_bias"] = self._passed_on(torch.randn(self.n_heads, 2 * self.local_radius + 1), mask)
        return given

    def _passed_on(self, table: torch.Tensor, mask: torch.Tensor | None) -> Any:
        """Return biases (H, R) for the next layer, of which stock layers make (1, 1, H, size, 3 * size), and add the mask."""
        positions, size = RelativePositions(-self.local_radius, self.local_radius), self.block_len

        def make(table: torch.Tensor) -> torch.Tensor:
            bias = rows(table, positions, size, 3 * size, size)[None, None]
            return bias if mask is None else bias + torch.where(mask > 0, 0.0, -1e10).transpose(1, 2)

        return Compact.of(table, make)

    def _table(self, device: torch.device) -> torch.Tensor:
        """Return the biases (H, R), a row for each distance in the window."""
        distances = torch.arange(-self.local_radius, self.local_radius + 1, device=device)
        buckets = tables.t5_buckets(distances, self.relative_attention_num_buckets, self.relative_attention_max_distance)
        return self.relative_attention_bias(buckets).T


class LongT5Stack(Encoder, stock.LongT5Stack):
    pass


CLASSES = {
    stock.LongT5Attention: LongT5Attention,
    stock.LongT5LocalAttention: LongT5LocalAttention,
    stock.LongT5Stack: LongT5Stack,
}
