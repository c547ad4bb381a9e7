"""Calls of the kernels with chosen configurations, padded and packed, and the error rules for their results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

from tests.conftest import without_plans
from tests.expected import assert_table_gradient, exact_results, table_gradient_budget
from tests.tolerance import assert_at_most, assert_gradients_close_fp32
from triton_relattn import fused_relative_attention, fused_relative_attention_varlen
from triton_relattn._core import validation
from triton_relattn._core.arguments import Arguments
from triton_relattn._core.dropout import keep_mask
from triton_relattn._core.dtypes import keeps_residual
from triton_relattn._core.spec import DIFFERENTIABLE, TABLES, AttentionSpec, AttentionTensors
from triton_relattn._reference import reference_attention
from triton_relattn.kernels.backward import backward
from triton_relattn.kernels.config import architectures, selection
from triton_relattn.kernels.config.tile_config import TileConfig
from triton_relattn.kernels.forward import forward
from triton_relattn.kernels.operands import needs_wide_index
from triton_relattn.testing import Inputs, assert_within_budget, forward_backward

GRADIENTS = tuple(f"d_{name}" for name in DIFFERENTIABLE)
SEED = torch.tensor([0x1234_5678_9ABC_DEF0])
"""The seed of dropout in all calls of this module."""
Tiles = Mapping[str, TileConfig]
"""Configurations by the kernels' names."""


def tile(block_m: int, block_n: int, carry: str | None = "scores") -> TileConfig:
    return TileConfig(block_m, block_n, 4, 1, carry)


# Both have several tiles in each dimension of short sequences; OTHER has the other shapes, and carries nothing.
SMALL = {
    "forward": tile(32, 16),
    "stored_dq": tile(16, 32),
    "dq": tile(32, 32),
    "dkv": tile(16, 16),
    "dtable": tile(32, 16),
    "dp2c": tile(16, 16),
}
OTHER = {
    "forward": tile(16, 16, None),
    "stored_dq": tile(32, 16),
    "dq": tile(32, 16),
    "dkv": tile(32, 16),
    "dtable": tile(16, 32),
    "dp2c": tile(32, 16),
}


# Calls.


def attend(*tensors: Any, **arguments: Any) -> Any:
    """out and lse of the operator, by the kernels."""
    return fused_relative_attention(*tensors, **arguments, return_lse=True, implementation="triton")


def call_tensors(inputs: Inputs) -> dict[str, Any]:
    """The tensors of a call, by the names of its arguments."""
    return {name: getattr(inputs, name) for name in DIFFERENTIABLE if getattr(inputs, name) is not None}


def resolve(inputs: Inputs, **arguments: Any) -> tuple[AttentionTensors, AttentionSpec]:
    """A validated call, packed if it has cu_seqlens_q, as the launchers get it; with the fixed dropout seed."""
    is_packed = "cu_seqlens_q" in arguments
    tensors, spec = validation.resolve(Arguments(**call_tensors(inputs), **arguments, is_packed=is_packed))
    return (tensors._replace(dropout_seed=SEED.to(inputs.query.device)) if spec.dropout_p > 0 else tensors), spec


def run(inputs: Inputs, config: TileConfig | None = None, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of the forward kernel for a validated call."""
    tensors, spec = resolve(inputs, **arguments)
    out, lse, *_ = forward(tensors, spec, config)
    return out, lse


def all_gradients(
    inputs: Inputs, tiles: Tiles | None = None, wanted: Collection[str] = GRADIENTS, **arguments: Any
) -> dict[str, torch.Tensor]:
    """out, lse and the wanted gradients of present inputs, in the shapes of the call's tensors."""
    tensors, spec = resolve(inputs, **arguments)
    is_packed = "cu_seqlens_q" in arguments
    d_out, d_lse = (inputs.d_out.transpose(0, 1)[None], inputs.d_lse[None]) if is_packed else (inputs.d_out, inputs.d_lse)
    config = (tiles or {}).get("forward")
    out, lse, softmax_stats, residual = forward(tensors, spec, config, keeps_residual=keeps_residual(tensors))
    wants = [name in wanted for name in GRADIENTS]
    gradients = backward(d_out, d_lse, out, softmax_stats, tensors, spec, wants, tiles, residual=residual)
    results = {
        "out": out,
        "lse": lse,
        **{name: gradient for name, gradient in zip(GRADIENTS, gradients, strict=True) if gradient is not None},
    }
    if is_packed:
        results["lse"] = lse[0]
        for name in {"out", "d_query", "d_key", "d_value", "d_rel_query"}.intersection(results):
            results[name] = results[name][0].transpose(0, 1)
    return results


def selectable(kernel: str) -> list[TileConfig]:
    """A kernel's default configurations, without what the interpreter ignores: stages, registers and, with gather, warps."""
    rows = (row for row in selection.defaults() if row["kernel"] in ("", kernel) and row["term_set"] != "grid")
    found = set()
    for config in map(selection.config_of, rows):
        warps = 4 if config.rotation == "gather" else config.num_warps
        found.add(dataclasses.replace(config, num_warps=warps, num_stages=1, max_registers=None))
    return sorted(found, key=str)


@contextmanager
def launches_seen_by(see: Callable[[str, dict[str, Any]], None]) -> Iterator[None]:
    """Call a function with the name of each launched kernel, without "_kernel", and its arguments, which it may change."""
    function = interpreter.InterpretedFunction
    run = function.run

    def seen(self: Any, *args: Any, **options: Any) -> Any:
        named = dict(zip(self.arg_names, args, strict=False))
        see(self.fn.__name__.removesuffix("_kernel"), named)
        return run(self, *named.values(), **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function, "run", seen)
        yield


def round_terms(monkeypatch: pytest.MonkeyPatch, rounded: bool) -> None:
    """Let the kernels round terms to float16, or not, for all dtypes, in plans of their own."""
    monkeypatch.setattr(architectures, "rounds_terms", lambda *_: rounded)
    without_plans(monkeypatch)


def has_wide_index(tensor: torch.Tensor) -> bool:
    """Whether offsets within a tile of its rows exceed 31 bits."""
    return needs_wide_index(tensor.shape, tensor.stride())


# Error rules.


def fixed_keep_mask(*sizes: int, dropout_p: float) -> torch.Tensor:
    """The bool mask of dropout with the fixed seed, for sizes (batch, heads, num_queries, num_keys)."""
    batch, heads, num_queries, num_keys = sizes
    indices = torch.arange(batch).view(-1, 1, 1, 1), torch.arange(heads).view(-1, 1, 1), torch.arange(num_queries).view(-1, 1)
    return keep_mask(SEED, dropout_p, *indices, slice(0, num_keys))


def with_keep(inputs: Inputs, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments for exact_results: with dropout, also the mask."""
    if not arguments.get("dropout_p"):
        return arguments
    keep = fixed_keep_mask(*inputs.query.shape[:3], inputs.key.shape[2], dropout_p=arguments["dropout_p"])
    return {**arguments, "keep": keep.to(inputs.query.device)}


def with_seed(inputs: Inputs, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments for reference_attention: with dropout, also the seed."""
    return {**arguments, "dropout_seed": SEED.to(inputs.query.device)} if arguments.get("dropout_p") else arguments


def reference(inputs: Inputs, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by plain torch in the inputs' dtype."""
    return reference_attention(**call_tensors(inputs), **with_seed(inputs, arguments))


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
        else:  # no query sees a key
            assert torch.equal(result.double(), exact)


def check(inputs: Inputs, config: TileConfig | None = None, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run and apply the error rule to out and lse."""
    results = run(inputs, config, **arguments)
    check_results(*results, inputs, **arguments)
    return results


def check_forward_backward(inputs: Inputs, tiles: Tiles | None = None, **arguments: Any) -> dict[str, torch.Tensor]:
    """Run forward and backward, and apply the error rules to out, lse and all gradients."""
    results = all_gradients(inputs, tiles, **arguments)
    check_all(results, inputs, **arguments)
    return results


def check_all(results: Mapping[str, torch.Tensor], inputs: Inputs, **arguments: Any) -> None:
    """The error rules for out, lse and all gradients of a padded or packed call.

    In float32 gradients are close in norm, also those that cancel to zero. In float16 they have at most three times the error of
    plain torch, and those of tables the error of dS (or P) rounded once.
    """
    if "cu_seqlens_q" in arguments:
        check_packed(results, inputs, arguments)
        return
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
        elif not golden[name].any():  # with one visible key it cancels to zero
            assert_at_most(name, results[name].abs(), 10 * torch.finfo(results[name].dtype).eps * largest)
        else:
            assert_within_budget(name, results[name], golden[name], plain[name], factor=3, exact_reference=True)
            table = name.removeprefix("d_")
            if table in TABLES and (table != "rel_p2c" or inputs.query.dtype == torch.float16):
                assert_table_gradient(name, results[name], inputs, table=table, **dense)


def check_packed(results: Mapping[str, torch.Tensor], inputs: Inputs, arguments: dict[str, Any]) -> None:
    """The error rules for a packed call: results are those of the separate sequences in float64, gradients of tables summed."""
    dropout_p = arguments.get("dropout_p", 0.0)
    longest = arguments["max_seqlen_q"], arguments["max_seqlen_k"]
    sizes = len(arguments["cu_seqlens_q"]) - 1, inputs.query.shape[1], *longest
    golden = exact_results(inputs, **arguments, keep=fixed_keep_mask(*sizes, dropout_p=dropout_p) if dropout_p else None)
    assert results.keys() == golden.keys()
    gradients = [golden[name] for name in results if name.startswith("d_")]
    is_exact = inputs.query.dtype == torch.float32
    assert is_exact or not dropout_p, "in 16 bits the reference has another dropout mask"
    reference_varlen: Any = partial(fused_relative_attention_varlen, return_lse=True, implementation="reference")
    plain = {} if is_exact else forward_backward(reference_varlen, inputs, **arguments)
    for name, result in results.items():
        others = gradients if name.startswith("d_") else [golden[name].masked_fill(golden[name].isinf(), 0)]
        if not any(other.any() for other in others):
            assert torch.equal(result, golden[name].to(result.dtype)), name
        elif is_exact:
            assert_gradients_close_fp32(name, result, golden[name], others)
        else:
            factor = 3 if name.startswith("d_") else 2
            assert_within_budget(name, result, golden[name], plain[name], factor=factor, exact_reference=True)
        table = name.removeprefix("d_")
        if table in TABLES and not is_exact:
            exact, allowance = table_gradient_budget(inputs, table=table, **arguments)
            assert_at_most(name, (result.double() - exact).abs(), allowance)
