"""Terms rounded to float16, as the kernels have those of bfloat16 inputs (selection.rounds_terms), by the error rule.

The kernels' bfloat16 arithmetic in torch: products of rounded operands summed in float32, what goes into a product rounded
before. Triton's interpreter would not tell: it computes bfloat16 otherwise.
"""

from __future__ import annotations

import pytest
import torch

from triton_relattn import RelativePositions
from triton_relattn._reference import reference_attention
from triton_relattn.kernels.config import selection
from triton_relattn.testing import (
    Inputs,
    assert_table_gradient,
    assert_within_budget,
    dense_gradients,
    forward_backward,
    make_inputs,
)

LENGTH = 192


def row_of_pairs() -> torch.Tensor:
    i = torch.arange(LENGTH)
    return RelativePositions.centred(2 * LENGTH - 1).rows(i - i[:, None])[0]


def terms_of(inputs: Inputs) -> torch.Tensor:
    """q_i . E[j - i], and the bias in the unit of scores, of all pairs, float32, (B, H, N, N)."""
    products = inputs.query.new_zeros(*inputs.query.shape[:3], 2 * LENGTH - 1, dtype=torch.float32)
    if inputs.rel_key is not None:
        products = products + inputs.query.float() @ inputs.rel_key.float().mT
    if inputs.rel_bias is not None:
        products = products + inputs.rel_bias.float() * inputs.query.shape[-1] ** 0.5
    return products.gather(-1, row_of_pairs().expand(*products.shape[:2], -1, -1))


def kernel_arithmetic(inputs: Inputs, rounded: bool = True) -> dict[str, torch.Tensor]:
    """out and gradients, with terms rounded to float16, beyond its range to its largest number; or not rounded."""
    query, key, value, d_out = (tensor.float() for tensor in (*inputs[:3], inputs.d_out))
    dtype, scale = inputs.query.dtype, inputs.query.shape[-1] ** -0.5
    terms = terms_of(inputs)
    if rounded:
        terms = terms.clamp(-65504, 65504).half().float()
    logits = scale * (query @ key.mT + terms)
    lse = logits.logsumexp(-1, keepdim=True)
    probs = (logits - lse).exp()
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    out = weights.to(dtype).float() @ value / weights.sum(-1, keepdim=True)
    d_probs = d_out @ value.mT
    d_scores = probs * (d_probs - (probs * d_probs).sum(-1, keepdim=True) + inputs.d_lse.float()[..., None])

    def by_row(d_scores: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*query.shape[:3], 2 * LENGTH - 1).scatter_add_(-1, row_of_pairs().expand_as(d_scores), d_scores)

    results = {"out": out, "d_value": probs.to(dtype).float().mT @ d_out}
    if inputs.rel_bias is not None:
        results["d_rel_bias"] = by_row(d_scores).sum((0, 1, 2))  # before rounding
    d_scores = d_scores.to(dtype).float()
    d_query = d_scores @ key
    if inputs.rel_key is not None:
        d_query += by_row(d_scores) @ inputs.rel_key.float()
        results["d_rel_key"] = scale * (by_row(d_scores).mT @ query).sum((0, 1))
    results |= {"d_query": scale * d_query, "d_key": scale * d_scores.mT @ query}
    return {name: result.to(dtype) for name, result in results.items()}


def with_terms_up_to(largest: float, dtype: torch.dtype, *, rel_bias: bool = False) -> Inputs:
    inputs = make_inputs(2, 2, LENGTH, LENGTH, 64, num_rows=2 * LENGTH - 1, rel_bias=rel_bias, dtype=dtype, seed=3)
    assert inputs.rel_key is not None
    return inputs._replace(rel_key=(inputs.rel_key * (largest / terms_of(inputs).abs().max())).to(dtype))


def check(inputs: Inputs) -> None:
    """The error rule of kernels: out within twice the error of plain torch, gradients within three times."""
    golden, plain = dense_gradients(inputs)._asdict(), forward_backward(reference_attention, inputs)
    for name, result in kernel_arithmetic(inputs).items():
        factor = 2 if name == "out" else 3
        assert_within_budget(name, result, golden[name], plain[name], factor=factor, exact_reference=True)
        if name == "d_rel_key":
            assert_table_gradient(name, result, inputs)


@pytest.mark.parametrize("largest", [5, 40, 340])
def test_bfloat16_obeys_the_error_rule(largest: float) -> None:
    check(with_terms_up_to(largest, torch.bfloat16))


def test_a_bias_does_not_change_that() -> None:
    check(with_terms_up_to(40, torch.bfloat16, rel_bias=True))


@pytest.mark.parametrize("largest", [1, 10, 200])
def test_a_bias_alone_obeys_it_too(largest: float) -> None:
    """As in T5, up to 10, and as large as ALiBi's become; in the unit of scores it is eight times that."""
    inputs = make_inputs(
        2, 2, LENGTH, LENGTH, 64, num_rows=2 * LENGTH - 1, rel_key=False, rel_bias=True, dtype=torch.bfloat16, seed=3
    )
    assert inputs.rel_bias is not None
    check(inputs._replace(rel_bias=(inputs.rel_bias * (largest / inputs.rel_bias.abs().max())).to(torch.bfloat16)))


def test_float16_does_not() -> None:
    """Why rounds_terms leaves its terms in float32: out and all gradients would be off by a quarter more, or worse."""
    inputs = with_terms_up_to(40, torch.float16)
    golden = dense_gradients(inputs)._asdict()
    plain = kernel_arithmetic(inputs, rounded=False)
    for name, result in kernel_arithmetic(inputs).items():
        errors = [float((each.double() - golden[name]).norm()) for each in (result, plain[name])]
        assert errors[0] > 1.25 * errors[1], (name, errors)
    assert selection.rounds_terms("sm_90", torch.bfloat16)
    assert not any(selection.rounds_terms("sm_90", dtype) for dtype in (torch.float16, torch.float32))


def test_beyond_float16_terms_are_its_largest_number() -> None:
    """All is finite, and queries without such terms are as right as in plain torch."""
    inputs = with_terms_up_to(1e5, torch.bfloat16)
    results = kernel_arithmetic(inputs)
    assert all(bool(result.isfinite().all()) for result in results.values())
    within = (terms_of(inputs).abs() <= 65504).all(-1)
    assert within.any() and not within.all()
    golden, plain = dense_gradients(inputs).out, reference_attention(*inputs[:4])[0]
    assert_within_budget("out", results["out"][within], golden[within], plain[within], factor=2, exact_reference=True)


def test_unknown_architectures(caplog: pytest.LogCaptureFixture) -> None:
    """Small tiles that fit anywhere, and a line in the log; never another GPU's configurations by accident."""
    for arch in ("sm_75", "sm_130", "gfx1201"):
        caplog.clear()
        for kernel in selection.KERNELS:
            for width in (64, 128, 256):
                config = selection.select(kernel, arch, torch.bfloat16, width, "full")
                assert max(config.block_m, config.block_n) <= 64 and config.rotation == "gather"
                assert config.why_invalid(arch, True, kernel) is None
        assert [record.getMessage() for record in caplog.records] == [
            f"the kernels have no configurations for {arch}; small tiles are used, which are slow"
        ]


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942", "interpreter"])
def test_who_rotates_how(arch: str) -> None:
    """Rotations in registers are for where accumulators lie as registers.py says."""
    found: dict[torch.dtype, set[str]] = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for kernel in ("forward", "dq", "dkv"):  # the others have nothing to rotate by exchanges
            for width in (64, 128):
                for coverage in ("full", "clamp", "zero"):
                    config = selection.select(kernel, arch, dtype, width, coverage)
                    found.setdefault(dtype, set()).add(config.rotation)
    if arch in ("sm_100", "gfx942", "interpreter"):
        assert found == {dtype: {"gather"} for dtype in found}
    else:
        # Shared memory of 100 KB makes tiles of width 128 small, and not all of them rotate so.
        of_16_bits = {"registers"} if arch in ("sm_80", "sm_90") else {"gather", "registers"}
        assert found == {torch.bfloat16: of_16_bits, torch.float16: of_16_bits, torch.float32: {"gather"}}
