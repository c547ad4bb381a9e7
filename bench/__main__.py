"""Benchmarks: ``python -m bench VERB``; ``python -m bench VERB --help`` says more.

list      cases, methods and configurations
speed     time of every method, checked first, in turn
memory    peak memory against the sequence length
lengths   time and memory of lengths that a process has never met
models    models of transformers, stock and on the operator: checked, time and peak memory
accuracy  errors against float64, beside those of plain torch
tune      the best configurations for this GPU, as a profile that the package reads
compile   what the compiled kernels take, for GPUs that are not there
host      CPU time of a call, without a GPU
plot      figures, from CSV files alone
readme    README's figure, table and claims, from the committed rows
verify    run the correctness tests
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
