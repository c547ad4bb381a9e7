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
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import triton_relattn
from tests.conftest import PATIENCE
from tests.cpu.small_call import WIDTH as EMBEDDING
from tests.cpu.small_call import module
from tests.expected import INPUTS, TABLES
from tests.tolerance import assert_near
from triton_relattn import RelativePositions
from triton_relattn.testing import assert_within_budget

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from triton_relattn import distributed

PROCESSES, HEADS, WIDTH = 4, 12, 4
TIMEOUT = timedelta(seconds=10)
"""The timeout for a rank that does not answer: longer than a busy machine takes to start the others."""
LOWEST = torch.finfo(torch.float64).min
Tensors = dict[str, torch.Tensor]
Options = dict[str, Any]
attend: Any = triton_relattn.fused_relative_attention
attend_packed: Any = triton_relattn.fused_relative_attention_varlen
on_grid: Any = triton_relattn.decomposed_relative_attention
over_ranks: Any = distributed.fused_relative_attention
over_ranks_packed: Any = distributed.fused_relative_attention_varlen
BY_POSITION = tuple(name for name in INPUTS if name not in TABLES)
SHORT, BEYOND = RelativePositions(-4, 4), RelativePositions(-3, 5, "zero")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def operands(length: int = 23, keys: int | None = None, heads: int = HEADS, key_heads: int = HEADS) -> Tensors:
    keys = length if keys is None else keys
    key, value = normal(2, key_heads, keys, WIDTH, seed=1), normal(2, key_heads, keys, WIDTH + 1, seed=2)
    return {"query": normal(2, heads, length, WIDTH), "key": key, "value": value}


def all_terms(*per_head: str) -> Tensors:
    """A call with all tables; some have rows per head."""
    rows = {"rel_key": (9, 3), "rel_value": (9, WIDTH + 1), "rel_bias": (9,), "rel_p2c": (9, WIDTH)}
    tables = {name: normal(*(HEADS,) * (name in per_head), *shape) for name, shape in rows.items()}
    return {**operands(), "rel_query": normal(2, HEADS, 23, 3, seed=3), **tables}


def hiding(*shape: int, low: float = LOWEST, seed: int = 6) -> torch.Tensor:
    """A mask as models build it: padding keys have a low number, and for some queries all keys do, in one or all batch
    entries."""
    mask, draw = normal(*shape, seed=seed), random.Random(seed)
    mask[draw.randrange(shape[0]) :, :, :, draw.randrange(shape[3] + 1) :] = low
    mask[:, draw.randrange(shape[1]), draw.randrange(shape[2]) :] = low
    mask[draw.randrange(shape[0]), :, draw.randrange(shape[2])] = low
    return mask


PER_HEAD, CAUSAL = ("rel_value", "rel_bias", "rel_p2c"), {"is_causal": True}
TERMS = all_terms(*PER_HEAD)
BASES: dict[str, tuple[Tensors, Options]] = {
    "terms": (TERMS, {}),
    "other tables per head": (all_terms("rel_key"), {}),
    "a full table": ({**operands(), "rel_key": normal(45, WIDTH)}, {"positions": RelativePositions(-22, 22)}),
    "shared keys": ({**operands(key_heads=4), "rel_key": normal(9, WIDTH), "rel_bias": normal(9)}, {"enable_gqa": True}),
    "other keys": ({**operands(9, 31), "rel_key": normal(9, WIDTH)}, {}),
    "fewer positions than ranks": ({**operands(3), "rel_key": normal(5, WIDTH)}, {"positions": RelativePositions(-2, 2)}),
}
ALIKE = ((5, 5, 5, 8), (4, 1, 4, 14), (0, 10, 5, 8), (9, 9, 5), (7, 0, 1, 13, 2), (4, 3, 5, 1, 6, 4))
PACKS = [(lengths,) for lengths in ALIKE] + [((5, 5, 13), (13, 5, 5)), ((1, 20, 2), (9, 3, 11)), ((11, 12), (2, 21))]
"""Lengths of packed sequences, of their keys too if those differ. The first or last row of some begins a rank's piece of 23 rows,
where four ranks have 4, 5, 5 and 9; some are empty or short."""


def features(queries: int = 23, keys: int = 23, sequences: int = 2) -> dict[str, Options]:
    """What else a call may have, by its sizes."""
    by_key, by_pair = normal(2, HEADS, 1, keys, seed=5) < 0.5, normal(2, 1, queries, keys, seed=9)
    return {
        "nothing": {},
        "lengths": {"key_lengths": torch.tensor([keys - 2, keys // 3])},
        "a window": {"window_size": (3, 3)},
        "a window of the past": {"window_size": (4, 0)},
        "a window of the future": {"window_size": (-1, 6)},
        "causality": CAUSAL,
        "an offset": {"query_offset": 5},
        "offsets": {"query_offset": torch.tensor([-4, 9, 2, -1, 0, 3])[:sequences]},
        "a key mask": {"attn_mask": by_key},
        "a key mask of all heads": {"attn_mask": by_key[:, :1]},
        "a low key mask": {"attn_mask": hiding(2, HEADS, 1, keys)},
        "a mask": {"attn_mask": by_pair < 1},
        "a mask of pairs": {"attn_mask": by_pair[1, 0].masked_fill(by_pair[0, 0] > 1, -torch.inf)},
        "a low mask": {"attn_mask": hiding(2, 1, queries, keys)},
        "a clipped table": {"positions": SHORT},
        "a table that ends": {"positions": BEYOND},
        "dropout": {"dropout_p": 0.4},
        "a softcap": {"softcap": 3.0},
        "scales": {"scale": 0.7, "rel_scale": -0.4},
    }


class Case(NamedTuple):
    """A call by its tensors, features and packing."""

    base: str
    features: tuple[str, ...]
    packs: Sequence[tuple[int, ...]] = ()

    @property
    def is_valid(self) -> bool:
        """Whether no argument has two values; masks and lengths are those of a batch."""
        found = features()
        names = [*BASES[self.base][1], *(argument for name in self.features for argument in found[name])]
        return len(names) == len({*names}) and not (self.packs and {"attn_mask", "key_lengths"} & {*names})

    def call(self) -> tuple[Tensors, Options]:
        tensors, options = BASES[self.base]
        queries, keys = (tensors[name].shape[2] for name in ("query", "key"))
        found = features(queries, keys, len(self.packs[0]) if self.packs else 2)
        for name in self.features:
            options = options | found[name]
        if not self.packs:
            return tensors, options
        starts = [torch.tensor([0, *itertools.accumulate(lengths)]) for lengths in self.packs]
        for which, cu_seqlens in zip("qk", (starts[0], starts[-1]), strict=True):  # one tensor for both if they are alike
            options |= {f"cu_seqlens_{which}": cu_seqlens, f"max_seqlen_{which}": int(cu_seqlens.diff().max())}
        return {name: tensor[0].transpose(0, 1) if name in BY_POSITION else tensor for name, tensor in tensors.items()}, options


def draw(seed: int) -> Case:
    """A call with two features, which one with a single feature does not show together."""
    choose = random.Random(seed)
    case = Case("", ())
    while not case.base or not case.is_valid:
        base, pack = choose.choice([*BASES, "terms"]), choose.choice(PACKS)
        packs = pack if BASES[base][0]["key"].shape[2] == 23 and choose.random() < 0.75 else ()
        case = Case(base, tuple(choose.sample(list(features()), 2)), packs)
    return case


SINGLE = [Case("terms", (name,)) for name in features()] + [Case(base, ("causality", "an offset")) for base in BASES]
SINGLE += [Case("terms", (name,), PACKS[number % len(PACKS)]) for number, name in enumerate(features())]
SINGLE = [case for case in SINGLE if case.is_valid]
DRAWN = [draw(seed) for seed in range(96)]

SPREAD: tuple[tuple[int, str, str, Sequence[Case]], ...] = (
    # Ranks, method, layout, cases.
    (4, "gather", "contiguous", [*SINGLE, *DRAWN[::3]]),
    (4, "all_to_all", "contiguous", SINGLE),
    (2, "gather", "contiguous", DRAWN[::2]),
    (3, "gather", "contiguous", DRAWN[1::4]),
    (3, "gather", "zigzag", DRAWN[3::4]),
    (2, "gather", "zigzag", DRAWN[1::3]),
    (4, "all_to_all", "zigzag", DRAWN[2::4]),
    (3, "all_to_all", "contiguous", DRAWN[2::5]),
    (1, "all_to_all", "zigzag", DRAWN[:4]),
)


def results(function: Callable[..., Any], tensors: Any, options: Options, gradients: Callable[..., Any]) -> dict[str, Any]:
    """out, lse if asked for, and the gradients of all tensors through both, after torch.manual_seed(7)."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    torch.manual_seed(7)
    outs = function(**leaves, **options)
    outs = outs if isinstance(outs, tuple) else (outs,)
    found = torch.autograd.grad(outs, list(leaves.values()), gradients(*outs))
    return dict(zip(("out", "lse"), (out.detach() for out in outs), strict=False)) | dict(zip(leaves, found, strict=True))


def close(actual: torch.Tensor, expected: torch.Tensor, what: Any = "") -> None:
    assert_near(str(what), actual, expected, smallest=1.0)  # the scale of the tensors: some gradients cancel


def own(tensor: torch.Tensor, dim: int, layout: str, rank: int, ranks: int) -> torch.Tensor:
    """A rank's positions. contiguous: uneven parts, the first rank without a share of the remainder; zigzag: one piece of the
    first half and its mirror image."""
    total = tensor.shape[dim]
    if layout == "contiguous":
        sizes = [total // (ranks + 1) + extra for extra in range(ranks - 1)]
        return tensor.split([*sizes, total - sum(sizes)], dim)[rank]
    starts = [number * total // (2 * ranks) for number in range(2 * ranks + 1)]
    pieces = tensor.split([stop - start for start, stop in itertools.pairwise(starts)], dim)
    return torch.cat([pieces[rank], pieces[-1 - rank]], dim)


def seeds(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of out and lse; NaN for lse where no key is visible, which must not affect any result."""
    return normal(*out.shape, seed=8), normal(*lse.shape, seed=9).masked_fill(lse == -torch.inf, torch.nan)


@functools.cache
def in_one_process(case: Case) -> Tensors:
    tensors, options = case.call()
    return results(attend_packed if case.packs else attend, tensors, options | {"return_lse": True}, seeds)


def check_spread(groups: dict[int, dist.ProcessGroup]) -> None:
    """out, lse and all gradients of a rank's positions, of all cases. Three ranks are a mesh and know all sizes; in a zigzag each
    has the gradients of tables that are due to its queries, or heads, as for DDP."""
    for ranks, method, layout, cases in SPREAD:
        dist.barrier()  # this barrier waits longer than the group's timeout
        group = groups[ranks]
        if (rank := dist.get_rank(group)) < 0:
            continue
        way: Options = {"group": group, "method": method, "layout": layout, "reduce_tables": layout == "contiguous"}
        if ranks == 3:
            way["group"] = DeviceMesh.from_group(group, "cpu")
        for case in cases:
            (tensors, options), dim = case.call(), 0 if case.packs else 2
            mask = options.get("attn_mask")
            by_query = mask is not None and mask.shape[-2] > 1
            if method == "all_to_all" and (by_query or tensors["key"].shape[1] % ranks):  # gathered keys support both
                continue

            def mine(label: str, tensor: torch.Tensor, cut: Any = (layout, rank, ranks), dim: int = dim) -> Any:
                if label == "lse":
                    return own(tensor, dim + (dim == 0), *cut)
                return own(tensor, dim, *cut) if label in (*BY_POSITION, "out") else tensor

            local: Options = options | way | {"return_lse": True}
            if mask is not None and by_query:
                local["attn_mask"] = own(mask, mask.dim() - 2, layout, rank, ranks)
            if ranks == 3:
                for name, sizes in (("query", "shard_sizes"), ("key", "key_shard_sizes")):
                    local[sizes] = [own(tensors[name], dim, layout, other, ranks).shape[dim] for other in range(ranks)]
            exact = in_one_process(case)
            d_results = [mine(*pair) for pair in zip(("out", "lse"), seeds(exact["out"], exact["lse"]), strict=True)]
            shards = {label: mine(label, tensor) for label, tensor in tensors.items()}
            function = over_ranks_packed if case.packs else over_ranks
            actual = results(function, shards, local, lambda *_, d_results=d_results: d_results)
            for label, expected in exact.items():
                if label in TABLES and not way["reduce_tables"]:
                    dist.all_reduce(actual[label], group=group)
                close(actual[label], mine(label, expected), (case, method, layout, ranks, label))


def check_autocast(groups: dict[int, dist.ProcessGroup]) -> None:
    """torch.autocast casts tensors over ranks as in one process: not a bias, whose gradient is not rounded to 16 bits either."""
    tensors = {name: tensor.float() for name, tensor in TERMS.items()}
    shards = {name: distributed.shard(tensor, 2) if name in BY_POSITION else tensor for name, tensor in tensors.items()}

    def ones(*outs: torch.Tensor) -> list[torch.Tensor]:
        return [torch.ones_like(out) for out in outs]

    for method in ("gather", "all_to_all"):
        with torch.autocast("cpu", torch.bfloat16):
            options: Options = {**CAUSAL, "return_lse": True}
            exact, found = (
                results(attend, tensors, options, ones),
                results(over_ranks, shards, options | {"method": method}, ones),
            )
        for name, expected in exact.items():
            expected = expected if name in TABLES else distributed.shard(expected, 2)
            assert_near(name, found[name], expected, tolerance=2 * torch.finfo(torch.bfloat16).eps)
        assert not torch.equal(found["rel_bias"], found["rel_bias"].bfloat16().float())


def spread_over(mesh: Any, tensors: Tensors, kinds: dict[str, Any]) -> dict[str, Any]:
    """Distribute the tensors over the mesh; replicated unless kinds says otherwise."""
    return {name: distribute_tensor(tensor, mesh, kinds.get(name, [Replicate()] * mesh.ndim)) for name, tensor in tensors.items()}


MESHES: tuple[tuple[tuple[int, ...], list[Any]], ...] = (
    # Sizes of a mesh, placements of what has positions: tables follow in their heads, numbers of batch entries in the batch.
    *(((4,), [placement]) for placement in (Replicate(), Shard(0), Shard(1), Shard(2))),
    *(((2, 2), [first, Shard(1)]) for first in (Replicate(), Shard(0), Shard(1))),
    *(((2, 2), [Shard(0), second]) for second in (Replicate(), Shard(2))),
)
GATHERED = [MESHES[number] for number in (0, 1, 3, 4, 7, 8)]


def check_dtensor(groups: dict[int, dist.ProcessGroup]) -> None:
    """DTensors that a mesh shards by batch or by heads, some of which share keys, give out and gradients of one process, and drop
    the same elements if all ranks' generators have the same state; replicas are equal in any case. What is sharded by positions
    is gathered."""
    masked: Options = {"positions": SHORT, **CAUSAL, "key_lengths": torch.tensor([17, 9]), "query_offset": torch.tensor([0, 3])}
    masked |= {"attn_mask": torch.arange(23) != torch.tensor([5, 2]).view(2, 1, 1, 1), "dropout_p": 0.4}
    tables = {"rel_key": normal(9, WIDTH), "rel_value": normal(HEADS, 9, WIDTH + 1), "rel_bias": normal(HEADS, 9)}
    shared = {heads: {**operands(9, 11, HEADS, heads), **tables} for heads in (1, 3, 4)}
    sides = {"rel_pos_h": normal(5, WIDTH), "rel_pos_w": normal(7, WIDTH)}
    calls: list[tuple[Any, Tensors, Options]] = [(attend, TERMS, masked)]
    calls += [(attend, shared[4], {"enable_gqa": True, "dropout_p": 0.4})]
    calls += [(attend, shared[heads], {"enable_gqa": True, "attn_mask": hiding(1, HEADS, 9, 11)}) for heads in (1, 3)]
    calls += [(on_grid, {**operands(12), **sides}, {"grid": (3, 4), "dropout_p": 0.4})]
    for (call, tensors, options), (sizes, placements) in itertools.product(calls, MESHES):
        if tensors["key"].shape[1] < 4 and Shard(1) not in placements:
            continue
        mesh = init_device_mesh("cpu", sizes)
        by_head = [Shard(0) if placement == Shard(1) else Replicate() for placement in placements]
        by_entry = [placement if placement == Shard(0) else Replicate() for placement in placements]
        spread = spread_over(mesh, tensors, dict.fromkeys(BY_POSITION, placements) | dict.fromkeys(PER_HEAD, by_head))
        given = {name: value for name, value in options.items() if isinstance(value, torch.Tensor)}
        others = options | spread_over(mesh, given, {name: by_entry for name, value in given.items() if len(value) == 2})
        d_out = normal(*tensors["query"].shape[:3], WIDTH + 1, seed=4)
        d_outs = distribute_tensor(d_out, mesh, placements)
        expected = results(call, tensors, options, lambda _, d_out=d_out: d_out)
        found = results(call, spread, others, lambda _, d_outs=d_outs: d_outs)
        # DTensor may shard replicated tensors, and gathers a batch of two that four ranks share, and keys that heads share.
        if tensors["key"].shape[1] % 4 == 0 and (sizes, placements) not in GATHERED:
            assert list(found["out"].placements) == placements, "something is gathered on the way"
        for name, exact in expected.items():
            close(found[name].full_tensor(), exact, (call, tensors["key"].shape, sizes, placements, name))
        torch.manual_seed(dist.get_rank())
        out = call(**spread, **others).full_tensor()
        rank_0_out = out.clone()
        dist.broadcast(rank_0_out, 0)
        assert torch.equal(out, rank_0_out), (call, placements)
    mesh, (rows, packing) = init_device_mesh("cpu", (2, 2)), Case("terms", ("a table that ends",), PACKS[4]).call()
    for placement in (Shard(0), Shard(1)):
        packed = spread_over(mesh, rows, {name: [Replicate(), placement] for name in BY_POSITION})
        packed |= spread_over(mesh, {name: value for name, value in packing.items() if isinstance(value, torch.Tensor)}, {})
        close(attend_packed(**packing | packed).full_tensor(), attend_packed(**rows, **packing), ("packed", placement))


def check_training(groups: dict[int, dist.ProcessGroup]) -> None:
    """DDP and FSDP2 over the batch give the same losses as one process for a few steps."""
    from torch.distributed.fsdp import fully_shard

    x, y = normal(4, 9, EMBEDDING, seed=1), normal(4, 9, EMBEDDING, seed=2)

    def train(layer: nn.Module, rows: slice) -> torch.Tensor:
        optimizer, losses = torch.optim.Adam(layer.parameters(), 0.01), []
        for _ in range(3):
            loss = (layer(x[rows], x[rows], x[rows])[0] - y[rows]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    expected, rank, mesh = train(module("shaw"), slice(None)), dist.get_rank(), init_device_mesh("cpu", (4,))
    layers: tuple[Any, ...] = (nn.parallel.DistributedDataParallel(module("shaw")), fully_shard(module("shaw"), mesh=mesh))
    for layer in layers:
        losses = train(layer, slice(rank, rank + 1))
        dist.all_reduce(losses)
        close(losses / PROCESSES, expected, type(layer).__name__)


def check_compile(groups: dict[int, dist.ProcessGroup]) -> None:
    """Forward and backward compile to one graph; DTensors drop the same elements as one process."""
    x, table = normal(1, 4, 5, WIDTH, seed=dist.get_rank()).requires_grad_(), normal(23, WIDTH).requires_grad_()

    def run(x: torch.Tensor, table: torch.Tensor, method: Any) -> torch.Tensor:
        return over_ranks(x * 2, x, x, table, method=method, **CAUSAL, query_offset=0).square().sum()  # type: ignore[no-any-return]

    for method in ("gather", "all_to_all"):
        ways = torch.compile(run, fullgraph=True, backend="aot_eager"), run
        for actual, exact in zip(*(torch.autograd.grad(way(x, table, method), (x, table)) for way in ways), strict=True):
            close(actual, exact, method)
    eager, mesh = functools.partial(attend, enable_gqa=True, dropout_p=0.4), init_device_mesh("cpu", (2, 2))
    compiled, whole = torch.compile(eager, fullgraph=True, backend="aot_eager"), list(operands(9, 11, key_heads=4).values())
    torch.manual_seed(7)
    expected_out = eager(*whole)
    torch.manual_seed(7)
    spread = (distribute_tensor(tensor, mesh, [Shard(0), Shard(1)]) for tensor in whole)
    close(compiled(*spread).full_tensor(), expected_out, "compiled")


def check_transforms(groups: dict[int, dist.ProcessGroup]) -> None:
    """Both methods under torch.func, and with batched gradients: messages are complete before they are read."""
    tensors, mine = BASES["a full table"][0], functools.partial(own, layout="contiguous", rank=dist.get_rank(), ranks=4)
    whole = {name: tensor for name, tensor in tensors.items() if name in BY_POSITION}
    shards = {name: mine(tensor, 2) for name, tensor in whole.items()}
    tables = torch.stack([scale * tensors["rel_key"] for scale in (1, -1, 2)])
    d_outs = normal(3, *tensors["query"].shape[:3], WIDTH + 1)
    for method, _ in itertools.product(("gather", "all_to_all"), range(3)):  # a read too early may be right by chance
        spread = functools.partial(over_ranks, **shards, method=method)
        results = []
        for call, cut in ((spread, mine), (functools.partial(attend, **whole), lambda tensor, dim: tensor)):
            leaf = tables[0].clone().requires_grad_()
            outs = torch.vmap(lambda table, call=call: call(rel_key=table))(tables)
            grads = torch.vmap(torch.func.grad(lambda table, call=call: call(rel_key=table).square().sum()))(tables)
            batched = torch.autograd.grad(call(rel_key=leaf), leaf, cut(d_outs, 3), is_grads_batched=True)[0]
            results.append((outs, grads, batched))
        (outs, *found), (exact_outs, *exact) = results
        close(outs, mine(exact_outs, 3), method)
        for actual, expected in zip(found, exact, strict=True):
            close(actual, expected, method)


def check_rounding_of_tables(groups: dict[int, dist.ProcessGroup]) -> None:
    """Partial table gradients are summed before rounding: where they cancel, the bfloat16 error is at most twice that of one
    process."""
    query, key, value, d_out = (normal(1, 1, 48, 8, seed=seed).expand(1, 8, 48, 8).bfloat16() for seed in range(4))
    sign = torch.tensor([1, -1]).repeat_interleave(4).view(-1, 1, 1)  # the last heads cancel most of what the first ones add
    d_out = (sign * d_out.abs() + normal(1, 8, 48, 8, seed=4) / 50).bfloat16()
    mesh, operands = init_device_mesh("cpu", (4,)), {"query": query, "key": key, "value": value}
    tables = {"rel_key": normal(3, 8), "rel_value": normal(3, 8), "rel_bias": normal(3), "rel_p2c": normal(3, 8)}
    grid_tables = {"rel_pos_h": normal(11, 8), "rel_pos_w": normal(15, 8)}
    options: dict[Any, Options] = {attend: {"positions": RelativePositions(-1, 1, "zero")}, on_grid: {"grid": (6, 8)}}
    for call, learned in ((attend, tables), (on_grid, grid_tables)):

        def gradients(way: Any, given: Any, d_out: Any, learned: Tensors = learned, call: Any = call) -> list[torch.Tensor]:
            found = results(way, given, options[call], lambda _: d_out)
            return [found[name].full_tensor() if hasattr(found[name], "full_tensor") else found[name] for name in learned]

        rounded = operands | {name: table.bfloat16() for name, table in learned.items()}
        exact = gradients(call, {name: tensor.double() for name, tensor in rounded.items()}, d_out.double())
        alone = gradients(call, rounded, d_out)
        spread = spread_over(mesh, rounded, {name: [Shard(1)] for name in operands})
        found = {"DTensor": gradients(call, spread, distribute_tensor(d_out, mesh, [Shard(1)]))}
        if call is attend:
            shards = rounded | {name: distributed.shard(tensor, 2) for name, tensor in operands.items()}
            all_to_all = functools.partial(over_ranks, method="all_to_all")
            found["all to all"] = gradients(all_to_all, shards, distributed.shard(d_out, 2))
        for way, grads in found.items():
            for name, *triple in zip(learned, grads, exact, alone, strict=True):
                assert_within_budget(f"{way} {name}", *triple, factor=2, exact_reference=True)


def check_refusals(groups: dict[int, dist.ProcessGroup]) -> None:
    """Every rank raises the error before any communication."""
    x, mesh = normal(1, 6, 5, 4), init_device_mesh("cpu", (2, 2))
    wrong: tuple[tuple[Options, str], ...] = (
        ({"method": "tree"}, "method must be one of"),
        ({"method": "ring"}, "method must be one of .*, got 'ring'"),
        ({"layout": "striped"}, "layout must be one of"),
        ({"method": "all_to_all"}, "6 query heads .* are not divisible"),
        ({"method": "all_to_all", "query": normal(1, 12, 5, 4), "enable_gqa": True}, "12 query heads and 6 key heads are not"),
        ({"implementation": "flash"}, "implementation must be"),
        ({"group": mesh}, "a DeviceMesh of one dimension, got 2"),
        ({"attn_mask": torch.zeros(5, 20, requires_grad=True)}, "attn_mask is not differentiable"),
        ({"shard_sizes": [5, 5, 5]}, r"one number per rank \(4 ranks\)"),
        ({"shard_sizes": [4] * 4}, "5 for rank"),
        ({"shard_sizes": [5] * 4, "layout": "zigzag", "key_lengths": torch.tensor([21])}, r"must lie in \[0, 20\]"),
        ({"attn_mask": torch.ones(20, 20, dtype=torch.bool)}, r"one row per query of the rank \(5\)"),
        ({"key_shard_sizes": [5] * 4}, "needs shard_sizes"),
        ({"rel_key": normal(4, 4)}, "even number of rows"),
        ({"query": distribute_tensor(x, mesh, [Replicate(), Shard(2)])}, r"query is a DTensor; .* query\.to_local\(\)"),
    )
    for options, message in wrong:
        with pytest.raises(TypeError if "DTensor;" in message else ValueError, match=message):
            over_ranks(**{"query": x, "key": x, "value": x, **options})
    with pytest.raises(ValueError, match="in a zigzag, the ranks have"):
        shard = x[:, :, : 2 + dist.get_rank()]
        over_ranks(shard, shard, shard, layout="zigzag", shard_sizes=[2, 3, 4, 5])
    for layout in ("contiguous", "zigzag"):
        whole = normal(3, 11)
        assert torch.equal(distributed.unshard(distributed.shard(whole, 1, layout=layout), 1, layout=layout), whole)


def check_rank_that_dies(groups: dict[int, dist.ProcessGroup]) -> None:
    """If one rank dies or does not answer, the others get an error within the timeout. This check comes last because it ends the
    group."""
    x = normal(1, 4, 64, 8)
    group, rank = dist.new_group(list(range(PROCESSES)), timeout=TIMEOUT), dist.get_rank()
    for kind in ("does not answer", "dies"):
        if rank == PROCESSES - 1:
            if kind == "dies":
                time.sleep(TIMEOUT.total_seconds())  # until the others have started
                os._exit(0)
            continue
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            over_ranks(x, x, x, shard_sizes=[64] * PROCESSES, group=group)
        took = time.monotonic() - began
        assert took < PATIENCE, (kind, took)


QUICK = "spread autocast dtensor rounding_of_tables refusals".split()
THOROUGH = "training compile transforms rank_that_dies".split()
CHECKS = {name: globals()[f"check_{name}"] for name in (*QUICK, *THOROUGH)}


def worker(rank: int, folder: str, names: Sequence[str]) -> None:
    """Run the checks in one of the processes, and write a file with the outcome of each."""
    os.chdir(folder)
    torch.set_num_threads(1)
    patience = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=PROCESSES, timeout=patience)
    # The last ranks, so that a rank of a group is not that of the world.
    groups: Any = {n: dist.new_group(list(range(PROCESSES - n, PROCESSES)), timeout=patience) for n in range(1, PROCESSES + 1)}
    for name in names:
        try:
            CHECKS[name](groups)
            outcome = "ok"
        except Exception:
            outcome = traceback.format_exc()
        Path(f"{name}-{rank}.txt").write_text(outcome)
        if outcome != "ok":
            os._exit(1)  # the other ranks notice at once; otherwise they would wait for this one in the failed check
        if name != "rank_that_dies":
            dist.barrier()
    os._exit(0)  # exit at once: torch's threads occasionally abort a process that exits normally


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The folder with the outcomes of the requested checks. The processes are forked from one that has imported everything,
    because imports take longer than most checks."""
    folder = tmp_path_factory.mktemp("distributed")
    asked = {vars(item)["callspec"].params["name"] for item in request.session.items if item.path == Path(__file__)}
    names = [name for name in CHECKS if name in asked]
    multiprocessing.set_forkserver_preload([__name__, "torch._dynamo"])
    start = functools.partial(torch.multiprocessing.start_processes, start_method="forkserver")
    context: Any = start(worker, (str(folder), names), PROCESSES, join=False)
    deadline = time.monotonic() + PATIENCE
    with contextlib.suppress(torch.multiprocessing.ProcessExitedException):  # a check failed: its file has the error
        while time.monotonic() < deadline and not context.join(timeout=deadline - time.monotonic()):
            pass  # returns whenever a process has ended
    for process in context.processes:
        process.kill()
    return folder


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.thorough) for name in THOROUGH)])
def test_distributed(name: str, outcomes: Path) -> None:
    for rank in range(PROCESSES - (name == "rank_that_dies")):
        path = outcomes / f"{name}-{rank}.txt"
        assert path.exists() and path.read_text() == "ok", path.read_text() if path.exists() else "an earlier check failed"
