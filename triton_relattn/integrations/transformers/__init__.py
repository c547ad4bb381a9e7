"""The attention of models of Hugging Face transformers on :func:`triton_relattn.fused_relative_attention`.

A family file (``wav2vec2_bert.py``, ``parakeet.py``, ...) has a subclass, of the same name, of each class of the model that has
to act differently; :func:`enable` gives a model's modules those classes, :func:`disable` gives them back their own. Nothing else
of a model changes, and no other model does: parameters, hooks, checkpoints and ``state_dict`` stay.
"""

from .families import Family, supported_families
from .replacement import disable, enable

__all__ = ["Family", "disable", "enable", "supported_families"]
