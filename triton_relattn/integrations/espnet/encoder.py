"""ESPnet's Conformer encoder, which makes the mask of padding out of one for all pairs of frames."""

from __future__ import annotations

import functools
from typing import Any

import torch
from espnet2.asr.encoder import conformer_encoder as stock

from ..calls import is_graph
from ..replacement import PassesOn, with_names


def make_pad_mask(lengths: Any) -> torch.Tensor:
    """Return what the stock function does, (B, T), True of padding, T the largest length."""
    lengths = torch.as_tensor(lengths)
    mask: torch.Tensor = torch.arange(int(lengths.max()), device=lengths.device) >= lengths[:, None]
    return mask


FORWARD = with_names(stock.ConformerEncoder.forward, make_pad_mask=make_pad_mask)


class ConformerEncoder(PassesOn, stock.ConformerEncoder):
    """Encoder whose mask of padding takes no memory but its own."""

    @functools.wraps(stock.ConformerEncoder.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (stock.ConformerEncoder.forward if is_graph() else FORWARD)(self, *args, **kwargs)


CLASSES = {stock.ConformerEncoder: ConformerEncoder}
