"""Time of a layer's attention over several H100, by a model: no GPU is needed, and none has confirmed it.

A rank computes at the rate that bench/predictions.csv has for one GPU, batch 4, 32 heads of 64, length 4096, full attention with
a table, bfloat16. A message takes as long as its bytes at the rate of the link, and LATENCY. Keys travel while the rank computes
with those it has, so a step of the ring takes the longer of the two; gradients travel a step behind their keys, on the same link.
What all-to-all exchanges, and the sum of the table's gradients, overlap with nothing. Within a node each GPU has 450 GB/s each
way (NVLink), between nodes 50 GB/s (400 Gb/s for each GPU); of both, EFFICIENCY is reached. Left out: merging the parts,
launches, the imbalance of a causal mask (layout="zigzag" has none), and that short parts fill a GPU less well.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from ..report.rows import ROOT, read
from ..report.text import table as text_table
from .options import positive

LINKS = {"NVLink": 450e9, "400 Gb/s": 50e9}
"""Bytes a second, each way."""
EFFICIENCY, LATENCY = 0.8, 15e-6
CASE = "b4 h32 n4096 d64 full bf16"
RANKS, LENGTHS = (1, 2, 4, 8, 16, 32), (16384, 65536, 262144, 1048576)
NUMBER, SUM = 2, 4  # bytes of bfloat16, and of a sum of gradients


@dataclass(frozen=True)
class Layer:
    """Attention of batch 1 over all ranks, with a shared table of a row for each distance."""

    length: int
    ranks: int
    heads: int
    width: int
    key_heads: int

    @property
    def positions(self) -> float:
        """Positions of a rank."""
        return self.length / self.ranks

    def computing(self, rate: float, products: int) -> float:
        """Seconds that a rank computes. products: 2 in the forward, 5 in the backward, as FlashAttention counts."""
        return products * 2 * self.positions * self.length * self.heads * self.width / rate

    def shard_of_keys(self, size: int) -> float:
        """Bytes of a rank's keys and values, of so many bytes a number."""
        return 2 * self.positions * self.key_heads * self.width * size

    def ring(self, rates: tuple[float, float], link: float) -> tuple[float, float, float]:
        """Seconds of forward and backward, bytes that a rank sends, and messages."""
        forward, backward = (self.computing(rate, products) for rate, products in zip(rates, (2, 5), strict=True))
        if self.ranks == 1:
            return forward + backward, 0, 0
        steps, keys, gradients = self.ranks - 1, self.shard_of_keys(NUMBER), self.shard_of_keys(SUM)
        in_forward = max(forward / self.ranks, keys / link + LATENCY)
        in_backward = max(backward / self.ranks, (keys + gradients) / link + 2 * LATENCY)
        home = gradients / link + LATENCY
        seconds = (forward + backward) / self.ranks + steps * (in_forward + in_backward) + home + self.summing(link)
        return seconds, 2 * steps * keys + (steps + 1) * gradients, 2 * steps + steps + 1

    def all_to_all(self, rates: tuple[float, float], link: float) -> tuple[float, float, float]:
        """The same."""
        computing = sum(self.computing(rate, products) for rate, products in zip(rates, (2, 5), strict=True))
        if self.ranks == 1:
            return computing, 0, 0
        # query and out, keys and values; their gradients back.
        of_rank = 2 * (2 * self.positions * self.heads * self.width * NUMBER + self.shard_of_keys(NUMBER))
        sent = of_rank * (self.ranks - 1) / self.ranks
        return computing + sent / link + 4 * LATENCY + self.summing(link), sent, 4 * (self.ranks - 1)

    def summing(self, link: float) -> float:
        """Seconds that the ranks take to add up the gradients of the table, in a ring."""
        size = (2 * self.length - 1) * self.width * SUM
        return 2 * (self.ranks - 1) * (size / self.ranks / link + LATENCY)


def rates() -> tuple[float, float]:
    """Operations a second of forward and backward, predicted for one H100."""
    rows = [
        row
        for row in read(ROOT / "bench" / "predictions.csv")
        if (row["target"], row["verb"], row["case"]) == ("sm_90", "speed", CASE)
    ]
    by_direction = {row["direction"]: float(row["tflops"]) for row in rows if row["method"] == "triton_relattn" and row["tflops"]}
    return by_direction["forward"] * 1e12, by_direction["backward"] * 1e12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", type=positive, default=16, help="heads of query (%(default)s)")
    parser.add_argument("--key-heads", type=positive, default=16, help="heads of key and value (%(default)s)")
    parser.add_argument("--width", type=positive, default=64, help="width of a head (%(default)s)")
    parser.add_argument("--lengths", type=positive, nargs="+", default=LENGTHS, help="lengths of the sequence (%(default)s)")
    parser.add_argument("--ranks", type=positive, nargs="+", default=RANKS, help="GPUs (%(default)s)")


def run(options: argparse.Namespace) -> int:
    if options.heads % options.key_heads:
        raise argparse.ArgumentError(None, f"--key-heads must divide the {options.heads} heads, got {options.key_heads}")
    found = rates()
    print(f"{options.heads} heads of {options.width}, {options.key_heads} of the keys; forward and backward of one layer\n")
    head = (
        "length",
        "ranks",
        *(f"{method}, {link}" for method in ("ring", "all-to-all") for link in LINKS),
        "ring sends",
        "all-to-all sends",
    )
    body = []
    for length in options.lengths:
        for ranks in options.ranks:
            layer, cells, sends = Layer(length, ranks, options.heads, options.width, options.key_heads), [], []
            alone = Layer(length, 1, options.heads, options.width, options.key_heads).ring(found, 1.0)[0]
            for method in (layer.ring, layer.all_to_all):
                for rate in LINKS.values():
                    seconds, sent, messages = method(found, rate * EFFICIENCY)
                    cells.append(f"{1e3 * seconds:.2f} ms ({alone / seconds / ranks:.0%})")
                sends.append(f"{sent / 2**20:.0f} MiB in {messages:.0f}")
            if options.heads % ranks or options.key_heads % ranks:
                cells[2:], sends[1] = ["-", "-"], "-"
            body.append((f"{length}", f"{ranks}", *cells, *sends))
    print(text_table(head, body))
    print("\n(share of what the ranks could compute at best)")
    return 0
