"""The attention of models of Hugging Face transformers on :func:`triton_relattn.fused_relative_attention`, or on
:func:`triton_relattn.decomposed_relative_attention`.

For each class of a model that has to act differently there is a subclass of the same name: in a file of the family
(``parakeet.py``, ...) or, if it has no code of its own, as a row of ``rows.py``. :func:`enable` changes the classes of a
model's modules to these, and :func:`disable` changes them back. Nothing else of the model changes: parameters, hooks,
checkpoints and ``state_dict`` stay. No other model changes.
"""

from .families import Family, supported_families
from .replacement import LIBRARY as LIBRARY
from .replacement import disable, enable

__all__ = ["Family", "disable", "enable", "supported_families"]
