"""The common tests for all families of models; if ENABLED is set, models are enabled before their first call.

Only :mod:`tools.upstream` collects them, with the folder of transformers in UPSTREAM. The small models are those of
``bench.families``, or whole models if these are only an encoder, a layer or an attention.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import types
import unittest
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from bench.families import FAMILIES
from tests.enable.whole_models import VISION, images
from triton_relattn.integrations.transformers import enable

FOLDER = Path(os.environ["UPSTREAM"])
BATCH, LENGTH, LAYERS = 3, 14, 2
Inputs = Callable[[Any], dict[str, torch.Tensor]]
"""The inputs of a model by its config."""


class Subject(NamedTuple):
    """A model by the names of its class and its config, whose sizes are small."""

    name: str
    folder: str
    model: str
    config: str
    small: dict[str, Any]
    inputs: Inputs
    implementation: str = "eager"

    def find(self, kind: str, name: str) -> Any:
        """Return a class of the family's module of that kind, or None."""
        return getattr(importlib.import_module(f"transformers.models.{self.folder}.{kind}_{self.folder}"), name, None)

    def make_config(self) -> Any:
        config = self.find("configuration", self.config)(**self.small)
        config._attn_implementation = self.implementation
        return config


def audio(config: Any) -> dict[str, torch.Tensor]:
    """Return the samples that give LENGTH frames."""
    return {"input_values": torch.randn(BATCH, 10 * LENGTH + 15)}


def tokens(config: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(1, 50, (BATCH, LENGTH)), "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long)}


CONVOLUTIONS: dict[str, Any] = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
WHOLE: dict[str, tuple[str, Inputs, dict[str, Any]]] = {
    "wav2vec2_conformer": ("Wav2Vec2Conformer", audio, CONVOLUTIONS),
    "wavlm": ("WavLM", audio, CONVOLUTIONS),
    "wavlm_stable": ("WavLM", audio, {**CONVOLUTIONS, "do_stable_layer_norm": True, "feat_extract_norm": "layer"}),
    "sew_d": ("SEWD", audio, {**CONVOLUTIONS, "squeeze_factor": 1}),
    "fastspeech2_conformer": (
        "FastSpeech2Conformer",
        tokens,
        {"decoder_layers": 1, "decoder_num_attention_heads": 4, "decoder_linear_units": 48, "vocab_size": 50}
        | {"num_mel_bins": 8, "speech_decoder_postnet_units": 16},
    ),
    "vits": ("Vits", tokens, {"flow_size": 16, "spectrogram_bins": 9, "vocab_size": 50, "upsample_initial_channel": 16}),
}
"""Whole models: prefix of their classes' names, inputs, and settings beyond those of the family's small part."""


def subjects() -> Iterator[Subject]:
    """Yield a model of every family."""
    for name, (classes, inputs, others) in WHOLE.items():
        family = FAMILIES[name]
        small = {**family.small, **dict.fromkeys(family.layers, LAYERS), **others}
        yield Subject(name, family.folder, f"{classes}Model", f"{classes}Config", small, inputs)
    for name, (end, others) in VISION.items():
        family, pictures = FAMILIES[name], functools.partial(images, name, BATCH, torch.float32)
        small = {**family.small, **dict.fromkeys(family.layers, LAYERS), **others}
        yield Subject(name, name, family.prefix + end, family.config, small, lambda _, make=pictures: make())  # type: ignore[misc]
    for family in FAMILIES.values():
        if family.name in WHOLE or family.name in VISION:
            continue
        small = {**family.small, **dict.fromkeys(family.layers, LAYERS)}

        def inputs(config: Any, family: Any = family) -> Any:
            return family.inputs(config, LENGTH, torch.full((BATCH,), LENGTH))

        subject = Subject(family.name, family.folder, family.model, family.config, small, inputs, family.stock[0])
        model = subject.find("modeling", family.model)
        if model is not None and issubclass(model, PreTrainedModel):
            yield subject


def common_tests() -> Any:
    """The module ``tests.test_modeling_common`` of transformers; mixins missing in a source distribution are empty."""
    package = types.ModuleType("upstream_tests")
    package.__path__ = [str(FOLDER / "tests")]
    sys.modules["upstream_tests"] = package
    for name, mixin in (("exporters.test_export", "ExportTesterMixin"), ("generation.test_utils", "GenerationTesterMixin")):
        if not (FOLDER / "tests" / Path(*name.split(".")).with_suffix(".py")).exists():
            parent, _, _ = name.partition(".")
            sys.modules[f"upstream_tests.{parent}"] = types.ModuleType(f"upstream_tests.{parent}")
            stub = types.ModuleType(f"upstream_tests.{name}")
            setattr(stub, mixin, type(mixin, (), {}))
            sys.modules[f"upstream_tests.{name}"] = stub
    return importlib.import_module("upstream_tests.test_modeling_common")


class Tester:
    """Configs and inputs of a small model, as the common tests ask for them."""

    is_training = True
    batch_size, seq_length, num_hidden_layers = BATCH, LENGTH, LAYERS

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        config = self.get_config()
        names = ("speech_encoder_attention_heads", "conf_num_attention_heads", "num_attention_heads")
        self.num_attention_heads = next(getattr(config, name) for name in names if hasattr(config, name))
        self.hidden_size = config.hidden_size
        self.encoder_seq_length = self.key_length = LENGTH

    def get_config(self) -> Any:
        return self.subject.make_config()

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        config = self.get_config()
        torch.manual_seed(0)
        return config, self.subject.inputs(config)


if os.environ.get("ENABLED"):  # models are enabled when they, or models that contain them, are called first
    call, called = nn.Module.__call__, weakref.WeakSet[nn.Module]()

    def enabled_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, PreTrainedModel) and self not in called:
            called.update(module for module in self.modules() if isinstance(module, PreTrainedModel))
            try:
                enable(self)
            except ValueError as error:
                if "no relative attention" not in str(error):
                    raise
        return call(self, *args, **kwargs)

    nn.Module.__call__ = enabled_call  # type: ignore[method-assign]
COMMON = common_tests()
for subject in subjects():
    attributes = {
        "setUp": lambda self, subject=subject: setattr(self, "model_tester", Tester(subject)),
        "all_model_classes": (subject.find("modeling", subject.model),),
        "is_encoder_decoder": "num_decoder_layers" in subject.small,
        "test_resize_embeddings": "vocab_size" in subject.small,
    }
    tests = type(f"Test_{subject.name}", (COMMON.ModelTesterMixin, unittest.TestCase), attributes)
    globals()[tests.__name__] = tests
