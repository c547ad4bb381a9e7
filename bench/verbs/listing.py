"""List what there is to measure: cases, methods, and configurations of the kernels. Needs no GPU."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

import torch

from ..cases import attention as cases
from ..cases.methods import METHODS
from ..report.text import table as text_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--configs", type=architecture, metavar="TARGET", help="all valid configurations for one, such as sm_90")


def architecture(name: str) -> str:
    """A parser of an architecture that there are configurations for."""
    from triton_relattn.kernels.introspect import ARCHITECTURES

    if name not in ARCHITECTURES:
        raise argparse.ArgumentTypeError(f"unknown: {name}; there are {', '.join(ARCHITECTURES)}")
    return name


def run(options: argparse.Namespace) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, group in cases.GROUPS.items():
        print(f"{name}{' (default here)' if name in cases.default_groups(device) else ''}")
        print("".join(f"  {case}\n" for case in group))
    probe = cases.GROUPS["cpu"][0]
    body = [(name, method.kind, method.what, method.why_not(probe, device) or "yes") for name, method in METHODS.items()]
    print(text_table(("method", "kind", "what", "runs here"), body))
    if find_spec("triton") is None:
        print("\nConfigurations of the kernels need the package triton: pip install triton")
        return 0
    from triton_relattn.kernels.introspect import selection

    from ..cases.configurations import shown

    target = options.configs or "sm_90"
    body = []
    for kernel in selection.KERNELS:
        for has_table in (False, True):
            if has_table or kernel in ("forward", "dq", "dkv"):
                valid = selection.candidates(kernel, target, has_table)
                default = selection.select(kernel, target, torch.bfloat16, 64, "full" if has_table else "no table")
                body.append((kernel, "full table" if has_table else "no table", str(len(valid)), shown(default)))
    print("\n" + text_table(("kernel", target, "valid configurations", "default, bf16, width 64"), body))
    if options.configs:
        for kernel in selection.KERNELS:
            print(f"\n{kernel}\n" + "\n".join(f"  {shown(config)}" for config in selection.candidates(kernel, target, True)))
    return 0
