"""Properties of every call: it gives the right result and changes nothing else, or it raises one of three errors."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import cut_blocks, poisoned
from tests.fuzz.budget import assert_within, expected
from tests.fuzz.case import Broken, Case, arguments_of, changed, function_of, normal, spoilt
from triton_relattn._core.spec import DIFFERENTIABLE
from triton_relattn.kernels.config.tile_config import TileConfig
from triton_relattn.testing import dropout_mask

DOCUMENTED = (ValueError, TypeError, NotImplementedError)
BLOCKS = ((128, 1 << 18, 64), (16, 1, 4), (7, 1 << 11, 2), (1, 1, 1), (16, 1 << 18, 8))
"""Queries and scores of a block, and rows of a panel, of blockwise."""


def tile(block_m: int, block_n: int, carry: str | None = "scores", rotation: str = "gather") -> TileConfig:
    """So many queries and keys, or table rows; in registers, 16 rows a warp."""
    return TileConfig(block_m, block_n, block_m // 16, 1, carry, rotation)


TILES: tuple[dict[str, TileConfig] | None, ...] = (
    None,
    {
        "forward": tile(32, 16),
        "dq": tile(32, 16),
        "dq_from_ds": tile(16, 16),
        "dkv": tile(16, 16),
        "dtable": tile(16, 16),
        "dp2c": tile(32, 32),
    },
    {
        "forward": tile(16, 16, None),
        "dq": tile(32, 32, None),
        "dq_from_ds": tile(32, 16),
        "dkv": tile(32, 16),
        "dtable": tile(32, 16),
        "dp2c": tile(16, 16),
    },
    {
        "forward": tile(32, 32),
        "dq": tile(16, 16),
        "dq_from_ds": tile(16, 64),
        "dkv": tile(32, 32),
        "dtable": tile(32, 32),
        "dp2c": tile(32, 16),
    },
    {
        "forward": tile(32, 16, rotation="registers"),
        "dq": tile(32, 32, rotation="registers"),
        "dq_from_ds": tile(64, 32),
        "dkv": tile(16, 16, rotation="registers"),
        "dtable": tile(64, 32),
        "dp2c": tile(64, 32),
    },
)
"""Tiles of the kernels that cases choose from; None: the default configurations."""


@contextmanager
def environment(case: Case) -> Iterator[None]:
    """Blocks or tiles, default dtype and mode of the case; memory that is not written to holds NaN."""
    default = torch.get_default_dtype()
    mode = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[case.mode]
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"), mode():
        for owner, names in (
            (torch, ("empty", "empty_like", "empty_strided")),
            (torch.Tensor, ("new_empty", "new_empty_strided")),
        ):
            for name in names:
                patch.setattr(owner, name, poisoned(getattr(owner, name)))
        if case.workspace is not None:
            patch.setenv("TRITON_RELATTN_WORKSPACE", str(case.workspace))
        if case.implementation == "triton":
            cut_tiles(patch, TILES[case.blocks % len(TILES)])
            round_terms(patch, case.round_terms)
        else:
            cut_blocks(patch, *BLOCKS[case.blocks % len(BLOCKS)])
        torch.set_default_dtype(getattr(torch, case.default_dtype))
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def cut_tiles(patch: pytest.MonkeyPatch, tiles: dict[str, TileConfig] | None) -> None:
    """These tiles, in Triton's interpreter as the tests change it."""
    from tests.interpreter.conftest import change_interpreter
    from triton_relattn._core import residual
    from triton_relattn.kernels.config import selection

    change_interpreter(patch)
    patch.setattr(residual, "FEWEST_QUERIES", 30)
    if tiles is not None:
        patch.setattr(selection, "select", lambda kernel, *_, **__: tiles[kernel])


def round_terms(patch: pytest.MonkeyPatch, rounded: bool) -> None:
    """Round terms to float16, or not, whatever the inputs are."""
    from triton_relattn.kernels import call
    from triton_relattn.kernels.config import selection

    if rounded:
        patch.setattr(selection, "rounds_terms", lambda *_: True)
        patch.setattr(call, "fixed", call.fixed.__wrapped__)


def global_state() -> dict[str, Any]:
    """Return the global state that a call must not change, without torch's generator, from which dropout draws."""
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "TF32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "reduced precision": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()),
        "deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
        ),
        "anomaly mode": torch.is_anomaly_enabled(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        # Not those of a module's own warnings: what torch imports when it first needs it may bring some.
        "warnings' filters": [entry for entry in warnings.filters if entry[2].__module__ == "builtins"],
        "numpy's error handling": np.geterr(),
        "random": random.getstate(),
        "numpy's random": repr(np.random.get_state()),
        "environment": dict(os.environ),
    }


def assert_same_state(before: dict[str, Any]) -> None:
    moved = [name for name, value in global_state().items() if value != before[name]]
    assert not moved, f"the call changed global state: {', '.join(moved)}"


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage, padding included."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload]


def with_rows_beside(case: Case, call: dict[str, Any]) -> dict[str, Any]:
    """The call, with case.beside in the table rows that no visible pair has; tables of a layout of their own stay."""
    if case.beside is None or case.positions is None:
        return call
    pair = case.num_queries, case.num_keys
    sequences = (pair,) * case.batch if case.sequences is None else case.sequences
    offsets = case.query_offset if isinstance(case.query_offset, tuple) else (case.query_offset,) * len(sequences)
    limits = [keys for _, keys in sequences] if case.key_lengths is None else case.key_lengths
    first, last, outside = case.positions
    left, right = case.window_size
    used = torch.zeros(last - first + 1, dtype=torch.bool)
    for (queries, keys), offset, limit in zip(sequences, offsets, limits, strict=True):
        relative = torch.arange(min(keys, limit)) - torch.arange(queries)[:, None] - offset
        visible = ((relative >= -left) | (left < 0)) & ((relative <= right) | (right < 0))
        row = relative[visible & ((relative <= 0) | (not case.is_causal))] - first
        used[row.clamp(0, last - first) if outside == "clamp" else row[(row >= 0) & (row <= last - first)]] = True
    own = {layout[0] for layout in case.layouts}
    tables = {name: call[name].clone() for name in case.tables if name not in own}
    for name, table in tables.items():
        table[(..., ~used) if name == "rel_bias" else (..., ~used, slice(None))] = float(case.beside)
    return call | tables


def kept(case: Case, call: dict[str, Any]) -> torch.Tensor | None:
    """Return the mask of the probabilities that dropout keeps. It draws from torch's generator as the call does."""
    dropout_p = call.get("dropout_p", 0.0)
    if not dropout_p:
        return None
    if case.sequences is None:
        batch, heads, num_queries, _ = call["query"].shape
        return dropout_mask(batch, heads, num_queries, call["key"].shape[2], dropout_p)
    longest = max(len(call["query"]), len(call["key"]))
    return dropout_mask(len(call["cu_seqlens_q"]) - 1, call["query"].shape[1], longest, longest, dropout_p)


def run(case: Case, function: Callable[..., Any], call: dict[str, Any]) -> dict[str, torch.Tensor | None]:
    """out, lse, and the gradient of each tensor, None where there is none, and the cotangents d_out and d_lse."""
    leaves: dict[int, torch.Tensor] = {}
    for name in DIFFERENTIABLE:
        tensor = call.get(name)
        if tensor is not None:
            leaves.setdefault(id(tensor), tensor.detach().requires_grad_(name in case.requires_grad))
    given = {name: leaves.get(id(value), value) if name in DIFFERENTIABLE else value for name, value in call.items()}
    torch.manual_seed(case.seed)
    outs = function(**given)
    outs = outs if isinstance(outs, tuple) else (outs,)
    cotangents = [normal(case, name, tuple(out.shape), out.dtype) for name, out in zip(("d_out", "d_lse"), outs, strict=False)]
    for which, silent in enumerate(("lse", "out")):
        if len(outs) == 2 and case.cotangents == silent:
            cotangents[which] = torch.zeros_like(cotangents[which])
    results = dict(zip(("out", "lse"), outs, strict=False))
    differentiable = case.mode == "grad" and any(leaf.requires_grad for leaf in leaves.values())
    assert all(out.requires_grad == differentiable for out in outs), "requires_grad of the results is wrong"
    if differentiable:
        wanted = {"both": (0, 1), "out": (0,), "lse": (1,)}[case.cotangents if len(outs) == 2 else "out"]
        torch.autograd.backward([outs[which] for which in wanted], [cotangents[which] for which in wanted])
    gradients = {f"d_{name}": given[name].grad for name in DIFFERENTIABLE if given.get(name) is not None}
    return {**results, **gradients, **dict(zip(("of out", "of lse"), cotangents, strict=False))}


def check_call(case: Case, function: Callable[..., Any], clean: dict[str, Any], call: dict[str, Any] | None = None) -> None:
    """The result is right, and the same again; inputs, global state and, without dropout, the generator are as before.

    call: the arguments that the function gets, if they are other than those whose results are right.
    """
    call = clean if call is None else call
    tensors = {name: value for name, value in call.items() if isinstance(value, torch.Tensor)}
    stored = {name: memory(tensor).clone() for name, tensor in tensors.items()}
    torch.manual_seed(case.seed)
    keep = kept(case, call)
    drawn = torch.get_rng_state()
    with environment(case):
        before = global_state()
        given = with_rows_beside(case, call)
        results = run(case, function, given)
        assert torch.equal(torch.get_rng_state(), drawn), "torch's generator is not where it should be"
        assert_same_state(before)
        again = results if case.implementation == "triton" else run(case, function, given)  # the interpreter has no races
    for name, tensor in tensors.items():
        assert torch.equal(memory(tensor), stored[name]), f"{name} was written to"
    check_results(case, clean, results, keep)
    for name, result in results.items():
        other = again[name]
        assert (result is None) == (other is None), f"{name}: there in one run only"
        assert result is None or other is None or torch.equal(result, other), f"{name}: not the same in a second run"


def check_results(case: Case, call: dict[str, Any], results: dict[str, torch.Tensor | None], keep: torch.Tensor | None) -> None:
    out, d_out, d_lse = results["out"], results["of out"], results.get("of lse")
    assert out is not None and d_out is not None
    query = call["query"]
    lse_shape = (*query.shape[:3],) if case.sequences is None else (query.shape[1], query.shape[0])
    golden = expected(
        call, d_out, torch.zeros(lse_shape, dtype=torch.float64) if d_lse is None else d_lse, keep, case.round_terms
    )
    dtypes = {"out": query.dtype, "lse": torch.promote_types(query.dtype, torch.float32)}
    for name, result in results.items():
        if name in ("of out", "of lse"):
            continue
        tensor = call.get(name.removeprefix("d_"))
        if tensor is not None:
            wanted = case.mode == "grad" and any(call.get(other) is tensor for other in case.requires_grad)
            assert (result is not None) == wanted, f"{name}: {'missing' if wanted else 'not asked for'}"
        if result is None:
            continue
        exact, budget = golden[name]
        others = [golden[f"d_{other}"] for other in DIFFERENTIABLE if tensor is not None and call.get(other) is tensor]
        if len(others) > 1:
            exact = sum((other.golden for other in others), torch.zeros(()))
            rounding = 2 * torch.finfo(result.dtype).eps
            budget = sum((other.budget + rounding * other.golden.abs() for other in others), torch.zeros(()))
        dtype = dtypes[name] if tensor is None else tensor.dtype
        assert result.dtype == dtype, f"{name}: {result.dtype}, expected {dtype}"
        assert_within(name, result, exact, budget)


def check(case: Case) -> None:
    """A valid call."""
    call = arguments_of(case)
    check_call(case, function_of(case), call, spoilt(case, call))


def check_broken(broken: Broken) -> str:
    """A call that may not be valid is refused, by a documented error and before anything is drawn, or right: says which.

    Raises:
        NotApplicable: the changes cannot be made to this call.
    """
    case, call = broken.case, changed(broken)
    function = function_of(case)
    torch.manual_seed(case.seed)
    seeded = torch.get_rng_state()
    with environment(case):
        before = global_state()
        try:
            function(**call)
        except DOCUMENTED as error:
            assert str(error), f"{type(error).__name__} says nothing"
            assert torch.equal(torch.get_rng_state(), seeded), "refused, but torch's generator moved"
            assert_same_state(before)
            return type(error).__name__
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            raise AssertionError(f"{type(error).__name__} instead of a documented error: {first_line}") from error
    check_call(case, function, call)
    return "accepted"
