"""Calls of the kernels with chosen configurations, and what they are measured against."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import pytest
import torch

from tests.expected import assert_table_gradient, exact_results
from tests.tolerance import assert_gradients_close_fp32, within
from triton_relattn import RelativePositions, fused_relative_attention, fused_relative_attention_varlen
from triton_relattn._core import validation
from triton_relattn._core.arguments import Arguments
from triton_relattn._core.dropout import keep_mask
from triton_relattn._core.residual import keeps_residual
from triton_relattn._core.spec import DIFFERENTIABLE, AttentionSpec, AttentionTensors
from triton_relattn._reference import reference_attention
from triton_relattn.kernels import call as of_launches
from triton_relattn.kernels.backward import backward
from triton_relattn.kernels.call import Call
from triton_relattn.kernels.config import selection
from triton_relattn.kernels.config.selection import TileConfig
from triton_relattn.kernels.config.tile_config import COVERAGES
from triton_relattn.kernels.forward import forward
from triton_relattn.kernels.workspace import planning
from triton_relattn.testing import Inputs, assert_within_budget, forward_backward

GRADIENTS = tuple(f"d_{name}" for name in DIFFERENTIABLE)
SPECIAL = (None, "rel_value", "rel_query", "narrow rel_query", "rel_key and rel_bias", "rel_bias")
SEED = torch.tensor([0x1234_5678_9ABC_DEF0])
"""The seed of dropout in all calls of this module."""


def tensors_of(inputs: Inputs) -> dict[str, Any]:
    """The tensors of a call, by the names of its arguments."""
    return {name: getattr(inputs, name) for name in DIFFERENTIABLE if getattr(inputs, name) is not None}


def resolve(inputs: Inputs, **arguments: Any) -> tuple[AttentionTensors, AttentionSpec]:
    """A call as the launchers get it; arguments are those of fused_relative_attention, and dropout has a fixed seed."""
    tensors, spec = validation.resolve(Arguments(**tensors_of(inputs), **arguments))
    seed = SEED.to(inputs.query.device)
    return (tensors._replace(dropout_seed=seed) if spec.dropout_p > 0 else tensors), spec


def attend(*tensors: Any, **arguments: Any) -> Any:
    """out and lse of the operator, by the kernels."""
    return fused_relative_attention(*tensors, **arguments, return_lse=True, implementation="triton")


def kept(*sizes: int, dropout_p: float) -> torch.Tensor:
    """Return the mask of what dropout keeps with the fixed seed, bool, for sizes (batch, heads, num_queries, num_keys)."""
    batch, heads, num_queries, num_keys = sizes
    indices = torch.arange(batch).view(-1, 1, 1, 1), torch.arange(heads).view(-1, 1, 1), torch.arange(num_queries).view(-1, 1)
    return keep_mask(SEED, dropout_p, *indices, slice(0, num_keys))


def with_keep(inputs: Inputs, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments for exact_results: with dropout, also what is kept."""
    if not arguments.get("dropout_p"):
        return arguments
    keep = kept(*inputs.query.shape[:3], inputs.key.shape[2], dropout_p=arguments["dropout_p"])
    return {**arguments, "keep": keep.to(inputs.query.device)}


def with_seed(inputs: Inputs, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments for reference_attention: with dropout, also the seed."""
    return {**arguments, "dropout_seed": SEED.to(inputs.query.device)} if arguments.get("dropout_p") else arguments


def selectable(kernel: str) -> list[TileConfig]:
    """Every configuration that the selector returns for some call, but for what means nothing here: stages, and for the gather
    warps."""
    found = set()
    before = torch.get_float32_matmul_precision()
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        for arch in ("interpreter", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942"):
            for dtype in (torch.float16, torch.bfloat16, torch.float32):
                for width, coverage, is_causal in itertools.product((16, 64, 128, 256), COVERAGES, (False, True)):
                    for term_set in (None,) if coverage == "no table" else SPECIAL:
                        config = selection.select(kernel, arch, dtype, width, coverage, is_causal, term_set)
                        warps = 4 if config.rotation == "gather" else config.num_warps
                        found.add(dataclasses.replace(config, num_warps=warps, num_stages=1))
    torch.set_float32_matmul_precision(before)
    return sorted(found, key=str)


def round_terms(monkeypatch: pytest.MonkeyPatch, rounded: bool) -> None:
    """Let the kernels round terms to float16, or not, whatever the inputs are; nothing is kept of earlier calls' decisions."""
    monkeypatch.setattr(selection, "rounds_terms", lambda *_: rounded)
    monkeypatch.setattr(of_launches, "fixed", of_launches.fixed.__wrapped__)


def has_wide_index(tensor: torch.Tensor) -> bool:
    """Whether offsets within a tile of its rows exceed 31 bits."""
    return selection.needs_wide_index(tensor.shape, tensor.stride())


def run(inputs: Inputs, config: TileConfig | None = None, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of the forward kernel; the call is validated as the public function validates it."""
    tensors, spec = resolve(inputs, **arguments)
    out, lse, *_ = forward(tensors, spec, config)
    return out, lse


def reference(inputs: Inputs, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by plain torch in the inputs' dtype."""
    return reference_attention(**tensors_of(inputs), **with_seed(inputs, arguments))


def check_results(out: torch.Tensor, lse: torch.Tensor, inputs: Inputs, **arguments: Any) -> None:
    """The error rule for out and lse: at most twice the error of plain torch in the same precision.

    In float32 at most four times: the kernel scales logits to base 2, a rounding that plain torch does not have and that the
    interpreter, which has no fused multiply-add, makes where a GPU does not.
    """
    golden, plain = reference(inputs.to(torch.float64), **arguments), reference(inputs, **arguments)
    factor = 4 if inputs.query.dtype == torch.float32 else 2
    for name, result, exact, inexact in zip(("out", "lse"), (out, lse), golden, plain, strict=True):
        if bool((exact.isfinite() & (exact != 0)).any()):
            # Rows that see a single key copy its value: plain torch may be exact.
            assert_within_budget(name, result, exact, inexact, factor=factor, exact_reference=True)
        else:  # nobody sees anything
            assert torch.equal(result.double(), exact)


def check(inputs: Inputs, config: TileConfig | None = None, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run and apply the error rule to out and lse."""
    results = run(inputs, config, **arguments)
    check_results(*results, inputs, **arguments)
    return results


def run_backward(
    inputs: Inputs,
    tiles: Mapping[str, TileConfig] | None = None,
    wanted: Collection[str] = GRADIENTS,
    **arguments: Any,
) -> dict[str, torch.Tensor | None]:
    """out, lse and the gradients by name, None where not wanted or not there; tiles: configurations by the kernels' names."""
    assert set(wanted) <= set(GRADIENTS)
    tensors, spec = resolve(inputs, **arguments)
    out, lse, softmax_stats, residual = forward(
        tensors, spec, (tiles or {}).get("forward"), keeps_residual=keeps_residual(tensors)
    )
    wants = [name in wanted for name in GRADIENTS]
    gradients = backward(inputs.d_out, inputs.d_lse, out, softmax_stats, tensors, spec, wants, tiles, residual=residual)
    return {"out": out, "lse": lse, **dict(zip(GRADIENTS, gradients, strict=True))}


def all_gradients(inputs: Inputs, tiles: Mapping[str, TileConfig] | None = None, **arguments: Any) -> dict[str, torch.Tensor]:
    """out, lse and the gradients of all tensors that there are, by name."""
    return {name: result for name, result in run_backward(inputs, tiles, **arguments).items() if result is not None}


def rounding_budget(inputs: Inputs, **arguments: Any) -> dict[str, torch.Tensor]:
    """For each gradient, element by element, what rounding may be off, in float64; 0 where no visible pair is.

    P = exp(logit - lse) has what both are rounded by, in the forward and again in the backward, two units of float32 at their
    magnitude, as a relative error. Plain torch is no yardstick for that: it divides P by the row's sum, where such an error
    cancels, wholly if a query sees a single key; a backward that keeps nothing but lse cannot. In float16, P, dS, a delta
    from out, and the result are rounded once more: half a unit of float16 each, two in all, and one of its subnormals.
    """
    assert not inputs.terms(), "a budget is known for rel_key only"
    query, key, value, rel_key, d_out, d_lse = (None if tensor is None else tensor.double().abs() for tensor in inputs[:6])
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
    largest = scale * (logits * seen).amax(-1, keepdim=True) + seen.sum(-1, keepdim=True).clamp_min(1).log()  # of logits and lse
    units = 2 * torch.finfo(torch.float32).eps * (1 + largest) + 2 * info.eps
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
    golden = exact_results(inputs, **arguments)
    budgets = rounding_budget(inputs, **arguments)
    assert [name for name in GRADIENTS if name in results] == list(budgets)
    for name, budget in budgets.items():
        result, exact = results[name], golden[name]
        assert result.dtype == inputs.query.dtype and result.shape == exact.shape, name
        assert result.isfinite().all(), f"{name}: {int((~result.isfinite()).sum())} of {result.numel()} elements not finite"
        assert not result[budget == 0].any(), f"{name}: not zero where no visible pair is"
        within(name, (result.double() - exact).abs(), budget)


def check_gradients(results: Mapping[str, torch.Tensor], inputs: Inputs, **arguments: Any) -> None:
    """The error rule for gradients: each element within its rounding budget, and each gradient

    in float32: close in norm, unless its terms cancel: rounding may then take a hundredth of it. The factor of plain torch
    does not apply, see rounding_budget;
    in float16: off by at most three times what plain torch is, the table's by what rounding dS once costs.
    """
    assert_rounding_errors(results, inputs, **arguments)
    golden = exact_results(inputs, **arguments)
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


def check_every_term(inputs: Inputs, tiles: Mapping[str, TileConfig] | None = None, **arguments: Any) -> dict[str, torch.Tensor]:
    """Run with any of the terms and arguments that there are, and apply the error rules to out, lse and all gradients.

    In float32 the gradients are close in norm, also those that cancel to nothing. In float16 they are off by at most three times
    what plain torch is, and those of tables by what rounding dS (or P) once costs.
    """
    results = all_gradients(inputs, tiles, **arguments)
    check_results(results["out"], results["lse"], inputs, **arguments)
    dense = with_keep(inputs, arguments)
    golden = exact_results(inputs, **dense)
    names = [name for name in GRADIENTS if name in results]
    assert names == [name for name in GRADIENTS if name in golden]
    for name in names:
        tensor = getattr(inputs, name.removeprefix("d_"))
        assert results[name].dtype == tensor.dtype and results[name].shape == tensor.shape, name
    plain = forward_backward(reference_attention, inputs, **with_seed(inputs, arguments))
    largest = max(float(golden[name].abs().max()) for name in names if golden[name].numel())
    for name in names:
        if largest == 0:
            assert not results[name].any(), name
        elif inputs.query.dtype == torch.float32:
            assert_gradients_close_fp32(name, results[name], golden[name], [golden[other] for other in names])
        elif not golden[name].any():  # of queries that see one key it cancels to nothing
            within(name, results[name].abs(), 10 * torch.finfo(results[name].dtype).eps * largest)
        else:
            assert_within_budget(name, results[name], golden[name], plain[name], factor=3, exact_reference=True)
            if name in ("d_rel_key", "d_rel_value", "d_rel_bias"):
                assert_table_gradient(name, results[name], inputs, table=name.removeprefix("d_"), **dense)
    return results


def record_plans(monkeypatch: pytest.MonkeyPatch) -> list[planning.Plan | None]:
    """Return a list that gets the plan of each backward's workspace, from now on."""
    plans: list[planning.Plan | None] = []
    make = planning.plan

    def plan(*call: Any) -> planning.Plan | None:
        plans.append(make(*call))
        return plans[-1]

    monkeypatch.setattr(planning, "plan", plan)
    return plans


def count_launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return a counter of the launches of the backward's kernels, from now on."""
    launches: Counter[str] = Counter()
    launch = Call.launch

    def counted(call: Call, name: str, *others: Any, **arguments: Any) -> None:
        launches[name] += name != "forward"
        launch(call, name, *others, **arguments)

    monkeypatch.setattr(Call, "launch", counted)
    return launches


def needed_launches(wanted: Collection[str], is_clamped: bool, parts: int = 1) -> Counter[str]:
    """Return how often each kernel of the backward runs for some gradients, all of which there are. The dq kernel also sums up
    what lies beyond a clamped table."""
    of_query, of_rows, of_values = (
        not set(names).isdisjoint(wanted) for names in (("d_query", "d_rel_query"), ("d_rel_key", "d_rel_bias"), ("d_rel_value",))
    )
    stores = of_query or of_rows or of_values or "d_rel_p2c" in wanted
    of_part = {"dq": (of_query or (is_clamped and of_rows)) + (is_clamped and of_values)}
    of_part |= {"dtable": of_rows + of_values, "dp2c": int("d_rel_p2c" in wanted)}
    return Counter({"delta": 1, "dkv": parts if stores else 1, **{kernel: parts * count for kernel, count in of_part.items()}})


def tile(block_m: int, block_n: int, carry: str | None = "scores") -> TileConfig:
    return TileConfig(block_m, block_n, 4, 1, carry)


# Several tiles each way in short sequences; the second has the other shape everywhere, and carries nothing. The default, large,
# carries scores.
SMALL = {
    "forward": tile(32, 16),
    "dq": tile(16, 32),
    "dkv": tile(16, 16),
    "dtable": tile(32, 16),
    "dp2c": tile(16, 16),
}
OTHER = {
    "forward": tile(16, 16, None),
    "dq": tile(32, 16),
    "dkv": tile(32, 16),
    "dtable": tile(16, 32),
    "dp2c": tile(32, 16),
}


def attend_varlen(*tensors: Any, **arguments: Any) -> Any:
    return fused_relative_attention_varlen(*tensors, **arguments, return_lse=True, implementation="triton")


def assert_close(results: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Close in norm, as float32 results are; -inf in the same places; exactly 0 if all that is expected is."""
    assert results.keys() == expected.keys()
    finite = {name: tensor.double().masked_fill(tensor.isinf(), 0) for name, tensor in expected.items()}
    for name, result in results.items():
        others = [finite[other] for other in results if other[:2] == "d_"] if name[:2] == "d_" else [finite[name]]
        if any(bool(other.any()) for other in others):
            assert_gradients_close_fp32(name, result, expected[name], others)
        else:
            assert torch.equal(result, expected[name].to(result.dtype)), name


LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 97, 127, 129, 200)
UNEVEN_LENGTHS = ((1, 239), (239, 1), (3, 799), (799, 3), (113, 203))


def resolved(inputs: Inputs, arguments: dict[str, Any]) -> tuple[Inputs, AttentionTensors, AttentionSpec]:
    """A padded or packed call as the launchers get it."""
    if "cu_seqlens_q" not in arguments:
        return inputs, *resolve(inputs, **arguments)
    tensors, spec = validation.resolve(Arguments(**tensors_of(inputs), **arguments, is_packed=True))
    inputs = inputs._replace(d_out=inputs.d_out.transpose(0, 1)[None], d_lse=inputs.d_lse[None])
    return inputs, tensors._replace(dropout_seed=SEED) if spec.dropout_p > 0 else tensors, spec
