"""Registration with torch: operators and their derivatives, FLOP formulas, sharding strategies."""

from typing import Any

import torch

NAMESPACE = __name__.partition(".")[0]
"""The operators' namespace in ``torch.ops``: triton_relattn, or the name by which a copy of the package was loaded beside it."""

OPERATORS: Any = getattr(torch.ops, NAMESPACE)
"""The operators, once their modules are imported."""
