"""Vision encoders with decomposed relative positions: their layers alone, which take grids of any size."""

from __future__ import annotations

from . import inputs, parts
from .family import Family, Sizes

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "mlp_dim": 48, "image_size": 32, "patch_size": 4, "window_size": 6}
REAL = {"image_size": 1024}
WHOLE_GRID = {name: each for name, each in SMALL.items() if name != "window_size"}
VITDET = {"use_relative_position_embeddings": True}
BOTH = ("eager", "sdpa")


def family(
    folder: str, layer: str, config: str, small: Sizes = SMALL, real: Sizes = REAL, stock: tuple[str, ...] = ("eager",)
) -> Family:
    """One whose class of a layer has that name."""
    alone = parts.layers_on_a_grid(folder, layer)
    variants = tuple({"implementation": each} for each in stock[1:])
    return Family(folder, folder, layer, config, small, inputs.grid, real, stock=stock, alone=alone, variants=variants)


EVERY = (
    family("sam", "SamVisionLayer", "SamVisionConfig", stock=BOTH),
    family("sam_hq", "SamHQVisionLayer", "SamHQVisionConfig", stock=BOTH),
    family("vitdet", "VitDetLayer", "VitDetConfig", {**SMALL, **VITDET}, {**REAL, **VITDET}),
    family("seggpt", "SegGptLayer", "SegGptConfig", WHOLE_GRID, {}),
    family("got_ocr2", "GotOcr2VisionLayer", "GotOcr2VisionConfig"),
    family("deepseek_ocr2", "DeepseekOcr2SamVisionLayer", "DeepseekOcr2SamVisionConfig", stock=BOTH),
    family("unlimited_ocr", "UnlimitedOcrSamVisionLayer", "UnlimitedOcrSamVisionConfig", stock=BOTH),
    family("slanext", "SLANeXtVisionLayer", "SLANeXtVisionConfig"),
    family("pp_formulanet", "PPFormulaNetVisionLayer", "PPFormulaNetVisionConfig"),
)
