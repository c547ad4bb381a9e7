"""Resources of the compiled kernels, without a GPU, and how many instructions the relative terms add.

For each kernel: registers per thread, bytes, and instructions of the main loop, also of the same tile without any table.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from typing import Any

from triton_relattn.kernels.config.architectures import ARCHITECTURES
from triton_relattn.kernels.config.tile_config import KERNELS, TileConfig

from .cases.attention import DTYPES
from .cases.features import FEATURES, Resolved
from .cases.features import call as call_with
from .compiled import Resources, compiled, launched, matrix_instructions, resources, selected, shuffles
from .measure.processes import processes
from .report.rows import Table, in_one_line, stamp
from .report.text import progress, table
from .verbs.options import add_csv, add_jobs, add_list, interpreted

TILE_COLUMNS = tuple(field.name for field in fields(TileConfig))
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "gfx942")
COLUMNS = (
    *("kernel", "target", "dtype", "head_dim", "rel_dim", "features", *TILE_COLUMNS),
    *("registers", "spill_bytes", "shared_bytes", "fits"),
    *("loop_instructions", "plain_loop_instructions", "loop_ratio", "matrix_instructions", "shuffles"),
    "status",
)


@dataclass(frozen=True)
class KernelCase:
    """One kernel to compile; dtype is one of DTYPES, features one of FEATURES."""

    kernel: str
    target: str
    dtype: str
    head_dim: int
    features: str

    @property
    def call(self) -> Resolved:
        return call_with(self.features, DTYPES[self.dtype], self.head_dim)

    @property
    def config(self) -> TileConfig:
        """The selected one."""
        return selected(self.kernel, self.target, *self.call)

    @property
    def exists(self) -> bool:
        """Whether the call can need the kernel."""
        return self.kernel in launched(*self.call)

    @property
    def plain(self) -> KernelCase:
        """The same without any table."""
        return replace(self, features="none_causal" if self.features.endswith("_causal") else "none")

    def __str__(self) -> str:
        return " ".join(map(str, astuple(self)))


@functools.cache
def used_by(case: KernelCase, config: TileConfig) -> Resources:
    """Return what the kernel takes with this configuration."""
    return resources(compiled(case.kernel, case.target, *case.call, config))


def row(case: KernelCase) -> dict[str, Any]:
    """The columns of COLUMNS; of a kernel that does not compile the first ones, and why."""
    result: dict[str, Any] = {**asdict(case), "status": "ok"}
    try:
        config, rel_key = case.config, getattr(case.call[0], "rel_key", None)
        result |= {**asdict(config), "rel_dim": None if rel_key is None else rel_key.shape[-1]}
        used = used_by(case, config)
        loop = used.main_loop
        result |= {name: getattr(used, name) for name in ("registers", "spill_bytes", "shared_bytes")}
        result |= {
            "loop_instructions": loop.total(),
            "matrix_instructions": matrix_instructions(loop),
            "shuffles": shuffles(loop),
        }
        result["fits"] = used.fits(case.target)
        if case.plain.exists:
            plain = used_by(case.plain, replace(config, carry="scores")).main_loop.total()
            result |= {"plain_loop_instructions": plain, "loop_ratio": result["loop_instructions"] / max(plain, 1)}
    except Exception as error:
        result["status"] = in_one_line(error)
    return result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_list(parser, "targets", tuple(ARCHITECTURES), TARGETS)
    add_list(parser, "dtypes", tuple(DTYPES), ("bf16",))
    add_list(parser, "features", FEATURES, FEATURES)
    add_list(parser, "kernels", KERNELS, KERNELS)
    add_list(parser, "head-dims", (16, 32, 64, 80, 96, 128, 256), (64, 128))
    add_jobs(parser)
    add_csv(parser)


def run(options: argparse.Namespace) -> int:
    """0 if all kernels compile, 1 if one does not, 2 if none can be compiled, 130 if interrupted."""
    if interpreted():
        return 2
    product = itertools.product(options.targets, options.dtypes, options.head_dims, options.features, options.kernels)
    named = (KernelCase(kernel, target, dtype, head_dim, name) for target, dtype, head_dim, name, kernel in product)
    cases = [case for case in named if case.exists]
    results = Table(COLUMNS, stamp("compiled, not run"), options.csv)
    interrupted = False
    try:
        with processes(options.jobs) as map_all:
            rows = map_all(row, cases)
            for _, result in zip(progress(cases), rows, strict=False):
                results.add(result)
    except KeyboardInterrupt:
        interrupted = True
    print(summary(results.rows))
    print(f"\n{len(results.rows)} of {len(cases)} kernels" + ", interrupted" * interrupted)
    return 130 if interrupted else int(any(row["status"] != "ok" for row in results.rows))


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Per target and feature set the largest loop_ratio, and the kernels that spill, do not fit or do not compile."""

    def named(rows: Sequence[dict[str, Any]], value: str = "") -> str:
        return ", ".join(f"{{kernel}} {{dtype}} {{head_dim}}{value}".format(**row) for row in rows) or "-"

    body = []
    for target, name in dict.fromkeys((row["target"], row["features"]) for row in rows):
        own = [row for row in rows if (row["target"], row["features"]) == (target, name)]
        compiled = [row for row in own if row["status"] == "ok"]
        by_ratio = sorted((row for row in own if row["loop_ratio"] is not None), key=lambda row: float(row["loop_ratio"]))
        spilling, too_large = [row for row in compiled if row["spill_bytes"]], [row for row in compiled if not row["fits"]]
        cells = [named(by_ratio[-1:], " ({loop_ratio})"), named(spilling, " ({spill_bytes} bytes)")]
        cells += [named(too_large, " ({shared_bytes} bytes)"), named([row for row in own if row["status"] != "ok"])]
        body.append([f"{target}, {name}", *cells])
    return table(("", "largest loop ratio", "spills", "does not fit", "does not compile"), body)
