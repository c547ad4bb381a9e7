"""Groups of arguments, and recompilation, which depends on kinds of lengths only."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
import torch
import triton.language as tl

from bench.compiled import recorded_launches
from triton_relattn import RelativePositions, fused_relative_attention, kernels, testing
from triton_relattn import _implementations as implementations


def groups() -> dict[str, type[Any]]:
    """All named tuples of the kernels' modules: arguments of launches, and tuples made in kernels."""
    modules = [importlib.import_module(module.name) for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")]
    classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    return {group.__name__: group for group in classes if issubclass(group, tuple) and hasattr(group, "_fields")}


def test_no_field_is_hidden_by_an_attribute_of_tritons_tuple() -> None:
    """Groups are Python's tuples up to Triton 3.7, and Triton's own tuples in later versions."""
    taken = set(dir(tl.tuple(()))) | {"values", "type"}
    found = groups()
    assert {"TileConstants", "Operands", "Scaling", "Table", "Place", "Strip"} <= set(found)
    assert {name: hidden for name, group in found.items() if (hidden := taken & set(group._fields))} == {}


def compiled_for(lengths: tuple[int, int], batch: int = 1, **arguments: Any) -> list[str]:
    """Return the hashes of the kernels of a call with a full table and its backward."""
    inputs = testing.make_inputs(batch, 2, *lengths, 64, num_rows=sum(lengths) - 1, dtype=torch.bfloat16, seed=1)
    arguments["positions"] = RelativePositions(1 - lengths[0], lengths[1] - 1)
    with recorded_launches("sm_90", assembled=False) as launches:
        testing.forward_backward(fused_relative_attention, inputs, return_lse=True, **arguments)
    return [launch.kernel.hash for launch in launches]


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementations, "choose_implementation", lambda *_: implementations.TRITON)


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize(
    ("lengths", "likewise"),
    [((33, 48), (50, 80)), ((48, 33), (64, 70)), ((1, 40), (1, 57)), ((32, 48), (64, 160))],
    ids=str,
)
def test_a_length_of_a_known_kind_compiles_nothing(lengths: tuple[int, int], likewise: tuple[int, int]) -> None:
    """Triton specialises kernels for lengths of 1 and multiples of 16; there are no other specialisations."""
    compiled = set(compiled_for(lengths)) | set(compiled_for(likewise))
    further = {(33, 48): (83, 96), (48, 33): (96, 90), (1, 40): (1, 90), (32, 48): (96, 112)}[lengths]
    assert set(compiled_for(further)) <= compiled
