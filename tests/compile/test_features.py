"""Kernels of calls with all features, and on grids, compile for GPUs that this machine lacks, and fit in their shared memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from bench.cases.features import on_grid
from bench.compiled import recorded_launches
from tests.compile.calls import call, compiled_launches
from tests.expected import TABLES
from tests.samples import Sample
from tools.absent_gpu import Launch
from triton_relattn.kernels.config.architectures import architecture_of
from triton_relattn.kernels.config.selection import Tables
from triton_relattn.kernels.config.tile_config import TileConfig
from triton_relattn.kernels.grid.backward import backward
from triton_relattn.kernels.grid.forward import forward

NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
DTYPES = ("float16", "bfloat16", "float32")
VALUES = {"tables": ("rel_key", "rel_value")}
WIDTHS = (64, 128, 256)
SWEEP = list(itertools.product((*NVIDIA, "gfx942"), DTYPES, (16, 40, *WIDTHS), ("none", "full", "clamp", "zero")))[::11]
"""Targets, dtypes, widths and tables: every eleventh combination has nearly every pair of two of them."""
QUICKER = [
    ("sm_90", "float16", 32, "clamp"),
    ("sm_80", "float32", 64, "clamp"),
    ("sm_86", "bfloat16", 256, "clamp"),
    ("sm_100", "bfloat16", 128, "clamp"),
    ("gfx942", "bfloat16", 128, "clamp"),
]


def assert_fit(target: str, launches: list[Launch], names: set[str] | None = None) -> None:
    """names: of the kernels, if they matter."""
    shared = {launch.name: launch.kernel.metadata.shared for launch in launches}
    assert max(shared.values()) <= architecture_of(target).shared_memory, shared
    assert names is None or set(shared) == names


def long(width: int, table: str, **changes: Any) -> Sample:
    return call(4096, table, width=width, value_width=width, **changes)


def everything(outside: str, width: int = 40, packed: bool = False, **changes: Any) -> Sample:
    """A call with all tensors and scalars of padded or packed batches."""
    fields: dict[str, Any] = {"batch": 3, "num_keys": 400, "group": 2, "width": width, "value_width": width + 8}
    fields |= {"rel_width": width // 2, "integers": "int32", "query_offset": (0, 0, 0), "float32_bias": True}
    fields |= {"tables": TABLES, "per_head": ("rel_key", "rel_p2c"), "positions": (-16, 16, outside)}
    fields |= {"window_size": (90, 50), "dropout_p": 0.1, "softcap": 30.0, "rel_scale": 0.3}
    if packed:
        fields["sequences"] = ((300, 400),) * 3
    else:
        fields |= {"mask": "float32", "mask_shape": (400,), "key_lengths": (0, 0, 0)}
    return call(300, **fields | changes)


@pytest.mark.parametrize(
    ("target", "dtype", "width", "table"),
    [
        *(pytest.param(*combination, marks=pytest.mark.thorough) for combination in QUICKER),
        *(pytest.param(*combination, marks=pytest.mark.slow) for combination in SWEEP),
    ],
)
def test_selected_configurations_fit(target: str, dtype: str, width: int, table: str) -> None:
    """A sample of what the selector can return; the slow sweep takes nearly all pairs of targets, dtypes, widths and tables."""
    assert_fit(target, compiled_launches(target, long(width, table, dtype=dtype, is_causal=True, key_lengths=(4096,))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "width", "dtype"),
    # All widths where programs have least shared memory, and every fifth of the other combinations.
    [
        *itertools.product(["sm_86"], WIDTHS, ["bfloat16"]),
        *list(itertools.product([*NVIDIA, "gfx90a", "gfx942"], WIDTHS, ["bfloat16", "float32"]))[::5],
    ],
)
def test_special_features_fit(target: str, width: int, dtype: str) -> None:
    """The forward with rel_value, rel_query, or all terms, float32 in TF32; on one target also the backward."""
    torch.set_float32_matmul_precision("high")
    is_whole = target == "sm_86" and dtype == "bfloat16"
    changes: dict[str, Any] = {"dtype": dtype} | ({} if is_whole else {"requires_grad": ()})
    terms = TABLES[:3]  # with rel_value, rel_p2c gets a smaller tile, see selection.take_smaller
    for sample in (
        long(width, "clamp", **VALUES, **changes),
        long(width, "full", per_head=("rel_key",), rel_width=width, **changes),
        everything("clamp", width - 8, **changes | {"tables": terms}),
    ):
        assert_fit(target, compiled_launches(target, sample))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("target", "outside", "packed"),
    [
        ("sm_80", "clamp", False),
        ("sm_90", "zero", False),
        ("sm_90", "clamp", True),
        ("gfx942", "clamp", False),
        *(
            pytest.param(target, outside, packed, marks=pytest.mark.slow)
            for target in ("sm_80", "sm_86", "sm_100", "sm_120", "gfx942")
            for outside in ("clamp", "zero")
            for packed in (False, True)
        ),
    ],
)
def test_everything_at_once_compiles_and_fits(target: str, outside: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels of a call with all features, with the smallest tiles."""
    monkeypatch.setattr(Tables, "select", lambda *_, **__: TileConfig(16, 16, 4, 1))
    launches = compiled_launches(target, everything(outside, packed=packed))
    kernels = {"forward", "delta", "dkv", "stored_dq", "dtable", "dp2c", "dq", "table_gradient"}
    assert_fit(target, launches, kernels | {*["far_keys"] * (outside == "clamp")})


ROUNDED = "satfinite.f16x2"
"""The end of PTX's instruction that rounds two terms to float16."""
P2C = {"tables": ("rel_key", "rel_p2c"), "per_head": ("rel_key", "rel_p2c")}


@pytest.mark.parametrize(
    ("target", "table", "terms"),
    [
        ("sm_90", "full", {}),
        ("sm_90", "full", {"tables": ("rel_bias",), "per_head": ("rel_bias",), "rel_scale": None}),
        *(pytest.param(target, "clamp", P2C, marks=pytest.mark.slow) for target in ("sm_80", "sm_90", "sm_120")),
    ],
)
def test_attention_by_position_alone_has_float32_terms(target: str, table: str, terms: dict[str, Any]) -> None:
    """With a scale of 0, all kernels compile and fit, and terms are not rounded to float16; those of a bias alone never are."""
    for scale in (0.125, 0.0):
        sample = call(1024, table, **{"rel_scale": 0.125, **terms}, scale=scale, key_lengths=(1024,))
        launches = compiled_launches(target, sample, assembled=False)
        rounds = {launch.name: ROUNDED in launch.kernel.asm["ptx"] for launch in launches}
        assert {"forward", "dkv", "dq" if table == "clamp" else "stored_dq"} <= set(rounds), list(rounds)
        assert any(rounds.values()) == (scale > 0 and "rel_key" in sample.tables), rounds
        assert_fit(target, launches)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_one_query_and_many_keys(target: str) -> None:
    """Several programs share the keys, and the kernel that merges their results compiles."""
    decode = call(1, num_keys=4096, positions=(-4, 4, "clamp"), query_offset=4095, requires_grad=())
    assert_fit(target, compiled_launches(target, decode), {"forward", "merge"})


QUICK = {("sm_86", 80), ("sm_90", 64), ("gfx942", 64)}
ON_GRIDS = [
    pytest.param(target, width, marks=() if (target, width) in QUICK else pytest.mark.slow)
    for target, width in itertools.product(("sm_80", "sm_86", "sm_90", "sm_100", "gfx942", "sm_75"), (64, 80, 256))
]


@pytest.mark.parametrize(("target", "width"), ON_GRIDS)
def test_every_kernel_of_a_grid_fits(target: str, width: int) -> None:
    """On known GPUs and an unknown one, for grids as wide as a tile, narrower and wider, with a class token and without. Sides
    are runtime arguments: grids with equally cut tiles share their kernels."""
    for sides, prefix in (((64, 64), 0), ((14, 14), 1), ((3, 70), 0)):
        tensors, spec = on_grid(sides, torch.empty(1, 1, prefix + sides[0] * sides[1], width, dtype=torch.bfloat16))
        with recorded_launches(target) as launches:
            out, softmax_stats = forward(tensors, *spec)
            backward(out, out, softmax_stats, tensors, *spec)
        assert_fit(target, launches, {"grid_forward", "grid_dq", "grid_dkv"})
    with recorded_launches(target) as launches:
        for sides in ((13, 15), (11, 13), (9, 15)):
            tensors, spec = on_grid(sides, torch.empty(1, 2, sides[0] * sides[1], width, dtype=torch.bfloat16))
            forward(tensors, *spec)
    assert len({launch.kernel.hash for launch in launches}) == 1
