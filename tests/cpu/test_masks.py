"""Which keys a query sees: every kind of mask, alone and combined, in every implementation that runs on a CPU."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from tests.blind import BATCH, BLIND, KEYS, QUERIES
from tests.oracle import assert_same, attend, by_hand, results_of
from tests.tolerance import tolerance_of, within
from triton_relattn._blockwise import attention as blockwise
from triton_relattn._core import validation
from triton_relattn._core.arguments import Arguments
from triton_relattn._reference import resolved_reference
from triton_relattn.testing import Inputs, forward_backward, make_inputs

IMPLEMENTATIONS = ("blockwise", "reference")
HEADS = 2


def all_terms(dtype: torch.dtype, num_queries: int = QUERIES, num_keys: int = KEYS, num_rows: int = 9) -> Inputs:
    return make_inputs(
        BATCH,
        HEADS,
        num_queries,
        num_keys,
        8,
        num_rows=num_rows,
        rel_width=4,
        rel_value=True,
        rel_bias=True,
        rel_p2c=True,
        dtype=dtype,
        seed=4,
    )


def is_of_numbers(arguments: dict[str, Any]) -> bool:
    """Return whether arguments have a mask that is added, which does not stop NaN."""
    return "attn_mask" in arguments and arguments["attn_mask"].dtype != torch.bool


@pytest.mark.parametrize("mask_dtype", [None, torch.float32], ids=["same", "float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_mask_of_finfo_min(implementation: str, dtype: torch.dtype, mask_dtype: torch.dtype | None, block_size: None) -> None:
    """A finite mask hides nothing: a row of finfo.min, against which all logits vanish, is uniform, as softmax has it."""
    mask_dtype = mask_dtype or dtype
    inputs = all_terms(dtype)._replace(rel_query=None, rel_key=None, rel_value=None, rel_bias=None, rel_p2c=None)
    mask = torch.zeros(QUERIES, KEYS, dtype=mask_dtype)
    mask[5] = torch.finfo(mask_dtype).min
    results, expected = results_of(implementation, inputs, attn_mask=mask), by_hand(inputs, attn_mask=mask)
    for name, result in results.items():
        assert_close(name, result, expected[name])
    assert_close("out", results["out"][:, :, 5], inputs.value.double().mean(2))
    assert not results["d_query"][:, :, 5].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float32_mask_of_finfo_min_in_low_precision(dtype: torch.dtype, block_size: None) -> None:
    """A mask may hold numbers that the inputs' dtype has not: still a uniform row, and finite gradients."""
    inputs = all_terms(dtype)._replace(rel_query=None, rel_key=None, rel_value=None, rel_bias=None, rel_p2c=None)
    mask = torch.zeros(QUERIES, KEYS)
    mask[5] = torch.finfo(torch.float32).min
    results, expected = results_of("blockwise", inputs, attn_mask=mask), by_hand(inputs, attn_mask=mask)
    for name, result in results.items():
        assert_close(name, result, expected[name])


def assert_close(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """By tolerance_of, relative to the norm, or element by element for numbers too large for one."""
    if float(expected.abs().max()) > 1e30:
        within(name, (actual.double() - expected).abs(), tolerance_of(actual.dtype) * expected.abs())
    else:
        error = float((actual.double() - expected).norm())
        within(name, error, tolerance_of(actual.dtype) * float(expected.norm()))


WINDOWS = ((-1, -1), (0, 0), (3, -1), (-1, 2), (4, 1))


@pytest.mark.parametrize("query_offset", [0, 5, -4, torch.tensor([3, -6])], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_seen(implementation: str, is_causal: bool, query_offset: int | torch.Tensor, block_size: None) -> None:
    """Values that are the identity show the probabilities: positive for exactly the keys that no mask hides."""
    query, key = make_inputs(BATCH, HEADS, QUERIES, KEYS, 4, num_rows=None, dtype=torch.float64, seed=0)[:2]
    identity = torch.eye(KEYS, dtype=torch.float64).expand(BATCH, HEADS, KEYS, KEYS)
    lengths = torch.tensor([KEYS, 6])
    mask = torch.ones(HEADS, 1, KEYS, dtype=torch.bool)
    mask[1, 0, 3] = False
    for window_size in WINDOWS:
        probs, _ = attend(
            query,
            key,
            identity,
            implementation=implementation,
            is_causal=is_causal,
            query_offset=query_offset,
            window_size=window_size,
            key_lengths=lengths,
            attn_mask=mask,
        )
        for b, h, i, j in itertools.product(range(BATCH), range(HEADS), range(QUERIES), range(KEYS)):
            r = j - i - (int(query_offset[b]) if isinstance(query_offset, torch.Tensor) else query_offset)
            seen = j < lengths[b] and not (is_causal and r > 0) and not (h == 1 and j == 3)
            seen = seen and (window_size[0] < 0 or r >= -window_size[0]) and (window_size[1] < 0 or r <= window_size[1])
            assert bool(probs[b, h, i, j] > 0) == bool(seen), (b, h, i, j, window_size)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_offsets_of_the_batch_entries(implementation: str) -> None:
    """query_offset (B,) is each batch entry with its own int."""
    inputs = all_terms(torch.float64)
    offsets = torch.tensor([4, -7], dtype=torch.int32)
    results = results_of(implementation, inputs, query_offset=offsets, is_causal=True, window_size=(9, 9))
    for b in range(BATCH):
        single = inputs._replace(
            **{name: getattr(inputs, name)[b : b + 1] for name in ("query", "key", "value", "rel_query", "d_out", "d_lse")}
        )
        expected = results_of(implementation, single, query_offset=int(offsets[b]), is_causal=True, window_size=(9, 9))
        for name in ("out", "lse", "d_query", "d_key", "d_value", "d_rel_query"):
            assert_same(name, results[name][b : b + 1], expected[name])
        for name in ("d_rel_key", "d_rel_value", "d_rel_bias", "d_rel_p2c"):
            results[name] = results[name] - expected[name]
    for name in ("d_rel_key", "d_rel_value", "d_rel_bias", "d_rel_p2c"):
        assert_same(name, results[name], torch.zeros_like(results[name]))


MASKS_THAT_BROADCAST = ((1, 1, 1, 1), (1, 1, 1, KEYS), (QUERIES, 1), (BATCH, 1, 1, KEYS), (HEADS, QUERIES, KEYS), ())


@pytest.mark.parametrize("shape", MASKS_THAT_BROADCAST, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_masks_broadcast(implementation: str, shape: tuple[int, ...], block_size: None) -> None:
    """A mask that broadcasts is that mask expanded."""
    inputs = all_terms(torch.float64)
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    full = mask.expand(BATCH, HEADS, QUERIES, KEYS).contiguous()
    for one, other in ((mask, full), (mask > 0, full > 0)):
        results, expected = results_of(implementation, inputs, attn_mask=one), by_hand(inputs, attn_mask=other)
        for name, result in results.items():
            assert_same(name, result, expected[name])


SOFTCAP_CASES = ((3.0, 1.0), (3.0, -4.0), (50.0, 7.0), (0.5, 100.0))


@pytest.mark.parametrize(("softcap", "logit"), SOFTCAP_CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_softcap_of_one_key(implementation: str, softcap: float, logit: float) -> None:
    """lse of a single key is c tanh(z / c) + mask, its derivative 1 - tanh^2; the mask is not limited."""
    number = lambda value: torch.full((1, 1, 1, 1), value, dtype=torch.float64)  # noqa: E731
    zero = torch.zeros(1, 1, 1, dtype=torch.float64)
    inputs = Inputs(number(logit / 4), number(2.0), number(1.0), None, number(0.0), zero + 1, rel_bias=zero[0, 0] + logit / 2)
    results = results_of(implementation, inputs, scale=1.0, softcap=softcap, attn_mask=number(11.0))
    slope = 1 - math.tanh(logit / softcap) ** 2
    expected = {"lse": softcap * math.tanh(logit / softcap) + 11, "d_query": 2 * slope, "d_key": logit / 4 * slope}
    for name, value in {**expected, "d_rel_bias": slope}.items():
        assert_same(name, results[name].flatten(), torch.tensor([value], dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "hidden"),
    [
        ({"attn_mask": torch.arange(KEYS) != 4}, slice(0, QUERIES)),
        ({"is_causal": True}, slice(0, 4)),
        ({"window_size": (2, -1)}, slice(7, QUERIES)),
    ],
    ids=["mask", "causal", "window"],
)
def test_nan_in_a_key_stays_with_those_that_see_it(options: dict[str, Any], hidden: slice, block_size: None) -> None:
    """Forward, NaN in key 4 reaches no query that mask or window hide it from."""
    inputs = all_terms(torch.float32)
    key = inputs.key.clone()
    key[:, :, 4] = math.nan
    results = results_of("blockwise", inputs._replace(key=key), **options)
    expected = results_of("blockwise", inputs, **options)
    for name in ("out", "lse"):
        assert torch.equal(results[name][:, :, hidden], expected[name][:, :, hidden]), name
    shown = [query for query in range(QUERIES) if query not in range(QUERIES)[hidden]]
    assert results["lse"][:, :, shown].isnan().all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", [case for case, (arguments, _) in BLIND.items() if not is_of_numbers(arguments)])
def test_nan_in_queries_that_see_nothing(case: str, implementation: str, block_size: None) -> None:
    """Their rows are out 0 and lse -inf, and only gradients of what the query itself is multiplied with get NaN."""
    arguments, blind = BLIND[case]
    inputs = all_terms(torch.float64)
    spoilt = {name: getattr(inputs, name).masked_fill(blind[:, None, :, None], math.nan) for name in ("query", "rel_query")}
    results = results_of(implementation, inputs._replace(**spoilt), **arguments)
    expected = results_of(implementation, inputs, **arguments)
    for name, result in results.items():
        if name not in ("d_key", "d_rel_key"):
            assert torch.equal(result, expected[name]), name


def test_nan_gradient_of_an_lse_that_is_infinite(block_size: None) -> None:
    """A NaN gradient of an lse of -inf is ignored: merging partial results may give one for a query that sees nothing."""
    inputs = make_inputs(1, 2, 9, 9, 8, num_rows=5, dtype=torch.float64, seed=0)
    arguments: dict[str, Any] = {"is_causal": True, "query_offset": -3, "implementation": "blockwise"}
    expected = forward_backward(attend, inputs, **arguments)
    d_lse = inputs.d_lse.clone()
    d_lse[:, :, :3] = math.nan
    for name, result in forward_backward(attend, inputs._replace(d_lse=d_lse), **arguments).items():
        assert torch.equal(result, expected[name]), name


@pytest.mark.parametrize("num_rows", [None, 9])
@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_lengths_beyond_the_keys_are_limited(implementation: str, num_rows: int | None, block_size: None) -> None:
    """Elsewhere than on a CPU key_lengths are not checked: they are limited to [0, Nk]."""
    inputs = make_inputs(2, 1, 40, 21, 8, num_rows=num_rows, dtype=torch.float64, seed=4)
    tensors, spec = validation.resolve(Arguments.of(inputs.query, inputs.key, inputs.value, inputs.rel_key))

    def results(*lengths: int) -> list[torch.Tensor | None]:
        limited = tensors._replace(key_lengths=torch.tensor(lengths))
        if implementation == "reference":
            return list(resolved_reference(limited, spec))
        out, lse = blockwise.forward(limited, spec)
        return [out, lse, *blockwise.backward(inputs.d_out, None, limited, spec)]

    for result, expected in zip(results(1000, -7), results(21, 0), strict=True):
        assert (result is None) == (expected is None)
        assert result is None or expected is None or torch.equal(result, expected)
