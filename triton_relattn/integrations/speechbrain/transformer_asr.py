"""SpeechBrain's transformer for speech recognition, which makes the masks."""

from __future__ import annotations

import inspect
from typing import Any

from speechbrain.lobes.models.transformer import TransformerASR as stock

from ..calls import is_graph
from ..libraries import with_globals
from ..masks import ChunkedWindow
from ..replacement import PassesOn
from .attention import RelPosMHAXL


def make_masks(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Return what ``make_transformer_src_tgt_masks`` does, but no mask (T, T) of what the encoder's attention sees."""
    given = inspect.signature(stock.make_transformer_src_tgt_masks).bind(*args, **kwargs).arguments
    causal, dynchunktrain_config = given.pop("causal", False), given.pop("dynchunktrain_config", None)
    src_padding, tgt_padding, _, tgt_mask = stock.make_transformer_src_tgt_masks(**given)

    def make() -> Any:
        return stock.make_transformer_src_tgt_masks(*args, **kwargs)[2]

    window = None
    if causal:
        window = ChunkedWindow(right=0, make=make)
    elif dynchunktrain_config is not None:
        left = dynchunktrain_config.left_context_size_frames()
        window = ChunkedWindow(left=-1 if left is None else left, right=0, chunk=dynchunktrain_config.chunk_size, make=make)
    return src_padding, tgt_padding, window, tgt_mask


FORWARD, ENCODE = (
    with_globals(function, make_transformer_src_tgt_masks=make_masks)
    for function in (stock.TransformerASR.forward, stock.TransformerASR.encode)
)


class TransformerASR(PassesOn, stock.TransformerASR):
    """Model that passes causality and chunks to the attention of its Conformer, instead of a mask (T, T)."""

    @staticmethod
    def applies(module: Any) -> bool:
        return module.attention_type == "RelPosMHAXL" and type(module.encoder).__name__ == "ConformerEncoder"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return FORWARD(self, *args, **kwargs) if self._is_enabled() else super().forward(*args, **kwargs)

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        return ENCODE(self, *args, **kwargs) if self._is_enabled() else super().encode(*args, **kwargs)

    def _is_enabled(self) -> bool:
        return not is_graph() and all(isinstance(layer.mha_layer, RelPosMHAXL) for layer in self.encoder.layers)
