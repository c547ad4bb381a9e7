"""Encoders on the real tokens of a batch alone: padded tensors in and out, (1, total, C) in between.

A class in place of an encoder (:class:`Packs`) reads the mask of padding, once a batch, as a :class:`Packing`. The stock forward
then runs on (1, total, C): all that it does to tokens one by one is the same. The lengths travel as the mask. A
:class:`PackedMask` is a Compact whose small form is the Packing, with which the operator attends within each sequence, and whose
dense form is the mask of blocks on the diagonal, (1, 1, total, total). A distance within a block is that within the sequence, so
stock attention computes the same, in short calls, in modules that were refused, and with a bias that knows nothing of it.
Layers that mix neighbours get padded states (:class:`MixesNeighbours`). What the stock forward returns is padded again.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only

from .compact import Compact, are_plain
from .comparison import FLOAT32_LIMIT, GRADIENT, LIMIT, OUTPUT, Differs, Refused, largest_difference, model_dtype
from .enabled import FEWEST, PassesOn, enabled_class, restore
from .isolation import Promoted, in_own_thread
from .shadow import with_random_weights

PACKED = "_triton_relattn_packed"
"""The attribute of an encoder that packs: a Counter of its batches, by why they stayed padded; "" of those that were packed."""
MOST_REAL = 0.9
"""The share of real tokens up to which a batch is packed: above it there is nothing to gain."""


class Packing(NamedTuple):
    """Where the real tokens of a padded batch (B, N) are, in order.

    starts (B + 1,), int32, of the sequences; longest, their largest length; places (total,), of tokens in the flattened batch;
    real (B, N), bool.
    """

    starts: torch.Tensor
    longest: int
    places: torch.Tensor
    real: torch.Tensor

    @classmethod
    def of(cls, real: torch.Tensor) -> Packing | str:
        """Return the packing of a batch whose real tokens are True; or why it stays padded."""
        lengths = real.sum(1, dtype=torch.int32)
        starts = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        runs = (real & ~pad(real, (1, 0))[:, :-1]).sum(1)  # of real tokens, in each sequence
        longest, total, most_runs = torch.stack((lengths.max(), starts[-1], runs.max())).tolist()  # waits for a GPU, once
        if most_runs > 1:
            return "a mask with holes"
        if total > MOST_REAL * real.numel() or total == 0:
            return "little padding" if total else "no real token"
        number = torch.arange(len(real), device=real.device)
        begin = number * real.shape[1] + real.int().argmax(1) - starts[:-1]  # a run's place less its place among real tokens
        places = begin.repeat_interleave(lengths, output_size=total) + torch.arange(total, device=real.device)
        return cls(starts, longest, places, real)

    def unpad(self, states: torch.Tensor) -> torch.Tensor:
        """(B, N, ...) to (1, total, ...)."""
        return states.flatten(0, 1).index_select(0, self.places.to(states.device))[None]

    def pad(self, states: torch.Tensor) -> torch.Tensor:
        """(1, total, ...) to (B, N, ...), with zeros at padding."""
        padded = states.new_zeros(self.real.numel(), *states.shape[2:])
        return padded.index_copy(0, self.places.to(states.device), states[0]).unflatten(0, self.real.shape)

    def blocks(self) -> torch.Tensor:
        """Return which tokens see each other (1, 1, total, total), bool."""
        sequence = self.real.nonzero()[:, 0]
        return (sequence[:, None] == sequence)[None, None]


class PackedMask(Compact):
    """The starts of a packed batch's sequences, in place of its mask and of the same rank."""

    packing: Packing

    @classmethod
    def of_packing(cls, packing: Packing, dims: int, make: Callable[[Packing], torch.Tensor]) -> Any:
        """make: returns the mask (1, 1, total, total) that stock attention takes."""
        mask = cls._wrapped(packing.starts.view(*(1,) * (dims - 1), -1), make, False)
        mask.packing = packing
        return mask

    @property
    def small(self) -> Packing:  # type: ignore[override]
        return self.packing._replace(starts=self._plain().flatten())  # which is on the device of the layer

    def changed(self, small: torch.Tensor) -> PackedMask:
        mask: PackedMask = self._wrapped(small, self._make, False)
        mask.packing = self.packing
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.dim, torch.Tensor.shape.__get__):  # type: ignore[attr-defined]
            plain = args[0]._plain()
            return plain.dim() if func is torch.Tensor.dim else plain.shape
        return super().__torch_function__(func, types, args, kwargs)


class Packs(PassesOn):
    """Mixin of classes in place of encoders: batches of sentences run without their padding."""

    states: tuple[str, ...] = ("hidden_states",)
    """The names of the argument (B, N, ...) that is unpadded: the first one that is given."""
    mask_dims = 4
    """How many dimensions the mask has that the stock forward passes on as it is."""
    padded_with: tuple[str, ...] = ()
    """Arguments with which a batch stays padded."""
    neighbours: tuple[str, ...] = ()
    """Children that mix neighbours."""

    def dense_mask(self: Any, packing: Packing) -> torch.Tensor:
        """Return the mask that stock attention takes: here added to the scores."""
        dtype = next(self.parameters()).dtype
        return torch.zeros((), dtype=dtype, device=packing.starts.device).where(packing.blocks(), torch.finfo(dtype).min)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts: Counter[str] | None = vars(self).get(PACKED)
        forward = super().forward  # type: ignore[misc]
        if counts is None or are_plain():  # graphs have no sizes that depend on data
            return forward(*args, **kwargs)
        given = {**dict(zip(_arguments(self.stock_class), args, strict=False)), **kwargs}
        packing = self.packing(given)
        counts["" if isinstance(packing, Packing) else packing] += 1
        if not isinstance(packing, Packing):
            return forward(*args, **kwargs)
        name = next(name for name in self.states if given.get(name) is not None)
        mask = PackedMask.of_packing(packing, self.mask_dims, self.dense_mask)
        states = packing.unpad(given[name])
        out = forward(**{**given, name: states, "attention_mask": mask})
        padded: dict[int, torch.Tensor] = {}  # the last states are returned twice

        def pad_again(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.shape[:2] != states.shape[:2]:
                return tensor
            if id(tensor) not in padded:
                padded[id(tensor)] = packing.pad(tensor)
            return padded[id(tensor)]

        return tree_map_only(torch.Tensor, pad_again, out)

    def packing(self: Any, given: dict[str, Any]) -> Packing | str:
        """Return the packing of a call's batch, or why it stays padded."""
        config = getattr(self, "config", None)
        if given.get("output_attentions", getattr(config, "output_attentions", False)):
            return "attention weights are asked for"
        if asked := [name for name in (*CACHES, *self.padded_with) if given.get(name) is not None]:
            return f"{asked[0]} is given"
        mask = given.get("attention_mask")
        mask = mask.small if isinstance(mask, Compact) else mask
        if mask is None:
            return "no mask"
        if mask.dim() == 4 and mask.shape[1:3] == (1, 1) and mask.dtype == torch.bool:
            mask = mask[:, 0, 0]  # of padding, as the model makes it
        return Packing.of(mask.bool()) if mask.dim() == 2 else "a mask of three or four dimensions"

    def width(self: Any) -> int:
        """Return the width of the states, for a comparison."""
        return int(self.config.hidden_size)

    def mask_of(self: Any, real: torch.Tensor) -> Any:
        """Return the mask that the stock forward takes of which tokens are real (B, N), for a comparison."""
        return real.long()

    def on_disable(self: Any) -> None:
        super().on_disable()
        unpack(self)


@functools.cache
def _arguments(stock: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of a forward's arguments."""
    return tuple(inspect.signature(stock.forward).parameters)[1:]


CACHES = ("cache", "past_key_values", "encoder_hidden_states")


class MixesNeighbours(PassesOn):
    """In place of a layer between packed states that reads neighbours, a convolution: it gets padded states.

    Its last argument is the mask.
    """

    def forward(self: Any, *args: Any) -> Any:
        *states, mask = args
        if not isinstance(mask, PackedMask):
            return super().forward(*args)  # type: ignore[misc]
        packing: Packing = mask.small
        return packing.unpad(super().forward(*map(packing.pad, states), packing.real.long()))  # type: ignore[misc]


NOT_PACKED = {
    "Wav2Vec2ConformerEncoder": "its convolutions read padding, so that results without it are others",
    "SwitchTransformersStack": "its router drops tokens by their place in the batch",
    "LongT5Stack": "it cuts blocks at multiples of their length",
}
"""Why encoders are not packed, by class."""
SEQUENCES, LONGEST = (5, 2, 0, 1), 6
"""The lengths that are compared, and that of the padded batch."""


def pack(encoder: Any) -> float:
    """Let an encoder pack, and return how far packed and padded results differ; raise Refused if they do, or if one raises."""
    if "forward" in vars(encoder):
        raise Refused("its forward was replaced (by a hook?); call enable first")
    unpack(encoder)  # if it packs already: it may have got an adapter meanwhile
    for name in encoder.neighbours:
        if (child := getattr(encoder, name)) is not None:
            child.__class__ = enabled_class(type(child), MixesNeighbours, None)
    try:
        difference = in_own_thread(lambda: _difference(encoder))
    except BaseException:
        unpack(encoder)
        raise
    vars(encoder)[PACKED] = Counter()
    return difference


def unpack(encoder: Any) -> None:
    """Let an encoder that packs have its padding again."""
    vars(encoder).pop(PACKED, None)
    for name in encoder.neighbours:
        if isinstance(child := getattr(encoder, name), MixesNeighbours):
            restore(child)


def _difference(encoder: Any) -> float:
    """Return how far packed and padded results differ, outputs of real tokens and all gradients, with random weights."""
    model = with_random_weights(encoder, are_shared=True).eval()
    leaves = dict(model.named_parameters())
    dtype = model_dtype(model)
    limit = LIMIT if dtype == torch.float64 else FLOAT32_LIMIT

    def results(real: torch.Tensor, is_packed: bool, by_operator: bool, gradients: bool) -> dict[str, torch.Tensor]:
        """Return the output of real tokens, and all gradients; by the operator, or by stock attention with the mask of blocks."""
        counts = vars(model)[PACKED] = Counter[str]() if is_packed else None
        for part in model.modules():
            vars(part)[FEWEST] = 0 if by_operator else 1 << 62
        draws = torch.Generator().manual_seed(1)
        states, d_out = (
            torch.randn(*real.shape, model.width(), dtype=dtype, generator=draws) * real[..., None]  # as embeddings have it
            for _ in range(2)
        )
        mask = model.mask_of(real)
        given = {model.states[0]: states.requires_grad_(gradients), "attention_mask": mask}
        given["attention_mask"] = mask.cast(dtype) if isinstance(mask, Compact) else mask
        with torch.set_grad_enabled(gradients), Promoted() if dtype == torch.float64 else nullcontext():
            out = model(**given)[0]
            if counts is not None and not counts[""]:
                raise Refused(f"it stays padded: {', '.join(counts)}")
            found = {OUTPUT: out.detach() * real[..., None]}
            if gradients:
                inputs = [states, *leaves.values()]
                of_input, *others = torch.autograd.grad(out, inputs, d_out, allow_unused=True, materialize_grads=True)
                found |= {f"{GRADIENT}{name}": gradient for name, gradient in zip(leaves, others, strict=True)}
                found[f"{GRADIENT}its input"] = of_input * real[..., None]
        return found

    worst, place, lengths = 0.0, torch.arange(LONGEST), torch.tensor(SEQUENCES)[:, None]
    for side, real, gradients in (("right", place < lengths, True), ("left", place >= LONGEST - lengths, False)):
        padded = results(real, False, True, gradients)
        for by_operator in (True, False)[: 1 + (not gradients)]:
            name = f"sentences padded on the {side}"
            try:
                packed = results(real, True, by_operator, gradients)
                worst = max(worst, largest_difference(name, packed, padded, limit))
            except Differs as error:
                raise Refused(f"packed it computes something else. {error}") from error
    return worst
