"""transformers' own door: model.set_attn_implementation("triton_relattn"), without enable."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from bench.families import FAMILIES
from tests.enable.models import (
    PADDED,
    THROUGH_THE_DOOR,
    Sizes,
    arguments,
    assert_same,
    build,
    classes,
    counting,
    output,
    planted,
    real,
    results,
    runs_the_operator,
    subject,
    through_the_door,
    times,
)
from tests.tolerance import assert_near
from triton_relattn import disable, enable
from triton_relattn.integrations.transformers import door

NAME = "triton_relattn"
NAMES = [name for name, family in FAMILIES.items() if family.folder in THROUGH_THE_DOOR]
LONG = 53
"""Longer than any width of the small models."""


@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_gradients(name: str) -> None:
    """In float64 with padding, of unchanged classes; no tensor is N x N."""
    model = build(name, torch.float64)
    given, counts, before = arguments(name, model, [LONG, 22], LONG), counting(name, PADDED), classes(model)
    stock = results(model, given, counts)
    through_the_door(model)
    results(model, given, counts)  # in the first call modules are compared
    with Sizes() as sizes, warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = results(model, given, counts)
    assert_same(ours, stock)
    assert sizes.ours and not [shape for shape in sizes.shapes if shape[-2:] == (LONG, LONG) and len(shape) > 2]
    assert classes(model) == before
    assert not any(reason for reason in reasons(model)) and list(reasons(model))


def reasons(model: Any) -> list[str]:
    return [vars(part)[door.CHECKED].reason for part in model.modules() if door.CHECKED in vars(part)]


@pytest.mark.parametrize("name", ["t5", "wav2vec2_bert"])
def test_set_attn_implementation(name: str) -> None:
    """It does what enable does, in a new model of the config too, and undoes it."""
    model, given = subject(name)
    expected = output(model, given)
    for switch in (lambda: model.set_attn_implementation(NAME), lambda: enable(model)):
        switch()
        assert_near("output", output(model, given), expected)
        assert runs_the_operator(model, given) and len(disable(copy.deepcopy(model))) == len(reasons(model))
        model.set_attn_implementation("eager")
        assert torch.equal(output(model, given), expected) and disable(model) == {}
    made = type(model)._from_config(copy.deepcopy(model.config), attn_implementation=NAME).eval()
    made.load_state_dict(model.state_dict())
    assert_near("from_config", output(made, given), expected)
    assert runs_the_operator(made, given) and enable(made) == {}
    enable(model)
    disable(model)
    assert model.config._attn_implementation == "eager" and torch.equal(output(model, given), expected)


def test_a_module_that_differs_is_eagers() -> None:
    """The first call compares it; a warning says so once, and results are right from the first one on."""
    model, other = build("t5"), build("t5")
    given = arguments("t5", model, PADDED)
    expected = output(model, given)
    model.set_attn_implementation(NAME)
    with planted(model, times(lambda *_: 1.001)):
        with pytest.warns(UserWarning, match="attention of T5Attention stays eager's: it computes something else") as caught:
            assert torch.equal(output(model, given), expected)
        assert len(caught) == 1 and all(reasons(model)) and not runs_the_operator(model, given)
        with pytest.raises(RuntimeError, match="no module of T5Model was enabled"):
            enable(other)
    assert other.config._attn_implementation == "eager" and torch.equal(output(other, given), expected)


def test_masks_of_the_user() -> None:
    """A mask of four dimensions, also one with a row for all queries, says all that is hidden: a decoder does not add to it."""
    model = build("t5", torch.float64)
    given = arguments("t5", model, [LONG, LONG], LONG)
    visible = torch.rand(2, 1, LONG, LONG) < 0.7
    for mask in (visible | torch.eye(LONG, dtype=torch.bool), torch.arange(LONG) < torch.tensor([LONG, 22])[:, None, None, None]):
        added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
        model.set_attn_implementation("eager")
        expected = output(model, {**given, "decoder_attention_mask": added})
        model.set_attn_implementation(NAME)
        for same in (added, mask):
            assert_near("output", output(model, {**given, "decoder_attention_mask": same}), expected)
        assert runs_the_operator(model, {**given, "decoder_attention_mask": mask})


def test_a_call_of_attention_without_a_mask() -> None:
    """Eager attention of a decoder sees all keys, others hide the future: as before enable, whatever is_causal says."""
    for implementation in ("eager", "sdpa"):
        model = build("t5")
        model.set_attn_implementation(implementation)
        parts = [stack.block[0].layer[0].SelfAttention for stack in (model.encoder, model.decoder)]
        states = torch.randn(1, 4, 32)
        calls = [(part, given) for part in parts for given in ({}, {"is_causal": True}, {"is_causal": False})]
        expected = [part(states, **given)[0] for part, given in calls]
        enable(model)
        for (part, given), out in zip(calls, expected, strict=True):
            assert_near("output", part(states, **given)[0], out)


def bert() -> tuple[Any, dict[str, Any]]:
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.BertModel(transformers.BertConfig(**sizes, is_decoder=True)).eval()
    return model, {"input_ids": torch.randint(1, 50, (2, LONG)), "attention_mask": real([LONG, 22], LONG)[..., 0]}


def derived() -> tuple[Any, dict[str, Any]]:
    """What a class of the user changes is not known, so its dense bias is not replaced."""
    model, given = subject("t5", torch.float64)
    attention = model.encoder.block[0].layer[0].SelfAttention
    stock = type(attention).compute_bias
    attention.__class__ = type("Doubled", (type(attention),), {"compute_bias": lambda *given, **more: 2 * stock(*given, **more)})
    return model, given


@pytest.mark.parametrize(("make", "kind"), [(bert, "BertSelfAttention"), (derived, "Doubled")], ids=["bert", "derived"])
def test_other_attention_is_sdpas(make: Any, kind: str) -> None:
    """Attention without relative positions, and of derived classes, runs as sdpa, and a warning says so."""
    model, given = make()
    model.set_attn_implementation("sdpa" if make is bert else "eager")
    expected = output(model, given)
    model.set_attn_implementation(NAME)
    with pytest.warns(UserWarning, match=f"{kind} has no relative attention that .* serves; it runs as sdpa"):
        assert_near("output", output(model, given), expected)


def test_a_bias_of_the_users() -> None:
    """A dense bias that a caller passes on, or a function of an instance makes, is eager's."""
    model = build("t5", torch.float64)
    through_the_door(model)
    attention, states = model.encoder.block[1].layer[0].SelfAttention, torch.randn(1, 4, 32, dtype=torch.float64)
    bias = torch.randn(1, 4, 4, 4, dtype=torch.float64, requires_grad=True)
    out = attention(states, position_bias=bias)[0]
    out.sum().backward()
    model.config._attn_implementation = attention.config._attn_implementation = "eager"
    assert_near("output", out, attention(states, position_bias=bias)[0])
    assert bias.grad is not None and bias.grad.abs().max() > 0

    first = model.encoder.block[0].layer[0].SelfAttention
    first.compute_bias = types.MethodType(lambda self, *_, **__: bias.detach(), first)
    expected = first(states)[0]
    first.config._attn_implementation = NAME
    assert_near("its own", first(states)[0], expected)


def test_files_of_a_model_load_in_a_new_process(tmp_path: Path) -> None:
    """A pickle imports what registers the implementation."""
    model = build("t5")
    through_the_door(model)
    given = arguments("t5", model, PADDED)
    expected = output(model, given)
    (tmp_path / "model").write_bytes(pickle.dumps((model, given, expected)))
    text = """if True:
        import pickle, sys, torch
        model, given, expected = pickle.load(open(sys.argv[1], "rb"))
        with torch.no_grad():
            assert (model(**given)[0] - expected).abs().max() < 1e-5
    """
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", text, str(tmp_path / "model")]
    done = subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_report_has_the_memory_of_each_module() -> None:
    """Also of a decoder's, whose stock mask is dense."""
    report = enable(build("t5"), lengths=(512, 1024))
    assert len(report.rows) == 6
    for row in report.rows:
        (stock_short, ours_short), (stock_long, ours_long) = row.memory
        assert stock_short and ours_short and stock_long and ours_long
        assert stock_long > 3 * stock_short and ours_long < 2.3 * ours_short
