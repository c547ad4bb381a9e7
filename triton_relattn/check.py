"""Correctness of the Triton kernels on this machine's GPU: ``python -m triton_relattn check``, a minute.

Calls of every kind, forward and backward, are compared with a float64 computation by hand. An error may be a small multiple of
the one that plain torch makes in the same precision (docs/numerics.md). A check that has passed is remembered for the GPU,
torch, Triton and this package, and ends the warning that unchecked kernels give.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from . import testing
from ._implementations import can_run_triton, remember_check
from ._reference import reference_attention
from .functional import fused_relative_attention
from .grids import decomposed_relative_attention
from .positions import RelativePositions
from .testing import Inputs


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
            arguments["key_lengths"] = torch.tensor([int(each * sizes["num_keys"]) for each in shares], device=device)
        return testing.make_inputs(**sizes, num_rows=rows, device=device, seed=1), arguments


CALLS = (
    Call("a row per distance", {"rows": "all"}),
    Call(
        "a row per distance, causal, 128 wide, float16",
        {"rows": "all", "width": 128, "dtype": torch.float16},
        {"is_causal": True},
    ),
    Call("a row per distance, float32", {"rows": "all", "dtype": torch.float32}),
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


def check_result(
    name: str,
    actual: torch.Tensor,
    golden: dict[str, Any],
    reference: dict[str, torch.Tensor],
    inputs: Inputs,
    arguments: dict[str, Any],
) -> None:
    """The error rule of the tests; in float32 there is twice the room, since logits are scaled to base 2 before the exponential.

    Raises:
        AssertionError: the error is too large.
    """
    gradient, float32 = name.startswith("d_"), inputs.query.dtype == torch.float32
    factor = (3 if gradient else 2) * (2 if float32 else 1)
    testing.assert_within_budget(name, actual, golden[name], reference[name], factor=factor, exact_reference=True)
    if gradient and float32:
        testing.assert_gradients_close_fp32(name, actual, golden[name], [golden[other] for other in reference])
    elif name in ("d_rel_key", "d_rel_p2c"):
        testing.assert_table_gradient(name, actual, inputs, table=name.removeprefix("d_"), **arguments)


def judge(results: dict[str, torch.Tensor], inputs: Inputs, arguments: dict[str, Any]) -> dict[str, Any]:
    """Status, message, and each result's largest error as a multiple of that of plain torch in the same precision."""
    golden = testing.dense_gradients(inputs, **arguments)._asdict()
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
    different = [name for name, each in results.items() if not torch.equal(each, again[name])]
    if different:
        return "FAILED", f"a second run gives other bits: {', '.join(different)}"
    errors = ", ".join(f"{name} {row[name]}" for name in results if name in row)
    return row["status"], row["message"] or f"errors beside plain torch's: {errors}"


def _on_a_grid(device: str, side: int, dtype: torch.dtype) -> tuple[str, str]:
    """As _checked, of attention on a grid; the dense computation in float64 is differentiated by torch."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 4, side * (side - 3), 64)] * 3 + [(2 * side - 1, 64), (2 * (side - 3) - 1, 64)]
    given = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    d_out = torch.randn(shapes[0], generator=generator).to(device, dtype)

    def computed(implementation: str, of: torch.dtype) -> list[torch.Tensor]:
        leaves = [each.to(of).requires_grad_() for each in given]
        out = decomposed_relative_attention(*leaves, (side, side - 3), implementation=implementation)  # type: ignore[misc, arg-type]
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out.to(of))]

    results, golden = computed("triton", dtype), computed("reference", torch.float64)
    plain = computed("reference", dtype)
    names = ("out", "d_query", "d_key", "d_value", "d_rel_pos_h", "d_rel_pos_w")
    for name, *each in zip(names, results, golden, plain, strict=True):
        try:
            testing.assert_within_budget(name, *each, factor=2 if name == "out" else 3)
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
            yield name, "FAILED", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


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
        f"minute, mostly compiling."
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
