"""The longest audio that fits into a GPU, stock and enabled, by counted tensors: ``python -m bench.report.longest``.

The formulas are those of docs/long-audio.md, whose table this prints; tests/cpu/test_docs.py compares them with what the stock
code and an enabled model allocate.
"""

from __future__ import annotations

from dataclasses import dataclass

GIBIBYTE, FLOAT, MEL, HOP = 2**30, 4, 80, 0.01
"""Bytes; bytes of a float32; channels of a spectrogram, and seconds between its frames."""
CARDS = (24, 40, 80)
WHOLE = 38
"""Vectors of the model's width that a layer keeps per frame for its backward."""
WAVE = 132 * 2 * 64 * FLOAT
"""Bytes per query of the backward's workspace: multiprocessors of an H100 x programs on each x keys of a program."""


@dataclass(frozen=True)
class Pairs:
    """Tensors of a layer with an element per head and pair of frames.

    forward: at the peak of inference. training: at that of a forward with dropout. saved: for the backward. dropped: whether a
    dropout mask comes on top of the last two, which otherwise stay as they are without dropout.
    """

    forward: int
    training: int
    saved: int
    dropped: bool


EAGER, SDPA = Pairs(7, 8, 2, True), Pairs(4, 4, 1, False)
"""NeMo's default and ESPnet; a bias passed to scaled_dot_product_attention: transformers, and NeMo with use_pytorch_sdpa."""


@dataclass(frozen=True)
class Encoder:
    """A Conformer.

    factor, channels: of the subsampling. parameters: those of the published model. front: maps as large as that of the
    first convolution that training keeps. positions: rows of sinusoids per frame. masks: elements per frame and unit of
    width that a layer drops outside of its attention.
    """

    name: str
    pairs: Pairs
    layers: int
    width: int
    heads: int
    factor: int
    channels: int
    parameters: float
    front: float
    positions: int
    masks: int

    @property
    def first_map(self) -> int:
        """Elements per frame of the output of the subsampling's first convolution, which has half of the channels and steps."""
        return self.channels * self.factor // 2 * MEL // 2


ENCODERS = (
    Encoder("Conformer-L, NeMo", EAGER, 18, 512, 8, 4, 512, 121e6, front=2.5, positions=8, masks=12),
    Encoder("FastConformer-XL, NeMo", EAGER, 24, 1024, 8, 8, 256, 616e6, front=3.1, positions=16, masks=12),
    Encoder("FastConformer-XL, transformers", SDPA, 24, 1024, 8, 8, 256, 616e6, front=1.7, positions=2, masks=8),
)


def forward(encoder: Encoder, frames: int, ours: bool) -> float:
    """Bytes of the tensors of one sequence's inference at their peak, without the weights."""
    attention = 0.0 if ours else encoder.pairs.forward * encoder.heads * frames**2
    layer = attention + 10 * encoder.width * frames
    return FLOAT * (max(2 * encoder.first_map * frames, layer) + encoder.positions * encoder.width * frames)


def training(encoder: Encoder, frames: int, ours: bool, checkpointing: bool = False, mask: int = 1, gpu: bool = True) -> float:
    """Bytes of the tensors of one sequence's forward and backward at their peak, without weights, gradients and optimizer.

    mask: bytes of an element of a dropout mask, 0 without dropout. gpu: count the workspace of the kernels' backward.
    """
    layers = 1 if checkpointing else encoder.layers
    saved = FLOAT * WHOLE * encoder.width + mask * encoder.masks * encoder.width
    inputs = FLOAT * encoder.width * encoder.layers if checkpointing else 0
    front = FLOAT * encoder.front * encoder.first_map
    linear = front + max(layers * saved + inputs, FLOAT * 1.25 * encoder.first_map) + FLOAT * encoder.positions * encoder.width
    if ours:
        return linear * frames + (max(2**28, WAVE * frames) if gpu else 0)
    dropped = mask if encoder.pairs.dropped else 0
    per_pair = (layers - 1) * (FLOAT * encoder.pairs.saved + dropped) + FLOAT * encoder.pairs.training + dropped
    if encoder.pairs.dropped and not mask:
        per_pair -= FLOAT
    return linear * frames + per_pair * encoder.heads * frames**2


WAYS = {
    "inference": (forward, 4),
    "inference in bfloat16": (lambda encoder, frames, ours: forward(encoder, frames, ours) / 2, 2),
    "training, every layer checkpointed": (lambda encoder, frames, ours: training(encoder, frames, ours, checkpointing=True), 16),
    "training": (training, 16),
}
"""Name -> tensors, and bytes per parameter: a weight; with its gradient and Adam's two moments."""


def longest(encoder: Encoder, way: str, ours: bool, card: int) -> float:
    """Seconds of audio whose tensors, with the weights, fit into a card of so many GiB; 0 if the weights alone do not."""
    count, per_parameter = WAYS[way]
    room = card * GIBIBYTE - per_parameter * encoder.parameters
    least, most = 0, 2**24
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if count(encoder, middle, ours) <= room else (least, middle)
    return least * encoder.factor * HOP


def text(seconds: float) -> str:
    """Two digits, in minutes or hours."""
    number, unit = (seconds / 60, "min") if seconds < 3600 else (seconds / 3600, "h")
    return f"{number:.1f} {unit}" if number < 9.95 else f"{number:.0f} {unit}"


def table() -> str:
    """The table of docs/long-audio.md: stock -> enabled."""
    lines = ["| encoder | | " + " | ".join(f"{card} GB" for card in CARDS) + " |", "|---" * (2 + len(CARDS)) + "|"]
    for way in WAYS:
        for encoder in ENCODERS:
            pairs = ([text(longest(encoder, way, ours, card)) for ours in (False, True)] for card in CARDS)
            cells = (f"{stock} → **{enabled}**" for stock, enabled in pairs)
            lines.append(f"| {encoder.name} | {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
