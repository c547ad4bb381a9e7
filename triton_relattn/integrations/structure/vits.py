"""Vectors for keys and values in a window, as in VITS: its copies in RVC, GPT-SoVITS, so-vits-svc, Bert-VITS2, MeloTTS,
piper, coqui.

Source: Kim et al., "Conditional Variational Autoencoder with Adversarial Learning for End-to-End Text-to-Speech", 2021; Shaw et
al., "Self-Attention with Relative Position Representations", 2018.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ...positions import RelativePositions
from ..in_place import num_heads
from ..operators import fused_relative_attention, join_heads
from ..shadow import projections
from .kind import Kind, Reading, padded
from .roles import assigned, own_parameters


class WindowedVectors(Kind):
    """(q_i . k_j + q_i . E[j - i]) / sqrt(D) - log(1 + |j - i|), and values v_j + A[j - i]; E and A end at the window,
    zero beyond.

    The third term is there with ``proximal_bias``. With a mask, ``block_length`` hides keys that are farther away.
    """

    title = "vectors for keys and values in a window (VITS)"

    state_roles = ("query", "key")

    @classmethod
    def read(cls, module: nn.Module) -> Reading | None:
        sizes, own = projections(module), own_parameters(module)
        tables = [name for name, table in own.items() if table.dim() == 3 and table.shape[1] % 2 == 1]
        proximal = getattr(module, "proximal_bias", None)
        if len(sizes) != 4 or len(own) != len(tables) or len(tables) not in (0, 2) or not (tables or proximal is True):
            return None
        children = assigned(list(sizes), ("out", "query", "key", "value"))
        table_roles = assigned(tables, ("rel_key", "rel_value")) if tables else {}
        if children is None or table_roles is None:
            return None
        heads = num_heads(module, 0)
        channels = sizes[children["query"]][1]
        width = own[tables[0]].shape[2] if tables else channels // heads if heads else 0
        if not width or channels % width or any(own[name].shape != own[tables[0]].shape for name in tables):
            return None
        return {**children, **table_roles}, {
            "block": (getattr(module, "block_length", getattr(module, "input_length", None)),),
            "width": (width,),
            "swapped": ((1, 2) if isinstance(getattr(module, children["query"]), nn.Conv1d) else None,),  # (B, C, N)
            "proximal": (False, True) if proximal is None else (bool(proximal),),
        }

    def sizes(self, module: Any) -> Iterable[tuple[int, int]]:
        window = self.part(module, "rel_key").shape[1] // 2 if "rel_key" in self.roles else 0
        return (2, window + 7), (1, max(window - 1, 2)), (3, 2 * window + 11), (1, 2 * window + 120)

    def masks(self, batch: int, length: int) -> Iterator[tuple[str, torch.Tensor | None]]:
        yield "", None
        real = padded(batch, length)
        yield " with padding", self.stock_mask((real[:, :, None] & real[:, None, :])[:, None])
        yield ", causal", self.stock_mask(torch.ones(1, 1, length, length, dtype=torch.bool).tril()).float()

    def accepts(
        self, module: Any, query: torch.Tensor, key: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> bool:
        """Whether it is attention to a sequence's own positions; the stock class refuses the others, or has no term for them."""
        return (key is None or key.shape == query.shape) and (mask is None or mask.dim() == 4)

    def compute(
        self, module: Any, query: torch.Tensor, key: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        options, key = self.options, query if key is None else key
        q, k, v = self.project(module, query=query, key=key, value=key)
        length = q.shape[2]
        term: dict[str, Any] = {}
        if options["block"] is not None and mask is not None:
            term["window_size"] = (options["block"], options["block"])
        if "rel_key" in self.roles:
            tables = {name: self.part(module, name) for name in ("rel_key", "rel_value")}
            last = tables["rel_key"].shape[1] // 2
            if options["proximal"] and length - 1 != last:  # all tables of a call have the same rows
                more = length - 1 - last
                tables = {name: nn.functional.pad(table, (0, 0, more, more)) for name, table in tables.items()}
                last = length - 1
            term |= {name: table[0] if len(table) == 1 else table for name, table in tables.items()}
            term["positions"] = RelativePositions(-last, last, outside="zero")
        if options["proximal"]:
            distances = torch.arange(1 - length, length, device=q.device).abs()
            term["rel_bias"] = -torch.log1p(distances.to(torch.promote_types(q.dtype, torch.float32)))
            term["positions"] = RelativePositions(1 - length, length - 1, outside="zero")
        out = fused_relative_attention(q, k, v, attn_mask=self.attn_mask(mask), dropout_p=self.dropout_p(module), **term)
        return self.output(module, join_heads(out))
