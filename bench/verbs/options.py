"""Command-line options that verbs share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from triton_relattn._command_line import available_device, bounded, rows
from triton_relattn._command_line import sizes as shape
from triton_relattn._peaks import SHARE, available_bytes

from ..cases import attention as cases
from ..cases.methods import METHODS

Name = TypeVar("Name", str, int)
positive = bounded(int, 1)
seconds = bounded(float, 0)


def some_of(choices: Sequence[Name]) -> Callable[[str], list[Name]]:
    """A parser of a comma-separated list of choices."""

    def parse(text: str) -> list[Name]:
        names = {str(value): value for value in choices}
        values = [value.strip() for value in text.split(",")]
        if unknown := [value for value in values if value not in names]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(names)}")
        return [names[value] for value in values]

    return parse


def add_list(
    parser: argparse.ArgumentParser, name: str, choices: Sequence[Name], default: Sequence[Name] | None, what: str = ""
) -> None:
    """An option ``--name`` that takes a comma-separated list of choices."""
    usual = "all" if default and len(default) == len(choices) else ", ".join(map(str, default or ()))
    text = f"{what}, some of: " * bool(what) + ", ".join(map(str, choices)) + f" (default: {usual})" * bool(usual)
    chosen = None if default is None else list(default)
    parser.add_argument(f"--{name}", type=some_of(choices), default=chosen, metavar="A,B", help=text)


def existing_device(name: str) -> str:
    if name not in ("cuda", "cpu") or (name == "cuda" and not torch.cuda.is_available()):
        raise argparse.ArgumentTypeError(f'must be "cpu", or "cuda" where torch finds a GPU, got "{name}"')
    return name


def positive_numbers(text: str) -> list[int]:
    return [positive(word) for word in text.split(",")]


def gibibytes(text: str) -> int:
    return int(bounded(float, 0.001)(text) * 2**30)


def new_folder(text: str) -> Path:
    """A parser of a folder to write to, which need not be there yet."""
    path = Path(text)
    above = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} is no folder that can be written to: see {above}")
    return path


def new_file(text: str) -> Path:
    """A parser of a file to write; one that is there is replaced."""
    path = Path(text)
    new_folder(str(path.parent))
    if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
        raise argparse.ArgumentTypeError(f"{text} is no file that can be written")
    return path


def interpreted() -> bool:
    """Whether kernels are interpreted in this process and cannot be compiled; prints what to do."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("kernels are interpreted in this process, not compiled: unset TRITON_INTERPRET")
        return True
    return False


def add_csv(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--csv", type=new_file, metavar="PATH", help="file for the rows, written as they come")


def add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=positive, default=os.cpu_count() or 1, help="processes that compile (one per core)")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", type=existing_device, default=available_device(), help="device, cpu or cuda (%(default)s)")


def add_machine(parser: argparse.ArgumentParser) -> None:
    """``--device`` and ``--memory-limit``."""
    add_device(parser)
    usual, what = int(SHARE * available_bytes()), "most memory to use on a CPU (default: most of what is free)"
    parser.add_argument("--memory-limit", type=gibibytes, default=usual, metavar="GiB", help=what)


def add_cases(parser: argparse.ArgumentParser, default: Sequence[str] | None) -> None:
    """``--cases`` and ``--lengths``."""
    add_list(parser, "cases", tuple(cases.GROUPS), default, "groups of cases")
    lengths = sorted({case.length for group in cases.GROUPS.values() for case in group})
    parser.add_argument("--lengths", type=some_of(lengths), default=[], metavar="A,B", help="sequence lengths of the cases (all)")


def add_measured(parser: argparse.ArgumentParser) -> None:
    """The options that speed and memory have in common; chosen_cases reads those of the calls."""
    add_cases(parser, None)
    what = "sizes of a call of your own, in place of --cases; repeatable"
    parser.add_argument("--shape", type=shape, action="append", metavar="b4,h12,n1500,d80", help=what)
    parser.add_argument("--table", type=rows, metavar="ROWS", help='rows of its table, or "full": one per distance (full)')
    parser.add_argument("--dtype", choices=tuple(cases.DTYPES), help="dtype of the call (bf16 on a GPU, fp32 on a CPU)")
    parser.add_argument("--causal", action="store_true", help="causal mask in the call")
    add_list(parser, "methods", tuple(METHODS), tuple(METHODS))
    add_machine(parser)
    parser.add_argument("--no-verify", action="store_true", help="no tests before; the rows then say so")
    add_csv(parser)


def chosen_cases(options: argparse.Namespace, default: Sequence[str]) -> list[cases.Case]:
    """The cases of ``--shape``, or else of ``--cases`` and ``--lengths``."""
    if options.shape:
        dtype = options.dtype or ("bf16" if options.device == "cuda" else "fp32")
        common = {"rows": options.table, "dtype": dtype, "is_causal": options.causal, "group": "yours"}
        return [cases.Case(**sizes, **common) for sizes in options.shape]
    if not (chosen := cases.choose(options.cases or default, options.lengths)):
        raise argparse.ArgumentError(None, f"no case of {', '.join(options.cases or default)} has one of these lengths")
    return chosen
