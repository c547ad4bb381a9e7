"""The same call twice gives the same bits, and nothing is refused where torch is asked for repeatable results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from tests.check import Way, environment, run
from tests.conftest import cut_blocks, poison_memory
from tests.draws import explore, samples
from tests.samples import Sample
from tests.tolerance import assert_near
from triton_relattn import RelativePositions, fused_relative_attention, merge_attention
from triton_relattn.nn import RelativeMultiheadAttention
from triton_relattn.testing import Inputs, forward_backward, make_inputs

IMPLEMENTATIONS, SMALL = ("blockwise", "reference"), Way("blockwise", small=True)
RAISES_ON_A_GPU = set(
    "avg_pool3d_backward adaptive_avg_pool2d_backward bincount cummax cummin cumprod cumsum grid_sampler_2d_backward histc "
    "kthvalue max_unpool2d median nanmedian nll_loss2d_forward put_ put replication_pad1d_backward upsample_bilinear2d_backward "
    "mode upsample_linear1d_backward scatter_reduce _cdist_backward _ctc_loss_backward _embedding_bag "
    "reflection_pad1d_backward".split()
)
"""Torch operators that torch.use_deterministic_algorithms(True) refuses on a GPU for some arguments."""
ADDS_IN_ANY_ORDER = set(
    "index_add index_add_ scatter_add scatter_add_ index_put index_put_ _index_put_impl_ embedding_dense_backward "
    "gather_backward scatter_reduce_ index_reduce index_reduce_".split()
)
"""Torch operators whose order of additions on a GPU differs from run to run, unless determinism is requested."""


@contextmanager
def deterministic() -> Iterator[None]:
    """torch.use_deterministic_algorithms(True), which also fills what torch.empty makes with NaN."""
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # torch's default
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def everything(dtype: torch.dtype = torch.float32) -> tuple[Inputs, dict[str, Any]]:
    """A call with all tables, masks and features at once."""
    terms: dict[str, Any] = {"key_heads": 2, "rel_width": 5, "per_head": True}
    terms |= dict.fromkeys(("rel_value", "rel_bias", "rel_p2c"), True)
    inputs = make_inputs(2, 4, 70, 83, 16, 8, num_rows=11, **terms, dtype=dtype, seed=0)
    arguments = {
        "positions": RelativePositions(-4, 6),
        "attn_mask": torch.rand(2, 1, 70, 83, generator=torch.Generator().manual_seed(0)) < 0.9,
        "key_lengths": torch.tensor([83, 60]),
        "window_size": (40, 50),
        "query_offset": torch.tensor([3, -2]),
        "dropout_p": 0.3,
        "softcap": 5.0,
        "enable_gqa": True,
    }
    return inputs, arguments


def results(implementation: str | None, inputs: Inputs, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return forward_backward(fused_relative_attention, inputs, return_lse=True, implementation=implementation, **arguments)


def assert_repeats(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, result in one.items():
        assert torch.equal(result, other[name]), f"{name} differs"
        assert result.count_nonzero() or result.numel() == 0 or name == "lse", f"{name} is all zeros"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_features_at_once(dtype: torch.dtype, implementation: str, block_size: None) -> None:
    """Two plain calls, and one with NaN in uninitialised memory and deterministic algorithms only, give the same bits."""
    inputs, arguments = everything(dtype)
    first = results(implementation, inputs, arguments)
    assert_repeats(first, results(implementation, inputs, arguments))
    with deterministic():
        assert_repeats(first, results(implementation, inputs, arguments))


@pytest.mark.parametrize("threads", [2, 3])
def test_repeats_in_any_number_of_threads(threads: int) -> None:
    """Results repeat for each number of threads. Different numbers may differ: blockwise then takes larger blocks, whose sums
    round differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tables: dict[str, Any] = {"rel_value": True, "rel_bias": True, "rel_p2c": True}
        inputs = make_inputs(2, 4, 150, 160, 32, num_rows=309, **tables, dtype=torch.float32, seed=0)
        for implementation in IMPLEMENTATIONS:
            assert_repeats(results(implementation, inputs, {}), results(implementation, inputs, {}))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_threads_in_the_backward(before: int, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward's blocks then differ, and see other keys, from those in which the forward kept probabilities."""
    cut_blocks(monkeypatch, 16, 1 << 12, 1 << 20)
    poison_memory(monkeypatch)
    inputs = make_inputs(2, 2, 64, 64, 32, num_rows=127, dtype=torch.float64, seed=3)
    leaves = [tensor.requires_grad_() for tensor in inputs[:4] if tensor is not None]
    usual = torch.get_num_threads()
    gradients = []
    try:
        for threads in ((before, before), (before, after)):
            torch.set_num_threads(threads[0])
            out = fused_relative_attention(*leaves, window_size=(20, 5))
            torch.set_num_threads(threads[1])
            gradients.append(torch.autograd.grad(out, leaves, inputs.d_out))
    finally:
        torch.set_num_threads(usual)
    for ours, expected in zip(*gradients, strict=True):
        assert_near("ours", ours, expected)


MODULES: dict[str, Callable[..., RelativeMultiheadAttention]] = {
    "shaw": lambda **options: RelativeMultiheadAttention.shaw(16, 2, 4, **options),
    "music_transformer": lambda **options: RelativeMultiheadAttention.music_transformer(16, 2, 8, **options),
    "general": lambda **options: RelativeMultiheadAttention.general(16, 2, 20, **options),
    "transformer_xl": lambda **options: RelativeMultiheadAttention.transformer_xl(16, 2, **options),
    "t5": lambda **options: RelativeMultiheadAttention.t5(16, 2, num_buckets=8, max_distance=9, **options),
    "alibi": lambda **options: RelativeMultiheadAttention.alibi(16, 2, learned=True, **options),
}


def module_results(module: RelativeMultiheadAttention) -> dict[str, torch.Tensor]:
    """Return a module's output and the gradients of its parameters and input, with dropout, padding and a mask."""
    torch.manual_seed(1)
    x = torch.randn(2, 13, 16, requires_grad=True)
    module.zero_grad()
    out, _ = module(x, x, x, key_lengths=torch.tensor([13, 6]), attn_mask=torch.ones(13, 13, dtype=torch.bool).triu(1))
    out.square().sum().backward()
    assert x.grad is not None
    found = {"out": out.detach(), "x": x.grad}
    return found | {name: value.grad.clone() for name, value in module.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    module = MODULES[name](dropout=0.2, batch_first=True)
    first = module_results(module)
    assert_repeats(first, module_results(module))
    with deterministic():
        assert_repeats(first, module_results(module))


def called(run: Callable[[], Any]) -> set[str]:
    """The names of the torch operators that are called, including those inside the package's operators."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return {event.name.removeprefix("aten::") for event in profile.events() if event.name.startswith("aten::")}


def merged() -> None:
    inputs = make_inputs(1, 2, 9, 20, 8, num_rows=7, dtype=torch.float32, seed=0)
    leaves = [tensor.requires_grad_() for tensor in inputs[:4] if tensor is not None]
    query, key, value, table = leaves
    parts = [
        fused_relative_attention(query, key[:, :, part], value[:, :, part], table, query_offset=-part.start, return_lse=True)
        for part in (slice(0, 11), slice(11, 20))
    ]
    out, lse = merge_attention(*parts[0], *parts[1])
    torch.autograd.backward((out, lse), (inputs.d_out, inputs.d_lse))


def test_no_operator_that_adds_in_any_order() -> None:
    """No operator is used that is nondeterministic on a GPU or that torch refuses there for that reason."""
    used = called(partial(results, "blockwise", *everything()))
    assert {"bmm", "baddbmm", "mm"} & used and len(used) > 20, used  # to see the operators inside

    def take_part(sample: Sample) -> None:
        with environment(sample, SMALL):
            used.update(called(partial(run, sample, {**sample.call(), "implementation": "blockwise"})))

    explore(samples(), take_part, range(12))
    used |= called(merged)
    for name, make in MODULES.items():
        used |= called(partial(module_results, make(dropout=0.2, batch_first=True))) if name != "t5" else set()
    assert not used & (RAISES_ON_A_GPU | ADDS_IN_ANY_ORDER)


def test_operators_with_a_repeatable_path_of_their_own() -> None:
    """The gradient of a row that is taken many times is summed by index_put, which has a deterministic path on a GPU, as has the
    reference's way to find the rows of pairs."""
    t5 = called(partial(module_results, MODULES["t5"](dropout=0.2, batch_first=True)))
    reference_operators = called(partial(results, "reference", *everything()))
    assert t5 & ADDS_IN_ANY_ORDER <= {"index_put", "index_put_", "_index_put_impl_", "embedding_dense_backward"}
    assert reference_operators & ADDS_IN_ANY_ORDER == {"gather_backward", "scatter_add", "scatter_add_"}
    assert not (t5 | reference_operators) & RAISES_ON_A_GPU
