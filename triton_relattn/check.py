"""Correctness of the Triton kernels on this machine's GPU: ``python -m triton_relattn check``, a few minutes.

Calls of every kind, forward and backward, are compared with the dense reference in float64. An error may be a small multiple of
the one that plain torch makes in the same precision (docs/numerics.md). A check that has passed is remembered for the GPU,
torch, Triton and this package, and ends the warning that unchecked kernels give.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from . import testing
from ._core.arguments import Arguments
from ._core.spec import DIFFERENTIABLE, AttentionSpec, AttentionTensors
from ._core.validation import resolve
from ._core.warn import first_line
from ._implementations import can_run_triton, remember_check
from ._reference import (
    position_term,
    probabilities,
    reference_attention,
    resolved_reference,
    score_terms,
    shared_by_heads,
    table_rows,
    weighted_values,
)
from .functional import fused_relative_attention
from .grids import decomposed_relative_attention
from .positions import RelativePositions
from .testing import Inputs, by_name


class Call(NamedTuple):
    """A call to check. sizes: of :func:`testing.make_inputs`. arguments: of the operator, with numbers in place of tensors."""

    name: str
    sizes: dict[str, Any]
    arguments: Mapping[str, Any] = MappingProxyType({})

    def inputs(self, device: str, length: int, dtype: torch.dtype) -> tuple[Inputs, dict[str, Any]]:
        """Inputs of sequences of a length, in dtype if the call names none, and arguments."""
        sizes = {"batch": 2, "heads": 4, "width": 64, "dtype": dtype, "num_queries": length, "num_keys": length, **self.sizes}
        arguments = dict(self.arguments)
        if (rows := sizes.pop("rows", None)) == "all":
            first, last = 1 - sizes["num_queries"], sizes["num_keys"] - 1
            if arguments.get("is_causal"):
                first, last = 1 - sizes["num_keys"], 0
            arguments["positions"] = RelativePositions(first, last)
            rows = last - first + 1
        if isinstance(arguments.get("query_offset"), str):  # the queries are the last ones
            arguments["query_offset"] = sizes["num_keys"] - sizes["num_queries"]
        if "lengths" in arguments:
            shares = arguments.pop("lengths")
            arguments["key_lengths"] = torch.tensor([int(share * sizes["num_keys"]) for share in shares], device=device)
        return testing.make_inputs(**sizes, num_rows=rows, device=device, seed=1), arguments


CALLS = (
    Call("a row per distance", {"rows": "all"}),
    Call(
        "a row per distance, causal, 128 wide, float16",
        {"rows": "all", "width": 128, "dtype": torch.float16},
        {"is_causal": True},
    ),
    Call("a row per distance, float32", {"rows": "all", "dtype": torch.float32}),
    Call("no table", {}),
    Call("clipped distances, a table per head (Shaw)", {"rows": 33, "per_head": True}),
    Call(
        "a window of vectors for keys and values (VITS)",
        {"rows": 9, "rel_value": True},
        {"positions": RelativePositions(-4, 4, "zero")},
    ),
    Call("a row per distance and a bias (Transformer-XL)", {"rows": "all", "per_head": True, "rel_bias": True}),
    Call("a bias alone, unscaled (T5)", {"rows": 257, "rel_key": False, "rel_bias": True, "per_head": True}, {"scale": 1.0}),
    Call("tables for queries and keys (DeBERTa)", {"rows": 513, "rel_p2c": True, "per_head": True}),
    Call(
        "vectors beside the query, grouped heads, causal (Inkling)",
        {"rows": 300, "rel_width": 16, "key_heads": 1},
        {"positions": RelativePositions(-299, 0, "zero"), "is_causal": True, "enable_gqa": True},
    ),
    Call("softcap in a window (Gemma)", {"rows": 65}, {"softcap": 30.0, "window_size": (40, 8)}),
    Call("padding", {"rows": 33}, {"lengths": (0.4, 1.0)}),
    Call("one query after a cache", {"rows": "all", "num_queries": 1}, {"is_causal": True, "query_offset": "last"}),
    Call("heads 256 wide", {"rows": 33, "width": 256, "heads": 2}),
)


def exact_results(inputs: Inputs, **arguments: Any) -> dict[str, torch.Tensor]:
    """Return the golden results: those of the reference in float64, whose gradients autograd computes."""
    tensors, spec = _resolved(inputs, **arguments)
    leaves = {name: tensor for name in DIFFERENTIABLE if (tensor := getattr(tensors, name)) is not None}
    with torch.enable_grad():
        out, lse = resolved_reference(tensors._replace(**{name: leaf.requires_grad_() for name, leaf in leaves.items()}), spec)
    gradients = torch.autograd.grad((out, lse), list(leaves.values()), (inputs.d_out.double(), inputs.d_lse.double()))
    return by_name(out, lse, leaves, gradients)


FLOAT32_NORM = 2e-4
"""Error of a float32 gradient relative to its norm. P = exp(logit - lse) is off by two units of float32, 2.4e-7, times the size
of logits, which is about 40 in sharp attention; a gradient is what is left of terms twenty times as large: 2.4e-7 * 40 * 20."""


def float32_gradient_budget(golden: torch.Tensor, all_golden: Iterable[torch.Tensor]) -> float:
    """Return the largest norm that a float32 gradient's error may have: 2e-4 of the larger of two norms, golden's, and that of as
    many elements of 5 % of the largest RMS among all gradients of the call, since some cancel to nothing."""
    largest = max(float(other.double().square().mean().sqrt()) for other in all_golden if other.numel())
    return FLOAT32_NORM * max(float(golden.double().norm()), 0.05 * largest * math.sqrt(golden.numel()))


def table_gradient_budget(
    inputs: Inputs, table: str, *, keep: torch.Tensor | None = None, **arguments: Any
) -> tuple[torch.Tensor, float]:
    """Return the golden gradient of a table and the largest error it may have.

    A table's gradient is a sum over all queries, in which an error common to all scores of a query adds up. It may be 1.5 times
    an error that cannot be avoided: the float64 dS (for rel_value: P after dropout) is rounded once to the inputs' dtype and
    summed exactly, and the result is rounded to the table's dtype. Which way numbers are rounded is a matter of luck, so this
    error is at least what the largest of so many sums exceeds once in a thousand tables. A low-precision reference is no
    yardstick: it is so far off that an implementation with the delta of a rounded out would pass.

    Args:
        keep: the mask of what dropout keeps, (B, Hq, Nq, Nk).
    """
    tensors, spec = _resolved(inputs, **arguments)
    content, position = score_terms(tensors, spec)
    scores = (content if position is None else content + position).requires_grad_()
    probs, lse = probabilities(scores, tensors, spec, keep)
    out = weighted_values(probs, tensors, spec)
    (d_scores,) = torch.autograd.grad((out, lse), scores, (inputs.d_out.double(), inputs.d_lse.double()))
    exact, dtype = probs.detach() if table == "rel_value" else d_scores, inputs.query.dtype

    # dE[row] = sum of rel_scale dS[i,j] p_i over the pairs of the row. In the other tables k_j, dO_i or 1 takes the place of p_i.
    p = tensors.query if tensors.rel_query is None else tensors.rel_query
    p = {"rel_value": inputs.d_out.double(), "rel_bias": torch.ones_like(p)}.get(table, p)
    key, rel_scale = shared_by_heads(tensors.key, p.shape[1]), 1.0 if table in ("rel_value", "rel_bias") else spec.rel_scale
    term = table if table in ("rel_bias", "rel_p2c") else "rel_key"
    row, inside = table_rows(tensors, spec)

    def sums(by_pair: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        leaf = torch.zeros_like(getattr(tensors, table)).requires_grad_()
        given = {"rel_key": None, "rel_bias": None, "rel_p2c": None, term: leaf}
        scale = float(change(torch.tensor(rel_scale, dtype=torch.float64)))
        terms = position_term(change(p), change(key), **given, row=row, inside=inside, rel_scale=scale)
        return torch.autograd.grad(terms, leaf, by_pair)[0]

    golden = sums(exact, torch.clone)
    error = float(sums(exact.to(dtype).double() - exact, torch.clone).abs().max())
    # Rounding errors are spread evenly over a unit in the last place, so their variance is its square / 12; sums of many are
    # normally distributed, and sqrt(2 log n) deviations are exceeded once in n draws. None exceeds half a unit of every term.
    info = torch.finfo(dtype)
    units = info.eps * exact.abs().clamp_min(info.tiny).log2().floor().exp2() * (exact != 0)
    deviation = float(sums(units.square() / 12, torch.square).max().sqrt())
    luck = min(deviation * math.sqrt(2 * math.log(1000 * max(golden.numel(), 1))), float(sums(units / 2, torch.abs).max()))
    largest = testing.last_place(float(golden.abs().max()), getattr(inputs, table).dtype)
    return golden, 1.5 * (max(error, luck) + largest / 2)


def _resolved(inputs: Inputs, **arguments: Any) -> tuple[AttentionTensors, AttentionSpec]:
    """Return the call as implementations get it, in float64; key and value are shared if they have fewer heads than query."""
    given: dict[str, Any] = {name: getattr(inputs, name) for name in DIFFERENTIABLE}
    tensors, spec = resolve(Arguments(**given, **arguments)._replace(enable_gqa=True))
    exact = {name: tensor.detach().double().clone() for name in DIFFERENTIABLE if (tensor := getattr(tensors, name)) is not None}
    return tensors._replace(**exact), spec


def check_result(
    name: str,
    actual: torch.Tensor,
    golden: dict[str, torch.Tensor],
    reference: dict[str, torch.Tensor],
    inputs: Inputs,
    arguments: dict[str, Any],
) -> None:
    """Raise AssertionError if a result breaks the error rule. In float32 there is twice the room, since logits are scaled to base
    2 before the exponential."""
    factor = (3 if name.startswith("d_") else 2) * (2 if inputs.query.dtype == torch.float32 else 1)
    testing.assert_within_budget(name, actual, golden[name], reference[name], factor=factor, exact_reference=True)
    if name.startswith("d_") and inputs.query.dtype == torch.float32:
        gradients = [gradient for other, gradient in golden.items() if other.startswith("d_")]
        error, budget = float((actual.double() - golden[name]).norm()), float32_gradient_budget(golden[name], gradients)
        rule = f"in norm, {FLOAT32_NORM:.0e} of the gradient's"
    elif name in ("d_rel_key", "d_rel_p2c"):
        exact, budget = table_gradient_budget(inputs, name.removeprefix("d_"), **arguments)
        error, rule = float((actual.double() - exact).abs().max()), "1.5 times that of dS rounded once"
    else:
        return
    if not error <= budget:
        raise AssertionError(f"{name}: error {error:.3e} exceeds {budget:.3e}, {rule}")


def judge(results: dict[str, torch.Tensor], inputs: Inputs, arguments: dict[str, Any]) -> dict[str, Any]:
    """Status, message, and each result's largest error as a multiple of that of plain torch in the same precision."""
    golden = exact_results(inputs, **arguments)
    reference = testing.forward_backward(reference_attention, inputs, **arguments)
    row: dict[str, Any] = {}
    problems = []
    for name, actual in results.items():
        finite = golden[name].isfinite()
        ours, plain = (float((t.double() - golden[name])[finite].abs().max()) for t in (actual, reference[name]))
        row[name] = f"{ours / max(plain, 1e-300):.3g}"
        try:
            check_result(name, actual, golden, reference, inputs, arguments)
        except AssertionError as error:
            problems.append(str(error))
    return {**row, "status": "FAILED" if problems else "ok", "message": " | ".join(problems)}


def _checked(call: Call, device: str, length: int, dtype: torch.dtype) -> tuple[str, str]:
    """Status and details of a call, both ways, and of a second time, which has to repeat it bit for bit."""
    inputs, arguments = call.inputs(device, length, dtype)
    ours: Any = partial(fused_relative_attention, return_lse=True, implementation="triton")
    results = testing.forward_backward(ours, inputs, **arguments)
    row = judge(results, inputs, arguments)
    again = testing.forward_backward(ours, inputs, **arguments)
    different = [name for name, result in results.items() if not torch.equal(result, again[name])]
    if different:
        return "FAILED", f"a second run gives other bits: {', '.join(different)}"
    errors = ", ".join(f"{name} {row[name]}" for name in results if name in row)
    return row["status"], row["message"] or f"errors beside plain torch's: {errors}"


def _on_a_grid(device: str, side: int, dtype: torch.dtype) -> tuple[str, str]:
    """As _checked, of attention on a grid."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 4, side * (side - 3), 64)] * 3 + [(2 * side - 1, 64), (2 * (side - 3) - 1, 64)]
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    d_out = torch.randn(shapes[0], generator=generator).to(device, dtype)

    def results(implementation: str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        out = decomposed_relative_attention(*leaves, (side, side - 3), implementation=implementation)  # type: ignore[misc, arg-type]
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(dtype))]

    names = ("out", "d_query", "d_key", "d_value", "d_rel_pos_h", "d_rel_pos_w")
    computed = results("triton", dtype), results("reference", torch.float64), results("reference", dtype)
    for name, actual, golden, plain in zip(names, *computed, strict=True):
        try:
            testing.assert_within_budget(name, actual, golden, plain, factor=2 if name == "out" else 3)
        except AssertionError as error:
            return "FAILED", str(error)
    return "ok", ""


def _rows(device: str, length: int, dtype: torch.dtype) -> Iterator[tuple[str, str, str]]:
    checks: list[tuple[str, Any]] = [(call.name, partial(_checked, call, device, length, dtype)) for call in CALLS]
    checks.append(("positions on a grid (SAM)", partial(_on_a_grid, device, 35 if length > 1000 else 9, dtype)))
    for name, check in checks:
        try:
            yield name, *check()
        except Exception as error:
            yield name, "FAILED", f"{type(error).__name__}: {first_line(error)}"


def main(device: str = "cuda", length: int = 1100, dtype: torch.dtype = torch.bfloat16) -> int:
    """Check all calls, print a line per call, and remember it if they all pass. Return 0 if so, 1 if not, 2 without a GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        print('There is no GPU here: nothing to check. Calls are computed by "blockwise", which the package\'s tests check.')
        return 2
    probe = torch.empty(1, 1, 1, 64, dtype=torch.float16, device=device)
    try:
        can_run_triton(probe, probe, raise_error=True)
    except NotImplementedError as error:
        print(error)
        return 2
    print(
        f"Checking the Triton kernels on {torch.cuda.get_device_name() if device == 'cuda' else device}: a "
        f"few minutes, mostly compiling."
    )
    failed, started = 0, time.monotonic()
    for name, status, details in _rows(device, length, dtype):
        print(f"  {status:6} {name}" + (f"\n         {details}" if status != "ok" else ""), flush=True)
        failed += status != "ok"
    print(f"{failed} of {len(CALLS) + 1} failed" if failed else "all right", f"({time.monotonic() - started:.0f} s)")
    if failed:
        print(
            'Use implementation="blockwise" on this GPU, and please report what failed, with the output of '
            "python -m triton_relattn."
        )
        return 1
    if device == "cuda" and not remember_check(torch.device("cuda", torch.cuda.current_device())):
        print("The pass could not be remembered: the folder of TRITON_RELATTN_CACHE cannot be written.", file=sys.stderr)
    return 0
