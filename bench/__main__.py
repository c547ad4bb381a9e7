"""Benchmarks: ``python -m bench VERB``; ``python -m bench VERB --help`` says more.

speed     time of every method, checked first, runs interleaved
memory    peak memory against the sequence length
models    models of transformers, stock and enabled: checked, time and peak memory
accuracy  errors against float64, beside those of plain torch
compare   speed, host or models here and at another commit, side by side
host      CPU overhead of a call, without a GPU
compile   registers, spills and instructions of the compiled kernels, without a GPU
tune      fastest tile sizes for this GPU, as a profile that the package reads
plot      figures and tables, from CSV files alone
readme    generated parts of the pages, from the committed rows
gpu       checks and measurements on a GPU, within minutes
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from triton_relattn._command_line import Parser

VERBS = {
    "speed": "verbs.speed",
    "memory": "verbs.memory",
    "models": "models",
    "accuracy": "verbs.accuracy",
    "compare": "verbs.compare",
    "host": "verbs.host",
    "compile": "compile",
    "tune": "verbs.tune",
    "plot": "verbs.plot",
    "readme": "verbs.readme",
    "gpu": "gpu.__main__",
}
"""Verb -> its module, which has add_arguments(parser) and run(options)."""
OPTIONAL = ("matplotlib", "transformers", "triton")
"""Packages that some verbs need; main says so where one is missing."""


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("verb", choices=VERBS)
    verb = parser.parse_args(arguments[:1]).verb
    try:
        module = importlib.import_module(f"bench.{VERBS[verb]}")
        raw = argparse.RawDescriptionHelpFormatter
        verb_parser = Parser(prog=f"python -m bench {verb}", description=module.__doc__, formatter_class=raw)
        module.add_arguments(verb_parser)
        options = verb_parser.parse_args(arguments[1:])
        try:
            status: int = module.run(options)
            return status
        except argparse.ArgumentError as error:  # of arguments that do not go together
            verb_parser.error(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in OPTIONAL:
            raise
        print(f"this needs the package {package}: pip install {package}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
