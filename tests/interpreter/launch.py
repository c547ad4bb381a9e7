"""Calls of the kernels with chosen configurations, and what they are measured against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

from triton_relattn import RelativePositions, validation
from triton_relattn.kernels.backward import backward
from triton_relattn.kernels.configs import TileConfig
from triton_relattn.kernels.forward import forward
from triton_relattn.reference import reference_attention
from triton_relattn.testing import (
    Inputs,
    assert_gradients_close_fp32,
    assert_table_gradient,
    assert_within_budget,
    dense_gradients,
    forward_backward,
)

DEFAULT_ARGUMENTS = {"positions": None, "key_lengths": None, "is_causal": False, "query_offset": 0, "scale": None}
GRADIENTS = ("d_query", "d_key", "d_value", "d_rel_key")


call_and_patch = interpreter.InterpretedFunction.__call__
called: set[int] = set()


def call_device_function(function: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    """Triton's own, but from the second call on without replacing triton.language by the interpreter: nearly half of the time.

    The launch replaces what kernels see of it and the first call what triton's own functions do; neither is undone before the
    launch ends.
    """
    if id(function) not in called:
        called.add(id(function))
        return call_and_patch(function, *args, **kwargs)
    return function.rewrite()(*args, **kwargs)


@contextmanager
def fast_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", call_device_function)
        yield


def run(inputs: Inputs, config: TileConfig | None = None, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of the forward kernel; the call is validated as the public function validates it."""
    query, key, value, rel_key = inputs[:4]
    arguments = DEFAULT_ARGUMENTS | arguments
    spec = validation.resolve(query, key, value, rel_key, **arguments)
    with fast_interpreter():
        out, lse = forward(query, key, value, rel_key, arguments["key_lengths"], spec, config=config)
    return out, lse


def check(inputs: Inputs, config: TileConfig | None = None, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run and apply the error rule to out and lse: at most twice the error of plain torch in the same precision.

    In float32 at most four times: the kernel scales logits to base 2, a rounding that plain torch does not have and that the
    interpreter, which has no fused multiply-add, makes where a GPU does not.
    """
    results = run(inputs, config, **arguments)
    golden = reference_attention(*inputs.to(torch.float64)[:4], **arguments)
    reference = reference_attention(*inputs[:4], **arguments)
    factor = 4 if inputs.query.dtype == torch.float32 else 2
    for name, result, exact, plain in zip(("out", "lse"), results, golden, reference, strict=True):
        if bool((exact.isfinite() & (exact != 0)).any()):
            # Rows that see a single key copy its value: plain torch may be exact.
            assert_within_budget(name, result, exact, plain, factor=factor, exact_reference=True)
        else:  # nobody sees anything
            assert torch.equal(result.double(), exact)
    return results


def run_backward(
    inputs: Inputs,
    tiles: Mapping[str, TileConfig] | None = None,
    wanted: Sequence[bool] = (True, True, True, True),
    **arguments: Any,
) -> dict[str, torch.Tensor | None]:
    """out, lse and the gradients by name, None where not wanted; tiles: configurations by the kernels' names."""
    query, key, value, rel_key = inputs[:4]
    arguments = DEFAULT_ARGUMENTS | arguments
    out, lse = run(inputs, (tiles or {}).get("forward"), **arguments)
    spec = validation.resolve(query, key, value, rel_key, **arguments)
    with fast_interpreter():
        gradients = backward(
            inputs.d_out, inputs.d_lse, out, lse, query, key, value, rel_key, arguments["key_lengths"], spec, wanted, tiles
        )
    return {"out": out, "lse": lse, **dict(zip(GRADIENTS, gradients, strict=True))}


def all_gradients(inputs: Inputs, tiles: Mapping[str, TileConfig] | None = None, **arguments: Any) -> dict[str, torch.Tensor]:
    """out, lse and all gradients by name; without a table there is no d_rel_key."""
    return {name: result for name, result in run_backward(inputs, tiles, **arguments).items() if result is not None}


def rounding_budget(inputs: Inputs, **arguments: Any) -> dict[str, torch.Tensor]:
    """For each gradient, element by element, what rounding may be off, in float64; 0 where no visible pair is.

    P = exp(logit - lse) has what both are rounded by, in the forward and again in the backward, two units of float32 at their
    magnitude, as a relative error. Plain torch is no yardstick for that: it divides P by the row's sum, where such an error
    cancels, wholly if a query sees a single key; a backward that keeps nothing but lse cannot. In float16, P, dS, a delta
    from out, and the result are rounded once more: a unit of float16, and of its subnormals.
    """
    query, key, value, rel_key, d_out, d_lse = (None if tensor is None else tensor.double().abs() for tensor in inputs)
    assert query is not None and key is not None and value is not None and d_out is not None and d_lse is not None
    exact = inputs.to(torch.float64)
    identity = torch.eye(key.shape[2], dtype=torch.float64).expand(*key.shape[:2], -1, -1)
    probs, _ = reference_attention(exact.query, exact.key, identity, exact.rel_key, **arguments)
    seen = probs > 0
    scale = arguments.get("scale")
    scale = query.shape[-1] ** -0.5 if scale is None else abs(scale)

    logits, largest_row = query @ key.mT, torch.zeros(())
    if rel_key is not None:
        largest_row = rel_key.amax(-2, keepdim=True)  # (1, D) or (H, 1, D)
        logits = logits + query @ largest_row.mT
    info = torch.finfo(inputs.query.dtype)
    units = 2 * torch.finfo(torch.float32).eps * (1 + scale * (logits * seen).amax(-1, keepdim=True)) + info.eps
    subnormal = info.tiny * info.eps if inputs.query.dtype != torch.float32 else info.tiny  # exp2 may flush them
    d_probs = d_out @ value.mT
    terms = d_probs + (probs * d_probs).sum(-1, keepdim=True) + d_lse[..., None]
    probs = probs * units + seen * subnormal
    d_scores = scale * (probs * terms + seen * subnormal)
    budgets = {
        "d_query": d_scores @ key + d_scores.sum(-1, keepdim=True) * largest_row,
        "d_key": d_scores.mT @ query,
        "d_value": probs.mT @ d_out,
    }
    if rel_key is not None:
        positions = arguments.get("positions") or RelativePositions.centred(rel_key.shape[-2])
        i, j = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])
        row, applies = positions.rows(j - i - arguments.get("query_offset", 0))
        by_row = torch.zeros(*query.shape[:3], rel_key.shape[-2], dtype=torch.float64)
        by_row.scatter_add_(-1, row.expand_as(d_scores), d_scores * applies)
        budgets["d_rel_key"] = torch.einsum("bhir,bhid->hrd" if rel_key.dim() == 3 else "bhir,bhid->rd", by_row, query)
    return {name: budget + (budget > 0) * subnormal for name, budget in budgets.items()}


def assert_rounding_errors(results: Mapping[str, torch.Tensor], inputs: Inputs, **arguments: Any) -> None:
    """Every element of every gradient is within rounding_budget of the float64 one, and exactly zero where that is zero."""
    golden = dense_gradients(inputs, **arguments)._asdict()
    budgets = rounding_budget(inputs, **arguments)
    assert [name for name in GRADIENTS if name in results] == list(budgets)
    for name, budget in budgets.items():
        result, exact = results[name], golden[name]
        assert result.dtype == inputs.query.dtype and result.shape == exact.shape, name
        assert result.isfinite().all(), f"{name}: {int((~result.isfinite()).sum())} of {result.numel()} elements not finite"
        assert not result[budget == 0].any(), f"{name}: not zero where no visible pair is"
        times = float(((result.double() - exact).abs() / budget.clamp_min(1e-300)).max())
        assert times <= 1, f"{name}: an element is off by {times:.3g} times its budget"


def check_gradients(results: Mapping[str, torch.Tensor], inputs: Inputs, **arguments: Any) -> None:
    """The error rule for gradients: each element within its rounding budget, and each gradient

    in float32: close in norm, unless its terms cancel: rounding may then take a hundredth of it. The factor of plain torch
    does not apply, see rounding_budget;
    in float16: off by at most three times what plain torch is, the table's by what rounding dS once costs.
    """
    assert_rounding_errors(results, inputs, **arguments)
    golden = dense_gradients(inputs, **arguments)._asdict()
    if inputs.query.dtype == torch.float32:
        budgets = rounding_budget(inputs, **arguments)
        for name, budget in budgets.items():
            if 0 < budget.norm() < 0.01 * golden[name].norm():
                assert_gradients_close_fp32(name, results[name], golden[name], [golden[other] for other in budgets])
        return
    reference = forward_backward(reference_attention, inputs, **arguments)
    for name in [name for name in GRADIENTS if name in results and golden[name].any()]:  # else it cancels to nothing
        assert_within_budget(name, results[name], golden[name], reference[name], factor=3, exact_reference=True)
        if name == "d_rel_key":
            assert_table_gradient(name, results[name], inputs, **arguments)


def check_backward(inputs: Inputs, tiles: Mapping[str, TileConfig] | None = None, **arguments: Any) -> dict[str, torch.Tensor]:
    """Run and apply the error rule to the gradients."""
    results = all_gradients(inputs, tiles, **arguments)
    check_gradients(results, inputs, **arguments)
    return results
