"""enable(model, packed=True): encoders on the real tokens of a batch alone compute what they compute padded."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from tests.cpu.models import THROUGH_THE_DOOR, build, in_float64
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


def results(model: Any, given: dict[str, torch.Tensor], seed: int = 0) -> dict[str, torch.Tensor]:
    """The output at real tokens, and the gradients of all parameters."""
    model.zero_grad()
    torch.manual_seed(seed)
    real = given["attention_mask"].reshape(len(given["attention_mask"]), -1)[:, -given["input_ids"].shape[1] :, None]
    out = model(**given)[0] * real
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(out.dtype)
    out.backward(d_out)
    return {"out": out.detach(), **{name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}}


def assert_same(ours: dict[str, torch.Tensor], padded: dict[str, torch.Tensor]) -> None:
    """Against the enabled padded model: the same operations in another order."""
    assert ours.keys() == padded.keys() and len(ours) > 4
    largest = max(float(value.abs().max()) for name, value in padded.items() if name != "out")
    for name, expected in padded.items():
        size = max(float(expected.abs().max()), 0.0 if name == "out" else largest / 100)
        assert_at_most(name, (ours[name] - expected).abs().max() / size, 2.0**-40 if name == "out" else 2.0**-30)


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
@pytest.mark.parametrize("is_left", [False, True], ids=["right", "left"])
def test_real_tokens_and_gradients(name: str, is_left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's attention is one call of the operator for packed sequences; padding gets zeros."""
    lengths: list[list[int]] = []
    varlen = functional.fused_relative_attention_varlen

    def spy(*args: Any, cu_seqlens_q: torch.Tensor, **options: Any) -> Any:
        lengths.append(cu_seqlens_q.diff().tolist())
        return varlen(*args, cu_seqlens_q=cu_seqlens_q, **options)

    with in_float64():
        padded, packed = pair(name)
        given = batch(is_left=is_left)
        expected = results(padded, given)
        monkeypatch.setattr(functional, "fused_relative_attention_varlen", spy)
        assert_same(results(packed, given), expected)
        assert lengths == [list(LENGTHS)] * 2 and counts(packed) == {"": 1}
        assert not packed(**given)[0][given["attention_mask"] == 0].any()


@every_encoder
def test_stock_attention_in_short_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mask is that of blocks on the diagonal."""
    with in_float64():
        padded, packed = pair(name)
        monkeypatch.setattr(in_place.InPlace, "fewest", in_place.FEWEST)
        monkeypatch.delattr(functional, "fused_relative_attention_varlen")
        assert_same(results(packed, batch()), results(padded, batch()))
        assert counts(packed) == {"": 1}


def with_a_hole(mask: torch.Tensor) -> torch.Tensor:
    mask = mask.clone()
    mask[0, 3] = 0
    return mask


STAY_PADDED: dict[str, tuple[Any, Any]] = {
    "a mask with holes": (with_a_hole, {}),
    "little padding": (torch.ones_like, {}),
    "no real token": (torch.zeros_like, {}),
    "attention weights are asked for": (lambda mask: mask, {"output_attentions": True}),
}


@pytest.mark.parametrize("reason", STAY_PADDED)
@pytest.mark.parametrize("name", ["t5", "deberta_v2", "mpnet"])
def test_batches_that_stay_padded(name: str, reason: str) -> None:
    """They are the enabled padded model's, bit for bit."""
    padded, packed = pair(name, torch.float32)
    change, options = STAY_PADDED[reason]
    given = batch()
    given = {**given, "attention_mask": change(given["attention_mask"]), **options}
    with torch.no_grad():
        assert torch.equal(packed(**given)[0], padded(**given)[0])
    assert counts(packed) == {reason: 1}


@pytest.mark.parametrize("name", ["t5", "mpnet"])
def test_other_masks_stay_padded(name: str) -> None:
    padded, packed = pair(name, torch.float32)
    given: dict[str, Any] = batch()
    mask = given["attention_mask"].bool()
    for other, reason in ((None, "no mask"), ((mask[:, None] & mask[..., None])[:, None], "a mask of three or four dimensions")):
        given["attention_mask"] = other
        with torch.no_grad():
            assert torch.equal(packed(**given)[0], padded(**given)[0])
        assert counts(packed)[reason] == 1


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
    with in_float64():
        assert_same(results(packed, batch(), 7), results(padded, batch(), 7))
        first, second = (results(packed, batch(), seed)["out"] for seed in (7, 8))
    assert not torch.allclose(first, second)


CHECKPOINTED = [(name, False) for name in NAMES if name != "mpnet"] + [(name, True) for name in ("t5", "mt5", "umt5")]
"""MPNet has no checkpoints, and DeBERTa's stock layers raise in reentrant ones."""


@pytest.mark.parametrize(("name", "use_reentrant"), CHECKPOINTED)
def test_checkpoints(name: str, use_reentrant: bool) -> None:
    """A recomputation has the lengths of its batch, also if others ran meanwhile."""
    with in_float64():
        padded, packed = pair(name)
        given, other = batch(), batch((30, 2, 5, 1, 1, 1))
        expected = results(padded, given)
        packed.train().gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        without_dropout(packed)
        out = packed(**given)[0] * given["attention_mask"][..., None]
        packed(**other)
        d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        out.backward(d_out)
        gradients = {name: weight.grad for name, weight in packed.named_parameters() if weight.grad is not None}
        assert_same({"out": out.detach(), **gradients}, expected)


@pytest.mark.parametrize("name", ["t5", "deberta_v2_conv", "mpnet"])
def test_copies_files_and_disable(name: str) -> None:
    model = encoder(name, torch.float32)
    given = batch()
    with torch.no_grad():
        expected, classes = model(**given)[0], [type(part) for part in model.modules()]
        enabled = dict(enable(model, packed=True))
        ours = model(**given)[0]
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(copied(**given)[0], ours) and counts(copied)[""] == 2
        replica = model._replicate_for_data_parallel() if hasattr(model, "_replicate_for_data_parallel") else model
        assert torch.equal(replica(**given)[0], ours)
        assert enabled.items() <= disable(model).items() and [type(part) for part in model.modules()] == classes
        assert torch.equal(model(**given)[0], expected)
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
    with torch.no_grad(), in_float64():
        expected = exact(**given)[0] * given["attention_mask"][..., None]
    errors = [float((out - expected).norm() / expected.norm()) for out in outs]
    assert counts(packed) == {"": 1}
    assert_at_most("error", torch.tensor(errors[0]), 1.5 * errors[1])


@pytest.mark.parametrize("name", ["t5", "deberta_v2", "mpnet"])
def test_graphs_are_padded(name: str) -> None:
    """Their sizes cannot depend on a mask."""
    padded, packed = pair(name, torch.float32)
    given = batch()
    with torch.no_grad():
        padded(**given), packed(**given)
        torch._dynamo.reset()
        assert_near("output", torch.compile(packed, backend="eager")(**given)[0], padded(**given)[0])
    assert counts(packed) == {"": 1}


def test_again() -> None:
    """Further calls compare anew, report it, and disable still gives every class back."""
    model = encoder("deberta_v2_conv", torch.float32)
    classes = [type(part) for part in model.modules()]
    reports = [enable(model, packed=True) for _ in range(3)]
    assert all("packs batches" in str(report) for report in reports)
    model(**batch())
    assert counts(model) == {"": 1}
    disable(model)
    assert [type(part) for part in model.modules()] == classes


def test_after_enable() -> None:
    """enable(packed=True) lets a model pack that was enabled before."""
    for name in ("t5", "mpnet"):
        model = encoder(name, torch.float32)
        enable(model)
        report = enable(model, packed=True)
        model(**batch())
        assert counts(model) == {"": 1} and "packs batches of padded sequences" in str(report)


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
    with torch.no_grad():
        expected = model(**given)[0]
        with pytest.warns(UserWarning, match=r"enable\(packed=True\) packs nothing: .*packed it computes something else"):
            assert enable(model, packed=True)
        real = given["attention_mask"][..., None]
        assert_near("output", model(**given)[0] * real, expected * real)
    assert not any(packing.PACKED in vars(part) for part in model.modules())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("wav2vec2_conformer", "its convolutions read padding"),
        ("switch_transformers", "its router drops tokens by their place"),
        ("longt5", "it cuts blocks"),
        ("parakeet", "no encoder of a class that is known"),
    ],
)
def test_encoders_that_stay_padded(name: str, reason: str) -> None:
    with pytest.warns(UserWarning, match=rf"packs nothing: .*{reason}"):
        assert enable(build(name), packed=True)


def test_an_encoder_whose_forward_was_replaced() -> None:
    """As by accelerate's hooks, which would not reach ours."""
    model = encoder("mpnet", torch.float32)
    model.encoder.forward = model.encoder.forward
    with pytest.warns(UserWarning, match="its forward was replaced"):
        assert enable(model, packed=True)


def test_decoders_stay_padded() -> None:
    model = build("t5")
    report = enable(model, packed=True)
    assert list(report.packed) == ["encoder"] and "T5Stack" not in str(type(model.decoder).__mro__[0].__bases__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**batch(), decoder_input_ids=torch.ones(6, 4).long())
    assert counts(model) == {"": 1}


def test_an_interrupted_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model stays as it was."""

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    model = encoder("deberta_v2_conv", torch.float32)
    before = [(type(part), dict(vars(part))) for part in model.modules()]
    monkeypatch.setattr(packing, "_difference", interrupted)
    with pytest.raises(KeyboardInterrupt):
        enable(model, packed=True)
    assert [(type(part), dict(vars(part))) for part in model.modules()] == before
