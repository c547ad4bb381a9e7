"""What only kernels of attention on a grid promise, in Triton's interpreter: memory accesses, precision, widths."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from tests.conftest import cut_tiles
from tests.grids import Case, Tensors, dense_logits, in_float64, results, tensors
from tests.interpreter.guard import Order, guarded, in_poisoned_storage, launches_seen_by, programs_in_order
from tests.tolerance import assert_at_most, assert_gradients_close_fp32
from triton_relattn._core.dropout import whole_origins

CASES = {
    "a window": Case((14, 14)),
    "odd sides": Case((5, 7), width=21, batch=3),
    "class tokens and strips": Case((2, 70), prefix=9, heads=1),
    "more before the grid than a tile": Case((3, 21), prefix=70, heads=1),
    "pooled keys": Case((8, 10), (4, 5), prefix=1, batch=2),
    "dropout": Case((5, 7), prefix=1, batch=2, dropout_p=0.4),
    "wide heads": Case((4, 5), width=80, value_width=130),
}
ORDERS: tuple[Order, ...] = ("reversed", "shuffled")


@pytest.mark.parametrize(("name", "order"), list(zip(list(CASES)[1:], itertools.cycle(ORDERS), strict=False)))
@pytest.mark.parametrize("tile", [None, (16, 16)], ids=["selected", "small"])
def test_guarded(name: str, order: Order, tile: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel accesses memory outside of tensors, or writes twice; results have the same bits in any order, with NaN around
    inputs."""
    cut_tiles(monkeypatch, tile and dict.fromkeys(("forward", "dq", "dkv"), tile))
    case, choose = CASES[name], random.Random(len(name))
    given = tensors(case)
    poisoned = tuple(in_poisoned_storage(tensor, choose) for tensor in given)
    with guarded() as launches, programs_in_order(order):
        found = results("triton", case, poisoned)
    contiguous = results("triton", case, tuple(tensor.contiguous() for tensor in given))
    assert [launch.kernel for launch in launches] == ["grid_forward_kernel", "grid_dq_kernel", "grid_dkv_kernel"]
    assert all(launch.loads > 0 and launch.stores > 0 for launch in launches)
    for actual, again, right in zip(found, results("triton", case, poisoned), contiguous, strict=True):
        assert right.isfinite().all() and right.any() and torch.equal(actual, again)
        assert_gradients_close_fp32(name, actual, right, contiguous)  # the last bits of torch's products depend on strides


def dense_backward(case: Case, given: Tensors) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """P, dP, both tables, and logits that can be differentiated by these, in float64."""
    query, key, value, *tables, d_out = in_float64(given)
    leaves = [table.requires_grad_() for table in tables]
    logits = dense_logits(case, query, key, *leaves)
    return logits.detach().softmax(-1), d_out @ value.mT, leaves, logits


@pytest.mark.parametrize("name", ["a window", "class tokens and strips", "pooled keys"])
@pytest.mark.parametrize("sharp", [1, 8])
def test_table_gradients_in_float16(name: str, sharp: int) -> None:
    """At most 1.5 times the error of dS rounded once and summed exactly, which requires an exact delta."""
    case = CASES[name]
    given = tensors(case, torch.float16, sharp)
    probs, d_probs, leaves, logits = dense_backward(case, given)
    d_scores = probs * (d_probs - (probs * d_probs).sum(-1, keepdim=True))
    golden = torch.autograd.grad(logits, leaves, d_scores, retain_graph=True)
    rounded = torch.autograd.grad(logits, leaves, d_scores.half().double())
    for exact, inexact, actual in zip(golden, rounded, results("triton", case, given)[4:], strict=True):
        unavoidable = (inexact - exact).abs().max() + (exact.half().double() - exact).abs().max()
        assert_at_most("table", (actual.double() - exact).abs().max(), 1.5 * unavoidable)


def test_delta_is_exact() -> None:
    """The dkv kernel gets sums of P dP in float32's precision, which sums with the rounded out do not have."""
    case, stored = CASES["class tokens and strips"], []

    def note(name: str, arguments: dict[str, Any]) -> None:
        if name == "grid_dkv":
            stored.append(arguments["per_query"].deltas[0].double())

    given = tensors(case, torch.float16)
    with launches_seen_by(note):
        out, *_ = results("triton", case, given)
    probs, d_probs, _, _ = dense_backward(case, given)
    delta = (probs * d_probs).sum(-1)
    # The relative error of P = exp(logit - lse) is that of the rounding of both: two units of float32 at the magnitude of the
    # summands; that of lse is the mean of the logits' errors; dP, whose products are rounded once here, has two units.
    query, key, value, *tables, d_out = (tensor.abs() for tensor in in_float64(given))
    logits, largest_d_probs = dense_logits(case, query, key, *tables), d_out @ value.mT
    units = 1 + logits + (probs * logits).sum(-1, keepdim=True)
    precision = 2 * torch.finfo(torch.float32).eps * (probs * (units * d_probs.abs() + largest_d_probs)).sum(-1)
    assert_at_most("delta", (stored[0] - delta).abs(), precision)
    rounded = (out.double() * given[5].double()).sum(-1)
    assert ((rounded - delta).abs() > 4 * precision).double().mean() > 0.5


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_the_operator(dropout_p: float) -> None:
    """The registered operator passes torch.library.opcheck."""
    query, key, value, *_ = tensors(CASES["pooled keys"]._replace(heads=1))
    leaves = [query, key, value, torch.randn(8, 4, 16), torch.randn(10, 5, 16)]
    dropout = (torch.tensor([5]), whole_origins(query.shape[0], 1, query.device)) if dropout_p else (None, None)
    arguments = (*(leaf.requires_grad_() for leaf in leaves), *dropout, 0.3, dropout_p, "triton", False)
    torch.library.opcheck(torch.ops.triton_relattn.grid_attention_forward.default, arguments)


def test_too_wide_heads_raise() -> None:
    case = Case((2, 3), width=257)
    with pytest.raises(NotImplementedError, match="head widths up to 256, got 257 "):
        results("triton", case, tensors(case))
