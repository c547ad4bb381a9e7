"""The choice of dropped probabilities: a function of seed, sequence, head, query and key alone, in all implementations.

Philox4x32 turns the counter (key // 4, query, head, sequence) into four words of 32 bits, of which key takes word key % 4. It has
7 rounds, the fewest that pass the statistical tests of its authors (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011). None of the four counters can overflow, so no two probabilities share a word. kernels/tile/blocks.py computes the same in
Triton.
"""

from __future__ import annotations

from typing import Any

import torch

ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW_BITS = 0xFFFFFFFF


def draw_seed(device: torch.device | str | None = None) -> torch.Tensor:
    """Draw a seed, (1,) int64, from the device's default generator. It is a tensor: a CUDA graph draws anew at each replay."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def whole_origins(num_sequences: int, num_heads: int, device: torch.device) -> torch.Tensor:
    """Return AttentionTensors.dropout_origins of a whole call; a part of them, with its part of the tensors, drops as the whole
    does."""
    numbers = torch.cartesian_prod(*(torch.arange(count, device=device) for count in (num_sequences, num_heads)))
    return torch.nn.functional.pad(numbers.view(num_sequences, num_heads, 2), (0, 2))


def draw_dropout(query: torch.Tensor, num_sequences: int) -> dict[str, torch.Tensor]:
    """Draw dropout_seed for a call. Of a DTensor also return dropout_origins, to be cut as query is, and let all ranks have the
    largest of their seeds, so that replicas stay replicas."""
    seed = draw_seed(query.device)
    if not hasattr(query, "placements"):
        return {"dropout_seed": seed}
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh: Any = query.device_mesh  # type: ignore[attr-defined]
    replicated = [Replicate()] * mesh.ndim
    for dim in range(mesh.ndim):  # distribute_tensor, which sends what the first rank has, cannot be traced (torch 2.13)
        largest = [*replicated[:dim], Partial("max"), *replicated[dim + 1 :]]
        seeds: Any = DTensor.from_local(seed, mesh, largest, run_check=False)
        seed = seeds.redistribute(placements=replicated).to_local()
    dropout = {"dropout_seed": seed, "dropout_origins": whole_origins(num_sequences, query.shape[1], seed.device)}
    return {name: DTensor.from_local(tensor, mesh, replicated, run_check=False) for name, tensor in dropout.items()}


def largest_dropped(dropout_p: float) -> int:
    """Return the largest word that drops its probability. dropout_p is positive."""
    return max(round(dropout_p * 2**32), 1) - 1


def keep_scale(dropout_p: float) -> float:
    """Return the factor of the probabilities that stay."""
    return 1 / (1 - dropout_p) if dropout_p < 1 else 0.0


def keep_mask(
    seed: torch.Tensor, dropout_p: float, sequence: torch.Tensor, head: torch.Tensor, query: torch.Tensor, keys: slice
) -> torch.Tensor:
    """Return the mask of kept probabilities, (..., keys), for sequence, head and query indices that broadcast to (..., 1)."""
    start, stop = keys.start // 4, (keys.stop + 3) // 4
    # The counters have the shapes of their indices, so that the first two rounds and half of the third are done on small tensors.
    c0, c1, c2, c3 = torch.arange(start, stop, device=seed.device), query, head, sequence
    k0, k1 = seed & _LOW_BITS, (seed >> 32) & _LOW_BITS
    for _ in range(ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # the low 64 bits are right, whatever the sign
        c0, c1, c2, c3 = _mixed(product1, c1, k0), product1, _mixed(product0, c3, k1), product0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW_BITS, (k1 + _KEY_STEPS[1]) & _LOW_BITS
    most = largest_dropped(dropout_p)
    words = torch.broadcast_tensors(*(word > most for word in (c0, c1 & _LOW_BITS, c2, c3 & _LOW_BITS)))
    keep = torch.stack(words, -1)
    return keep.flatten(-2)[..., keys.start - 4 * start : keys.stop - 4 * start]


def _mixed(product: torch.Tensor, counter: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Return the high 32 bits of a product, xor a counter, of which the low 32 bits count, xor a step of the key."""
    return ((product >> 32) ^ counter ^ step).bitwise_and_(_LOW_BITS)
