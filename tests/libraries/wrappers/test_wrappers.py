"""Packages that contain models of transformers, and adapters and offloading of enabled models.

They run in a separate process, with the real transformers, which other tests of libraries replace.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.enable.models import Sizes, assert_same, computed, parts, varied
from tests.libraries.standins import absent, load, needs
from tests.tolerance import assert_near
from triton_relattn import disable, enable
from triton_relattn.integrations import packing
from triton_relattn.integrations.isolation import Promoted

pytestmark = needs("sentence_transformers", "transformers")
T5: dict[str, Any] = {"num_layers": 2, "d_model": 16, "d_kv": 4, "num_heads": 4, "d_ff": 8, "vocab_size": 60}
MPNET: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 60}
MPNET |= {"hidden_size": 16, "intermediate_size": 16}
DEBERTA = MPNET | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_position_embeddings": 40}
DEBERTA |= {"position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True, "position_biased_input": False}
DEBERTA |= {"pad_token_id": 0}
OF_DEBERTA = {"DebertaV2Encoder", "DisentangledSelfAttention"}
WORDS = ["<pad>", "</s>", "<s>", "<unk>", "<mask>", *"abcdefghij"]
TEXTS = ["a b c d e f g h i j a b", "j i h"]
Made = tuple[Any, Callable[[Any], torch.Tensor], set[str]]
"""A model, what computes its output, and the classes that are replaced."""


def saved(folder: Path, kind: str, sizes: dict[str, Any]) -> str:
    """Save a model of transformers with a tokenizer in a folder."""
    import tokenizers
    import transformers

    tokens = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokens.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    named = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>", "cls_token": "<s>", "sep_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, **named, model_max_length=32).save_pretrained(folder)
    torch.manual_seed(0)
    getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**sizes)).save_pretrained(folder)
    return str(folder)


def padded(most: int = 59, length: int = 30, real: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of two sequences, and a mask of the real ones."""
    return torch.randint(1, most, (2, length)), (torch.arange(length) < torch.tensor([[length], [real]])).long()


def sentence_transformers(folder: Path) -> Made:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    model = SentenceTransformer(modules=[Transformer(saved(folder, "MPNet", MPNET)), Pooling(16)], device="cpu")

    def run(model: Any) -> torch.Tensor:
        given = model.tokenize(TEXTS) if hasattr(model, "tokenize") else model.preprocess(TEXTS)
        return model(given)["sentence_embedding"]  # type: ignore[no-any-return]

    return model, run, {"MPNetModel", "MPNetEncoder", "MPNetSelfAttention"}


def gliner(folder: Path) -> Made:
    import transformers
    from gliner.modeling.encoder import Transformer

    settings: Any = SimpleNamespace(vocab_size=60, hidden_size=16, _attn_implementation="eager", fuse_layers=False)
    settings.encoder_config = transformers.DebertaV2Config(**DEBERTA)
    tokens, mask = padded()
    return Transformer("none", settings), lambda model: model(tokens, attention_mask=mask), OF_DEBERTA


def gliner2(folder: Path) -> Made:
    from gliner2 import Extractor, ExtractorConfig

    model = Extractor(ExtractorConfig(model_name=saved(folder, "DebertaV2", DEBERTA)))
    tokens, mask = padded(15)
    return model, lambda model: model.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state, OF_DEBERTA


def bert_score(folder: Path) -> Made:
    absent("pandas", "matplotlib", "mpl_toolkits")
    from bert_score import BERTScorer, utils

    model = BERTScorer(model_type=saved(folder, "DebertaV2", DEBERTA), num_layers=2, device="cpu", use_fast_tokenizer=True)
    tokens, _ = padded(14)
    return model, lambda model: utils.bert_encode(model._model, tokens, torch.ones_like(tokens)), OF_DEBERTA


def chronos(folder: Path) -> Made:
    import transformers

    absent("pandas", "boto3")
    limits = {"low_limit": -15, "high_limit": 15}
    sizes = ("MeanScaleUniformBins", limits, 37, 4, 60, 2, 0, 1, True, "seq2seq", 3, 1.0, 50, 1.0)
    inner = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))
    whole = load("chronos.chronos.ChronosModel")(load("chronos.chronos.ChronosConfig")(*sizes), inner)
    tokens, mask = padded(59, 37, 22)
    model = load("chronos.chronos.ChronosPipeline")(tokenizer=None, model=whole)
    return model, lambda model: model.model.encode(tokens, mask.bool()), {"T5Attention"}


def chronos_bolt(folder: Path) -> Made:
    import transformers

    absent("pandas", "boto3")
    bolt: dict[str, Any] = {"context_length": 128, "prediction_length": 8, "input_patch_size": 4, "input_patch_stride": 4}
    bolt |= {"quantiles": [0.1, 0.5, 0.9], "use_reg_token": True}
    config = transformers.T5Config(**T5, chronos_config=bolt, decoder_start_token_id=0, reg_token_id=1)
    series = torch.randn(2, 128)
    model = load("chronos.chronos_bolt.ChronosBoltModelForForecasting")(config)
    return model, lambda model: model(context=series).quantile_preds, {"T5Attention"}


def diffusers(folder: Path) -> Made:
    from diffusers import DiffusionPipeline

    class Pipeline(DiffusionPipeline):  # type: ignore[misc]
        def __init__(self, text_encoder: Any) -> None:
            super().__init__()
            self.register_modules(text_encoder=text_encoder)

    encoder, tokens = t5()
    return Pipeline(encoder), lambda model: model.text_encoder(tokens).last_hidden_state, {"T5Attention"}


def t5() -> tuple[Any, torch.Tensor]:
    import transformers

    torch.manual_seed(0)
    return transformers.T5EncoderModel(transformers.T5Config(**T5)).eval(), torch.randint(1, 59, (2, 37))


def made(make: Callable[[Path], Made], folder: Path) -> Made:
    """The model in float64, without zero parameters."""
    model, run, replaced = make(folder)
    torch.manual_seed(0)
    for part in parts(model):
        varied(part).double().eval()
    return model, run, replaced


@pytest.mark.parametrize(
    "make",
    [sentence_transformers, gliner, gliner2, bert_score, chronos, chronos_bolt, diffusers],
    ids=lambda make: make.__name__,
)
def test_models_inside_of_packages(make: Any, tmp_path: Path) -> None:
    """Outputs and gradients are the stock model's."""
    model, run, replaced = made(make, tmp_path)
    expected = computed(model, run)
    report = enable(model)
    assert set(report.values()) == replaced and not report.left, str(report)
    with Sizes() as sizes:
        ours = computed(model, run)
    assert sizes.ours
    if len(expected) == 1:  # a scorer has no gradients
        assert_near("out", ours["out"], expected["out"])
    else:
        assert_same(ours, expected)
    assert disable(model) == dict(report)


@pytest.mark.parametrize("make", [sentence_transformers, gliner, gliner2], ids=lambda make: make.__name__)
def test_packed(make: Any, tmp_path: Path) -> None:
    """Their encoders leave padding out, where outputs are zero; embeddings of sentences are the same."""
    model, run, _ = made(make, tmp_path)
    with torch.no_grad(), Promoted():
        expected = run(model)
        report = enable(model, packed=True)
        (encoder,) = (part for part in model.modules() if isinstance(part, packing.Packs))
        out = run(model)
    assert dict(vars(encoder)[packing.PACKED]) == {"": 1} and "packs batches of padded sequences" in str(report)
    real = (out != 0).any(-1, keepdim=True)
    assert make in (gliner, gliner2) or real.all()
    assert_near("out", out, expected * real)


@pytest.mark.parametrize("before", [True, False])
def test_adapters_of_peft(before: bool) -> None:
    """Adapters added before or after enable() change the output, and get gradients."""
    import peft

    model, tokens = t5()
    if before:
        enable(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q", "v"], r=2, init_lora_weights=False)).eval()
    if not before:
        assert enable(adapted)
    out = adapted(tokens).last_hidden_state
    out.sum().backward()
    learned = [parameter.grad for name, parameter in adapted.named_parameters() if "lora_" in name]
    assert learned and all(gradient is not None and gradient.any() for gradient in learned)
    disable(adapted)
    assert_near("the enabled model", out, adapted(tokens).last_hidden_state)


def test_offloading_of_accelerate() -> None:
    """Offloading before or after enable(); its hooks replace forwards only of modules with weights, so not T5's attention."""
    import accelerate

    model, tokens = t5()
    expected = model(tokens).last_hidden_state
    enable(model)
    accelerate.cpu_offload(model, execution_device="cpu")
    assert_near("the enabled model", model(tokens).last_hidden_state, expected)
    hooked, _ = t5()
    accelerate.cpu_offload(hooked, execution_device="cpu")
    assert enable(hooked) and "forward" in vars(hooked.encoder.block[0].layer[0].SelfAttention.q)
    assert_near("the enabled model", hooked(tokens).last_hidden_state, expected)
