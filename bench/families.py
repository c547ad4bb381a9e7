"""The small models of every family, which the package has for its proofs, and the sizes of real ones."""

from __future__ import annotations

from triton_relattn.integrations.transformers.small import EVERY, FAMILIES, Family, output

__all__ = ["EVERY", "FAMILIES", "Family", "output"]
