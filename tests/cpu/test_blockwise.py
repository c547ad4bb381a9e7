"""What the linear-memory path in plain torch promises beyond what every implementation does: memory, threads, how it rounds on
any processor and at any scale of the logits, which library multiplies, and that it does not matter how a call is cut."""

from __future__ import annotations

import gc
import itertools
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.check import Way, attend, check, compute_results, run, worst_reference
from tests.conftest import cut_blocks, take_processor
from tests.expected import INPUTS, assert_table_gradient, exact_results
from tests.expected import TABLES as ALL_TABLES
from tests.samples import Sample, with_different_strides
from tests.tolerance import assert_at_most, assert_gradients_close_fp32, assert_same
from triton_relattn import RelativePositions
from triton_relattn import __main__ as command_line
from triton_relattn._blockwise import products
from triton_relattn.testing import Inputs, assert_within_budget, error_budget, last_place, make_inputs

TABLES: dict[str, Any] = {"rel_value": True, "rel_bias": True, "rel_p2c": True}
BIAS: dict[str, Any] = {"rel_key": False, "rel_bias": True}
BLOCKWISE: dict[str, Any] = {"implementation": "blockwise"}
PROCESSORS: dict[str, tuple[str, ...]] = {
    # torch's flags
    "plain": (),
    "avx512_bf16": ("_is_avx512_bf16_supported",),
    "amx": ("_is_avx512_bf16_supported", "_is_amx_tile_supported"),
    "amx_fp16": ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_amx_fp16_supported"),
}


# Memory and threads.

CHILD = """
import sys
import torch
from triton_relattn.testing import forward_backward, make_inputs
from triton_relattn import fused_relative_attention

def status(field):
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith(field + ":"))

def run(inputs):
    forward_backward(fused_relative_attention, inputs, return_lse=True, implementation="blockwise")

def inputs(length):
    made = make_inputs(1, 8, length, length, 64, num_rows=129, dtype=torch.float32, seed=0)
    return made._replace(query=made.query.transpose(1, 2).contiguous().transpose(1, 2))

torch.set_num_threads(int(sys.argv[1]))
run(inputs(64))
for length in map(int, sys.argv[2:]):
    measured = inputs(length)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak so far is that of making the inputs in float64
    before = status("VmRSS")
    run(measured)
    print((status("VmHWM") - before) / (8 * length * 64 * 4))
"""


def peaks_of(*lengths: int, threads: int) -> list[float]:
    """Peak memory of a forward and backward call for each length, minus its inputs, in units of a query-sized tensor."""
    # A fixed threshold: glibc returns every freed tensor at once, so that none counts as memory in use at the start.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-c", CHILD, str(threads), *map(str, lengths)]
    child = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], env=environment, check=False)
    assert child.returncode == 0, child.stderr
    return [float(line) for line in child.stdout.splitlines()]


on_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from Linux's /proc")


@on_linux
def test_memory_is_linear() -> None:
    """Four times the length needs at most 4.5 times the memory, and far less than the scores of all pairs."""
    short, long = peaks_of(1024, 4096, threads=1)
    assert short >= 3, "the measurement misses the results themselves"
    assert long <= 4.5 / 4 * short and long <= 4096 / 64 / 3, (short, long)


@on_linux
@pytest.mark.thorough
def test_memory_of_many_threads() -> None:
    """With more than two threads, blocks take no more memory than the call's tensors and gradients, and in total less than all
    scores."""
    assert peaks_of(2048, threads=64)[0] < 2048 / 64


@pytest.mark.parametrize("table", [True, False])
def test_memory_is_given_back_at_once(table: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call leaves no reference cycle that keeps a tensor alive until garbage collection."""
    cut_blocks(monkeypatch, 16, 1, 4)
    inputs = make_inputs(1, 4, 100, 100, 8, num_rows=199 if table else None, rel_p2c=table, dtype=torch.float32, seed=0)
    compute_results("blockwise", inputs, is_causal=True)
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(item, torch.Tensor) for item in gc.get_objects())
        compute_results("blockwise", inputs, is_causal=True)
        assert sum(isinstance(item, torch.Tensor) for item in gc.get_objects()) == before
    finally:
        gc.enable()


# Results do not depend on the blocks.

SIZES: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    # batch, heads, queries, keys, width; tables; arguments
    "a_thousand": ((1, 2, 1023, 1024, 4), {"num_rows": 513}, {"is_causal": True, "query_offset": 1}),
    "a_window": ((1, 1, 1500, 1500, 4), {"num_rows": 61, **TABLES}, {"window_size": (20, 9)}),
    "one_query": ((1, 4, 1, 3000, 8), {"num_rows": 81, "key_heads": 2, **TABLES}, {"query_offset": 2999}),
    "one_key": ((1, 2, 3000, 1, 4), {"num_rows": 401, **TABLES}, {}),
    "few_queries": ((2, 4, 2, 1500, 8), {"num_rows": 81, "per_head": True, "rel_width": 3}, {"query_offset": 1498}),
    "a_bias": ((2, 4, 301, 260, 4), {"num_rows": 601, **BIAS, "key_heads": 2, "per_head": True}, {"query_offset": -7}),
    "a_bias_of_all_heads": ((3, 2, 70, 150, 4), {"num_rows": 41, **BIAS}, {"key_lengths": torch.tensor([150, 0, 77])}),
    "a_causal_bias": ((1, 2, 600, 600, 4), {"num_rows": 301, **BIAS, "per_head": True}, {"is_causal": True}),
    "a_window_alone": ((2, 2, 500, 420, 4), {"num_rows": None}, {"window_size": (30, 4), "query_offset": torch.tensor([0, -90])}),
}


@pytest.mark.parametrize("case", SIZES)
def test_sizes(case: str) -> None:
    """Extreme shapes, with the default block sizes."""
    sizes, tables, arguments = SIZES[case]
    inputs = make_inputs(*sizes, **tables, dtype=torch.float64, seed=1)
    rel_scale = None if inputs.rel_key is None else 0.7
    arguments = {"query_offset": 0, **arguments, "rel_scale": rel_scale, "enable_gqa": "key_heads" in tables}
    expected = exact_results(inputs, **arguments)
    for name, result in compute_results("blockwise", inputs, **arguments).items():
        assert_same(name, result, expected[name])


CUT = Sample(batch=3, key_heads=2, group=2, num_queries=47, num_keys=53, width=8, value_width=8, dtype="float64")
CUT = replace(CUT, tables=ALL_TABLES, positions=(-16, 16, "clamp"), window_size=(30, 20), key_lengths=(53, 31, 0))


@pytest.mark.parametrize("cut", [(16, 1, 4), (5, 1, 1), (47, 1, 9), (16, 1 << 10, 16), (128, 1 << 12, 20), (64, 1, 64)], ids=str)
def test_results_do_not_depend_on_how_a_call_is_cut(cut: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also out and gradients of a call that does not ask for lse, bit for bit; the third sequence sees no keys."""
    cut_blocks(monkeypatch, *cut)
    for sample in (replace(CUT, cotangents="out"), replace(CUT, is_causal=True, query_offset=6)):
        check(sample, Way("blockwise"))
    with_lse, without = (
        run(replace(CUT, cotangents="out", return_lse=lse), CUT.call() | BLOCKWISE | {"return_lse": lse}) for lse in (True, False)
    )
    assert all(torch.equal(result, with_lse[name]) for name, result in without.items())  # type: ignore[arg-type]


@pytest.mark.parametrize("elements", [1 << 11, 1 << 12, 1 << 20], ids=["one", "two", "all"])
def test_whole_sequences_at_a_time(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five sequences with a mask each, for tensors in any memory order."""
    cut_blocks(monkeypatch, 16, elements, 1 << 20, short=20)
    tables: dict[str, Any] = {"tables": ("rel_key", "rel_bias"), "rel_width": 6, "positions": (-14, 14, "clamp")}
    sample = replace(CUT, **tables, batch=5, num_queries=20, num_keys=23, key_lengths=None, window_size=(-1, -1))
    for mask, strided in itertools.product(("bool", "float64"), ((), INPUTS)):
        masked = replace(sample, mask=mask, mask_shape=(5, 1, 20, 23), is_causal=True, query_offset=3, strided=strided)
        check(masked, Way("blockwise"))


# Rounding, by the error rule, on any processor.

CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]] = {
    # batch, heads, queries, keys, widths; tables; arguments
    "full": ((2, 2, 97, 97, 64), {"num_rows": 193}, {}),
    "causal": ((2, 2, 129, 129, 32, 48), {"num_rows": 129}, {"positions": RelativePositions(-128, 0), "is_causal": True}),
    "zero": (
        (1, 3, 113, 203, 21),
        {"num_rows": 31, "per_head": True},
        {"positions": RelativePositions(-20, 10, "zero"), "query_offset": 90},
    ),
    "lengths": ((2, 2, 63, 65, 64), {"num_rows": 65}, {"key_lengths": torch.tensor([33, 0])}),
    "no_table": ((2, 2, 64, 64, 64), {"num_rows": None}, {"is_causal": True}),
    "value_table": ((2, 2, 97, 97, 64), {"num_rows": 21, "rel_value": True}, {}),
    "dropout": ((2, 2, 97, 97, 64), {"num_rows": 21}, {"dropout_p": 0.2}),
    "mask": ((2, 2, 60, 53, 64), {"num_rows": 21}, {"attn_mask": torch.arange(60)[:, None] % 5 * (torch.arange(53) % 3) > 0}),
    "lowest_mask": (
        (2, 2, 60, 53, 64),
        {"num_rows": 21},
        {"attn_mask": torch.zeros(60, 53).masked_fill(torch.arange(53) > 20, torch.finfo(torch.float32).min)},
    ),
    "bias_alone": ((2, 2, 97, 97, 32), {"num_rows": 193, "rel_bias": True, "rel_key": False}, {"softcap": 20.0}),
    "p2c": (
        (2, 4, 97, 65, 64),
        {"num_rows": 41, "rel_p2c": True, "key_heads": 2, "per_head": True},
        {"is_causal": True, "query_offset": -3, "enable_gqa": True},
    ),
    "all_terms": (
        (2, 4, 97, 65, 64),
        {"num_rows": 31, "rel_width": 16, **TABLES, "key_heads": 2, "per_head": True},
        {"rel_scale": 0.5, "softcap": 30.0, "window_size": (50, 9), "enable_gqa": True, "query_offset": torch.tensor([-3, 4])},
    ),
}


def check_error(inputs: Inputs, results: dict[str, torch.Tensor], **arguments: Any) -> None:
    """At most twice (gradients: three times) the error of plain torch, and table gradients as good as rounding dS once."""
    golden, reference = worst_reference(inputs, **arguments)
    gradients = [name for name in results if name.startswith("d_")]
    for name, result in results.items():
        assert result.dtype == (torch.float32 if name == "lse" else inputs.query.dtype)
        assert_within_budget(name, result, golden[name], reference[name], factor=3 if name in gradients else 2)
        if name in gradients and result.dtype == torch.float32:
            assert_gradients_close_fp32(name, result, golden[name], [golden[other] for other in gradients])
        elif name.startswith("d_rel_") and name != "d_rel_query":
            assert_table_gradient(name, result, inputs, table=name.removeprefix("d_"), **arguments)


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize(
    ("dtype", "processor"),
    [
        (torch.bfloat16, "plain"),
        (torch.bfloat16, "avx512_bf16"),
        (torch.float16, "amx_fp16"),
        (torch.float32, "amx_fp16"),
    ],
    ids=str,
)
def test_error_rule(case: str, dtype: torch.dtype, processor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For both dtypes, one call has sharp attention, where delta must match the rows of P, and one uses small blocks."""
    take_processor(monkeypatch, *PROCESSORS[processor])
    number = list(CALLS).index(case)
    if number % 4 < 2:
        cut_blocks(monkeypatch, 16, 1, 4)
    sizes, tables, arguments = CALLS[case]
    is_sharp = (number + (dtype == torch.float16)) % 2 == 0
    inputs = with_different_strides(make_inputs(*sizes, **tables, dtype=dtype, seed=7, sharp=is_sharp))
    check_error(inputs, compute_results("blockwise", inputs, **arguments), **arguments)


@pytest.mark.parametrize("case", CALLS)
def test_error_rule_of_a_forward_alone(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a backward, nothing is kept: table terms may be rounded, and torch's fused attention is used where possible."""
    take_processor(monkeypatch, *PROCESSORS["amx"])
    sizes, tables, arguments = CALLS[case]
    inputs = with_different_strides(make_inputs(*sizes, **tables, dtype=torch.bfloat16, seed=7))
    golden, reference = worst_reference(inputs, **arguments)
    key = inputs.key
    if "key_lengths" in arguments:  # they hide NaN
        key = key.masked_fill(torch.arange(key.shape[2])[:, None] >= arguments["key_lengths"].view(-1, 1, 1, 1), math.nan)
    for given in (inputs, inputs._replace(key=key)):
        torch.manual_seed(0)
        with torch.no_grad():
            out, lse = attend(*given[:4], **given.terms(), **arguments)
        assert_within_budget("out", out, golden["out"], reference["out"], factor=2)
        assert_within_budget("lse", lse, golden["lse"], reference["lse"], factor=2)
        cut_blocks(monkeypatch, 16, 1, 4)


@pytest.mark.parametrize("spoilt", [math.nan, math.inf, 1e300])
def test_keys_that_a_query_does_not_see(spoilt: float) -> None:
    """Keys that are not finite, or whose products are not, do not reach queries before them in the same block."""
    inputs = make_inputs(1, 2, 100, 100, 16, num_rows=199, dtype=torch.float64, seed=7)
    expected = attend(*inputs[:4], is_causal=True)[0][:, :, :60]
    key = inputs.key.clone()
    key[:, :, 60:] = spoilt * torch.randn(1, 2, 40, 16).sign()
    out, _ = attend(*inputs._replace(key=key)[:4], is_causal=True)
    assert_same("out", out[:, :, :60], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_scale_of_zero(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention by position, by content or by a bias alone: torch's 16-bit products with alpha = 0 leave the result unwritten,
    and here uninitialised memory holds NaN."""
    take_processor(monkeypatch, *PROCESSORS["amx_fp16"])
    inputs = make_inputs(1, 2, 96, 96, 64, num_rows=129, rel_bias=True, rel_p2c=True, dtype=dtype, seed=7)
    for scale, rel_scale in ((0.0, 0.125), (0.125, 0.0), (0.0, 0.0)):
        arguments: dict[str, Any] = {"scale": scale, "rel_scale": rel_scale}
        golden, reference = worst_reference(inputs, **arguments)
        for name, result in compute_results("blockwise", inputs, **arguments).items():
            if golden[name].any():
                assert_within_budget(name, result, golden[name], reference[name], factor=3 if name.startswith("d_") else 2)
            else:
                assert not result.any(), name


@pytest.mark.parametrize("processor", PROCESSORS)
def test_what_a_processor_is_fast_at(processor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are rounded more often only in dtypes whose products the processor computes fast."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        inputs = make_inputs(1, 2, 60, 60, 32, num_rows=119, dtype=dtype, seed=3)
        take_processor(monkeypatch)
        expected = compute_results("blockwise", inputs)
        take_processor(monkeypatch, *PROCESSORS[processor])
        results = compute_results("blockwise", inputs)
        is_fast = processor != "plain" and (dtype == torch.bfloat16 or (dtype == torch.float16 and processor == "amx_fp16"))
        assert torch.equal(results["d_query"], expected["d_query"]) != is_fast, dtype


@pytest.mark.parametrize("fast", [False, True], ids=["float32_products", "fast_products"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_are_rounded_once(dtype: torch.dtype, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that sum over many blocks of queries have, in norm, hardly more error than rounding the result alone.

    With products in the inputs' dtype, P and dS are rounded, and so is each block's product. Where terms of both signs are
    summed, each of these two roundings adds as much, in squares, as rounding the result.
    """
    take_processor(monkeypatch, *PROCESSORS["amx_fp16" if fast else "plain"])
    cut_blocks(monkeypatch, 128, 1, 64)
    inputs = make_inputs(1, 1, 3000, 24, 16, num_rows=41, dtype=dtype, seed=3)
    golden, results = exact_results(inputs), compute_results("blockwise", inputs)
    for name in ("d_key", "d_value", "d_rel_key"):
        unavoidable = (golden[name].to(dtype).double() - golden[name]).norm()
        # A second rounding adds as much again in squares: half of that is allowed, and twice what two more roundings add.
        beyond = (results[name].double() - golden[name]).norm() - unavoidable
        allowed = 2 * (3**0.5 - 1) if fast else (2**0.5 - 1) / 2
        assert_at_most(f"{name}, beyond rounding", beyond.clamp_min(0), allowed * unavoidable)


# Large logits.


def scaled(inputs: Inputs, deviation: float) -> Inputs:
    """Query, key and what is added to their products, of this standard deviation; the bias of that of products.

    They have so few digits that float32 holds all logits exactly. If they were rounded, two keys with nearly the same would
    decide on the largest error.
    """
    names = ("query", "key", "rel_key", "rel_query", "rel_bias", "rel_p2c")
    given = {name: getattr(inputs, name) for name in names if getattr(inputs, name) is not None}
    factors = {name: deviation ** (2 if name == "rel_bias" else 1) / 4 for name in given}
    return inputs._replace(**{name: (4 * tensor).round() * factors[name] for name, tensor in given.items()})


@pytest.mark.parametrize("deviation", [32, 2**10, 2**27])
@pytest.mark.parametrize("case", ["full", "lengths", "no_table", "value_table", "p2c", "all_terms"])
def test_error_rule_at_any_scale(case: str, deviation: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every gradient of float32 calls is within its budget, also through lse.

    Probabilities that are exp(logits - lse) sum to 1.02 at a deviation of 1e3, and to 2e12 at 1e4.
    """
    if deviation == 2**10:
        cut_blocks(monkeypatch, 16, 1, 4)
    sizes, tables, arguments = CALLS[case]
    inputs = scaled(make_inputs(*sizes, **tables, dtype=torch.float32, seed=5), deviation)
    golden, reference = worst_reference(inputs, **arguments)
    for name, result in compute_results("blockwise", inputs, **arguments).items():
        if not golden[name].any():  # saturated: a single key has all the attention
            assert not result.any(), name
            continue
        finite, factor = golden[name].isfinite(), 3 if name.startswith("d_") else 2
        assert torch.equal(result.isfinite(), finite), name
        # With few large terms plain torch rounds products and sums by one unit in all, most of which may cancel by chance.
        least = (factor + 2) * last_place(float(golden[name][finite].abs().max()), torch.float32)
        budget = max(error_budget(golden[name], reference[name], torch.float32, factor=factor), least)
        assert_at_most(name, (result.double() - golden[name])[finite].abs(), budget)


# The library that multiplies float32 matrices.

VARIABLE = "TRITON_RELATTN_CPU_PRODUCT"
on_onednn = pytest.mark.skipif(not products.has_linear(), reason="this build of torch lacks oneDNN, or its linear")


@pytest.mark.parametrize("choice", ["torch", pytest.param("onednn", marks=on_onednn)])
def test_the_variable_chooses(choice: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The environment variable that users are asked to report shows the choice; any other is refused."""
    monkeypatch.setenv(VARIABLE, choice)
    monkeypatch.setattr(command_line, "chooses_onednn", products.chooses_onednn.__wrapped__)
    assert command_line.main([]) == 0
    assert f"float32 products: {choice}" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setenv(VARIABLE, "mkl")
    with pytest.raises(ValueError, match=f'{VARIABLE} must be "onednn" or "torch", got \'mkl\''):
        products.chooses_onednn.__wrapped__()


def test_without_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oneDNN operator is private: if torch lacks it, torch.mm is used, and setting the variable raises an error."""

    def absent(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")

    monkeypatch.setattr(products, "linear", absent)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not products.chooses_onednn.__wrapped__()
    monkeypatch.setenv(VARIABLE, "onednn")
    with pytest.raises(NotImplementedError, match="has no oneDNN"):
        products.chooses_onednn.__wrapped__()


@on_onednn
def test_the_probe_asks_for_speed_and_for_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe also works if the default dtype is float64 or the default device is another one."""
    monkeypatch.setattr(products, "FASTER", 1e9)
    assert not products.is_faster()
    monkeypatch.setattr(products, "FASTER", 0.0)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        assert products.has_linear() and products.is_faster()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(products, "linear", lambda left, right: (left.bfloat16() @ right.t().bfloat16()).float())
    assert not products.is_faster()


def test_only_long_float32_calls_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe takes milliseconds, and oneDNN does not support float64, so only long float32 calls run it."""
    asked = 0

    def choice() -> bool:
        nonlocal asked
        asked += 1
        return False

    monkeypatch.setattr(products, "chooses_onednn", choice)
    for length, dtype in ((64, torch.float32), (1100, torch.float64), (1100, torch.float32)):
        assert asked == 0
        compute_results("blockwise", make_inputs(1, 1, length, length, 4, num_rows=9, dtype=dtype, seed=0))
    assert asked > 0


MULTIPLIED: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "full": ((1, 2, 130, 130, 64), {"num_rows": 259}, {}),
    "clipped": ((2, 4, 97, 65, 32), {"num_rows": 31, "rel_value": True, "rel_bias": True, "key_heads": 2}, {"enable_gqa": True}),
    "window": ((1, 2, 200, 150, 16), {"num_rows": 41, "rel_p2c": True}, {"window_size": (40, 3), "query_offset": -30}),
    "lengths": ((3, 2, 70, 90, 24), {"num_rows": 159}, {"key_lengths": torch.tensor([90, 33, 1]), "query_offset": 20}),
}


@on_onednn
@pytest.mark.parametrize("step", [8, 64])
@pytest.mark.parametrize("case", MULTIPLIED)
def test_onednn(case: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN obeys the error rule and repeats bit for bit. Its weights are dense: with gaps between rows, as in a part of a
    band, it takes 200 ms instead of 0.1."""
    cut_blocks(monkeypatch, 64, 1, 1, step)
    are_dense, product = [], torch.ops.mkldnn._linear_pointwise

    def recorded(left: torch.Tensor, right: torch.Tensor, *others: Any) -> Any:
        are_dense.append(right.is_contiguous() or right.t().is_contiguous())
        return product(left, right, *others)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", recorded)
    sizes, tables, arguments = MULTIPLIED[case]
    inputs = make_inputs(*sizes, **tables, dtype=torch.float32, seed=5)
    golden, reference = worst_reference(inputs, **arguments)
    results, again = (compute_results("blockwise", inputs, **arguments) for _ in range(2))
    for name, result in results.items():
        assert_within_budget(name, result, golden[name], reference[name], factor=3 if name.startswith("d_") else 2)
        assert torch.equal(result, again[name]), name
    assert are_dense and all(are_dense)


@on_onednn
def test_nan_beside_rows_of_no_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows added to reach oneDNN's sizes see no key, and a key that a mask hides from all queries may hold NaN."""
    cut_blocks(monkeypatch, 64, 1, 1, 64)
    inputs = make_inputs(1, 1, 70, 70, 16, num_rows=139, dtype=torch.float32, seed=6)
    key, mask = inputs.key.clone(), torch.arange(70) != 9
    key[:, :, 9] = math.nan
    results, expected = (
        compute_results("blockwise", inputs._replace(key=keys), attn_mask=mask) for keys in (key, key.nan_to_num())
    )
    assert results["d_value"].isfinite().all() and torch.equal(results["d_value"], expected["d_value"])


@on_onednn
def test_sizes_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN prepares and caches every new size, so 60 lengths must use few sizes."""
    cut_blocks(monkeypatch, 128, 1, 1, 64)
    sizes, linear = set(), products.linear

    def recorded(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        sizes.add((*left.shape, *right.shape))
        return linear(left, right)

    monkeypatch.setattr(products, "linear", recorded)
    for length in range(401, 461):
        compute_results("blockwise", make_inputs(1, 1, length, length, 16, num_rows=2 * length - 1, dtype=torch.float32, seed=0))
    assert 0 < len(sizes) < 60, sorted(sizes)  # fewer than one per length, over all products
