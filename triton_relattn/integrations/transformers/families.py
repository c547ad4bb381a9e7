"""The families of models that :func:`enable` knows, their stock classes that are replaced, and ours in place of each."""

from __future__ import annotations

from typing import NamedTuple

from ..libraries import Library, Source


class Family(NamedTuple):
    """One family of models in transformers.

    folder: the model's folder in transformers. name: the model's name, and its part that has relative attention. adds: the term
    that the part adds to the logits q . k. since: the first version of this package that enables the model. inside: if the model
    contains the encoder of another family, that family's folder.
    """

    folder: str
    name: str
    adds: str
    since: str = "0.1.0"
    inside: str | None = None


TRANSFORMER_XL = "Transformer-XL's terms"
BUCKETS = "a bias by bucket of the distance"
DISENTANGLED = "q · E and k · F, each a row for a distance or a bucket of it"
ALIBI = "ALiBi, a bias that falls with the distance; causal"
DECOMPOSED = "q · R_h and q · R_w by vertical and horizontal distance"
FAMILIES = (
    Family("wav2vec2_bert", "Wav2Vec2-BERT", f"q · E, distances clipped; or {TRANSFORMER_XL}"),
    Family("wav2vec2_conformer", "Wav2Vec2-Conformer", TRANSFORMER_XL),
    Family("seamless_m4t", "Seamless M4T v1, speech encoder", TRANSFORMER_XL),
    Family("seamless_m4t_v2", "Seamless M4T v2, speech encoder", "q · E, distances clipped; chunks"),
    Family("parakeet", "Parakeet", TRANSFORMER_XL),
    Family("vits", "VITS, text encoder", "q · E and a table of values in a window"),
    Family("inkling", "Inkling, language model", "r · W of the past, in windows; grouped heads"),
    Family("inkling2", "Inkling 2, language model", "r · W of the past, in windows; grouped heads; a sink of each query"),
    Family(
        "inkling2_loop",
        "Inkling 2 Loop, language model",
        "r · W of the past, in windows; grouped heads; a sink of each query",
        "0.3.0",
    ),
    Family("gemma4", "Gemma 4, audio encoder", "q · R in a window, softcap"),
    Family("t5", "T5", f"{BUCKETS}, one table for all layers"),
    Family("mt5", "mT5", f"{BUCKETS}, one table for all layers"),
    Family("umt5", "UMT5", f"{BUCKETS}, one table per layer"),
    Family("switch_transformers", "Switch Transformers", f"{BUCKETS}, one table for all layers"),
    Family("pop2piano", "Pop2Piano", f"{BUCKETS}, one table for all layers"),
    Family("pix2struct", "Pix2Struct, text decoder", f"{BUCKETS}, one table for all layers"),
    Family("longt5", "LongT5, decoder, and encoder with local attention", f"{BUCKETS}, in the encoder in a window"),
    Family("bloom", "BLOOM", ALIBI),
    Family("mpt", "MPT", ALIBI),
    Family("falcon", "Falcon with ALiBi", ALIBI),
    Family("wavlm", "WavLM", f"{BUCKETS}, times a gate of each query"),
    Family("mpnet", "MPNet", f"{BUCKETS}, one table for all layers"),
    Family("deberta", "DeBERTa", DISENTANGLED),
    Family("deberta_v2", "DeBERTa v2 and v3, mDeBERTa", DISENTANGLED),
    Family("sew_d", "SEW-D", DISENTANGLED),
    Family("speecht5", "SpeechT5, encoder", "q · E, distances clipped, one table for all layers"),
    Family("fastspeech2_conformer", "FastSpeech2Conformer", TRANSFORMER_XL),
    Family("nemotron_asr_streaming", "Nemotron ASR streaming", f"{TRANSFORMER_XL}; chunks"),
    Family("granite_speech", "Granite Speech, encoder", "q · E in blocks of frames"),
    Family("granite_speech_plus", "Granite Speech Plus, encoder", "q · E in blocks of frames"),
    Family("granite_speech5", "Granite Speech 5", "q · E in blocks of frames"),
    Family("gemma3n", "Gemma 3n, audio encoder", "q · R in a window, softcap"),
    Family("phi4_multimodal", "Phi-4 multimodal, audio encoder", "a bias by distance, clipped"),
    Family("sam", "SAM, vision encoder", DECOMPOSED),
    Family("sam_hq", "SAM-HQ, vision encoder", DECOMPOSED),
    Family("vitdet", "ViTDet, also in ViTMatte", DECOMPOSED),
    Family("seggpt", "SegGPT", DECOMPOSED),
    Family("got_ocr2", "GOT-OCR2, vision encoder", DECOMPOSED),
    Family("deepseek_ocr2", "DeepSeek-OCR2, first vision encoder", DECOMPOSED),
    Family("unlimited_ocr", "Unlimited-OCR, first vision encoder", DECOMPOSED),
    Family("slanext", "SLANeXt, vision encoder", DECOMPOSED),
    Family("pp_formulanet", "PP-FormulaNet, vision encoder", DECOMPOSED),
    Family("canary", "Canary", "its encoder is Parakeet's", inside="parakeet"),
    Family("cohere_asr", "Cohere ASR", "its encoder is Parakeet's", inside="parakeet"),
    Family("nemotron_h_omni", "Nemotron-H Omni", "its audio encoder is Parakeet's", inside="parakeet"),
    Family("nemotron3_5_asr", "Nemotron 3.5 ASR", "its encoder is Nemotron ASR streaming's", inside="nemotron_asr_streaming"),
    Family("xcodec2", "X-Codec 2", "its semantic encoder is Wav2Vec2-BERT", inside="wav2vec2_bert"),
    Family("neucodec", "NeuCodec", "its semantic encoder is Wav2Vec2-BERT", inside="wav2vec2_bert"),
    Family("embedding_gemma2", "EmbeddingGemma 2", "its audio encoder is Gemma 4's", inside="gemma4"),
    Family("musicgen", "MusicGen", "its text encoder is T5", "0.2.0", inside="t5"),
    Family("musicgen_melody", "MusicGen Melody", "its text encoder is T5", "0.2.0", inside="t5"),
    Family("deepseek_vl_hybrid", "DeepSeek-VL, hybrid", "its vision encoder for large images is SAM's", "0.2.0", inside="sam"),
)


CLASSES = {
    "alibi.BloomAttention": "bloom.BloomAttention",
    "alibi.BloomModel": "bloom.BloomModel",
    "alibi.FalconAttention": "falcon.FalconAttention",
    "alibi.FalconModel": "falcon.FalconModel",
    "alibi.MptAttention": "mpt.MptAttention",
    "alibi.MptModel": "mpt.MptModel",
    "base.Encoder": "inkling.InklingTextModel mpnet.MPNetModel speecht5.SpeechT5Encoder vits.VitsEncoder "
    "seamless_m4t_v2.SeamlessM4Tv2ConformerAdapterLayer",
    "base.FastSpeech2ConformerAttention": "fastspeech2_conformer.FastSpeech2ConformerAttention",
    "base.GridAttention": "sam.SamVisionAttention sam.SamVisionSdpaAttention sam_hq.SamHQVisionAttention "
    "sam_hq.SamHQVisionSdpaAttention deepseek_ocr2.DeepseekOcr2SamVisionAttention "
    "deepseek_ocr2.DeepseekOcr2SamVisionSdpaAttention unlimited_ocr.UnlimitedOcrSamVisionAttention "
    "unlimited_ocr.UnlimitedOcrSamVisionSdpaAttention got_ocr2.GotOcr2VisionAttention slanext.SLANeXtVisionAttention "
    "pp_formulanet.PPFormulaNetVisionAttention seggpt.SegGptAttention vitdet.VitDetAttention",
    "conformer.ConformerAttention": "wav2vec2_bert.Wav2Vec2BertSelfAttention wav2vec2_conformer.Wav2Vec2ConformerSelfAttention "
    "seamless_m4t.SeamlessM4TConformerSelfAttention",
    "conformer.SeamlessM4Tv2Attention": "seamless_m4t_v2.SeamlessM4Tv2ConformerSelfAttention",
    "conformer.SeamlessM4Tv2Encoder": "seamless_m4t_v2.SeamlessM4Tv2ConformerEncoder",
    "deberta.DebertaAttention": "deberta.DisentangledSelfAttention",
    "deberta.DebertaEncoder": "deberta.DebertaEncoder",
    "deberta.DisentangledAttention": "deberta_v2.DisentangledSelfAttention",
    "deberta.DisentangledEncoder": "sew_d.SEWDTransformerEncoder",
    "deberta.PackingEncoder": "deberta_v2.DebertaV2Encoder",
    "deberta.SewDAttention": "sew_d.DisentangledSelfAttention",
    "gemma.Gemma3nAudioAttention": "gemma3n.Gemma3nAudioAttention",
    "gemma.Gemma4AudioAttention": "gemma4.Gemma4AudioAttention",
    "gemma.Gemma4AudioModel": "gemma4.Gemma4AudioModel",
    "granite_speech.BlockAttention": "granite_speech.GraniteSpeechConformerAttention "
    "granite_speech_plus.GraniteSpeechPlusConformerAttention",
    "granite_speech.GraniteSpeech5Attention": "granite_speech5.GraniteSpeech5EncoderAttention",
    "inkling.InklingAttention": "inkling.InklingAttention",
    "inkling.InklingModel": "inkling.InklingModel",
    "inkling2.FullAttention": "inkling2.Inkling2FullAttention inkling2_loop.Inkling2LoopFullAttention",
    "inkling2.SinkAttention": "inkling2.Inkling2SlidingAttention inkling2_loop.Inkling2LoopSlidingAttention",
    "inkling2.TextModel": "inkling2.Inkling2TextModel inkling2_loop.Inkling2LoopTextModel",
    "nemotron_asr_streaming.StreamingAttention": "nemotron_asr_streaming.NemotronAsrStreamingEncoderAttention",
    "nemotron_asr_streaming.StreamingBlock": "nemotron_asr_streaming.NemotronAsrStreamingEncoderBlock",
    "nemotron_asr_streaming.StreamingEncoder": "nemotron_asr_streaming.NemotronAsrStreamingEncoder",
    "parakeet.ParakeetAttention": "parakeet.ParakeetEncoderAttention",
    "parakeet.ParakeetEncoder": "parakeet.ParakeetEncoder",
    "phi4_multimodal.AudioAttention": "phi4_multimodal.Phi4MultimodalAudioAttention",
    "phi4_multimodal.AudioModel": "phi4_multimodal.Phi4MultimodalAudioModel",
    "phi4_multimodal.RelativeAttentionBias": "phi4_multimodal.Phi4MultimodalAudioRelativeAttentionBias",
    "speech.RelativePositionalEncoding": "speecht5.SpeechT5RelativePositionalEncoding",
    "speech.SpeechT5Attention": "speecht5.SpeechT5Attention",
    "speech.VitsAttention": "vits.VitsAttention",
    "speech.WavLMAttention": "wavlm.WavLMAttention",
    "speech.WavLMEncoder": "wavlm.WavLMEncoder wavlm.WavLMEncoderStableLayerNorm",
    "t5.BucketedAttention": "t5.T5Attention mt5.MT5Attention longt5.LongT5Attention pop2piano.Pop2PianoAttention "
    "switch_transformers.SwitchTransformersAttention pix2struct.Pix2StructTextAttention",
    "t5.LocalAttention": "longt5.LongT5LocalAttention",
    "t5.MPNetEncoder": "mpnet.MPNetEncoder",
    "t5.MPNetSelfAttention": "mpnet.MPNetSelfAttention",
    "t5.T5Encoder": "t5.T5Stack mt5.MT5Stack umt5.UMT5Stack pop2piano.Pop2PianoStack",
    "t5.UMT5Attention": "umt5.UMT5Attention",
}
"""By our class, ``module.Class`` in this folder, the stock classes in whose place it is, ``folder.Class`` of transformers."""

STOCK_CLASSES = tuple((*stock.split("."), ours) for ours, classes in CLASSES.items() for stock in classes.split())
SOURCES = tuple(
    Source(
        f"transformers.models.{family.folder}.modeling_{family.folder}",
        f"{family.name}: {family.adds}",
        {name: ours for folder, name, ours in STOCK_CLASSES if folder == family.folder},
    )
    for family in FAMILIES
    if family.inside is None
)
LIBRARY = Library("transformers", __package__, SOURCES, oldest="5.0")


def supported_families() -> tuple[Family, ...]:
    """Return the families of models that :func:`enable` knows.

    Example:
        >>> next(family for family in supported_families() if family.folder == "parakeet").adds
        "Transformer-XL's terms"
    """
    return FAMILIES


def table() -> str:
    """Return the families as text, a line per family."""
    rows = [("family", "adds to q · k", "since"), *((family.name, family.adds, family.since) for family in FAMILIES)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
