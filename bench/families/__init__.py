"""Models of Hugging Face transformers of every family, randomly initialised: small ones for tests, and as wide as real ones.

A family is an entry of the file of its group: its classes, its sizes, and a function of ``inputs.py`` that makes its arguments.
"""

from __future__ import annotations

from typing import Any

import torch

from . import conformers, images, speech, t5, text
from .family import Family

__all__ = ["EVERY", "FAMILIES", "Family", "output"]

EVERY = (*conformers.EVERY, *speech.EVERY, *t5.EVERY, *text.EVERY, *images.EVERY)
FAMILIES = {family.name: family for family in EVERY}


def output(made: Any) -> torch.Tensor:
    """Return the main one of what a model returns: the last hidden states, or logits."""
    main: torch.Tensor = made if isinstance(made, torch.Tensor) else made[0]
    return main
