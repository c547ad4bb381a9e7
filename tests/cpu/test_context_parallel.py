"""Attention over positions that are spread over 1 to 4 processes: the same numbers as of one, and what it takes to get them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import triton_relattn
from tests.conftest import PATIENCE
from tests.tolerance import assert_near
from triton_relattn import RelativePositions
from triton_relattn.testing import assert_within_budget

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

from triton_relattn import distributed
from triton_relattn._distributed import collectives
from triton_relattn._distributed.sharding import Sharding
from triton_relattn.nn import RelativeMultiheadAttention, parallel

PROCESSES, HEADS, WIDTH = 4, 12, 4
TIMEOUT = timedelta(seconds=10)
"""After which ranks give up on one that does not answer: longer than a busy machine takes to let the others begin."""
LOWEST = torch.finfo(torch.float64).min
WAYS = tuple(itertools.product(("ring", "all_to_all"), ("contiguous", "zigzag")))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def operands(length: int = 23, keys: int | None = None, heads: int = HEADS, key_heads: int = HEADS) -> dict[str, torch.Tensor]:
    keys = length if keys is None else keys
    return {
        "query": normal(2, heads, length, WIDTH),
        "key": normal(2, key_heads, keys, WIDTH, seed=1),
        "value": normal(2, key_heads, keys, WIDTH + 1, seed=2),
    }


def terms(rows: int = 9) -> dict[str, torch.Tensor]:
    return {
        "rel_query": normal(2, HEADS, 23, 3, seed=3),
        "rel_key": normal(rows, 3),
        "rel_value": normal(HEADS, rows, WIDTH + 1),
        "rel_bias": normal(HEADS, rows),
        "rel_p2c": normal(HEADS, rows, WIDTH),
    }


def with_hidden_rows(*shape: int, low: float, seed: int = 6) -> torch.Tensor:
    """A mask as models make them: padding's keys have a low number, and so do all keys of some queries, in one entry or all."""
    mask, draw = normal(*shape, seed=seed), random.Random(seed)
    mask[draw.randrange(shape[0]) :, :, :, draw.randrange(shape[3] + 1) :] = low
    mask[:, draw.randrange(shape[1]), draw.randrange(shape[2]) :] = low
    mask[draw.randrange(shape[0]), :, draw.randrange(shape[2])] = low
    return mask


SHORT, BEYOND = RelativePositions(-4, 4), RelativePositions(-3, 5, "zero")
CASES: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {
    "full": ({**operands(), "rel_key": normal(45, WIDTH)}, {}),
    "causal": ({**operands(), "rel_key": normal(23, WIDTH)}, {"positions": RelativePositions(-22, 0), "is_causal": True}),
    "terms": ({**operands(), **terms()}, {"positions": SHORT, "softcap": 3.0, "scale": 0.7, "rel_scale": -0.4}),
    "causal_terms": ({**operands(), **terms()}, {"positions": BEYOND, "is_causal": True}),
    "window": ({**operands(), **terms()}, {"positions": BEYOND, "window_size": (5, 2)}),
    "shared_keys": ({**operands(key_heads=3), "rel_bias": normal(9)}, {"enable_gqa": True, "is_causal": True}),
    "padded": ({**operands(), **terms()}, {"key_lengths": torch.tensor([17, 3]), "positions": SHORT}),
    "offsets": ({**operands(), "rel_key": normal(9, WIDTH)}, {"query_offset": torch.tensor([-4, 9]), "is_causal": True}),
    "other_keys": ({**operands(9, 31), "rel_key": normal(9, WIDTH)}, {"query_offset": 22, "is_causal": True}),
    "mask": ({**operands(), **terms()}, {"attn_mask": normal(1, 1, 23, 23).masked_fill(normal(23, 23) > 1, -torch.inf)}),
    "key_mask": ({**operands(), **terms()}, {"attn_mask": normal(2, HEADS, 1, 23, seed=5) < 0.5}),
    "dropout": ({**operands(), **terms()}, {"dropout_p": 0.4, "positions": SHORT}),
    "lowest_mask": ({**operands(), **terms()}, {"attn_mask": with_hidden_rows(2, 1, 23, 23, low=LOWEST), "is_causal": True}),
    "low_mask": ({**operands(), **terms()}, {"attn_mask": with_hidden_rows(2, HEADS, 23, 23, low=-1e9)}),
    "fewer_positions_than_ranks": ({**operands(3), "rel_key": normal(5, WIDTH)}, {"is_causal": True}),
}


def random_case(seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Any mask over any sizes, with some terms."""
    draw = random.Random(seed)
    key_heads, sharing, keys = draw.choice((1, 2, 3, 4, 12)), draw.choice((1, 2, 3, 4)), draw.randint(1, 40)
    queries, heads, rows = draw.choice((keys, draw.randint(1, 40))), key_heads * sharing, 2 * draw.randint(0, 9) + 1
    tensors = operands(queries, keys, heads, key_heads)
    tables = {"rel_key": normal(rows, WIDTH), "rel_bias": normal(heads, rows), "rel_p2c": normal(rows, WIDTH)}
    tensors |= {name: tables[name] for name in draw.sample(list(tables), draw.randint(0, 2))}
    offset = draw.choice((0, 0, keys - queries, draw.randint(-9, 9)))
    options: dict[str, Any] = {"enable_gqa": sharing > 1, "query_offset": offset}
    kind, low = draw.choice(("none", "rows", "rows", "keys", "bool")), draw.choice((LOWEST, LOWEST, -1e9, -torch.inf))
    shape = draw.choice((1, 2)), draw.choice((1, heads)), 1 if kind == "keys" else queries, keys
    if kind != "none":
        mask = with_hidden_rows(*shape, low=low, seed=seed)
        options["attn_mask"] = mask if kind != "bool" else mask > -1
    if draw.randrange(2):
        options["is_causal"] = True
    elif draw.randrange(2):
        options["window_size"] = draw.randint(-1, 9), draw.randint(-1, 9)
    if draw.randrange(3) == 0:
        options["key_lengths"] = torch.tensor([draw.randint(0, keys), draw.randint(0, keys)])
    if draw.randrange(4) == 0:
        options["softcap"] = 3.0
    return tensors, options


SEEDS = range(int(os.environ.get("RANDOM_CASES", "6")))
CASES |= {f"random {seed}": random_case(seed) for seed in SEEDS}


def pack(lengths: list[int]) -> dict[str, Any]:
    starts = torch.tensor([0, *itertools.accumulate(lengths)])
    return {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}


def packed(**given: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: (tensor[0].transpose(0, 1) if tensor.dim() == 4 else tensor) for name, tensor in given.items()}


PACKED: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {
    "packed": (packed(**operands(), **terms()), {**pack([7, 0, 1, 13, 2]), "positions": BEYOND}),
    "packed_causal": (packed(**operands(), **terms()), {**pack([11, 12]), "is_causal": True, "dropout_p": 0.3}),
    "packed_short": (packed(**operands(), **terms()), {**pack([4, 3, 5, 1, 6, 4]), "query_offset": torch.arange(6) - 3}),
}
BY_POSITION = ("query", "key", "value", "rel_query")


def differentiated(function: Callable[..., Any], tensors: dict[str, torch.Tensor], options: dict[str, Any], seeds: Any) -> Any:
    """out, lse and the gradients of all tensors, through both."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    torch.manual_seed(7)
    out, lse = function(**leaves, **options, return_lse=True)
    d_out, d_lse = seeds(out, lse)
    gradients = torch.autograd.grad((out, lse), list(leaves.values()), (d_out, d_lse))
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, gradients, strict=True))}


def close(actual: torch.Tensor, expected: torch.Tensor, what: Any = "") -> None:
    assert_near(str(what), actual, expected, smallest=1.0)  # which the tensors are: some gradients cancel


def sizes_of(total: int, ranks: int, layout: str) -> list[int]:
    """Positions of each rank; contiguous ones are as uneven as that: the first rank has none of the rest."""
    if layout == "zigzag":
        return [Sharding(tuple(distributed.zigzag(total, ranks))).size(rank) for rank in range(ranks)]
    sizes = [total // (ranks + 1) + rank for rank in range(ranks - 1)]
    return [*sizes, total - sum(sizes)]


def own(tensor: torch.Tensor, dim: int, layout: str, rank: int, sizes: list[int]) -> torch.Tensor:
    pieces = Sharding.of(layout, sizes).pieces[rank]
    return torch.cat([tensor.narrow(dim, piece.positions.start, len(piece.positions)) for piece in pieces], dim)


def seeds(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of out and lse; NaN where no key is seen, which nobody may notice."""
    return normal(*out.shape, seed=8), normal(*lse.shape, seed=9).masked_fill(lse == -torch.inf, torch.nan)


@functools.cache
def of_one_process(name: str) -> dict[str, torch.Tensor]:
    """Results of a case."""
    if name in PACKED:
        return differentiated(triton_relattn.fused_relative_attention_varlen, *PACKED[name], seeds)
    return differentiated(triton_relattn.fused_relative_attention, *CASES[name], seeds)


def check_case(name: str, group: dist.ProcessGroup, method: str, layout: str) -> None:
    """One case over the ranks of a group."""
    is_packed = name in PACKED
    tensors, options = (PACKED if is_packed else CASES)[name]
    rank, ranks, dim = dist.get_rank(group), dist.get_world_size(group), 0 if is_packed else 2
    mask = options.get("attn_mask")
    if method == "all_to_all" and (tensors["key"].shape[1] % ranks or (mask is not None and mask.shape[2] > 1)):
        return
    expected = of_one_process(name)
    sizes = {each: sizes_of(tensors[each].shape[dim], ranks, layout) for each in ("query", "key")}
    of_dim = {each: sizes["key" if each in ("key", "value") else "query"] for each in BY_POSITION}

    def mine(each: str, tensor: torch.Tensor) -> torch.Tensor:
        if each == "lse":
            return own(tensor, 1 if is_packed else 2, layout, rank, sizes["query"])
        shard_sizes = of_dim.get("query" if each == "out" else each)
        return tensor if shard_sizes is None else own(tensor, dim, layout, rank, shard_sizes)

    of_all = seeds(expected["out"], expected["lse"])
    local = {**options, "group": group, "method": method, "layout": layout}
    if mask is not None and mask.shape[2] > 1:
        local["attn_mask"] = own(mask, 2, layout, rank, sizes["query"])
    function = distributed.fused_relative_attention_varlen if is_packed else distributed.fused_relative_attention
    shards = {each: mine(each, tensor) for each, tensor in tensors.items()}
    actual = differentiated(function, shards, local, lambda *_: (mine("out", of_all[0]), mine("lse", of_all[1])))
    for each, exact in expected.items():
        close(actual[each], mine(each, exact), (name, method, layout, ranks, each))


def check_cases(groups: dict[int, dist.ProcessGroup]) -> None:
    """All cases, over 1 to 4 ranks, in both layouts, by both methods."""
    for ranks, group in groups.items():
        dist.barrier()  # which has more patience than the group
        if dist.get_rank() < ranks:
            for name, (method, layout) in itertools.product((*CASES, *PACKED), WAYS):
                check_case(name, group, method, layout)


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes of each message that the rank sends to another within the context, and of what it exchanges with all at once."""
    sent: list[int] = []
    before, before_all = dist.batch_isend_irecv, collectives.all_to_all_single

    def count(operations: list[Any]) -> Any:
        sent.extend(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return before(operations)

    def count_all(tensor: torch.Tensor, *arguments: Any) -> Any:
        sent.append(tensor.nbytes)
        return before_all(tensor, *arguments)

    dist.batch_isend_irecv, collectives.all_to_all_single = count, count_all  # type: ignore[assignment]
    try:
        yield sent
    finally:
        dist.batch_isend_irecv, collectives.all_to_all_single = before, before_all


def check_messages(groups: dict[int, dist.ProcessGroup]) -> None:
    """The ring sends keys and values P - 1 times; backward again, and their gradients P times. A window sends less."""
    x = normal(1, 4, 8, 4).requires_grad_()
    shard = x.nbytes * 2  # of key and value

    def sent(**options: Any) -> tuple[list[int], list[int]]:
        with counted() as forward:
            out = distributed.fused_relative_attention(x, x, x, **options)
        with counted() as backward:
            out.sum().backward()
        return forward, backward

    assert sent() == ([shard] * 3, [shard] * (3 + 4))
    # Eight positions each: ten back are two ranks away, and the gradients go home from there in one message.
    assert sent(window_size=(10, 0)) == ([shard] * 2, [shard] * (2 + 3))
    assert sent(window_size=(0, 0)) == ([], [])
    assert sent(method="all_to_all")[0] == [3 * x.nbytes, x.nbytes]  # query, key and value; out


def check_memory(groups: dict[int, dist.ProcessGroup]) -> None:
    """The peak of a rank, forward and backward, falls as its part of the sequence."""
    from bench.measure import memory
    from triton_relattn._blockwise import partition

    memory.map_blocks_from(1 << 16)
    partition.ELEMENTS_PER_THREAD, partition.BLOCK_QUERIES = 1 << 14, 16  # a working set that is small beside the tensors
    heads, length, width, peaks = 4, 2048, 32, []

    def work(x: torch.Tensor, table: torch.Tensor, group: dist.ProcessGroup) -> None:
        sizes = [x.shape[2]] * dist.get_world_size(group)
        distributed.fused_relative_attention(x, x, x, table, group=group, shard_sizes=sizes).backward(x.detach())

    for ranks in (1, 2, 4):
        dist.barrier()
        if dist.get_rank() < ranks:
            table = torch.randn(33, width, requires_grad=True)
            x, small = (torch.randn(1, heads, each // ranks, width, requires_grad=True) for each in (length, 256))
            work(small, table, groups[ranks])  # what is allocated once
            measured = functools.partial(work, x, table, groups[ranks])
            peaks.append(memory.peak_cpu(measured) / (ranks * x.nbytes))  # in tensors of the whole sequence
    if dist.get_rank() == 0:
        Path("peaks.txt").write_text(f"{peaks}")
        one, two, four = peaks
        assert one > 5, "the measurement misses the results themselves"
        assert two < 0.8 * one and four < 0.55 * two, peaks  # what is on its way comes with the second rank
        assert one * heads * length * width < heads * length**2 / 4, "as much as a quarter of one (H, N, N) tensor"


def check_dtensor(groups: dict[int, dist.ProcessGroup]) -> None:
    """DTensors: positions over one dimension of the mesh, batch or heads over the other; the public function notices."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    tensors, _ = CASES["terms"]
    lengths = torch.tensor([17, 9])
    d_out = normal(*tensors["query"].shape[:3], WIDTH + 1, seed=4)
    options: dict[str, Any] = {"positions": SHORT, "is_causal": True}

    def run(leaves: dict[str, Any], d_out: torch.Tensor, lengths: torch.Tensor) -> list[Any]:
        wanted = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
        out = triton_relattn.fused_relative_attention(**wanted, **options, key_lengths=lengths)
        return [out, *torch.autograd.grad(out, list(wanted.values()), d_out)]

    expected = run(tensors, d_out, lengths)
    for other in (Shard(0), Shard(1), Replicate()):
        by_position, per_head = [other, Shard(2)], [Shard(0) if other == Shard(1) else Replicate(), Replicate()]
        placements = {**dict.fromkeys(BY_POSITION, by_position), "rel_value": per_head, "rel_bias": per_head}
        placed = {
            name: distribute_tensor(tensor, mesh, placements.get(name, [Replicate(), Replicate()]))
            for name, tensor in tensors.items()
        }
        of_lengths = distribute_tensor(lengths, mesh, [Shard(0) if other == Shard(0) else Replicate(), Replicate()])
        results = run(placed, distribute_tensor(d_out, mesh, by_position), of_lengths)
        assert list(results[0].placements) == by_position, "nothing is gathered on the way"
        for result, exact in zip(results, expected, strict=True):
            close(result.full_tensor(), exact, other)
    rows, packing = PACKED["packed"]
    attend_packed: Any = triton_relattn.fused_relative_attention_varlen
    whole = attend_packed(**rows, **packing)
    spread: Any = {
        name: distribute_tensor(tensor, mesh, [Replicate(), Shard(0) if name in BY_POSITION else Replicate()])
        for name, tensor in rows.items()
    }
    close(attend_packed(**spread, **packing).full_tensor(), whole, "packed")
    with pytest.raises(ValueError, match="one dimension of the mesh may shard"):
        both = distribute_tensor(tensors["query"], mesh, [Shard(2), Shard(2)])
        triton_relattn.fused_relative_attention(both, both, both)


def check_dtensor_dropout(groups: dict[int, dist.ProcessGroup]) -> None:
    """Whatever the placement, what one process drops is dropped if all ranks' generators are in the same state, also if compiled;
    replicas are equal in any case."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    attend, on_grid = triton_relattn.fused_relative_attention, triton_relattn.decomposed_relative_attention
    tables = {"rel_key": normal(9, WIDTH), "rel_value": normal(HEADS, 9, WIDTH + 1), "rel_bias": normal(HEADS, 9)}
    tensors = {**operands(9, 11, key_heads=4), **tables}
    of_thirds = {**tensors, **{name: tensors[name][:, :3] for name in ("key", "value")}}  # heads of the key that no ranks divide
    of_grid = {**operands(12), "rel_pos_h": normal(5, WIDTH), "rel_pos_w": normal(7, WIDTH)}
    options: dict[str, Any] = {"positions": SHORT, "enable_gqa": True}
    calls: list[tuple[Callable[..., Any], dict[str, torch.Tensor], dict[str, Any]]] = [
        (attend, tensors, options),
        (attend, of_thirds, options),
        (functools.partial(distributed.fused_relative_attention, method="all_to_all"), tensors, options),
        (on_grid, of_grid, {"grid": (3, 4)}),
    ]

    def run(call: Callable[..., Any], leaves: dict[str, Any], d_out: torch.Tensor, options: dict[str, Any]) -> list[Any]:
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
        out = call(**leaves, **options, dropout_p=0.4)
        return [out, *torch.autograd.grad(out, list(leaves.values()), d_out)]

    for call, leaves, others in calls:
        d_out = normal(*leaves["query"].shape[:3], WIDTH + 1, seed=4)
        torch.manual_seed(7)
        expected = run(on_grid if call is on_grid else attend, leaves, d_out, others)
        for mesh in (init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))):
            for placements in itertools.product((Replicate(), Shard(0), Shard(1), Shard(2)), repeat=mesh.ndim):
                of_positions = placements.count(Shard(2))
                if of_positions > (call is not on_grid) or (isinstance(call, functools.partial) and not of_positions):
                    continue
                per_head = [Shard(0) if each == Shard(1) else Replicate() for each in placements]
                kinds = dict.fromkeys(("rel_value", "rel_bias"), per_head) | dict.fromkeys(BY_POSITION, placements)
                spread: Any = {
                    name: distribute_tensor(tensor, mesh, kinds.get(name, [Replicate()] * mesh.ndim))
                    for name, tensor in leaves.items()
                }
                torch.manual_seed(7)
                results = run(call, spread, distribute_tensor(d_out, mesh, placements), others)
                for result, exact in zip(results, expected, strict=True):
                    close(result.full_tensor(), exact, (call, placements))
                torch.manual_seed(dist.get_rank())
                out = call(**spread, **others, dropout_p=0.4).full_tensor()
                of_first = out.clone()
                dist.broadcast(of_first, 0)
                assert torch.equal(out, of_first), (call, placements)

    eager: Any = functools.partial(attend, enable_gqa=True, dropout_p=0.4)
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    whole, mesh = [tensors[name] for name in BY_POSITION[:3]], init_device_mesh("cpu", (2, 2))
    torch.manual_seed(7)
    exact = eager(*whole)
    torch.manual_seed(7)
    close(compiled(*(distribute_tensor(each, mesh, [Shard(1), Shard(2)]) for each in whole)).full_tensor(), exact, "compiled")


def check_dtensor_shared_keys(groups: dict[int, dist.ProcessGroup]) -> None:
    """Heads over one or two dimensions of a mesh, positions over another: each rank finds the keys that its heads share, where
    the ranks divide the heads of the key, and where they do not."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    meshes = [(init_device_mesh("cpu", (2, 2)), "hp"), (init_device_mesh("cpu", (2, 2)), "ph")]
    meshes += [(init_device_mesh("cpu", (4, 1)), "hp"), (init_device_mesh("cpu", (2, 2, 1)), "hhp")]
    draw = random.Random(0)
    for (mesh, dims), (heads, key_heads) in itertools.product(meshes, ((12, 3), (9, 3), (8, 1), (12, 6), (5, 5), (6, 2), (3, 1))):
        tensors = {**operands(9, 11, heads, key_heads), "rel_key": normal(7, WIDTH), "rel_bias": normal(heads, 5 + 2)}
        mask = with_hidden_rows(1, draw.choice((1, heads)), 9, 11, low=LOWEST, seed=draw.randrange(99))
        options: dict[str, Any] = {"enable_gqa": True, "positions": RelativePositions(-3, 3), "attn_mask": mask}
        kinds = [Shard(1) if dim == "h" else Shard(2) for dim in dims]
        placements = dict.fromkeys(BY_POSITION, kinds) | {"rel_bias": [Shard(0) if dim == "h" else Replicate() for dim in dims]}
        d_out = normal(2, heads, 9, WIDTH + 1, seed=4)

        def run(leaves: dict[str, Any], d_out: torch.Tensor, options: dict[str, Any] = options) -> list[torch.Tensor]:
            leaves = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
            out = triton_relattn.fused_relative_attention(**leaves, **options)
            return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), d_out)]

        spread = {
            name: distribute_tensor(tensor, mesh, placements.get(name, [Replicate()] * mesh.ndim))
            for name, tensor in tensors.items()
        }
        found: Any = run(spread, distribute_tensor(d_out, mesh, kinds))
        for name, result, exact in zip(("out", *tensors), found, run(tensors, d_out), strict=True):
            close(result.full_tensor(), exact, (mesh.shape, dims, heads, key_heads, name))
    query, key = (distribute_tensor(normal(1, heads, 8, 4), meshes[0][0], [Shard(1), Shard(2)]) for heads in (9, 3))
    with pytest.raises(ValueError, match="4 ranks do not divide 9 heads"):  # also the rank whose four heads two would divide
        distributed.fused_relative_attention(query, key, key, method="all_to_all", enable_gqa=True)


def check_modules(groups: dict[int, dist.ProcessGroup]) -> None:
    """A module whose positions are spread, beside FSDP2, and beside tensor parallelism of its heads."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    length, width = 24, 16
    x, d_out = normal(2, length, width), normal(2, length, width, seed=1)
    kinds: dict[str, Callable[..., RelativeMultiheadAttention]] = {
        "shaw": functools.partial(RelativeMultiheadAttention.shaw, width, 4, 3),
        "per_head": functools.partial(RelativeMultiheadAttention.general, width, 4, length, per_head=True),
        "t5": functools.partial(RelativeMultiheadAttention.t5, width, 4, 8, 20),
        "alibi": functools.partial(RelativeMultiheadAttention.alibi, width, 4),
    }
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "heads"))

    def gradients(module: Any, mesh: Any) -> dict[str, torch.Tensor]:
        rank, size = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
        own_x, own_d_out = (each.chunk(size, 1)[rank] for each in (x, d_out))
        out, _ = module(own_x, own_x, own_x, is_causal=True, key_lengths=torch.tensor([length, 13]))
        out.backward(own_d_out)
        found = {name: parameter.grad for name, parameter in module.named_parameters()}
        return {"out": out.detach(), **found}

    for kind, make in kinds.items():
        modules = []
        for _ in range(3):
            torch.manual_seed(0)
            modules.append(make(batch_first=True, dtype=torch.float64))
        alone, sharded, both = modules
        expected = gradients(alone, None)

        parallelize_module(sharded, line, parallel.context_plan())
        fully_shard(sharded, mesh=line).set_gradient_divide_factor(1.0)  # type: ignore[attr-defined]
        parallelize_module(both, square["heads"], parallel.plan())
        parallelize_module(both, square["context"], parallel.context_plan())
        for module, mesh in ((sharded, line), (both, square["context"])):
            for name, actual in gradients(module, mesh).items():
                exact = expected[name]
                if name == "out":
                    exact = exact.chunk(mesh.size(), 1)[mesh.get_local_rank()]
                elif module is both:  # sums over the ranks that have the same heads
                    dist.all_reduce(actual.to_local() if isinstance(actual, DTensor) else actual, group=mesh.get_group())
                close(actual.full_tensor() if isinstance(actual, DTensor) else actual, exact, (kind, mesh, name))


def check_uneven_modules(groups: dict[int, dist.ProcessGroup]) -> None:
    """The last rank may have fewer positions; if they are not as a DTensor's, all ranks say so."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    def module() -> RelativeMultiheadAttention:
        torch.manual_seed(0)
        return RelativeMultiheadAttention.t5(16, 4, 8, 20, batch_first=True, dtype=torch.float64)

    alone, spread = module(), module()
    parallelize_module(spread, init_device_mesh("cpu", (4,)), parallel.context_plan())
    for length, others in ((23, 23), (7, 24), (3, 3)):
        query, key = normal(2, length, 16), normal(2, others, 16, seed=1)
        own_query, own_key = (distributed.shard(each, 1) for each in (query, key))
        expected = alone(query, key, key, is_causal=True)[0]
        close(spread(own_query, own_key, own_key, is_causal=True)[0], distributed.shard(expected, 1), (length, others))
    for length in (6, 22):
        own_query = distributed.shard(normal(2, length, 16), 1)
        with pytest.raises(ValueError, match=f"of {length} positions the ranks must have"):
            spread(own_query, own_query, own_query)


def check_compile(groups: dict[int, dist.ProcessGroup]) -> None:
    """Both methods as one graph, forward and backward."""
    if dist.get_rank() >= 2:
        return
    tensors, options = CASES["causal"]
    x = own(tensors["query"][..., :20, :], 2, "contiguous", dist.get_rank(), [10, 10]).requires_grad_()
    table = tensors["rel_key"].clone().requires_grad_()
    for method in ("ring", "all_to_all"):

        def run(x: torch.Tensor, table: torch.Tensor, method: Any = method) -> torch.Tensor:
            out = distributed.fused_relative_attention(x * 2, x, x, table, method=method, group=groups[2], **options)
            return out.square().sum()

        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        for actual, exact in zip(*(torch.autograd.grad(each(x, table), (x, table)) for each in (compiled, run)), strict=True):
            close(actual, exact, method)


def check_transforms(groups: dict[int, dist.ProcessGroup]) -> None:
    """All-to-all under torch.func, and batched gradients: messages have arrived when they are read."""
    tensors, rank, sizes = CASES["full"][0], dist.get_rank(), [6, 6, 6, 5]
    query, key, value = (own(tensors[name], 2, "contiguous", rank, sizes) for name in BY_POSITION[:3])
    tables = torch.stack([scale * tensors["rel_key"] for scale in (1, -1, 2)])
    queries, whole_queries = (torch.stack([each, 2 * each]) for each in (query, tensors["query"]))

    def spread(query: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return distributed.fused_relative_attention(query, key, value, table, method="all_to_all")  # type: ignore[no-any-return]

    def alone(query: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return triton_relattn.fused_relative_attention(query, tensors["key"], tensors["value"], table)

    def mine(results: torch.Tensor) -> torch.Tensor:
        return own(results, results.dim() - 2, "contiguous", rank, sizes)

    def gradients(attend: Callable[..., torch.Tensor], query: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        return torch.func.grad(lambda table: attend(query, table).square().sum())

    for _ in range(3):  # what is read too early may be right by chance
        close(
            torch.vmap(spread, (None, 0))(query, tables), mine(torch.vmap(alone, (None, 0))(tensors["query"], tables)), "tables"
        )
        close(torch.vmap(spread, (0, None))(queries, tables[0]), mine(torch.vmap(alone, (0, None))(whole_queries, tables[0])))
        exact = torch.vmap(gradients(alone, tensors["query"]))(tables)
        close(torch.vmap(gradients(spread, query))(tables), exact, "gradients of each table")
        found = []
        for attend, of_call, cut in ((spread, query, mine), (alone, tensors["query"], lambda whole: whole)):
            leaves = of_call.clone().requires_grad_(), tables[0].clone().requires_grad_()
            d_outs = cut(normal(3, *tensors["query"].shape[:3], WIDTH + 1))
            found.append(torch.autograd.grad(attend(*leaves), leaves, d_outs, is_grads_batched=True))
        (d_query, d_table), (exact_d_query, exact_d_table) = found
        close(d_query, mine(exact_d_query), "batched gradients")
        close(d_table, exact_d_table, "batched gradients of a table")


def check_half_precision(groups: dict[int, dist.ProcessGroup]) -> None:
    """Parts are merged in float32: bfloat16 over four ranks errs no more than twice as much as in one."""
    tensors, options = CASES["terms"]
    rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}

    def seeds(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return normal(*out.shape, seed=8).to(out.dtype), torch.zeros_like(lse)

    attend = triton_relattn.fused_relative_attention
    exact = differentiated(attend, {name: tensor.double() for name, tensor in rounded.items()}, options, seeds)
    one = differentiated(attend, rounded, options, seeds)
    rank, sizes = dist.get_rank(), [6, 6, 6, 5]

    def mine(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return own(tensor, 2, "contiguous", rank, sizes) if name in (*BY_POSITION, "out", "lse") else tensor

    def own_seeds(out: torch.Tensor, lse: torch.Tensor) -> Any:
        return mine("out", seeds(one["out"], lse)[0]), torch.zeros_like(lse)

    spread = differentiated(distributed.fused_relative_attention, {n: mine(n, t) for n, t in rounded.items()}, options, own_seeds)
    for name, result in spread.items():
        golden = mine(name, exact[name])
        assert_within_budget(name, result, golden, mine(name, one[name]), factor=2, exact_reference=True)


def check_rounding_of_tables(groups: dict[int, dist.ProcessGroup]) -> None:
    """Parts of a table's gradient are added up before they are rounded: where they cancel, bfloat16 errs no more than twice as in
    one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    query, key, value, d_out = (normal(1, 1, 48, 8, seed=seed).expand(1, 8, 48, 8).bfloat16() for seed in range(4))
    sign = torch.tensor([1, -1]).repeat_interleave(4)[
        :, None, None
    ]  # the second half of the heads takes back what the first adds
    d_out = (sign * d_out.abs() + normal(1, 8, 48, 8, seed=4) / 50).bfloat16()
    given = query, key, value, d_out
    options: dict[str, Any] = {"positions": RelativePositions(-1, 1, "zero")}
    attend = functools.partial(triton_relattn.fused_relative_attention, **options)
    on_grid = functools.partial(triton_relattn.decomposed_relative_attention, grid=(6, 8))
    tables = {"rel_key": normal(3, 8), "rel_value": normal(3, 8), "rel_bias": normal(3), "rel_p2c": normal(3, 8)}
    tables_of_grid = {"rel_pos_h": normal(11, 8), "rel_pos_w": normal(15, 8)}

    def run(call: Any, tensors: Sequence[torch.Tensor], tables: dict[str, Any]) -> list[Any]:
        *tensors, d_out = tensors
        tables = {name: table.detach().requires_grad_() for name, table in tables.items()}
        return list(torch.autograd.grad(call(*tensors, **tables), list(tables.values()), d_out))

    mesh, shards = init_device_mesh("cpu", (4,)), [distributed.shard(each, 2) for each in given]
    for call, wide, dims in ((attend, tables, (1, 2)), (on_grid, tables_of_grid, (1,))):
        rounded = {name: table.bfloat16() for name, table in wide.items()}
        exact = run(call, [each.double() for each in given], {name: table.double() for name, table in rounded.items()})
        replicated: Any = {name: distribute_tensor(table, mesh, [Replicate()]) for name, table in rounded.items()}
        found = {"one process": run(call, given, rounded)}
        for dim in dims:
            results = run(call, [distribute_tensor(each, mesh, [Shard(dim)]) for each in given], replicated)
            found[f"DTensor, {dim}"] = [each.full_tensor() for each in results]
        if call is attend:
            over_ranks = functools.partial(distributed.fused_relative_attention, method="all_to_all", **options)
            found["all to all"] = run(over_ranks, shards, rounded)
        for way, gradients in found.items():
            for name, gradient, golden, alone in zip(wide, gradients, exact, found["one process"], strict=True):
                assert_within_budget(f"{way} {name}", gradient, golden, alone, factor=2, exact_reference=True)


def check_refusals(groups: dict[int, dist.ProcessGroup]) -> None:
    """Every rank says what is wrong, before anything is sent."""
    x = normal(1, 6, 5, 4)
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"method": "tree"}, "method must be one of"),
        ({"layout": "striped"}, "layout must be one of"),
        ({"method": "all_to_all"}, "do not divide 6 heads"),
        ({"shard_sizes": [5, 5, 5]}, "a number for each of 4 ranks"),
        ({"shard_sizes": [4] * 4}, "5 for rank"),
        ({"shard_sizes": [5] * 4, "layout": "zigzag", "key_lengths": torch.tensor([21])}, r"must lie in \[0, 20\]"),
        ({"attn_mask": torch.ones(20, 20, dtype=torch.bool)}, "a row for each of the rank's 5 queries"),
        ({"key_shard_sizes": [5] * 4}, "needs shard_sizes"),
        ({"rel_key": normal(4, 4)}, "even number of rows"),
    )
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            distributed.fused_relative_attention(x, x, x, **options)
    with pytest.raises(ValueError, match="in a zigzag, the ranks have"):
        shard = x[:, :, : 2 + dist.get_rank()]
        distributed.fused_relative_attention(shard, shard, shard, layout="zigzag", shard_sizes=[2, 3, 4, 5])
    with pytest.raises(NotImplementedError, match="all_to_all"):
        distributed.fused_relative_attention(x, x, x, implementation="reference")
    whole = normal(3, 11)
    for layout in ("contiguous", "zigzag"):
        assert torch.equal(distributed.unshard(distributed.shard(whole, 1, layout=layout), 1, layout=layout), whole)


def check_rank_that_dies(groups: dict[int, dist.ProcessGroup]) -> None:
    """The others get an error within the timeout, from a rank that does not answer, too. The last check: it ends the group."""
    x = normal(1, 2, 64, 8)
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


CHECKS = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_") and name not in ("check_case", "check_rank_that_dies")
} | {"rank_that_dies": check_rank_that_dies}


def worker(rank: int, folder: str, names: Sequence[str]) -> None:
    """The checks in one set of processes, whose start takes longer than they do; a file tells how each ended."""
    os.chdir(folder)
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=PROCESSES, timeout=timedelta(seconds=PATIENCE))
    groups: Any = {
        ranks: dist.new_group(list(range(ranks)), timeout=timedelta(seconds=PATIENCE)) for ranks in range(1, PROCESSES + 1)
    }
    for name in names:
        check = CHECKS[name]
        try:
            check(groups)
            outcome = "ok"
        except Exception:
            outcome = traceback.format_exc()
        Path(f"{name}-{rank}.txt").write_text(outcome)
        if outcome != "ok":
            os._exit(1)  # which the other ranks notice at once; they would wait for this one in the check that failed
        if check is not check_rank_that_dies:
            dist.barrier()
    os._exit(0)  # at once: threads of torch now and then abort a process that ends by itself


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The folder with the outcomes of those checks that have been asked for."""
    folder = tmp_path_factory.mktemp("context_parallel")
    asked = {vars(item)["callspec"].params["name"] for item in request.session.items if item.path == Path(__file__)}
    names = [name for name in CHECKS if name in asked]
    context: Any = torch.multiprocessing.spawn(worker, (str(folder), names), PROCESSES, join=False)
    deadline = time.monotonic() + PATIENCE
    with contextlib.suppress(torch.multiprocessing.ProcessExitedException):  # a check failed: its file says how
        while time.monotonic() < deadline and not context.join(timeout=deadline - time.monotonic()):
            pass  # it returns whenever a process has ended
    for process in context.processes:
        process.kill()
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("name", CHECKS)
def test_context_parallel(name: str, outcomes: Path) -> None:
    for rank in range(PROCESSES - (name == "rank_that_dies")):
        path = outcomes / f"{name}-{rank}.txt"
        assert path.exists() and path.read_text() == "ok", path.read_text() if path.exists() else "an earlier check failed"
