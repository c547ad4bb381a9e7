"""Print what this machine runs: which implementation is chosen and why, device and versions.

"enable" shows what triton_relattn.enable does to a model, "measure" time, memory and output before and after it. "check" checks
the Triton kernels on this machine's GPU. "tune" finds their fastest configurations for a call.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from . import __version__, check
from ._blockwise.products import VARIABLE, chooses_onednn
from ._command_line import Parser, available_device, bounded, rows, sizes
from ._implementations import can_run_triton, choose_implementation
from .integrations.enable import enable
from .integrations.transformers import families
from .measure import Work, build, measure
from .positions import RelativePositions


def environment(device: str, width: int = 64) -> str:
    """Return versions, device and the implementation chosen on it ("cpu" or "cuda") for float32 heads of ``width``, as text."""
    probe = torch.empty(1, 1, 1, width, device=device)
    python = f"Python {platform.python_version()}"
    lines = (
        f"implementation: {choose_implementation(None, probe, probe).name}. {_reason(probe)}",
        f"device: {_device_name(device)}",
        f"triton_relattn {__version__}, torch {torch.__version__}, triton {_triton_version()}, {python}",
        f"float32 products: {'onednn' if chooses_onednn() else 'torch'}, on a CPU; {VARIABLE} chooses",
    )
    return "\n".join(textwrap.fill(line, 110, initial_indent="  ", subsequent_indent="    ") for line in lines)


def _reason(probe: torch.Tensor) -> str:
    try:
        can_run_triton(probe, probe, raise_error=True)
    except NotImplementedError as error:
        return str(error)
    if probe.device.type == "cuda":
        return "The Triton kernels can serve this device."
    return "Triton's interpreter is for tests only."


def _triton_version() -> str:
    """Return the version of what brings the folder triton/: the package triton, or another in its place (ROCm, XPU, Windows)."""
    names = importlib.metadata.packages_distributions().get("triton", [])
    versions = [f"{importlib.metadata.version(name)}{'' if name == 'triton' else f' ({name})'}" for name in sorted(set(names))]
    return " and ".join(versions) or "not installed"


def _device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    capability = torch.backends.cpu.get_cpu_capability()
    return f"CPU, {platform.machine()} ({capability}), {torch.get_num_threads()} threads"


NEXT = """check tests the Triton kernels on a GPU, enable --model shows what would be replaced in a model, measure its time and
memory, --families the models of transformers that can be enabled, --help the rest."""
TERMS = ("rel_key", "rel_bias", "none")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def tune(options: argparse.Namespace, device: str = "cuda") -> int:
    """Tune the kernels of a call for this GPU, and print a line per kernel. Return 0, or 2 without a GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        print("There is no GPU here: nothing to tune.")
        return 2
    from .kernels import tuning  # needs Triton

    shape, dtype = options.shape, DTYPES[options.dtype]
    heads, width, length = shape["heads"], shape["head_dim"], shape["length"]
    queries, key_heads = shape.get("num_queries", length), shape.get("key_heads", heads)
    query, key, value = (
        torch.randn(shape["batch"], *axes, width, dtype=dtype, device=device)
        for axes in ((heads, queries), (key_heads, length), (key_heads, length))
    )
    count = options.table or (length if options.causal else 2 * length - 1)
    is_past = options.causal and options.table is None
    positions = RelativePositions(1 - count, 0) if is_past else RelativePositions.centred(count)
    term: dict[str, Any] = {"positions": positions} if options.term != "none" else {}
    if options.term == "rel_key":
        term["rel_key"] = torch.randn(count, width, dtype=dtype, device=device)
    elif options.term == "rel_bias":
        term["rel_bias"] = torch.randn(heads, count, device=device)
    name = torch.cuda.get_device_name() if device == "cuda" else device
    print(f"Timing the kernels on {name}: a few minutes, mostly compiling.")
    tuning.tune(
        query,
        key,
        value,
        is_causal=options.causal,
        query_offset=length - queries,
        enable_gqa=key_heads != heads,
        report=lambda line: print(f"  {line}", flush=True),
        **term,
    )
    print(f"kept in {tuning.profile_of(query.device)}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    a_model: dict[str, Any] = {"metavar": "PACKAGE:FACTORY", "help": "function without arguments that returns a model"}
    parser = Parser(prog="python -m triton_relattn", description=__doc__)
    parser.add_argument("--families", action="store_true", help="print the models of transformers that can be enabled")
    verbs = parser.add_subparsers(dest="verb", metavar="enable, measure, check, tune")
    verb = verbs.add_parser("enable", help="enable a model, and print what is replaced, compared and saved")
    verb.add_argument("--model", required=True, **a_model)
    verb.add_argument(
        "--lengths", type=bounded(int, 1), nargs="+", default=[4096], help="positions to count memory for (%(default)s)"
    )
    verb.add_argument("--by-structure", action="store_true", help="also what is known by its structure alone")
    verb = verbs.add_parser("measure", help="measure time, memory and output of a model before and after enable")
    verb.add_argument("--model", required=True, **a_model)
    unit = "tokens, feature frames or samples"
    verb.add_argument("--length", type=bounded(int, 1), default=4096, help=f"length of the input: {unit} (%(default)s)")
    verb.add_argument("--batch", type=bounded(int, 1), default=1, help="sequences of the input (%(default)s)")
    verb.add_argument("--seconds", type=bounded(float, 0), default=3.0, help="time of all steps of a model (%(default)s)")
    verb.add_argument("--backward", action="store_true", help="forward and backward, in place of the forward alone")
    verb.add_argument("--dtype", choices=DTYPES, default="fp32", help="dtype of weights and inputs (%(default)s)")
    verb.add_argument(
        "--inputs", metavar="PACKAGE:FUNCTION", help="function of a length that returns the inputs (known for transformers)"
    )
    verbs.add_parser("check", help="check the Triton kernels on this machine's GPU, a few minutes")
    verb = verbs.add_parser("tune", help="time configurations of the kernels on this machine's GPU, and keep the fastest ones")
    shape_help = "batch, heads, length, width; kv: heads of key and value"
    verb.add_argument("--shape", type=sizes, required=True, metavar="b4,h12,n1500,d80", help=shape_help)
    verb.add_argument("--table", type=rows, metavar="ROWS", help='rows of the table, or "full": one per distance (full)')
    verb.add_argument("--term", choices=TERMS, default=TERMS[0], help="what the table is (%(default)s)")
    verb.add_argument("--dtype", choices=DTYPES, default="bf16", help="of query, key and value (%(default)s)")
    verb.add_argument("--causal", action="store_true", help="hide the future")
    options = parser.parse_args(argv)
    if options.verb == "check":
        return check.main()
    if options.verb == "tune":
        return tune(options)
    if options.verb == "measure":
        call = options.model, options.inputs, options.length, options.batch, DTYPES[options.dtype]
        try:
            return measure(Work(*call, available_device(), options.backward, options.seconds))
        except ValueError as error:
            raise SystemExit(str(error)) from error
    if options.verb == "enable":
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # the report says what was left, and why
                print(enable(build(options.model), by_structure=options.by_structure, lengths=options.lengths))
        except (TypeError, ValueError, RuntimeError) as error:
            raise SystemExit(str(error)) from error
        return 0
    print(families.table() if options.families else f"{environment(available_device())}\n\n{NEXT}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
