"""``python -m tools.upstream FOLDER``: which of transformers' common tests pass with stock models, and with enabled ones."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WEIGHTS = re.compile(r"output_attentions|test_retain_grad_hidden_states_attentions|test_attention_outputs")
"""Names and messages of tests that need attention weights, which enabled models do not have."""
PYTEST = "-m pytest -q -rA --tb=no -p no:cacheprovider -o python_files=cases.py -o addopts= tools/upstream/cases.py"


def outcomes(folder: Path, enabled: bool, arguments: list[str]) -> dict[str, tuple[str, str]]:
    """Run the tests; return each one's outcome and message."""
    environment = {"UPSTREAM": str(folder.resolve()), "ENABLED": "1" if enabled else "", "COLUMNS": "300"}
    command = [sys.executable, *PYTEST.split(), *arguments]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    found = re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) \S*cases\.py::(\S+)(?: - (.*))?$", run.stdout, re.MULTILINE)
    if not found:
        raise SystemExit(run.stdout[-3000:] + run.stderr[-3000:])
    return {name: (status, message) for status, name, message in found}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.upstream", description=__doc__)
    parser.add_argument("folder", type=Path, help="an unpacked source distribution or a checkout of transformers")
    parser.add_argument("-k", metavar="WORDS", default="", help="only tests that match, as pytest reads it")
    parser.add_argument("-n", metavar="N", type=int, default=0, help="processes, with pytest-xdist")
    options = parser.parse_args()
    arguments = [*(["-k", options.k] if options.k else []), *(["-n", str(options.n)] if options.n else [])]
    stock, ours = (outcomes(options.folder, enabled, arguments) for enabled in (False, True))
    print(f"{'family':<24} {'pass stock':>10} {'pass enabled':>12} {'fail stock':>10}   of those that pass stock, enabled fail")
    wrong = 0
    for family in sorted({name.split("::")[0] for name in stock}):
        statuses = {name: status for name, (status, _) in stock.items() if name.startswith(f"{family}::")}
        passed = [name for name, status in statuses.items() if status == "PASSED"]
        failed = [name.split("::")[1] for name, status in statuses.items() if status in ("FAILED", "ERROR")]
        differ = {name: ours.get(name, ("missing", ""))[1] for name in passed if ours.get(name, ("", ""))[0] != "PASSED"}
        others = {name.split("::")[1]: why for name, why in differ.items() if not WEIGHTS.search(name + why)}
        wrong += len(others)
        print(
            f"{family.removeprefix('Test_'):<24} {len(passed):>10} {len(passed) - len(differ):>12} {len(failed):>10}   "
            f"{len(differ) - len(others)} ask for weights" + "".join(f"\n    {name}: {why}" for name, why in others.items())
        )
        if failed:
            print(f"    also fail with the stock model: {', '.join(failed)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
