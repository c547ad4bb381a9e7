"""ESPnet's classes, and CosyVoice's copy: attention with relative positions, and the encoder that makes the mask of padding."""

from __future__ import annotations

import functools
from typing import Any

import torch
from espnet2.asr.encoder import conformer_encoder

from ..calls import is_graph
from ..enabled import PassesOn
from ..libraries import with_globals


def make_pad_mask(lengths: Any) -> torch.Tensor:
    """Return what the stock function does, (B, T), True of padding, T the largest length, without a (T, T)."""
    lengths = torch.as_tensor(lengths)
    mask: torch.Tensor = torch.arange(int(lengths.max()), device=lengths.device) >= lengths[:, None]
    return mask


STOCK = conformer_encoder.ConformerEncoder.forward
SMALL = with_globals(STOCK, make_pad_mask=make_pad_mask)


class ConformerEncoder(PassesOn):
    """Encoder whose mask of padding takes no memory but its own."""

    @functools.wraps(STOCK)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (STOCK if is_graph() else SMALL)(self, *args, **kwargs)
