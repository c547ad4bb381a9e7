"""How fast the kernels are on GPUs that are not there, by a model of cycles: tools/cycles/README.md.

For each kernel: cycles of a multiprocessor for 64 x 64 scores, what is busy, what limits it. For the forward and the backward of
each call: operations a second as FlashAttention counts them, and cycles relative to attention without a table. For the backward
with a full table: what other designs would take.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

from tools.cycles import calibrate
from tools.cycles.machine import MACHINES
from tools.cycles.predict import UNITS, Prediction, teraflops, why_serialised
from triton_relattn.kernels.introspect import selection

from ..cases import configurations
from ..cases.attention import DTYPES
from ..cases.features import FEATURES
from ..compile import KernelCase, counts, predicted, used_by
from ..compiled import compiled
from ..measure.processes import processes
from ..report.progress import progress
from ..report.rows import in_one_line
from ..report.text import table
from ..verbs.options import add_jobs, add_list, some_of
from . import sensitivity
from .calls import BACKWARD, FORWARD, PRODUCTS, Size, cycles_of, designs, of_call, workspace

HEADER = ("kernel", "tile", "registers", "spilled", "shared", "programs", "cycles", "far", *UNITS, "wgmma", "limit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_list(parser, "targets", tuple(MACHINES), ("sm_90",))
    add_list(parser, "dtypes", tuple(DTYPES), ("bf16",))
    add_list(parser, "features", FEATURES, ("none", "full", "clamp"))
    parser.add_argument(
        "--head-dims", type=some_of((16, 32, 64, 80, 96, 128, 256)), default=[64, 128], metavar="A,B", help="default: 64, 128"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--calibrate", action="store_true", help="instead: the model beside published speeds of attention")
    what.add_argument("--sensitivity", action="store_true", help="instead: how much depends on the figures that are assumed")
    add_jobs(parser)


def run(options: argparse.Namespace) -> int:
    """0 if all kernels compile and the model knows them, 1 if one does not, 2 if none can be compiled."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("kernels are interpreted in this process, not compiled: unset TRITON_INTERPRET")
        return 2
    plain = [KernelCase("", "", "", 0, name).plain.features for name in options.features] if options.sensitivity else []
    names = dict.fromkeys((*plain, *options.features))
    every = product(options.targets, options.dtypes, options.head_dims, names, selection.KERNELS)
    named = (KernelCase(kernel, target, dtype, head_dim, name) for target, dtype, head_dim, name, kernel in every)
    cases = [case for case in named if case.exists]
    with processes(options.jobs) as map_all:
        if options.calibrate:
            print(shown(calibrate.compare(map_all)))
            return 0
        if options.sensitivity:
            found = zip(progress(cases, str), map_all(sensitivity.predicted_variants, cases), strict=True)
            print(sensitivity.shown(dict(found)))
            return 0
        lines = list(zip(progress(cases, str), map_all(describe, cases), strict=True))
    known = {case: prediction for case, (prediction, _, _) in lines}
    notes = "\n".join(f"{case}: {note}" for case, (_, _, note) in lines if note)
    print(table(HEADER, [cells for _, (_, cells, _) in lines]))
    print("".join(f"\n{text}\n" for text in (notes, calls(known), backward_designs(known)) if text), end="")
    return int(None in known.values())


def describe(case: KernelCase) -> tuple[Prediction | None, tuple[str, ...], str]:
    """Return what the model says of a kernel, its cells below HEADER, and what there is to note."""
    try:
        config = case.config
        prediction, used = predicted(case, config), counts(used_by(case, config))
        if prediction is None:
            raise ValueError(f"there is no model of {case.target}")
        note = why_serialised(compiled(case.kernel, case.target, *case.call, config)) if prediction.is_serialised else ""
    except Exception as error:
        return None, (str(case), *[""] * (len(HEADER) - 1)), in_one_line(error)
    near = prediction.loops[0]
    cells = (
        *(str(case), configurations.shown(config)),
        *(str(used[name]) for name in ("registers", "spill_bytes", "shared_bytes")),
        *(str(prediction.programs), f"{near.cycles:.0f} +-{near.turn.spread:.0%}"),
        "" if prediction.far_cycles is None else f"{prediction.far_cycles:.0f}",
        *(f"{near.turn.busy[unit]:.0%}" for unit in UNITS),
        f"{prediction.wgmma_products}" + f" in {prediction.wgmma_groups} groups" * prediction.is_serialised,
        near.limit,
    )
    return prediction, cells, note


def calls(known: Mapping[KernelCase, Prediction | None]) -> str:
    """Return a table of the forward and the backward of each call; nothing if no direction has all its kernels."""
    body = []
    for kernels, far in product(PRODUCTS, (False, True)):
        for case in known:
            cycles = of_call(known, case, kernels, far) if case.kernel == kernels[0] else None
            if cycles is not None:
                plain = of_call(known, case.plain, kernels)
                where = f"{'forward' if kernels == FORWARD else 'backward'}{', far' * far}"
                speed = teraflops(cycles, MACHINES[case.target], case.head_dim, PRODUCTS[kernels])
                name = f"{where}, {case.target} {case.dtype} {case.head_dim} {case.features}"
                body.append((name, f"{cycles:.0f}", f"{speed:.0f}", "" if plain is None else f"{cycles / plain:.2f}"))
    return table(("call", "cycles", "TFLOP/s", "of plain"), body) if body else ""


def backward_designs(known: Mapping[KernelCase, Prediction | None]) -> str:
    """Return a table of designs of the backward with a full table; nothing if none has all its kernels."""
    body, default = [], Size()
    for case in known:
        if case.kernel != "dtable" or not case.features.startswith("full"):
            continue
        kernels = {
            name: (replace(case, kernel=name), known.get(replace(case, kernel=name))) for name in BACKWARD if name != "dp2c"
        }
        cycles = {name: cycles_of(name, found, 1.0) for name, (_, found) in kernels.items() if found is not None}
        columns_case, columns = kernels["dkv"]
        if len(cycles) < len(kernels) or columns is None:
            continue
        machine, size = MACHINES[case.target], replace(default, head_dim=case.head_dim)
        space = workspace(size, machine, columns.programs, columns_case.config.block_n)
        for name, value in designs(cycles, machine).items():
            speed = teraflops(value, machine, case.head_dim, PRODUCTS[BACKWARD])
            call = f"{name}, {case.target} {case.dtype} {case.head_dim} {case.features}"
            body.append((call, f"{value:.0f}", f"{speed:.0f}", f"{space / 2**20:.0f} MiB"))
    header = (f"backward of b{default.batch} h{default.heads} n{default.length}", "cycles", "TFLOP/s", "workspace")
    return table(header, body) if body else ""


def shown(comparisons: Sequence[calibrate.Comparison]) -> str:
    """Return a table of comparisons."""
    body = []
    for one in comparisons:
        published = one.published
        options = " + ".join(f"{m}x{n} w{warps} s{stages}" for m, n, warps, stages in one.options)
        body.append(
            (
                f"{published.what}, {published.head_dim}, {MACHINES[published.target].name}",
                f"{published.teraflops:.0f}",
                f"{one.model:.0f}",
                f"{one.model / published.teraflops - 1:+.0%}",
                f"{one.ratio:.2f}",
                options + " spills" * one.spills,
            )
        )
    header = ("TFLOP/s", "published", "model", "error", "efficiency", "configuration")
    return f"{table(header, body)}\n\nefficiency, mean of those that do not spill: {calibrate.fitted_efficiency(comparisons):.2f}"
