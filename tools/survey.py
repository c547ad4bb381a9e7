"""``python -m tools.survey transformers nemo torchaudio timm``: classes with relative attention in installed packages, and what
``enable`` makes of them. To be run with each new version of a library.

A class counts if its own code names one of MARKERS and computes attention. It is served by name, recognised by its attributes as
not served, listed in KNOWN, or new: then the exit status is 1.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from triton_relattn.integrations.enable import LIBRARIES
from triton_relattn.integrations.structure import NOT_SERVED

MARKERS = re.compile(
    "rel_shift|relative_shift|relative_position|rel_pos|position_bias|pos_bias_u|rel_logits|bias_table|distance_embedding|rel_k|"
    "rel_attn|relative_attention|relative_bias|r_w_bias|r_net|rel_height|height_rel|alibi"
)
ATTENTION = re.compile("softmax|attention_interface|scaled_dot_product|flex_attention|multi_head_attention_forward|baddbmm")
BY_STRUCTURE, ELSEWHERE, GRID = "found by its structure", "no term of attention scores", "a bias by offset in a window of a grid"
KNOWN = {
    "modeling_cpmant.CpmAntAttention": "a bias by segments and buckets, which another class makes",
    "modeling_deepseek_v4.DeepseekV4CSACompressor": ELSEWHERE,
    "modeling_deepseek_v4.DeepseekV4HCACompressor": ELSEWHERE,
    "modeling_deepseek_v4.DeepseekV4Indexer": ELSEWHERE,
    "modeling_esmfold2.EsmFold2ConfidenceHead": ELSEWHERE,
    "modeling_layoutlmv2.LayoutLMv2SelfAttention": "biases by coordinates, which the encoder makes",
    "modeling_layoutlmv3.LayoutLMv3SelfAttention": "biases by coordinates, which the encoder makes",
    "modeling_pp_doclayout_v2.PPDocLayoutV2ReadingOrderSelfAttention": "biases by coordinates, which the encoder makes",
    "gcvit.WindowAttentionGlobal": GRID,
    "maxxvit.Attention2d": GRID,
    "maxxvit.AttentionCl": GRID,
    "vision_transformer_relpos.RelPosAttention": GRID,
    "mvitv2.MultiScaleAttention": "docs/models.md has the call: keys are pooled",
    "mvitv2.MultiScaleAttentionPoolFirst": "docs/models.md has the call: keys are pooled",
    "vision_transformer_sam.Attention": BY_STRUCTURE,
    "components.SelfAttention": "a bias that is an argument for WavLM's sake, and not used",
    "wavlm_attention.WavLMSelfAttention": BY_STRUCTURE,
    "beats_encoder.MultiheadAttention": BY_STRUCTURE,
    "beats.MultiheadAttention": BY_STRUCTURE,
}
"""By file and class what is neither served by name nor recognised by attributes; and what is found by its structure."""


def relative_classes(package: str) -> Iterator[tuple[str, str, set[str]]]:
    """Yield the module and name of each class with relative attention, and all names in its code. Nothing is imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"there is no package {package}")
    root = Path(spec.submodule_search_locations[0])
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(errors="ignore")
        if not MARKERS.search(text) or path.name.startswith("modular_"):
            continue
        module = ".".join((package, *path.relative_to(root).with_suffix("").parts))
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and any(getattr(part, "name", "") == "forward" for part in node.body):
                names = {
                    getattr(part, field)
                    for part in ast.walk(node)
                    for field in ("attr", "id", "arg", "name")
                    if hasattr(part, field)
                }
                names = {name for name in names if isinstance(name, str)}
                if any(map(MARKERS.search, names)) and any(map(ATTENTION.search, names)):
                    yield module, node.name, names


def standing(module: str, name: str, names: set[str]) -> str:
    """Return what enable makes of a class; nothing if it is new."""
    for integration in LIBRARIES:
        for source in importlib.import_module(f"triton_relattn.integrations.{integration}").LIBRARY.sources:
            if source.module == module and name in source.classes:
                return "served"
    known = KNOWN.get(f"{module.rpartition('.')[2]}.{name}")
    return known or next((kind.title for kind in NOT_SERVED if all(names & set(choices) for choices in kind.attributes)), "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.survey", description=__doc__)
    parser.add_argument("packages", nargs="+", help="installed packages")
    new = 0
    for package in parser.parse_args(arguments).packages:
        for module, name, names in relative_classes(package):
            found = standing(module, name, names)
            new += not found
            print(f"{found or 'NEW':<60} {module}.{name}")
    return 1 if new else 0


if __name__ == "__main__":
    raise SystemExit(main())
