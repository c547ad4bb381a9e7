"""One causal layer of relative attention on music: the fused operator against the reference, gradient by gradient."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from triton_relattn import RelativePositions, fused_relative_attention
from triton_relattn.testing import last_place

from ..music.tokens import VOCABULARY
from .sweep import HEAD_DIM, HEADS

# Both sum thousands of float32 products in different orders. Errors of up to three times the reference's are rounding; a wrong
# formula has far larger ones.
FACTOR = 3
ULPS = 2


@dataclass(frozen=True)
class Row:
    """The errors of one tensor."""

    name: str
    size: float
    """Largest magnitude of the golden tensor."""
    reference_error: float
    error: float
    allowed: float
    problem: str | None
    """Why the comparison fails; None if it holds."""

    def cells(self) -> tuple[str, ...]:
        """Return name, size, errors and verdict as text."""
        errors = (self.reference_error, self.error, self.allowed)
        verdict = "ok" if self.problem is None else "FAILED"
        return (self.name, f"{self.size:.2e}", *(f"{error:.1e}" for error in errors), verdict)


def compare(name: str, actual: torch.Tensor, reference: torch.Tensor, golden: torch.Tensor) -> Row:
    """Largest error of ``actual``, and the allowed one: FACTOR times that of ``reference``, plus ULPS units in the last place.

    Args:
        reference: the reference's result in the precision of ``actual``.
        golden: the reference's result in float64.
    """
    size = float(golden.abs().max())
    reference_error = float((reference.double() - golden).abs().max())
    error = float((actual.double() - golden).abs().max())
    allowed = FACTOR * reference_error + ULPS * last_place(size, actual.dtype)
    problem = None
    if not all(bool(tensor.isfinite().all()) for tensor in (actual, reference, golden)):
        problem = f"{name} has values that are not finite"
    elif size == 0 or not bool(actual.any()):
        problem = f"{name} is all zero, so nothing was compared"
    elif not error <= allowed:
        problem = f"{name} is off by {error:.2e}, more than the {allowed:.2e} that is allowed"
    return Row(name, size, reference_error, error, allowed, problem)


class RelativeAttentionLayer(nn.Module):
    """Embedding, one causal layer of attention with a Music Transformer table, and the loss of the next token."""

    def __init__(self, length: int) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.positions = RelativePositions(-(length - 1), 0)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.to_logits = nn.Linear(width, VOCABULARY, bias=False)
        self.table = nn.Parameter(torch.empty(length, HEAD_DIM))
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        for linear in (self.query, self.key, self.value, self.output, self.to_logits):
            nn.init.normal_(linear.weight, std=width**-0.5)  # unit variance in, unit variance out

    def forward(self, tokens: torch.Tensor, implementation: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Output of the attention layer (1, N, width) and the loss of each of the N predictions, for N + 1 tokens."""
        hidden = self.embedding(tokens[None, :-1])
        projections = (self.query, self.key, self.value)
        q, k, v = (project(hidden).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for project in projections)
        attended: Any = fused_relative_attention(
            q, k, v, self.table, positions=self.positions, is_causal=True, implementation=implementation
        )
        output = self.output(attended.transpose(1, 2).flatten(-2))
        return output, nn.functional.cross_entropy(self.to_logits(output)[0], tokens[1:], reduction="none")


def _run(layer: RelativeAttentionLayer, tokens: torch.Tensor, implementation: str | None) -> dict[str, torch.Tensor]:
    """Losses, output and the gradient of every parameter, by name."""
    output, losses = layer(tokens, implementation)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    gradients = torch.autograd.grad(losses.mean(), parameters)
    results = {"loss of each token": losses.detach(), "layer output": output.detach()}
    return results | {f"gradient of {name}": gradient for name, gradient in zip(names, gradients, strict=True)}


def check(tokens: torch.Tensor, device: str) -> tuple[float, list[Row]]:
    """Return the layer's mean loss, and one row per tensor: fused against the reference, both in float32, golden in float64."""
    torch.manual_seed(0)
    layer = RelativeAttentionLayer(len(tokens) - 1).to(device)
    tokens = tokens.to(device)
    golden = _run(copy.deepcopy(layer).double(), tokens, "reference")
    reference = _run(layer, tokens, "reference")
    fused = _run(layer, tokens, None)
    loss = float(fused["loss of each token"].mean())
    return loss, [compare(name, fused[name], reference[name], golden[name]) for name in golden]
