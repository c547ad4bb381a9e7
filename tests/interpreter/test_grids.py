"""Attention on a grid by its kernels, in Triton's interpreter: error rules, tiles, memory accesses, dropout, launches."""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

import pytest
import torch

from tests.interpreter.guard import Order, guarded, in_poisoned_storage, programs_in_order
from tests.interpreter.launch import launches_seen_by
from tests.tolerance import assert_at_most, assert_gradients_close_fp32, assert_near, dtype_tolerance
from triton_relattn import append_decomposed_positions, decomposed_relative_attention
from triton_relattn._core.dropout import whole_origins
from triton_relattn._core.grids import GridTensors
from triton_relattn.kernels.config.selection import Tables
from triton_relattn.kernels.config.tile_config import TileConfig
from triton_relattn.kernels.grid.backward import backward
from triton_relattn.kernels.grid.forward import forward
from triton_relattn.testing import assert_within_budget

call: Any = decomposed_relative_attention
append: Any = append_decomposed_positions
NAMES = ("out", "query", "key", "value", "rel_pos_h", "rel_pos_w")
Tensors = tuple[torch.Tensor, ...]


class Case(NamedTuple):
    """Sizes of a call, and its other arguments."""

    grid: tuple[int, int]
    key_grid: tuple[int, int] | None = None
    prefix: int = 0
    width: int = 16
    value_width: int = 12
    batch: int = 1
    others: dict[str, Any] = {}  # noqa: RUF012

    @property
    def keys(self) -> tuple[int, int]:
        return self.key_grid or self.grid

    @property
    def arguments(self) -> dict[str, Any]:
        return {"grid": self.grid, "key_grid": self.key_grid, **self.others}


CASES = {
    "a window": Case((14, 14)),
    "odd sides": Case((5, 7), width=21, batch=3),
    "rows as wide as a tile": Case((3, 64)),
    "several strips": Case((2, 70)),
    "more columns than heads can be wide": Case((1, 270), width=8),
    "one column": Case((50, 1)),
    "one token": Case((1, 1)),
    "class token": Case((5, 7), prefix=1),
    "more before the grid than a tile": Case((4, 20), prefix=70),
    "class tokens and strips": Case((2, 70), prefix=9),
    "pooled keys": Case((8, 10), (4, 5), prefix=1, batch=2),
    "pooled queries": Case((2, 3), (9, 8)),
    "wide heads": Case((4, 5), width=80, value_width=130),
    "scale": Case((5, 7), prefix=2, others={"scale": 0.7}),
    "negative scale": Case((5, 7), prefix=2, others={"scale": -0.3}),
    "no products with keys": Case((5, 7), others={"scale": 0.0}),
    "dropout": Case((5, 7), prefix=1, batch=2, others={"dropout_p": 0.4}),
    "everything is dropped": Case((2, 3), others={"dropout_p": 1.0}),
}
TILES = {
    "selected": None,
    "square": TileConfig(16, 16, 4, 1),
    "many keys": TileConfig(16, 128, 4, 1),
}


def tensors(case: Case, dtype: torch.dtype = torch.float32, heads: int = 2, sharp: int = 1) -> Tensors:
    """Query, key, value, both tables, and d_out; the larger ``sharp``, the fewer keys get all of the attention."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    queries, keys = (case.prefix + height * width for height, width in (case.grid, case.keys))
    qkv = [made(case.batch, length, heads, width) for length, width in ((queries, case.width), (keys, case.width))]
    query, key = (tensor.transpose(1, 2) for tensor in qkv)
    value, d_out = (made(case.batch, heads, length, case.value_width) for length in (keys, queries))
    if sharp > 1:
        value, d_out = value + 1, d_out + 1
    tables = (made(2 * max(sides) - 1, case.width) for sides in zip(case.grid, case.keys, strict=True))
    return sharp * query, key, value, *tables, d_out


def results(case: Case, given: Tensors, implementation: str = "triton") -> Tensors:
    """Output and all gradients."""
    torch.manual_seed(3)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in given[:5]]
    out = call(*leaves, **case.arguments, implementation=implementation)
    return out.detach(), *torch.autograd.grad(out, leaves, given[5])


def in_float64(given: Tensors) -> Tensors:
    return tuple(tensor.double() for tensor in given)


def check(case: Case, given: Tensors) -> Tensors:
    """Run and apply the error rule to out and all gradients."""
    dtype = given[0].dtype
    golden, ours = results(case, in_float64(given), "reference"), results(case, given)
    plain = results(case, given, "reference")
    for name, *triple, tensor in zip(NAMES, ours, golden, plain, (plain[0], *given), strict=False):
        assert triple[0].dtype == dtype and triple[0].shape == tensor.shape
        if not any(gradient.any() for gradient in golden[1:]):
            assert not triple[0].any(), name
        elif name == "out":
            assert_within_budget(name, *triple, factor=4 if dtype == torch.float32 else 2, exact_reference=True)
        elif dtype == torch.float32:
            assert_gradients_close_fp32(name, triple[0], triple[1], golden[1:])
        elif float(triple[1].abs().max()) > dtype_tolerance(torch.float64):  # with one visible key it cancels to zero
            assert_within_budget(name, *triple, factor=3, exact_reference=True)
    return ours


@pytest.fixture(params=TILES)
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TileConfig | None:
    """The configuration of all kernels."""
    config = TILES[request.param]
    if config is not None:
        monkeypatch.setattr(Tables, "select", lambda *_: config)
    return config


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("tile")
def test_error_rule(name: str) -> None:
    check(CASES[name], tensors(CASES[name]))


@pytest.mark.parametrize("name", ["a window", "odd sides", "class tokens and strips", "pooled keys", "dropout", "negative scale"])
def test_float16(name: str) -> None:
    check(CASES[name], tensors(CASES[name], torch.float16))


def dense_backward(case: Case, given: Tensors) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """P, dP, both tables, and logits that can be differentiated by these, in float64."""
    query, key, value, *tables, d_out = in_float64(given)
    leaves = [table.requires_grad_() for table in tables]
    wide = append(query, key, *leaves, **case.arguments)
    logits = wide[0] @ wide[1].mT
    return logits.detach().softmax(-1), d_out @ value.mT, leaves, logits


@pytest.mark.parametrize("name", ["a window", "class tokens and strips", "pooled keys"])
@pytest.mark.parametrize("sharp", [1, 8])
def test_table_gradients_in_float16(name: str, sharp: int) -> None:
    """At most 1.5 times the error of dS rounded once and summed exactly, which requires an exact delta."""
    case = CASES[name]
    given = tensors(case, torch.float16, sharp=sharp)
    probs, d_probs, leaves, logits = dense_backward(case, given)
    d_scores = probs * (d_probs - (probs * d_probs).sum(-1, keepdim=True))
    golden = torch.autograd.grad(logits, leaves, d_scores, retain_graph=True)
    rounded = torch.autograd.grad(logits, leaves, d_scores.half().double())
    for exact, inexact, actual in zip(golden, rounded, results(case, given)[4:], strict=True):
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
        out, *_ = results(case, given)
    probs, d_probs, _, _ = dense_backward(case, given)
    delta = (probs * d_probs).sum(-1)
    # The relative error of P = exp(logit - lse) is that of the rounding of both: two units of float32 at the magnitude of the
    # summands; that of lse is the mean of the logits' errors; dP, whose products are rounded once here, has two units.
    query, key, value, *tables, d_out = (tensor.abs() for tensor in in_float64(given))
    wide = append(query, key, *tables, **case.arguments)
    logits, largest_d_probs = wide[0] @ wide[1].mT, d_out @ value.mT
    units = 1 + logits + (probs * logits).sum(-1, keepdim=True)
    precision = 2 * torch.finfo(torch.float32).eps * (probs * (units * d_probs.abs() + largest_d_probs)).sum(-1)
    assert_at_most("delta", (stored[0] - delta).abs(), precision)
    rounded = (out.double() * given[5].double()).sum(-1)
    assert ((rounded - delta).abs() > 4 * precision).double().mean() > 0.5


ORDERS: tuple[Order, ...] = ("reversed", "shuffled")
GUARDED = ("odd sides", "several strips", "class tokens and strips", "pooled keys", "dropout", "wide heads")


@pytest.mark.parametrize(("name", "order"), list(zip(GUARDED, itertools.cycle(ORDERS), strict=False)))
@pytest.mark.parametrize("config", [TileConfig(16, 16, 4, 1), None])
def test_guarded(name: str, order: Order, config: TileConfig | None) -> None:
    """No kernel accesses memory outside of tensors; results have the same bits in any order, with NaN around inputs."""
    case, choose = CASES[name], random.Random(len(name))
    query, key, value, _, _, d_out = tensors(case)
    sides = tuple(zip(case.grid, case.keys, strict=True))
    rel_h, rel_w = (torch.randn(*pair, case.width, generator=torch.Generator().manual_seed(1)) for pair in sides)
    dropout_p = case.others.get("dropout_p", 0.0)
    seed = torch.tensor([5]) if dropout_p else None
    tiles = {} if config is None else dict.fromkeys(("forward", "dq", "dkv"), config)

    def run(given: GridTensors, d_out: torch.Tensor) -> Tensors:
        given = given._replace(dropout_seed=seed)
        out, softmax_stats = forward(given, 0.3, dropout_p, config)
        gradients = backward(d_out, out, softmax_stats, given, 0.3, dropout_p, tiles=tiles)
        return out, softmax_stats, *(gradient for gradient in gradients if gradient is not None)

    given = GridTensors(query, key, value, rel_h, rel_w)
    poisoned = GridTensors(*(in_poisoned_storage(tensor, choose) for tensor in given[:5])), in_poisoned_storage(d_out, choose)
    with guarded() as launches, programs_in_order(order):
        found = run(*poisoned)
    contiguous = run(GridTensors(*(tensor.contiguous() for tensor in given[:5])), d_out)
    assert [launch.kernel for launch in launches] == ["grid_forward_kernel", "grid_dq_kernel", "grid_dkv_kernel"]
    assert all(launch.loads > 0 and launch.stores > 0 for launch in launches)
    assert len(found) == 7
    for actual, again, right in zip(found, run(*poisoned), contiguous, strict=True):
        assert right.isfinite().all() and right.any() and torch.equal(actual, again)
        assert_gradients_close_fp32(name, actual, right, contiguous)  # the last bits of torch's products depend on strides


@pytest.mark.parametrize("wanted", [[0], [1], [2], [3], [4], [0, 3], [1, 2], [2, 4]])
def test_some_gradients(wanted: list[int]) -> None:
    """Some of the gradients have the same bits as among all, and only their kernels run."""
    case = CASES["class token"]
    given = tensors(case)
    expected = results(case, given)[1:]
    leaves = [tensor.detach().requires_grad_(number in wanted) for number, tensor in enumerate(given[:5])]
    out = call(*leaves, **case.arguments, implementation="triton")
    with guarded() as launches:
        gradients = torch.autograd.grad(out, [leaves[number] for number in wanted], given[5])
    assert all(torch.equal(gradient, expected[number]) for number, gradient in zip(wanted, gradients, strict=True))
    kernels = ["grid_dq_kernel"] * (wanted != [2]) + ["grid_dkv_kernel"] * (not {1, 2}.isdisjoint(wanted))
    assert [launch.kernel for launch in launches] == kernels


@pytest.mark.thorough
def test_the_same_is_dropped_in_other_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward with different tiles agree with the reference's dropout, which depends on query and key only."""
    chosen = {"forward": TileConfig(16, 32, 4, 1), "dq": TileConfig(32, 16, 4, 1), "dkv": TileConfig(16, 64, 4, 1)}
    monkeypatch.setattr(Tables, "select", lambda _, kernel, *__: chosen[kernel])
    case = Case((5, 20), prefix=3, others={"dropout_p": 0.5})
    given = tensors(case)
    ours = check(case, given)
    assert (ours[0] - call(*given[:5], case.grid)).abs().max() > 0.1, "nothing is dropped"


def test_large_logits() -> None:
    """Probabilities of a query sum to one: out of equal values is that value, and d_value sums to d_out."""
    case = Case((6, 5), prefix=1, value_width=16)
    query, key, value, *tables, d_out = tensors(case)
    out, *gradients = results(case, (300 * query, 30 * key, torch.ones_like(value), *tables, d_out))
    assert_near("out", out, torch.ones_like(out))
    assert_near("d_value", gradients[2].sum(2), d_out.sum(2))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_empty() -> None:
    for batch, heads in ((0, 3), (2, 0)):
        case = Case((5, 7), prefix=1, batch=batch)
        out, *gradients = results(case, tensors(case, heads=heads))
        assert out.numel() == 0 and not any(gradient.abs().sum() for gradient in gradients)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_the_operator(dropout_p: float) -> None:
    """The registered operator passes torch.library.opcheck."""
    case = CASES["pooled keys"]
    query, key, value, *_ = tensors(case, heads=1)
    leaves = [query, key, value, torch.randn(8, 4, 16), torch.randn(10, 5, 16)]
    dropout = (torch.tensor([5]), whole_origins(query.shape[0], 1, query.device)) if dropout_p else (None, None)
    arguments = (*(leaf.requires_grad_() for leaf in leaves), *dropout, 0.3, dropout_p, "triton", False)
    torch.library.opcheck(torch.ops.triton_relattn.grid_attention_forward.default, arguments)


def test_too_wide_heads_raise() -> None:
    case = Case((2, 3), width=257)
    with pytest.raises(NotImplementedError, match="head widths up to 256, got 257 "):
        results(case, tensors(case))


@pytest.mark.parametrize("prefix", [0, 1, 70])
@pytest.mark.parametrize("block_n", [16, 64])
def test_every_key_is_in_one_tile(prefix: int, block_n: int) -> None:
    """The host launches the number of tiles that the kernel needs: each key gets a gradient, and none is written twice."""
    case = Case((3, 21), prefix=prefix)
    query, key, value, *_, d_out = tensors(case)
    inputs = GridTensors(query, key, value, torch.randn(3, 3, 16), torch.randn(21, 21, 16))
    tiles = {"dkv": TileConfig(16, block_n, 4, 1)}
    out, softmax_stats = forward(inputs, 1.0, 0.0)
    with guarded():
        _, d_key, d_value, _, _ = backward(d_out, out, softmax_stats, inputs, 1.0, 0.0, tiles=tiles)
    assert d_key is not None and d_value is not None and d_key.isfinite().all() and d_value.isfinite().all()
