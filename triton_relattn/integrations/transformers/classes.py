"""Which class here takes the place of which stock class of transformers, and the library as :mod:`triton_relattn.integrations`
sees it.

A class is derived from a general one and the stock class when it is first asked for. Pickle finds it by its name,
``classes.t5_T5Attention``.
"""

from __future__ import annotations

import functools
import importlib

from ..libraries import Library, Source
from .families import FAMILIES

ENCODER = "encoder.Encoder"
"""They pass on small masks, which an encoder gets from transformers or makes itself."""
BUCKETS, CONFORMER = "t5.BucketedAttention", "conformer.ConformerAttention"
SAM, SAM_SDPA = "grid.SamAttention", "grid.SamSdpaAttention"

CLASSES: dict[str, dict[str, str]] = {
    "bloom": {"BloomAttention": "alibi.BloomAttention", "BloomModel": "alibi.BloomModel"},
    "deberta": {
        "DisentangledSelfAttention": "deberta.DebertaAttention",
        "DebertaEncoder": "deberta.DebertaEncoder",
    },
    "deberta_v2": {
        "DisentangledSelfAttention": "deberta.DisentangledAttention",
        "DebertaV2Encoder": "deberta.DisentangledEncoder",
    },
    "deepseek_ocr2": {"DeepseekOcr2SamVisionAttention": SAM, "DeepseekOcr2SamVisionSdpaAttention": SAM_SDPA},
    "falcon": {"FalconAttention": "alibi.FalconAttention", "FalconModel": "alibi.FalconModel"},
    "fastspeech2_conformer": {"FastSpeech2ConformerAttention": "conformer.FastSpeech2ConformerAttention"},
    "gemma3n": {"Gemma3nAudioAttention": "gemma.Gemma3nAudioAttention"},
    "gemma4": {"Gemma4AudioAttention": "gemma.Gemma4AudioAttention", "Gemma4AudioModel": "gemma.Gemma4AudioModel"},
    "got_ocr2": {"GotOcr2VisionAttention": SAM},
    "granite_speech": {"GraniteSpeechConformerAttention": "granite_speech.BlockAttention"},
    "granite_speech5": {"GraniteSpeech5EncoderAttention": "granite_speech.GraniteSpeech5Attention"},
    "granite_speech_plus": {"GraniteSpeechPlusConformerAttention": "granite_speech.BlockAttention"},
    "inkling": {
        "InklingAttention": "inkling.InklingAttention",
        "InklingTextModel": ENCODER,
        "InklingModel": "inkling.InklingModel",
    },
    "inkling2": {
        "Inkling2SlidingAttention": "inkling2.SinkAttention",
        "Inkling2FullAttention": "inkling2.FullAttention",
        "Inkling2TextModel": "inkling2.TextModel",
    },
    "longt5": {"LongT5Attention": BUCKETS, "LongT5LocalAttention": "longt5.LocalAttention", "LongT5Stack": ENCODER},
    "mpnet": {
        "MPNetSelfAttention": "mpnet.MPNetSelfAttention",
        "MPNetEncoder": "mpnet.MPNetEncoder",
        "MPNetModel": ENCODER,
    },
    "mpt": {"MptAttention": "alibi.MptAttention", "MptModel": "alibi.MptModel"},
    "mt5": {"MT5Attention": BUCKETS, "MT5Stack": ENCODER},
    "nemotron_asr_streaming": {
        "NemotronAsrStreamingEncoderAttention": "nemotron_asr_streaming.StreamingAttention",
        "NemotronAsrStreamingEncoderBlock": "nemotron_asr_streaming.StreamingBlock",
        "NemotronAsrStreamingEncoder": "nemotron_asr_streaming.StreamingEncoder",
    },
    "parakeet": {"ParakeetEncoderAttention": "parakeet.ParakeetAttention", "ParakeetEncoder": "parakeet.ParakeetEncoder"},
    "phi4_multimodal": {
        "Phi4MultimodalAudioAttention": "phi4_multimodal.AudioAttention",
        "Phi4MultimodalAudioRelativeAttentionBias": "phi4_multimodal.RelativeAttentionBias",
        "Phi4MultimodalAudioModel": "phi4_multimodal.AudioModel",
    },
    "pix2struct": {"Pix2StructTextAttention": "t5.Pix2StructAttention", "Pix2StructTextModel": ENCODER},
    "pop2piano": {"Pop2PianoAttention": BUCKETS, "Pop2PianoStack": ENCODER},
    "pp_formulanet": {"PPFormulaNetVisionAttention": SAM},
    "sam": {"SamVisionAttention": SAM, "SamVisionSdpaAttention": SAM_SDPA},
    "sam_hq": {"SamHQVisionAttention": SAM, "SamHQVisionSdpaAttention": SAM_SDPA},
    "seamless_m4t": {
        "SeamlessM4TConformerSelfAttention": CONFORMER,
        "SeamlessM4TConformerEncoder": ENCODER,
        "SeamlessM4TConformerAdapterLayer": ENCODER,
    },
    "seamless_m4t_v2": {
        "SeamlessM4Tv2ConformerSelfAttention": CONFORMER,
        "SeamlessM4Tv2ConformerEncoder": "conformer.SeamlessM4Tv2Encoder",
        "SeamlessM4Tv2ConformerAdapterLayer": ENCODER,
    },
    "seggpt": {"SegGptAttention": "grid.SegGptAttention"},
    "sew_d": {
        "DisentangledSelfAttention": "deberta.SewDAttention",
        "SEWDTransformerEncoder": "deberta.DisentangledEncoder",
    },
    "slanext": {"SLANeXtVisionAttention": SAM},
    "speecht5": {
        "SpeechT5Attention": "speecht5.SpeechT5Attention",
        "SpeechT5RelativePositionalEncoding": "speecht5.RelativePositionalEncoding",
        "SpeechT5Encoder": ENCODER,
    },
    "switch_transformers": {"SwitchTransformersAttention": BUCKETS, "SwitchTransformersStack": ENCODER},
    "t5": {"T5Attention": BUCKETS, "T5Stack": ENCODER},
    "umt5": {"UMT5Attention": "t5.UMT5Attention", "UMT5Stack": ENCODER},
    "unlimited_ocr": {"UnlimitedOcrSamVisionAttention": SAM, "UnlimitedOcrSamVisionSdpaAttention": SAM_SDPA},
    "vitdet": {"VitDetAttention": "grid.VitDetAttention"},
    "vits": {"VitsAttention": "vits.VitsAttention", "VitsEncoder": ENCODER},
    "wav2vec2_bert": {
        "Wav2Vec2BertSelfAttention": CONFORMER,
        "Wav2Vec2BertEncoder": ENCODER,
        "Wav2Vec2BertAdapterLayer": ENCODER,
    },
    "wav2vec2_conformer": {"Wav2Vec2ConformerSelfAttention": CONFORMER, "Wav2Vec2ConformerEncoder": ENCODER},
    "wavlm": {
        "WavLMAttention": "wavlm.WavLMAttention",
        "WavLMEncoder": "wavlm.WavLMEncoder",
        "WavLMEncoderStableLayerNorm": "wavlm.WavLMEncoder",
    },
}
"""By the model's folder in transformers: the name of a stock class, and the general class, ``module.Class`` here."""

SOURCES = tuple(
    Source(
        f"transformers.models.{family.folder}.modeling_{family.folder}",
        f"{family.name}: {family.adds}",
        {name: f"classes.{family.folder}_{name}" for name in CLASSES[family.folder]},
    )
    for family in FAMILIES
    if family.inside is None
)
LIBRARY = Library("transformers", __package__, SOURCES, oldest="5.0")


@functools.cache
def replacing_class(folder: str, name: str) -> type:
    """Return the class in place of a stock class."""
    module, _, general = CLASSES[folder][name].rpartition(".")
    base = getattr(importlib.import_module(f".{module}", __package__), general)
    stock = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
    attributes = {"__module__": __name__, "__qualname__": f"{folder}_{name}", "__doc__": base.__doc__}
    return type(name, (base, stock), attributes)


NAMES = {f"{folder}_{name}": (folder, name) for folder, names in CLASSES.items() for name in names}


def __getattr__(name: str) -> type:
    """Return a class, as pickle looks for it."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return replacing_class(*NAMES[name])
