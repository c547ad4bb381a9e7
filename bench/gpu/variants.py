"""Configurations that a model of cycles finds promising, and what they are compared with: tools/cycles/README.md.

All are of attention that is not causal. Those that are selected by now are not tried twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.cases.attention import CLIPPED, Case
from triton_relattn.kernels.introspect import Call, TileConfig, selection

LENGTH, TOKENS, WIDTH = 4096, 16384, 2048
TABLES = {"plain": None, "full": None, "clamp": CLIPPED}

Q = "registers"  # rotations in registers; plain attention has none

VARIANTS: dict[tuple[str, int, str], list[TileConfig]] = {
    # More programs a multiprocessor by a limit on registers; more stages; the rotation by a gather.
    ("forward", 64, "full"): [
        TileConfig(64, 64, 4, 1, "scores", Q, 128),
        TileConfig(64, 64, 4, 2, "scores", Q, 168),
        TileConfig(64, 64, 4, 2, "scores", Q, 128),
        TileConfig(64, 64, 4, 3, "scores", Q, 168),
        TileConfig(128, 64, 8, 3, "scores", Q),
        TileConfig(128, 64, 8, 2, "scores", Q),
        TileConfig(128, 64, 8, 2, "scores", "gather"),
        TileConfig(128, 64, 8, 2, None, Q),
    ],
    ("forward", 64, "clamp"): [
        TileConfig(64, 64, 4, 1, "scores", Q, 128),
        TileConfig(64, 64, 4, 2, "scores", Q, 168),
        TileConfig(64, 64, 4, 3, "scores", Q, 168),
        TileConfig(128, 64, 8, 3, "scores", Q),
        TileConfig(128, 64, 8, 2, "scores", Q),
    ],
    # The lower bound must not be a straw man: more stages hide the loads.
    ("forward", 64, "plain"): [TileConfig(128, 64, 8, stages) for stages in (2, 3, 4)] + [TileConfig(128, 128, 8, 2)],
    ("forward", 128, "plain"): [
        *(TileConfig(128, 64, 8, stages) for stages in (2, 3)),
        TileConfig(128, 64, 8, 1, max_registers=128),
        TileConfig(64, 64, 4, 3),
        TileConfig(128, 128, 8, 2),
    ],
    ("forward", 128, "full"): [TileConfig(128, 64, 8, stages, "scores", Q) for stages in (2, 3)],
    ("dq", 64, "plain"): [
        *(TileConfig(128, 64, 8, 2), TileConfig(128, 64, 8, 3), TileConfig(64, 64, 4, 3)),
        TileConfig(128, 64, 8, 3, max_registers=128),
    ],
    ("dq", 64, "full"): [TileConfig(64, 64, 4, 2, "scores", Q), TileConfig(64, 64, 4, 3, "scores", Q)],
    ("dq", 128, "plain"): [TileConfig(128, 64, 8, 2), TileConfig(128, 64, 8, 3)],
    ("dq", 128, "full"): [TileConfig(64, 32, 4, 1, "scores", Q), TileConfig(64, 64, 4, 1, "scores", Q)],
    ("dkv", 64, "plain"): [
        *(TileConfig(64, 64, 4, stages) for stages in (1, 2, 3)),
        TileConfig(64, 64, 4, 1, max_registers=168),
        TileConfig(128, 64, 8, 2),
    ],
    ("dkv", 64, "full"): [
        *(TileConfig(64, 64, 4, stages, "scores", Q) for stages in (1, 2)),
        TileConfig(64, 64, 4, 1, "scores", Q, 168),
    ],
    ("dkv", 64, "clamp"): [
        TileConfig(64, 64, 4, 2, "scores", Q),
        TileConfig(64, 64, 4, 1, "scores", Q, 168),
    ],
    ("dkv", 128, "plain"): [TileConfig(64, 64, 4, 1), TileConfig(64, 32, 4, 1)],
    ("dkv", 128, "full"): [TileConfig(64, 64, 4, 1, "scores", Q), TileConfig(64, 32, 4, 2, "scores", Q)],
    ("dtable", 64, "full"): [TileConfig(64, 128, 4, 2), TileConfig(64, 128, 4, 1), TileConfig(64, 64, 4, 2)],
    ("dtable", 128, "full"): [TileConfig(64, 128, 4, 2), TileConfig(64, 128, 4, 1), TileConfig(64, 128, 8, 3)],
    ("dq_from_ds", 64, "full"): [TileConfig(64, 64, 4, 2), TileConfig(64, 64, 4, 1), TileConfig(128, 64, 8, 2)],
    ("dq_from_ds", 128, "full"): [TileConfig(128, 64, 8, 2), TileConfig(128, 64, 8, 1), TileConfig(64, 64, 4, 2)],
}


@dataclass(frozen=True)
class Group:
    """One kernel of one call, and its configurations: the selected one first."""

    kernel: str
    case: Case
    has_table: bool
    tiles: tuple[TileConfig, ...]


def case_of(head_dim: int, table: str) -> Case:
    """The call that a kernel is timed in: one of those that ``bench speed`` measures."""
    return Case(TOKENS // LENGTH, WIDTH // head_dim, LENGTH, head_dim, False, TABLES[table], group="long")


def selected(kernel: str, case: Case, has_table: bool, arch: str) -> TileConfig:
    """The default configuration, whatever the profiles say."""
    return selection.select(kernel, *Call(*case.resolved(case.empty(), has_table), arch=arch).kind)


def groups(arch: str) -> Iterator[Group]:
    """All of them, for a GPU; without what is not valid there."""
    for (kernel, head_dim, table), tiles in VARIANTS.items():
        case, has_table = case_of(head_dim, table), table != "plain"
        first = selected(kernel, case, has_table, arch)
        others = [tile for tile in tiles if tile != first and tile.why_invalid(arch, has_table, kernel) is None]
        yield Group(kernel, case, has_table, (first, *others))
