"""Packages that contain models of transformers; adapters, offloading and ONNX graphs of enabled models.

They run in a separate process, with the real transformers, which other tests of libraries replace.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bench import families
from bench.families import FAMILIES
from tests.enable.models import Sizes, assert_same, build, exactly, output, parts, results, varied
from tests.libraries.standins import absent, load, needs
from tests.tolerance import assert_near
from triton_relattn import disable, enable
from triton_relattn.integrations import packing

pytestmark = needs("sentence_transformers", "transformers")
OF_DEBERTA = {"DebertaV2Encoder", "DisentangledSelfAttention"}
WORDS = ["<pad>", "</s>", "<s>", "<unk>", "<mask>", *"abcdefghij"]
TEXTS = ["a b c d e f g h i j a b", "j i h"]
Made = tuple[Any, Callable[..., torch.Tensor], set[str]]
"""A model, what computes its output, and the classes that are replaced."""


def saved(folder: Path, name: str) -> str:
    """Save a model of a family with a tokenizer in a folder."""
    import tokenizers
    import transformers

    tokens = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokens.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    named = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>", "cls_token": "<s>", "sep_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, **named, model_max_length=32).save_pretrained(folder)
    build(name).save_pretrained(folder)
    return str(folder)


def padded(most: int = 49, length: int = 30, real: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of two sequences, and a mask of the real ones."""
    return torch.randint(1, most, (2, length)), (torch.arange(length) < torch.tensor([[length], [real]])).long()


def t5(kind: str) -> Any:
    return build("t5", make=FAMILIES["t5"].find(kind))


def sentence_transformers(folder: Path) -> Made:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    model = SentenceTransformer(modules=[Transformer(saved(folder, "mpnet")), Pooling(32)], device="cpu")

    def run(model: Any, _: Any = None) -> torch.Tensor:
        given = model.tokenize(TEXTS) if hasattr(model, "tokenize") else model.preprocess(TEXTS)
        return model(given)["sentence_embedding"]  # type: ignore[no-any-return]

    return model, run, {"MPNetModel", "MPNetEncoder", "MPNetSelfAttention"}


def gliner(folder: Path) -> Made:
    from gliner.modeling.encoder import Transformer

    settings: Any = SimpleNamespace(vocab_size=50, hidden_size=32, _attn_implementation="eager", fuse_layers=False)
    settings.encoder_config = build("deberta_v2").config
    tokens, mask = padded()
    return Transformer("none", settings), lambda model, *_: model(tokens, attention_mask=mask), OF_DEBERTA


def gliner2(folder: Path) -> Made:
    from gliner2 import Extractor, ExtractorConfig

    model = Extractor(ExtractorConfig(model_name=saved(folder, "deberta_v2")))
    tokens, mask = padded(15)
    return model, lambda model, *_: model.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state, OF_DEBERTA


def bert_score(folder: Path) -> Made:
    absent("pandas", "matplotlib", "mpl_toolkits")
    from bert_score import BERTScorer, utils

    model = BERTScorer(model_type=saved(folder, "deberta_v2"), num_layers=2, device="cpu", use_fast_tokenizer=True)
    tokens, _ = padded(14)
    return model, lambda model, *_: utils.bert_encode(model._model, tokens, torch.ones_like(tokens)), OF_DEBERTA


def chronos(folder: Path) -> Made:
    absent("pandas", "boto3")
    limits = {"low_limit": -15, "high_limit": 15}
    sizes = ("MeanScaleUniformBins", limits, 37, 4, 50, 2, 0, 1, True, "seq2seq", 3, 1.0, 50, 1.0)
    inner = t5("T5ForConditionalGeneration")
    whole = load("chronos.chronos.ChronosModel")(load("chronos.chronos.ChronosConfig")(*sizes), inner)
    tokens, mask = padded(49, 37, 22)
    model = load("chronos.chronos.ChronosPipeline")(tokenizer=None, model=whole)
    return model, lambda model, *_: model.model.encode(tokens, mask.bool()), {"T5Attention"}


def chronos_bolt(folder: Path) -> Made:
    absent("pandas", "boto3")
    bolt: dict[str, Any] = {"context_length": 128, "prediction_length": 8, "input_patch_size": 4, "input_patch_stride": 4}
    bolt |= {"quantiles": [0.1, 0.5, 0.9], "use_reg_token": True}
    make, series = load("chronos.chronos_bolt.ChronosBoltModelForForecasting"), torch.randn(2, 128)
    model = build("t5", make=make, chronos_config=bolt, reg_token_id=1)
    return model, lambda model, *_: model(context=series).quantile_preds, {"T5Attention"}


def diffusers(folder: Path) -> Made:
    from diffusers import DiffusionPipeline

    class Pipeline(DiffusionPipeline):  # type: ignore[misc]
        def __init__(self, text_encoder: Any) -> None:
            super().__init__()
            self.register_modules(text_encoder=text_encoder)

    tokens, _ = padded(length=37)
    return Pipeline(t5("T5EncoderModel")), lambda model, *_: model.text_encoder(tokens).last_hidden_state, {"T5Attention"}


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
    expected = results(model, run=run)
    report = enable(model)
    assert set(report.values()) == replaced and not report.left, str(report)
    with Sizes() as sizes:
        ours = results(model, run=run)
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
    with torch.no_grad(), exactly(model):
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

    model, (tokens, _) = t5("T5EncoderModel"), padded(length=37)
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

    model, (tokens, _) = t5("T5EncoderModel"), padded(length=37)
    expected = model(tokens).last_hidden_state
    enable(model)
    accelerate.cpu_offload(model, execution_device="cpu")
    assert_near("the enabled model", model(tokens).last_hidden_state, expected)
    hooked = t5("T5EncoderModel")
    accelerate.cpu_offload(hooked, execution_device="cpu")
    assert enable(hooked) and "forward" in vars(hooked.encoder.block[0].layer[0].SelfAttention.q)
    assert_near("the enabled model", hooked(tokens).last_hidden_state, expected)


class LastHiddenState(nn.Module):
    """A model of transformers that returns its last hidden states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return families.output(self.model(input_ids=ids, attention_mask=mask))


@needs("onnxscript")
@pytest.mark.parametrize("dynamo", [False, True], ids=["traced", "exported"])
@pytest.mark.parametrize("name", ["t5", "deberta_v2", "mpnet"])
def test_onnx_graphs_take_all_lengths(name: str, dynamo: bool, tmp_path: Path) -> None:
    """They have the stock forward."""
    import onnxruntime

    model = build(name)
    stock = LastHiddenState(model.get_encoder() if name == "t5" else model).eval()
    enabled, names = copy.deepcopy(stock), ("ids", "mask")
    assert enable(enabled)
    dynamic: dict[str, Any] = {"dynamic_shapes" if dynamo else "dynamic_axes": {key: {1: "length"} for key in names}}
    file = str(tmp_path / "model.onnx")
    torch.onnx.export(enabled, padded(length=24, real=19), file, dynamo=dynamo, input_names=list(names), **dynamic)
    session = onnxruntime.InferenceSession(file)
    for given in (padded(length=24, real=19), padded(length=40, real=35)):
        found = session.run(None, {key: tensor.numpy() for key, tensor in zip(names, given, strict=True)})[0]
        assert_near("output", torch.from_numpy(found), output(stock, given))
