"""The attention of models of Hugging Face transformers on the operators. ``families.py`` lists models and classes; each of ours
is in the file of its family (``parakeet.py``, ...).

Importing this registers ``attn_implementation="triton_relattn"`` with transformers, for the families of ``t5.py`` and
``conformer.py`` (see ``door.py``).
"""

from __future__ import annotations

from contextlib import suppress

from ..enable import disable, enable
from .families import LIBRARY as LIBRARY
from .families import Family, supported_families

with suppress(ImportError):  # transformers is not installed, or too old, which enable says
    from . import conformer, t5  # noqa: F401

__all__ = ["Family", "disable", "enable", "supported_families"]
