"""Attention over several processes, on gloo: the numbers of one process, for every placement, or the same error on all ranks.

Every check runs in the same four processes, whose start takes longer than most checks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import random
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import triton_relattn
from tests.conftest import PATIENCE
from tests.tolerance import assert_near
from triton_relattn import RelativePositions, merge_attention
from triton_relattn.testing import assert_within_budget

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from triton_relattn import distributed
from triton_relattn.nn import RelativeMultiheadAttention, parallel

PROCESSES, HEADS, WIDTH = 4, 12, 4
TIMEOUT = timedelta(seconds=10)
"""After which ranks give up on one that does not answer: longer than a busy machine takes to let the others begin."""
LOWEST = torch.finfo(torch.float64).min
Tensors = dict[str, torch.Tensor]
Options = dict[str, Any]
attend: Any = triton_relattn.fused_relative_attention
attend_packed: Any = triton_relattn.fused_relative_attention_varlen
on_grid: Any = triton_relattn.decomposed_relative_attention
BY_POSITION = ("query", "key", "value", "rel_query")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def operands(length: int = 23, keys: int | None = None, heads: int = HEADS, key_heads: int = HEADS) -> Tensors:
    keys = length if keys is None else keys
    key, value = normal(2, key_heads, keys, WIDTH, seed=1), normal(2, key_heads, keys, WIDTH + 1, seed=2)
    return {"query": normal(2, heads, length, WIDTH), "key": key, "value": value}


def terms(rows: int = 9) -> Tensors:
    per_head = {"rel_bias": normal(HEADS, rows), "rel_p2c": normal(HEADS, rows, WIDTH)}
    return {
        "rel_query": normal(2, HEADS, 23, 3, seed=3),
        "rel_key": normal(rows, 3),
        "rel_value": normal(HEADS, rows, 5),
        **per_head,
    }


def hiding(*shape: int, low: float, seed: int = 6) -> torch.Tensor:
    """A mask as models make them: padding's keys have a low number, and so do all keys of some queries, in one entry or all."""
    mask, draw = normal(*shape, seed=seed), random.Random(seed)
    mask[draw.randrange(shape[0]) :, :, :, draw.randrange(shape[3] + 1) :] = low
    mask[:, draw.randrange(shape[1]), draw.randrange(shape[2]) :] = low
    mask[draw.randrange(shape[0]), :, draw.randrange(shape[2])] = low
    return mask


def pack(lengths: list[int]) -> Options:
    starts = torch.tensor([0, *itertools.accumulate(lengths)])
    return {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}


def packed(**given: torch.Tensor) -> Tensors:
    return {name: (tensor[0].transpose(0, 1) if tensor.dim() == 4 else tensor) for name, tensor in given.items()}


SHORT, BEYOND = RelativePositions(-4, 4), RelativePositions(-3, 5, "zero")
CAUSAL: Options = {"is_causal": True}
CASES: dict[str, tuple[Tensors, Options]] = {
    "full": ({**operands(), "rel_key": normal(45, WIDTH)}, {}),
    "causal": ({**operands(), "rel_key": normal(23, WIDTH)}, {"positions": RelativePositions(-22, 0), **CAUSAL}),
    "terms": ({**operands(), **terms()}, {"positions": SHORT, "softcap": 3.0, "scale": 0.7, "rel_scale": -0.4}),
    "window": ({**operands(), **terms()}, {"positions": BEYOND, "window_size": (5, 0)}),
    "future": ({**operands(), **terms()}, {"positions": BEYOND, "window_size": (-1, 6)}),
    "shared_keys": ({**operands(key_heads=4), "rel_bias": normal(9)}, {"enable_gqa": True, **CAUSAL}),
    "padded": ({**operands(), **terms()}, {"key_lengths": torch.tensor([17, 3]), "positions": SHORT}),
    "offsets": ({**operands(), "rel_key": normal(9, WIDTH)}, {"query_offset": torch.tensor([-4, 9]), **CAUSAL}),
    "other_keys": ({**operands(9, 31), "rel_key": normal(9, WIDTH)}, {"query_offset": 22, **CAUSAL}),
    "mask": ({**operands(), **terms()}, {"attn_mask": normal(1, 1, 23, 23).masked_fill(normal(23, 23) > 1, -torch.inf)}),
    "key_mask": ({**operands(), **terms()}, {"attn_mask": normal(2, HEADS, 1, 23, seed=5) < 0.5}),
    "low_key_mask": ({**operands(), **terms()}, {"attn_mask": hiding(2, HEADS, 1, 23, low=LOWEST), **CAUSAL}),
    "dropout": ({**operands(), **terms()}, {"dropout_p": 0.4, "positions": SHORT}),
    "low_mask": ({**operands(), **terms()}, {"attn_mask": hiding(2, 1, 23, 23, low=LOWEST), **CAUSAL}),
    "fewer_positions_than_ranks": ({**operands(3), "rel_key": normal(5, WIDTH)}, CAUSAL),
    "packed": (packed(**operands(), **terms()), {**pack([7, 0, 1, 13, 2]), "positions": BEYOND}),
    "packed_causal": (packed(**operands(), **terms()), {**pack([11, 12]), **CAUSAL, "dropout_p": 0.3}),
    "packed_short": (packed(**operands(), **terms()), {**pack([4, 3, 5, 1, 6, 4]), "query_offset": torch.arange(6) - 3}),
}
SPREAD: tuple[tuple[int, str, str, Sequence[str]], ...] = (
    # Ranks, method, layout, cases.
    (4, "all_to_all", "contiguous", tuple(CASES)),
    (4, "all_to_all", "zigzag", ("causal", "terms", "key_mask", "dropout", "packed")),
    (3, "all_to_all", "contiguous", ("terms", "other_keys", "low_key_mask", "packed_causal")),
    (1, "all_to_all", "zigzag", ("terms", "packed")),
    (4, "gather", "contiguous", tuple(CASES)),
    (2, "gather", "zigzag", ("terms", "window", "mask", "offsets", "dropout", "packed_causal")),
)
"""What every run of the tests does. Full masks and numbers of heads that ranks do not divide are for gathered keys alone."""
GATHERED: tuple[tuple[int, str, str, Sequence[str]], ...] = tuple(
    (ranks, "gather", "zigzag", tuple(CASES)) for ranks in (2, 3, 4)
)


def differentiated(function: Callable[..., Any], tensors: Tensors, options: Options, seeds: Any) -> Tensors:
    """out, lse and the gradients of all tensors, through both."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    torch.manual_seed(7)
    out, lse = function(**leaves, **options, return_lse=True)
    found = torch.autograd.grad((out, lse), list(leaves.values()), seeds(out, lse))
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, found, strict=True))}


def results_of(function: Callable[..., Any], leaves: Any, d_out: torch.Tensor, **options: Any) -> list[Any]:
    """out and all gradients."""
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
    out = function(**leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), d_out)]


def close(actual: torch.Tensor, expected: torch.Tensor, what: Any = "") -> None:
    assert_near(str(what), actual, expected, smallest=1.0)  # which the tensors are: some gradients cancel


def own(tensor: torch.Tensor, dim: int, layout: str, rank: int, ranks: int) -> torch.Tensor:
    """A rank's positions: of a contiguous sequence parts as uneven as that, the first rank has none of the rest; of a zigzag a
    piece of the first half and the one that mirrors it."""
    total = tensor.shape[dim]
    if layout == "contiguous":
        sizes = [total // (ranks + 1) + each for each in range(ranks - 1)]
        return tensor.split([*sizes, total - sum(sizes)], dim)[rank]
    starts = [number * total // (2 * ranks) for number in range(2 * ranks + 1)]
    pieces = tensor.split([stop - start for start, stop in itertools.pairwise(starts)], dim)
    return torch.cat([pieces[rank], pieces[-1 - rank]], dim)


def seeds(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of out and lse; NaN where no key is seen, which nobody may notice."""
    return normal(*out.shape, seed=8), normal(*lse.shape, seed=9).masked_fill(lse == -torch.inf, torch.nan)


@functools.cache
def of_one_process(name: str) -> Tensors:
    return differentiated(attend_packed if name.startswith("packed") else attend, *CASES[name], seeds)


def check_spread(groups: dict[int, dist.ProcessGroup], spread: Any = SPREAD) -> None:
    """out, lse and all gradients of a rank's positions, of all cases."""
    for ranks, method, layout, names in spread:
        dist.barrier()  # which has more patience than the group
        rank = dist.get_rank()
        if rank >= ranks:
            continue
        for name in names:
            (tensors, options), is_packed = CASES[name], name.startswith("packed")
            mask = options.get("attn_mask")
            if method == "all_to_all" and mask is not None and mask.shape[2] > 1:
                continue

            def mine(each: str, tensor: torch.Tensor, cut: Any = (layout, rank, ranks), dim: int = 0 if is_packed else 2) -> Any:
                if each == "lse":
                    return own(tensor, dim + (dim == 0), *cut)
                return own(tensor, dim, *cut) if each in (*BY_POSITION, "out") else tensor

            expected = of_one_process(name)
            d_results = [mine(*each) for each in zip(("out", "lse"), seeds(expected["out"], expected["lse"]), strict=True)]
            local = {**options, "group": groups[ranks], "method": method, "layout": layout}
            if mask is not None and mask.shape[2] > 1:
                local["attn_mask"] = mine("query", mask)
            function = distributed.fused_relative_attention_varlen if is_packed else distributed.fused_relative_attention
            shards = {each: mine(each, tensor) for each, tensor in tensors.items()}
            actual = differentiated(function, shards, local, lambda *_, d_results=d_results: d_results)
            for each, exact in expected.items():
                close(actual[each], mine(each, exact), (name, method, layout, ranks, each))


def check_gathered(groups: dict[int, dist.ProcessGroup]) -> None:
    """Gathered keys, in all cases of a zigzag."""
    check_spread(groups, GATHERED)


def spread_over(mesh: Any, tensors: Tensors, kinds: dict[str, Any]) -> dict[str, Any]:
    """DTensors; replicated unless said otherwise."""
    return {name: distribute_tensor(each, mesh, kinds.get(name, [Replicate()] * mesh.ndim)) for name, each in tensors.items()}


def check_dtensor(groups: dict[int, dist.ProcessGroup]) -> None:
    """DTensors: positions over one dimension of the mesh, batch or heads over the other; the public function notices."""
    mesh, tensors, lengths = init_device_mesh("cpu", (2, 2)), CASES["terms"][0], torch.tensor([17, 9])
    d_out, options = normal(*tensors["query"].shape[:3], WIDTH + 1, seed=4), {"positions": SHORT, **CAUSAL}
    expected = results_of(attend, tensors, d_out, key_lengths=lengths, **options)
    first, second = (Shard(0), Shard(1), Replicate(), Shard(0), Shard(1)), (Shard(2), Shard(2), Shard(2), Shard(1), Shard(1))
    for kinds in map(list, zip(first, second, strict=True)):
        per_head = [Shard(0) if each == Shard(1) else Replicate() for each in kinds]
        placed = dict.fromkeys(BY_POSITION, kinds) | dict.fromkeys(("rel_value", "rel_bias", "rel_p2c"), per_head)
        of_lengths = distribute_tensor(lengths, mesh, [each if each == Shard(0) else Replicate() for each in kinds])
        d_outs = distribute_tensor(d_out, mesh, kinds)
        results = results_of(attend, spread_over(mesh, tensors, placed), d_outs, key_lengths=of_lengths, **options)
        assert list(results[0].placements) == kinds, "nothing is gathered on the way"
        for result, exact in zip(results, expected, strict=True):
            close(result.full_tensor(), exact, kinds)
    rows, packing = CASES["packed"]
    by_rows = spread_over(mesh, rows, {name: [Replicate(), Shard(0)] for name in BY_POSITION})
    close(attend_packed(**by_rows, **packing).full_tensor(), attend_packed(**rows, **packing), "packed")
    with pytest.raises(ValueError, match="one dimension of the mesh may shard"):
        both = distribute_tensor(tensors["query"], mesh, [Shard(2), Shard(2)])
        attend(both, both, both)


REPLICATED, ENTRIES, OF_HEADS, POSITIONS = Replicate(), Shard(0), Shard(1), Shard(2)
DROPPING: tuple[tuple[tuple[int, ...], tuple[Any, ...]], ...] = (
    # Sizes of a mesh, placements of what has positions.
    *(((4,), (each,)) for each in (REPLICATED, ENTRIES, OF_HEADS, POSITIONS)),
    ((2, 2), (ENTRIES, REPLICATED)),
    ((2, 2), (REPLICATED, POSITIONS)),
    ((2, 2), (POSITIONS, ENTRIES)),
    ((2, 2), (OF_HEADS, POSITIONS)),
    ((2, 2), (ENTRIES, OF_HEADS)),
    ((2, 2), (OF_HEADS, OF_HEADS)),
)


def check_dtensor_dropout(groups: dict[int, dist.ProcessGroup]) -> None:
    """Whatever the placement, what one process drops is dropped if all ranks' generators are in the same state;
    replicas are equal in any case."""
    tables = {"rel_key": normal(9, WIDTH), "rel_value": normal(HEADS, 9, WIDTH + 1), "rel_bias": normal(HEADS, 9)}
    tensors = {**operands(9, 11, key_heads=4), **tables}
    of_thirds = {**tensors, **{name: tensors[name][:, :3] for name in ("key", "value")}}  # heads of the key that no ranks divide
    of_grid = {**operands(12), "rel_pos_h": normal(5, WIDTH), "rel_pos_w": normal(7, WIDTH)}
    all_to_all = functools.partial(distributed.fused_relative_attention, method="all_to_all")
    options: Options = {"positions": SHORT, "enable_gqa": True, "dropout_p": 0.4}
    for call, leaves, others in (
        (attend, tensors, options),
        (attend, of_thirds, options),
        (all_to_all, tensors, options),
        (on_grid, of_grid, {"grid": (3, 4), "dropout_p": 0.4}),
    ):
        d_out = normal(*leaves["query"].shape[:3], WIDTH + 1, seed=4)
        torch.manual_seed(7)
        expected = results_of(on_grid if call is on_grid else attend, leaves, d_out, **others)
        for sizes, placements in DROPPING:
            of_positions = placements.count(POSITIONS)
            if (of_positions and call is on_grid) or (call is all_to_all and not of_positions):
                continue
            if leaves is of_thirds and OF_HEADS not in placements:
                continue
            mesh, what = init_device_mesh("cpu", sizes), (call, placements)
            per_head = [Shard(0) if each == Shard(1) else Replicate() for each in placements]
            kinds = dict.fromkeys(("rel_value", "rel_bias"), per_head) | dict.fromkeys(BY_POSITION, placements)
            spread = spread_over(mesh, leaves, kinds)
            torch.manual_seed(7)
            results = results_of(call, spread, distribute_tensor(d_out, mesh, placements), **others)
            for result, exact in zip(results, expected, strict=True):
                close(result.full_tensor(), exact, what)
            torch.manual_seed(dist.get_rank())
            out = call(**spread, **others).full_tensor()
            of_first = out.clone()
            dist.broadcast(of_first, 0)
            assert torch.equal(out, of_first), what


SHARED = (
    # Sizes of a mesh, whether each shards heads or positions, heads of the query and of the key.
    ((2, 2), "hp", 12, 3),
    ((2, 2), "ph", 9, 3),
    ((4, 1), "hp", 12, 6),
    ((4, 1), "hp", 6, 2),
    ((2, 2, 1), "hhp", 8, 1),
    ((2, 2, 1), "hhp", 5, 5),
    ((2, 2), "hp", 3, 1),
)


def check_dtensor_shared_keys(groups: dict[int, dist.ProcessGroup]) -> None:
    """Heads over one or two dimensions of a mesh, positions over another: each rank finds the keys that its heads share, where
    the ranks divide the heads of the key, and where they do not and these are gathered."""
    for sizes, dims, heads, key_heads in SHARED:
        mesh = init_device_mesh("cpu", sizes)
        tensors = {**operands(9, 11, heads, key_heads), "rel_key": normal(7, WIDTH), "rel_bias": normal(heads, 7)}
        mask = hiding(1, heads if key_heads > 1 else 1, 9, 11, low=LOWEST, seed=heads)
        options: Options = {"enable_gqa": True, "positions": RelativePositions(-3, 3), "attn_mask": mask}
        kinds = [Shard(1) if dim == "h" else Shard(2) for dim in dims]
        placed = dict.fromkeys(BY_POSITION, kinds) | {"rel_bias": [Shard(0) if dim == "h" else Replicate() for dim in dims]}
        d_out = normal(2, heads, 9, WIDTH + 1, seed=4)
        found = results_of(attend, spread_over(mesh, tensors, placed), distribute_tensor(d_out, mesh, kinds), **options)
        for name, result, exact in zip(("out", *tensors), found, results_of(attend, tensors, d_out, **options), strict=True):
            close(result.full_tensor(), exact, (sizes, dims, heads, key_heads, name))
    mesh = init_device_mesh("cpu", (2, 2))
    query, key = (distribute_tensor(normal(1, heads, 8, 4), mesh, [Shard(1), Shard(2)]) for heads in (9, 3))
    # Also the rank whose four heads two would divide.
    with pytest.raises(ValueError, match="9 query heads and 3 key heads are not divisible by 4 ranks"):
        distributed.fused_relative_attention(query, key, key, method="all_to_all", enable_gqa=True)


def check_grid(groups: dict[int, dist.ProcessGroup]) -> None:
    """Attention on a grid, sharded by batch and by heads; gradients of both tables are summed."""
    mesh = init_device_mesh("cpu", (2, 2))
    tensors = {name: normal(4, 4, 13, 8, seed=seed) for seed, name in enumerate(("query", "key", "value"))}
    tensors |= {"rel_pos_h": normal(7, 8), "rel_pos_w": normal(5, 8)}
    d_out = normal(4, 4, 13, 8, seed=5)
    expected = results_of(on_grid, tensors, d_out, grid=(4, 3))
    for way in ([Shard(0), Shard(1)], [Shard(1), Shard(1)]):
        placed = spread_over(mesh, tensors, dict.fromkeys(BY_POSITION, way))
        results = results_of(on_grid, placed, distribute_tensor(d_out, mesh, way), grid=(4, 3))
        of_tables = [[Partial(), Partial()]] * 2
        assert [list(each.placements) for each in results] == [*[way] * 4, *of_tables], "nothing is gathered on the way"
        for result, exact in zip(results, expected, strict=True):
            close(result.full_tensor(), exact, way)


KINDS: dict[str, Callable[..., RelativeMultiheadAttention]] = {
    "shaw": functools.partial(RelativeMultiheadAttention.shaw, 16, 4, 3),
    "per_head": functools.partial(RelativeMultiheadAttention.general, 16, 4, 24, per_head=True),
    "transformer_xl": functools.partial(RelativeMultiheadAttention.transformer_xl, 16, 4),
    "t5": functools.partial(RelativeMultiheadAttention.t5, 16, 4, 8, 20),
    "alibi": functools.partial(RelativeMultiheadAttention.alibi, 16, 4),
}


def module(kind: str) -> Any:
    torch.manual_seed(0)
    return KINDS[kind](batch_first=True, dtype=torch.float64)


def check_modules(groups: dict[int, dist.ProcessGroup]) -> None:
    """Heads of projections and tables on different ranks; positions on different ranks, beside FSDP2, and beside those heads."""
    from torch.distributed.fsdp import fully_shard

    x, d_out = normal(2, 24, 16), normal(2, 24, 16, seed=1)
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "heads"))

    def gradients(of: Any, mesh: Any = None) -> Tensors:
        rank, size = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
        own_x, own_d_out = (each.chunk(size, 1)[rank] for each in (x, d_out))
        out, _ = of(own_x, own_x, own_x, is_causal=True, key_lengths=torch.tensor([24, 13]))
        out.backward(own_d_out)
        return {"out": out.detach(), **{name: parameter.grad for name, parameter in of.named_parameters()}}

    for kind in KINDS:
        expected = gradients(module(kind))
        by_heads = parallelize_module(module(kind), line, parallel.plan())
        frozen = parallelize_module(module(kind).requires_grad_(False), line, parallel.plan())
        assert not any(parameter.requires_grad for parameter in frozen.parameters())
        ways: list[tuple[Any, Any]] = [(by_heads, None)]
        if kind != "transformer_xl":
            sharded, both = (
                parallelize_module(module(kind), mesh, parallel.context_plan()) for mesh in (line, square["context"])
            )
            fully_shard(sharded, mesh=line).set_gradient_divide_factor(1.0)
            ways += [(sharded, line), (parallelize_module(both, square["heads"], parallel.plan()), square["context"])]
        for of, mesh in ways:
            for name, actual in gradients(of, mesh).items():
                exact = expected[name]
                if name == "out" and mesh is not None:
                    exact = exact.chunk(mesh.size(), 1)[mesh.get_local_rank()]
                elif of is not by_heads and mesh is not line:  # sums over the ranks that have the same heads
                    dist.all_reduce(actual.to_local() if isinstance(actual, DTensor) else actual, group=mesh.get_group())
                close(actual.full_tensor() if isinstance(actual, DTensor) else actual, exact, (kind, mesh, name))


def check_uneven_modules(groups: dict[int, dist.ProcessGroup]) -> None:
    """The last rank may have fewer positions; if they are not as a DTensor's, all ranks say so."""
    alone, spread = module("t5"), parallelize_module(module("t5"), init_device_mesh("cpu", (4,)), parallel.context_plan())
    for length, others in ((23, 23), (7, 24), (3, 3)):
        query, key = normal(2, length, 16), normal(2, others, 16, seed=1)
        own_query, own_key = (distributed.shard(each, 1) for each in (query, key))
        expected = alone(query, key, key, is_causal=True)[0]
        close(spread(own_query, own_key, own_key, is_causal=True)[0], distributed.shard(expected, 1), (length, others))
    for length in (6, 22):
        own_query = distributed.shard(normal(2, length, 16), 1)
        with pytest.raises(ValueError, match=f"of {length} positions the ranks must have"):
            spread(own_query, own_query, own_query)


def check_training(groups: dict[int, dist.ProcessGroup]) -> None:
    """DDP and FSDP2 over the batch: losses of a few steps are those of one process."""
    from torch.distributed.fsdp import fully_shard

    x, y = normal(4, 9, 16, seed=1), normal(4, 9, 16, seed=2)

    def train(of: nn.Module, rows: slice) -> torch.Tensor:
        optimizer, losses = torch.optim.Adam(of.parameters(), 0.01), []
        for _ in range(3):
            loss = (of(x[rows], x[rows], x[rows])[0] - y[rows]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    expected, rank = train(module("shaw"), slice(None)), dist.get_rank()
    for of in (
        nn.parallel.DistributedDataParallel(module("shaw")),
        fully_shard(module("shaw"), mesh=init_device_mesh("cpu", (4,))),
    ):
        losses = train(of, slice(rank, rank + 1))
        dist.all_reduce(losses)
        close(losses / PROCESSES, expected, type(of).__name__)


def check_merging(groups: dict[int, dist.ProcessGroup]) -> None:
    """Parts of the keys that a program of its own sends about, merged by merge_attention."""
    from torch.distributed.nn.functional import all_gather

    tensors, table, rank = operands(20), normal(11, WIDTH), dist.get_rank()
    d_out = normal(2, HEADS, 20, WIDTH + 1, seed=3)
    exact = results_of(attend, {**tensors, "rel_key": table}, d_out, **CAUSAL)
    query, key, value = (tensors[name].chunk(4, 2)[rank].clone().requires_grad_() for name in BY_POSITION[:3])
    keys, values, merged = all_gather(key.contiguous()), all_gather(value.contiguous()), None
    for block in ((rank + step) % 4 for step in range(4)):
        part = attend(query, keys[block], values[block], table, query_offset=5 * (rank - block), **CAUSAL, return_lse=True)
        merged = part if merged is None else merge_attention(*merged, *part)
    assert merged is not None
    found = merged[0], *torch.autograd.grad(merged[0], (query, key, value), d_out.chunk(4, 2)[rank])
    for actual, whole in zip(found, exact[:4], strict=True):
        close(actual, whole.chunk(4, 2)[rank])


def check_compile(groups: dict[int, dist.ProcessGroup]) -> None:
    """As one graph, forward and backward; DTensors drop what one process drops."""
    x, table = normal(1, 4, 5, WIDTH, seed=dist.get_rank()).requires_grad_(), normal(23, WIDTH).requires_grad_()

    def run(x: torch.Tensor, table: torch.Tensor, method: Any) -> torch.Tensor:
        return distributed.fused_relative_attention(x * 2, x, x, table, method=method, **CAUSAL, query_offset=0).square().sum()  # type: ignore[no-any-return]

    for method in ("gather", "all_to_all"):
        ways = torch.compile(run, fullgraph=True, backend="aot_eager"), run
        for actual, exact in zip(*(torch.autograd.grad(each(x, table, method), (x, table)) for each in ways), strict=True):
            close(actual, exact, method)
    eager, mesh = functools.partial(attend, enable_gqa=True, dropout_p=0.4), init_device_mesh("cpu", (2, 2))
    compiled, whole = torch.compile(eager, fullgraph=True, backend="aot_eager"), list(operands(9, 11, key_heads=4).values())
    torch.manual_seed(7)
    expected_out = eager(*whole)
    torch.manual_seed(7)
    close(
        compiled(*(distribute_tensor(each, mesh, [Shard(1), Shard(2)]) for each in whole)).full_tensor(), expected_out, "compiled"
    )


def check_transforms(groups: dict[int, dist.ProcessGroup]) -> None:
    """Both methods under torch.func, and batched gradients: messages have arrived when they are read."""
    for method in ("gather", "all_to_all"):
        check_transforms_of(method)


def check_transforms_of(method: Any) -> None:
    tensors, mine = CASES["full"][0], functools.partial(own, layout="contiguous", rank=dist.get_rank(), ranks=4)
    query, key, value = (mine(tensors[name], 2) for name in BY_POSITION[:3])
    tables = torch.stack([scale * tensors["rel_key"] for scale in (1, -1, 2)])

    def spread(query: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return distributed.fused_relative_attention(query, key, value, table, method=method)  # type: ignore[no-any-return]

    def alone(query: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return attend(query, tensors["key"], tensors["value"], table)  # type: ignore[no-any-return]

    ways: Any = ((spread, query, mine), (alone, tensors["query"], lambda whole, dim: whole))
    for _ in range(3):  # what is read too early may be right by chance
        close(torch.vmap(spread, (None, 0))(query, tables), mine(torch.vmap(alone, (None, 0))(tensors["query"], tables), 3))
        found, batched = [], []
        for call, of_call, cut in ways:

            def loss(table: torch.Tensor, call: Any = call, of_call: Any = of_call) -> torch.Tensor:
                return call(of_call, table).square().sum()  # type: ignore[no-any-return]

            found.append(torch.vmap(torch.func.grad(loss))(tables))
            leaves = of_call.clone().requires_grad_(), tables[0].clone().requires_grad_()
            d_outs = cut(normal(3, *tensors["query"].shape[:3], WIDTH + 1), 3)
            batched.append(torch.autograd.grad(call(*leaves), leaves, d_outs, is_grads_batched=True))
        close(found[0], found[1], "gradients of each table")
        close(batched[0][0], mine(batched[1][0], 3), "batched gradients")
        close(batched[0][1], batched[1][1], "batched gradients of a table")


def check_half_precision(groups: dict[int, dist.ProcessGroup]) -> None:
    """bfloat16 over four ranks errs no more than twice as much as in one."""
    tensors, options = CASES["terms"]
    rounded, mine = {name: tensor.bfloat16() for name, tensor in tensors.items()}, (2, "contiguous", dist.get_rank(), 4)

    def cut(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return own(tensor, *mine) if name in (*BY_POSITION, "out") else tensor

    d_out = normal(2, HEADS, 23, WIDTH + 1, seed=8).bfloat16()
    exact, one = (
        results_of(attend, {n: t.to(d) for n, t in rounded.items()}, d_out.to(d), **options)
        for d in (torch.float64, torch.bfloat16)
    )
    for method in ("all_to_all", "gather"):
        call = functools.partial(distributed.fused_relative_attention, method=method)
        spread = results_of(call, {n: cut(n, t) for n, t in rounded.items()}, cut("out", d_out), **options)
        for name, result, golden, alone in zip(("out", *tensors), spread, exact, one, strict=True):
            assert_within_budget(name, result, cut(name, golden), cut(name, alone), factor=2, exact_reference=True)


def check_rounding_of_tables(groups: dict[int, dist.ProcessGroup]) -> None:
    """Parts of a table's gradient are added up before they are rounded: where they cancel, bfloat16 errs no more than twice as in
    one process."""
    query, key, value, d_out = (normal(1, 1, 48, 8, seed=seed).expand(1, 8, 48, 8).bfloat16() for seed in range(4))
    sign = torch.tensor([1, -1]).repeat_interleave(4)[
        :, None, None
    ]  # the second half of the heads takes back what the first adds
    d_out = (sign * d_out.abs() + normal(1, 8, 48, 8, seed=4) / 50).bfloat16()
    mesh, options = init_device_mesh("cpu", (4,)), {"positions": RelativePositions(-1, 1, "zero")}
    tables = {"rel_key": normal(3, 8), "rel_value": normal(3, 8), "rel_bias": normal(3), "rel_p2c": normal(3, 8)}
    tables_of_grid = {"rel_pos_h": normal(11, 8), "rel_pos_w": normal(15, 8)}
    over_ranks = functools.partial(distributed.fused_relative_attention, method="all_to_all")
    given = dict(zip(BY_POSITION, (query, key, value), strict=False))
    for call, wide, others, dims in ((attend, tables, options, (1, 2)), (on_grid, tables_of_grid, {"grid": (6, 8)}, (1,))):
        rounded = {name: table.bfloat16() for name, table in wide.items()}

        def run(call: Any, tensors: Any, tables: Any, d_out: Any, others: Any = others) -> list[Any]:
            return results_of(call, {**tensors, **tables}, d_out, **others)[4:]

        wide_tensors, wide_tables = ({name: each.double() for name, each in group.items()} for group in (given, rounded))
        exact = run(call, wide_tensors, wide_tables, d_out.double())
        found = {"one process": run(call, given, rounded, d_out)}
        for dim in dims:
            kinds = {name: [Shard(dim)] for name in BY_POSITION}
            results = run(
                call,
                spread_over(mesh, given, kinds),
                spread_over(mesh, rounded, {}),
                distribute_tensor(d_out, mesh, [Shard(dim)]),
            )
            found[f"DTensor, {dim}"] = [each.full_tensor() for each in results]
        if call is attend:
            shards = {name: distributed.shard(each, 2) for name, each in given.items()}
            found["all to all"] = run(over_ranks, shards, rounded, distributed.shard(d_out, 2))
        for way, results in found.items():
            for name, gradient, golden, alone in zip(wide, results, exact, found["one process"], strict=True):
                assert_within_budget(f"{way} {name}", gradient, golden, alone, factor=2, exact_reference=True)


def check_refusals(groups: dict[int, dist.ProcessGroup]) -> None:
    """Every rank says what is wrong, before anything is sent."""
    x = normal(1, 6, 5, 4)
    wrong: tuple[tuple[Options, str], ...] = (
        ({"method": "tree"}, "method must be one of"),
        ({"method": "ring"}, "'gather' takes all of its calls"),
        ({"layout": "striped"}, "layout must be one of"),
        ({"method": "all_to_all"}, "6 query heads .* are not divisible"),
        ({"shard_sizes": [5, 5, 5]}, r"one number per rank \(4 ranks\)"),
        ({"shard_sizes": [4] * 4}, "5 for rank"),
        ({"shard_sizes": [5] * 4, "layout": "zigzag", "key_lengths": torch.tensor([21])}, r"must lie in \[0, 20\]"),
        ({"attn_mask": torch.ones(20, 20, dtype=torch.bool)}, r"one row per query of the rank \(5\)"),
        ({"key_shard_sizes": [5] * 4}, "needs shard_sizes"),
        ({"rel_key": normal(4, 4)}, "even number of rows"),
    )
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            distributed.fused_relative_attention(x, x, x, **options)
    with pytest.raises(ValueError, match="in a zigzag, the ranks have"):
        shard = x[:, :, : 2 + dist.get_rank()]
        distributed.fused_relative_attention(shard, shard, shard, layout="zigzag", shard_sizes=[2, 3, 4, 5])
    for layout in ("contiguous", "zigzag"):
        whole = normal(3, 11)
        assert torch.equal(distributed.unshard(distributed.shard(whole, 1, layout=layout), 1, layout=layout), whole)


def check_rank_that_dies(groups: dict[int, dist.ProcessGroup]) -> None:
    """The others get an error within the timeout, also from a rank that does not answer. The last check: it ends the group."""
    x = normal(1, 4, 64, 8)
    group, rank = dist.new_group(list(range(PROCESSES)), timeout=TIMEOUT), dist.get_rank()
    for kind in ("does not answer", "dies"):
        if rank == PROCESSES - 1:
            if kind == "dies":
                time.sleep(TIMEOUT.total_seconds())  # until the others have begun
                os._exit(0)
            continue
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            distributed.fused_relative_attention(x, x, x, shard_sizes=[64] * PROCESSES, group=group)
        took = time.monotonic() - began
        assert took < PATIENCE, (kind, took)


QUICK = "spread dtensor dtensor_dropout dtensor_shared_keys grid modules uneven_modules rounding_of_tables refusals".split()
THOROUGH = "training merging compile transforms half_precision gathered rank_that_dies".split()
CHECKS = {name: globals()[f"check_{name}"] for name in (*QUICK, *THOROUGH)}


def worker(rank: int, folder: str, names: Sequence[str]) -> None:
    """The checks, in one of the processes; a file tells how each ended."""
    os.chdir(folder)
    torch.set_num_threads(1)
    patience = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=PROCESSES, timeout=patience)
    groups: Any = {ranks: dist.new_group(list(range(ranks)), timeout=patience) for ranks in range(1, PROCESSES + 1)}
    for name in names:
        try:
            CHECKS[name](groups)
            outcome = "ok"
        except Exception:
            outcome = traceback.format_exc()
        Path(f"{name}-{rank}.txt").write_text(outcome)
        if outcome != "ok":
            os._exit(1)  # which the other ranks notice at once; they would wait for this one in the check that failed
        if name != "rank_that_dies":
            dist.barrier()
    os._exit(0)  # at once: threads of torch now and then abort a process that ends by itself


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The folder with the outcomes of those checks that have been asked for. The processes are forked from one that has imported
    what all need, which takes longer than most checks."""
    folder = tmp_path_factory.mktemp("distributed")
    asked = {vars(item)["callspec"].params["name"] for item in request.session.items if item.path == Path(__file__)}
    names = [name for name in CHECKS if name in asked]
    multiprocessing.set_forkserver_preload([__name__, "torch._dynamo"])
    start = functools.partial(torch.multiprocessing.start_processes, start_method="forkserver")
    context: Any = start(worker, (str(folder), names), PROCESSES, join=False)
    deadline = time.monotonic() + PATIENCE
    with contextlib.suppress(torch.multiprocessing.ProcessExitedException):  # a check failed: its file says how
        while time.monotonic() < deadline and not context.join(timeout=deadline - time.monotonic()):
            pass  # it returns whenever a process has ended
    for process in context.processes:
        process.kill()
    return folder


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.thorough) for name in THOROUGH)])
def test_distributed(name: str, outcomes: Path) -> None:
    for rank in range(PROCESSES - (name == "rank_that_dies")):
        path = outcomes / f"{name}-{rank}.txt"
        assert path.exists() and path.read_text() == "ok", path.read_text() if path.exists() else "an earlier check failed"
