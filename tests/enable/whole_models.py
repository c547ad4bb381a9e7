"""Whole models of transformers that have relative attention inside: models around an encoder of another family, and vision
encoders that begin with images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from bench.families import FAMILIES
from tests.enable.models import build, padding_first

SMALL = {name: {**family.small, **dict.fromkeys(family.layers, 2)} for name, family in FAMILIES.items()}
PARAKEET = {**SMALL["parakeet"], "model_type": "parakeet_encoder", "dropout": 0.0}
SOUND_DECODER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
SOUND_DECODER |= {"num_attention_heads": 4, "num_key_value_heads": 4}
TOKENS: dict[str, Any] = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {**SOUND_DECODER, **TOKENS}
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
Run = Callable[[Any], Any]


def shown(length: int, other: int) -> torch.Tensor:
    """(2, length), 1 at tokens that are not padding."""
    return (torch.arange(length) < torch.tensor([[length], [other]])).long()


def tokens(length: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(1, 49, (batch, length))


def made(name: str, part: str = "ForConditionalGeneration", **settings: Any) -> Any:
    return getattr(transformers, name + part)(getattr(transformers, f"{name}Config")(**settings))


def calls(result: str, **given: Any) -> Run:
    """What calls a model with these arguments and takes a part of its result."""
    return lambda model: getattr(model(**given), result)


def read() -> Run:
    """Logits of a decoder's tokens after the model has heard the features."""
    features, mask = torch.randn(2, 170, 16), shown(170, 120)
    return calls("logits", input_features=features, attention_mask=mask, decoder_input_ids=tokens(7))


def speecht5() -> tuple[Any, Run]:
    decoder = {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "vocab_size": 50, "num_mel_bins": 8}
    decoder |= {"speech_decoder_prenet_units": 16, "speaker_embedding_dim": 4, "speech_decoder_postnet_units": 16}
    model = made("SpeechT5", "ForTextToSpeech", **SMALL["speecht5"], **decoder, speech_decoder_prenet_dropout=0.0)
    voice = {"speaker_embeddings": torch.randn(2, 4), "decoder_input_values": torch.randn(2, 10, 8)}
    return model, calls("spectrogram", input_ids=tokens(21), attention_mask=shown(21, 14), **voice)


def fastspeech2_conformer() -> tuple[Any, Run]:
    decoder = {"decoder_layers": 1, "decoder_num_attention_heads": 4, "decoder_linear_units": 48, "vocab_size": 50}
    decoder |= {"num_mel_bins": 8, "speech_decoder_postnet_units": 16}
    model = made("FastSpeech2Conformer", "Model", **SMALL["fastspeech2_conformer"], **decoder)
    return model, calls("spectrogram", input_ids=tokens(21), attention_mask=shown(21, 14))


def nemotron3_5_asr() -> tuple[Any, Run]:
    encoder = {**SMALL["nemotron_asr_streaming"], "model_type": "nemotron_asr_streaming_encoder"}
    sizes = {"vocab_size": 50, "blank_token_id": 49, "decoder_hidden_size": 16, "num_prompts": 4, "prompt_intermediate_size": 16}
    sizes |= {"num_decoder_layers": 1, "default_prompt_id": 1}
    heard = {"input_features": torch.randn(2, 289, 16), "attention_mask": shown(289, 200), "prompt_ids": torch.tensor([0, 2])}
    model = made("Nemotron3_5Asr", "ForRNNT", encoder_config=encoder, **sizes)
    return model, calls("logits", decoder_input_ids=tokens(5), **heard)


def music(name: str) -> tuple[Any, Run]:
    """Build a music model whose text encoder is T5."""
    text = {"model_type": "t5", "num_layers": 1, "d_model": 16, "d_kv": 4, "num_heads": 4, "d_ff": 8, "vocab_size": 50}
    sound = {"model_type": "encodec", "num_filters": 4, "hidden_size": 8, "codebook_dim": 8, "codebook_size": 64}
    decoder = {"num_codebooks": 2, "vocab_size": 64, "pad_token_id": 63, "ffn_dim": 8, **TINY}
    given = {"input_ids": tokens(37), "attention_mask": shown(37, 22), "decoder_input_ids": tokens(5, 4)}
    return made(name, text_encoder=text, audio_encoder=sound, decoder=decoder), calls("logits", **given)


def deepseek_vl_hybrid() -> tuple[Any, Run]:
    coarse = {"model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4, "intermediate_size": 16, **TINY}
    fine = {"model_type": "sam_vision_model", "image_size": 24, "patch_size": 4, "output_channels": 8, "window_size": 2, **TINY}
    fine |= {"global_attn_indexes": [1], "mlp_dim": 16, "num_pos_feats": 4, "num_hidden_layers": 2}
    text = {"model_type": "llama", "vocab_size": 50, "num_key_value_heads": 2, "intermediate_size": 16, **TINY}
    parts = {"text_config": text, "vision_config": coarse, "high_res_vision_config": fine}
    images = torch.randn(2, 3, 24, 24)
    return made("DeepseekVLHybrid", "Model", **parts), lambda model: model.high_res_vision_model(images).last_hidden_state


def embedding_gemma2() -> tuple[Any, Run]:
    audio = {**SMALL["gemma4"], "model_type": "gemma4_audio"}
    text = {**DECODER, "num_key_value_heads": 2, "hidden_size_per_layer_input": 8, "embedding_dim": 16}
    model = made("EmbeddingGemma2", "Model", text_config=text, audio_config=audio, vision_config=None)
    features, mask, real = torch.randn(2, 148, 16), shown(148, 88).bool(), shown(37, 22).bool()
    return model, lambda model: model.get_audio_features(features, mask).last_hidden_state[real]


def nemotron_h_omni() -> tuple[Any, Run]:
    """Build only the audio half of the model. The language model would need many more sizes."""
    model = nn.Module()
    stock = transformers.models.nemotron_h_omni.modeling_nemotron_h_omni
    audio = transformers.ParakeetEncoderConfig(**{**SMALL["parakeet"], "dropout": 0.0})
    model.audio_tower = transformers.AutoModel.from_config(audio)
    model.embed_audio = stock.NemotronH_Omni_Reasoning_V3MultiModalProjector(32, 32, 32)
    features, mask = torch.randn(2, 170, 16), shown(170, 120)
    hear = stock.NemotronH_Omni_Reasoning_V3.get_audio_features
    return model, lambda model: hear(model, features, mask).pooler_output


def codec(name: str) -> tuple[Any, Run]:
    """Build a codec whose run returns its quantiser's input: the semantic encoding concatenated with that of the audio."""
    semantic = {**SMALL["wav2vec2_bert"], "model_type": "wav2vec2-bert"}
    sizes = {"encoder_hidden_size": 4, "downsampling_ratios": [2, 2], "quantization_dim": 64, "quantization_levels": [4, 4]}
    config = getattr(transformers, f"{name}Config")(semantic_model_config=semantic, **SOUND_DECODER, **sizes)
    sound, features, mask = torch.randn(2, 1, 4 * 37), torch.randn(2, 37, 12), shown(37, 22)

    def run(model: Any) -> torch.Tensor:
        heard: list[torch.Tensor] = []
        hook = model.quantizer.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0]))
        model.encode(sound, features, input_features_mask=mask)
        hook.remove()
        return heard[0]

    return getattr(transformers, f"{name}Model")(config), run


@contextmanager
def without_vision() -> Iterator[None]:
    """Build Inkling without its large vision part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.models.inkling.modeling_inkling, "InklingVisionModel", lambda config: nn.Identity())
        yield


def inkling() -> tuple[Any, Run]:
    """Build everything but the vision part; its run has padding, packed sequences, and is_causal, which its masks do not
    imply."""
    text, audio = SMALL["inkling"], {"n_mel_bins": 4, "mel_vocab_size": 8, "text_hidden_size": 32}
    config = transformers.InklingConfig(text_config=text, audio_config=audio)
    with without_vision():
        model = transformers.InklingForConditionalGeneration._from_config(config, attn_implementation="eager")
    given, mask = tokens(37), padding_first(9)
    packed = torch.cat([torch.arange(20), torch.arange(17)]).expand(2, -1)

    def run(model: Any) -> torch.Tensor:
        padded = model(given, attention_mask=mask).logits.where(mask.bool()[..., None], 0.0)
        return torch.cat([padded, model(given, position_ids=packed).logits, model(given, is_causal=False).logits])

    return model, run


OF_PARAKEET, OF_BERT = {"ParakeetEncoder", "ParakeetEncoderAttention"}, {"Wav2Vec2BertSelfAttention"}
WHOLE_MODELS: dict[str, tuple[Callable[[], tuple[Any, Run]], set[str]]] = {
    "speecht5": (speecht5, {"SpeechT5Encoder", "SpeechT5Attention", "SpeechT5RelativePositionalEncoding"}),
    "fastspeech2_conformer": (fastspeech2_conformer, {"FastSpeech2ConformerAttention"}),
    "canary": (lambda: (made("Canary", encoder_config=PARAKEET, decoder_config=DECODER, **TOKENS), read()), OF_PARAKEET),
    "cohere_asr": (lambda: (made("CohereAsr", encoder_config=PARAKEET, **DECODER), read()), OF_PARAKEET),
    "nemotron_h_omni": (nemotron_h_omni, OF_PARAKEET),
    "nemotron3_5_asr": (nemotron3_5_asr, {f"NemotronAsrStreamingEncoder{part}" for part in ("", "Block", "Attention")}),
    "xcodec2": (partial(codec, "Xcodec2"), OF_BERT),
    "neucodec": (partial(codec, "NeuCodec"), OF_BERT),
    "embedding_gemma2": (embedding_gemma2, {"Gemma4AudioModel", "Gemma4AudioAttention"}),
    "musicgen": (partial(music, "Musicgen"), {"T5Attention"}),
    "musicgen_melody": (partial(music, "MusicgenMelody"), {"T5Attention"}),
    "inkling": (inkling, {"InklingModel", "InklingTextModel", "InklingAttention"}),
    "deepseek_vl_hybrid": (deepseek_vl_hybrid, {"SamVisionSdpaAttention"}),
}
"""What builds a model and what computes its output, and the classes that are replaced."""

ENDS: dict[str, Any] = {"global_attn_indexes": (1,), "output_channels": 16, "window_size": 3}
DOWN: dict[str, Any] = {**ENDS, "downsample_channels": [16, 16]}
VITDET: dict[str, Any] = {
    "window_block_indices": (0,),
    "residual_block_indices": (1,),
    "pretrain_image_size": 32,
    "window_size": 3,
}
SEGGPT = {"intermediate_hidden_state_indices": (0, 1), "merge_index": 0, "drop_path_rate": 0.0, "image_size": (64, 32)}
FORMULAS = {f"post_conv_{channels}_channels": 16 for channels in ("in", "mid", "out")} | {"decoder_hidden_size": 8}
VISION: dict[str, tuple[str, dict[str, Any]]] = {
    **dict.fromkeys(("sam", "sam_hq"), ("Model", ENDS)),
    "vitdet": ("Model", VITDET),
    "seggpt": ("Model", SEGGPT),
    **dict.fromkeys(("got_ocr2", "slanext"), ("Encoder", ENDS)),
    **dict.fromkeys(("deepseek_ocr2", "unlimited_ocr"), ("Encoder", DOWN)),
    "pp_formulanet": ("Model", {**ENDS, **FORMULAS}),
}
"""Vision encoders: the end of their classes' names, and settings beyond those of the family's layers."""


def vision_encoder(name: str, implementation: str = "eager", **changes: Any) -> Any:
    family, (end, sizes) = FAMILIES[name], VISION[name]
    return build(
        name, torch.float64, make=family.find(family.prefix + end), implementation=implementation, **{**sizes, **changes}
    )


def images(name: str, batch: int = 2, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Images, which are lower than the tables of some encoders."""
    torch.manual_seed(1)
    names = ["pixel_values", *(["prompt_pixel_values", "prompt_masks"] if name == "seggpt" else [])]
    height = 24 if name in ("vitdet", "deepseek_ocr2", "unlimited_ocr") else 32
    return {argument: torch.randn(batch, 3, height, 32, dtype=dtype) for argument in names}
