"""What enable leaves as it is: modules that look like a kind and compute something else, in eval mode, in training, in another
dtype, at another length or in their next call; kinds that the operator does not compute; modules that raise."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests import survey
from tests.cpu import stock
from tests.cpu.stock import Altered, ShawAttention, StepByStep, enable, refusal


def dropping_by_itself() -> nn.Module:
    """Drops with a probability that no child module holds."""
    module = stock.ConformerAttention()
    module.dropout = Functional()  # type: ignore[assignment]
    return module


class Functional(nn.Module):
    def forward(self, weights: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(weights, 0.3, self.training)


def with_attribute(module: nn.Module, name: str, value: Any) -> nn.Module:
    """The module with one more attribute, buffer, or child."""
    if type(value) is torch.Tensor:
        module.register_buffer(name, value)
    else:
        setattr(module, name, value)
    return module


def rounded(_: Any, out: Any, x: torch.Tensor, __: Any) -> Any:
    """Gives another result in another dtype."""
    return out * (1.1 if x.dtype == torch.float32 else 1.0)


def far(_: Any, out: Any, x: torch.Tensor, mask: torch.Tensor | None) -> Any:
    """Gives another result beyond the window, or with a mask."""
    return out * (1 + 1e-6) if x.shape[1] > 12 or (mask is not None and not mask.all()) else out


def causal(module: Any, scores: torch.Tensor) -> torch.Tensor:
    """Causality from a float32 buffer of ones and zeros."""
    length = scores.shape[-1]
    return scores.masked_fill(module.visible[:length, :length] == 0, -math.inf)


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


def noisy(module: Any, out: Any, *_: Any) -> Any:
    return out + torch.randn_like(out) if module.training else out


DIFFERS, STATEFUL = "it computes something else, or takes other arguments.", "its forward changes "
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "vits, wrong sign": (lambda: stock.SpeechBlock(sign=-1.0), DIFFERS),
    "espnet, legacy shift": (lambda: stock.ConformerAttention(legacy=True), DIFFERS),
    "shaw, added after the scale": (lambda: ShawAttention(unscaled=True), DIFFERS),
    "shaw, wrong sign": (lambda: ShawAttention(sign=-1.0), DIFFERS),
    "dropout": (dropping_by_itself, "drops weights with p = [0.3], ours with p = 0"),
    "dropout, twice": (
        lambda: with_attribute(
            StepByStep(weights=lambda module, weights: module.drop(module.drop(weights))), "drop", nn.Dropout(0.1)
        ),
        "drops weights with p = [0.05, 0.05], ours with p = [0.05]",
    ),
    "dropout of the scores": (
        lambda: with_attribute(StepByStep(scores=lambda module, scores: module.drop(scores)), "drop", nn.Dropout(0.1)),
        DIFFERS,
    ),
    "two tensors": (
        lambda: Altered(lambda _, out, x, __: (out, x @ x.mT)),
        "it returns a tuple of tensor, tensor, ours a tuple of tensor, None",
    ),
    "a dict": (lambda: Altered(lambda _, out, *__: {"out": out}), "its forward returns a dict"),
    "a gate without effect yet": (
        lambda: with_attribute(Altered(lambda module, out, *_: out * module.gate), "gate", torch.ones(1)),
        "differs by",
    ),
    "another dtype": (lambda: Altered(rounded), "in float32, in eval mode: the output differs by"),
    "far away": (lambda: Altered(far, furthest=9), "differs by"),
    "causal by numbers": (lambda: with_attribute(StepByStep(causal), "visible", torch.ones(300, 300).tril()), "differs by"),
    "no gradient": (
        lambda: Altered(lambda module, _, x, mask: ShawAttention.forward(module, x.detach(), mask)),
        "the gradient of x",
    ),
    "no gradient in eval mode": (
        lambda: Altered(
            lambda module, _, x, mask: ShawAttention.forward(module, x if module.training else x.detach(), mask),
        ),
        "in eval mode: the gradient of x",
    ),
    "a weaker gradient in training": (lambda: StepByStep(weights=weak), "in training mode: the gradient of"),
    "sharded": (sharded, "sharded"),
    "a state": (lambda: with_attribute(Altered(remembering), "past", None), STATEFUL),
    "a list": (lambda: with_attribute(Altered(listing), "past", []), STATEFUL),
    "a counter": (lambda: with_attribute(Altered(counting), "past", torch.tensor(0)), STATEFUL),
    "noise": (lambda: Altered(noisy), STATEFUL),
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
    assert not getattr(module, "past", None)


class Unknown(nn.Module):
    out_features = 4

    @property
    def in_features(self) -> int:
        raise RuntimeError("not known before the first batch")


def raising(*_: Any) -> Any:
    raise KeyError("of the user")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Unknown, ""),
        (lambda: with_attribute(ShawAttention(), "lock", threading.Lock()), ""),
        (lambda: Altered(raising), "KeyError"),
    ],
    ids=["a property", "a lock", "a forward"],
)
def test_modules_that_raise(make: Callable[[], nn.Module], reason: str) -> None:
    """Modules that raise stay unchanged, and the others are enabled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = enable(nn.ModuleList([ShawAttention(), make()]))
    assert report["0"] == "ShawAttention" and reason in report.left.get("1", "")


def test_warnings_that_are_errors() -> None:
    """If warnings are errors, enable raises before it changes anything."""
    model = nn.ModuleList([ShawAttention(), stock.WindowAttention()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="enable left 1 of 2"):
            enable(model)
    assert type(model[0]) is ShawAttention


def test_recognised_and_not_replaced() -> None:
    """An error if everything was refused, a warning on the caller's line if some modules were, silence if none were."""
    refused = {"t5": stock.SharedBucketAttention(), "swin": stock.WindowAttention()}
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


@pytest.mark.parametrize(
    ("module", "advice"),
    [
        (stock.MemoryAttention, "tables.fold_transformer_xl"),
        (stock.LeftRightAttention, "positions=RelativePositions(-max_left_rel_pos, max_right_rel_pos)"),
        (stock.BucketAttention, "tables.t5_buckets"),
    ],
)
def test_kinds_of_one_user(module: Any, advice: str) -> None:
    """They are named, with the call that computes them."""
    assert advice in refusal(module())


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
    """Each family is reported with its kind and a hint, beside a module that is enabled."""
    transformers = pytest.importorskip("transformers")
    class_name, settings, word = STOCK_ALONE[name]
    stock_class = getattr(transformers, class_name)
    model = stock_class(stock_class.config_class(**settings))
    with pytest.warns(UserWarning, match="unchanged"):
        report = enable(nn.ModuleDict({"stock": model, "served": ShawAttention()}))
    assert set(report) == {"served"} and report.left
    assert all(word in row.kind and "use" in row.reason for row in report.rows if row.reason)


class Projecting(nn.Module):
    """An attention with parameters or children of these names, in no form that enable serves."""

    def __init__(self, *names: str, is_child: bool = False) -> None:
        super().__init__()
        self.queries, self.keys, self.values = (nn.Linear(16, 16) for _ in range(3))
        for name in names:
            setattr(self, name, nn.Linear(16, 16) if is_child else nn.Parameter(torch.zeros(16)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.values(x)  # type: ignore[no-any-return]


LOOK_ALIKES = {
    "Music Transformer": Projecting("Er"),
    "jason9693's": Projecting("E"),
    "EfficientConformer": Projecting("u", "v"),
    "EfficientConformer's layer": Projecting("pos_layer", is_child=True),
    "sooftware's Conformer": Projecting("u_bias", "v_bias"),
    "labml's": Projecting("key_pos_embeddings", "key_pos_bias", "query_pos_bias"),
    "OpenNMT": Projecting("relative_positions_embeddings", is_child=True),
    "neural_sp": Projecting("rel_pos_enc", is_child=True),
    "a matrix": Projecting("rel_emb"),
    "SAM-Med3D": Projecting("rel_pos_h", "rel_pos_w", "rel_pos_d"),
    "data2vec": Projecting("alibi_scale"),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_names_that_are_recognised(name: str) -> None:
    """What is found by its names alone is listed, with the call or what else to use."""
    with pytest.warns(UserWarning, match="enable left 1 of 2"):
        report = enable(nn.ModuleDict({"other": LOOK_ALIKES[name], "served": ShawAttention()}))
    assert set(report) == {"served"} and ("docs/models.md" in report.left["other"] or "attn_mask" in report.left["other"])


def test_names_that_others_have() -> None:
    """The same names in a module without projections, or of another kind, mean nothing."""
    with pytest.raises(ValueError, match="no relative attention that triton_relattn knows"):
        enable(nn.ModuleDict({"knowledge graph": with_attribute(nn.Module(), "Er", nn.Parameter(torch.zeros(4)))}))


class DisentangledSelfAttention(nn.Module):
    """The class's name in DeBERTa's package."""


def test_debertas_own_class() -> None:
    """DeBERTa's own package is reported with what to use in its place."""
    own = with_attribute(DisentangledSelfAttention(), "pos_att_type", ["c2p"])
    own.query_proj, own.pos_key_proj = nn.Linear(4, 4), nn.Linear(4, 4)
    with pytest.warns(UserWarning, match="DebertaV2Model"):
        report = enable(nn.ModuleDict({"own": own, "served": ShawAttention()}))
    assert set(report) == {"served"} and set(report.left) == {"own"}


def test_every_class_of_transformers_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """Every class with relative attention is either supported or listed as unsupported."""
    pytest.importorskip("transformers")
    assert survey.main(["transformers"]) == 0, [line for line in capsys.readouterr().out.splitlines() if line.startswith("NEW")]
