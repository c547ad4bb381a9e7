"""Dropout: what is dropped is a function of the seed and of where a probability stands, the same in every implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.oracle import assert_same, attend, by_hand, results_of
from tests.tolerance import tolerance_of, within
from triton_relattn._core.dropout import ROUNDS, keep_mask, largest_dropped
from triton_relattn.testing import Inputs, dropout_mask, make_inputs

IMPLEMENTATIONS = ("blockwise", "reference")
WORD = 0xFFFFFFFF


def philox(counter: tuple[int, ...], key: tuple[int, int], rounds: int) -> tuple[int, ...]:
    """Philox4x32 in Python's integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        low, high = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & WORD, (low >> 32) ^ c3 ^ k1, low & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


PUBLISHED = {
    # counter, key and result of the test vectors of Random123, 7 and 10 rounds
    ((0,) * 4, (0, 0), 7): (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48),
    ((0,) * 4, (0, 0), 10): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ((WORD,) * 4, (WORD, WORD), 7): (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662),
    ((WORD,) * 4, (WORD, WORD), 10): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
}


@pytest.mark.parametrize("case", PUBLISHED, ids=str)
def test_philox_of_this_test_is_the_published_one(case: Any) -> None:
    assert philox(*case) == PUBLISHED[case]


def operator_inputs(num_queries: int = 37, num_keys: int = 41, dtype: torch.dtype = torch.float64) -> Inputs:
    return make_inputs(
        2, 4, num_queries, num_keys, 8, num_rows=15, key_heads=2, rel_width=4, rel_value=True, rel_bias=True, dtype=dtype, seed=3
    )


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
@pytest.mark.parametrize("start", [0, 1, 6])
def test_words_are_philox(seed: int, start: int) -> None:
    """Counter (key // 4, query, head, sequence), word key % 4; the key is the seed, low word first."""
    dropout_p, keys = 0.3, slice(start, 23)
    indices = (
        torch.tensor([0, 3, 2**31 - 1]).view(-1, 1, 1, 1),
        torch.tensor([0, 7]).view(-1, 1, 1),
        torch.tensor([[5], [70000]]),
    )
    kept = keep_mask(torch.tensor([seed]), dropout_p, *indices, keys)
    assert kept.shape == (3, 2, 2, 23 - start)
    for b, sequence in enumerate((0, 3, 2**31 - 1)):
        for h, head in enumerate((0, 7)):
            for i, query in enumerate((5, 70000)):
                for n, j in enumerate(range(start, 23)):
                    word = philox((j // 4, query, head, sequence), (seed & WORD, (seed >> 32) & WORD), ROUNDS)[j % 4]
                    assert bool(kept[b, h, i, n]) == (word >= round(dropout_p * 2**32)), (sequence, head, query, j)


def test_thresholds() -> None:
    """The smallest positive probability drops one word, 1 drops all."""
    assert largest_dropped(1.0) == WORD and largest_dropped(1e-30) == 0 and largest_dropped(0.5) == 2**31 - 1


@pytest.mark.parametrize("dropout_p", [0.05, 0.5, 0.9])
def test_rate(dropout_p: float) -> None:
    """In all, and along each axis."""
    torch.manual_seed(0)
    dropped = (~dropout_mask(3, 4, 200, 200, dropout_p)).double()
    assert abs(float(dropped.mean()) - dropout_p) < 0.01
    assert float((dropped.mean((2, 3)) - dropout_p).abs().max()) < 0.01
    for dim in range(4):
        others = [each for each in range(4) if each != dim]
        samples = dropped.numel() / dropped.shape[dim]
        spread = (dropout_p * (1 - dropout_p) / samples) ** 0.5
        assert float((dropped.mean(others) - dropout_p).abs().max()) < 5 * spread, dim


@pytest.mark.parametrize("dim", range(4))
def test_neighbours_are_independent(dim: int) -> None:
    """Half of all neighbours along each axis differ."""
    torch.manual_seed(1)
    mask = dropout_mask(3, 4, 200, 200, 0.5)
    differ = (mask.narrow(dim, 1, mask.shape[dim] - 1) != mask.narrow(dim, 0, mask.shape[dim] - 1)).double()
    assert abs(float(differ.mean()) - 0.5) < 5 * 0.5 / differ.numel() ** 0.5


@pytest.mark.parametrize("dropout_p", [0.2, 0.7])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_mask_is_what_is_kept(implementation: str, dropout_p: float, block_size: None) -> None:
    """Values that are the identity show what is left of the probabilities: dropout_mask, after the same torch.manual_seed."""
    inputs = operator_inputs()
    value = torch.eye(41, dtype=torch.float64).expand(2, 2, 41, 41)
    arguments: dict[str, Any] = {"enable_gqa": True, "is_causal": True, "query_offset": 9, "implementation": implementation}
    probs, _ = attend(inputs.query, inputs.key, value, **arguments)
    torch.manual_seed(5)
    keep = dropout_mask(2, 4, 37, 41, dropout_p)
    torch.manual_seed(5)
    dropped, _ = attend(inputs.query, inputs.key, value, **arguments, dropout_p=dropout_p)
    assert_same("probabilities", dropped, probs * keep.double() / (1 - dropout_p))
    assert torch.equal(dropped > 0, keep & (probs > 0))


@pytest.mark.parametrize("dropout_p", [0.2, 0.7])
def test_results_are_the_same_in_every_implementation(dropout_p: float, block_size: None) -> None:
    """Forward and backward, also across blocks; lse is that of the call without dropout."""
    inputs = operator_inputs()
    arguments: dict[str, Any] = {"enable_gqa": True, "window_size": (25, 30), "dropout_p": dropout_p}
    results, expected = (results_of(implementation, inputs, **arguments) for implementation in IMPLEMENTATIONS)
    for name, result in results.items():
        assert_same(name, result, expected[name])
    plain = results_of("blockwise", inputs, **{**arguments, "dropout_p": 0.0})
    assert torch.equal(results["lse"], plain["lse"]) and not torch.equal(results["out"], plain["out"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_dropout_leaves_the_generator_alone(implementation: str) -> None:
    """dropout_p = 0 is the call without it, and draws nothing; with dropout each call draws anew."""
    inputs = operator_inputs()
    state = torch.get_rng_state()
    plain, _ = attend(*inputs[:4], **inputs.terms(), enable_gqa=True, implementation=implementation)
    none, _ = attend(*inputs[:4], **inputs.terms(), enable_gqa=True, implementation=implementation, dropout_p=0.0)
    assert torch.equal(plain, none) and torch.equal(state, torch.get_rng_state())
    first, second = (
        attend(*inputs[:4], **inputs.terms(), enable_gqa=True, implementation=implementation, dropout_p=0.1)[0] for _ in range(2)
    )
    assert not torch.equal(state, torch.get_rng_state()) and not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_everything_dropped(implementation: str, dtype: torch.dtype) -> None:
    """out 0; only lse has gradients."""
    inputs = operator_inputs(dtype=dtype)
    results = results_of(implementation, inputs, enable_gqa=True, dropout_p=1.0)
    for name in ("out", "d_value", "d_rel_value"):
        assert not results[name].any(), name
    silent = inputs._replace(d_out=torch.zeros_like(inputs.d_out))
    expected = by_hand(silent, enable_gqa=True)
    for name in ("lse", "d_query", "d_key", "d_rel_query", "d_rel_key", "d_rel_bias"):
        assert results[name].isfinite().all()
        error = float((results[name].double() - expected[name]).norm())
        is_rounded = implementation == "reference" and dtype == torch.float16  # logits, probabilities and their gradients, too
        relative = 20 * torch.finfo(dtype).eps if is_rounded else tolerance_of(results[name].dtype)
        within(name, error, relative * float(expected[name].norm()))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_backward_drops_what_the_forward_dropped(implementation: str) -> None:
    """Also if torch's generator has moved on: out is affine in the values, so that the gradient is its slope."""
    inputs = operator_inputs()
    value = inputs.value.clone().requires_grad_()
    torch.manual_seed(5)
    out, _ = attend(
        inputs.query,
        inputs.key,
        value,
        inputs.rel_key,
        **inputs.terms(),
        enable_gqa=True,
        dropout_p=0.5,
        implementation=implementation,
    )
    torch.manual_seed(6)
    (gradient,) = torch.autograd.grad(out, value, inputs.d_out)
    torch.manual_seed(5)
    without = inputs._replace(value=torch.zeros_like(inputs.value))
    base, _ = attend(*without[:4], **inputs.terms(), enable_gqa=True, dropout_p=0.5, implementation=implementation)
    # out is affine in the values.
    assert_same("loss", ((out - base) * inputs.d_out).sum(), (gradient * inputs.value).sum())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_draws_the_same_again(use_reentrant: bool) -> None:
    """The forward that activation checkpointing repeats drops what the first did."""
    inputs = operator_inputs()
    gradients = []
    for checkpointed in (False, True):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs[:4] if tensor is not None]

        def layer(*tensors: torch.Tensor) -> torch.Tensor:
            return attend(*tensors, **inputs.terms(), enable_gqa=True, dropout_p=0.4)[0]

        torch.manual_seed(5)
        out = checkpoint(layer, *leaves, use_reentrant=use_reentrant) if checkpointed else layer(*leaves)
        torch.manual_seed(6)
        out.backward(inputs.d_out)
        gradients.append([leaf.grad for leaf in leaves])
    for plain, repeated in zip(*gradients, strict=True):
        assert plain is not None and plain.any() and torch.equal(plain, repeated)
