"""The common tests for every family of models, with every model enabled before it is called first if ENABLED is set.

Collected by :mod:`tests.upstream` alone, which names the folder of transformers in UPSTREAM.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
import unittest
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tests.upstream.subjects import LAYERS, SUBJECTS, Subject
from triton_relattn.integrations.transformers import enable

FOLDER = Path(os.environ["UPSTREAM"])
BATCH, LENGTH = 3, 14


def common_tests() -> Any:
    """The module ``tests.test_modeling_common`` of transformers; mixins that a source distribution leaves out are empty."""
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
        return self.subject.get_config()

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        config = self.get_config()
        torch.manual_seed(0)
        return config, self.subject.make_inputs(config, BATCH, LENGTH)


def enable_when_called() -> None:
    """Let every model be enabled when it, or a model that contains it, is called first."""
    call, met = nn.Module.__call__, weakref.WeakSet[nn.Module]()

    def enabled_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, PreTrainedModel) and self not in met:
            met.update(each for each in self.modules() if isinstance(each, PreTrainedModel))
            try:
                enable(self)
            except ValueError as error:
                if "no relative attention" not in str(error):
                    raise
        return call(self, *args, **kwargs)

    nn.Module.__call__ = enabled_call  # type: ignore[method-assign]


def make(subject: Subject, common: Any) -> type:
    """A class of tests."""

    def setUp(self: Any) -> None:
        self.model_tester = Tester(subject)

    attributes = {
        "setUp": setUp,
        "all_model_classes": (subject.get_model_class(),),
        "is_encoder_decoder": subject.is_encoder_decoder,
        "test_resize_embeddings": "vocab_size" in subject.small,
    }
    return type(f"Test_{subject.name}", (common.ModelTesterMixin, unittest.TestCase), attributes)


if os.environ.get("ENABLED"):
    enable_when_called()
COMMON = common_tests()
for each in SUBJECTS:
    tests = make(each, COMMON)
    globals()[tests.__name__] = tests
