"""Shaw's attention in fairseq2."""

from __future__ import annotations

from typing import Any

import torch
from fairseq2.models.transformer.sdpa import shaw as stock

from ...positions import RelativePositions
from .sdpa import RelativeSDPA


class ShawRelativePositionSDPA(RelativeSDPA, stock.ShawRelativePositionSDPA):
    """q_i . E[clamp(j - i)], scaled, and A[clamp(j - i)] added to the values if there is such a table."""

    def term(self, query: torch.Tensor, length: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """The tables, whatever the length."""
        return query, {
            "rel_key": self.rel_k_embed.weight,
            "rel_value": None if self.rel_v_embed is None else self.rel_v_embed.weight,
            "positions": RelativePositions(-self.max_lhs_rel_pos, self.max_rhs_rel_pos),
        }


CLASSES = {stock.ShawRelativePositionSDPA: ShawRelativePositionSDPA}
