"""A bias by bucket of the distance that each layer makes of its own embedding, as in T5 and UMT5.

Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2019.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ... import tables
from ...functional import fused_relative_attention
from ...positions import RelativePositions
from ..operators import join_heads, split_heads
from ..shadow import projections
from .kind import ADDED, HIDDEN, SHOWN, Kind, Reading, Refused, Sample, mask_of, padded, taken, with_masks
from .roles import assigned, is_table, own_parameters, words_of

HANDED_ON = (
    "it returns its bias (1, H, N, N) for other layers to add: layers can only be replaced together, which enable does for T5 of "
    "transformers; in a model of your own pass on the embedding's rows by tables.t5_buckets, (H, R), and pass them as rel_bias"
)


class BucketedBias(Kind):
    """scale * q_i . k_j + b[bucket(j - i)]; b, an embedding of a number for each bucket and head; scale 1 or 1 / sqrt(D)."""

    title = "a bias by bucket of the distance (T5)"

    @classmethod
    def readings(cls, module: nn.Module) -> Iterator[Reading]:
        made = projections(module)
        embeddings = [name for name, child in module.named_children() if is_table(child) and "bias" in words_of(name)]
        of_children = assigned(list(made), ("out", "query", "key", "value"))
        if len(embeddings) != 1 or of_children is None or own_parameters(module):
            return
        buckets, heads = getattr(module, embeddings[0]).weight.shape
        channels = made[of_children["query"]][1]
        masks = with_masks(type(module).forward, ("states",), SHOWN, HIDDEN, ADDED)
        if channels % heads or not masks:
            return
        if any("positions" in arguments.values() for arguments, _ in masks):
            raise Refused(HANDED_ON)
        roles = {**of_children, "table": embeddings[0]}
        furthest = getattr(module, "relative_attention_max_distance", getattr(module, "max_distance", 128))
        width = channels // heads
        for (arguments, means), both, scale in itertools.product(masks, (True, False), (1.0, width**-0.5)):
            options = {"mask": means, "both": both, "scale": scale, "width": width, "buckets": buckets, "furthest": furthest}
            yield Reading(tuple(roles.items()), tuple(arguments.items()), tuple(options.items()))

    @classmethod
    def examples(cls, module: Any, reading: Reading) -> Iterator[Sample]:
        channels = taken(module, reading)
        states, mask, means = reading.argument("states"), reading.argument("mask"), reading.option("mask")
        for batch, length in ((2, 19), (1, 5), (1, reading.option("furthest") + 13)):
            given: dict[str, Any] = {states: 0.3 * torch.randn(batch, length, channels)}  # type: ignore[dict-item]
            pairs = length, length
            yield Sample(f"{batch} sequences of {length}", given, pairs)
            if mask is not None:
                real = padded(batch, length)
                given = {**given, mask: mask_of(real[:, None, None], means)}
                yield Sample(f"{batch} sequences of {length} with padding", given, pairs)

    def serves(self, module: Any, states: torch.Tensor, mask: torch.Tensor | None = None) -> bool:
        return states.dim() == 3 and (mask is None or mask.dim() == 4)

    def compute(self, module: Any, states: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        options = self.options
        q, k, v = (split_heads(self.child(module, role, states), options["width"]) for role in ("query", "key", "value"))
        last = options["furthest"] if options["both"] else 0
        positions = RelativePositions(-options["furthest"], last)
        distances = torch.arange(positions.first, positions.last + 1, device=q.device)
        buckets = tables.t5_buckets(distances, options["buckets"], options["furthest"], options["both"])
        out: Any = fused_relative_attention(
            q,
            k,
            v,
            rel_bias=self.part(module, "table")(buckets).T,
            positions=positions,
            attn_mask=self.seen(mask),
            window_size=(-1, -1),  # what the stock class shows is meant
            scale=options["scale"],
            dropout_p=self.weights_dropout(module),
        )
        return self.output(module, join_heads(out))
