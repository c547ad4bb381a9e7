"""What enable refuses, or leaves as it is: wrong arguments; modules that look like a kind and compute something else, in eval
mode, in training, in another dtype, at another length or in their next call; kinds that are not served; modules that raise. What
is refused is unchanged, whatever step enable stopped at."""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
import re
import threading
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import triton_relattn
from tests.enable import stock
from tests.enable.models import build, classes, held, output, subject
from tests.enable.stock import Altered, ShawAttention, StepByStep, enable, refusal
from tests.enable.whole_models import vision_encoder
from tools import survey
from triton_relattn import disable
from triton_relattn.integrations import libraries, transformers
from triton_relattn.integrations.transformers import door

WRONG: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "a name": ("facebook/sam-vit-base", {}, TypeError, "got the string 'facebook/sam-vit-base': load it first"),
    "a class": (stock.GridAttention, {}, TypeError, "got the class GridAttention: create an instance"),
    "a state_dict": (stock.GridAttention().state_dict(), {}, TypeError, "got a state_dict: load it into its module"),
    "a number": (3, {}, TypeError, "expects a torch.nn.Module, or an object that holds some, got int"),
    "nothing relative": (nn.Linear(2, 2), {}, ValueError, "Linear has no relative attention that triton_relattn knows"),
    "a text": (None, {"lengths": "4096"}, TypeError, "lengths must be an int, or several in a sequence, got '4096'"),
    "floats": (None, {"lengths": [8.0]}, TypeError, r"lengths must be an int, or several in a sequence, got \[8.0\]"),
    "zero": (None, {"lengths": 0}, ValueError, "lengths must be positive, got 0"),
    "a slip": (None, {"length": 8}, TypeError, "did you mean 'lengths'"),
}


@pytest.mark.parametrize("function", [enable, transformers.enable])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(function: Any, name: str) -> None:
    """The message explains the mistake in one line, and no module is changed."""
    model, options, error, message = WRONG[name]
    model = build("t5") if model is None else model
    with pytest.raises(error, match=message) as caught:
        function(model, **options)
    assert len(str(caught.value)) < 300
    assert not isinstance(model, nn.Module) or disable(model) == {}


def test_models_without_the_term() -> None:
    """Modules without relative attention stay stock, also beside one that has it."""
    rotating = build("falcon", alibi=False)
    without = [build("deberta_v2", relative_attention=False), build("deberta", pos_att_type=[])]
    for model in (rotating, vision_encoder("sam", use_rel_pos=False), *without, nn.Linear(2, 2)):
        with pytest.raises(ValueError, match=f"{type(model).__name__} has no relative attention"):
            transformers.enable(model)
    both_kinds = nn.ModuleList([rotating, build("falcon")])
    before = classes(rotating)
    assert set(enable(both_kinds)) == {"1", "1.h.0.self_attention", "1.h.1.self_attention"}
    assert classes(rotating) == before
    assert len(disable(both_kinds)) == 3


@pytest.mark.parametrize("name", ["wav2vec2_bert", "toy"])
def test_a_forward_of_its_own(name: str) -> None:
    """A forward set on the instance, as hooks of other libraries do, would hide ours: enable raises and changes nothing."""
    model, _ = subject(name)
    for module in model.modules():
        if type(module).__name__ in ("Wav2Vec2BertSelfAttention", "ShawAttention"):
            module.forward = module.forward
    before = classes(model)
    with pytest.raises(RuntimeError, match="its forward was replaced"):
        enable(model)
    assert classes(model) == before


@pytest.mark.parametrize(
    ("owner", "name", "value", "message"),
    [
        (
            libraries,
            "installed_version",
            lambda _: "4.57.3",
            "transformers 4.57.3: it is too old: versions from 5.0 on are served",
        ),
        (door, "SERVED", {}, r"is too old: this class is served from 5\.\d+ on"),  # whose attention takes no implementations
    ],
)
def test_models_that_are_too_old(owner: Any, name: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("t5")
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(RuntimeError, match=message):
        enable(model)


@pytest.mark.parametrize("message", ["the output differs by", "later_argument"])
def test_another_version_of_a_library(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of an unknown library version are compared like any other; those that compute something else stay stock."""
    model = build("bloom")
    assert enable(copy.deepcopy(model))  # the signature of a class is read once in a process
    before, stock_class = classes(model), type(model.h[0].self_attention)
    forward = stock_class.forward

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self, "inv_norm_factor", self.inv_norm_factor * (1 + 1e-6))
            return forward(self, *args, **kwargs)

    def later(self: Any, *args: Any, later_argument: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(stock_class, "forward", later if message == "later_argument" else scaled)
    with pytest.raises(RuntimeError, match=message):
        enable(model)
    assert classes(model) == before


STEPS = [f"enable.{step}" for step in ("compare", "count_bytes", "enabled_class", "Report", "change_classes")]
STEPS += ["enabled.Calls", "enabled.link_encoder", "packing._difference"]
"""What enable calls, one after the other."""


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_an_exception_at_any_step(step: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """enable fails when a step is reached for the first or the second time: the model stays as it was."""
    packs = step.startswith("packing")
    model, given = subject("deberta_v2" if packs else "t5")
    expected, before = output(model, given), held(model)
    owner: Any = importlib.import_module(f"triton_relattn.integrations.{step.partition('.')[0]}")
    reached, called = getattr(owner, step.partition(".")[2]), 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal called
        called += 1
        if called == number:
            raise KeyboardInterrupt
        return reached(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, step.partition(".")[2], interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            enable(model, packed=packs)
    if called >= number:  # some steps are reached once
        assert held(model) == before and disable(model) == {}
    else:
        disable(model)
    assert torch.equal(output(model, given), expected)


class Functional(nn.Module):
    """Drops with a probability that no child module holds."""

    def forward(self, weights: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(weights, 0.3, self.training)


def holding(module: nn.Module, **attributes: Any) -> Any:
    """The module with more attributes, buffers, or children."""
    for name, value in attributes.items():
        if type(value) is torch.Tensor:
            module.register_buffer(name, value)
        else:
            setattr(module, name, value)
    return module


def causal(module: Any, scores: torch.Tensor) -> torch.Tensor:
    """Causality from a float32 buffer of ones and zeros."""
    length = scores.shape[-1]
    return scores.masked_fill(module.visible[:length, :length] == 0, -math.inf)


def of_detached(when: Callable[[Any], bool]) -> nn.Module:
    """The right result, without the gradient of x in some mode."""
    return Altered(lambda module, _, x, mask: ShawAttention.forward(module, x.detach() if when(module) else x, mask))


def weak(module: Any, weights: torch.Tensor) -> torch.Tensor:
    """Weights whose gradient is wrong, in training only."""
    return weights.detach() + 0.1 * (weights - weights.detach()) if module.training else weights


def sharded() -> nn.Module:
    module = stock.GridAttention()
    module.rel_pos_h.device_mesh = "of a DTensor"  # type: ignore[attr-defined]
    return module


def remembering(module: Any, out: Any, x: torch.Tensor, _: Any) -> Any:
    past, module.past = module.past, x.mean()
    return out if past is None else out + past


def listing(module: Any, out: Any, *_: Any) -> Any:
    module.past.append(1.0)
    return out * len(module.past)


def counting(module: Any, out: Any, *_: Any) -> Any:
    module.past += int(module.training)
    return out


LOSSES: list[float] = []
PLACES = ("an attribute", "an own list", "a global list", "a list of an object")


class Keeping(ShawAttention):
    """Keeps something of each call for others, who would get what was kept before enable."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.losses, self.config = where, list[float](), SimpleNamespace(losses=[])

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        out = super().forward(x, mask)
        if self.where == "an attribute":
            self.attention_map = out.detach()
        else:
            lists = {"an own list": self.losses, "a global list": LOSSES, "a list of an object": self.config.losses}
            lists[self.where].append(float(out.detach().mean()))
        return out


DIFFERS, STATEFUL = "it computes something else, or takes other arguments.", "its forward changes "
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "vits, wrong sign": (lambda: stock.SpeechBlock(sign=-1.0), DIFFERS),
    "espnet, legacy shift": (lambda: stock.ConformerAttention(legacy=True), DIFFERS),
    "shaw, added after the scale": (lambda: ShawAttention(unscaled=True), DIFFERS),
    "shaw, wrong sign": (lambda: ShawAttention(sign=-1.0), DIFFERS),
    "dropout": (
        lambda: holding(stock.ConformerAttention(), dropout=Functional()),
        "drops weights with p = [0.3], ours with p = 0",
    ),
    "dropout, twice": (
        lambda: holding(StepByStep(weights=lambda module, weights: module.drop(module.drop(weights))), drop=nn.Dropout(0.1)),
        "drops weights with p = [0.05, 0.05], ours with p = [0.05]",
    ),
    "dropout of the scores": (
        lambda: holding(StepByStep(scores=lambda module, scores: module.drop(scores)), drop=nn.Dropout(0.1)),
        DIFFERS,
    ),
    "two tensors": (
        lambda: Altered(lambda _, out, x, __: (out, x @ x.mT)),
        "it returns a tuple of tensor, tensor, ours a tuple of tensor, None",
    ),
    "a dict": (lambda: Altered(lambda _, out, *__: {"out": out}), "its forward returns a dict"),
    "a gate without effect yet": (
        lambda: holding(Altered(lambda module, out, *_: out * module.gate), gate=torch.ones(1)),
        "differs by",
    ),
    "another dtype": (
        lambda: Altered(lambda _, out, x, __: out * (1.1 if x.dtype == torch.float32 else 1.0)),
        "in float32, in eval mode: the output differs by",
    ),
    "far away": (lambda: Altered(lambda _, out, x, __: out * (1 + 1e-6 * (x.shape[1] > 12)), furthest=9), "differs by"),
    "with a mask": (
        lambda: Altered(lambda _, out, __, mask: out if mask is None or mask.all() else out * (1 + 1e-6)),
        "differs by",
    ),
    "causal by numbers": (lambda: holding(StepByStep(causal), visible=torch.ones(300, 300).tril()), "differs by"),
    "no gradient": (lambda: of_detached(lambda module: True), "the gradient of x"),
    "no gradient in eval mode": (lambda: of_detached(lambda module: not module.training), "in eval mode: the gradient of x"),
    "a weaker gradient in training": (lambda: StepByStep(weights=weak), "in training mode: the gradient of"),
    "sharded": (sharded, "sharded"),
    "a state": (lambda: holding(Altered(remembering), past=None), STATEFUL),
    "a list": (lambda: holding(Altered(listing), past=[]), STATEFUL),
    "a counter": (lambda: holding(Altered(counting), past=torch.tensor(0)), STATEFUL),
    "noise": (lambda: Altered(lambda module, out, *_: out + torch.randn_like(out) * module.training), STATEFUL),
    **{f"kept in {where}": (partial(Keeping, where), STATEFUL) for where in PLACES},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_equal_stays_and_says_why(name: str) -> None:
    """A refused module also keeps no trace of a forward that was tried."""
    make, reason = REFUSED[name]
    module = make()
    before = type(module)
    message = refusal(nn.ModuleDict({"inner": module}))
    assert type(module) is before and f"left unchanged: inner ({before.__name__}, " in message and reason in message
    assert reason is not DIFFERS or "differs by" in message or "drops weights" in message
    assert not any(getattr(module, name, None) for name in ("past", "losses", "attention_map"))


class Unknown(nn.Module):
    out_features = 4

    @property
    def in_features(self) -> int:
        raise RuntimeError("not known before the first batch")


def raising(*_: Any) -> Any:
    raise KeyError("of the user")


@pytest.mark.parametrize(
    ("make", "reason"),
    [(Unknown, ""), (lambda: holding(ShawAttention(), lock=threading.Lock()), ""), (lambda: Altered(raising), "KeyError")],
    ids=["a property", "a lock", "a forward"],
)
def test_modules_that_raise(make: Callable[[], nn.Module], reason: str) -> None:
    """Modules that raise stay unchanged, and the others are enabled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = enable(nn.ModuleList([ShawAttention(), make()]))
    assert report["0"] == "ShawAttention" and reason in report.left.get("1", "")


def linear(*names: str) -> dict[str, nn.Module]:
    return {name: nn.Linear(16, 16) for name in names}


def parameters(*names: str) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(16)) for name in names}


def called(name: str, **parts: Any) -> nn.Module:
    """A module of this class with these attributes and projections, in no form that enable serves."""
    return holding(type(name, (nn.Module,), {})(), **linear("queries", "keys", "values"), **parts)  # type: ignore[no-any-return]


def bucket_attention() -> nn.Module:
    return called("BucketAttention", relative_attention_bias=nn.Embedding(8, 2))


def window_attention() -> nn.Module:
    return called("WindowAttention", relative_position_bias_table=nn.Parameter(torch.randn(9, 2)))


def test_warnings_that_are_errors() -> None:
    """If warnings are errors, enable raises before it changes anything."""
    model = nn.ModuleList([ShawAttention(), window_attention()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="enable left 1 of 2"):
            enable(model)
    assert type(model[0]) is ShawAttention


def test_recognised_and_not_replaced() -> None:
    """An error if everything was refused, a warning on the caller's line if some modules were, silence if none were."""
    refused = {"t5": bucket_attention(), "swin": window_attention()}
    message = refusal(nn.ModuleDict(refused))
    assert "tables.t5_buckets" in message and "scaled_dot_product_attention" in message
    around = nn.Module()  # around the table: its only row in the report is its child's
    around.relative_position_bias = refused["swin"]
    message = refusal(around)
    assert "relative_position_bias (WindowAttention, a bias by offset in a window of a grid" in message and "T5" not in message
    model = nn.ModuleDict({**refused, "shaw": ShawAttention()})
    for enabled in ({"shaw": "ShawAttention"}, {}):  # modules that were enabled before are no error
        with pytest.warns(UserWarning, match="enable left 2 of [23] modules .* unchanged; print") as caught:
            report = enable(model)
        assert dict(report) == enabled and set(report.left) == set(refused) and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = enable(ShawAttention())
    with pytest.raises(TypeError, match="changes the model in place"):
        report(torch.zeros(1))
    with pytest.raises(AttributeError, match=r"no 'eval'.* changes the model in place"):
        report.eval()


def of_transformers(name: str, **settings: Any) -> Any:
    kind = getattr(pytest.importorskip("transformers"), name)
    return kind(kind.config_class(**settings))


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SPATIAL = {"coordinate_size": 2, "shape_size": 4, "visual_embed": False, "has_spatial_attention_bias": True}
OURS = "docs/models.md|attn_mask"
LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    # Kinds of one user, with the call that computes them.
    "Transformer-XL": (lambda: called("Any", **linear("qkv_net", "r_net", "o_net")), r"tables\.fold_transformer_xl"),
    "WeNet": (
        lambda: called("Any", rel_k_embed=nn.Embedding(73, 4), max_left_rel_pos=64, max_right_rel_pos=8),
        r"positions=RelativePositions\(-max_left_rel_pos, max_right_rel_pos\)",
    ),
    "T5": (bucket_attention, r"tables\.t5_buckets"),
    # Families of transformers that stay stock.
    "layoutlmv3": (lambda: of_transformers("LayoutLMv3Model", **SMALL, **SPATIAL), "coordinates"),
    "prophetnet": (
        lambda: of_transformers("ProphetNetModel", hidden_size=16, num_encoder_layers=1, num_decoder_layers=1),
        "ProphetNet",
    ),
    "levit": (lambda: of_transformers("LevitModel", hidden_sizes=[16, 16, 16], depths=[1, 1, 1]), "LeViT"),
    "cpmant": (lambda: of_transformers("CpmAntModel", hidden_size=16, num_hidden_layers=1, dim_head=4, dim_ff=16), "CPM-Ant"),
    "DeBERTa's own package": (
        lambda: called("DisentangledSelfAttention", pos_att_type=["c2p"], **linear("query_proj", "pos_key_proj")),
        "DebertaV2Model",
    ),
    # What is found by its names alone.
    "Music Transformer": (lambda: called("Any", **parameters("Er")), OURS),
    "jason9693's": (lambda: called("Any", **parameters("E")), OURS),
    "EfficientConformer": (lambda: called("Any", **parameters("u", "v")), OURS),
    "EfficientConformer's layer": (lambda: called("Any", **linear("pos_layer")), OURS),
    "sooftware's Conformer": (lambda: called("Any", **parameters("u_bias", "v_bias")), OURS),
    "labml's": (lambda: called("Any", **parameters("key_pos_embeddings", "key_pos_bias", "query_pos_bias")), OURS),
    "OpenNMT": (lambda: called("Any", **linear("relative_positions_embeddings")), OURS),
    "neural_sp": (lambda: called("Any", **linear("rel_pos_enc")), OURS),
    "a matrix": (lambda: called("Any", **parameters("rel_emb")), OURS),
    "SAM-Med3D": (lambda: called("Any", **parameters("rel_pos_h", "rel_pos_w", "rel_pos_d")), OURS),
    "data2vec": (lambda: called("Any", **parameters("alibi_scale")), OURS),
}


@pytest.mark.parametrize("name", LEFT)
def test_kinds_that_are_named_and_left(name: str) -> None:
    """Each is reported with its kind, and the call or what else to use, beside a module that is enabled."""
    make, advice = LEFT[name]
    with pytest.warns(UserWarning, match="unchanged"):
        report = enable(nn.ModuleDict({"other": make(), "served": ShawAttention()}))
    assert set(report) == {"served"} and report.left
    for row in report.rows:
        assert not row.reason or re.search(advice, f"{row.kind}: {row.reason}")


def test_names_that_others_have() -> None:
    """The same names in a module without projections, or of another kind, mean nothing."""
    with pytest.raises(ValueError, match="no relative attention that triton_relattn knows"):
        enable(nn.ModuleDict({"knowledge graph": holding(nn.Module(), **parameters("Er"))}))


def test_every_class_of_transformers_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """Every class with relative attention is either supported or listed as unsupported."""
    pytest.importorskip("transformers")
    assert survey.main(["transformers"]) == 0, [line for line in capsys.readouterr().out.splitlines() if line.startswith("NEW")]


def test_look_alikes_are_listed_and_served_when_asked() -> None:
    """Alone they are refused with the word to add; beside a library's class they stay stock, and a warning lists them."""
    alone = nn.ModuleList([ShawAttention(), stock.GridAttention()])
    with pytest.raises(RuntimeError, match="by_structure=True serves it") as refused:
        triton_relattn.enable(alone)
    assert "Shaw et al." in str(refused.value) and "grid" in str(refused.value) and disable(alone) == {}
    both = nn.ModuleDict({"known": build("t5"), "look_alike": ShawAttention()})
    with pytest.warns(UserWarning, match="by_structure=True"):
        report = triton_relattn.enable(both)
    assert report and set(report.left) == {"look_alike"} and type(both["look_alike"]) is ShawAttention
    assert dict(triton_relattn.enable(both, by_structure=True)) == {"look_alike": "ShawAttention"}
