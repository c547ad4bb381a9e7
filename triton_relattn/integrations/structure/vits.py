"""Vectors for keys and values in a window, as in VITS: its copies in RVC, GPT-SoVITS, so-vits-svc, Bert-VITS2, MeloTTS,
piper, coqui.

Source: Kim et al., "Conditional Variational Autoencoder with Adversarial Learning for End-to-End Text-to-Speech", 2021; Shaw et
al., "Self-Attention with Relative Position Representations", 2018.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...functional import fused_relative_attention
from ...positions import RelativePositions
from ..shadow import projections
from .kind import HIDDEN, SHOWN, Kind, Reading, Sample, mask_of, padded, taken, with_masks
from .roles import assigned, own_parameters


class WindowedVectors(Kind):
    """(q_i . k_j + q_i . E[j - i]) / sqrt(D) - log(1 + |j - i|), and values v_j + A[j - i]; E and A end at the window,
    zero beyond.

    The third term is there with ``proximal_bias``. With a mask, ``block_length`` hides keys that are farther away.
    """

    title = "vectors for keys and values in a window (VITS)"

    @classmethod
    def readings(cls, module: nn.Module) -> Iterator[Reading]:
        made, own = projections(module), own_parameters(module)
        tables = [name for name, each in own.items() if each.dim() == 3 and each.shape[1] % 2 == 1]
        proximal = getattr(module, "proximal_bias", None)
        if len(made) != 4 or len(own) != len(tables) or len(tables) not in (0, 2) or not (tables or proximal is True):
            return
        of_children = assigned(list(made), ("out", "query", "key", "value"))
        of_tables = assigned(tables, ("rel_key", "rel_value")) if tables else {}
        if of_children is None or of_tables is None:
            return
        heads = getattr(module, "n_heads", getattr(module, "num_heads", 0))
        channels = made[of_children["query"]][1]
        width = own[tables[0]].shape[2] if tables else channels // heads if heads else 0
        if not width or channels % width or any(own[each].shape != own[tables[0]].shape for each in tables):
            return
        block = getattr(module, "block_length", getattr(module, "input_length", None))
        choices = (False, True) if proximal is None else (bool(proximal),)
        forward = type(module).forward
        for bias, (arguments, means) in itertools.product(choices, with_masks(forward, ("query", "key"), SHOWN, HIDDEN)):
            options = {"proximal": bias, "mask": means, "block": block, "width": width}
            options["channels_first"] = isinstance(getattr(module, of_children["query"]), nn.Conv1d)
            yield Reading(tuple({**of_children, **of_tables}.items()), tuple(arguments.items()), tuple(options.items()))

    @classmethod
    def examples(cls, module: Any, reading: Reading) -> Iterator[Sample]:
        channels, first = taken(module, reading), reading.option("channels_first")
        window = getattr(module, dict(reading.roles).get("rel_key", ""), torch.empty(1, 1, 1)).shape[1] // 2
        states = [name for name, role in reading.arguments if role in ("query", "key")]
        for batch, length in ((2, window + 7), (1, max(window - 1, 2)), (3, 2 * window + 11), (1, 2 * window + 120)):
            given = {name: torch.randn((batch, channels, length) if first else (batch, length, channels)) for name in states}
            pairs = length, length
            yield Sample(f"{batch} sequences of {length}", given, pairs)
            if (mask := reading.argument("mask")) is not None:
                real = padded(batch, length)
                both = (real[:, :, None] & real[:, None, :])[:, None]
                counts = real[:, None, :] if first else real[..., None]
                means = reading.option("mask")
                yield Sample(f"{batch} sequences of {length} with padding", {**given, mask: mask_of(both, means)}, pairs, counts)
                causal = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
                yield Sample(f"{batch} sequences of {length}, causal", {**given, mask: mask_of(causal, means).float()}, pairs)

    def at_length(self, module: Any, length: int, parent: Any) -> dict[str, Any]:
        reading = self.reading
        channels, first = taken(module, reading), reading.option("channels_first")
        states = torch.empty((1, channels, length) if first else (1, length, channels), device="meta")
        return {name: states for name, role in reading.arguments if role in ("query", "key")}

    def serves(self, module: Any, query: torch.Tensor, key: torch.Tensor | None = None, mask: torch.Tensor | None = None) -> bool:
        """Whether it is attention to a sequence's own positions; the stock class refuses the others, or has no term for them."""
        return (key is None or key.shape == query.shape) and (mask is None or mask.dim() == 4)

    def compute(
        self, module: Any, query: torch.Tensor, key: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        options, others = self.options, query if key is None else key
        q, k, v = (self._heads(self.child(module, *each)) for each in (("query", query), ("key", others), ("value", others)))
        length, window, term = q.shape[2], None, {}
        if options["block"] is not None and mask is not None:
            window = (options["block"], options["block"])
        if "rel_key" in self.roles:
            tables = {name: self.part(module, name) for name in ("rel_key", "rel_value")}
            last = next(iter(tables.values())).shape[1] // 2
            if options["proximal"] and length - 1 != last:  # all tables of a call have the same rows
                more = length - 1 - last
                tables = {name: nn.functional.pad(each, (0, 0, more, more)) for name, each in tables.items()}
                last = length - 1
            term = {name: each[0] if len(each) == 1 else each for name, each in tables.items()}
            term["positions"] = RelativePositions(-last, last, outside="zero")
        if options["proximal"]:
            distances = torch.arange(1 - length, length, device=q.device).abs()
            term["rel_bias"] = -torch.log1p(distances.to(torch.promote_types(q.dtype, torch.float32)))
            term["positions"] = RelativePositions(1 - length, length - 1, outside="zero")
        mask = self.seen(mask)
        out: Any = fused_relative_attention(
            q, k, v, attn_mask=mask, window_size=window, dropout_p=self.weights_dropout(module), **term
        )
        states = out.transpose(2, 3).flatten(1, 2) if options["channels_first"] else out.transpose(1, 2).flatten(2)
        return self.output(module, states)

    def counted(self, given: dict[str, Any]) -> torch.Tensor | None:
        found = super().counted(given)
        return found if found is None or not self.options["channels_first"] else found.mT

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        width = self.options["width"]
        if self.options["channels_first"]:
            return states.unflatten(1, (-1, width)).transpose(2, 3)
        return states.unflatten(2, (-1, width)).transpose(1, 2)
