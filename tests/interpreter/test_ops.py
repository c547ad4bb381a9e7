"""The registered operators with implementation="triton": schemas, fakes, derivatives, determinism."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.check import Way
from tests.samples import in_memory_order, with_different_strides
from tests.tolerance import assert_bit_equal
from triton_relattn._core import validation
from triton_relattn._core.arguments import Arguments
from triton_relattn._core.dtypes import keeps_residual
from triton_relattn._core.spec import DIFFERENTIABLE
from triton_relattn.kernels.config.tile_config import TileConfig
from triton_relattn.kernels.forward import forward as forward_kernel
from triton_relattn.testing import Inputs, make_inputs

FORWARD = torch.ops.triton_relattn.attention_forward.default
BACKWARD = torch.ops.triton_relattn.attention_backward.default

INPUTS = make_inputs(2, 2, 9, 13, 16, 8, num_rows=5, dtype=torch.float32, seed=0)
INPUTS = INPUTS._replace(query=in_memory_order(INPUTS.query, 0, 2, 1, 3))
LENGTHS = torch.tensor([13, 4])
TERMS: dict[str, Any] = {"key_heads": 1, "rel_width": 3, "rel_value": True, "rel_bias": True, "per_head": True}
FEATURES = with_different_strides(make_inputs(2, 2, 9, 13, 16, 8, num_rows=5, **TERMS, dtype=torch.float32, seed=0))
FEATURE_ARGUMENTS: dict[str, Any] = {
    "attn_mask": torch.randn(2, 1, 9, 13),
    "window_size": (8, 9),
    "query_offset": torch.tensor([1, -2]),
    "softcap": 3.0,
    "dropout_p": 0.3,
    "enable_gqa": True,
}
LONG = make_inputs(1, 2, 41, 20, 16, 8, num_rows=81, dtype=torch.float16, seed=0)
LONG = LONG._replace(query=in_memory_order(LONG.query, 0, 2, 1, 3))
CASES: dict[str, tuple[Inputs, dict[str, Any]]] = {
    "rel_key": (INPUTS, {"key_lengths": LENGTHS, "scale": 0.3}),
    "features": (FEATURES, FEATURE_ARGUMENTS),
    "keeps the residual": (LONG, {}),
}
ALL = (True,) * len(DIFFERENTIABLE)


def arguments(case: str, wanted: tuple[bool, ...] = ALL) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments of the forward and backward operators."""
    inputs, call_arguments = CASES[case]
    given = {name: tensor for name, tensor in inputs._asdict().items() if name in DIFFERENTIABLE}
    tensors, spec = validation.resolve(Arguments(**given, **call_arguments))
    if spec.dropout_p:
        tensors = tensors._replace(dropout_seed=torch.tensor([0x1234_5678_9ABC_DEF0]))
    keeps = keeps_residual(tensors)
    forward = (*tensors, *spec, "triton", keeps)
    out, lse, softmax_stats, residual = FORWARD(*forward)
    saved = (out, lse, softmax_stats, residual if keeps else None)
    return forward, (inputs.d_out, inputs.d_lse, *saved, *forward[:-1], wanted)


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_opcheck(case: str) -> None:
    forward, backward = arguments(case)
    assert forward[-1] == (case == "keeps the residual")
    torch.library.opcheck(FORWARD, forward)
    leaves = tuple(None if tensor is None else tensor.detach().requires_grad_() for tensor in forward[: len(ALL)])
    torch.library.opcheck(FORWARD, (*leaves, *forward[len(ALL) :]))
    torch.library.opcheck(BACKWARD, backward)


@pytest.mark.parametrize("wanted", [ALL, (False, True, False, True, True, False, True, False)], ids=["all", "some"])
@pytest.mark.parametrize("case", CASES)
def test_fakes_have_the_real_shapes_and_strides(case: str, wanted: tuple[bool, ...]) -> None:
    for operator, real_arguments in zip((FORWARD, BACKWARD), arguments(case, wanted), strict=True):
        mode = FakeTensorMode()
        fake_arguments = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in real_arguments]
        with mode:
            fakes = operator(*fake_arguments)
        reals = operator(*real_arguments)
        assert operator is BACKWARD or (reals[3].numel() > 0) == (case == "keeps the residual")
        for fake, real in zip(fakes, reals, strict=True):
            assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_tiles_that_do_not_suit_a_table_are_refused() -> None:
    """The bands of a table need tiles as high as wide, or twice that."""
    refusal = pytest.raises(ValueError, match=r"block_m must be block_n or twice that.*64 and 16")
    for table, outcome in ((INPUTS.rel_key, refusal), (None, nullcontext())):
        tensors, spec = validation.resolve(Arguments(*INPUTS[:3], table))
        with outcome:
            forward_kernel(tensors, spec, TileConfig(64, 16, 4, 1))


def test_deterministic_algorithms() -> None:
    """torch.use_deterministic_algorithms(True) changes no results and raises no error."""
    expected = Way("triton").results(INPUTS, key_lengths=LENGTHS)
    torch.use_deterministic_algorithms(True)
    try:
        results = Way("triton").results(INPUTS, key_lengths=LENGTHS)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_bit_equal(results, expected)
