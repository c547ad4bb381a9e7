"""Kernels with chosen tiles, the error rule for all results of a call, and a look at launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

from tests.check import Way
from tests.conftest import cut_tiles
from tests.expected import TABLES, assert_table_gradient, exact_results
from tests.tolerance import assert_at_most, assert_gradients_close_fp32
from triton_relattn.testing import Inputs, assert_within_budget, dropout_mask

Tiles = Mapping[str, Any]
"""Tiles by the kernels' names, see cut_tiles."""


def all_results(
    inputs: Inputs, tiles: Tiles | None = None, rounds_terms: bool | None = None, **arguments: Any
) -> dict[str, torch.Tensor]:
    """out, lse and all gradients by the kernels in these tiles, with terms rounded to float16 or not."""
    with pytest.MonkeyPatch.context() as patch:
        cut_tiles(patch, tiles, rounds_terms)
        return Way("triton").results(inputs, **arguments)


def check_forward_backward(
    inputs: Inputs, tiles: Tiles | None = None, rounds_terms: bool | None = None, **arguments: Any
) -> dict[str, torch.Tensor]:
    """Run forward and backward of a padded call, and apply the error rule to out, lse and all gradients, on any device.

    Errors are at most twice (gradients: three times) those of plain torch in the same precision, and those of tables in 16 bits
    the error of dS (or P) rounded once. In float32 gradients are close in norm, also those that cancel to zero; out and lse may
    have four times the error of plain torch: the kernel scales logits to base 2, a rounding that plain torch does not have and
    that the interpreter, which has no fused multiply-add, makes where a GPU does not.
    """
    results = all_results(inputs, tiles, rounds_terms, **arguments)
    dense, dropout_p = dict(arguments), arguments.get("dropout_p", 0.0)
    if dropout_p:
        torch.manual_seed(0)
        sizes = *inputs.query.shape[:3], inputs.key.shape[2]
        dense["keep"] = dropout_mask(*sizes, dropout_p, inputs.query.device)  # type: ignore[call-arg]
    golden, plain = exact_results(inputs, **dense), Way("reference").results(inputs, **arguments)
    assert results.keys() == golden.keys()
    gradients = [golden[name] for name in golden if name.startswith("d_")]
    largest = max(float(gradient.abs().max()) for gradient in gradients if gradient.numel())
    is_float32 = inputs.query.dtype == torch.float32
    for name, result in results.items():
        exact, table = golden[name], name.removeprefix("d_")
        tensor = getattr(inputs, table, None) if name.startswith("d_") else None
        assert tensor is None or (result.dtype, result.shape) == (tensor.dtype, tensor.shape), name
        if tensor is None:
            if bool((exact.isfinite() & (exact != 0)).any()):
                # Rows that see a single key copy its value: plain torch may be exact.
                assert_within_budget(name, result, exact, plain[name], factor=4 if is_float32 else 2, exact_reference=True)
            else:  # no query sees a key
                assert torch.equal(result.double(), exact)
        elif largest == 0:
            assert not result.any(), name
        elif is_float32:
            assert_gradients_close_fp32(name, result, exact, gradients)
        elif not exact.any():  # with one visible key it cancels to zero
            assert_at_most(name, result.abs(), 10 * torch.finfo(result.dtype).eps * largest)
        else:
            assert_within_budget(name, result, exact, plain[name], factor=3, exact_reference=True)
            if table in TABLES and (table != "rel_p2c" or inputs.query.dtype == torch.float16):
                assert_table_gradient(name, result, inputs, table=table, **dense)
    return results


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
