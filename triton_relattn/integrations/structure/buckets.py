"""A bias by bucket of the distance that each layer makes of its own embedding, as in T5 and UMT5.

Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2019.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ... import tables
from ...positions import RelativePositions
from ..operators import fused_relative_attention, join_heads
from ..shadow import projections
from .kind import ADDED, HIDDEN, SHOWN, Kind, Reading, Refused
from .roles import POSITIONS, assigned, is_table, own_parameters, split_words

RETURNS_ITS_BIAS = (
    "it returns its bias (1, H, N, N) for other layers to add: layers can only be replaced together, which enable does for T5 of "
    "transformers; in a model of your own pass on the embedding's rows by tables.t5_buckets, (H, R), and pass them as rel_bias"
)


class BucketedBias(Kind):
    """scale * q_i . k_j + b[bucket(j - i)]; b, an embedding of a number for each bucket and head; scale 1 or 1 / sqrt(D)."""

    title = "a bias by bucket of the distance (T5)"
    mask_dims = 4

    meanings = (SHOWN, HIDDEN, ADDED)

    @classmethod
    def read(cls, module: nn.Module) -> Reading | None:
        sizes = projections(module)
        embeddings = [name for name, child in module.named_children() if is_table(child) and "bias" in split_words(name)]
        children = assigned(list(sizes), ("out", "query", "key", "value"))
        if len(embeddings) != 1 or children is None or own_parameters(module):
            return None
        buckets, heads = getattr(module, embeddings[0]).weight.shape
        channels = sizes[children["query"]][1]
        if channels % heads:
            return None
        width = channels // heads
        return {**children, "table": embeddings[0]}, {
            "both": (True, False),
            "scale": (1.0, width**-0.5),
            "width": (width,),
            "buckets": (buckets,),
            "furthest": (getattr(module, "relative_attention_max_distance", getattr(module, "max_distance", 128)),),
        }

    @classmethod
    def arguments(cls, forward: Any) -> Iterator[dict[str, str]]:
        for arguments in super().arguments(forward):
            if POSITIONS in arguments.values():
                raise Refused(RETURNS_ITS_BIAS)
            yield arguments

    def sizes(self, module: Any) -> Iterable[tuple[int, int]]:
        return (2, 19), (1, 5), (1, self.options["furthest"] + 13)

    def states(self, batch: int, length: int) -> torch.Tensor:
        return 0.3 * super().states(batch, length)

    def accepts(self, module: Any, states: torch.Tensor, mask: torch.Tensor | None = None) -> bool:
        return states.dim() == 3 and (mask is None or mask.dim() == 4)

    def compute(self, module: Any, states: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        options = self.options
        q, k, v = self.project(module, query=states, key=states, value=states)
        positions = RelativePositions(-options["furthest"], options["furthest"] if options["both"] else 0)
        distances = torch.arange(positions.first, positions.last + 1, device=q.device)
        buckets = tables.t5_buckets(distances, options["buckets"], options["furthest"], options["both"])
        out = fused_relative_attention(
            q,
            k,
            v,
            rel_bias=self.part(module, "table")(buckets).T,
            positions=positions,
            attn_mask=self.attn_mask(mask),
            scale=options["scale"],
            dropout_p=self.dropout_p(module),
        )
        return self.output(module, join_heads(out))
