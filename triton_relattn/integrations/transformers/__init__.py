"""The attention of models of Hugging Face transformers on the operators. ``families.py`` lists models and classes; each of ours
is in the file of its family (``parakeet.py``, ...)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ..._core.removed import refuse
from ..enable import disable, enable
from .families import LIBRARY as LIBRARY
from .families import Family, supported_families

if not TYPE_CHECKING:
    __getattr__ = partial(refuse, __name__)

__all__ = ["Family", "disable", "enable", "supported_families"]
