"""The vision encoder of PP-FormulaNet."""

from __future__ import annotations

from transformers.models.pp_formulanet import modeling_pp_formulanet as stock

from .grid_attention import SamAttention


class PPFormulaNetVisionAttention(SamAttention, stock.PPFormulaNetVisionAttention):
    """Attention on a grid, as SAM's."""


CLASSES = {stock.PPFormulaNetVisionAttention: PPFormulaNetVisionAttention}
