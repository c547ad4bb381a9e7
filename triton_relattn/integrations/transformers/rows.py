"""Families whose classes have no code of their own: the general class that takes the place of each stock class.

A class is made when it is first asked for, as an attribute of this module: ``rows.MT5Attention`` is BucketedAttention and mT5's
stock class. So pickle finds it.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

Row = dict[str, Any]
"""general: the class here, "module.Class"; and its attributes, those that are classes by their names."""


def _encoder(attention: str) -> Row:
    return {"general": "encoder.Encoder", "attention": attention}


SAM: Row = {"general": "grid_attention.SamAttention"}
SAM_SDPA: Row = SAM | {"drops": False}
BUCKETS: Row = {"general": "t5.BucketedAttention"}
CONFORMER: Row = {"general": "conformer.ConformerAttention"}

ROWS: dict[str, dict[str, Row]] = {
    "deepseek_ocr2": {"DeepseekOcr2SamVisionAttention": SAM, "DeepseekOcr2SamVisionSdpaAttention": SAM_SDPA},
    "got_ocr2": {"GotOcr2VisionAttention": SAM},
    "granite_speech_plus": {"GraniteSpeechPlusConformerAttention": {"general": "granite_speech.BlockAttention"}},
    "mt5": {"MT5Attention": BUCKETS, "MT5Stack": _encoder("MT5Attention")},
    "pix2struct": {
        "Pix2StructTextAttention": BUCKETS | {"projections": ("query", "key", "value", "output")},
        "Pix2StructTextModel": _encoder("Pix2StructTextAttention"),
    },
    "pop2piano": {"Pop2PianoAttention": BUCKETS, "Pop2PianoStack": _encoder("Pop2PianoAttention")},
    "pp_formulanet": {"PPFormulaNetVisionAttention": SAM},
    "sam": {"SamVisionAttention": SAM, "SamVisionSdpaAttention": SAM_SDPA},
    "sam_hq": {"SamHQVisionAttention": SAM, "SamHQVisionSdpaAttention": SAM_SDPA},
    "seamless_m4t": {
        "SeamlessM4TConformerSelfAttention": CONFORMER,
        "SeamlessM4TConformerEncoder": _encoder("SeamlessM4TConformerSelfAttention"),
        "SeamlessM4TConformerAdapterLayer": _encoder("SeamlessM4TConformerSelfAttention"),
    },
    "slanext": {"SLANeXtVisionAttention": SAM},
    "switch_transformers": {
        "SwitchTransformersAttention": BUCKETS,
        "SwitchTransformersStack": _encoder("SwitchTransformersAttention"),
    },
    "unlimited_ocr": {"UnlimitedOcrSamVisionAttention": SAM, "UnlimitedOcrSamVisionSdpaAttention": SAM_SDPA},
    "wav2vec2_bert": {
        "Wav2Vec2BertSelfAttention": CONFORMER,
        "Wav2Vec2BertEncoder": _encoder("Wav2Vec2BertSelfAttention"),
        "Wav2Vec2BertAdapterLayer": _encoder("Wav2Vec2BertSelfAttention"),
    },
    "wav2vec2_conformer": {
        "Wav2Vec2ConformerSelfAttention": CONFORMER,
        "Wav2Vec2ConformerEncoder": _encoder("Wav2Vec2ConformerSelfAttention"),
    },
}
"""By the family's folder and the name of the stock class."""
FOLDERS = {name: folder for folder, rows in ROWS.items() for name in rows}


def classes(stock: str) -> dict[type, type]:
    """Return the stock classes of a module of transformers, each with the one in its place."""
    module = importlib.import_module(stock)
    return {getattr(module, name): made(name) for name in ROWS[stock.rpartition(".modeling_")[2]]}


@functools.cache
def made(name: str) -> type:
    """Return the class in place of a stock class of this name."""
    folder = FOLDERS[name]
    row = dict(ROWS[folder][name])
    module, _, general = row.pop("general").rpartition(".")
    base = getattr(importlib.import_module(f".{module}", __package__), general)
    stock = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), name)
    attributes = {key: made(value) if value in FOLDERS else value for key, value in row.items()}
    return type(name, (base, stock), {"__module__": __name__, "__doc__": base.__doc__, **attributes})


def __getattr__(name: str) -> type:
    if name not in FOLDERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return made(name)
