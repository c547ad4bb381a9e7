"""Relative attention in modules of no library: found by its structure, compared, and replaced where it is equal.

Calls here are long enough for the operator: on a CPU the stock class keeps those with few scores.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from tests.cpu import stock
from tests.cpu.models import Results, Sizes, assert_same, operators_dropout
from tests.cpu.stock import refusal
from tests.tolerance import assert_near
from triton_relattn import __main__ as command
from triton_relattn import disable, enable

LENGTH, WIDTH = 128, 32
GRID = (19, 20)
LONG = (16, LENGTH, WIDTH)
"""A sequence that two heads give 2**19 scores, from which on the operator is used; on a grid 2**22."""


def states(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def padding(batch: int = 16) -> torch.Tensor:
    return torch.arange(LENGTH) < torch.tensor([LENGTH, 90]).repeat(batch // 2)[:, None]


def speech(masked: bool = True) -> tuple[Any, ...]:
    signal, real = states(*LONG).mT, padding()
    return (signal, signal, *[(real[:, None, :, None] & real[:, None, None, :]).float()] * masked)


def conformer(hides: bool = False, rows: int = 2 * LENGTH - 1) -> tuple[Any, ...]:
    x, mask = states(8, LENGTH, WIDTH), padding(8)[:, None]
    return x, x, x, states(1, rows, WIDTH), ~mask if hides else mask


def hidden_keys() -> torch.Tensor:
    return torch.zeros(16, 1, 1, LENGTH).masked_fill(~padding()[:, None, None], -1e30)


def music(mask: torch.Tensor) -> tuple[Any, ...]:
    x = states(8, LENGTH, WIDTH)
    return x, x, x, mask


def joint_music() -> tuple[Any, ...]:
    x = states(LENGTH, 8, WIDTH)
    return x, x, x, None, True, torch.full((LENGTH, LENGTH), -math.inf).triu(1)


def past_conformer() -> Any:
    return stock.ConformerAttention(legacy=True, past=True)


EQUAL: dict[str, tuple[Callable[[], Any], Callable[[], tuple[Any, ...]]]] = {
    "vits": (stock.SpeechBlock, speech),
    "vits, tables per head": (lambda: stock.SpeechBlock(shared=False), lambda: speech(masked=False)),
    "espnet": (stock.ConformerAttention, conformer),
    "espnet, mask hides": (lambda: stock.ConformerAttention(hides=True), lambda: conformer(hides=True)),
    "espnet, past": (lambda: stock.ConformerAttention(past=True), conformer),
    "espnet, legacy shift, past": (past_conformer, lambda: conformer(rows=LENGTH)),
    "sam": (stock.GridAttention, lambda: (states(16, *GRID, WIDTH),)),
    "shaw": (stock.ShawAttention, lambda: (states(*LONG), padding())),
    "shaw, past first": (lambda: stock.ShawAttention(past_first=True), lambda: (states(*LONG), padding())),
    "shaw, parameter": (lambda: stock.ShawAttention(parameter=True), lambda: (states(*LONG),)),
    "enformer": (stock.FeatureAttention, lambda: (states(*LONG),)),
    "music": (stock.MusicAttention, lambda: music(torch.ones(LENGTH, LENGTH).triu(1))),
    "music, joint": (stock.JointMusicAttention, joint_music),
    "t5": (stock.BucketAttention, lambda: (0.2 * states(*LONG), hidden_keys())),
    "t5, past": (lambda: stock.BucketAttention(causal_buckets=True), lambda: (0.2 * states(*LONG),)),
}
"""Modules that are computed by the operator, and arguments."""
DIFFERENT: dict[str, Callable[[], Any]] = {
    "vits, wrong sign": lambda: stock.SpeechBlock(sign=-1.0),
    "espnet, legacy shift": lambda: stock.ConformerAttention(legacy=True),
    "shaw, added after the scale": lambda: stock.ShawAttention(unscaled=True),
    "shaw, wrong sign": lambda: stock.ShawAttention(sign=-1.0),
}


def made(name: str) -> tuple[Any, tuple[Any, ...]]:
    torch.manual_seed(0)
    build, given = EQUAL[name]
    return build().double().eval(), given()


def counted(name: str) -> torch.Tensor | None:
    """Positions that are compared: rows of padding that see nothing are not."""
    return padding()[:, None] if name == "vits" else None


def computed(module: nn.Module, given: tuple[Any, ...], counts: torch.Tensor | None = None) -> Results:
    """The output, and gradients of inputs and parameters."""
    is_leaf = [isinstance(each, torch.Tensor) and each.dtype == torch.float64 for each in given]  # masks are none
    leaves = [each.detach().requires_grad_() if leaf else each for each, leaf in zip(given, is_leaf, strict=True)]
    out = module(*leaves)
    out = out[0] if isinstance(out, tuple) else out
    out = out if counts is None else out.where(counts, 0.0)
    found = {**dict(module.named_parameters()), **{f"input {n}": each for n, each in enumerate(leaves) if is_leaf[n]}}
    d_out = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(out, list(found.values()), d_out, allow_unused=True, materialize_grads=True)
    return {"out": out.detach(), **dict(zip(found, gradients, strict=True))}


@contextmanager
def by_ours() -> Iterator[None]:
    with Sizes() as seen:
        yield
    assert seen.ours


def assert_as_stock(module: nn.Module, *given: Any) -> None:
    """A call is the stock class's, bit for bit."""
    plain = copy.deepcopy(module)
    disable(plain)
    with Sizes() as seen, torch.no_grad():
        assert torch.equal(module(*given), plain(*given))
    assert not seen.ours


@pytest.mark.parametrize("name", EQUAL)
def test_equal_modules_are_replaced(name: str) -> None:
    """Outputs and gradients are equal, no tensor is for all pairs, weights may be loaded, and disable undoes it."""
    module, given = made(name)
    stock_class, counts = type(module), counted(name)
    with Sizes() as dense:
        expected = computed(module, given, counts)
    model = nn.ModuleDict({"block": module})
    report = enable(model)
    assert dict(report) == {"block": stock_class.__name__} and not report.left
    assert isinstance(module, stock_class) and type(module) is not stock_class
    module.load_state_dict({key: each.clone() for key, each in module.state_dict().items()})
    computed(module, given, counts)  # the first call is compared with the stock class's
    computed(module, given, counts)
    with Sizes() as seen:
        ours = computed(module, given, counts)
    assert report.calls().compared == 2 and not report.calls().differing
    assert_same(ours, expected)
    pairs = GRID[0] * GRID[1] if name == "sam" else LENGTH
    assert seen.ours and dense.squares(pairs)
    # The Music Transformer's calls have a mask (N, N) themselves.
    per_head = [shape for shape in seen.squares(pairs) if math.prod(shape) > pairs**2 or "music" not in name]
    assert not per_head or name == "vits"  # whose mask is one for all pairs
    assert enable(model) == {}
    assert disable(model) == {"block": stock_class.__name__} and type(module) is stock_class


@pytest.mark.parametrize("name", ["vits", "espnet", "espnet, past", "enformer"])
def test_dropout(name: str) -> None:
    """With the weights dropped that the operator drops, in training mode."""
    module, given = made(name)
    module.train()
    if name == "enformer":
        module.pos_dropout.p = 0.0
    with operators_dropout(module.heads):
        torch.manual_seed(5)
        expected = computed(module, given, counted(name))
    enable(module)
    torch.manual_seed(5)
    with by_ours():
        ours = computed(module, given, counted(name))
    assert_same(ours, expected)


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_terms_are_left_alone(name: str) -> None:
    module = DIFFERENT[name]()
    before = type(module)
    said = refusal(nn.ModuleDict({"inner": module}))
    assert type(module) is before and before.__name__ in said
    assert "left unchanged: inner (" in said and "it computes something else" in said and "differs by" in said


class DropsByItself(stock.ConformerAttention):
    """By a probability that no child has."""

    class Functional(nn.Module):
        def forward(self, weights: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(weights, 0.3, self.training)

    def __init__(self) -> None:
        super().__init__()
        self.dropout = self.Functional()  # type: ignore[assignment]


class WithWeights(stock.ShawAttention):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        return super().forward(x, mask), x @ x.mT


class InDict(stock.ShawAttention):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        return {"out": super().forward(x, mask)}


class Gated(stock.ShawAttention):
    """By a buffer that has no effect yet."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gate", torch.ones(1))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x, mask) * self.gate  # type: ignore[operator]


class Rounding(stock.ShawAttention):
    """A bucket that is rounded otherwise, a cast, a rule for a dtype."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x, mask) * (1.1 if x.dtype == torch.float32 else 1.0)


class FarAway(stock.ShawAttention):
    """Another result beyond the window, or with a mask."""

    def __init__(self) -> None:
        super().__init__(furthest=9)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        out = super().forward(x, mask)
        return out * (1 + 1e-6) if x.shape[1] > 12 or (mask is not None and not mask.all()) else out


class NoGradient(stock.ShawAttention):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x.detach(), mask)


def sharded() -> nn.Module:
    module = stock.GridAttention()
    module.rel_pos_h.device_mesh = "of a DTensor"  # type: ignore[attr-defined]
    return module


REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (DropsByItself, "drops weights with p = {0.3}, ours with p = 0"),
    (WithWeights, "it returns a tuple of tensor, tensor, ours a tuple of tensor, None"),
    (InDict, "its forward returns a dict"),
    (Gated, "differs by"),
    (Rounding, "in float32, in eval mode: the output differs by"),
    (FarAway, "differs by"),
    (NoGradient, "the gradient of x"),
    (sharded, "sharded"),
]


@pytest.mark.parametrize(("make", "reason"), REFUSED, ids=[make.__name__ for make, _ in REFUSED])
def test_what_is_not_equal_stays_and_says_why(make: Callable[[], nn.Module], reason: str) -> None:
    assert reason in refusal(make())


class InTuple(stock.ShawAttention):
    more: tuple[None, ...] = (None, None)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        return (super().forward(x, mask), *self.more)


def dropping_behind() -> nn.Module:
    module: Any = stock.ShawAttention()
    module.wo = nn.Sequential(module.wo, nn.Dropout(0.5))
    return module.train()  # type: ignore[no-any-return]


def quantised() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(stock.ShawAttention().eval(), {nn.Linear}, dtype=torch.qint8)  # type: ignore[no-any-return]


def with_zero_tables() -> nn.Module:
    """As at the start of training."""
    module = stock.ShawAttention()
    nn.init.zeros_(module.distances.weight)
    return module


def in_bfloat16() -> nn.Module:
    return stock.ShawAttention().to(torch.bfloat16)


ACCEPTED = [InTuple, dropping_behind, quantised, with_zero_tables, in_bfloat16]


@pytest.mark.parametrize("make", ACCEPTED, ids=lambda each: each.__name__)
def test_what_changes_nothing(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    module = make()
    x = torch.randn(*LONG).to(next((each.dtype for each in module.parameters()), torch.float32))
    torch.manual_seed(3)
    expected = module(x)
    assert enable(module)
    torch.manual_seed(3)
    with by_ours():
        found = module(x)
    if isinstance(expected, tuple):
        assert type(found) is tuple and found[1:] == expected[1:]
        found, expected = found[0], expected[0]
    assert_near("the enabled module", found, expected, tolerance=2.0**-6 if make is in_bfloat16 else None)


def test_no_values_are_needed() -> None:
    """Models on the device "meta", and weights that a stock class leaves in the module with their gradients."""
    with torch.device("meta"):
        assert enable(stock.GridAttention())
    module = stock.SpeechBlock()
    signal = torch.randn(*LONG).mT
    module.attn = module(signal, signal)
    assert enable(module)
    with by_ours():
        module(signal, signal)
    assert module.attn is None


def test_scripted_modules_are_passed_by() -> None:
    model = nn.ModuleList([torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), stock.ShawAttention()])
    assert dict(enable(model)) == {"1": "ShawAttention"}


def test_position_embeddings_of_each_sequence() -> None:
    """Where the stock class wants as many as there are sequences."""

    class OfEach(stock.ConformerAttention):
        def forward(self, query, key, value, pos_embedding, mask):  # type: ignore[no-untyped-def]
            assert len(pos_embedding) == len(query)
            return super().forward(query, key, value, pos_embedding, mask)

    module = OfEach().double().eval()
    x, positions = states(8, LENGTH, WIDTH), states(8, 2 * LENGTH - 1, WIDTH)
    expected = module(x, x, x, positions, None)
    assert enable(module)
    assert_near("the enabled module", module(x, x, x, positions, None), expected)


class Cached(stock.ConformerAttention):
    """With a cache (1, H, cached keys, 2D), as wenet's descendants have it; it returns the next one."""

    def forward(self, query, key, value, pos_embedding, mask, cache=None):  # type: ignore[no-untyped-def]
        q, k, v = (stock.heads_of(each, self.heads) for each in (self.q_proj(query), self.k_proj(key), self.v_proj(value)))
        if cache is not None and cache.numel() > 0:
            k, v = (torch.cat((past, own), 2) for past, own in zip(cache.chunk(2, -1), (k, v), strict=True))
        p = stock.heads_of(self.pos_proj(pos_embedding), self.heads)
        rows = (q + self.v_bias[:, None]) @ p.mT
        padded = nn.functional.pad(rows, (1, 0)).view(*rows.shape[:2], rows.shape[3] + 1, rows.shape[2])
        term = padded[:, :, 1:].reshape(rows.shape)[..., : k.shape[2]]
        scores = ((q + self.u_bias[:, None]) @ k.mT + term) / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask[:, None] == 0, -1e30)
        out = (self.dropout(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2)
        return self.out_proj(out), torch.cat((k, v), -1)


def test_a_cache() -> None:
    """One tensor of keys and values, before the call's own; what is returned is the next cache."""
    torch.manual_seed(0)
    module, queries, past = Cached().double().eval(), 384, 6
    keys = queries + past
    x, positions, mask = states(1, queries, WIDTH), states(1, 2 * keys - 1, WIDTH), torch.ones(1, 1, keys, dtype=torch.bool)
    given = x, x, x, positions, mask, states(1, 4, past, 2 * WIDTH // 4)
    expected = module(*given)
    assert enable(module)
    with by_ours():
        found = module(*given)
    for ours, each in zip(found, expected, strict=True):
        assert_near("out and cache", ours, each)


def test_calls_that_were_not_compared_are_the_stock_class_s() -> None:
    """Few scores; other masks, keys and position embeddings; hooks that watch the weights or the table; another dropout."""
    vits, (signal, _, _) = made("vits")
    shaw, (x, _) = made("shaw")
    espnet, given = made("espnet")
    t5, (hidden, mask) = made("t5")
    for module in (vits, shaw, espnet, t5):
        enable(module)
    assert_as_stock(shaw, x[:, :-1])
    assert_as_stock(vits, signal, signal, torch.rand(2, LENGTH, LENGTH) > 0.3)  # one per head
    with pytest.raises(TypeError, match="unexpected keyword"):
        vits(signal, signal, what=1)
    with pytest.raises(TypeError, match="missing"):
        vits(signal)
    assert_as_stock(t5, hidden, torch.rand(LENGTH, LENGTH) > 0.3)  # booleans, which are added
    trained = mask.double().clamp(min=-1).requires_grad_()
    t5(hidden, trained).sum().backward()
    assert trained.grad is not None and trained.grad.any()
    seen: list[torch.Size] = []
    hook = espnet.dropout.register_forward_hook(lambda _, __, weights: seen.append(weights.shape))
    espnet(*given)
    assert seen == [torch.Size((8, 4, LENGTH, LENGTH))]
    hook.remove()
    with by_ours():
        espnet(*given)
    espnet.dropout = nn.Identity()
    assert_as_stock(espnet, *given)
    hook = shaw.distances.register_forward_hook(lambda _, given, out: 2 * out)  # rows are read, it is not called
    assert_as_stock(shaw, x)
    hook.remove()
    shaw.distances.max_norm = 0.1  # a call changes the rows
    assert_as_stock(shaw, x)


class Limited(stock.ShawAttention):
    """A setting that has no effect at first."""

    factor = 1.0

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.factor * super().forward(x, mask)


def test_an_attribute_that_is_set_is_noticed_at_once() -> None:
    module, x = Limited().double().eval(), states(*LONG)
    enable(module)
    for _ in range(6):
        module(x)
    module.factor = 2.0
    plain = copy.deepcopy(module)
    disable(plain)
    with pytest.warns(UserWarning, match="differs from the stock forward"):
        assert torch.equal(module(x), plain(x))


def test_classes_and_functions_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class's attribute, a forward that somebody has replaced, and a function of its module."""
    x = states(*LONG)
    for place, name, value in (
        (Limited, "factor", 2.0),
        (Limited, "forward", lambda self, x, mask=None: 2 * stock.ShawAttention.forward(self, x, mask)),
        (stock, "heads_of", lambda states, heads: states.unflatten(2, (heads, -1)).transpose(1, 2).flip(1)),
    ):
        module = Limited().double().eval()
        enable(module)
        with monkeypatch.context() as patch, pytest.warns(UserWarning, match="differs from the stock forward"):
            patch.setattr(place, name, value)
            module(x)
        assert type(module) is Limited


def test_what_may_change() -> None:
    """Weights, mode, and numbers in buffers."""
    module, x = stock.ShawAttention().double().eval(), states(*LONG)
    module.register_buffer("numbers", states(3))
    enable(module)
    module.load_state_dict({name: each + 0.5 for name, each in module.state_dict().items()})
    module.train().eval()
    plain = copy.deepcopy(module)
    disable(plain)
    with by_ours():
        assert_near("out", module(x), plain(x))


def test_recognised_and_not_replaced() -> None:
    """An error if all of it was refused, a warning on the caller's line if some was, nothing to be read if none was."""
    refused = {"t5": stock.SharedBucketAttention(), "swin": stock.WindowAttention()}
    said = refusal(nn.ModuleDict(refused))
    assert "tables.t5_buckets" in said and "scaled_dot_product_attention" in said
    around = nn.Module()  # of the table: the only row is its child's
    around.relative_position_bias = refused["swin"]
    said = refusal(around)
    assert "relative_position_bias (WindowAttention, a bias by offset in a window of a grid" in said and "T5" not in said
    model = nn.ModuleDict({**refused, "shaw": stock.ShawAttention()})
    for enabled in ({"shaw": "ShawAttention"}, {}):  # what was enabled before is no error
        with pytest.warns(UserWarning, match="enable left 2 of [23] modules .* unchanged; print") as caught:
            report = enable(model)
        assert dict(report) == enabled and set(report.left) == set(refused) and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = enable(stock.ShawAttention())
    with pytest.raises(TypeError, match="changes the model in place"):
        report(torch.zeros(1))
    with pytest.raises(AttributeError, match=r"no 'eval'.* changes the model in place"):
        report.eval()


SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
STOCK_ALONE: dict[str, tuple[str, dict[str, Any], str]] = {
    "layoutlmv3": (
        "LayoutLMv3Model",
        {**SMALL, "coordinate_size": 2, "shape_size": 4, "visual_embed": False, "has_spatial_attention_bias": True},
        "coordinates",
    ),
    "prophetnet": ("ProphetNetModel", {"hidden_size": 16, "num_encoder_layers": 1, "num_decoder_layers": 1}, "ProphetNet"),
    "levit": ("LevitModel", {"hidden_sizes": [16, 16, 16], "depths": [1, 1, 1]}, "LeViT"),
    "cpmant": ("CpmAntModel", {"hidden_size": 16, "num_hidden_layers": 1, "dim_head": 4, "dim_ff": 16}, "CPM-Ant"),
}


@pytest.mark.parametrize("name", STOCK_ALONE)
def test_families_that_stay_stock(name: str) -> None:
    """Each is named beside a module that is enabled, with what to do."""
    transformers = pytest.importorskip("transformers")
    class_name, settings, word = STOCK_ALONE[name]
    stock_class = getattr(transformers, class_name)
    model = stock_class(stock_class.config_class(**settings))
    with pytest.warns(UserWarning, match="unchanged"):
        report = enable(nn.ModuleDict({"stock": model, "served": stock.ShawAttention()}))
    assert set(report) == {"served"} and report.left
    assert all(word in row.kind and "use" in row.reason for row in report.rows if row.reason)


def test_the_report() -> None:
    """A line for the layers of a model, the difference, and memory: square in the length before, linear after."""
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


@pytest.mark.parametrize("name", ["vits", "espnet", "sam", "shaw", "enformer", "music", "t5"])
def test_compiled(name: str) -> None:
    """As one graph, as the stock module."""
    module, given = made(name)
    module.eval()
    enable(module)
    expected = module(*given)
    found = torch.compile(module, backend="aot_eager", fullgraph=True)(*given)
    for one, other in zip(*(each if isinstance(each, tuple) else (each,) for each in (found, expected)), strict=True):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            assert_near("the enabled model", one, other)


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["enable", "--model", "tests.cpu.stock:SpeechBlock", "--lengths", "512"]) == 0
    assert "VITS" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no relative attention"):
        command.main(["enable", "--model", "torch.nn:Identity"])
