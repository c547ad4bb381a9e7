"""Removed in 0.3.0: an import says so."""

from .._core.removed import refuse

refuse(__package__, "fairseq2")
