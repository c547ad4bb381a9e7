"""Small models of libraries whose attention can be enabled, built from the libraries' source files."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from tests.enable.models import varied
from tests.libraries.standins import absent, bare


@dataclass(frozen=True)
class Model:
    """A model of a library.

    library: name of the integration. package: name in Python; distribution: name for pip. build: makes the model from settings.
    given: its arguments for sequences of these lengths, padded to length.
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
        """A model in eval mode with nonzero parameters; changes: further settings."""
        torch.manual_seed(0)
        return varied(self.build(**{**self.settings, **changes})).to(dtype).eval()

    def arguments(self, length: int, lengths: list[int], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
        torch.manual_seed(1)
        return {
            name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in self.given(length, lengths).items()
        }


WIDTH, HEADS, MEL = 32, 4, 20
SIZES = {"input_size": MEL, "output_size": WIDTH, "attention_heads": HEADS, "linear_units": 48, "num_blocks": 2}
NO_DROPOUT = dict.fromkeys(("dropout_rate", "positional_dropout_rate", "attention_dropout_rate"), 0.0)


def nemo(context: Any = None, **settings: Any) -> nn.Module:
    """Make an encoder. context: att_context_size of chunks with frames after them, which is set after construction."""
    parts = ("modules", "parts", "parts.submodules", "parts.submodules.adapters", "parts.utils", "parts.mixins")
    bare("nemo", "nemo.collections", "nemo.collections.asr", *(f"nemo.collections.asr.{part}" for part in parts))
    bare("nemo.collections.asr.models", "nemo.collections.common", "nemo.collections.common.parts")
    core = ("classes.modelPT", "classes.mixins.hf_io_mixin", "config", "connectors", "utils.process_launcher")
    absent("hydra", "lightning", "huggingface_hub", *(f"nemo.core.{module}" for module in core))
    absent(*(f"nemo.utils.{module}" for module in ("lightning_logger_patch", "cloud", "data_utils", "export_utils")))
    absent("nemo.collections.asr.models.configs")  # the encoder has one, and sets its attributes
    stock = importlib.import_module("nemo.collections.asr.modules.conformer_encoder")
    sizes = {"feat_in": MEL, "n_layers": 2, "d_model": WIDTH, "n_heads": HEADS, "subsampling_factor": 1, "conv_kernel_size": 7}
    dropout = dict.fromkeys(("dropout", "dropout_pre_encoder", "dropout_emb", "dropout_att"), 0.0)
    style = {"att_context_style": "chunked_limited_with_rc"} if context else {}
    encoder: Any = stock.ConformerEncoder(**{**sizes, **dropout, **style, **settings})
    if context:
        encoder.att_context_size = context
    return encoder  # type: ignore[no-any-return]


def nemo_arguments(length: int, lengths: list[int]) -> dict[str, Any]:
    return {"audio_signal": torch.randn(len(lengths), MEL, length), "length": torch.tensor(lengths)}


class OnlyEncoder(nn.Module):
    """The encoder of SpeechBrain's ``TransformerASR``."""

    model: Any

    def __init__(self, model: nn.Module, chunks: Any) -> None:
        super().__init__()
        self.model, self.chunks = model, chunks

    def forward(self, **given: Any) -> Any:
        self.model.positional_encoding.emb_dtype = given["src"].dtype
        return self.model.encode(**given, dynchunktrain_config=self.chunks)


def speechbrain(chunks: tuple[int, int | None] | None = None, **settings: Any) -> nn.Module:
    models = "speechbrain.lobes.models"
    bare("speechbrain", "speechbrain.nnet", "speechbrain.lobes", models, f"{models}.transformer")
    bare("speechbrain.dataio", "speechbrain.utils", "speechbrain.decoders")
    absent("soundfile", "torchaudio", "hyperpyyaml")
    stock = importlib.import_module("speechbrain.lobes.models.transformer.TransformerASR")
    sizes = {"tgt_vocab": 11, "input_size": MEL, "d_model": WIDTH, "nhead": HEADS, "num_encoder_layers": 2, "d_ffn": 48}
    kind = {"encoder_module": "conformer", "attention_type": "RelPosMHAXL", "kernel_size": 7, "normalize_before": True}
    model = stock.TransformerASR(**{**sizes, **kind, "num_decoder_layers": 0, "dropout": 0.0, "causal": False, **settings})
    return OnlyEncoder(model, chunks and stock.DynChunkTrainConfig(*chunks))


def speechbrain_arguments(length: int, lengths: list[int]) -> dict[str, Any]:
    return {"src": torch.randn(len(lengths), length, MEL), "wav_len": torch.tensor(lengths) / length}


def espnet(**settings: Any) -> nn.Module:
    stock = importlib.import_module("espnet2.asr.encoder.conformer_encoder")
    kind = {"input_layer": "linear", "rel_pos_type": "latest", "macaron_style": True, "cnn_module_kernel": 7}
    encoder: Any = stock.ConformerEncoder(**{**SIZES, **kind, **NO_DROPOUT, **settings})
    if settings.get("rel_pos_type") == "legacy":  # whose encoder does not pass it to its layers
        for layer in encoder.encoders:
            layer.self_attn.zero_triu = settings["zero_triu"]
    return encoder  # type: ignore[no-any-return]


def espnet_arguments(length: int, lengths: list[int]) -> dict[str, Any]:
    return {"xs_pad": torch.randn(len(lengths), length, MEL), "ilens": torch.tensor(lengths)}


def cosyvoice(**settings: Any) -> nn.Module:
    absent("torchaudio", "scipy", "transformers")
    stock = importlib.import_module("cosyvoice.transformer.encoder")
    kind = {"input_layer": "linear", "pos_enc_layer_type": "rel_pos_espnet", "selfattention_layer_type": "rel_selfattn"}
    return stock.ConformerEncoder(**{**SIZES, **kind, **NO_DROPOUT, "cnn_module_kernel": 7, **settings})  # type: ignore[no-any-return]


def cosyvoice_arguments(length: int, lengths: list[int]) -> dict[str, Any]:
    return {"xs": torch.randn(len(lengths), length, MEL), "xs_lens": torch.tensor(lengths)}


class Casting(nn.Linear):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return super().forward(given.to(self.weight.dtype))


def x_transformers(causal: bool = False, **settings: Any) -> nn.Module:
    stock = importlib.import_module("x_transformers")
    kind = stock.Decoder if causal else stock.Encoder
    layers: Any = kind(**{"dim": WIDTH, "depth": 2, "heads": HEADS, "attn_dim_head": 8, **settings})
    for module in layers.modules():
        if type(module).__name__ == "Attend":
            getattr(module.attn_fn, "keywords", {}).pop("dtype", None)  # a softmax in float32
    if hasattr(layers.rel_pos, "mlp"):  # whose distances are float32
        layers.rel_pos.mlp[0][0].__class__ = Casting
    return layers  # type: ignore[no-any-return]


def x_transformers_arguments(length: int, lengths: list[int]) -> dict[str, Any]:
    return {"x": torch.randn(len(lengths), length, WIDTH), "mask": torch.arange(length) < torch.tensor(lengths)[:, None]}


SOURCES: dict[str, tuple[str, str, str, Callable[..., nn.Module], Callable[[int, list[int]], dict[str, Any]]]] = {
    "nemo": ("nemo", "nemo", "nemo_toolkit", nemo, nemo_arguments),
    "speechbrain": ("speechbrain", "speechbrain", "speechbrain", speechbrain, speechbrain_arguments),
    "espnet": ("espnet", "espnet2", "espnet", espnet, espnet_arguments),
    "cosyvoice": ("espnet", "cosyvoice", "cosyvoice-minicpmo", cosyvoice, cosyvoice_arguments),
    "x": ("x_transformers", "x_transformers", "x-transformers", x_transformers, x_transformers_arguments),
}
"""Library, package, distribution, the function that builds a model, and its arguments."""


def entry(name: str, **settings: Any) -> Model:
    """A model by its name, which begins with a key of SOURCES."""
    source = next(prefix for prefix in sorted(SOURCES, key=len, reverse=True) if name.startswith(prefix))
    return Model(name, *SOURCES[source], settings)


IN_CHUNKS = {"att_context_style": "chunked_limited"}
MODELS = (
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
