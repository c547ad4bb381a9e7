"""More than one process, with torch's own engine on gloo: the same numbers as one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.conftest import PATIENCE
from tests.tolerance import assert_near
from triton_relattn import (
    RelativePositions,
    decomposed_relative_attention,
    fused_relative_attention,
    merge_attention,
)
from triton_relattn.nn import RelativeMultiheadAttention, parallel

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

PROCESSES, STEPS = 2, 3
WIDTH, HEADS, LENGTH, BATCH = 16, 4, 9, 4
KINDS: dict[str, Callable[[], RelativeMultiheadAttention]] = {
    "shaw": lambda: RelativeMultiheadAttention.shaw(WIDTH, HEADS, 3, batch_first=True, dtype=torch.float64),
    "per_head": lambda: RelativeMultiheadAttention.general(
        WIDTH, HEADS, LENGTH, per_head=True, batch_first=True, dtype=torch.float64
    ),
    "transformer_xl": lambda: RelativeMultiheadAttention.transformer_xl(WIDTH, HEADS, batch_first=True, dtype=torch.float64),
    "t5": lambda: RelativeMultiheadAttention.t5(WIDTH, HEADS, 8, 20, batch_first=True, dtype=torch.float64),
    "alibi": lambda: RelativeMultiheadAttention.alibi(WIDTH, HEADS, batch_first=True, dtype=torch.float64),
}


def model(kind: str = "shaw") -> RelativeMultiheadAttention:
    torch.manual_seed(0)
    return KINDS[kind]()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
    return x, y


def train(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """Losses of a few steps, the mean over all processes."""
    optimizer = torch.optim.Adam(module.parameters(), 0.01)
    losses = []
    for _ in range(STEPS):
        loss = (module(x, x, x)[0] - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= dist.get_world_size()
        losses.append(float(total))
    return losses


def shard(tensor: torch.Tensor, rank: int, dim: int = 0) -> torch.Tensor:
    return tensor.chunk(PROCESSES, dim)[rank]


def close(actual: Any, expected: Any) -> None:
    if isinstance(expected, list):  # of losses
        actual, expected = (torch.tensor(each, dtype=torch.float64) for each in (actual, expected))
    assert_near("actual", actual, expected, smallest=1.0)  # which the parameters are: some gradients cancel


def check_ddp(rank: int) -> None:
    x, y = data()
    expected = [float(loss) for loss in torch.load("expected.pt")]
    replicated = nn.parallel.DistributedDataParallel(model())
    close(train(replicated, shard(x, rank), shard(y, rank)), expected)


def check_fsdp(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    x, y = data()
    sharded: Any = fully_shard(model(), mesh=init_device_mesh("cpu", (PROCESSES,)))
    close(train(sharded, shard(x, rank), shard(y, rank)), [float(loss) for loss in torch.load("expected.pt")])


def check_tensor_parallel(rank: int) -> None:
    """Heads of projections and tables on different processes: output and all gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh("cpu", (PROCESSES,))
    x, y = data()
    for kind in KINDS:
        single = model(kind)
        output = single(x, x, x, is_causal=True)[0]
        (output - y).square().mean().backward()
        spread = parallelize_module(model(kind), mesh, parallel.plan())
        assert all(parameter.requires_grad for parameter in spread.parameters())
        frozen = parallelize_module(model(kind).requires_grad_(False), mesh, parallel.plan())
        assert not any(parameter.requires_grad for parameter in frozen.parameters())
        result = spread(x, x, x, is_causal=True)[0]
        close(result, output)
        (result - y).square().mean().backward()
        expected = dict(single.named_parameters())
        for name, parameter in spread.named_parameters():
            gradient = parameter.grad
            assert isinstance(gradient, DTensor), (kind, name)
            close(gradient.full_tensor(), expected[name].grad)


def check_dtensor(rank: int) -> None:
    """The operator itself, sharded by batch and by heads; gradients of shared tables are summed."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (PROCESSES,))
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    tensors = {name: normal(BATCH, HEADS, LENGTH, 8) for name in ("query", "key", "value")}
    tensors |= {"rel_key": normal(7, 8), "rel_value": normal(HEADS, 7, 8), "rel_bias": normal(HEADS, 7)}
    tensors |= {"rel_p2c": normal(HEADS, 7, 8)}
    d_out, lengths = normal(BATCH, HEADS, LENGTH, 8), torch.tensor([9, 4, 7, 1])

    def run(leaves: dict[str, torch.Tensor], d_out: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor]:
        wanted: Any = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
        out: Any = fused_relative_attention(**wanted, key_lengths=lengths, positions=RelativePositions(-3, 3, "zero"))
        return [out, *torch.autograd.grad(out, tuple(wanted.values()), d_out)]

    # Three heads of the key would be two here and one there, and no longer with their queries: everything is replicated.
    q, k = (torch.randn(2, heads, 5, 8, dtype=torch.float64, generator=generator) for heads in (6, 3))
    shared: Any = fused_relative_attention(*(distribute_tensor(each, mesh, [Shard(1)]) for each in (q, k, k)), enable_gqa=True)
    close(shared.full_tensor(), fused_relative_attention(q, k, k, enable_gqa=True))

    expected = run(tensors, d_out, lengths)
    by_batch = dict.fromkeys(("query", "key", "value"), Shard(0))
    by_heads = {**dict.fromkeys(("query", "key", "value"), Shard(1)), "rel_value": Shard(0), "rel_bias": Shard(0)}
    by_heads |= {"rel_p2c": Shard(0)}
    for placements, of_out in ((by_batch, Shard(0)), (by_heads, Shard(1))):
        placed: Any = {
            name: distribute_tensor(tensor, mesh, [placements.get(name, Replicate())]) for name, tensor in tensors.items()
        }
        of_lengths = Shard(0) if of_out == Shard(0) else Replicate()
        results: Any = run(placed, distribute_tensor(d_out, mesh, [of_out]), distribute_tensor(lengths, mesh, [of_lengths]))
        assert results[0].placements == (of_out,), "nothing is gathered on the way"
        for result, exact in zip(results, expected, strict=True):
            close(result.full_tensor(), exact)


def check_grid(rank: int) -> None:
    """Attention on a grid, sharded by batch and by heads; gradients of both tables are summed."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (PROCESSES,))
    generator = torch.Generator().manual_seed(4)
    shapes = (*[(BATCH, HEADS, 13, 8)] * 3, (7, 8), (5, 8), (BATCH, HEADS, 13, 8))
    *tensors, d_out = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)

    def run(leaves: list[torch.Tensor], d_out: torch.Tensor) -> list[torch.Tensor]:
        query, key, value, *tables = (leaf.detach().requires_grad_() for leaf in leaves)
        out = decomposed_relative_attention(query, key, value, tables[0], tables[1], (4, 3))
        return [out.detach(), *torch.autograd.grad(out, (query, key, value, *tables), d_out)]

    expected = run(tensors, d_out)
    for way in (Shard(0), Shard(1)):
        placed: Any = [distribute_tensor(tensor, mesh, [way if tensor.dim() == 4 else Replicate()]) for tensor in tensors]
        results: Any = run(placed, distribute_tensor(d_out, mesh, [way]))
        assert [each.placements[0] for each in results] == [*[way] * 4, *[Partial()] * 2], "nothing is gathered on the way"
        for result, exact in zip(results, expected, strict=True):
            close(result.full_tensor(), exact)


def check_ring(rank: int) -> None:
    """Each process has a part of the sequence; keys and values go round, and the parts are merged. Full and causal."""
    from torch.distributed.nn.functional import all_gather

    generator = torch.Generator().manual_seed(3)
    length = 2 * LENGTH
    query, key, value, d_out = (torch.randn(2, 2, length, 8, dtype=torch.float64, generator=generator) for _ in range(4))
    table = torch.randn(11, 8, dtype=torch.float64, generator=generator)
    for is_causal in (False, True):
        whole = [tensor.clone().requires_grad_() for tensor in (query, key, value, table)]
        expected: Any = fused_relative_attention(*whole, is_causal=is_causal)
        exact = torch.autograd.grad(expected, whole, d_out)

        own = [shard(tensor, rank, 2).clone().requires_grad_() for tensor in (query, key, value)]
        own_table = table.clone().requires_grad_()
        keys, values = (all_gather(tensor.contiguous()) for tensor in own[1:])
        first_query = rank * LENGTH
        merged: Any = None
        for step in range(PROCESSES):
            block = (rank + step) % PROCESSES
            offset = first_query - block * LENGTH
            part: Any = fused_relative_attention(
                own[0], keys[block], values[block], own_table, query_offset=offset, is_causal=is_causal, return_lse=True
            )
            merged = part if merged is None else merge_attention(*merged, *part)
        close(merged[0], shard(expected.detach(), rank, 2))
        gradients = torch.autograd.grad(merged[0], (*own, own_table), shard(d_out, rank, 2))
        for gradient, all_of_it in zip(gradients[:3], exact[:3], strict=True):
            close(gradient, shard(all_of_it, rank, 2))
        of_table = gradients[3].clone()
        dist.all_reduce(of_table)
        close(of_table, exact[3])


CHECKS = {
    "ddp": check_ddp,
    "fsdp": check_fsdp,
    "tensor_parallel": check_tensor_parallel,
    "dtensor": check_dtensor,
    "grid": check_grid,
    "ring": check_ring,
}


def worker(rank: int, folder: str) -> None:
    """All checks in one pair of processes, whose start takes longer than they do; a file tells how each ended."""
    import traceback

    os.chdir(folder)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=PROCESSES)
    for name, check in CHECKS.items():
        try:
            check(rank)
            outcome = "ok"
        except Exception:
            outcome = traceback.format_exc()
        Path(f"{name}-{rank}.txt").write_text(outcome)
        dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # at once: threads of torch now and then abort a process that ends by itself ("terminate called without ...")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    torch.save(train(model(), *data()), folder / "expected.pt")
    context: Any = torch.multiprocessing.spawn(worker, (str(folder),), PROCESSES, join=False)
    context.join(timeout=PATIENCE)
    for process in context.processes:
        process.kill()
    return folder


@pytest.mark.parametrize("name", CHECKS)
def test_equals_one_process(name: str, outcomes: Path) -> None:
    for rank in range(PROCESSES):
        path = outcomes / f"{name}-{rank}.txt"
        assert path.exists() and path.read_text() == "ok", path.read_text() if path.exists() else "did not end"
