"""GPUs, and the combinations of calls that are compiled for them."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton

from bench.cases.features import TABLES

NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SWEEP = list(itertools.product((*NVIDIA, "gfx942"), DTYPES, (16, 40, 64, 128, 256), TABLES))[::11]
"""Targets, dtypes, widths and tables: every eleventh combination has nearly every pair of two of them."""

on_triton_3_7 = pytest.mark.skipif(
    not triton.__version__.startswith("3.7."), reason=f"the counts are Triton 3.7's, this is {triton.__version__}"
)
