"""Memory that forward and backward allocate, by the host code of kernels for GPUs that this machine lacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.cases import features
from bench.cases.features import call
from bench.compiled import recorded_launches
from triton_relattn.kernels.backward import backward
from triton_relattn.kernels.forward import forward
from triton_relattn.kernels.workspace import planning

WINDOW = (20, 9)


class Allocations(TorchDispatchMode):
    """Counts the bytes of all storages created in the context."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.results: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        existing = {
            leaf.untyped_storage().data_ptr() for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in existing:
                self.sizes[leaf.untyped_storage().data_ptr()] = leaf.untyped_storage().nbytes()
                self.results.append(leaf)  # so that no address is reused
        return result

    @property
    def total(self) -> int:
        return sum(self.sizes.values())


def allocated(length: int, table: str, with_all_terms: bool = False, has_window: bool = False) -> int:
    """Bytes that forward and backward allocate for all gradients of one head of width 16 in float16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "HALF", 4)
        tensors, spec = call(table, torch.float16, 16, length=length, heads=1, has_lengths=False)
    if with_all_terms:
        assert tensors.rel_key is not None
        rows = tensors.rel_key.shape[0]
        terms = {"rel_query": torch.empty_like(tensors.query), "rel_value": torch.empty_like(tensors.rel_key)}
        tensors = tensors._replace(
            **terms, rel_bias=torch.empty(rows, dtype=torch.float16), attn_mask=torch.empty(1, 1, 1, length)
        )
    if has_window:
        spec = spec._replace(window_left=WINDOW[0], window_right=WINDOW[1])
    d_out, d_lse = torch.empty_like(tensors.query), torch.empty(1, 1, length)
    with recorded_launches("sm_90", only=""), Allocations() as allocations:
        out, _, softmax_stats, _ = forward(tensors, spec)
        backward(d_out, d_lse, out, softmax_stats, tensors, spec)
    return allocations.total


@pytest.mark.parametrize(
    ("table", "has_window"), [("full", False), ("full", True), ("clamp", False)], ids=["all keys", "window", "short table"]
)
def test_memory_of_the_workspace(table: str, has_window: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace takes at most the limit, two bytes for each pair if all fit, and few with a window or a short table."""
    limit, length = 8 * 2**20, 8192
    monkeypatch.setenv(planning.VARIABLE, "0")
    least = allocated(length, table, has_window=has_window)
    monkeypatch.setenv(planning.VARIABLE, str(limit))
    whole, large = (allocated(num_keys, table, has_window=has_window) for num_keys in (2048, length))
    assert large - least <= limit
    if has_window or table == "clamp":
        short, long = (allocated(num_keys, table, has_window=has_window) for num_keys in (length // 2, 2 * length))
        assert long < 4.1 * short
    else:
        assert 2048 * 2048 * 2 < whole < limit + 2**22


def test_without_a_table_nothing_is_stored() -> None:
    """A backward without a table allocates the gradients, and one number per query."""
    tensors, spec = call("none", torch.bfloat16, 64, length=2048, heads=2, has_lengths=False)
    out, d_out, softmax_stats = torch.empty_like(tensors.query), torch.empty_like(tensors.query), torch.empty(1, 2, 2, 2048)
    with recorded_launches("sm_90", only=""), Allocations() as allocations:
        backward(d_out, None, out, softmax_stats, tensors, spec)
    assert allocations.total == 3 * tensors.query.nbytes + 2 * 2048 * 4


@pytest.mark.thorough
@pytest.mark.parametrize(("table", "shortest"), [("full", 32768), ("clamp", 2048)])
def test_memory_of_all_terms_is_linear(table: str, shortest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the length takes twice the bytes, except for a constant, once the number of programs no longer grows."""
    monkeypatch.setenv(planning.VARIABLE, "0")
    short, middle, long = (allocated(factor * shortest, table, with_all_terms=True) for factor in (1, 2, 4))
    assert long - middle == 2 * (middle - short) > 0


def test_memory_of_the_residual() -> None:
    """The residual takes as much memory as out, and none in the backward."""
    tensors, spec = call("full", torch.bfloat16, 64, length=2048, heads=2, has_lengths=False)
    tensors = tensors._replace(value=tensors.value[..., :49])
    forwards, backwards = [], []
    for keeps_residual in (False, True):
        with recorded_launches("sm_90", only=""):
            with Allocations() as in_forward:
                out, _, softmax_stats, residual = forward(tensors, spec, keeps_residual=keeps_residual)
            with Allocations() as in_backward:
                backward(torch.empty_like(out), None, out, softmax_stats, tensors, spec, residual=residual)
        forwards.append(in_forward.total)
        backwards.append(in_backward.total)
    assert forwards[1] - forwards[0] == 2 * 2048 * 49 * 2 and backwards[1] == backwards[0]
