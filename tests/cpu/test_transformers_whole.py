"""Whole models of transformers whose encoder, or part of it, is enabled: found inside, and the same numbers come out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.tolerance import assert_near

pytest.importorskip("transformers")

import transformers

from bench.families import FAMILIES
from tests.cpu.models import varied
from triton_relattn.integrations.transformers import disable, enable, supported_families

SMALL = {name: {**family.small, **dict.fromkeys(family.layers, 2)} for name, family in FAMILIES.items()}
PARAKEET = {**SMALL["parakeet"], "model_type": "parakeet_encoder", "dropout": 0.0}
DECODER: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
TOKENS: dict[str, Any] = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
Run = Callable[[Any], Any]


def shown(length: int, other: int) -> torch.Tensor:
    """(2, length), 1 of what is no padding."""
    return (torch.arange(length) < torch.tensor([[length], [other]])).long()


def reading(features: torch.Tensor, mask: torch.Tensor, name: str = "attention_mask") -> Run:
    """Logits of tokens that a decoder writes after it has heard features."""
    tokens = torch.randint(1, 50, (2, 7))
    return lambda model: model(input_features=features, **{name: mask}, decoder_input_ids=tokens).logits


def wavlm() -> tuple[Any, Run]:
    convolutions = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    model = transformers.WavLMModel(transformers.WavLMConfig(**SMALL["wavlm"], **convolutions, feat_extract_norm="layer"))
    audio, mask = torch.randn(2, 400), shown(400, 300)
    return model, lambda model: model(audio, attention_mask=mask).last_hidden_state


def speecht5() -> tuple[Any, Run]:
    decoder = {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "vocab_size": 50, "num_mel_bins": 8}
    decoder |= {"speech_decoder_prenet_units": 16, "speaker_embedding_dim": 4, "speech_decoder_postnet_units": 16}
    config = transformers.SpeechT5Config(**SMALL["speecht5"], **decoder, speech_decoder_prenet_dropout=0.0)
    tokens, mask, speaker, frames = torch.randint(1, 50, (2, 21)), shown(21, 14), torch.randn(2, 4), torch.randn(2, 10, 8)

    def run(model: Any) -> torch.Tensor:
        made = model(tokens, attention_mask=mask, decoder_input_values=frames, speaker_embeddings=speaker)
        found: torch.Tensor = made.spectrogram
        return found

    return transformers.SpeechT5ForTextToSpeech(config), run


def fastspeech2_conformer() -> tuple[Any, Run]:
    small = {**SMALL["fastspeech2_conformer"], "decoder_layers": 1, "decoder_num_attention_heads": 4, "decoder_linear_units": 48}
    small |= {"vocab_size": 50, "num_mel_bins": 8, "speech_decoder_postnet_units": 16}
    model = transformers.FastSpeech2ConformerModel(transformers.FastSpeech2ConformerConfig(**small))
    tokens, mask = torch.randint(1, 50, (2, 21)), shown(21, 14)
    for module in model.modules():
        if hasattr(module, "pos_bias_u"):
            nn.init.normal_(module.pos_bias_u)
            nn.init.normal_(module.pos_bias_v)
    return model, lambda model: model(tokens, attention_mask=mask).spectrogram


def canary() -> tuple[Any, Run]:
    config = transformers.CanaryConfig(encoder_config=PARAKEET, decoder_config={**DECODER, **TOKENS}, **TOKENS)
    return transformers.CanaryForConditionalGeneration(config), reading(torch.randn(2, 170, 16), shown(170, 120))


def cohere_asr() -> tuple[Any, Run]:
    config = transformers.CohereAsrConfig(encoder_config=PARAKEET, **{**DECODER, **TOKENS})
    return transformers.CohereAsrForConditionalGeneration(config), reading(torch.randn(2, 170, 16), shown(170, 120))


def nemotron_h_omni() -> tuple[Any, Run]:
    """Build the audio half of the model. The language model would need many more sizes."""
    model = nn.Module()
    stock = transformers.models.nemotron_h_omni.modeling_nemotron_h_omni
    audio = transformers.ParakeetEncoderConfig(**{**SMALL["parakeet"], "dropout": 0.0})
    model.audio_tower = transformers.AutoModel.from_config(audio)
    model.embed_audio = stock.NemotronH_Omni_Reasoning_V3MultiModalProjector(32, 32, 32)
    features, mask = torch.randn(2, 170, 16), shown(170, 120)
    hear = stock.NemotronH_Omni_Reasoning_V3.get_audio_features
    return model, lambda model: hear(model, features, mask).pooler_output


def codec(name: str) -> tuple[Any, Run]:
    """Build a codec whose run returns the input of its quantiser: the semantic encoding, joined with that of the sound."""
    semantic = {**SMALL["wav2vec2_bert"], "model_type": "wav2vec2-bert"}
    sizes = {"encoder_hidden_size": 4, "downsampling_ratios": [2, 2], "quantization_dim": 64, "quantization_levels": [4, 4]}
    config = getattr(transformers, f"{name}Config")(semantic_model_config=semantic, **DECODER_OF_SOUND, **sizes)
    sound, features, mask = torch.randn(2, 1, 4 * 37), torch.randn(2, 37, 12), shown(37, 22)

    def run(model: Any) -> torch.Tensor:
        heard: list[torch.Tensor] = []
        hook = model.quantizer.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0]))
        model.encode(sound, features, input_features_mask=mask)
        hook.remove()
        return heard[0]

    return getattr(transformers, f"{name}Model")(config), run


def xcodec2() -> tuple[Any, Run]:
    return codec("Xcodec2")


def neucodec() -> tuple[Any, Run]:
    return codec("NeuCodec")


def embedding_gemma2() -> tuple[Any, Run]:
    audio = {**SMALL["gemma4"], "model_type": "gemma4_audio"}
    text = {**DECODER, **TOKENS, "num_key_value_heads": 2, "hidden_size_per_layer_input": 8, "embedding_dim": 16}
    config = transformers.EmbeddingGemma2Config(text_config=text, audio_config=audio, vision_config=None)
    features, mask = torch.randn(2, 148, 16), shown(148, 88).bool()
    real = shown(37, 22).bool()
    return transformers.EmbeddingGemma2Model(config), lambda model: model.get_audio_features(features, mask).last_hidden_state[
        real
    ]


def nemotron3_5_asr() -> tuple[Any, Run]:
    encoder = {**SMALL["nemotron_asr_streaming"], "model_type": "nemotron_asr_streaming_encoder"}
    sizes = {"vocab_size": 50, "blank_token_id": 49, "decoder_hidden_size": 16, "num_prompts": 4, "prompt_intermediate_size": 16}
    config = transformers.Nemotron3_5AsrConfig(encoder_config=encoder, **sizes, num_decoder_layers=1, default_prompt_id=1)
    model = transformers.Nemotron3_5AsrForRNNT._from_config(config, attn_implementation="sdpa")
    features, mask, tokens = torch.randn(2, 289, 16), shown(289, 200), torch.randint(1, 49, (2, 5))
    return model, lambda model: model(features, mask, decoder_input_ids=tokens, prompt_ids=torch.tensor([0, 2])).logits


def musicgen_of(name: str) -> tuple[Any, Run]:
    """Build a model of music whose text encoder is T5."""
    text = {"model_type": "t5", "num_layers": 1, "d_model": 16, "d_kv": 4, "num_heads": 4, "d_ff": 8, "vocab_size": 50}
    sound = {"model_type": "encodec", "num_filters": 4, "hidden_size": 8, "codebook_dim": 8, "codebook_size": 64}
    sizes = {"vocab_size": 64, "num_hidden_layers": 1, "ffn_dim": 8, "num_attention_heads": 2, "hidden_size": 16}
    decoder = {"model_type": f"{name}_decoder", "num_codebooks": 2, "pad_token_id": 63, **sizes}
    classes = {"musicgen": "Musicgen", "musicgen_melody": "MusicgenMelody"}[name]
    config = getattr(transformers, f"{classes}Config")(text_encoder=text, audio_encoder=sound, decoder=decoder)
    model = getattr(transformers, f"{classes}ForConditionalGeneration")(config)
    tokens, mask, codes = torch.randint(1, 49, (2, 37)), shown(37, 22), torch.randint(0, 63, (4, 5))
    return model, lambda model: model(input_ids=tokens, attention_mask=mask, decoder_input_ids=codes).logits


def musicgen() -> tuple[Any, Run]:
    return musicgen_of("musicgen")


def musicgen_melody() -> tuple[Any, Run]:
    return musicgen_of("musicgen_melody")


def deepseek_vl_hybrid() -> tuple[Any, Run]:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    vision = {"model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4, **sizes}
    fine = {"model_type": "sam_vision_model", "image_size": 24, "patch_size": 4, "output_channels": 8, "window_size": 2, **sizes}
    fine |= {"global_attn_indexes": [1], "mlp_dim": 16, "num_pos_feats": 4}
    text = {"model_type": "llama", "vocab_size": 50, "num_key_value_heads": 2, **sizes}
    config = transformers.DeepseekVLHybridConfig(text_config=text, vision_config=vision, high_res_vision_config=fine)
    images = torch.randn(2, 3, 24, 24)
    return transformers.DeepseekVLHybridModel(config), lambda model: model.high_res_vision_model(images).last_hidden_state


DECODER_OF_SOUND = {**{key: each for key, each in DECODER.items() if key != "vocab_size"}, "head_dim": 8}
WHOLE: dict[str, tuple[Callable[[], tuple[Any, Run]], set[str]]] = {
    "wavlm": (wavlm, {"WavLMEncoder", "WavLMAttention"}),
    "speecht5": (speecht5, {"SpeechT5Encoder", "SpeechT5Attention", "SpeechT5RelativePositionalEncoding"}),
    "fastspeech2_conformer": (fastspeech2_conformer, {"FastSpeech2ConformerAttention"}),
    "canary": (canary, {"ParakeetEncoder", "ParakeetEncoderAttention"}),
    "cohere_asr": (cohere_asr, {"ParakeetEncoder", "ParakeetEncoderAttention"}),
    "nemotron_h_omni": (nemotron_h_omni, {"ParakeetEncoder", "ParakeetEncoderAttention"}),
    "xcodec2": (xcodec2, {"Wav2Vec2BertEncoder", "Wav2Vec2BertSelfAttention"}),
    "neucodec": (neucodec, {"Wav2Vec2BertEncoder", "Wav2Vec2BertSelfAttention"}),
    "embedding_gemma2": (embedding_gemma2, {"Gemma4AudioModel", "Gemma4AudioAttention"}),
    "musicgen": (musicgen, {"T5Stack", "T5Attention"}),
    "musicgen_melody": (musicgen_melody, {"T5Stack", "T5Attention"}),
    "deepseek_vl_hybrid": (deepseek_vl_hybrid, {"SamVisionSdpaAttention"}),
    "nemotron3_5_asr": (
        nemotron3_5_asr,
        {"NemotronAsrStreamingEncoder", "NemotronAsrStreamingEncoderBlock", "NemotronAsrStreamingEncoderAttention"},
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_models(name: str) -> None:
    make, replaced = WHOLE[name]
    torch.manual_seed(0)
    model, run = make()
    varied(model).eval()
    with torch.no_grad():
        stock = run(model)
        enabled = enable(model)
        ours = run(model)
        assert set(enabled.values()) == replaced
        assert_near("ours", ours, stock)
        assert not torch.equal(ours, stock), "bit for bit what the stock path computes"
        assert disable(model) == enabled and torch.equal(run(model), stock)


def test_models_that_contain_an_encoder() -> None:
    """All that the list names are among those above."""
    inside = {each.folder: each.inside for each in supported_families() if each.inside}
    assert inside and inside.keys() <= WHOLE.keys()
    assert set(inside.values()) <= {each.folder for each in supported_families() if not each.inside}
