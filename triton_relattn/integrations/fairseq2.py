"""Removed in 0.3.0: an import says so."""

from .._core.removed import NAMES, removed

raise ImportError(removed(__name__, NAMES["triton_relattn.integrations"]["fairseq2"]), name=__name__)
