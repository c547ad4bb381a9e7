"""Which configuration a kernel has: the tile of a program, its warps and pipeline stages.

What counts of a call is its Kind: GPU, dtype, width, what its tables cover, and which terms it has. For each kernel of a call,
the first row of these tables that fits its kind and length is taken:

1. the user's profile of this GPU (``python -m triton_relattn tune``), and then the package's, in the folder tuned;
2. defaults.csv, chosen by what the compiler reports: spilled registers, shared memory, instructions for a score. None was timed.

The choice is made before anything is compiled. If the driver then refuses a launch for lack of shared memory or registers, the
next smaller configuration takes the place of that one, with a warning, in this call and in all later ones (until_it_fits).
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from triton.runtime.errors import OutOfResources

from . import profiles
from .architectures import architecture_of
from .profiles import Conditions, Row
from .tile_config import COVERAGES, MAX_BLOCK, TileConfig
from .tile_config import KERNELS as KERNELS

DEFAULTS, PACKAGE_FOLDER = Path(__file__).parent / "defaults.csv", Path(__file__).parent / "tuned"
LARGEST_TERM = 2000.0  # of a logit, that float16 must hold if terms are rounded; with the usual scale widths up to 1,024 do
LEAST_WIDTH = 64  # narrower heads have the configurations of this width


class Kind(NamedTuple):
    """Properties of a call that ``select`` depends on besides kernel and length; ``select`` explains them."""

    arch: str
    dtype: torch.dtype
    width: int
    coverage: str
    is_causal: bool
    term_set: str | None


# What the choice depends on.


@functools.cache
def architecture(device: torch.device) -> str:
    """Return the name of a device's architecture: "sm_90", "gfx942", ...; "interpreter" on the CPU."""
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors (compute units) the device has; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def padded_width(width: int, least: int = 16) -> int:
    """Return the width of a tile that holds so many columns: a power of two, and at least the 16 that matrix units need."""
    return max(least, 1 << (width - 1).bit_length())


def input_precision(dtype: torch.dtype, arch: str) -> str:
    """Return "ieee" or "tf32", the precision of float32 products, as torch.set_float32_matmul_precision says. It does not matter
    for 16-bit inputs."""
    if dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest":
        return "ieee"
    return "tf32" if architecture_of(arch).has_tf32 else "ieee"


def needs_wide_index(shape: tuple[int, ...], strides: tuple[int, ...], rows: int = MAX_BLOCK) -> bool:
    """Return whether offsets within so many rows of a tensor's (length, width) matrices exceed 31 bits.

    A tile is addressed from its first row, whose own offset has 64 bits anyway; only a clamped table is addressed from row 0.
    """
    row_stride, column_stride = strides[-2:]
    return rows * row_stride + (shape[-1] + MAX_BLOCK) * column_stride >= 2**31


def rounds_terms(arch: str, dtype: torch.dtype) -> bool:
    """Return whether terms, q.E with a bias, are rounded to float16 before they are added to the scores, if float16 holds them.

    All kernels of a call must agree, whatever their tiles and rotations, so this depends on nothing else. If a backward kernel
    had other terms than the forward, its probabilities would not sum to one, and an error that all keys of a query share adds up
    in the gradient of a table. Terms in float16 obey the error rule for bfloat16 inputs. With float16 inputs, the gradient of a
    table would be off by several times the error that rounding the inputs costs.
    """
    return dtype == torch.bfloat16 and architecture_of(arch).rotates_in_registers


def float16_holds_terms(scale: float) -> bool:
    """Return whether float16 can hold the terms of a call, which are divided by its scale.

    It must not limit a term of a logit up to LARGEST_TERM. And what is left of small terms, where float16 has no normal numbers,
    must change a logit by no more than rounding a term of 1 does. A scale of 0, for attention by position alone, fails the first.
    """
    info = torch.finfo(torch.float16)
    return LARGEST_TERM <= info.max * scale and info.smallest_normal * scale <= 1


# The choice.


def select(
    kernel: str,
    arch: str,
    dtype: torch.dtype,
    width: int,
    coverage: str = "no table",
    is_causal: bool = False,
    term_set: str | None = None,
    length: int | None = None,
) -> TileConfig:
    """Return the configuration of one of KERNELS for a call.

    Args:
        width: the largest width of a head: of query, value or rel_query.
        coverage: see AttentionSpec.coverage; "no table" if there is none.
        term_set: "grid" on a grid; else "rel_value" with a table for the values; else "rel_p2c" with a table for the keys; else
            "rel_query" if the call has one ("narrow rel_query" if it is narrower than the query); else "rel_key and rel_bias", or
            "rel_bias" if that is the only term; else None.
        length: length of the longest sequence, of queries or keys. None: return the default, whatever the profiles say.
    """
    return _first(arch, conditions(kernel, Kind(arch, dtype, width, coverage, is_causal, term_set), length))


def conditions(kernel: str, kind: Kind, length: int | None) -> Conditions:
    """Return a call's columns of the tables, each filled in; length stays blank if it is None."""
    precision = input_precision(kind.dtype, kind.arch) if kind.dtype == torch.float32 else "16 bits"
    return _conditions(kernel, kind, precision, "" if length is None else str(profiles.length_bucket(length)))


@functools.cache
def _conditions(kernel: str, kind: Kind, precision: str, length: str) -> Conditions:
    if kind.coverage not in COVERAGES:
        raise ValueError(f"coverage must be one of {COVERAGES}, got {kind.coverage!r}")
    unit, width = architecture_of(kind.arch).unit, str(padded_width(kind.width, LEAST_WIDTH))
    dtype, is_causal = str(kind.dtype).removeprefix("torch."), str(kind.is_causal)
    return Conditions(kernel, precision, unit, width, kind.term_set or "none", kind.coverage, dtype, is_causal, length)


@functools.cache
def _first(arch: str, call: Conditions) -> TileConfig:
    rows = itertools.chain(_tuned(arch) if call.length else (), defaults())
    return next(row.config for row in rows if row.conditions.fit(call))


@functools.cache
def _tuned(arch: str) -> list[Row]:
    """Return the rows of the user's profile of an architecture, and then of the package's."""
    paths = (profiles.user_profile_path(arch), PACKAGE_FOLDER / f"{arch}.csv")
    return [row for path in paths if path is not None for row in profiles.load(path, arch)]


@functools.cache
def defaults() -> list[Row]:
    """Return the rows of defaults.csv."""
    return profiles.parse(DEFAULTS.read_bytes())


def forget() -> None:
    """Forget the profiles that were read: they are read again when they are next needed."""
    _tuned.cache_clear()
    _first.cache_clear()


def candidates(kernel: str, arch: str, has_table: bool) -> list[TileConfig]:
    """Return every configuration that a search for the best one looks at. All are valid; only compiling tells which fit."""
    carries = {"forward": ("scores", None)} if has_table else {}
    rotations = ("gather", "registers") if has_table and architecture_of(arch).rotates_in_registers else ("gather",)
    # 128 registers: two programs of eight warps, or four of four, share a multiprocessor. 168: three of four warps.
    limits = (None, 128, 168) if architecture_of(arch).is_nvidia else (None,)
    blocks, warps, stages = (16, 32, 64, 128), (2, 4, 8), (1, 2, 3)
    combinations = itertools.product(blocks, blocks, warps, stages, carries.get(kernel, ("scores",)), rotations, limits)
    configs = itertools.starmap(TileConfig, combinations)
    return [config for config in configs if config.why_invalid(arch, has_table, kernel) is None]


# What to do if a choice does not fit the GPU.

Launcher = TypeVar("Launcher", bound=Callable[..., Any])
Choice = tuple[str, Kind, TileConfig]  # kernel, kind of call, what was selected for it
_smaller: dict[Choice, TileConfig] = {}


class DoesNotFit(Exception):
    """A launch failed, and later calls of its kind have a smaller configuration: to be launched again, from the beginning."""


def that_fits(kernel: str, kind: Kind, config: TileConfig) -> TileConfig:
    """Return the selected configuration, or the smaller one that has taken its place."""
    while _smaller and (kernel, kind, config) in _smaller:  # hashing takes longer than asking whether there are any
        config = _smaller[kernel, kind, config]
    return config


def take_smaller(kernel: str, kind: Kind, config: TileConfig, error: OutOfResources) -> None:
    """Let a smaller configuration take the place of one that does not fit, with a warning, and raise DoesNotFit; raise the error
    itself if not even the smallest one fits."""
    smaller = config.smaller()
    if smaller is None:
        raise error
    text = f"{kernel}: {config} does not fit this GPU ({error}); {smaller} is used instead"
    warnings.warn(text, RuntimeWarning, stacklevel=5)
    _smaller[kernel, kind, config] = smaller
    raise DoesNotFit from None


def until_it_fits(launcher: Launcher) -> Launcher:
    """Wrap a launcher, which starts again whenever a configuration did not fit: sizes of results may depend on it."""

    @functools.wraps(launcher)
    def run(*arguments: Any, **options: Any) -> Any:
        while True:
            try:
                return launcher(*arguments, **options)
            except DoesNotFit:
                continue

    return run  # type: ignore[return-value]
