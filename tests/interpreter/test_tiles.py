"""The kernels in all tiles that are selected on some GPU, and tables that end anywhere in a tile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.interpreter.launch import attend, check, check_forward_backward, run, selectable, tile
from triton_relattn import RelativePositions
from triton_relattn.kernels.config.tile_config import TileConfig
from triton_relattn.testing import make_inputs

SMALL = {
    "forward": tile(32, 16),
    "stored_dq": tile(32, 16),
    "dq": tile(16, 16),
    "dkv": tile(32, 32),
    "dtable": tile(32, 32),
}


@pytest.mark.parametrize(
    ("kernel", "config"),
    [(kernel, config) for kernel in ("forward", "dkv", "stored_dq", "dq", "dtable") for config in selectable(kernel)],
    ids=str,
)
def test_every_selectable_tile(kernel: str, config: TileConfig) -> None:
    """A full, a clamped and a bounded table, and none, with lengths that do not fill blocks of queries or keys."""
    tables: tuple[tuple[Any, bool, torch.dtype], ...] = (
        ("full", True, torch.float32),
        (RelativePositions(-3, 7), False, torch.float16),
        (RelativePositions(-config.block_m - 5, 2, "zero"), True, torch.float32),
        (None, False, torch.float16),
    )
    for seed, (positions, is_causal, dtype) in enumerate(tables):
        if positions is None and kernel == "dtable":
            continue
        # With half of these queries, kernels that read dS would take a smaller tile.
        num_queries = 21 + config.block_m * (1 if kernel in ("forward", "dkv", "dq") else 8 // dtype.itemsize)
        num_keys = config.block_m + 2 * config.block_n + 9
        positions = RelativePositions(-num_queries - 30, num_keys) if positions == "full" else positions
        num_rows = None if positions is None else positions.num_rows
        inputs = make_inputs(1, 1, num_queries, num_keys, 16, num_rows=num_rows, dtype=dtype, seed=seed)
        arguments: dict[str, Any] = {"is_causal": is_causal, "query_offset": 19, "key_lengths": torch.tensor([num_keys - 5])}
        if kernel == "forward":
            check(inputs, config, positions=positions, **arguments)
        else:
            check_forward_backward(inputs, {kernel: config}, positions=positions, **arguments)


TABLES: dict[str, RelativePositions] = {
    "exact": RelativePositions(-44, 57),
    "one row short": RelativePositions(-43, 57),
    "longer": RelativePositions(-70, 80),
    "shorter": RelativePositions(-20, 8),
    "one row": RelativePositions(0, 0),
    "one row of the future": RelativePositions(17, 17),
    "two rows": RelativePositions(-1, 0),
    "causal rows": RelativePositions(-44, 0),
    "wholly past": RelativePositions(-500, -200),
    "past": RelativePositions(-40, -16),
    "wholly future": RelativePositions(300, 333),
    "future": RelativePositions(16, 48),
}


@pytest.mark.parametrize("outside", ["clamp", "zero"])
@pytest.mark.parametrize("table", TABLES)
def test_tables(table: str, outside: Any) -> None:
    """Tables that cover all, some or none of the relative positions, with an offset and lengths.

    Also tables per head: memory after a table then belongs to the next head, and is not zero by chance.
    """
    positions = RelativePositions(TABLES[table].first, TABLES[table].last, outside)
    for seed, (is_causal, query_offset, lengths) in enumerate(((False, 0, None), (True, 20, [49]))):
        inputs = make_inputs(1, 2, 45, 58, 16, num_rows=positions.num_rows, per_head=seed > 0, dtype=torch.float32, seed=seed)
        arguments = {"query_offset": query_offset, "key_lengths": None if lengths is None else torch.tensor(lengths)}
        check_forward_backward(inputs, SMALL, positions=positions, is_causal=is_causal, **arguments)


BORDERS = ((-3, 7, 0), (-20, -20, 17), (5, 6, -9))
"""First and last row, and the offset: borders of the table at different places in tiles, or close to each other."""
TILES_AT_BORDERS = (  # of the dkv, the dq, the stored_dq and the dtable kernel
    ((16, 16), (32, 16), (32, 16), (64, 64)),
    ((32, 16), (16, 16), (16, 32), (16, 16)),
    ((64, 32), (32, 32), (64, 64), (32, 16)),
    ((16, 16), (64, 32), (16, 16), (16, 64)),
)


@pytest.mark.parametrize(("keys", "queries", "stored", "table"), TILES_AT_BORDERS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_tiles_at_the_borders_of_a_table(
    keys: tuple[int, int], queries: tuple[int, int], stored: tuple[int, int], table: tuple[int, int], is_causal: bool
) -> None:
    """With a clamped table the dq kernel sums the pairs beyond it, and the dtable kernel those inside: each pair once, for any
    tiles."""
    tiles = {"dkv": tile(*keys), "dq": tile(*queries), "stored_dq": tile(*stored), "dtable": tile(*table)}
    for seed, (first, last, offset) in enumerate(BORDERS):
        inputs = make_inputs(1, 1, 51, 59, 16, num_rows=last - first + 1, dtype=torch.float32, seed=seed)
        check_forward_backward(inputs, tiles, positions=RelativePositions(first, last), query_offset=offset, is_causal=is_causal)


def test_invalid_configuration() -> None:
    inputs = make_inputs(1, 1, 20, 20, 16, num_rows=39, dtype=torch.float32, seed=6)
    with pytest.raises(ValueError, match=r"block_m must be block_n or twice that.*64 and 16"):
        run(inputs, TileConfig(64, 16, 4, 1))
    run(inputs._replace(rel_key=None), TileConfig(64, 16, 4, 1))


def test_what_the_interpreter_cannot_do() -> None:
    """bfloat16, which it computes wrongly, float64, and wide heads raise errors instead of using another implementation."""
    inputs = make_inputs(1, 1, 20, 20, 16, num_rows=39, dtype=torch.bfloat16, seed=6)
    with pytest.raises(RuntimeError, match="interpreter computes bfloat16 wrongly"):
        attend(*inputs[:4])
    with pytest.raises(RuntimeError, match=r"not in torch\.float64"):
        attend(*inputs.to(torch.float64)[:4])
    wide = make_inputs(1, 1, 4, 4, 257, num_rows=7, dtype=torch.float32, seed=6)
    with pytest.raises(RuntimeError, match="up to 256, got 257"):
        attend(*wide[:4])
