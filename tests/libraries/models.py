"""Small modules of packages whose attention can be enabled, built from the packages' own files: MODELS.

Packages that only contain models of transformers are in wrappers/.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.enable.models import Given, Results, results, varied
from tests.libraries.standins import absent, bare, load
from triton_relattn import enable
from triton_relattn.integrations.isolation import Promoted
from triton_relattn.integrations.report import Report

sys.path.append(f"{sys.prefix}/beside/torchaudio/models/wav2vec2")  # other libraries import torchaudio if they find it


@dataclass(frozen=True)
class Model:
    """A module of a package.

    build: makes it from settings. given: its arguments for sequences whose real positions are True in a mask (B, N), by the names
    if there are any. usual: settings of published models, if docs/enable.md states their memory at so many positions.
    """

    name: str
    package: str
    build: Callable[..., nn.Module]
    given: Callable[[torch.Tensor], tuple[Any, ...]]
    settings: dict[str, Any] = field(default_factory=dict)
    usual: dict[str, Any] = field(default_factory=dict)
    at: int = 4096
    names: tuple[str, ...] = ()

    def but(self, what: str = "", /, **settings: Any) -> Model:
        """The same with further settings."""
        return replace(self, name=f"{self.name} {what}".strip(), settings={**self.settings, **settings})

    def make(self, dtype: torch.dtype = torch.float64) -> Any:
        """A model in eval mode with nonzero parameters."""
        torch.manual_seed(0)
        return varied(self.build(**self.settings)).to(dtype).eval()

    def arguments(self, lengths: list[int]) -> Any:
        torch.manual_seed(1)
        given = self.given(torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])
        return dict(zip(self.names, given, strict=True)) if self.names else given

    def enable(self, model: nn.Module, **options: Any) -> Report:
        return enable(model, by_structure=bool(self.usual), **options)

    def results(self, model: nn.Module, given: Given) -> Results:
        """The output and all gradients; without padding where a model computes numbers there."""
        with Promoted():
            return results(model, given, given[1].bool() if self.given is speech else None)  # type: ignore[index]


def states(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def source(name: str, lacks: str = "") -> Callable[..., nn.Module]:
    """What makes a class of a module; lacks: absent packages that it imports."""

    def build(**settings: Any) -> nn.Module:
        absent(*lacks.split())
        return load(name)(**settings)  # type: ignore[no-any-return]

    return build


WIDTH, HEADS, MEL = 32, 4, 20
NEMO_BARE = """common common.parts asr.models asr.parts asr.parts.submodules asr.parts.submodules.adapters asr.parts.utils
    asr.parts.mixins"""
NEMO_LACKS = "classes.modelPT classes.mixins.hf_io_mixin config connectors utils.process_launcher"
bare(*(f"nemo.collections.{name}" for name in NEMO_BARE.split()))
bare(*(f"speechbrain.{name}" for name in ("nnet", "dataio", "utils", "decoders")))
bare("funasr.models.transformer.utils", "TTS.tts.utils", "TTS.tts.layers.generic", "TTS.utils")


def nemo(context: Any = None, **settings: Any) -> nn.Module:
    """Make an encoder. context: att_context_size of chunks with frames after them, which is set after construction."""
    absent("hydra", "lightning", "huggingface_hub", *(f"nemo.core.{name}" for name in NEMO_LACKS.split()))
    absent(*(f"nemo.utils.{name}" for name in ("lightning_logger_patch", "cloud", "data_utils", "export_utils")))
    absent("nemo.collections.asr.models.configs")  # the encoder has one, and sets its attributes
    sizes = {"feat_in": MEL, "n_layers": 2, "d_model": WIDTH, "n_heads": HEADS, "subsampling_factor": 1, "conv_kernel_size": 7}
    dropout = dict.fromkeys(("dropout", "dropout_pre_encoder", "dropout_emb", "dropout_att"), 0.0)
    style = {"att_context_style": "chunked_limited_with_rc"} if context else {}
    kind = load("nemo.collections.asr.modules.conformer_encoder.ConformerEncoder")
    encoder: Any = kind(**{**sizes, **dropout, **style, **settings})
    if context:
        encoder.att_context_size = context
    return encoder  # type: ignore[no-any-return]


class OnlyEncoder(nn.Module):
    """The encoder of SpeechBrain's ``TransformerASR``."""

    def __init__(self, model: Any, chunks: Any) -> None:
        super().__init__()
        self.model, self.chunks = model, chunks

    def forward(self, src: torch.Tensor, wav_len: torch.Tensor) -> Any:
        return self.model.encode(src, wav_len, dynchunktrain_config=self.chunks)


def speechbrain(chunks: tuple[int, int | None] | None = None, **settings: Any) -> nn.Module:
    absent("soundfile", "torchaudio", "hyperpyyaml")
    module = "speechbrain.lobes.models.transformer.TransformerASR"
    sizes = {"tgt_vocab": 11, "input_size": MEL, "d_model": WIDTH, "nhead": HEADS, "num_encoder_layers": 2, "d_ffn": 48}
    kind = {"encoder_module": "conformer", "attention_type": "RelPosMHAXL", "kernel_size": 7, "normalize_before": True}
    given = {**sizes, **kind, "num_decoder_layers": 0, "dropout": 0.0, "causal": False, **settings}
    return OnlyEncoder(load(f"{module}.TransformerASR")(**given), chunks and load(f"{module}.DynChunkTrainConfig")(*chunks))


ENCODER: dict[str, Any] = {"input_size": MEL, "output_size": WIDTH, "attention_heads": HEADS, "linear_units": 48, "num_blocks": 2}
ENCODER |= dict.fromkeys(("dropout_rate", "positional_dropout_rate", "attention_dropout_rate"), 0.0)
ENCODER |= {"input_layer": "linear", "cnn_module_kernel": 7}


def espnet(**settings: Any) -> nn.Module:
    kind = {"rel_pos_type": "latest", "macaron_style": True}
    encoder: Any = load("espnet2.asr.encoder.conformer_encoder.ConformerEncoder")(**{**ENCODER, **kind, **settings})
    if settings.get("rel_pos_type") == "legacy":  # whose encoder does not pass it to its layers
        for layer in encoder.encoders:
            layer.self_attn.zero_triu = settings["zero_triu"]
    return encoder  # type: ignore[no-any-return]


cosyvoice = source("cosyvoice.transformer.encoder.ConformerEncoder", "torchaudio scipy transformers")


def x_transformers(causal: bool = False, **settings: Any) -> nn.Module:
    kind = load(f"x_transformers.{'Decoder' if causal else 'Encoder'}")
    return kind(**{"dim": WIDTH, "depth": 2, "heads": HEADS, "attn_dim_head": 8, **settings})  # type: ignore[no-any-return]


def cellpose(**settings: Any) -> nn.Module:
    """The model that makes all layers of a segment-anything encoder global."""
    made: Any = SimpleNamespace(image_encoder=STRUCTURES["segment-anything"].build(use_rel_pos=True, **settings))
    registry = sys.modules["segment_anything"].__dict__.setdefault("sam_model_registry", {})
    registry["vit_l"] = lambda _: made
    return load("cellpose.vit.CPSAM")()  # type: ignore[no-any-return]


def timm(**settings: Any) -> nn.Module:
    absent("torchvision", "timm.data")
    bare("timm")
    vars(__import__("timm"))["__version__"] = "1.0.31"
    return load("timm.models.vision_transformer_sam.VisionTransformerSAM")(**settings)  # type: ignore[no-any-return]


def mel_last(real: torch.Tensor) -> tuple[Any, ...]:
    return states(*real.shape, MEL), real.sum(1)


def speech(real: torch.Tensor) -> tuple[Any, ...]:
    return states(len(real), 16, real.shape[1]), real[:, None].float()


def frames(real: torch.Tensor) -> tuple[Any, ...]:
    x = states(*real.shape, 16)
    return x, x, x, states(1, 2 * real.shape[1] - 1, 16), real[:, None]


def mask_first(real: torch.Tensor) -> tuple[Any, ...]:
    x, y, z, positions, mask = frames(real)
    return x, y, z, mask, positions


def time_first(real: torch.Tensor) -> tuple[Any, ...]:
    """Arguments of fairseq's attention: the mask of padding, no incremental state, and no weights."""
    x = states(*real.T.shape, 16)
    return x, x, x, ~real, None, False


def sequences(real: torch.Tensor) -> tuple[Any, ...]:
    return (states(*real.shape, 16),)


def image(real: torch.Tensor, side: int = 64) -> tuple[Any, ...]:
    return (states(len(real), 3, side, side),)


NEMO = Model("nemo", "nemo", nemo, lambda real: (mel_last(real)[0].mT, real.sum(1)), names=("audio_signal", "length"))
SPEECHBRAIN = Model("speechbrain", "speechbrain", speechbrain, lambda real: (states(*real.shape, MEL), real.float().mean(1)))
ESPNET = Model("espnet", "espnet2", espnet, mel_last)
PROJECTED = {"pos_enc_layer_type": "rel_pos_espnet", "selfattention_layer_type": "rel_selfattn"}
COSYVOICE = Model("cosyvoice", "cosyvoice", cosyvoice, mel_last, ENCODER | PROJECTED)
X = Model("x", "x_transformers", x_transformers, lambda real: (states(*real.shape, WIDTH), real), names=("x", "mask"))
IN_CHUNKS = {"att_context_style": "chunked_limited"}
CLASSES = (
    NEMO,
    NEMO.but("sdpa", use_pytorch_sdpa=True, untie_biases=False),
    NEMO.but("window", att_context_size=[5, 3]),
    NEMO.but("causal", att_context_size=[-1, 0]),
    NEMO.but("chunks", att_context_size=[8, 3], **IN_CHUNKS),
    NEMO.but("chunks of one", att_context_size=[8, 0], **IN_CHUNKS),
    NEMO.but("chunks of all the past", att_context_size=[-1, 3], **IN_CHUNKS),
    NEMO.but("chunks and more", context=[7, 4, 3]),
    SPEECHBRAIN,
    SPEECHBRAIN.but("causal", causal=True),
    SPEECHBRAIN.but("chunks", chunks=(4, 2)),
    SPEECHBRAIN.but("chunks of all the past", chunks=(4, None)),
    ESPNET,
    ESPNET.but("zero_triu", zero_triu=True),
    ESPNET.but("legacy", zero_triu=True, rel_pos_type="legacy"),
    COSYVOICE,
    COSYVOICE.but("chunks", static_chunk_size=4),
    X.but("T5", rel_pos_bias=True, rel_pos_max_distance=32),
    X.but("T5 causal", rel_pos_bias=True, causal=True),
    X.but("dynamic", dynamic_pos_bias=True),
    X.but("dynamic log", dynamic_pos_bias=True, dynamic_pos_bias_log_distance=True, causal=True),
    X.but("alibi", alibi_pos_bias=True, alibi_num_heads=3, attn_kv_heads=2),
    X.but("inkling", attn_use_rel_proj_pos_bias=True, causal=True),
)
"""Classes that enable() knows by their names."""

WAVLM = {"embed_dim": 16, "num_heads": 2, "has_relative_attention_bias": True, "num_buckets": 32, "max_distance": 80}
WAVLM_USUAL = WAVLM | {"embed_dim": 768, "num_heads": 12, "num_buckets": 320, "max_distance": 800}
GATED = {"self_attention": True, "gru_rel_pos": True}
VITS = {"hidden_channels": 16, "filter_channels": 24, "n_heads": 2, "n_layers": 2, "kernel_size": 3, "window_size": 3}
VITS_USUAL = VITS | {"hidden_channels": 192, "filter_channels": 768, "n_layers": 6, "window_size": 4}
GLOW = {"in_channels": 16, "out_channels": 16, "hidden_channels": 16, "hidden_channels_ffn": 24, "num_heads": 2}
GLOW |= {"num_layers": 2, "kernel_size": 3, "rel_attn_window_size": 3}
GLOW_USUAL = GLOW | dict.fromkeys(("in_channels", "out_channels", "hidden_channels"), 192)
GLOW_USUAL |= {"hidden_channels_ffn": 768, "num_layers": 6, "rel_attn_window_size": 4}
GRID: dict[str, Any] = {"img_size": 64, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2, "use_rel_pos": True}
GRID |= {"window_size": 3, "global_attn_indexes": (1,)}
GRID_USUAL = {"use_rel_pos": True, "window_size": 14, "global_attn_indexes": (2, 5, 8, 11)}
CELLS = {"embed_dim": 16, "depth": 2, "num_heads": 2, "window_size": 14, "global_attn_indexes": (1,)}
SHAW = {"dim": 16, "depth": 2, "heads": 2, "dim_head": 8}


def features(small: int, usual: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of Enformer's attention with so many features."""
    sizes = {"dim": 16, "heads": 2, "dim_key": 8, "dim_value": 12}, {"dim": 1536, "heads": 8, "dim_key": 64, "dim_value": 192}
    return sizes[0] | {"num_rel_pos_features": small}, sizes[1] | {"num_rel_pos_features": usual}


GENES_LACK = "discrete_key_value_bottleneck_pytorch polars pyfaidx pandas datasets torchmetrics transformers"
TTS_LACKS = "coqpit trainer librosa scipy soundfile TTS.utils.audio TTS.tts.utils.text TTS.config"
SVC_LACKS, WAVLM_LACKS = "scipy librosa torchaudio requests tqdm", "torchaudio soundfile"
BEATS = (time_first, WAVLM | GATED, WAVLM_USUAL | GATED)
RELATIVE = "RelPositionMultiHeadedAttention"
CONFORMER = {"n_head": 2, "n_feat": 16, "dropout_rate": 0.1}
CONFORMER_USUAL, CONFORMER_LARGE = CONFORMER | {"n_head": 4, "n_feat": 256}, CONFORMER | {"n_head": 8, "n_feat": 512}
AT = {"cellpose": 1024, "enformer-pytorch": 1536}
ROWS: tuple[Any, ...] = (
    ("torchaudio", "wavlm_attention", "WavLMSelfAttention", "", lambda real: (*sequences(real), ~real), WAVLM, WAVLM_USUAL),
    ("espnet, BEATs", "espnet2", "asr.encoder.beats_encoder.MultiheadAttention", WAVLM_LACKS, *BEATS),
    ("speechbrain, BEATs", "speechbrain", "lobes.models.beats.MultiheadAttention", WAVLM_LACKS, *BEATS),
    ("coqui, WavLM", "TTS", "vc.layers.freevc.wavlm.modules.MultiheadAttention", WAVLM_LACKS, *BEATS),
    ("piper", "piper", "train.vits.attentions.Encoder", "", speech, VITS, VITS_USUAL),
    ("RVC", "rvc", "lib.infer_pack.attentions.Encoder", "scipy", speech, VITS, VITS_USUAL | {"window_size": 10}),
    ("so-vits-svc", "so_vits_svc_fork", "modules.attentions.Encoder", SVC_LACKS, speech, VITS, VITS_USUAL),
    ("coqui", "TTS", "tts.layers.glow_tts.transformer.RelativePositionTransformer", TTS_LACKS, speech, GLOW, GLOW_USUAL),
    ("FunASR", "funasr", f"models.transformer.attention.{RELATIVE}", "", frames, CONFORMER, CONFORMER_USUAL),
    ("chatterbox", "chatterbox", f"models.s3gen.transformer.attention.{RELATIVE}", "", mask_first, CONFORMER, CONFORMER_LARGE),
    ("segment-anything", "segment_anything", "modeling.image_encoder.ImageEncoderViT", "", image, GRID, GRID_USUAL),
    ("cellpose", "cellpose", cellpose, "", lambda real: image(real, 256), CELLS, CELLS | {"embed_dim": 1024, "num_heads": 16}),
    ("timm, SAM", "timm", timm, "", image, GRID, GRID_USUAL),
    ("conformer", "conformer", "Conformer", "", sequences, SHAW, {"dim": 512, "depth": 2}),
    ("enformer-pytorch", "enformer_pytorch", "modeling_enformer.Attention", GENES_LACK, sequences, *features(12, 192)),
    ("borzoi-pytorch", "borzoi_pytorch", "pytorch_borzoi_transformer.Attention", "", sequences, *features(32, 32)),
)
"""Modules that enable() knows by their structure: name in docs/enable.md, package, class in it or what makes one, absent
packages, arguments, small and published settings."""
STRUCTURES = {
    name: Model(
        name, package, build if callable(build) else source(f"{package}.{build}", lacks), given, small, usual, AT.get(name, 4096)
    )
    for name, package, build, lacks, given, small, usual in ROWS
}
