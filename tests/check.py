"""One check of any call: ``check(sample, way)``.

It compares out, lse and all requested gradients with exact results, element by element (tests/expected.py), and checks dtypes,
shapes, and that a second run gives the same bits. Uninitialised memory, the padding around tensors, table rows without a pair,
keys and values that no query sees, and gradients of a lse of -inf hold NaN, which must not reach any result. The call must not
change its inputs, nor their version counters, global state or torch's generator, except for one draw with dropout.

``check_refused`` is for calls with an invalid argument.
"""

from __future__ import annotations

import functools
import math
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conftest import INTERPRETED, cut_blocks, cut_tiles, poison_memory
from tests.expected import (
    INPUTS,
    TABLES,
    Batch,
    Expected,
    Pairs,
    assert_within,
    exact_results,
    expected,
    keep_mask,
    result_dtype,
    worst_draw,
)
from tests.samples import Sample
from triton_relattn import fused_relative_attention, fused_relative_attention_varlen
from triton_relattn.testing import Inputs, dropout_mask, forward_backward


@dataclass(frozen=True)
class Way:
    """A way to compute a call: an implementation, and whether it takes small blocks (tiles).

    tests/interpreter/guard.py and tests/emulator/way.py have others.
    """

    implementation: str
    small: bool = False
    tiles: Mapping[str, Any] | None = None
    """Tiles by the kernels' names, as cut_tiles in tests/conftest.py takes them; other kernels have their usual ones."""

    def __str__(self) -> str:
        return f"{self.implementation}_in_{'chosen' if self.tiles else 'small' if self.small else 'default'}_blocks"

    @property
    def again(self) -> Way | None:
        """The way of a second run, which must give the same bits; None where a second run cannot differ."""
        return None if self.implementation == "triton" else self  # neither interpreter nor emulator vary

    def placed(self, call: dict[str, Any]) -> dict[str, Any]:
        """The call with tensors where this way wants them in memory."""
        return call

    @property
    def arithmetic(self) -> str:
        """What decides about budgets: see arithmetic_precision in tests/expected.py."""
        return "triton" if self.implementation == "triton" else ""

    @contextmanager
    def computing(self, sample: Sample) -> Iterator[None]:
        """Compute the sample in the interpreter, in small tiles or in small blocks."""
        with pytest.MonkeyPatch.context() as patch:
            if self.implementation == "triton":
                from tests.interpreter.conftest import change_interpreter

                change_interpreter(patch)
                tiles = self.tiles or (TILES[sample.blocks % len(TILES)] if self.small else None)
                if tiles or sample.round_terms:
                    cut_tiles(patch, tiles, sample.round_terms)
            elif self.small:
                cut_blocks(patch, *BLOCKS[sample.blocks % len(BLOCKS)])
            yield

    @property
    def dtype(self) -> torch.dtype:
        """The most precise dtype that it computes in."""
        return torch.float32 if self.implementation == "triton" else torch.float64

    @property
    def width(self) -> int:
        """A head width that is cheap to compute."""
        return 16 if self.implementation == "triton" else 8

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a sample in that dtype and width."""
        return {"dtype": str(self.dtype).removeprefix("torch."), "width": self.width, "value_width": self.width}

    def attend(self, *tensors: Any, **arguments: Any) -> Any:
        """out and lse."""
        return fused_relative_attention(*tensors, return_lse=True, implementation=self.implementation, **arguments)

    def results(self, inputs: Inputs, **arguments: Any) -> dict[str, Tensor]:
        """out, lse and all gradients, with the same dropout every time."""
        torch.manual_seed(0)
        return forward_backward(self.attend, inputs, **arguments)

    def out(self, inputs: Inputs, **arguments: Any) -> Tensor:
        """out of a call without lse and without gradients, with the same dropout as results()."""
        torch.manual_seed(0)
        arguments = {**inputs.terms(), **arguments, "implementation": self.implementation}
        found: Tensor = fused_relative_attention(*inputs[:4], **arguments)
        return found

    def check(self, results: dict[str, Tensor], inputs: Inputs, **arguments: Any) -> None:
        """Apply the error rule of tests/expected.py to each element of out, lse and all gradients.

        The reference in 16 bits is exempt: its errors are what others are measured against.
        """
        if self.implementation == "reference" and inputs.query.element_size() == 2:
            return
        call = {**inputs._asdict(), **arguments, "implementation": self.implementation}
        golden = expected(call, inputs.d_out, inputs.d_lse, keep_mask(inputs, **arguments))
        for name, result in results.items():
            assert result.dtype == result_dtype(name, call), f"{name}: {result.dtype}"
            assert_within(name, result, *golden[name])


# In a process with TRITON_INTERPRET=1 these are the kernels; in the other one blockwise and the reference.
WAYS = (
    (Way("triton"), Way("triton", small=True))
    if INTERPRETED
    else (Way("blockwise"), Way("blockwise", small=True), Way("reference"))
)


def attend(*tensors: Tensor | None, **arguments: Any) -> Any:
    """out and lse of the operator; blockwise unless said otherwise."""
    return fused_relative_attention(*tensors, **{"implementation": "blockwise", "return_lse": True, **arguments})  # type: ignore[arg-type]


def attend_varlen(*tensors: Tensor | None, **arguments: Any) -> Any:
    """out and lse of the packed operator; blockwise unless said otherwise."""
    return fused_relative_attention_varlen(*tensors, **{"implementation": "blockwise", "return_lse": True, **arguments})  # type: ignore[arg-type]


def compute_results(implementation: str, inputs: Inputs, **arguments: Any) -> dict[str, Tensor]:
    """out, lse and all gradients of an implementation, after torch.manual_seed(0)."""
    return Way(implementation).results(inputs, **arguments)


def worst_reference(inputs: Inputs, **arguments: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Exact results, and results of the reference with the largest errors of three draws."""
    return worst_draw(
        inputs,
        lambda moved: exact_results(moved, **arguments),
        lambda moved: compute_results("reference", moved, **arguments),
    )


DOCUMENTED = (ValueError, TypeError, NotImplementedError)
AT_ONCE = ((16, 1 << 18, 1 << 20, 0, 128), (16, 1 << 10, 1 << 20, 0, 128))
BLOCKS = ((16, 1, 4), AT_ONCE[0], (7, 1 << 11, 2), (1, 1, 1), AT_ONCE[1], (16, 1 << 18, 1 << 20), (8, 1, 1, 8), (16, 1, 1, 4))
"""Blockwise in small blocks: queries and scores of one, scores from which heads are computed one by one, oneDNN's step, and
queries up to which a call is computed at once."""
REGISTERS = ("scores", "registers")
TILES: tuple[dict[str, tuple[Any, ...]], ...] = (
    {"forward": (32, 16), "stored_dq": (16, 16), "dq": (32, 16), "dkv": (16, 16), "dtable": (16, 16), "dp2c": (32, 32)},
    {"forward": (16, 16, None), "stored_dq": (32, 16), "dq": (16, 16), "dkv": (32, 16), "dtable": (32, 16), "dp2c": (16, 16)},
    {"forward": (32, 32), "stored_dq": (16, 64), "dq": (32, 32, None), "dkv": (32, 32), "dtable": (32, 32), "dp2c": (32, 16)},
    {
        "forward": (32, 16, *REGISTERS),
        "stored_dq": (64, 32),
        "dq": (16, 16, *REGISTERS),
        "dkv": (16, 16, *REGISTERS),
        "dtable": (64, 32),
        "dp2c": (64, 32),
    },
)
"""Small tiles of the kernels: rows and columns, what the forward and the dq kernel carry, and how rows are rotated."""


@contextmanager
def environment(sample: Sample, way: Way) -> Iterator[None]:
    """Set the sample's blocks or tiles, default dtype and grad mode; uninitialised memory holds NaN."""
    default = torch.get_default_dtype()
    mode = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[sample.mode]
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"), mode(), way.computing(sample):
        poison_memory(patch)
        if sample.workspace is not None:
            patch.setenv("TRITON_RELATTN_WORKSPACE", str(sample.workspace))
        torch.set_default_dtype(getattr(torch, sample.default_dtype))
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def global_state() -> dict[str, Any]:
    """The global state that a call must not change, without torch's generator, from which dropout draws."""
    return {
        "default dtype": torch.get_default_dtype(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        # Without filters for one module's warnings: torch's lazy imports may add some.
        "warnings' filters": [entry for entry in warnings.filters if entry[2].__module__ == "builtins"],
        "numpy's error handling": np.geterr(),
        "random": (random.getstate(), repr(np.random.get_state())),
        "environment": dict(os.environ),
    }


def assert_same_state(before: dict[str, Any]) -> None:
    moved = [name for name, value in global_state().items() if value != before[name]]
    assert not moved, f"the call changed global state: {', '.join(moved)}"


def memory(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage, padding included."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]


def public_function(sample: Sample) -> Callable[..., Any]:
    return fused_relative_attention if sample.sequences is None else fused_relative_attention_varlen


def spoilt(sample: Sample, call: dict[str, Any]) -> dict[str, Any]:
    """The call with NaN (or inf) in rows of tables without a pair, and in keys and values that no query sees.

    What only attn_mask hides is read, and stays as it is.
    """
    if sample.spoilt is None:
        return call
    batch = Batch(call)
    pairs = Pairs({**call, "attn_mask": None}, batch)
    row_used = torch.zeros(pairs.num_rows, dtype=torch.bool)
    row_used[pairs.row[pairs.visible & pairs.applies]] = True
    key_used = batch.packed(pairs.visible.any(2).any(1)[:, None, :, None], "k")
    used = dict.fromkeys(TABLES, row_used[:, None]) | {"rel_bias": row_used}
    used |= {} if sample.same else {"key": key_used, "value": key_used}
    changed = {}
    for name, mask in used.items():
        if name in call and call[name].is_contiguous():
            changed[name] = call[name].masked_fill(~mask, float(sample.spoilt))
    return {**call, **changed}


Results = dict[str, Tensor | None]


def run(sample: Sample, call: dict[str, Any]) -> Results:
    """out, lse, and the gradient of each input, None where there is none."""
    leaves: dict[int, Tensor] = {}
    for name in INPUTS:
        if name in call:
            leaves.setdefault(id(call[name]), call[name].detach().requires_grad_(name in sample.requires_grad))
    given = {name: leaves.get(id(value), value) if name in INPUTS else value for name, value in call.items()}
    torch.manual_seed(sample.seed)
    outs = public_function(sample)(**given)
    outs = outs if isinstance(outs, tuple) else (outs,)
    results: Results = dict(zip(("out", "lse"), outs, strict=False))
    differentiable = sample.mode == "grad" and any(leaf.requires_grad for leaf in leaves.values())
    by_autograd = call["implementation"] == "reference"  # of what is not used it has no gradients, not zeros; lse has no values
    assert by_autograd or all(out.requires_grad == differentiable for out in outs), "requires_grad of the results is wrong"
    if differentiable:
        named = [(name, out) for name, out in results.items() if out is not None and (by_autograd or wants(sample, name))]
        named = [(name, out) for name, out in named if out.requires_grad]
        d_outs = [cotangent(sample, name, out.dtype) for name, out in named]
        if sample.spoilt == "nan":
            d_outs = [d_out.masked_fill(out == -math.inf, math.nan) for d_out, (_, out) in zip(d_outs, named, strict=True)]
        versions = [tensor._version for tensor in (*outs, *d_outs)]
        torch.autograd.backward([out for _, out in named], d_outs)
        assert versions == [tensor._version for tensor in (*outs, *d_outs)], "the backward wrote to results or their gradients"
    return results | {f"d_{name}": given[name].grad for name in INPUTS if name in given}


def compute(sample: Sample, way: Way, **changed: Any) -> dict[str, Tensor]:
    """The results that there are, without a check. changed: arguments other than the sample's."""
    with environment(sample, way):
        found = run(sample, {**sample.call(), "implementation": way.implementation, **changed})
    return {name: result for name, result in found.items() if result is not None}


def wants(sample: Sample, result: str) -> bool:
    """Whether gradients flow back from this result, "out" or "lse"."""
    return sample.cotangents in (result, "both") and (result == "out" or sample.return_lse)


def cotangent(sample: Sample, result: str, dtype: torch.dtype) -> Tensor:
    numbers = sample.numbers(f"d_{result}", dtype=dtype)
    return numbers if wants(sample, result) else torch.zeros_like(numbers)


@functools.lru_cache(maxsize=2)
def right(sample: Sample, arithmetic: str, **changed: Any) -> tuple[dict[str, Expected], Tensor]:
    """The exact results of the call with their budgets, and the state of torch's generator after it."""
    call = {**sample.call(), "implementation": arithmetic, **changed}
    torch.manual_seed(sample.seed)
    keep = None
    if sample.dropout_p:
        keep = dropout_mask(len(sample.sizes), call["query"].shape[1], sample.longest(0), sample.longest(1), sample.dropout_p)
    state = torch.get_rng_state()
    cotangents = [cotangent(sample, name, torch.promote_types(call["query"].dtype, torch.float32)) for name in ("out", "lse")]
    results = expected(call, cotangents[0].to(call["query"].dtype), cotangents[1], keep, sample.round_terms)
    if sample.same:  # one tensor, whose gradient is the sum of three
        eps = 2 * torch.finfo(call["query"].dtype).eps
        parts = [results[f"d_{name}"] for name in ("query", "key", "value")]
        budget = sum((part.budget + eps * part.golden.abs() for part in parts), torch.zeros(()))
        total = Expected(sum((part.golden for part in parts), torch.zeros(())), budget)
        results |= dict.fromkeys(("d_query", "d_key", "d_value"), total)
    return results, state


def check(sample: Sample, way: Way, **changed: Any) -> dict[str, float]:
    """Assert all that the module's docstring lists; return the largest error / budget of each result. changed: arguments other
    than the sample's."""
    call = way.placed(spoilt(sample, {**sample.call(), "implementation": way.implementation, **changed}))
    given = {name: tensor for name, tensor in call.items() if isinstance(tensor, Tensor)}
    stored = {name: (memory(tensor).clone(), tensor._version) for name, tensor in given.items()}
    golden, drawn = right(sample, way.arithmetic, **changed)
    with environment(sample, way):
        before = global_state()
        results = run(sample, call)
        assert torch.equal(torch.get_rng_state(), drawn), "torch's generator has another state than one draw leaves"
        assert_same_state(before)
    again = results
    if way.again is not None:
        with environment(sample, way.again):
            again = run(sample, call)
    for name, (bytes_before, version) in stored.items():
        assert torch.equal(memory(given[name]), bytes_before), f"{name} was written to"
        assert given[name]._version == version, f"{name} counts as written to, and autograd would refuse to use it"

    ratios = {}
    for name, result in results.items():
        tensor, other = call.get(name.removeprefix("d_")), again[name]
        if tensor is not None:
            wanted = sample.mode == "grad" and name.removeprefix("d_") in sample.requires_grad
            assert (result is not None) == wanted, f"{name}: {'missing' if wanted else 'not asked for'}"
        if result is None:
            continue
        dtype = result_dtype(name, call)
        assert result.dtype == dtype, f"{name}: {result.dtype}, expected {dtype}"
        assert other is not None and torch.equal(result, other), f"{name}: not the same in a second run"
        ratios[name] = assert_within(name, result, *golden[name])
    return ratios


def check_refused(sample: Sample, way: Way, changes: dict[str, Any]) -> str | None:
    """Assert that a call with these arguments is accepted, or refused by a documented error with a message before anything is
    drawn or changed. Returns the error's name, or None.

    Raises:
        AssertionError: it raised another error, or changed global state.
    """
    call = {**sample.call(), "implementation": way.implementation, **changes}
    torch.manual_seed(sample.seed)
    seeded = torch.get_rng_state()
    with environment(sample, way):
        before = global_state()
        try:
            public_function(sample)(**call)
        except DOCUMENTED as error:
            assert str(error), f"{type(error).__name__} says nothing"
            assert torch.equal(torch.get_rng_state(), seeded), "refused, but torch's generator moved"
            assert_same_state(before)
            return type(error).__name__
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            raise AssertionError(f"{type(error).__name__} instead of a documented error: {first_line}") from error
    return None
