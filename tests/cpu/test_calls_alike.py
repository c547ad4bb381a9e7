"""Calls with the same sizes, dtypes and scalars share what is put together once: no call gets what belongs to another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton_relattn import RelativePositions
from triton_relattn._core import validation
from triton_relattn._core.arguments import Arguments
from triton_relattn.kernels.call import Call, fixed
from triton_relattn.kernels.config.selection import TileConfig
from triton_relattn.testing import make_inputs

SHAPE: dict[str, Any] = {"num_rows": 63, "dtype": torch.float32, "seed": 1}
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "usual": ({}, {}),
    "longer": ({"num_keys": 33}, {}),
    "an offset": ({}, {"query_offset": 5}),
    "an offset for each": ({}, {"query_offset": torch.tensor([0, 0])}),
    "causal": ({}, {"is_causal": True}),
    "window": ({}, {"window_size": (4, -1)}),
    "scale": ({}, {"scale": 0.3}),
    "rel_scale": ({}, {"rel_scale": 0.3}),
    "softcap": ({}, {"softcap": 20.0}),
    "dropout": ({}, {"dropout_p": 0.2}),
    "clamped": ({"num_rows": 11}, {"positions": RelativePositions(-5, 5)}),
    "zero": ({"num_rows": 11}, {"positions": RelativePositions(-5, 5, "zero")}),
    "no table": ({"num_rows": None}, {}),
    "wide": ({"width": 40}, {}),
    "wide values": ({"value_width": 72}, {}),
    "rel_query": ({"rel_width": 16}, {}),
    "rel_query of another width": ({"rel_width": 24}, {}),
    "rel_value": ({"rel_value": True}, {}),
    "rel_bias": ({"rel_bias": True}, {}),
    "rel_bias alone": ({"rel_bias": True, "rel_key": False}, {}),
    "heads": ({"heads": 4}, {}),
    "shared heads": ({"heads": 4, "key_heads": 2}, {"enable_gqa": True}),
    "bfloat16": ({"dtype": torch.bfloat16}, {}),
    "float16": ({"dtype": torch.float16}, {}),
}


def shown(name: str, arch: str, precision: str) -> dict[str, Any]:
    """All of a call that does not depend on where its tensors lie."""
    sizes, arguments = CALLS[name]
    shape = {"batch": 2, "heads": 2, "num_queries": 32, "num_keys": 32, "width": 16, **SHAPE, **sizes}
    inputs = make_inputs(**shape)
    torch.set_float32_matmul_precision(precision)
    query, key, value, rel_key = inputs[:4]
    tensors, spec = validation.resolve(Arguments.of(query, key, value, rel_key, **inputs.terms(), **arguments))
    if spec.dropout_p:
        tensors = tensors._replace(dropout_seed=torch.zeros(1, dtype=torch.int64))
    call = Call(tensors, spec, arch=arch)
    common = call.common
    of_tensors = {"sequences": common.sequences[:3], "dropout": (common.dropout or ())[1:]}
    tile = call.compiled_tile(TileConfig(64, 64, 4, 1), loops_over_keys=True)
    others = {"window": common.window, "scaling": common.scaling, "positions": call.limits}
    return {**of_tensors, **others, "kind": call.kind, "shape": call.shape, "tile": tile, "keep": call.fixed.keep_scale}


def test_no_call_gets_what_belongs_to_another() -> None:
    """Each beside all others, and after a cleared cache: the same; and changing what a call has changes no other."""
    before = torch.get_float32_matmul_precision()
    try:
        settings = [
            (name, arch, precision) for name in CALLS for arch in ("sm_90", "gfx942") for precision in ("highest", "high")
        ]
        fixed.cache_clear()
        together = [shown(*setting) for setting in settings]
        again = [shown(*setting) for setting in settings]
        alone = []
        for setting in settings:
            fixed.cache_clear()
            alone.append(shown(*setting))
    finally:
        torch.set_float32_matmul_precision(before)
    assert together == again == alone
    precisions = {
        setting[2]: each["tile"].precision for setting, each in zip(settings, together, strict=True) if setting[0] == "usual"
    }
    assert precisions == {"highest": "ieee", "high": "tf32"}
    coverage = {setting[0]: each["tile"].coverage for setting, each in zip(settings, together, strict=True)}
    assert (coverage["usual"], coverage["an offset for each"], coverage["zero"], coverage["no table"]) == (
        "full",
        "clamp",
        "zero",
        "no table",
    )


def test_what_is_kept_is_bounded() -> None:
    assert fixed.cache_info().maxsize is not None
    query = torch.zeros(1, 1, 4, 16)
    tensors, spec = validation.resolve(Arguments.of(query, query, query))
    first, second = (Call(tensors, spec, arch="sm_90") for _ in range(2))
    assert first.fixed is second.fixed
    with pytest.raises(AttributeError):
        first.fixed.precision = "changed"  # type: ignore[misc]
