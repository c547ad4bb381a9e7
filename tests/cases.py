"""Random cases that the tests of every implementation share."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Collection, Container
from typing import Any, NamedTuple

import torch

from triton_relattn import RelativePositions
from triton_relattn.testing import Inputs, dense_gradients, make_inputs, with_different_strides

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 97, 127, 129, 200)
UNEVEN_LENGTHS = ((1, 239), (239, 1), (3, 799), (799, 3), (113, 203))
SIZES: dict[str, Any] = {"widths": (16, 40, 64, 128), "value_widths": (16, 64, 96), "rel_widths": (3, 16, 24)}
"""Widths of heads that compiled kernels are tested with."""


def random_positions(choose: random.Random, num_queries: int, num_keys: int) -> tuple[int | None, RelativePositions | None]:
    """Rows and positions of a table that is longer than, exactly, or shorter than what the lengths need, or beside it."""
    outside = choose.choice(("clamp", "zero"))
    first, last = -(num_queries - 1), num_keys - 1
    kind = choose.choice(("none", "centred", "exact", "longer", "shorter", "one", "two", "past", "future"))
    if kind == "none":
        return None, None
    if kind == "centred":
        return choose.choice((1, 3, 17, 2 * max(num_queries, num_keys) - 1)), None
    if kind == "longer":
        first, last = first - choose.randint(1, 9), last + choose.randint(1, 9)
    elif kind == "shorter":
        first, last = sorted((choose.randint(first, last), choose.randint(first, last)))
    elif kind in ("one", "two"):
        first = choose.randint(first, last)
        last = first + (kind == "two")
    elif kind == "past":
        first, last = first - choose.randint(5, 9), first - choose.randint(1, 4)
    elif kind == "future":
        first, last = last + choose.randint(1, 4), last + choose.randint(5, 9)
    return last - first + 1, RelativePositions(first, last, outside)  # type: ignore[arg-type]


FEATURES = (
    "rel_query",
    "rel_value",
    "rel_bias",
    "no_rel_key",
    "rel_scale",
    "attn_mask",
    "window_size",
    "query_offsets",
    "softcap",
    "enable_gqa",
    "dropout_p",
)
"""Beyond rel_key, positions, key_lengths, is_causal, query_offset and scale."""
ALL_FEATURES = (*FEATURES, "rel_p2c")
"""Drawn last, so that cases without the last one are what they were."""


def random_mask(choose: random.Random, shape: tuple[int, int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """A mask that broadcasts to shape: bool, or float with some -inf. Some rows and some columns are hidden wholly."""
    generator = torch.Generator().manual_seed(choose.randrange(2**31))
    sizes = [size if choose.random() < 0.7 else 1 for size in shape]
    visible = torch.rand(sizes, generator=generator) < choose.choice((0.3, 0.8))
    visible &= torch.rand(*sizes[:3], 1, generator=generator) < 0.9
    visible &= torch.rand(sizes[3], generator=generator) < 0.9
    if sizes[0] == 1 and choose.random() < 0.5:
        visible = visible[0]
    if choose.random() < 0.5:
        return visible
    bias = torch.randn(visible.shape, generator=generator, dtype=torch.float64).masked_fill(~visible, -math.inf)
    bias = bias.to(choose.choice((dtype, torch.float32)))
    return bias.mT.contiguous().mT if choose.random() < 0.5 else bias


def random_scalars(choose: random.Random, wanted: Container[str], has_products: bool) -> dict[str, Any]:
    """Draw the arguments that padded and packed calls have in common and that do not depend on a length.

    Args:
        has_products: there is a table that rel_scale is for.
    """
    arguments: dict[str, Any] = {}
    if "rel_scale" in wanted and has_products:
        arguments["rel_scale"] = choose.choice((1.0, 0.2, -0.4))
    if "window_size" in wanted:
        sizes = (-1, 0, 1, choose.randint(2, 20), choose.randint(20, 200))
        arguments["window_size"] = (choose.choice(sizes), choose.choice(sizes))
    if "softcap" in wanted:
        arguments["softcap"] = choose.choice((0.5, 5.0, 50.0))
    if "dropout_p" in wanted:
        arguments["dropout_p"] = choose.choice((0.1, 0.3, 0.5, 0.9, 1.0))
    return arguments


def random_features(choose: random.Random, features: Collection[str]) -> set[str]:
    """Some of the features; none in a third of all cases."""
    drawn = {feature for feature in FEATURES if choose.random() < 0.35}
    if choose.random() < 0.33:
        return set()
    return drawn & set(features) | {feature for feature in set(features) - set(FEATURES) if choose.random() < 0.5}


def random_tensors(
    choose: random.Random, wanted: Container[str], num_rows: int | None, heads: int, rel_widths: Any
) -> dict[str, Any]:
    """Arguments of make_inputs; heads is multiplied if heads of the query share one of the key."""
    tables = {name: num_rows is not None and name in wanted for name in ("rel_value", "rel_bias", "rel_p2c")}
    has_rel_key = num_rows is not None and not ("no_rel_key" in wanted and any(tables.values()))
    rel_width = choose.choice(rel_widths)
    group = choose.choice((2, 3, 4)) if heads == 1 else 2
    shapes: dict[str, Any] = {"num_rows": num_rows, "rel_key": has_rel_key, **tables, "heads": heads}
    if "rel_query" in wanted and has_rel_key:
        shapes["rel_width"] = rel_width
    if "enable_gqa" in wanted:
        shapes |= {"heads": group * heads, "key_heads": heads}
    return shapes


def random_case(
    seed: int,
    *,
    dtype: torch.dtype = torch.float64,
    widths: tuple[int, ...] = (1, 4, 5, 8),
    value_widths: tuple[int, ...] = (1, 3, 8),
    rel_widths: tuple[int, ...] = (1, 3, 4, 16),
    scales: tuple[float | None, ...] = (None, None, 1.0, 0.05, -0.3),
    lengths: tuple[int, ...] = LENGTHS,
    uneven_lengths: tuple[tuple[int, int], ...] = UNEVEN_LENGTHS,
    features: Collection[str] = FEATURES,
) -> tuple[Inputs, dict[str, Any]]:
    """Inputs of any shape, table and strides, and arguments of fused_relative_attention, all drawn from the seed.

    Args:
        features: what may appear beyond rel_key, positions, key_lengths, is_causal, query_offset and scale.
    """
    choose = random.Random(seed)
    num_queries, num_keys = choose.choice((choose.choice(uneven_lengths), (choose.choice(lengths), choose.choice(lengths))))
    num_rows, positions = random_positions(choose, num_queries, num_keys)
    batch, heads, width, value_width = (choose.choice(sizes) for sizes in ((1, 2), (1, 2, 3), widths, value_widths))
    per_head, sharp, silent_lse, strided = (choose.random() < chance for chance in (0.5, 0.25, 0.3, 0.3))
    arguments: dict[str, Any] = {"is_causal": choose.random() < 0.5}
    offsets = (0, 0, num_keys - num_queries, choose.randint(-9, 9), choose.randint(-300, 300))
    arguments["query_offset"] = choose.choice(offsets)
    arguments["scale"] = choose.choice(scales)
    if positions is not None:
        arguments["positions"] = positions
    if choose.random() < 0.4:
        keys = [choose.choice((0, num_keys, choose.randint(0, num_keys))) for _ in range(batch)]
        arguments["key_lengths"] = torch.tensor(keys, dtype=choose.choice((torch.int32, torch.int64)))

    wanted = random_features(choose, features)
    shapes = random_tensors(choose, wanted, num_rows, heads, rel_widths)
    heads = shapes.pop("heads")
    arguments |= random_scalars(choose, wanted, shapes["rel_key"] or shapes["rel_p2c"])
    if "enable_gqa" in wanted:
        arguments["enable_gqa"] = True
    if "query_offsets" in wanted:
        arguments["query_offset"] = torch.tensor([choose.choice(offsets) for _ in range(batch)], dtype=torch.int32)
    if "attn_mask" in wanted:
        arguments["attn_mask"] = random_mask(choose, (batch, heads, num_queries, num_keys), dtype)
    inputs = make_inputs(
        batch, heads, num_queries, num_keys, width, value_width, **shapes, per_head=per_head, dtype=dtype, seed=seed, sharp=sharp
    )
    if silent_lse:
        inputs = inputs._replace(d_lse=torch.zeros_like(inputs.d_lse))
    return with_different_strides(inputs) if strided else inputs, arguments


def random_varlen_case(
    seed: int,
    *,
    dtype: torch.dtype = torch.float64,
    widths: tuple[int, ...] = (1, 4, 5, 8),
    value_widths: tuple[int, ...] = (1, 3, 8),
    rel_widths: tuple[int, ...] = (1, 3, 4, 16),
    lengths: tuple[int, ...] = (0, 1, 2, 15, 16, 17, 33, 64, 70),
    features: Collection[str] = FEATURES,
) -> tuple[Inputs, dict[str, Any]]:
    """Packed inputs, (total, heads, width) and d_lse (heads, total), and arguments of fused_relative_attention_varlen."""
    choose = random.Random(seed)
    batch, heads, width, value_width = (choose.choice(sizes) for sizes in ((1, 2, 3, 5), (1, 2, 3), widths, value_widths))
    lengths_q = [choose.choice(lengths) for _ in range(batch)]
    lengths_k = lengths_q if choose.random() < 0.5 else [choose.choice(lengths) for _ in range(batch)]
    num_rows, positions = random_positions(choose, max(lengths_q) + 1, max(lengths_k) + 1)
    wanted = random_features(choose, features)
    shapes = random_tensors(choose, wanted, num_rows, heads, rel_widths)
    heads = shapes.pop("heads")
    arguments: dict[str, Any] = {"is_causal": choose.random() < 0.5, "query_offset": choose.choice((0, 0, choose.randint(-9, 9)))}
    arguments |= random_scalars(choose, wanted, shapes["rel_key"] or shapes["rel_p2c"])
    for which, each in (("q", lengths_q), ("k", lengths_k)):
        starts = list(itertools.accumulate(each, initial=0))
        arguments[f"cu_seqlens_{which}"] = torch.tensor(starts, dtype=choose.choice((torch.int32, torch.int64)))
        arguments[f"max_seqlen_{which}"] = max(each) + choose.choice((0, 0, 5))
    if positions is not None:
        arguments["positions"] = positions
    if "enable_gqa" in wanted:
        arguments["enable_gqa"] = True
    if "query_offsets" in wanted:
        arguments["query_offset"] = torch.tensor([choose.randint(-9, 9) for _ in range(batch)])
    inputs = make_inputs(
        1,
        heads,
        sum(lengths_q),
        sum(lengths_k),
        width,
        value_width,
        **shapes,
        per_head=choose.random() < 0.5,
        dtype=dtype,
        seed=seed,
    )
    in_order = {name: getattr(inputs, name) for name in ("query", "key", "value", "d_out", "rel_query")}
    packed: dict[str, Any] = {name: tensor[0].transpose(0, 1) for name, tensor in in_order.items() if tensor is not None}
    if choose.random() < 0.5:
        packed = {name: tensor.contiguous() for name, tensor in packed.items()}
    return inputs._replace(**packed, d_lse=inputs.d_lse[0]), arguments


class UnpackedSequence(NamedTuple):
    """One sequence of a packed call as a call of its own."""

    queries: slice
    keys: slice
    inputs: Inputs
    arguments: dict[str, Any]


def unpacked(inputs: Inputs, arguments: dict[str, Any]) -> list[UnpackedSequence]:
    """The sequences of a packed call, as batches of one."""
    starts_q, starts_k = (arguments[f"cu_seqlens_{which}"].tolist() for which in "qk")
    of_packing = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    others = {name: value for name, value in arguments.items() if name not in of_packing}
    parts = []
    for index, bounds in enumerate(zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False)):
        queries, keys = slice(*bounds[:2]), slice(*bounds[2:])
        offset = arguments["query_offset"]
        cut = dict.fromkeys(("query", "d_out", "rel_query"), queries) | dict.fromkeys(("key", "value"), keys)
        tensors = {name: getattr(inputs, name) for name in cut}
        single = {name: tensor[cut[name]].transpose(0, 1)[None] for name, tensor in tensors.items() if tensor is not None}
        single["d_lse"] = inputs.d_lse[None, :, queries]
        offset = offset[index].item() if isinstance(offset, torch.Tensor) and offset.dim() else int(offset)
        parts.append(UnpackedSequence(queries, keys, inputs._replace(**single), {**others, "query_offset": offset}))
    return parts


def by_sequence(inputs: Inputs, arguments: dict[str, Any], keep: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """out, lse and gradients of a packed call in float64: dense_gradients of each sequence, in its place or summed.

    Args:
        keep: what dropout keeps, (batch, heads, ...) of at least the longest sequence's sizes; None without dropout.
    """
    tensors = {"out": inputs.d_out, "lse": inputs.d_lse}
    tensors |= {f"d_{name}": getattr(inputs, name) for name in Inputs._fields[:4] if getattr(inputs, name) is not None}
    tensors |= {f"d_{name}": tensor for name, tensor in inputs.terms().items()}
    results = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in tensors.items()}
    for index, part in enumerate(unpacked(inputs, arguments)):
        num_queries, num_keys = part.inputs.query.shape[2], part.inputs.key.shape[2]
        of_part = dict(part.arguments)
        if keep is not None:
            of_part["keep"] = keep[index : index + 1, :, :num_queries, :num_keys]
        single = dense_gradients(part.inputs, **of_part)._asdict()
        for name, total in results.items():
            if name == "lse":
                total[:, part.queries] = single[name][0]
            elif name in ("out", "d_query", "d_rel_query"):
                total[part.queries] = single[name][0].transpose(0, 1)
            elif name in ("d_key", "d_value"):
                total[part.keys] = single[name][0].transpose(0, 1)
            else:
                total += single[name]
    return results


def one_hot_case(outside: Any, width: int, dtype: torch.dtype) -> tuple[Inputs, dict[str, Any], torch.Tensor]:
    """Inputs with a d_out of one number (query 21, batch entry 1, head 0), arguments, and the table rows (R,) that it reaches."""
    inputs = make_inputs(2, 2, 40, 50, width, num_rows=31, dtype=dtype, seed=2)
    i, first, last, offset, num_keys = 21, -20, 10, 5, 36
    d_out = torch.zeros_like(inputs.d_out)
    d_out[1, 0, i, 2] = 1
    inputs = inputs._replace(d_out=d_out, d_lse=torch.zeros_like(inputs.d_lse))
    seen = [j - i - offset for j in range(num_keys) if j <= i + offset]
    if outside == "clamp":
        seen = [max(first, min(last, r)) for r in seen]
    hit = torch.zeros(31, dtype=torch.bool)
    hit[[r - first for r in seen if first <= r <= last]] = True
    assert 0 < int(hit.sum()) < 31
    arguments = {"positions": RelativePositions(first, last, outside), "key_lengths": torch.tensor([50, num_keys])}
    return inputs, {**arguments, "is_causal": True, "query_offset": offset}, hit


Results = dict[str, torch.Tensor]


def unlucky(
    inputs: Inputs, golden: Callable[[Inputs], Results], reference: Callable[[Inputs], Results], draws: int = 3
) -> tuple[Results, Results]:
    """The golden results, and results of plain torch that are as far off as in the worst of some draws.

    How far off plain torch is at most depends on luck and on the processor, by up to twice. So it computes also inputs that are
    moved by a unit, in which all is rounded anew.
    """
    right = golden(inputs)
    errors = []
    for each in (inputs, *(moved_by_a_unit(inputs, seed) for seed in range(1, draws))):
        exact, found = right if each is inputs else golden(each), reference(each)
        errors.append({name: (found[name].double() - exact[name]).masked_fill(exact[name].isinf(), 0) for name in found})
    farthest = {name: max((each[name] for each in errors), key=largest) for name in errors[0]}
    return right, {name: right[name] + error for name, error in farthest.items()}


def largest(error: torch.Tensor) -> float:
    return float(error.abs().max()) if error.numel() else 0.0


def moved_by_a_unit(inputs: Inputs, seed: int) -> Inputs:
    """Inputs each number of which is, at random, as it is, or a unit larger or smaller."""
    generator = torch.Generator().manual_seed(seed)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        steps = torch.randint(-1, 2, tensor.shape, generator=generator)
        return tensor * (1 + torch.finfo(tensor.dtype).eps * steps).to(tensor.dtype)

    return Inputs(*(None if each is None else moved(each) for each in inputs))  # type: ignore[arg-type]


def assert_bit_equal(results: Results, expected: Results) -> None:
    """The same results with the same numbers, NaN among them."""
    assert results.keys() == expected.keys()
    for name, result in results.items():
        assert torch.equal(result.nan_to_num(12345.0), expected[name].nan_to_num(12345.0)), name
        assert torch.equal(result.isnan(), expected[name].isnan()), name
