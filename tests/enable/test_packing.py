"""enable(model, packed=True): encoders on the real tokens of a batch alone compute what they compute padded."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from tests.enable.models import COPIES, THROUGH_THE_DOOR, assert_same, build, classes, output, results
from tests.tolerance import assert_at_most, assert_near
from triton_relattn import disable, enable, functional
from triton_relattn.integrations import in_place, packing

NAMES = ("t5", "mt5", "umt5", "deberta_v2", "deberta_v2_conv", "deberta", "mpnet")
LENGTHS = (9, 0, 1, 30, 4, 17)
"""Of which a sequence has no token and one has one; the others are shorter and longer than tables."""
every_encoder = pytest.mark.parametrize("name", NAMES)


def encoder(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A model of an encoder alone."""
    if name == "deberta_v2_conv":
        name, changes = "deberta_v2", {"conv_kernel_size": 3, "conv_act": "gelu", **changes}
    model = build(name, dtype, **changes)
    return model.get_encoder() if name in THROUGH_THE_DOOR else model


def stack(model: Any) -> Any:
    """The part that packs."""
    return next(part for part in model.modules() if isinstance(part, packing.Packs))


def batch(lengths: tuple[int, ...] = LENGTHS, is_left: bool = False) -> dict[str, torch.Tensor]:
    longest = max(lengths)
    place, count = torch.arange(longest), torch.tensor(lengths)[:, None]
    mask = (place >= longest - count if is_left else place < count).long()
    torch.manual_seed(1)
    return {"input_ids": torch.randint(2, 50, mask.shape), "attention_mask": mask}


def assert_as_padded(packed: Any, padded: Any, given: dict[str, torch.Tensor], seed: int = 0) -> torch.Tensor:
    """The output at real tokens and the gradients are those of the enabled padded model: the same operations in another order."""
    real = given["attention_mask"][..., None].bool()
    ours, expected = (results(model, given, real, seed) for model in (packed, padded))
    assert_same(ours, expected)
    assert_near("out", ours["out"], expected["out"], tolerance=2.0**-40)
    return ours["out"]


def pair(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> tuple[Any, Any]:
    """A model that is enabled, and the same that packs."""
    padded = encoder(name, dtype, **changes)
    packed = copy.deepcopy(padded)
    enable(padded)
    report = enable(packed, packed=True)
    assert report.packs, report.packed
    return padded, packed


def without_dropout(model: Any, weights_p: float = 0.0) -> None:
    """Drop attention weights alone, with a probability."""
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    for part in model.modules():
        dropout: Any = getattr(part, "dropout", None)
        if isinstance(dropout, float):  # of T5
            vars(part)["dropout"] = weights_p
        elif type(part).__name__ in ("MPNetSelfAttention", "DisentangledSelfAttention"):
            dropout.p = weights_p


def counts(model: Any) -> dict[str, int]:
    """The batches of an encoder, by why they stayed padded; "" of those that were packed."""
    return dict(vars(stack(model))[packing.PACKED])


@every_encoder
@pytest.mark.parametrize("how", ["right", "left", "short calls"])
def test_real_tokens_and_gradients(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's attention is one call of the operator for packed sequences, or in short calls stock attention with a mask of
    blocks on the diagonal; padding gets zeros."""
    lengths: list[list[int]] = []
    varlen = functional.fused_relative_attention_varlen

    def spy(*args: Any, cu_seqlens_q: torch.Tensor, **options: Any) -> Any:
        lengths.append(cu_seqlens_q.diff().tolist())
        return varlen(*args, cu_seqlens_q=cu_seqlens_q, **options)

    padded, packed = pair(name)
    given = batch(is_left=how == "left")
    monkeypatch.setattr(functional, "fused_relative_attention_varlen", spy)
    if how == "short calls":
        monkeypatch.setattr(in_place.InPlace, "fewest", in_place.FEWEST)
    assert_as_padded(packed, padded, given)
    assert lengths == [list(LENGTHS)] * (0 if how == "short calls" else 2) and counts(packed) == {"": 1}
    assert not output(packed, given)[given["attention_mask"] == 0].any()


def with_a_hole(mask: torch.Tensor) -> torch.Tensor:
    mask = mask.clone()
    mask[0, 3] = 0
    return mask


STAY_PADDED: dict[str, tuple[Callable[[torch.Tensor], Any], dict[str, Any]]] = {
    "a mask with holes": (with_a_hole, {}),
    "little padding": (torch.ones_like, {}),
    "no real token": (torch.zeros_like, {}),
    "attention weights are asked for": (lambda mask: mask, {"output_attentions": True}),
    "no mask": (lambda mask: None, {}),
    "a mask of three or four dimensions": (lambda mask: (mask[:, None] & mask[..., None])[:, None].bool(), {}),
}


@pytest.mark.parametrize("reason", STAY_PADDED)
@pytest.mark.parametrize("name", ["t5", "deberta_v2", "mpnet"])
def test_batches_that_stay_padded(name: str, reason: str) -> None:
    """They are the enabled padded model's, bit for bit."""
    if name == "deberta_v2" and reason in ("no mask", "a mask of three or four dimensions"):
        pytest.skip("makes a mask if there is none, and takes others of pairs")
    padded, packed = pair(name, torch.float32)
    change, options = STAY_PADDED[reason]
    given: dict[str, Any] = {**batch(), **options}
    given["attention_mask"] = change(given["attention_mask"])
    assert torch.equal(output(packed, given), output(padded, given))
    assert counts(packed) == {reason: 1}


@every_encoder
def test_hidden_states(name: str) -> None:
    """They are padded, each once."""
    padded, packed = pair(name, torch.float32)
    given = batch()
    with torch.no_grad():
        expected, found = (model(**given, output_hidden_states=True).hidden_states for model in (padded, packed))
    assert len(found) == len(expected)
    for ours, stock in zip(found, expected, strict=True):
        assert ours.shape == stock.shape
        assert_near("states", ours * given["attention_mask"][..., None], stock * given["attention_mask"][..., None])


@pytest.mark.parametrize("name", ["t5", "deberta_v2_conv", "mpnet"])
def test_dropout_of_weights(name: str) -> None:
    """The same draws as padded, with the same seed, and others with another one."""
    padded, packed = pair(name)
    for model in (padded, packed):
        without_dropout(model.train(), weights_p=0.3)
    first, second = (assert_as_padded(packed, padded, batch(), seed) for seed in (7, 8))
    assert not torch.allclose(first, second)


CHECKPOINTED = [(name, False) for name in NAMES if name != "mpnet"] + [(name, True) for name in ("t5", "mt5", "umt5")]
"""MPNet has no checkpoints, and DeBERTa's stock layers raise in reentrant ones."""


@pytest.mark.parametrize(("name", "use_reentrant"), CHECKPOINTED)
def test_checkpoints(name: str, use_reentrant: bool) -> None:
    """A recomputation has the lengths of its batch, also if others ran meanwhile."""
    padded, packed = pair(name)
    packed.train().gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    without_dropout(packed)
    others = [batch((30, 2, 5, 1, 1, 1))]

    def run_another(*_: Any) -> None:
        if others:
            packed(**others.pop())

    packed.register_forward_hook(run_another)
    assert_as_padded(packed, padded, batch())


@pytest.mark.parametrize("name", ["t5", "deberta_v2_conv", "mpnet"])
def test_copies_files_and_disable(name: str) -> None:
    model, given = encoder(name, torch.float32), batch()
    expected, before = output(model, given), classes(model)
    enabled = dict(enable(model, packed=True))
    ours = output(model, given)
    for through in COPIES.values():
        copied = through(model)
        assert torch.equal(output(copied, given), ours) and counts(copied)[""] == 2
    assert torch.equal(output(model._replicate_for_data_parallel(), given), ours)
    assert enabled.items() <= disable(model).items() and classes(model) == before
    assert torch.equal(output(model, given), expected)
    assert not any(packing.PACKED in vars(part) for part in model.modules())


@pytest.mark.parametrize("name", ["t5", "deberta_v2_conv", "mpnet"])
@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_sixteen_bits(name: str, how: str) -> None:
    """The error against float64 is at most half as large again as the padded model's."""
    padded, packed = pair(name, torch.bfloat16 if how == "bfloat16" else torch.float32)
    given = batch()
    exact = copy.deepcopy(padded).double()
    disable(exact)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        outs = [model(**given)[0].double() * given["attention_mask"][..., None] for model in (packed, padded)]
    expected = output(exact, given) * given["attention_mask"][..., None]
    errors = [float((out - expected).norm() / expected.norm()) for out in outs]
    assert counts(packed) == {"": 1}
    assert_at_most("error", torch.tensor(errors[0]), 1.5 * errors[1])


@pytest.mark.parametrize("name", ["t5", "deberta_v2", "mpnet"])
def test_graphs_are_padded(name: str) -> None:
    """Their sizes cannot depend on a mask."""
    padded, packed = pair(name, torch.float32)
    given = batch()
    output(packed, given)
    torch._dynamo.reset()
    assert_near("output", output(torch.compile(packed, backend="eager"), given), output(padded, given))
    assert counts(packed) == {"": 1}


@pytest.mark.parametrize("before", [[], [{}], [{"packed": True}] * 2], ids=["new", "enabled", "packed"])
@pytest.mark.parametrize("name", ["t5", "deberta_v2_conv", "mpnet"])
def test_again(name: str, before: list[dict[str, Any]]) -> None:
    """enable(packed=True) lets a model pack that was enabled before, or compares anew and reports it; disable gives every class
    back."""
    model = encoder(name, torch.float32)
    stock = classes(model)
    for options in (*before, {"packed": True}):
        report = enable(model, **options)
    output(model, batch())
    assert counts(model) == {"": 1} and "packs batches of padded sequences" in str(report)
    disable(model)
    assert classes(model) == stock


class Mixes(nn.Linear):
    """An adapter that reads the token before."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states + states.roll(1, 1))


@pytest.mark.parametrize("name", ["t5", "mpnet"])
def test_an_adapter_that_mixes_tokens(name: str) -> None:
    """The comparison of the whole encoder finds it: the model is enabled and stays padded."""
    model = encoder(name, torch.float32)
    linear = next(part for path, part in model.named_modules() if path.endswith(("DenseReluDense.wi", "intermediate.dense")))
    linear.__class__ = Mixes
    given = batch()
    expected, real = output(model, given), given["attention_mask"][..., None]
    with pytest.warns(UserWarning, match=r"enable\(packed=True\) packs nothing: .*packed it computes something else"):
        assert enable(model, packed=True)
    assert_near("output", output(model, given) * real, expected * real)
    assert not any(packing.PACKED in vars(part) for part in model.modules())


def replaced_forward() -> Any:
    model = encoder("mpnet", torch.float32)
    model.encoder.forward = model.encoder.forward
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (partial(build, "wav2vec2_conformer"), "its convolutions read padding"),
        (partial(build, "switch_transformers"), "its router drops tokens by their place"),
        (partial(build, "longt5"), "it cuts blocks"),
        (partial(build, "parakeet"), "no encoder of a class that is known"),
        (replaced_forward, "its forward was replaced"),  # as by accelerate's hooks, which would not reach ours
    ],
)
def test_encoders_that_stay_padded(make: Callable[[], Any], reason: str) -> None:
    with pytest.warns(UserWarning, match=rf"packs nothing: .*{reason}"):
        assert enable(make(), packed=True)


def test_decoders_stay_padded() -> None:
    model = build("t5")
    report = enable(model, packed=True)
    assert list(report.packed) == ["encoder"] and "T5Stack" not in str(type(model.decoder).__mro__[0].__bases__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**batch(), decoder_input_ids=torch.ones(6, 4).long())
    assert counts(model) == {"": 1}
