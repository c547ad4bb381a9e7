"""A Music Transformer and a Parakeet layer over several processes, each of which has a part of the sequence (gloo, on a CPU).

    python -m examples.context_parallel --ranks 4

Both are compared with one process in float64: losses and gradients of all parameters at each step. Each rank has only its own
positions: attention gathers keys and values, Parakeet's convolution gets the edges of its neighbours, and all other layers work
by position. The output has the largest differences, and the bytes that each rank has sent for attention.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bench.verbs.options import positive
from examples.music.chorales import IGNORED, load, training_batch
from examples.music.tokens import VOICES
from examples.music_transformer import MusicTransformer, Settings, token_losses
from triton_relattn import RelativePositions, distributed, fused_relative_attention, tables
from triton_relattn._command_line import Parser
from triton_relattn.nn import RelativeAttention

STEPS = 3
EDGE = 4  # positions of each neighbour that Parakeet's convolution needs


class Counted(TorchDispatchMode):
    """Counts the elements that this rank sends to others for attention."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.triton_relattn.exchange.default:
            message, _, leaving, _ = args  # leaving: elements for each rank
            self.sizes += [size * message.itemsize for rank, size in enumerate(leaving) if rank != dist.get_rank()]
        return func(*args, **(kwargs or {}))

    def __str__(self) -> str:
        return f"{len(self.sizes)} messages, {sum(self.sizes)} bytes"


def train(model: nn.Module, loss: Callable[[int], torch.Tensor]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of some steps, and the gradients of the last one, summed over all ranks."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.05), []
    for step in range(STEPS):
        optimizer.zero_grad()
        part = loss(step)
        part.backward()
        total = part.detach().clone()
        for tensor in (total, *(parameter.grad for parameter in model.parameters())):
            if dist.is_initialized() and tensor is not None:
                dist.all_reduce(tensor)
        optimizer.step()
        losses.append(float(total))
    return losses, {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def attend_over_ranks(
    attention: RelativeAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Attend with the rank's queries over the keys of all ranks, in place of RelativeAttention.forward."""
    query, terms = attention.encoding(query, key.shape[2])  # type: ignore[misc]  # its table does not depend on the call
    out: torch.Tensor = distributed.fused_relative_attention(
        query, key, value, **terms, **options, **attention.options, reduce_tables=False
    )
    return out


def music(length: int, is_spread: bool) -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    """A Music Transformer, and its loss for the rank's part of the sequences or for whole ones."""
    settings = Settings(length=length, distances=32, batch=2, width=32, layers=2, dropout=0.0, chorales=4)
    torch.manual_seed(0)
    model, chorales = MusicTransformer(settings).double(), load(settings.chorales)
    for attention in model.modules() if is_spread else ():
        if isinstance(attention, RelativeAttention):
            attention.forward = functools.partial(attend_over_ranks, attention)  # type: ignore[method-assign]

    def loss(step: int) -> torch.Tensor:
        inputs, targets = training_batch(chorales, length, settings.batch, True, 0, step)
        count = (targets != IGNORED).sum()
        if is_spread:
            inputs, targets = (distributed.shard(tensor, 1) for tensor in (inputs, targets))
        return token_losses(model, inputs, targets).sum() / count

    return model, loss


class Gather(torch.autograd.Function):
    """The tensors of all ranks, stacked. The gradient of each is the sum over the ranks that use it."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor) -> torch.Tensor:
        all_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(all_ranks, own)
        return torch.stack(all_ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        total = gradients[0].contiguous()
        dist.all_reduce(total)
        return total[dist.get_rank()]


def with_neighbours(states: torch.Tensor, width: int) -> torch.Tensor:
    """(B, C, N) padded with positions of the previous and the next rank, with zeros beyond the ends."""
    edges: Any = Gather.apply(torch.cat((states[..., :width], states[..., -width:]), -1))
    rank, zeros = dist.get_rank(), torch.zeros_like(states[..., :width])
    before = edges[rank - 1][..., width:] if rank > 0 else zeros
    behind = edges[rank + 1][..., :width] if rank + 1 < len(edges) else zeros
    return torch.cat((before, states, behind), -1)


def with_operator(layer: Any, length: int, is_spread: bool) -> None:
    """Make a Parakeet layer attend with the operator, and if is_spread on the rank's part of length positions."""
    attention, convolution = layer.self_attn, layer.conv.depthwise_conv
    heads = (-1, attention.head_dim)
    operator: Any = fused_relative_attention
    if is_spread:
        operator = functools.partial(distributed.fused_relative_attention, reduce_tables=False)

    def attend(hidden_states: torch.Tensor, position_embeddings: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        query, key, value = (projection(hidden_states).unflatten(-1, heads).transpose(1, 2) for projection in projections)
        rel_key = attention.relative_k_proj(position_embeddings)[0].unflatten(-1, heads).transpose(0, 1)
        query, rel_bias = tables.fold_transformer_xl(query, rel_key, attention.bias_u, attention.bias_v, attention.scaling)
        out = operator(
            query,
            key,
            value,
            rel_key,
            rel_bias=rel_bias,
            positions=RelativePositions(1 - length, length - 1),
            scale=attention.scaling,
        )
        return attention.o_proj(out.transpose(1, 2).flatten(2)), None

    def convolve(states: torch.Tensor) -> torch.Tensor:
        states = with_neighbours(states, convolution.padding[0])
        return nn.functional.conv1d(states, convolution.weight, convolution.bias, groups=convolution.groups)

    attention.forward = attend
    if is_spread:
        convolution.forward = convolve


def parakeet(length: int, is_spread: bool) -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    """A Parakeet layer, in eval mode for its BatchNorm, and a loss."""
    from transformers import ParakeetEncoderConfig
    from transformers.models.parakeet import modeling_parakeet as stock

    config = ParakeetEncoderConfig(hidden_size=32, num_attention_heads=4, intermediate_size=48, conv_kernel_size=2 * EDGE + 1)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    layer = stock.ParakeetEncoderBlock(config, 0).double().eval()
    for bias in (layer.self_attn.bias_u, layer.self_attn.bias_v):
        nn.init.normal_(bias, std=0.1)
    x = torch.randn(2, length, config.hidden_size, dtype=torch.float64)
    positions = stock.ParakeetEncoderRelPositionalEncoding(config)(x).to(x.dtype)
    wanted = torch.randn_like(x)
    with_operator(layer, length, is_spread)  # stock attention takes its softmax in float32
    if is_spread:
        x, wanted = (distributed.shard(tensor, 1) for tensor in (x, wanted))

    def loss(_: int) -> torch.Tensor:
        out = layer(x, position_embeddings=positions)
        return (out - wanted).square().sum() / length

    return layer, loss


MODELS = {"Music Transformer": music, "Parakeet layer": parakeet}


def worker(rank: int, ranks: int, length: int, folder: str) -> None:
    """Train each model in one process and over all ranks, and compare."""
    torch.set_num_threads(1)
    expected = {name: train(*make(length, False)) for name, make in MODELS.items()}
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    for name, make in MODELS.items():
        with Counted() as sent:
            losses, gradients = train(*make(length, True))
        exact_losses, exact_gradients = expected[name]
        loss = max(abs(one - other) for one, other in zip(losses, exact_losses, strict=True))
        gradient = max(float((gradients[parameter] - exact).abs().max()) for parameter, exact in exact_gradients.items())
        if rank == 0:
            print(f"{name}, {ranks} ranks, length {length}, losses {', '.join(f'{loss:.6f}' for loss in losses)}")
            print(f"  differences from one process: {loss:.1e} of losses, {gradient:.1e} of gradients; rank 0 sent {sent}")
        if not max(loss, gradient) < 1e-9:
            raise RuntimeError(f"{name}: rank {rank} differs by {loss} and {gradient}")
    dist.barrier()
    os._exit(0)  # torch's threads sometimes abort a process that exits normally


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(
        prog="python -m examples.context_parallel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=positive, default=2, help="number of processes (%(default)s)")
    parser.add_argument(
        "--length",
        type=positive,
        default=256,
        help="positions of all ranks: a multiple of 4; of the ranks, or one less (%(default)s)",
    )
    options = parser.parse_args(arguments)
    missing = -options.length % options.ranks
    if options.length % VOICES or missing > 1 or options.length < EDGE * options.ranks:
        must = f"a multiple of {VOICES}, of the ranks or one less, and at least {EDGE} times the ranks"
        parser.error(f"--length must be {must}, got {options.length}")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, (options.ranks, options.length, folder), options.ranks)


if __name__ == "__main__":
    main()
