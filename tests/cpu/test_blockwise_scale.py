"""The linear-memory path at any scale of the logits, in short rows, and in batches of which it takes much at once."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch

from tests.conftest import cut_blocks
from tests.cpu.oracle import assert_same, attend, by_hand, results_of, unlucky_reference
from triton_relattn._blockwise import attention as blockwise
from triton_relattn._blockwise import partition
from triton_relattn._blockwise.partition import Call
from triton_relattn._core.arguments import Arguments
from triton_relattn._core.validation import resolve
from triton_relattn._core.within import sum_allowance, within
from triton_relattn.testing import Inputs, error_budget, forward_backward, last_place, make_inputs

FURTHER_TABLES: dict[str, Any] = {"rel_value": True, "rel_bias": True, "rel_p2c": True}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # terms, arguments
    "table": ({}, {}),
    "clipped_causal": ({"num_rows": 9}, {"is_causal": True}),
    "no_table": ({"num_rows": None}, {}),
    "all_terms": ({**FURTHER_TABLES, "rel_width": 16}, {}),
    "p2c": ({"rel_p2c": True, "num_rows": 9}, {}),
    "softcap": ({"rel_bias": True}, {"softcap": 30.0}),
    "float_mask": ({"rel_value": True}, {"attn_mask": True}),
}


DEVIATIONS = (1, 8, 32, 128, 2**10, 2**13, 2**27)
"""Powers of two."""


def quarters(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return (4 * tensor).round() * (factor / 4)


def scaled(inputs: Inputs, deviation: float) -> Inputs:
    """Query, key and what is added to their products, of this standard deviation; the bias of that of products.

    They have so few digits that float32 holds all logits exactly. If they were rounded, two keys with nearly the same would
    decide on the largest error.
    """
    names = ("query", "key", "rel_key", "rel_query", "rel_bias", "rel_p2c")
    factors = {name: deviation ** (2 if name == "rel_bias" else 1) for name in names if getattr(inputs, name) is not None}
    return inputs._replace(**{name: quarters(getattr(inputs, name), factor) for name, factor in factors.items()})


@pytest.mark.parametrize("length", [11, 67, 200])
@pytest.mark.parametrize("deviation", DEVIATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_error_rule_at_any_scale(kind: str, deviation: float, length: int, block_size: None) -> None:
    """Every gradient of float32 calls is within its budget, also through lse.

    Probabilities that are exp(logits - lse) sum to 1.02 at a deviation of 1e3, and to 2e12 at 1e4.
    """
    terms, arguments = KINDS[kind]
    options = {"num_rows": 2 * length - 1, **terms}
    inputs = scaled(make_inputs(1, 3, length, length, 16, **options, dtype=torch.float32, seed=5), deviation)
    if "attn_mask" in arguments:
        generator = torch.Generator().manual_seed(1)
        arguments = {"attn_mask": quarters(torch.randn(1, 3, length, length, generator=generator), deviation**2)}
    golden, reference = unlucky_reference(inputs, **arguments)
    for name, result in results_of("blockwise", inputs, **arguments).items():
        assert result.isfinite().all(), name
        if not golden[name].any():  # saturated: a single key has all the attention
            assert not result.any(), name
            continue
        factor = 3 if name.startswith("d_") else 2
        # Of few large terms plain torch rounds products and sums: a unit in all, of which luck may hide most.
        finite = golden[name].isfinite()
        assert torch.equal(result.isfinite(), finite) and torch.equal(result[~finite].double(), golden[name][~finite])
        least = (factor + 2) * last_place(float(golden[name][finite].abs().max()), torch.float32)
        budget = max(error_budget(golden[name], reference[name], torch.float32, factor=factor), least)
        within(name, (result.double() - golden[name])[finite].abs(), budget)


@pytest.mark.parametrize("num_keys", [5, 15, 16, 31, 300])
@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_probabilities_sum_to_one(deviation: float, num_keys: int, block_size: None) -> None:
    """In the forward and in the backward: with values and d_out of ones, out and the sum of d_value say so."""
    inputs = scaled(make_inputs(2, 2, 40, num_keys, 16, 1, num_rows=79, dtype=torch.float32, seed=2), deviation)
    inputs = inputs._replace(value=torch.ones_like(inputs.value), d_out=torch.ones_like(inputs.d_out))
    for arguments in ({}, {"softcap": 1e9}):  # the second does not keep the probabilities
        results = forward_backward(attend, inputs, **arguments)
        within("out", (results["out"].double() - 1).abs(), sum_allowance(num_keys, 1.0))
        within("d_value", (results["d_value"].double().sum((2, 3)) - 40).abs(), sum_allowance(num_keys + 40, 40.0))


def test_sequences_of_different_lengths_in_one_block() -> None:
    """They are computed together, and each as by itself, padding of NaN or not."""
    lengths = [13, 1, 0, 40, 29]
    inputs = make_inputs(5, 2, 9, 40, 8, num_rows=15, **FURTHER_TABLES, dtype=torch.float64, seed=1)
    for length, key, value in zip(lengths, inputs.key, inputs.value, strict=True):
        key[:, length:], value[:, length:] = torch.nan, torch.nan
    tensors, spec = resolve(Arguments.of(*inputs[:4], key_lengths=torch.tensor(lengths)))
    assert len(list(Call(tensors, spec).blocks())) == 1
    together = forward_backward(attend, inputs, key_lengths=torch.tensor(lengths))
    tables = ("d_rel_key", "d_rel_value", "d_rel_bias", "d_rel_p2c")
    sums = dict.fromkeys(tables, torch.zeros(()))
    for number, length in enumerate(lengths):
        own = {name: getattr(inputs, name)[number : number + 1] for name in ("query", "key", "value", "d_out", "d_lse")}
        own |= {name: own[name][:, :, :length] for name in ("key", "value")}
        alone = forward_backward(attend, inputs._replace(**own))
        for name, result in alone.items():
            if name in tables:
                sums[name] = sums[name] + result
            elif name in ("d_key", "d_value"):
                assert_same(name, together[name][number : number + 1, :, :length], result)
                assert not together[name][number, :, length:].any(), name
            else:
                assert_same(name, together[name][number : number + 1], result)
    for name, expected in sums.items():
        assert_same(name, together[name], expected)


@pytest.mark.parametrize("batch", [1, 7, 300])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 17])
def test_short_sequences(length: int, batch: int) -> None:
    inputs = make_inputs(batch, 2, length, length, 4, num_rows=2 * length - 1, **FURTHER_TABLES, dtype=torch.float64, seed=length)
    results, expected = results_of("blockwise", inputs), by_hand(inputs)
    for name, result in results.items():
        assert_same(name, result, expected[name])


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("num_keys", [5, 15, 17, 33, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_kept_probabilities(dtype: torch.dtype, num_keys: int, dropout_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those that the backward computes without, bit for bit."""
    inputs = make_inputs(3, 4, 29, num_keys, 64, num_rows=21, key_heads=2, **FURTHER_TABLES, dtype=dtype, seed=3)
    arguments: dict[str, Any] = {"window_size": (17, 30), "key_lengths": torch.tensor([num_keys, 3, 0]), "dropout_p": dropout_p}
    kept: list[bool] = []
    backward = blockwise.backward

    def noticed(*given: Any) -> Any:
        kept.append(given[-1] is not None)
        return backward(*given)

    monkeypatch.setattr(blockwise, "backward", noticed)
    results = []
    for keeps in (True, False):
        if not keeps:
            monkeypatch.setattr(blockwise, "keeps_probs", lambda *_: False)
        results.append(results_of("blockwise", inputs, enable_gqa=True, **arguments))
    assert kept == [True, False]
    for name, result in results[0].items():
        assert torch.equal(result, results[1][name]), name


def test_what_is_kept() -> None:
    """No more than query, key, value and out take, and nothing where nobody differentiates."""
    for length, width, keeps in ((64, 32, True), (128, 32, True), (129, 32, False), (4096, 64, False)):
        query = torch.zeros(1, 1, 2, width)
        key = torch.zeros(1, 1, length, width)
        assert blockwise.keeps_probs(*resolve(Arguments.of(query, key, key))) == keeps
    query = torch.zeros(1, 1, 4, 8)
    operator = torch.ops.triton_relattn.attention_forward.default
    tensors, spec = resolve(Arguments.of(query, query, query))
    for keeps, shape in ((True, (1, 1, 4, 4)), (False, (0,))):
        assert operator(*tensors, *spec, "blockwise", keeps)[3].shape == shape


def test_results_do_not_depend_on_how_a_call_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks and panels, the last of which have fewer queries, against one."""
    inputs = make_inputs(2, 4, 47, 53, 8, num_rows=33, key_heads=2, **FURTHER_TABLES, dtype=torch.float64, seed=4)
    arguments: dict[str, Any] = {"enable_gqa": True, "window_size": (-1, 20), "key_lengths": torch.tensor([53, 31])}
    expected = results_of("blockwise", inputs, **arguments)
    for queries, elements, panel_rows in ((16, 1, 4), (5, 1, 1), (47, 1, 9), (16, 1 << 10, 16), (128, 1 << 12, 20)):
        cut_blocks(monkeypatch, queries, elements, panel_rows)
        for name, result in results_of("blockwise", inputs, **arguments).items():
            assert_same(name, result, expected[name])


@pytest.mark.parametrize("table", [True, False])
def test_memory_is_given_back_at_once(table: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls, and blocks that are done with their frames and bands, are in no cycle that would wait for the garbage collector."""
    cut_blocks(monkeypatch, 16, 1, 4)
    kinds = (partition.Call, partition.Block, partition.Frame, partition.Band)
    alive: dict[Any, list[weakref.ref[Any]]] = {kind: [] for kind in kinds}
    most = dict.fromkeys(kinds, 0)

    def watched(self: Any, *arguments: Any, make: Any) -> None:
        alive[type(self)].append(weakref.ref(self))
        most[type(self)] = max(most[type(self)], sum(each() is not None for each in alive[type(self)]))
        make(self, *arguments)

    for kind in kinds:
        monkeypatch.setattr(kind, "__init__", functools.partialmethod(watched, make=kind.__init__))
    inputs = make_inputs(1, 4, 100, 100, 8, num_rows=199 if table else None, rel_p2c=table, dtype=torch.float32, seed=0)
    gc.disable()
    try:
        forward_backward(attend, inputs, is_causal=True)
    finally:
        gc.enable()
    assert len(alive[partition.Block]) > 20 and most[partition.Call] == 1 and most[partition.Block] <= 2
    # Those of two blocks: with rel_p2c, a block has a frame and a band for each of three ranges of keys beside its own.
    assert most[partition.Frame] <= (8 if table else 2) and most[partition.Band] <= (8 if table else 0)
    assert not any(each() is not None for each in itertools.chain(*alive.values()))


def test_memory_by_names_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks at other places of a sequence take the same memory: there are as many names for four times the length."""
    cut_blocks(monkeypatch, 16, 1, 4)
    names: set[str] = set()
    get = partition.Buffers.__call__

    def watched(self: partition.Buffers, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        names.add(name)
        return get(self, name, shape)

    monkeypatch.setattr(partition.Buffers, "__call__", watched)
    counts = []
    for length in (100, 400):
        names.clear()
        inputs = make_inputs(1, 2, length, length, 8, num_rows=25, **FURTHER_TABLES, dtype=torch.float32, seed=0)
        forward_backward(attend, inputs)
        counts.append(len(names))
    assert 0 < counts[0] == counts[1], sorted(names)


def test_blocks_of_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of a block grow with the threads only as far as the call's tensors and their gradients do."""
    monkeypatch.setattr(partition, "ELEMENTS_PER_THREAD", 1 << 14)
    tensors, spec = resolve(Arguments.of(*(torch.randn(2, 4, 300, 8) for _ in range(3))))
    largest = []
    for threads in (1, 2, 4, 64):
        monkeypatch.setattr(partition, "threads_of", lambda device, threads=threads: threads)
        largest.append(max(block.scores.numel() for block in Call(tensors, spec).blocks()))
    of_tensors = 2 * 4 * tensors.query.numel()
    assert largest[0] < largest[1] <= largest[2] <= largest[3] <= max(of_tensors, 8 * partition.BLOCK_QUERIES * 300), largest
