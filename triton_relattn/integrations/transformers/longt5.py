"""LongT5's local attention. Its decoder has T5's, and transient-global attention of its encoder stays stock."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.longt5.modeling_longt5 import _get_local_attention_mask

from ... import tables
from ...positions import RelativePositions
from ..compact import Compact, rows
from ..operators import fused_relative_attention, join_heads, split_heads
from .attention import Attention


class LocalAttention(Attention):
    """q_i . k_j + b[bucket(j - i)], not scaled, in a window; the first layer makes b and passes it on."""

    small = ("position_bias",)

    def forward(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor,
        position_bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states (B, N, C), position_bias (H, R), mask bool (B, 1, blocks, size, 3 * size)."""
        passed_on, positions = position_bias, self.positions()
        if position_bias is None and self.has_relative_attention_bias:
            distances = torch.arange(positions.first, positions.last + 1, device=hidden_states.device)
            buckets = tables.t5_buckets(distances, self.relative_attention_num_buckets, self.relative_attention_max_distance)
            position_bias = self.relative_attention_bias(buckets).T
            passed_on = self.small_bias(position_bias, mask)
        real = mask[:, 0].diagonal(self.block_len, dim1=-2, dim2=-1).flatten(1)  # a frame that is not padding sees itself
        out: Any = fused_relative_attention(
            *(split_heads(project(hidden_states), self.key_value_proj_dim) for project in (self.q, self.k, self.v)),
            rel_bias=position_bias,
            positions=None if position_bias is None else positions,
            attn_mask=real[:, None, None, : hidden_states.shape[1]],
            window_size=(self.local_radius, self.local_radius),
            scale=1.0,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.o(join_heads(out)), passed_on

    def positions(self) -> RelativePositions:
        return RelativePositions(-self.local_radius, self.local_radius)

    def small_bias(self, table: torch.Tensor, mask: torch.Tensor) -> Any:
        """Return biases (H, R) for the next layer, of which stock layers make (1, 1, H, size, 3 * size), and add the mask."""
        positions, size = self.positions(), self.block_len

        def make(table: torch.Tensor) -> torch.Tensor:
            bias = rows(table, positions, size, 3 * size, size)[None, None]
            return bias + torch.where(mask > 0, 0.0, -1e10).transpose(1, 2)

        return Compact.of(table, make)

    def serves(self, mask: torch.Tensor | None) -> bool:  # type: ignore[override]
        """Return whether ours computes a call: without a mask stock attention sees all of three blocks."""
        return super().serves() and mask is not None

    def keys_per_query(self, keys: int) -> int:
        return min(keys, 3 * self.block_len)  # type: ignore[no-any-return]

    def example(self, batch: int, length: int, real: torch.Tensor | None) -> dict[str, Any]:
        real = torch.ones(batch, length).bool() if real is None else real
        mask = _get_local_attention_mask(real, self.block_len, real.device)
        given: dict[str, Any] = {"hidden_states": torch.randn(batch, length, self.d_model), "mask": mask}
        if not self.has_relative_attention_bias:
            given["position_bias"] = self.small_bias(torch.randn(self.n_heads, 2 * self.local_radius + 1), mask)
        return given
