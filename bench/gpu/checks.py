"""Correctness by the error rule of the tests: calls that run the very kernels that are timed, and others; repeated runs."""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from bench.cases.attention import DTYPES, Case
from bench.cases.configurations import shown
from bench.report.rows import in_one_line
from triton_relattn import RelativePositions, fused_relative_attention, testing
from triton_relattn._core import residual, validation
from triton_relattn._core.arguments import Arguments
from triton_relattn._core.spec import DIFFERENTIABLE
from triton_relattn.check import judge
from triton_relattn.kernels.introspect import Call, backward, fixed, forward, launching, planning, tuning
from triton_relattn.testing import Inputs

from .report import Report, kind_of, synchronize
from .workers import Lost, spread

TABLES = ("full", "clamped", "zero", "none")
OURS: Any = partial(fused_relative_attention, return_lse=True, implementation="triton")
SHORT_CHECKED, LONGEST_CHECKED = 512, 1040
"""Queries of calls that stand for longer ones: divisible by 16, as Triton likes it."""


@contextmanager
def launched() -> Iterator[set[str]]:
    """Collect the kernels that run within, by name and by all that they are compiled for."""
    found, run = set[str](), JITFunction.run

    def run_and_note(kernel: JITFunction, *arguments: Any, **options: Any) -> Any:
        compiled = run(kernel, *arguments, **options)
        if compiled is not None and kernel.fn.__module__.startswith("triton_relattn."):
            found.add(identity(compiled))
        return compiled

    fixed.cache_clear()  # so that each kernel is searched for once, and noted; later launches are as quick as usual
    with ExitStack() as patches:
        if launching._run is run:
            patches.enter_context(mock.patch.object(launching, "_run", run_and_note))
        patches.enter_context(mock.patch.object(JITFunction, "run", run_and_note))
        yield found


def identity(kernel: Any) -> str:
    """Return a text for what a kernel was compiled for. (Triton's own key of it can be another one in another process.)"""
    source, metadata = kernel.src, kernel.metadata
    parts = [source.signature, *(sorted(map(str, each.items())) for each in (source.attrs, source.constants))]
    parts += [metadata.num_warps, metadata.num_stages, metadata.maxnreg]
    return f"{kernel.name} {hashlib.sha256(str(parts).encode()).hexdigest()[:32]}"


@dataclass(frozen=True)
class Checked:
    """One call.

    sizes, arguments: of testing.make_inputs, and of the operator; ``shares`` are lengths of keys, as shares of all.
    workspace: the limit of the backward's workspace in bytes, if it is not the usual one.
    has_lse: whether the log-sum-exp is returned, and has a gradient; it has none in calls that are timed.
    kernel: the one that is checked alone, if not the whole call.
    kind: of the timed calls that this one stands for.
    """

    name: str
    sizes: dict[str, Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    workspace: str = ""
    has_lse: bool = True
    kernel: str = ""
    kind: str = ""

    def inputs(self, device: str, sharp: bool) -> tuple[Inputs, dict[str, Any]]:
        """Inputs and arguments of the call."""
        inputs = testing.make_inputs(**self.sizes, device=device, seed=1, sharp=sharp)
        arguments = dict(self.arguments)
        if shares := arguments.pop("shares", None):
            lengths = [int(share * inputs.key.shape[2]) for share in shares]
            arguments["key_lengths"] = torch.tensor(lengths, dtype=torch.int32, device=device)
        return inputs if self.has_lse else inputs._replace(d_lse=torch.zeros_like(inputs.d_lse)), arguments


def checked(table: str, is_causal: bool = False, dtype: str = "bfloat16", width: int = 64, **others: Any) -> Checked:
    """A call with a table of a kind; others: sizes, arguments, and fields of Checked."""
    fields: dict[str, Any] = {name: others.pop(name) for name in ("workspace", "has_lse", "kernel", "kind") if name in others}
    options: dict[str, Any] = {name: others.pop(name) for name in ("query_offset", "shares") if name in others}
    sizes = {"batch": 2, "heads": 2, "num_queries": 301, "num_keys": 301, "width": width, **others}
    offset, span = options.get("query_offset", 0), sizes["num_keys"] // 5
    farthest = sizes["num_keys"] - 1 - offset
    positions = {
        "full": RelativePositions(1 - sizes["num_queries"] - offset, min(farthest, 0) if is_causal else farthest),
        "clamped": RelativePositions(-span, span),
        "zero": RelativePositions(-2 * span, span // 2, "zero"),
        "none": None,
    }[table]
    sizes |= {"dtype": getattr(torch, dtype), "num_rows": None if positions is None else positions.num_rows}
    options |= {"positions": positions, "is_causal": is_causal}
    words = [f"{name} {value}" for name, value in (others | options).items() if name not in ("positions", "is_causal") and value]
    name = ", ".join([f"{table}{' causal' * is_causal} {dtype} d{width}", *words])
    return Checked(name, sizes, options, **fields)


def standing_for(case: Case, has_table: bool = True) -> Iterator[Checked]:
    """Calls that launch every kernel that a case of bench may launch at any length, in as few numbers as that takes: with a
    workspace of all pairs, in parts of whole heads, whose sums are added up, and in parts of a head; with several programs that
    share sums of a table, and with one; and the forward alone, which keeps no residual."""
    case = case if has_table else case.without_table()
    group, dtype = case.heads // (case.key_heads or case.heads), DTYPES[case.dtype]
    heads = group * math.gcd(case.heads // group, 16)  # whose strides are multiples of 16 where those of all heads are
    has_bias = has_table and case.bias
    # A table that is shorter than the call by far has a workspace of its own shape.
    longest = LONGEST_CHECKED if case.rows is None else max(LONGEST_CHECKED, (case.rows + 700) // 16 * 16)
    for length in dict.fromkeys(min(case.length, each) for each in (SHORT_CHECKED, longest)):
        small = case.resized(length, num_queries=None)
        rows = small.num_rows if has_table else None
        arguments = {"is_causal": case.is_causal, "enable_gqa": group > 1} | ({"positions": small.positions} if has_table else {})
        half = str(heads * dtype.itemsize * length * length)  # of the stored pairs
        variants = [(2, heads, ""), (2, heads, half), (2, heads, "0"), (1, group, ""), (1, group, "0")]
        every = []
        for batch, num_heads, workspace in variants if has_table else variants[:1]:
            key_heads = num_heads // group
            sizes: dict[str, Any] = {"batch": batch, "heads": num_heads, "key_heads": key_heads, "num_rows": rows}
            sizes |= {"num_queries": length, "num_keys": length, "width": case.head_dim, "dtype": dtype, "per_head": has_bias}
            sizes |= {"rel_key": not case.bias, "rel_bias": has_bias, "rel_p2c": case.p2c and has_table}
            sizes["rel_width"] = case.rel_dim if has_table else None
            few = small.resized(length, batch=batch, heads=num_heads, key_heads=key_heads if case.key_heads else None)
            name = f"{few}{'' if has_table else ' plain'}" + f", workspace {workspace}" * bool(workspace)
            every.append(Checked(name, sizes, arguments, workspace, has_lse=False, kind=kind_of(case, has_table)))
        yield from every
        if has_table:
            yield replace(every[0], name=f"{every[0].name}, forward alone", kernel="forward")


def standing_for_all(cases: Iterable[Case]) -> list[Checked]:
    """Calls that stand for all cases, with their tables and without, none of them twice."""
    every = [each for case in cases for has_table in (True, False) for each in standing_for(case, has_table)]
    return list({each.name: each for each in every}.values())


def run_kernel(case: Checked, inputs: Inputs, arguments: dict[str, Any]) -> tuple[str, dict[str, torch.Tensor]]:
    """Return what one kernel computes in the selected configuration; those of the backward go on from the forward's results."""
    query, key, value, rel_key = inputs[:4]
    tensors, spec = validation.resolve(Arguments(query, key, value, rel_key, **inputs.terms(), **arguments))
    config = Call(tensors, spec).tile(case.kernel)
    is_forward_alone = case.kernel == "forward" and not case.has_lse
    keeps = residual.keeps_residual(tensors) and not is_forward_alone
    out, lse, softmax_stats, kept = forward(tensors, spec, keeps_residual=keeps)
    if case.kernel == "forward":
        return shown(config), {"out": out, "lse": lse}
    wanted, tiles = [name in tuning.GRADIENTS[case.kernel] for name in DIFFERENTIABLE], {case.kernel: config}
    gradients = backward(inputs.d_out, inputs.d_lse, out, softmax_stats, tensors, spec, wanted, tiles, residual=kept)
    named = zip(DIFFERENTIABLE, gradients, strict=True)
    return shown(config), {f"d_{name}": gradient for name, gradient in named if gradient is not None}


def results_of(case: Checked, inputs: Inputs, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return out and gradients of a call, and lse if it has one."""
    if case.has_lse:
        return testing.forward_backward(OURS, inputs, **arguments)
    given = {name: getattr(inputs, name) for name in DIFFERENTIABLE}
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in given.items() if tensor is not None}
    out = fused_relative_attention(**leaves, **arguments, implementation="triton")
    gradients = torch.autograd.grad(out, list(leaves.values()), inputs.d_out)
    return {"out": out.detach(), **{f"d_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}}


def run_case(case: Checked, device: str = "cuda") -> tuple[list[dict[str, Any]], set[str]]:
    """One row for normal and one for sharp inputs, whatever goes wrong among them, and the kernels that ran. "wrong" of a row are
    the names of wrong results."""
    rows = []
    with launched() as kernels:
        for sharp in (False, True):
            row: dict[str, Any] = {"case": case.name, "variant": "sharp" * sharp, "direction": case.kernel or "forward+backward"}
            failure, started, wrong = "failed: an earlier case left the GPU in an error", time.monotonic(), ["all"]
            try:
                synchronize(device)
                failure = "failed"
                inputs, arguments = case.inputs(device, sharp)
                with mock.patch.dict(os.environ, {planning.VARIABLE: case.workspace} if case.workspace else {}):
                    if case.kernel:
                        row["variant"], results = run_kernel(case, inputs, arguments)
                    else:
                        results = results_of(case, inputs, arguments)
                synchronize(device)
                found = judge(results, inputs, arguments)
                wrong = [name for name in results if re.search(rf"(^|\| ){name}\b", found["message"])]
                wrong = [] if found["status"] == "ok" else wrong or ["all"]
                row["value"] = ", ".join(f"{name} {found[name]}" for name in results if name in found)
                row |= {"unit": "errors by plain torch's", "status": found["status"], "message": found["message"]}
            except Exception as error:
                row |= {"status": failure, "message": in_one_line(error)}
            rows.append({**row, "seconds": time.monotonic() - started, "wrong": wrong if row["status"] != "ok" else []})
    return rows, kernels


def report_case(case: Checked, found: tuple[list[dict[str, Any]], set[str]] | Lost, report: Report, show: bool = False) -> None:
    """Keep what was found of a call: rows, the kernels that are checked now, and which results are wrong."""
    if isinstance(found, Lost):
        found = [{"case": case.name, "status": "failed", "message": found.reason, "wrong": ["all"]}], set()
    rows, kernels = found
    report.state.note_kernels("checked", kernels)
    for row in rows:
        wrong, seconds = row.pop("wrong"), row.pop("seconds", 0.0)
        if wrong and case.kind:
            report.state.note_wrong(case.kind, wrong)
        report.add(**row)
        if show:
            report.say(f"  {case.name} {row['variant']}: {row['status']}, {seconds:.1f} s")


def check_all(cases: Sequence[Checked], options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Check calls, many at once; those for which memory was lacking beside others again, alone."""
    done, alone = 0, list[Checked]()
    for case, found in spread(run_case, cases, options.jobs, deadline):
        done += 1
        if (
            options.jobs > 1
            and not isinstance(found, Lost)
            and any("out of memory" in row.get("message", "") for row in found[0])
        ):
            alone.append(case)
        else:
            report_case(case, found, report)
    for case, found in spread(run_case, alone, min(1, options.jobs), deadline):
        report_case(case, found, report)
    report.left(len(cases) - done)
    report.done(f"{done} of {len(cases)} calls" + f"; {len(alone)} of them alone" * bool(alone))


def further_cases() -> list[Checked]:
    """Calls of every kind: tables, masks, widths, lengths, dtypes."""
    in_turn = list(zip(TABLES, (True, False, True, False), strict=True))
    shapes: list[dict[str, Any]] = [
        {"batch": 3, "shares": (1, 0, 1 / 3)},
        {"num_queries": 129, "num_keys": 523, "query_offset": 394},
        {"num_queries": 523, "num_keys": 129, "query_offset": -60, "width": 128},
        {"per_head": True, "num_queries": 512, "num_keys": 512},
        *({"width": width} for width in (16, 40, 80, 256)),
        {"value_width": 96, "per_head": True},
        {"batch": 1, "heads": 1, "num_queries": 2048, "num_keys": 2048},
        {"batch": 3, "num_queries": 1100, "num_keys": 1100, "shares": (1, 0, 1 / 3)},
        {"num_queries": 1030, "num_keys": 1300, "query_offset": 270, "width": 128, "per_head": True},
        {"batch": 60, "heads": 1, "num_queries": 200, "num_keys": 200, "workspace": str(4 << 20)},
        {"num_queries": 1, "num_keys": 300, "query_offset": 299},
        {"num_queries": 1, "num_keys": 4100, "query_offset": 4099, "kernel": "forward", "has_lse": False},  # split among programs
        {"num_queries": 300, "num_keys": 1},
    ]
    main = [(table, causal, width) for width in (64, 128) for table in TABLES for causal in (False, True)]
    cases = [checked(table, causal, "bfloat16", width) for table, causal, width in main]
    for number, shape in enumerate(shapes):
        cases += [checked(table, causal ^ (number % 2 == 1), **shape) for table, causal in in_turn]
    cases += [checked("full", causal, "bfloat16", width, rel_p2c=True) for causal in (False, True) for width in (64, 128)]
    cases += [checked("clamped", batch=3, shares=(1, 0, 1 / 3), per_head=True, rel_p2c=True)]
    cases += [checked("zero", rel_value=True, rel_bias=True), checked("clamped", True, rel_value=True, per_head=True)]
    cases += [checked(table, causal, "float32") for table, causal in in_turn]
    cases += [checked(table, causal, "float16", width) for table, causal, width in main]
    return [*cases, checked("full", True, "float32", 128), checked("clamped", False, "float32", 256)]


def correctness(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Calls that stand for the timed ones, then calls of every kind."""
    from .speed import baseline_cases, flex_cases, speed_cases

    timed = [case for cases in (speed_cases(), baseline_cases(), flex_cases()) for case in cases[: options.most]]
    check_all([*standing_for_all(timed), *further_cases()[: options.most]], options, report, deadline)


def repeats(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Many runs of one call are equal bit for bit; the first again is in torch's deterministic mode, which fills new memory with
    NaN. A call that the time did not allow to run again is "not run", neither passed nor failed."""
    calls = [(table, *sizes) for sizes in ((4, 64, 51), (60, 64, 251), (8, 128, 101)) for table in ("full", "clamped")]
    for table, batch, width, runs in calls[: options.most]:
        case = checked(table, batch == 4, width=width, batch=batch, heads=8, num_queries=1024, num_keys=1024)
        row: dict[str, Any] = {"case": case.name, "direction": "forward+backward", "unit": "runs"}
        try:
            inputs, arguments = case.inputs("cuda", False)
            run, different = differences(partial(results_of, case, inputs, arguments), options.most or runs, deadline)
            report.left(run < (options.most or runs))
            row |= {"value": run, "status": "FAILED" if different else "ok" if run else "not run", "message": different[:500]}
        except Exception as error:
            row |= {"status": "failed", "message": in_one_line(error)}
        if row["status"] == "not run":
            report.checks.add({"part": report.outcome.part, **row})
        else:
            report.add(**row)
        report.say(f"  {case.name}: {row.get('value', '-')} runs, {row['status']}")
    report.done()


def differences(results: Any, runs: int, deadline: float) -> tuple[int, str]:
    """How many runs there were, and what was not equal to the first run's."""
    first, different, run = results(), [], 0
    while run < runs and time.monotonic() < deadline:
        torch.use_deterministic_algorithms(run == 0)
        try:
            again = results()
        finally:
            torch.use_deterministic_algorithms(False)
        run += 1
        different += [f"run {run}: {name}" for name in first if not torch.equal(first[name], again[name])]
    return run, ", ".join(different)


def one_kernel(kernel: str, width: int) -> Checked:
    """The call that a kernel is checked alone with."""
    return replace(checked("full", width=width, num_queries=LONGEST_CHECKED, num_keys=LONGEST_CHECKED), kernel=kernel)
