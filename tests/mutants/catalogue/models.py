"""Faults in the models of transformers that are enabled."""

from __future__ import annotations

from ..fault import Change, Fault

OF_FAMILIES = "triton_relattn/integrations/transformers"
ON_NUMBERS, ON_USE = "tests/cpu/test_transformers.py", "tests/cpu/test_transformers_use.py"

OF_MODELS = (
    Fault(
        "enabled-models-are-custom-code",
        "transformers saves an enabled model's weights under internal names",
        (f"{ON_NUMBERS}::test_what_the_whole_model_saves",),
        (
            Change(
                f"{OF_FAMILIES}/encoder.py",
                """checkpoints.\"\"\"
        return False""",
                """checkpoints.\"\"\"
        return True""",
            ),
        ),
    ),
    Fault(
        "half-enabled-models",
        "a model that is made of an enabled one's class has stock attention",
        (f"{ON_USE}::test_a_model_of_an_enabled_ones_class",),
        (Change(f"{OF_FAMILIES}/encoder.py", "        self.__class__ = type(self).__bases__[-1]\n        enable(self)\n", ""),),
    ),
    Fault(
        "offset-is-the-caches-counter",
        "with a static cache, queries stand where the next ones will",
        (f"{ON_NUMBERS}::test_parts_of_a_sequence_with_a_static_cache",),
        (Change(f"{OF_FAMILIES}/heads.py", "return seen.clone() if isinstance(seen, torch.Tensor) else seen", "return seen"),),
    ),
)
