"""Small models of libraries whose attention is enabled, built of the libraries' own source files."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn

from tests.cpu.models import varied
from tests.libraries import small
from tests.libraries.small import HEADS as HEADS
from tests.libraries.small import WIDTH as WIDTH
from tests.libraries.standins import absent, bare


@dataclass(frozen=True)
class Model:
    """A model of a library.

    library: the integration's name. package: the library's, in Python, and distribution, for pip. build: makes the model of
    settings. given: its arguments for sequences of these lengths, padded to length.
    """

    name: str
    library: str
    package: str
    distribution: str
    build: Callable[..., nn.Module]
    given: Callable[[int, list[int]], dict[str, Any]]
    settings: dict[str, Any]

    @property
    def integration(self) -> ModuleType:
        return importlib.import_module(f"triton_relattn.integrations.{self.library}")

    def make(self, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
        """A model in eval mode with parameters that are not zero; changes: further settings."""
        torch.manual_seed(0)
        return varied(self.build(**{**self.settings, **changes})).to(dtype).eval()

    def arguments(self, length: int, lengths: list[int], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
        torch.manual_seed(1)
        return {
            name: each.to(dtype) if isinstance(each, torch.Tensor) and each.is_floating_point() else each
            for name, each in self.given(length, lengths).items()
        }


def nemo(**settings: Any) -> nn.Module:
    parts = ("modules", "parts", "parts.submodules", "parts.submodules.adapters", "parts.utils", "parts.mixins")
    bare("nemo", "nemo.collections", "nemo.collections.asr", *(f"nemo.collections.asr.{each}" for each in parts))
    bare("nemo.collections.asr.models", "nemo.collections.common", "nemo.collections.common.parts")
    core = ("classes.modelPT", "classes.mixins.hf_io_mixin", "config", "connectors", "utils.process_launcher")
    absent("hydra", "lightning", "huggingface_hub", *(f"nemo.core.{each}" for each in core))
    absent(*(f"nemo.utils.{each}" for each in ("lightning_logger_patch", "cloud", "data_utils", "export_utils")))
    absent("nemo.collections.asr.models.configs")  # of which an encoder has one, and sets all that is in it
    return small.nemo(**settings)


def speechbrain(**settings: Any) -> nn.Module:
    models = "speechbrain.lobes.models"
    bare("speechbrain", "speechbrain.nnet", "speechbrain.lobes", models, f"{models}.transformer")
    bare("speechbrain.dataio", "speechbrain.utils", "speechbrain.decoders")
    absent("soundfile", "torchaudio", "hyperpyyaml")
    return small.speechbrain(**settings)


def cosyvoice(**settings: Any) -> nn.Module:
    absent("torchaudio", "scipy", "transformers")
    return small.cosyvoice(**settings)


def x_transformers(**settings: Any) -> nn.Module:
    layers: Any = small.x_transformers(**settings)
    for each in layers.modules():
        if type(each).__name__ == "Attend":
            getattr(each.attn_fn, "keywords", {}).pop("dtype", None)  # a softmax in float32
    if hasattr(layers.rel_pos, "mlp"):  # whose distances are float32
        layers.rel_pos.mlp[0].register_forward_pre_hook(lambda module, given: (given[0].to(module[0].weight.dtype),))
    return cast(nn.Module, layers)


SOURCES: dict[str, tuple[str, str, str, Callable[..., nn.Module], Callable[[int, list[int]], dict[str, Any]]]] = {
    "nemo": ("nemo", "nemo", "nemo_toolkit", nemo, small.of_nemo),
    "speechbrain": ("speechbrain", "speechbrain", "speechbrain", speechbrain, small.of_speechbrain),
    "espnet": ("espnet", "espnet2", "espnet", small.espnet, small.of_espnet),
    "cosyvoice": ("espnet", "cosyvoice", "cosyvoice-minicpmo", cosyvoice, small.of_cosyvoice),
    "x": ("x_transformers", "x_transformers", "x-transformers", x_transformers, small.of_x_transformers),
}
"""Library, package, distribution, how a model is built, and its arguments."""


def entry(name: str, **settings: Any) -> Model:
    """A model by its name, which begins with that of a source."""
    source = next(each for each in sorted(SOURCES, key=len, reverse=True) if name.startswith(each))
    return Model(name, *SOURCES[source], settings)


IN_CHUNKS = {"att_context_style": "chunked_limited"}
EVERY = (
    entry("nemo"),
    entry("nemo sdpa", use_pytorch_sdpa=True, untie_biases=False),
    entry("nemo window", att_context_size=[5, 3]),
    entry("nemo causal", att_context_size=[-1, 0]),
    entry("nemo chunks", att_context_size=[8, 3], **IN_CHUNKS),
    entry("nemo chunks of one", att_context_size=[8, 0], **IN_CHUNKS),
    entry("nemo chunks of all the past", att_context_size=[-1, 3], **IN_CHUNKS),
    entry("nemo chunks and more", context=[7, 4, 3]),
    entry("speechbrain"),
    entry("speechbrain causal", causal=True),
    entry("speechbrain chunks", chunks=(4, 2)),
    entry("speechbrain chunks of all the past", chunks=(4, None)),
    entry("espnet"),
    entry("espnet zero_triu", zero_triu=True),
    entry("espnet legacy", zero_triu=True, rel_pos_type="legacy"),
    entry("cosyvoice"),
    entry("cosyvoice chunks", static_chunk_size=4),
    entry("x T5", rel_pos_bias=True, rel_pos_max_distance=32),
    entry("x T5 causal", rel_pos_bias=True, causal=True),
    entry("x dynamic", dynamic_pos_bias=True),
    entry("x dynamic log", dynamic_pos_bias=True, dynamic_pos_bias_log_distance=True, causal=True),
    entry("x alibi", alibi_pos_bias=True, alibi_num_heads=3, attn_kv_heads=2),
    entry("x inkling", attn_use_rel_proj_pos_bias=True, causal=True),
)
