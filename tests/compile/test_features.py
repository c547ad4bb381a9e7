"""Kernels of calls with all features compile for GPUs that this machine lacks, and fit in their shared memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from bench.cases.features import call
from bench.compiled import Launch, recorded_launches
from tests.compile.targets import NVIDIA, SWEEP
from triton_relattn import RelativePositions
from triton_relattn._core import validation
from triton_relattn._core.arguments import Arguments
from triton_relattn.kernels.backward import backward
from triton_relattn.kernels.config.architectures import architecture_of
from triton_relattn.kernels.config.tile_config import KERNELS, TileConfig
from triton_relattn.kernels.forward import forward

BATCH, HEADS, KEY_HEADS, QUERIES, KEYS = 3, 4, 2, 300, 400
FEATURES: dict[str, Any] = {"window_size": (90, 50), "dropout_p": 0.1, "softcap": 30.0, "rel_scale": 0.3, "enable_gqa": True}


def assert_fit(target: str, launches: list[Launch]) -> None:
    shared = {launch.name: launch.kernel.metadata.shared for launch in launches}
    assert max(shared.values()) <= architecture_of(target).shared_memory, shared


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "width", "precision"),
    # All widths where programs have least shared memory, and every fifth of the other combinations.
    [
        *itertools.product(["sm_86"], [64, 128, 256], ["bf16"]),
        *list(itertools.product([*NVIDIA, "gfx90a", "gfx942"], [64, 128, 256], ["bf16", "tf32"]))[::5],
    ],
)
def test_special_features_fit(target: str, width: int, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward with rel_value, rel_query, or all terms; on one target also the backward."""
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for name in ("shaw", "own_query", "everything"):
        tensors, spec = everything(dtype, width - 8, "clamp", False) if name == "everything" else call(name, dtype, width)
        tensors = tensors._replace(rel_p2c=None)  # with rel_value it gets a smaller tile, see selection.take_smaller
        with recorded_launches(target) as recorded:
            out, lse, softmax_stats, _ = forward(tensors, spec)
            if target == "sm_86" and precision == "bf16":
                backward(out, lse, out, softmax_stats, tensors, spec)
        assert_fit(target, recorded)


ROUNDED = "satfinite.f16x2"
"""The end of PTX's instruction that rounds two terms to float16."""


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("sm_90", "full"),
        ("sm_90", "t5"),
        *(pytest.param(target, "deberta_clamped", marks=pytest.mark.slow) for target in ("sm_80", "sm_90", "sm_120")),
    ],
)
def test_attention_by_position_alone_has_float32_terms(target: str, name: str) -> None:
    """With a scale of 0, all kernels compile and fit, and terms are not rounded to float16; those of a bias alone never are."""
    for scale in (0.125, 0.0):
        tensors, spec = call(name, torch.bfloat16, 64, length=1024)
        spec = spec._replace(scale=scale, rel_scale=0.125)
        with recorded_launches(target, assembled=False) as recorded:
            out, lse, softmax_stats, _ = forward(tensors, spec)
            backward(out, lse, out, softmax_stats, tensors, spec)
        rounds = {launch.name: ROUNDED in launch.kernel.asm["ptx"] for launch in recorded}
        assert {"forward", "dkv", "dq" if name.endswith("clamped") else "stored_dq"} <= set(rounds), list(rounds)
        assert any(rounds.values()) == (scale > 0 and name != "t5"), rounds
        assert_fit(target, recorded)


def everything(dtype: torch.dtype, width: int, outside: Any, packed: bool) -> tuple[Any, Any]:
    """A resolved call with all tensors and scalars of padded or packed batches."""

    def tensor(heads: int, length: int, columns: int) -> torch.Tensor:
        return torch.empty(*((BATCH * length, heads) if packed else (BATCH, heads, length)), columns, dtype=dtype)

    arguments = dict(FEATURES)
    if packed:
        arguments |= {"is_packed": True, "max_seqlen_q": QUERIES, "max_seqlen_k": KEYS}
        arguments |= {f"cu_seqlens_{which}": torch.arange(BATCH + 1) * length for which, length in (("q", QUERIES), ("k", KEYS))}
    else:
        arguments |= {"attn_mask": torch.zeros(KEYS), "key_lengths": torch.zeros(BATCH, dtype=torch.int32)}
    tensors, spec = validation.resolve(
        Arguments(
            tensor(HEADS, QUERIES, width),
            tensor(KEY_HEADS, KEYS, width),
            tensor(KEY_HEADS, KEYS, width + 8),
            torch.empty(HEADS, 33, width // 2, dtype=dtype),
            rel_query=tensor(HEADS, QUERIES, width // 2),
            rel_value=torch.empty(33, width + 8, dtype=dtype),
            rel_bias=torch.empty(33),
            rel_p2c=torch.empty(HEADS, 33, width, dtype=dtype),
            positions=RelativePositions(-16, 16, outside),
            query_offset=torch.zeros(BATCH, dtype=torch.int32),
            **arguments,
        )
    )
    seed, origins = (torch.zeros(shape, dtype=torch.int64) for shape in ((1,), (BATCH, HEADS, 4)))
    return tensors._replace(dropout_seed=seed, dropout_origins=origins), spec


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
def test_everything_at_once_compiles_and_fits(target: str, outside: str, packed: bool) -> None:
    """All kernels of a call with all features, with the smallest tiles."""
    tensors, spec = everything(torch.bfloat16, 40, outside, packed)
    tiles = dict.fromkeys(KERNELS, TileConfig(16, 16, 4, 1))
    with recorded_launches(target) as recorded:
        out, lse, softmax_stats, _ = forward(tensors, spec, tiles["forward"])
        backward(out, lse, out, softmax_stats, tensors, spec, tiles=tiles)
    kernels = {"forward", "delta", "dkv", "stored_dq", "dtable", "dp2c", "dq", "table_gradient"}
    kernels |= {*["far_keys"] * (outside == "clamp")}
    assert {launch.name for launch in recorded} == kernels
    assert_fit(target, recorded)


@pytest.mark.parametrize(
    ("target", "dtype", "width", "table"),
    [
        pytest.param("sm_90", torch.float16, 32, "clamp", marks=pytest.mark.thorough),
        pytest.param("sm_80", torch.float32, 64, "clamp", marks=pytest.mark.thorough),
        pytest.param("sm_86", torch.bfloat16, 256, "clamp", marks=pytest.mark.thorough),
        pytest.param("sm_100", torch.bfloat16, 128, "clamp", marks=pytest.mark.thorough),
        pytest.param("gfx942", torch.bfloat16, 128, "clamp", marks=pytest.mark.thorough),
        *(pytest.param(*combination, marks=pytest.mark.slow) for combination in SWEEP),
    ],
)
def test_selected_configurations_fit(target: str, dtype: torch.dtype, width: int, table: str) -> None:
    """A sample of what the selector can return; the slow sweep takes nearly all pairs of targets, dtypes, widths and tables."""
    tensors, spec = call(f"{table}_causal", dtype, width)
    with recorded_launches(target) as recorded:
        out, lse, softmax_stats, _ = forward(tensors, spec)
        backward(out, lse, out, softmax_stats, tensors, spec)
    assert_fit(target, recorded)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_one_query_and_many_keys(target: str) -> None:
    """Several programs share the keys, and the kernel that merges their results compiles."""
    query, keys = torch.empty(1, 2, 1, 64, dtype=torch.bfloat16), torch.empty(1, 2, 4096, 64, dtype=torch.bfloat16)
    table = torch.empty(9, 64, dtype=torch.bfloat16)
    with recorded_launches(target) as recorded:
        forward(*validation.resolve(Arguments(query, keys, keys, table, query_offset=4095)))
    assert [launch.name for launch in recorded] == ["forward", "merge"]
