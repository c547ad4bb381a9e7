"""Benchmarks: ``python -m bench VERB``; ``python -m bench VERB --help`` says more.

list      cases, methods and configurations
speed     time of every method, checked first, runs interleaved
memory    peak memory against the sequence length
lengths   time and memory of lengths that are new to a process
models    models of transformers, stock and enabled: checked, time and peak memory
accuracy  errors against float64, beside those of plain torch
tune      fastest configurations for this GPU, as a profile that the package reads
compile   registers, spills and instructions of the compiled kernels, without a GPU
host      CPU overhead of a call, without a GPU
plot      figures and tables, from CSV files alone
readme    generated parts of the pages, from the committed rows
verify    correctness tests of what is measured
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from triton_relattn._core.sizes import Parser

VERBS = {
    "list": "verbs.listing",
    "speed": "verbs.speed",
    "memory": "verbs.memory",
    "lengths": "verbs.lengths",
    "models": "models",
    "accuracy": "verbs.accuracy",
    "tune": "tune",
    "compile": "compile",
    "host": "verbs.host",
    "plot": "verbs.plot",
    "readme": "verbs.readme",
    "verify": "verbs.verify",
}
"""Verb -> its module, which has add_arguments(parser) and run(options)."""
OF_SOME_VERBS = ("matplotlib", "transformers", "triton")
"""Packages that some verbs need; main says so where one is missing."""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("verb", choices=VERBS)
    verb = parser.parse_args(words[:1]).verb
    try:
        module = importlib.import_module(f"bench.{VERBS[verb]}")
        of_verb = Parser(prog=f"python -m bench {verb}", description=module.__doc__)
        module.add_arguments(of_verb)
        options = of_verb.parse_args(words[1:])
        try:
            status: int = module.run(options)
            return status
        except argparse.ArgumentError as error:  # of arguments that do not go together
            of_verb.error(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in OF_SOME_VERBS:
            raise
        print(f"this needs the package {package}: pip install {package}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
