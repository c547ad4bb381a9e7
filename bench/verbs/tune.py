"""Fastest tile sizes on this GPU for the calls of the benchmark: the package's tuner, case by case, into the user's profile.

``python -m triton_relattn tune`` does the same for one shape.
"""

from __future__ import annotations

import argparse

import torch

from triton_relattn.kernels import tuning

from ..cases import attention as cases
from ..report.text import progress
from .options import add_cases, interpreted, new_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cases(parser, ("long", "speech", "inkling"))
    parser.add_argument("--profile", type=new_file, help="the file to write (default: the user's, which the package reads)")


def run(options: argparse.Namespace) -> int:
    if interpreted():
        return 2
    if not torch.cuda.is_available():
        print("There is no GPU here: nothing to tune. python -m bench compile has what compiled kernels take.")
        return 2
    for case in progress(cases.choose(options.cases, options.lengths)):
        for computed in (case, case.without_table()):
            inputs = computed.inputs("cuda")
            arguments = computed.tables(inputs) | computed.options(inputs)
            print(f"{computed}")
            tuning.tune(*inputs[:3], **arguments, profile=options.profile, report=lambda found: print(f"  {found}", flush=True))
    print(f"kept in {options.profile or tuning.profile_of(torch.device('cuda'))}")
    return 0
