"""Attention of packages that enable() finds by its structure, built from the packages' files at a small and at the usual size."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.libraries.standins import absent, bare

LENGTH = 363
"""With two sequences of this length and two heads there are 2**19 scores, from which on a CPU uses the operator."""
REAL = torch.arange(LENGTH) < torch.tensor([LENGTH, 200])[:, None]
"""The positions of two sequences that are not padding."""


@dataclass(frozen=True)
class Copy:
    """A package's attention.

    name: in the docs. package: in Python. build: makes a module from settings. small: settings for a comparison, and given the
    arguments for it. usual: settings of published models, and at the length for which memory is counted. counts: the positions of
    the output that are compared, None for all.
    """

    name: str
    package: str
    build: Callable[..., nn.Module]
    small: dict[str, Any]
    given: Callable[[], tuple[Any, ...]]
    usual: dict[str, Any]
    at: int = 4096
    counts: torch.Tensor | None = field(default=None, compare=False)


def states(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def load_class(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def piper(**settings: Any) -> nn.Module:
    bare("piper", "piper.train", "piper.train.vits")
    return load_class("piper.train.vits.attentions", "Encoder")(**settings)  # type: ignore[no-any-return]


def rvc(**settings: Any) -> nn.Module:
    bare("rvc", "rvc.lib", "rvc.lib.infer_pack")
    absent("scipy")
    return load_class("rvc.lib.infer_pack.attentions", "Encoder")(**settings)  # type: ignore[no-any-return]


def so_vits_svc(**settings: Any) -> nn.Module:
    bare("so_vits_svc_fork", "so_vits_svc_fork.modules")
    absent("scipy", "librosa", "torchaudio", "requests", "tqdm")
    return load_class("so_vits_svc_fork.modules.attentions", "Encoder")(**settings)  # type: ignore[no-any-return]


def coqui(**settings: Any) -> nn.Module:
    layers = "TTS.tts.layers"
    bare("TTS", "TTS.tts", layers, f"{layers}.glow_tts", "TTS.tts.utils", f"{layers}.generic", "TTS.utils")
    absent("coqpit", "trainer", "librosa", "scipy", "soundfile", "TTS.utils.audio", "TTS.tts.utils.text", "TTS.config")
    return load_class(f"{layers}.glow_tts.transformer", "RelativePositionTransformer")(**settings)  # type: ignore[no-any-return]


def funasr(**settings: Any) -> nn.Module:
    bare("funasr", "funasr.models", "funasr.models.transformer", "funasr.models.transformer.utils")
    return load_class("funasr.models.transformer.attention", "RelPositionMultiHeadedAttention")(**settings)  # type: ignore[no-any-return]


def chatterbox(**settings: Any) -> nn.Module:
    parts = "chatterbox.models.s3gen"
    bare("chatterbox", "chatterbox.models", parts, f"{parts}.transformer")
    return load_class(f"{parts}.transformer.attention", "RelPositionMultiHeadedAttention")(**settings)  # type: ignore[no-any-return]


def segment_anything(**settings: Any) -> nn.Module:
    bare("segment_anything", "segment_anything.modeling")
    return load_class("segment_anything.modeling.image_encoder", "ImageEncoderViT")(**settings)  # type: ignore[no-any-return]


def cellpose(**settings: Any) -> nn.Module:
    """The model that makes all layers of a segment-anything encoder global."""
    encoder = segment_anything(use_rel_pos=True, **settings)
    sys.modules["segment_anything"].sam_model_registry = {"vit_l": lambda _: SimpleNamespace(image_encoder=encoder)}  # type: ignore[attr-defined]
    bare("cellpose")
    made = load_class("cellpose.vit", "CPSAM")
    importlib.import_module("cellpose.vit").sam_model_registry = sys.modules["segment_anything"].sam_model_registry  # type: ignore[attr-defined]
    return made()  # type: ignore[no-any-return]


def timm(**settings: Any) -> nn.Module:
    absent("torchvision", "timm.data")
    bare("timm", "timm.models")
    sys.modules["timm"].__version__ = "1.0.31"  # type: ignore[attr-defined]
    made = load_class("timm.models.vision_transformer_sam", "VisionTransformerSAM")(**settings)
    return made  # type: ignore[no-any-return]


def conformer(**settings: Any) -> nn.Module:
    return load_class("conformer", "Conformer")(**settings)  # type: ignore[no-any-return]


def enformer(**settings: Any) -> nn.Module:
    bare("enformer_pytorch")
    absent("discrete_key_value_bottleneck_pytorch", "polars", "pyfaidx", "pandas", "datasets", "torchmetrics", "transformers")
    return load_class("enformer_pytorch.modeling_enformer", "Attention")(**settings)  # type: ignore[no-any-return]


def borzoi(**settings: Any) -> nn.Module:
    bare("borzoi_pytorch")
    return load_class("borzoi_pytorch.pytorch_borzoi_transformer", "Attention")(**settings)  # type: ignore[no-any-return]


def beats(module: str) -> Callable[..., nn.Module]:
    """BEATs' attention, or WavLM's, in a file that begins with imports of audio."""

    def build(**settings: Any) -> nn.Module:
        absent("torchaudio", "soundfile")
        for package in ("speechbrain.lobes.models", "TTS.vc.layers.freevc.wavlm"):
            if module.startswith(package):
                bare(*(package[:end] for end in range(len(package)) if package[end] == "."), package)
        return load_class(module, "MultiheadAttention")(**settings)  # type: ignore[no-any-return]

    return build


sys.path.append(f"{sys.prefix}/beside")


def torchaudio(**settings: Any) -> nn.Module:
    bare("torchaudio", "torchaudio.models", "torchaudio.models.wav2vec2")
    return load_class("torchaudio.models.wav2vec2.wavlm_attention", "WavLMSelfAttention")(**settings)  # type: ignore[no-any-return]


VITS = {"hidden_channels": 16, "filter_channels": 24, "n_heads": 2, "n_layers": 2, "kernel_size": 3, "window_size": 3}
VITS_USUAL = {"hidden_channels": 192, "filter_channels": 768, "n_heads": 2, "n_layers": 6, "kernel_size": 3}
SAM = {"img_size": 128, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2, "use_rel_pos": True, "window_size": 3}
SAM_USUAL = {"use_rel_pos": True, "window_size": 14, "global_attn_indexes": (2, 5, 8, 11)}
GENES = {"dim": 1536, "heads": 8, "dim_key": 64, "dim_value": 192}


def speech() -> tuple[Any, ...]:
    return states(2, 16, LENGTH), REAL[:, None].float()


def frames() -> tuple[Any, ...]:
    x = states(2, LENGTH, 16)
    return x, x, x, states(1, 2 * LENGTH - 1, 16), REAL[:, None]


def frames_and_mask_first() -> tuple[Any, ...]:
    x, y, z, positions, mask = frames()
    return x, y, z, mask, positions


def time_first() -> tuple[Any, ...]:
    """Arguments of fairseq's attention: the mask of padding, no incremental state, and no weights."""
    x = states(LENGTH, 2, 16)
    return x, x, x, ~REAL, None, False


def image() -> tuple[Any, ...]:
    return (states(2, 3, 128, 128),)


BUCKETED = {"embed_dim": 16, "num_heads": 2, "has_relative_attention_bias": True, "num_buckets": 32, "max_distance": 80}
BUCKETED_USUAL = BUCKETED | {"embed_dim": 768, "num_heads": 12, "num_buckets": 320, "max_distance": 800}
GATED = {"self_attention": True, "gru_rel_pos": True}
REAL_FRAMES = REAL[:, None]
COPIES = (
    Copy("torchaudio", "torchaudio", torchaudio, BUCKETED, lambda: (states(2, LENGTH, 16), ~REAL), BUCKETED_USUAL),
    *(
        Copy(name, package, beats(module), BUCKETED | GATED, time_first, BUCKETED_USUAL | GATED)
        for name, package, module in (
            ("espnet, BEATs", "espnet2", "espnet2.asr.encoder.beats_encoder"),
            ("speechbrain, BEATs", "speechbrain", "speechbrain.lobes.models.beats"),
            ("coqui, WavLM", "TTS", "TTS.vc.layers.freevc.wavlm.modules"),
        )
    ),
    Copy("piper", "piper", piper, VITS, speech, VITS_USUAL | {"window_size": 4}, counts=REAL_FRAMES),
    Copy("RVC", "rvc", rvc, VITS, speech, VITS_USUAL | {"window_size": 10}, counts=REAL_FRAMES),
    Copy("so-vits-svc", "so_vits_svc_fork", so_vits_svc, VITS, speech, VITS_USUAL | {"window_size": 4}, counts=REAL_FRAMES),
    Copy(
        "coqui",
        "TTS",
        coqui,
        {"in_channels": 16, "out_channels": 16, "hidden_channels": 16, "hidden_channels_ffn": 24, "num_heads": 2}
        | {"num_layers": 2, "kernel_size": 3, "rel_attn_window_size": 3},
        speech,
        {"in_channels": 192, "out_channels": 192, "hidden_channels": 192, "hidden_channels_ffn": 768, "num_heads": 2}
        | {"num_layers": 6, "kernel_size": 3, "rel_attn_window_size": 4},
        counts=REAL_FRAMES,
    ),
    Copy(
        "FunASR",
        "funasr",
        funasr,
        {"n_head": 2, "n_feat": 16, "dropout_rate": 0.1},
        frames,
        {"n_head": 4, "n_feat": 256, "dropout_rate": 0.1},
    ),
    Copy(
        "chatterbox",
        "chatterbox",
        chatterbox,
        {"n_head": 2, "n_feat": 16, "dropout_rate": 0.1},
        frames_and_mask_first,
        {"n_head": 8, "n_feat": 512, "dropout_rate": 0.1},
    ),
    Copy("segment-anything", "segment_anything", segment_anything, SAM | {"global_attn_indexes": (1,)}, image, SAM_USUAL),
    Copy(
        "cellpose",
        "cellpose",
        cellpose,
        {"embed_dim": 16, "depth": 2, "num_heads": 2, "window_size": 14, "global_attn_indexes": (1,)},
        lambda: (states(2, 3, 256, 256),),
        {"embed_dim": 1024, "depth": 2, "num_heads": 16, "window_size": 14, "global_attn_indexes": (1,)},
        at=1024,
    ),
    Copy("timm, SAM", "timm", timm, SAM | {"global_attn_indexes": (1,)}, image, SAM_USUAL),
    Copy(
        "conformer",
        "conformer",
        conformer,
        {"dim": 16, "depth": 2, "heads": 2, "dim_head": 8},
        lambda: (states(2, LENGTH, 16),),
        {"dim": 512, "depth": 2},
    ),
    Copy(
        "enformer-pytorch",
        "enformer_pytorch",
        enformer,
        {"dim": 16, "num_rel_pos_features": 12, "heads": 2, "dim_key": 8, "dim_value": 12},
        lambda: (states(2, LENGTH, 16),),
        GENES | {"num_rel_pos_features": 192},
        at=1536,
    ),
    Copy(
        "borzoi-pytorch",
        "borzoi_pytorch",
        borzoi,
        {"dim": 16, "num_rel_pos_features": 32, "heads": 2, "dim_key": 8, "dim_value": 12},
        lambda: (states(2, LENGTH, 16),),
        GENES | {"num_rel_pos_features": 32},
    ),
)
