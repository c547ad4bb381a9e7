"""Small models of Hugging Face transformers, randomly initialised, of every family; also of the width of a real one.

A family is an entry of the file of its group: its classes, its sizes, and a function of ``inputs.py`` that makes its arguments.
"""

from __future__ import annotations

from ...proof import main_output as output
from . import conformers, images, speech, t5, text
from .family import Family

__all__ = ["EVERY", "FAMILIES", "Family", "output"]

EVERY = (*conformers.EVERY, *speech.EVERY, *t5.EVERY, *text.EVERY, *images.EVERY)
FAMILIES = {family.name: family for family in EVERY}
