"""Attention of ESPnet."""

from __future__ import annotations

from typing import Any

from espnet.nets.pytorch_backend.transformer import attention as stock

from .attention import RelPositionAttention


class RelPositionMultiHeadedAttention(RelPositionAttention, stock.RelPositionMultiHeadedAttention):
    pass


class LegacyRelPositionMultiHeadedAttention(RelPositionAttention, stock.LegacyRelPositionMultiHeadedAttention):
    """The older class, whose rows are of the past alone; with zero_triu it has no others."""

    @staticmethod
    def applies(module: Any) -> bool:
        return bool(module.zero_triu)


CLASSES = {
    stock.RelPositionMultiHeadedAttention: RelPositionMultiHeadedAttention,
    stock.LegacyRelPositionMultiHeadedAttention: LegacyRelPositionMultiHeadedAttention,
}
