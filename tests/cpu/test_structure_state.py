"""What was proven of a module holds for modules in the same state: whatever else its forward may depend on is noticed, in other
modules of its class, and later in the same one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.cpu import stock
from tests.tolerance import assert_near
from triton_relattn import disable, enable
from triton_relattn.integrations import proof, structure
from triton_relattn.integrations.structure.kind import kind_in


def _set(name: str, value: Any) -> Callable[[Any], None]:
    """A change of an attribute; of a child's by "child.attribute"."""

    def change(module: Any) -> None:
        *path, last = name.split(".")
        for each in path:
            module = getattr(module, each)
        setattr(module, last, value)

    return change


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an object": _set("config.factor", 2.0),
    "a dictionary in a dictionary": lambda module: module.options["inner"].update(factor=2.0),
    "a list": lambda module: module.factors.__setitem__(0, 2.0),
    "a tuple": _set("ends", (1.0, 2.0)),
    "None": _set("limit", 0.1),
    "a child's attribute": _set("last.value", 2.0),
    "another child": _set("last", nn.Tanh()),
    "a function": _set("then", stock.doubled),
    "a function without a name": _set("then", lambda states: 3 * states),
    "a buffer": lambda module: module.is_negative.fill_(True),
    "a buffer by its state": lambda module: module.load_state_dict({**module.state_dict(), "is_negative": torch.tensor(True)}),
    "an embedding that changes its rows": _set("distances.max_norm", 0.1),
}


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TRITON_RELATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(proof, "_passed", {})
    monkeypatch.setattr(structure, "_proven", {})
    monkeypatch.setattr(structure.ClippedDistances, "fewest", 0)
    monkeypatch.setattr(structure.BucketedBias, "fewest", 0)


def made() -> Any:
    torch.manual_seed(0)
    return stock.AdjustedAttention().double().eval()


def check_as_stock(module: Any) -> None:
    """What it computes is what the stock class does."""
    states = torch.randn(2, 13, 32, dtype=torch.float64)
    plain = copy.deepcopy(module)
    disable(plain)
    assert kind_in(plain) is None
    with torch.no_grad():
        assert torch.equal(module(states), plain(states))


def is_ours(module: Any) -> bool:
    """Whether a call is computed by ours, whose bits differ from the stock class's."""
    states = torch.randn(2, 13, 32, dtype=torch.float64)
    plain = copy.deepcopy(module)
    disable(plain)
    with torch.no_grad():
        ours, theirs = module(states), plain(states)
    assert_near("out", ours, theirs)
    return not torch.equal(ours, theirs)


@pytest.mark.parametrize("name", CHANGES)
def test_another_module_is_proven_by_itself(name: str) -> None:
    """Of its class, in this process and by what is remembered in a file; and it spoils no others."""
    for _ in range(2):
        changed = nn.Sequential(made(), stock.BucketAttention())  # which has something to enable
        CHANGES[name](changed[0])
        assert "0" not in enable(changed.double().eval())
        check_as_stock(changed[0])
        module = made()
        assert enable(module) and is_ours(module)
        proof._passed.clear()
        structure._proven.clear()


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name: str) -> None:
    """Later, at each call; and what is as it was is ours again."""
    module = made()
    enable(module)
    before = copy.deepcopy(module)
    assert is_ours(module) and is_ours(before)
    CHANGES[name](module)
    check_as_stock(module)
    assert is_ours(before)


def test_classes_and_modules_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class's attribute, a method that somebody has replaced, a name of its module, and a function there."""
    for place, name, value in (
        (stock.AdjustedAttention, "of_class", 2.0),
        (stock.AdjustedAttention, "forward", lambda self, x, mask=None: 2 * stock.ShawAttention.forward(self, x, mask)),
        (stock, "SHARE", 2.0),
        (stock, "heads_of", lambda states, heads: states.unflatten(2, (heads, -1)).transpose(1, 2).flip(1)),
    ):
        module = made()
        enable(module)
        assert is_ours(module)
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            check_as_stock(module)
        assert is_ours(module)


def test_a_hook_of_what_is_not_called() -> None:
    """Rows of an embedding are read; a hook that changes what a call of it gives would have no effect."""
    module = made()
    enable(module)
    handle = module.distances.register_forward_hook(lambda _, given, out: 2 * out)
    check_as_stock(module)
    handle.remove()
    assert is_ours(module)


def test_what_may_change() -> None:
    """Weights, dropout, mode, device and numbers in buffers."""
    module = made()
    module.register_buffer("numbers", torch.randn(3, dtype=torch.float64))
    enable(module)
    module.load_state_dict({name: each + 0.5 if each.is_floating_point() else each for name, each in module.state_dict().items()})
    module.train().eval()
    assert is_ours(module)


def test_masks_that_were_not_proven() -> None:
    """Truth values that the stock class adds; one mask for several sequences where each has its own."""
    torch.manual_seed(0)
    module = stock.BucketAttention().double().eval()
    enable(module)
    states, seen = torch.randn(1, 13, 32, dtype=torch.float64), torch.rand(13, 13) > 0.3
    plain = copy.deepcopy(module)
    disable(plain)
    with torch.no_grad():
        for mask in (seen, seen.double(), seen[None, None]):
            assert_near("out", module(states, mask), plain(states, mask))
