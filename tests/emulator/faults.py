"""Plant faults into PTX, to see that the emulator finds them: ``python -m tests.emulator.faults``.

Each changes one instruction of one kernel of a call. It is caught if the emulator reports something, or if results are further
from float64 than they may be. One that is missed may do no harm: a barrier that another one makes superfluous, a guard of a load
whose address is always valid. Exit status 1 if nothing of a kind is caught that should be; 130 if interrupted.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from bench.report.progress import progress
from tools.emulator.device import TARGETS
from tools.emulator.machine import NoCompiler, core
from tools.emulator.ptx import UnknownPTX

from .check import DTYPES, Checked, Subject, check
from .judge import Judge

Replacement = str | Callable[["re.Match[str]"], str]


@dataclass(frozen=True)
class Fault:
    """A kind of fault: an instruction, and one to take its place. missed: why the emulator cannot see it."""

    name: str
    pattern: str
    replacement: Replacement
    missed: str = ""


def other(match: re.Match[str], group: int, names: Sequence[str]) -> str:
    """Put one of two names in place of the other."""
    start, end = match.start(group) - match.start(), match.end(group) - match.start()
    return match[0][:start] + names[1 - names.index(match[group])] + match[0][end:]


NOTHING = "\t// removed"
FAULTS = (
    Fault("barrier removed", r"^\tbar\.sync \t0;$", NOTHING),
    Fault("copies are not committed", r"^\tcp\.async\.commit_group.*;$", NOTHING),
    Fault("waits for copies removed", r"^\tcp\.async\.wait_group.*;$", NOTHING),
    Fault("waits for one copy less", r"^(\tcp\.async\.wait_group \t?)(\d+)", lambda m: m[1] + str(int(m[2]) + 1)),
    Fault("proxy fence removed", r"^\tfence\.proxy\.async\S*;$", NOTHING),
    Fault("wgmma.wait_group removed", r"^\twgmma\.wait_group.*;$", NOTHING),
    Fault("waits for one wgmma less", r"(wgmma\.wait_group\.sync\.aligned )(\d+)", lambda m: m[1] + str(int(m[2]) + 1)),
    Fault(
        "wgmma.fence removed",
        r"^\twgmma\.fence\.sync\.aligned;$",
        NOTHING,
        missed="only a note, since LLVM puts copies of accumulators behind fences and ptxas adds what is missing",
    ),
    Fault("wgmma transposed", r"(wgmma\.mma_async\S+ .*, )([01]);$", lambda m: other(m, 2, "01")),
    Fault(
        "wgmma keeps or drops its sums",
        r"(wgmma\.mma_async\S+ .*, )(0|1|%p\d+)(, 1, 1, [01])",
        lambda m: m[1] + ("1" if m[2] == "0" else "0") + m[3],
    ),
    Fault(
        "ldmatrix of another row", r"(ldmatrix\S+ \{[^}]*\}, \[%r\d+)(?:\+(\d+))?\]", lambda m: f"{m[1]}+{int(m[2] or 0) ^ 128}]"
    ),
    Fault(
        "ldmatrix transposed or not",
        r"(ldmatrix\.sync\.aligned\.m8n8\.x4)(\.trans)?\.shared",
        lambda m: m[1] + ("" if m[2] else ".trans") + ".shared",
    ),
    Fault("left operands of mma swapped", r"(mma\.sync\S+ \{[^}]*\}, \{ )(%r\d+), (%r\d+)", r"\1\3, \2"),
    Fault("right operands of mma swapped", r"(mma\.sync\S+ \{[^}]*\}, \{[^}]*\}, \{ )(%r\d+), (%r\d+)", r"\1\3, \2"),
    Fault("shuffle from lane 1", r"(shfl\.sync\.idx\.b32 \t%r\d+, %r\d+, )(%r\d+), 31", r"\g<1>1, 31"),
    Fault("shuffle over another distance", r"(shfl\.sync\.bfly\.b32 \t%r\d+, %r\d+, )([12]),", lambda m: other(m, 2, "12")),
    Fault("operands of prmt swapped", r"(prmt\.b32 \t?%r\d+, )(%r\d+), (%r\d+)", r"\1\3, \2"),
    Fault("operands of selp swapped", r"(selp\.[bf]32 \t%r\d+, )([^,]+), ([^,]+),", r"\1\3, \2,"),
    Fault("comparison off by one", r"(setp\.)(lt|le)(\.[su]32)", lambda m: other(m, 2, ("lt", "le"))),
    Fault(
        "maximum instead of minimum",
        r"\b(max|min)(\.f32)",
        lambda m: other(m, 1, ("max", "min")),
        missed="softmax is the same whatever number is subtracted from the scores, unless they are large",
    ),
    Fault("load without guard", r"@%p\d+ (ld\.global)", r"\1"),
    Fault("store without guard", r"@%p\d+ (st\.global)", r"\1"),
    Fault("store to other shared memory", r"(st\.shared\S+ \t?\[ ?%r\d+ ?\+ ?)(\d+)", lambda m: m[1] + str(int(m[2]) + 16)),
    Fault("load of other shared memory", r"(ld\.shared\S+ \t?.*\[ ?%r\d+ ?\+ ?)(\d+)", lambda m: m[1] + str(int(m[2]) + 16)),
)


@dataclass(frozen=True)
class Planted:
    """A kernel's PTX with a fault, and its line."""

    fault: Fault
    kernel: str
    line: int
    original: str
    ptx: str

    def change(self, _: str, ptx: str) -> str:
        """Return the kernel's PTX with the fault, other kernels' as it is."""
        return self.ptx if ptx == self.original else ptx

    def __str__(self) -> str:
        return f"{self.fault.name} in {self.kernel}, line {self.line}"


def plant(fault: Fault, kernels: Mapping[str, str], each: int) -> Iterator[Planted]:
    """Plant a fault in up to so many places of each kernel, drawn, but always the same."""
    for name, ptx in kernels.items():
        places = list(re.finditer(fault.pattern, ptx, re.MULTILINE))
        chosen = random.Random(f"{fault.name} {name}").sample(places, min(each, len(places)))
        for place in sorted(chosen, key=re.Match.start):
            new = place.expand(fault.replacement) if isinstance(fault.replacement, str) else fault.replacement(place)
            changed = ptx[: place.start()] + new + ptx[place.end() :]
            yield Planted(fault, name, ptx[: place.start()].count("\n") + 1, ptx, changed)


@dataclass(frozen=True)
class Outcome:
    """Reports and wrong results that a fault leads to. is_visible: whether any result differs at all."""

    planted: Planted
    found: list[str]
    is_visible: bool = True

    def __str__(self) -> str:
        if self.found:
            return f"caught  {self.planted}: {', '.join(self.found)}"
        why = self.planted.fault.missed or (
            "results are within their allowance" if self.is_visible else "all results are the same"
        )
        return f"MISSED  {self.planted}: {why}"


def attempt(planted: Planted, subject: Subject, judge: Judge, without: Checked) -> Outcome:
    """Run a call with the fault."""
    try:
        checked = check(subject, change=planted.change, judge=judge)
    except UnknownPTX as error:
        return Outcome(planted, [str(error)])
    reports = {name: None for launch in checked.launches for name in sorted(launch.report.names)}
    wrong = [f"{name} is wrong" for name, ratio in checked.ratios.items() if not ratio.value <= 1]
    unfinished = [f"{launch.name} does not end" for launch in checked.launches if not launch.report.finished]
    is_same = all(torch.equal(result, without.results[name]) for name, result in checked.results.items())
    return Outcome(planted, [*reports, *unfinished, *wrong], not is_same)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.emulator.faults", description=__doc__)
    made.add_argument("--target", choices=TARGETS, default="sm_90", help="(default: %(default)s)")
    made.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="(default: %(default)s)")
    made.add_argument("--width", type=int, default=64, help="width of the heads (default: %(default)s)")
    made.add_argument("--case", default="full", help="the call, see calls.py (default: %(default)s)")
    made.add_argument("--length", type=int, default=130, help="number of queries and keys (default: %(default)s)")
    made.add_argument("--each", type=int, default=2, help="faults of a kind in a kernel (default: %(default)s)")
    made.add_argument("--only", default="", metavar="PART", help="kinds whose names have this in them")
    made.add_argument("--list", action="store_true", help="show the kinds, and end")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    faults = [fault for fault in FAULTS if options.only in fault.name]
    if options.list:
        print("\n".join(fault.name + (f" (missed: {fault.missed})" if fault.missed else "") for fault in faults))
        return 0
    try:
        core()
    except NoCompiler as error:
        print(error)
        return 2
    subject = Subject(options.target, options.dtype, options.width, options.case, (options.length, options.length))
    judge = subject.judge()
    base = check(subject, judge=judge)
    if base.problems:
        print(f"{subject} is wrong without any fault, too:", *base.problems, sep="\n  ")
        return 1
    kernels = {launch.name: launch.ptx for launch in base.launches}
    every = [planted for fault in faults for planted in plant(fault, kernels, options.each)]
    outcomes: list[Outcome] = []
    try:
        for planted in progress(every, str):
            outcomes.append(attempt(planted, subject, judge, base))
            tqdm.write(str(outcomes[-1]))
    except KeyboardInterrupt:
        print("interrupted")
        return 130
    return summary(faults, outcomes, str(subject))


def summary(faults: Sequence[Fault], outcomes: Sequence[Outcome], subject: str) -> int:
    """Print a line for each kind; return 1 if nothing of a kind is caught that should be, else 0."""
    failed = False
    for fault in faults:
        found = [bool(outcome.found) for outcome in outcomes if outcome.planted.fault is fault]
        failed |= bool(found) and not any(found) and not fault.missed
        print(f"{sum(found)} of {len(found)}  {fault.name}" + f" (missed: {fault.missed})" * bool(fault.missed))
    print(f"{sum(bool(outcome.found) for outcome in outcomes)} of {len(outcomes)} caught in {subject}")
    return int(failed)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # kill does what Ctrl-C does
    sys.exit(main())
