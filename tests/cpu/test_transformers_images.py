"""Whole vision encoders with decomposed relative positions, from images: the same numbers, in training, with checkpointing."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import pytest
import torch

from tests.tolerance import assert_near

pytest.importorskip("transformers")

from tests.cpu.models import assert_same, both, in_float64, output, results, varied
from triton_relattn.integrations.transformers import disable, enable
from triton_relattn.integrations.transformers.small.images import EVERY

SIZE = 32
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "mlp_dim": 48,
    "image_size": SIZE,
    "patch_size": 4,
    "num_hidden_layers": 2,
}
SAM: dict[str, Any] = {**SMALL, "window_size": 3, "global_attn_indexes": (1,), "output_channels": 16}
DOWN: dict[str, Any] = {**SAM, "downsample_channels": [16, 16]}


class Whole(NamedTuple):
    """A model with all that is around its attention, by the names of its class and its config."""

    model: str
    config: str
    sizes: dict[str, Any]
    height: int = SIZE


WHOLE = {
    "sam": Whole("SamVisionModel", "SamVisionConfig", SAM),
    "sam_hq": Whole("SamHQVisionModel", "SamHQVisionConfig", SAM),
    "vitdet": Whole(
        "VitDetModel",
        "VitDetConfig",
        {
            **SMALL,
            "pretrain_image_size": SIZE,
            "window_size": 3,
            "window_block_indices": (0,),
            "residual_block_indices": (1,),
            "use_relative_position_embeddings": True,
        },
        height=24,
    ),
    "seggpt": Whole(
        "SegGptModel",
        "SegGptConfig",
        {**SMALL, "image_size": (2 * SIZE, SIZE), "intermediate_hidden_state_indices": (0, 1), "merge_index": 0}
        | {"drop_path_rate": 0.0},
    ),
    "got_ocr2": Whole("GotOcr2VisionEncoder", "GotOcr2VisionConfig", SAM),
    "deepseek_ocr2": Whole("DeepseekOcr2SamVisionEncoder", "DeepseekOcr2SamVisionConfig", DOWN, height=24),
    "unlimited_ocr": Whole("UnlimitedOcrSamVisionEncoder", "UnlimitedOcrSamVisionConfig", DOWN, height=24),
    "slanext": Whole("SLANeXtVisionEncoder", "SLANeXtVisionConfig", SAM),
    "pp_formulanet": Whole(
        "PPFormulaNetVisionModel",
        "PPFormulaNetVisionConfig",
        {
            **SAM,
            "post_conv_in_channels": 16,
            "post_conv_out_channels": 16,
            "post_conv_mid_channels": 16,
            "decoder_hidden_size": 8,
        },
    ),
}
every_model = pytest.mark.parametrize("name", WHOLE)


def build(name: str, implementation: str = "eager", **changes: Any) -> Any:
    whole = WHOLE[name]
    config = getattr(importlib.import_module(f"transformers.models.{name}.configuration_{name}"), whole.config)
    model = getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), whole.model)
    torch.manual_seed(0)
    made = model._from_config(config(**{**whole.sizes, **changes}), attn_implementation=implementation)
    return varied(made).eval().double()


def images(name: str, batch: int = 2, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    names = ["pixel_values", *(["prompt_pixel_values", "prompt_masks"] if name == "seggpt" else [])]
    return {each: torch.randn(batch, 3, WHOLE[name].height, SIZE, dtype=dtype) for each in names}


def test_every_family_is_here() -> None:
    assert WHOLE.keys() == {family.folder for family in EVERY}


@every_model
@pytest.mark.parametrize("training", [False, True])
def test_whole_models(name: str, training: bool) -> None:
    """deepseek_ocr2, unlimited_ocr and vitdet see a smaller image than their tables are for."""
    model = build(name).train(training)
    with in_float64():
        ours, stock = both(model, images(name))
    assert any("rel_pos_h" in each for each in stock) and any("rel_pos_w" in each for each in stock)
    assert_same(ours, stock)


@every_model
def test_checkpointing(name: str) -> None:
    model = build(name).train()
    given = images(name)
    with in_float64():
        stock = results(model, given)
        enable(model)
        model.gradient_checkpointing_enable()
        assert_same(results(model, given), stock)


@every_model
def test_state_and_classes(name: str) -> None:
    """Both layers are replaced and given back; parameters are the same objects throughout."""
    model = build(name)
    before, state = [type(each) for each in model.modules()], dict(model.state_dict(keep_vars=True))
    enabled = enable(model)
    assert len(enabled) == 2
    now = model.state_dict(keep_vars=True)
    assert now.keys() == state.keys() and all(each is state[key] for key, each in now.items())
    assert disable(model) == enabled
    assert [type(each) for each in model.modules()] == before


@pytest.mark.parametrize("name", [name for name in WHOLE if name != "seggpt"])  # which cannot be made without
def test_without_tables(name: str) -> None:
    """Nothing is left to do for us."""
    without: dict[str, Any] = {"use_relative_position_embeddings" if name == "vitdet" else "use_rel_pos": False}
    with pytest.raises(ValueError, match="no relative attention"):
        enable(build(name, **without))


@pytest.mark.parametrize("name", ["sam", "sam_hq", "deepseek_ocr2", "unlimited_ocr"])
def test_dropout_is_eagers(name: str) -> None:
    """The stock classes for sdpa drop nothing."""
    given = images(name)
    eager, sdpa = (build(name, kind, attention_dropout=0.5).train() for kind in ("eager", "sdpa"))
    stock = output(sdpa, given)
    enable(eager)
    enable(sdpa)
    assert_near("sdpa", output(sdpa, given), stock)
    assert (output(eager, given) - stock).abs().max() > 0.01


@pytest.mark.parametrize("name", ["vitdet", "seggpt"])
def test_weights_are_refused(name: str) -> None:
    model = build(name)
    enable(model)
    with pytest.raises(ValueError, match="output_attentions"):
        output(model, {**images(name), "output_attentions": True})


def test_weights_that_transformers_collects() -> None:
    model = build("sam")
    enable(model)
    with pytest.warns(UserWarning, match="no weights to collect"), torch.no_grad():
        model(**images("sam"), output_attentions=True)


def test_compiled() -> None:
    model = build("sam").float()
    given = {name: each.float() for name, each in images("sam").items()}
    enable(model)
    eager = output(model, given)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
        assert_near("compiled", compiled(**given)[0], eager)
