"""Relative attention in modules of no library: found by its structure, compared, and replaced where it is equal.

Calls here are long enough for the operator: on a CPU the stock class keeps those with few scores.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from tests.enable import stock
from tests.enable.models import Sizes, assert_as_stock, assert_same, counted, forward, operators_dropout, results, said
from tests.enable.stock import Altered, ShawAttention, enable
from tests.tolerance import assert_near
from triton_relattn import __main__ as command
from triton_relattn import disable

LENGTH, WIDTH = 128, 32
GRID = (19, 20)
LONG = (16, LENGTH, WIDTH)
"""With two heads, a sequence has 2**19 scores, the fewest for which the operator is used; on a grid 2**22."""


def states(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def padding(batch: int = 16) -> torch.Tensor:
    return torch.arange(LENGTH) < torch.tensor([LENGTH, 90]).repeat(batch // 2)[:, None]


def speech(masked: bool = True) -> tuple[Any, ...]:
    signal, real = states(*LONG).mT, padding()
    return (signal, signal, *[(real[:, None, :, None] & real[:, None, None, :]).float()] * masked)


def conformer(hides: bool = False, rows: int = 2 * LENGTH - 1, batch: int = 1) -> tuple[Any, ...]:
    x, mask = states(8, LENGTH, WIDTH), padding(8)[:, None]
    return x, x, x, states(batch, rows, WIDTH), ~mask if hides else mask


def music(mask: torch.Tensor) -> tuple[Any, ...]:
    x = states(8, LENGTH, WIDTH)
    return x, x, x, mask


def joint_music() -> tuple[Any, ...]:
    x = states(LENGTH, 8, WIDTH)
    return x, x, x, None, True, torch.full((LENGTH, LENGTH), -math.inf).triu(1)


def gated() -> tuple[Any, ...]:
    x = states(LENGTH, 8, WIDTH)
    return x, x, x, ~padding(8), False


EQUAL: dict[str, tuple[Callable[[], Any], Callable[[], tuple[Any, ...]]]] = {
    "vits": (stock.SpeechBlock, speech),
    "vits, tables per head": (lambda: stock.SpeechBlock(shared=False), lambda: speech(masked=False)),
    "espnet": (stock.ConformerAttention, conformer),
    "espnet, mask hides": (lambda: stock.ConformerAttention(hides=True), lambda: conformer(hides=True)),
    "espnet, past": (lambda: stock.ConformerAttention(past=True), conformer),
    "espnet, legacy shift, past": (lambda: stock.ConformerAttention(legacy=True, past=True), lambda: conformer(rows=LENGTH)),
    "espnet, positions per sequence": (stock.RowsPerSequence, lambda: conformer(batch=8)),
    "sam": (stock.GridAttention, lambda: (states(16, *GRID, WIDTH),)),
    "shaw": (stock.ShawAttention, lambda: (states(*LONG), padding())),
    "shaw, past first": (lambda: stock.ShawAttention(past_first=True), lambda: (states(*LONG), padding())),
    "shaw, parameter": (lambda: stock.ShawAttention(parameter=True), lambda: (states(*LONG),)),
    "enformer": (stock.FeatureAttention, lambda: (states(*LONG),)),
    "music": (stock.MusicAttention, lambda: music(torch.ones(LENGTH, LENGTH).triu(1))),
    "music, joint": (stock.JointMusicAttention, joint_music),
    "wavlm": (stock.GatedAttention, gated),
}
"""Modules that the operator computes, and their arguments."""


def made(name: str) -> tuple[Any, tuple[Any, ...]]:
    torch.manual_seed(0)
    build, given = EQUAL[name]
    return build().double().eval(), given()


TRAINED = ("vits", "espnet", "espnet, past", "enformer")
COMPILED = ("vits", "espnet", "sam", "shaw", "enformer", "music")


@pytest.mark.parametrize(("name", "training"), [*((name, False) for name in EQUAL), *((name, True) for name in TRAINED)], ids=str)
def test_equal_modules_are_replaced(name: str, training: bool) -> None:
    """Outputs and gradients are equal, no tensor holds all pairs, weights can be loaded, there is one graph, disable undoes the
    change; in training, with the stock class dropping the same weights as the operator."""
    module, given = made(name)
    stock_class = type(module.train(training))
    counts = padding()[:, None] if name == "vits" else None  # all but padding rows that see nothing
    if name == "enformer":
        module.pos_dropout.p = 0.0
    with Sizes() as dense, operators_dropout(module.heads) if training else nullcontext():
        expected = results(module, given, counts)
    model = nn.ModuleDict({"block": module})
    report = enable(model)
    assert dict(report) == {"block": stock_class.__name__} and not report.left
    assert isinstance(module, stock_class) and type(module) is not stock_class
    module.load_state_dict({key: value.clone() for key, value in module.state_dict().items()})
    for _ in range(3):  # the first call is compared with the stock class
        with Sizes() as sizes:
            ours = results(module, given, counts)
    assert report.calls().compared == 2 and not report.calls().differing
    assert_same(ours, expected)
    pairs = GRID[0] * GRID[1] if name == "sam" else LENGTH
    assert sizes.ours and dense.squares(pairs)
    # The calls of the Music Transformer have a mask (Nq, Nk).
    mask = max((math.prod(value.shape) for value in given[3:] if getattr(value, "dtype", None) == torch.bool), default=0)
    per_head = [shape for shape in sizes.squares(pairs) if math.prod(shape) > max(mask, pairs**2 * ("music" in name))]
    assert not per_head or name == "vits"  # its mask covers all pairs
    if name in COMPILED and not training:
        compiled = counted(forward(torch.compile(module, backend="aot_eager", fullgraph=True), given), counts)
        assert_near("compiled", compiled, ours["out"])
    assert enable(model) == {}
    assert disable(model) == {"block": stock_class.__name__} and type(module) is stock_class


def quantised() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(ShawAttention().eval(), {nn.Linear}, dtype=torch.qint8)  # type: ignore[no-any-return]


def with_child(name: str, change: Callable[[Any], nn.Module], module: Any = None) -> Any:
    module = module or ShawAttention().train()
    module.register_module(name, change(getattr(module, name)))
    return module


def loaded(model: Any) -> Any:
    model.load_state_dict({name: value + 0.5 for name, value in model.state_dict().items()})
    return model.train().eval()


def profiled(model: Any) -> Any:
    model.flops = 0
    model.register_buffer("total_ops", torch.zeros(1))
    return model


def same(model: Any) -> Any:
    return model


UNIMPORTANT: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "None beside the result": (lambda: Altered(lambda _, out, *__: (out, None, None)), same),
    "dropout of the result": (lambda: with_child("wo", lambda child: nn.Sequential(child, nn.Dropout(0.5))), same),
    "tables of zeros": (
        lambda: with_child("distances", lambda child: nn.Embedding.from_pretrained(0 * child.weight, freeze=False)),
        same,
    ),
    "quantised": (quantised, same),
    "bfloat16": (lambda: ShawAttention().to(torch.bfloat16), same),
    "loaded later": (ShawAttention, loaded),
    "an adapter later": (ShawAttention, lambda model: with_child("wq", stock.Adapter, model)),
    "profiled later": (ShawAttention, profiled),
    "a copy": (ShawAttention, copy.deepcopy),
}
"""A module, and what is done to it after enable."""


@pytest.mark.parametrize("name", UNIMPORTANT)
def test_what_changes_nothing(name: str) -> None:
    """Ours runs, without a warning, also after a call without a sequence."""
    make, change = UNIMPORTANT[name]
    module = make()
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    assert enable(module)
    assert name == "None beside the result" or module(torch.randn(0, 20, 32, dtype=dtype)).shape == (0, 20, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_as_stock(change(module), torch.randn(*LONG).to(dtype), is_ours=True)


def test_no_values_are_needed() -> None:
    """Models on the meta device, and weights with gradients that a stock class stores in the module. An attribute of that name
    that is not a tensor stays."""
    with torch.device("meta"):
        assert enable(stock.GridAttention())
    module: Any = stock.SpeechBlock()
    signal = torch.randn(*LONG).mT
    for attn, left in ((module(signal, signal), None), ("relative", "relative")):
        module.attn = attn
        enable(module)
        with Sizes() as sizes:
            module(signal, signal)
        assert sizes.ours and module.attn == left


def test_scripted_modules_are_passed_by() -> None:
    model = nn.ModuleList([torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), ShawAttention()])
    assert dict(enable(model)) == {"1": "ShawAttention"}


def test_a_cache() -> None:
    """A single tensor of cached keys and values, which precede the call's; the module returns the next cache."""
    module, queries, past = stock.CachedConformerAttention().double().eval(), 384, 6
    enable(module)
    keys, x, cache = queries + past, states(1, queries, WIDTH), states(1, 4, past, 2 * WIDTH // 4)
    assert_as_stock(
        module, x, x, x, states(1, 2 * keys - 1, WIDTH), torch.ones(1, 1, keys, dtype=torch.bool), cache, is_ours=True
    )


def test_calls_that_were_not_compared_are_the_stock_class_s() -> None:
    """Short calls, other masks, keys or position embeddings, hooks on the weights or the table, and another dropout run the stock
    class."""
    vits, (signal, _, _) = made("vits")
    shaw, (x, _) = made("shaw")
    espnet, given = made("espnet")
    for module in (vits, shaw, espnet):
        enable(module)
    assert_as_stock(shaw, x[:, :-1], is_ours=False)
    with said() as texts:
        assert_as_stock(vits, signal, signal, torch.rand(2, LENGTH, LENGTH) > 0.3, is_ours=False)  # a mask per head
    assert not texts, "ours was tried"
    with pytest.raises(TypeError, match="unexpected keyword"):
        vits(signal, signal, what=1)
    with pytest.raises(TypeError, match="missing"):
        vits(signal)
    shapes: list[torch.Size] = []
    hook = espnet.dropout.register_forward_hook(lambda _, __, weights: shapes.append(weights.shape))
    espnet(*given)
    assert shapes == [torch.Size((8, 4, LENGTH, LENGTH))]
    hook.remove()
    assert_as_stock(espnet, *given, is_ours=True)
    assert_as_stock(espnet, *given[:3], states(1, LENGTH, WIDTH), None, is_ours=False)  # rows of the older shift
    espnet.dropout = nn.Identity()
    assert_as_stock(espnet, *given, is_ours=False)
    hook = shaw.distances.register_forward_hook(lambda _, given, out: 2 * out)  # ours reads the rows without a call
    assert_as_stock(shaw, x, is_ours=False)
    hook.remove()
    shaw.distances.max_norm = 0.1  # each call changes the rows
    assert_as_stock(shaw, x, is_ours=False)


def test_layers_that_share_a_bias() -> None:
    """The second layer gets the first's bias in its small form, or in its dense form if the second is stock."""
    module = stock.GatedLayers().double().eval()
    x, mask = states(LENGTH, 8, WIDTH), ~padding(8)
    expected = results(module, (x, mask))
    assert set(enable(module, check_calls=False)) == {"first", "second"}
    for parts in ("both", "the first"):
        with Sizes() as sizes:
            assert_same(results(module, (x, mask)), expected)
        assert sizes.ours and bool(sizes.squares(LENGTH)) == (parts == "the first")
        disable(module.second)


def test_a_mask_that_shows_the_future() -> None:
    """The Music Transformer's skew leaves other rows' terms in the future: with a mask that shows a key of it, the next one for
    example, the stock class runs."""
    module, x = stock.MusicAttention().eval(), torch.randn(4, 257, WIDTH)
    enable(module, check_calls=False)
    hidden = torch.ones(257, 257)
    with_a_hole = hidden.triu(1)
    with_a_hole[3, 200] = 0
    for mask in (hidden.triu(1), hidden.triu(2), hidden.triu(3), with_a_hole, None):
        assert_as_stock(module, x, x, x, mask, is_ours=mask is not None and torch.equal(mask, hidden.triu(1)))
    hook = module.E.register_forward_hook(lambda _, given, out: 2 * out)  # rows are read, it is not called
    assert_as_stock(module, x, x, x, hidden.triu(1), is_ours=False)
    hook.remove()


def test_the_report() -> None:
    """The report has one line for a model's layers, the difference, and memory: quadratic in the length before, linear after."""
    model = nn.Sequential(*(stock.Block(stock.SpeechBlock()) for _ in range(3)))
    report = enable(model, lengths=(1024, 4096))
    (stock_short, ours_short), (stock_long, ours_long) = report.rows[0].memory
    assert None not in (stock_short, stock_long, ours_short, ours_long)
    assert 15 < stock_long / stock_short < 17 and 3 < ours_long / ours_short < 5  # type: ignore[operator]
    assert all(row.error is not None and 0 < row.error < 2.0**-30 for row in report.rows)
    text = str(report)
    assert len(report) == 3 and "*.attention (3)" in text and f"{stock_long / 2**20:,.0f} MiB" in text  # type: ignore[operator]
    assert "memory at 1,024" in text and "memory at 4,096" in text
    assert str(enable(model)) == "all relative attention was enabled before"


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["enable", "--model", "tests.enable.stock:SpeechBlock", "--by-structure", "--lengths", "512"]) == 0
    assert "VITS" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no relative attention"):
        command.main(["enable", "--model", "torch.nn:Identity"])
