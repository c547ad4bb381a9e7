"""Relative attention in modules of no library: found by its structure, proven, and replaced where it is equal."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import triton_relattn
from tests.cpu import stock
from tests.cpu.models import is_square, operators_dropout
from tests.cpu.stock import refusal
from tests.tolerance import assert_near
from triton_relattn import __main__ as command
from triton_relattn import disable, enable
from triton_relattn.integrations import proof, structure
from triton_relattn.integrations.structure import memory, proving
from triton_relattn.integrations.structure.kind import kind_in

LENGTH, WIDTH = 13, 32


def states(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def padding(batch: int = 2) -> torch.Tensor:
    return torch.arange(LENGTH) < torch.tensor([LENGTH, 9])[:batch, None]


def speech() -> tuple[Any, ...]:
    signal, real = states(2, WIDTH, LENGTH), padding()
    return signal, signal, (real[:, None, :, None] & real[:, None, None, :]).float()


def conformer(hides: bool = False, rows: int = 2 * LENGTH - 1) -> tuple[Any, ...]:
    x, mask = states(2, LENGTH, WIDTH), padding()[:, None]
    return x, x, x, states(1, rows, WIDTH), ~mask if hides else mask


def bucket_mask() -> torch.Tensor:
    return torch.zeros(2, 1, 1, LENGTH).masked_fill(~padding()[:, None, None], -1e30)


EQUAL: dict[str, tuple[Any, Any]] = {
    "vits": (stock.SpeechBlock, speech),
    "vits, tables for each head": (lambda: stock.SpeechBlock(shared=False), speech),
    "espnet": (stock.ConformerAttention, conformer),
    "espnet, mask hides": (lambda: stock.ConformerAttention(hides=True), lambda: conformer(hides=True)),
    "espnet, past": (lambda: stock.ConformerAttention(past=True), conformer),
    "espnet, legacy shift, past": (
        lambda: stock.ConformerAttention(legacy=True, past=True),
        lambda: conformer(rows=LENGTH),
    ),
    "sam": (stock.GridAttention, lambda: (states(2, 4, 7, WIDTH),)),
    "shaw": (stock.ShawAttention, lambda: (states(2, LENGTH, WIDTH), padding())),
    "shaw, past first": (lambda: stock.ShawAttention(past_first=True), lambda: (states(2, LENGTH, WIDTH), padding())),
    "shaw, parameter": (lambda: stock.ShawAttention(parameter=True), lambda: (states(2, LENGTH, WIDTH),)),
    "enformer": (stock.FeatureAttention, lambda: (states(2, LENGTH, WIDTH),)),
    "t5": (stock.BucketAttention, lambda: (0.2 * states(2, LENGTH, WIDTH), bucket_mask())),
    "t5, past": (lambda: stock.BucketAttention(causal_buckets=True), lambda: (0.2 * states(2, LENGTH, WIDTH),)),
}
"""Modules that are computed by the operator, and arguments."""
DIFFERENT: dict[str, Any] = {
    "vits, wrong sign": lambda: stock.SpeechBlock(sign=-1.0),
    "espnet, legacy shift": lambda: stock.ConformerAttention(legacy=True),
    "shaw, added after the scale": lambda: stock.ShawAttention(unscaled=True),
    "shaw, wrong sign": lambda: stock.ShawAttention(sign=-1.0),
}
equal = pytest.mark.parametrize("name", EQUAL)


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_RELATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(proof, "_passed", {})
    monkeypatch.setattr(structure, "_proven", {})
    for kind in structure.KINDS:
        monkeypatch.setattr(kind, "fewest", 0)


def made(name: str) -> tuple[Any, tuple[Any, ...]]:
    torch.manual_seed(0)
    build, given = EQUAL[name]
    return build().double().eval(), given()


def computed(module: nn.Module, given: tuple[Any, ...], counts: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The output, and gradients of inputs and parameters."""
    leaves = [each.detach().requires_grad_() if each.is_floating_point() and each.dim() != 4 else each for each in given]
    out = module(*leaves)
    out = out if counts is None else out.where(counts, 0.0)
    found = {**dict(module.named_parameters()), **{f"input {n}": each for n, each in enumerate(leaves) if each.requires_grad}}
    d_out = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(out, list(found.values()), d_out, allow_unused=True, materialize_grads=True)
    return {"the output": out.detach(), **dict(zip((f"the gradient of {each}" for each in found), gradients, strict=True))}


def counted(name: str) -> torch.Tensor | None:
    """Positions that are compared: rows of padding that see nothing are not."""
    return padding()[:, None] if name.startswith("vits") else None


@equal
def test_equal_modules_are_replaced(name: str) -> None:
    """With all that a model's user may have done to the module; and disable undoes it."""
    module, given = made(name)
    stock_class, weights = type(module), {key: each.clone() for key, each in module.state_dict().items()}
    expected = computed(module, given, counted(name))
    model = nn.ModuleDict({"block": module})
    called: list[str] = []
    module.register_forward_hook(lambda *_: called.append(name))
    report = enable(model)
    assert dict(report) == {"block": stock_class.__name__} and not report.left
    assert isinstance(module, stock_class) and type(module) is not stock_class and kind_in(module) is not None
    proof.compare(name, computed(module, given, counted(name)), expected)
    assert called == [name]
    assert module.state_dict().keys() == weights.keys()
    module.load_state_dict(weights)
    assert enable(model) == {}
    assert disable(model) == {"block": stock_class.__name__}
    assert type(module) is stock_class and disable(model) == {}


@equal
def test_no_tensor_for_all_pairs(name: str) -> None:
    """But in the stock class."""
    length = 144
    module = made(name)[0].float()
    enable(module)
    kind = kind_in(module)
    assert kind is not None
    given = type(kind).at_length(module, kind.reading, length, None)
    given = {each: torch.randn(value.shape).to(value.dtype) for each, value in given.items()}
    squares: list[Any] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            squares.extend(
                func for each in tree_leaves(out) if isinstance(each, torch.Tensor) and is_square(tuple(each.shape), length)
            )
            return out

    with Watch(), torch.no_grad():
        module(**given)
    assert not squares
    disable(module)
    with Watch(), torch.no_grad():
        module(**given)
    assert squares


@pytest.mark.parametrize("name", ["vits", "espnet", "espnet, past", "enformer"])
def test_dropout_is_the_stock_module_s(name: str) -> None:
    """With the weights dropped that the operator drops, in training mode."""
    module, given = made(name)
    heads = module.heads
    module.train()
    if name == "enformer":
        module.pos_dropout.p = 0.0
    with operators_dropout(heads):
        torch.manual_seed(5)
        expected = computed(module, given, counted(name))
    enable(module)
    torch.manual_seed(5)
    proof.compare(name, computed(module, given, counted(name)), expected)


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_terms_are_left_alone(name: str) -> None:
    module = DIFFERENT[name]()
    before = type(module)
    said = refusal(nn.ModuleDict({"inner": module}))
    assert type(module) is before and before.__name__ in said
    assert "left as they were: inner (" in said and "it computes something else" in said and "differs by" in said


def test_what_a_user_changes_later_makes_calls_the_stock_class_s() -> None:
    """Settings of the module, its dropout, or hooks that watch the weights: nothing of that was in the proof."""
    module, given = made("espnet")
    enable(module)
    ours = module(*given)
    module.past = True
    expected = stock.ConformerAttention.forward(module, *given)
    assert torch.equal(module(*given), expected) and not torch.equal(ours, expected)
    module.past = False
    assert torch.equal(module(*given), ours)
    seen: list[torch.Size] = []
    hook = module.dropout.register_forward_hook(lambda _, __, weights: seen.append(weights.shape))
    module(*given)
    assert seen == [torch.Size((2, 4, LENGTH, LENGTH))]
    hook.remove()
    module.dropout = nn.Identity()
    assert torch.equal(module(*given), stock.ConformerAttention.forward(module, *given))


def test_a_forward_that_counts_its_calls_is_left_alone() -> None:
    class Counting(stock.ShawAttention):
        calls = 0

        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            self.calls += 1
            return super().forward(x, mask)

    assert "its forward changes calls" in refusal(Counting())


def test_weights_that_the_forward_drops_by_itself() -> None:
    """A probability that no child has is not known to us when the module is called."""

    class Functional(nn.Module):
        def forward(self, weights: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(weights, 0.3, self.training)

    module = stock.ConformerAttention()
    module.dropout = Functional()  # type: ignore[assignment]
    assert "drops weights with p = [0.3], ours with p = 0" in refusal(module)


def test_recognised_and_not_replaced() -> None:
    """An error if all of it was refused, a warning on the caller's line if some was, nothing to be read if none was."""
    refused = {"t5": stock.SharedBucketAttention(), "swin": stock.WindowAttention()}
    said = refusal(nn.ModuleDict(refused))
    assert "tables.t5_buckets" in said and "scaled_dot_product_attention" in said
    model = nn.ModuleDict({**refused, "shaw": stock.ShawAttention()})
    for enabled in ({"shaw": "ShawAttention"}, {}):  # what was enabled before is no error
        with pytest.warns(UserWarning, match="enable left 2 of [23] modules .* as they were; print") as caught:
            report = enable(model)
        assert dict(report) == enabled and set(report.left) == set(refused) and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = enable(stock.ShawAttention())
    with pytest.raises(TypeError, match="changes the model in place"):
        report(torch.zeros(1))
    with pytest.raises(AttributeError, match=r"no 'eval'.* changes the model in place"):
        report.eval()


def test_calls_that_were_not_proven_are_the_stock_class_s() -> None:
    """Position embeddings of another length, other keys than the sequence's own, an argument without a role."""
    torch.manual_seed(0)
    module = stock.SpeechBlock().double().eval()
    enable(module)
    kind = kind_in(module)
    assert kind is not None
    signal, other = states(2, WIDTH, 8), states(2, WIDTH, 8)
    calls: list[str] = []
    original = type(kind).compute

    def compute(*args: Any, **given: Any) -> Any:
        calls.append("ours")
        return original(*args, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(kind), "compute", compute)
        module(signal, other)
        assert calls == ["ours"]
        module(signal, other, torch.ones(8, 8))  # a mask of two dimensions
        assert calls == ["ours"]
        with pytest.raises(TypeError, match="unexpected keyword"):
            module(signal, other, what=1)
        with pytest.raises(TypeError, match="missing"):
            module(signal)


def test_few_scores_are_the_stock_class_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where a call costs more than it saves: bit for bit what the stock class computes."""
    module, given = made("shaw")
    expected = module(*given)
    enable(module)
    assert not torch.equal(module(*given), expected)
    monkeypatch.setattr(structure.ClippedDistances, "fewest", 2 * 2 * LENGTH**2)  # sequences and heads
    assert not torch.equal(module(*given), expected)
    monkeypatch.setattr(structure.ClippedDistances, "fewest", 2 * 2 * LENGTH**2 + 1)
    assert torch.equal(module(*given), expected)


def test_lengths_of_conformers_that_were_not_proven() -> None:
    module = stock.ConformerAttention().double().eval()
    given = states(1, 5, WIDTH), states(1, 7, WIDTH)
    expected = module(given[0], given[0], given[0], given[1], None)
    enable(module)
    assert torch.equal(module(given[0], given[0], given[0], given[1], None), expected)


@equal
def test_copies_and_files_are_enabled(name: str) -> None:
    module, given = made(name)
    enable(module)
    expected = module(*given)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for each in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
        assert type(each) is type(module)
        assert torch.equal(each(*given), expected)


def test_a_file_of_another_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was proven is not what is loaded: it comes back as the stock class."""
    module, given = made("shaw")
    enable(module)
    saved = pickle.dumps(module)
    monkeypatch.setattr(structure.kind.sources, "of_class", lambda _: "another")
    with pytest.warns(UserWarning, match="is another than when it was saved"):
        loaded = pickle.loads(saved)
    assert type(loaded) is stock.ShawAttention
    assert_near("the enabled model", loaded(*given), module(*given))


def test_proofs_are_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For the class's source and settings: in this process, in the user's folder; not for other settings."""
    first = enable(stock.SpeechBlock()).rows[0]
    assert first.error is not None and 0 < first.error < proof.LIMIT

    def fail(*_: Any) -> None:
        raise AssertionError("proven again")

    monkeypatch.setattr(structure, "prove", fail)
    assert enable(stock.SpeechBlock()).rows[0] == first
    monkeypatch.setattr(proof, "_passed", {})
    monkeypatch.setattr(structure, "_proven", {})
    module = stock.SpeechBlock()
    assert enable(module).rows[0] == first  # of the file
    assert module.to_query is not None and kind_in(module) is not None
    with pytest.raises(AssertionError, match="proven again"):
        enable(stock.SpeechBlock(reach=5))
    monkeypatch.setattr(structure.sources, "of_class", lambda _: "another")
    monkeypatch.setattr(structure, "_proven", {})
    with pytest.raises(AssertionError, match="proven again"):
        enable(stock.SpeechBlock())


def test_classes_without_a_file_are_proven_in_each_process(tmp_path: Path) -> None:
    class Local(stock.ShawAttention):
        pass

    assert structure.sources.of_class(Local) is None
    assert dict(enable(Local())) == {"": "Local"}
    assert not list(tmp_path.rglob("*.txt"))
    assert structure.sources.of_class(stock.ShawAttention) is not None


def test_what_the_user_has_set_does_not_matter_and_stays() -> None:
    """Half precision, another default dtype, no gradients, a device as a context, a random state."""
    module = stock.GridAttention().to(torch.bfloat16)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with torch.inference_mode(), torch.device("meta"):
        assert enable(module)
    assert torch.equal(torch.rand(3), expected)
    assert module(torch.randn(1, 3, 4, WIDTH, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert all(each.dtype == torch.bfloat16 for each in module.parameters())


def test_weights_of_no_value() -> None:
    """Models on the device "meta", or whose tables are zero as at the start of training, are proven as all others."""
    with torch.device("meta"):
        module = stock.GridAttention()
    assert enable(module)
    zero = stock.GridAttention()
    nn.init.zeros_(zero.rel_pos_h)
    assert enable(zero) and not zero.rel_pos_h.any()


def test_state_of_training_may_be_left_in_the_module() -> None:
    """As stock classes leave their weights, with gradients, which cannot be copied."""
    module = stock.SpeechBlock()
    module.attn = module(states(1, WIDTH, 5).float(), states(1, WIDTH, 5).float())
    assert enable(module)
    module(torch.randn(1, WIDTH, 5), torch.randn(1, WIDTH, 5))
    assert module.attn is None


class Adapter(nn.Module):
    """A linear layer with a correction of low rank, as adapters have it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)
        self.in_features, self.out_features = base.in_features, base.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("before", [True, False])
def test_adapters(before: bool) -> None:
    torch.manual_seed(0)
    module: Any = stock.ShawAttention().eval()
    x = torch.randn(2, 9, WIDTH)
    if not before:
        enable(module)
    module.wq, module.wv = Adapter(module.wq), Adapter(module.wv)
    if before:
        expected = module(x)
        enable(module)
    out = module(x)
    out.sum().backward()
    assert module.wq.up.weight.grad is not None and module.wq.up.weight.grad.any()
    disable(module)
    assert_near("the enabled model", out, expected if before else module(x))


def test_quantised_projections() -> None:
    """Which are called as the stock class calls them."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.ao.quantization.quantize_dynamic(stock.ShawAttention().eval(), {nn.Linear}, dtype=torch.qint8)
    x = torch.randn(2, 9, WIDTH)
    expected = module(x)
    assert enable(module), str(enable)
    assert_near("the enabled model", module(x), expected)


@pytest.mark.parametrize("more", [(), (None,), (None, None)])
def test_tuples_are_returned_as_tuples(more: tuple[None, ...]) -> None:
    class InTuple(stock.ShawAttention):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
            return (super().forward(x, mask), *more)

    module = InTuple().double()
    x = states(2, 9, WIDTH)
    expected = module(x)
    assert enable(module)
    found = module(x)
    assert type(found) is tuple and found[1:] == expected[1:]
    assert_near("the enabled module", found[0], expected[0])


def test_other_results_are_left_alone() -> None:
    """Weights beside the output, which ours does not make; a list; a dict."""

    class WithWeights(stock.ShawAttention):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
            return super().forward(x, mask), x @ x.mT

    class InList(stock.ShawAttention):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
            return [super().forward(x, mask)]

    class InDict(stock.ShawAttention):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
            return {"out": super().forward(x, mask)}

    assert "it returns a tuple of tensor, tensor, ours a tensor" in refusal(WithWeights())
    assert "its forward returns a list" in refusal(InList())
    assert "its forward returns a dict" in refusal(InDict())


def test_a_mask_that_is_trained_is_the_stock_class_s() -> None:
    module, given = made("t5")
    enable(module)
    mask = bucket_mask().double().clamp(min=-1).requires_grad_()
    module(given[0], mask).sum().backward()
    assert mask.grad is not None and mask.grad.any()


def test_a_buffer_without_an_effect_is_noticed() -> None:
    """It might have one later."""

    class Gated(stock.ShawAttention):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("gate", torch.ones(1))
            self.register_buffer("unused", torch.ones(3))

        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x, mask) * self.gate  # type: ignore[operator]

    assert "differs by" in refusal(Gated())

    class NotUsed(stock.ShawAttention):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("unused", torch.ones(3))

    assert enable(NotUsed())


def test_what_differs_in_float32_alone_is_noticed() -> None:
    """A bucket that is rounded otherwise, a cast, a rule for a dtype."""

    class Rounding(stock.ShawAttention):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x, mask) * (1.1 if x.dtype == torch.float32 else 1.0)

    assert "in float32: the output differs by" in refusal(Rounding())


def test_a_dropout_behind_the_projection() -> None:
    """As one module: it is called as the stock class calls it."""
    torch.manual_seed(0)
    module: Any = stock.ShawAttention().double()
    module.wo = nn.Sequential(module.wo, nn.Dropout(0.5))
    x = states(2, 9, WIDTH)
    torch.manual_seed(3)
    expected = module(x)
    assert enable(module)
    torch.manual_seed(3)
    assert_near("the enabled module", module(x), expected)


def test_position_embeddings_of_each_sequence() -> None:
    """Where the stock class wants as many as there are sequences."""

    class OfEach(stock.ConformerAttention):
        def forward(self, query, key, value, pos_embedding, mask):  # type: ignore[no-untyped-def]
            assert len(pos_embedding) == len(query)
            return super().forward(query, key, value, pos_embedding, mask)

    module = OfEach().double().eval()
    x, positions = states(2, 9, WIDTH), states(2, 17, WIDTH)
    expected = module(x, x, x, positions, None)
    assert enable(module)
    assert_near("the enabled module", module(x, x, x, positions, None), expected)


def test_scripted_modules_are_passed_by() -> None:
    model = nn.ModuleList([torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), stock.ShawAttention()])
    assert dict(enable(model)) == {"1": "ShawAttention"}


def test_hooks_that_replace_the_forward_and_shards() -> None:
    module = stock.ShawAttention()
    module.forward = module.forward  # type: ignore[method-assign]
    assert "a forward of its own" in refusal(module)
    sharded = stock.GridAttention()
    sharded.rel_pos_h.device_mesh = "of a DTensor"  # type: ignore[attr-defined]
    assert "sharded" in refusal(sharded)


def test_compiled() -> None:
    module, given = made("espnet")
    expected = module(*given)
    enable(module)
    assert_near("the enabled model", torch.compile(module, backend="aot_eager", fullgraph=True)(*given), expected)


def test_objects_that_hold_modules() -> None:
    """Pipelines: their attributes, and the components of those of diffusers."""

    class Pipeline:
        def __init__(self) -> None:
            self.model, self.name = stock.ShawAttention(), "a pipeline"

        @property
        def components(self) -> dict[str, Any]:
            return {"encoder": nn.ModuleList([stock.GridAttention()]), "tokenizer": None}

    parts = Pipeline()
    report = enable(parts)
    assert dict(report) == {"model": "ShawAttention", "encoder.0": "GridAttention"}
    assert disable(parts) == {"model": "ShawAttention"}  # the others were made anew


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("facebook/sam-vit-base", TypeError, "got the string 'facebook/sam-vit-base': load it first"),
        (stock.GridAttention, TypeError, "got the class GridAttention: make one"),
        (stock.GridAttention().state_dict(), TypeError, "got a state_dict: load it into the module"),
        (3, TypeError, "wants a torch.nn.Module, or an object that holds some, got int"),
        (nn.Linear(2, 2), ValueError, "Linear has no relative attention that triton_relattn knows"),
    ],
    ids=["name", "class", "state_dict", "number", "nothing"],
)
def test_what_cannot_be_enabled(model: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        enable(model)
    assert len(str(caught.value)) < 300


@equal
def test_memory_is_counted_as_it_is(name: str) -> None:
    """What is counted without values is what a run with values takes."""
    module = made(name)[0].float()
    enable(module)
    kind = kind_in(module)
    assert kind is not None
    given = type(kind).at_length(module, kind.reading, 64, None)
    given = {each: torch.zeros(value.shape).to(value.dtype) for each, value in given.items()}
    disable(module)
    counted_bytes = memory.of_forward(type(kind), kind.reading, module, 64, None)
    with torch.no_grad(), memory._Counter() as counter:
        module.eval()(**given)
    assert counted_bytes == counter.peak > 0


def test_memory_of_the_report() -> None:
    """Square in the length before, linear after."""
    report = enable(nn.ModuleDict({"a": stock.SpeechBlock()}), lengths=(1024, 4096))
    (stock_short, ours_short), (stock_long, ours_long) = report.rows[0].memory
    assert stock_short is not None and stock_long is not None and ours_short is not None and ours_long is not None
    assert 15 < stock_long / stock_short < 17 and 3 < ours_long / ours_short < 5
    text = str(report)
    assert "memory at 1,024" in text and "memory at 4,096" in text and f"{stock_long / 2**20:,.0f} MiB" in text


def test_layers_of_a_model_are_one_line() -> None:
    model = nn.Sequential(*(stock.Block(stock.ShawAttention()) for _ in range(3)))
    report = enable(model)
    assert len(report) == 3 and "*.attention (3)" in str(report)
    assert str(enable(model)) == "all relative attention was enabled before"


def test_on_the_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert command.main(["enable", "--model", "tests.cpu.stock:SpeechBlock", "--lengths", "512"]) == 0
    assert "VITS" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"package\.module:factory"):
        command.main(["enable", "--model", "tests.cpu.stock"])
    with pytest.raises(SystemExit, match="no relative attention"):
        command.main(["enable", "--model", "torch.nn:Identity"])


def test_the_door_is_imported_when_it_is_used() -> None:
    assert "enable" not in vars(triton_relattn) and triton_relattn.enable is enable
    with pytest.raises(AttributeError, match="no attribute 'enabled'"):
        triton_relattn.enabled  # noqa: B018
    assert sys.modules["triton_relattn.integrations.every"]


def test_every_sample_tells_something() -> None:
    """The proof notices each fault that its samples are for: a term that fails only beyond the window, or with a mask."""

    class FarAway(stock.ShawAttention):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            out = super().forward(x, mask)
            return out * 1.001 if x.shape[1] > 12 or (mask is not None and not mask.all()) else out

    class NoGradient(stock.ShawAttention):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x.detach(), mask)

    assert "differs by" in refusal(FarAway(furthest=9))
    assert "the gradient of x" in refusal(NoGradient())


def test_copies_for_proofs_are_bare() -> None:
    """Same shapes and settings, other numbers, no hooks; the module keeps what it has."""
    module = stock.GridAttention()
    module.register_forward_hook(lambda *_: None)
    module.qkv.register_forward_pre_hook(lambda *_: None)
    weights = {name: each.clone() for name, each in module.named_parameters()}
    bare = proving.bare_copy(module)
    assert not bare._forward_hooks and not bare.qkv._forward_pre_hooks and module._forward_hooks
    for name, each in bare.named_parameters():
        assert each.shape == weights[name].shape and each.dtype == torch.float64 and each.requires_grad
        assert torch.equal(module.get_parameter(name), weights[name])
