"""The choice of a launch configuration for a call: a timed one, if a profile has it (profiles.py), or else a default.

The defaults were chosen by a model of the cycles of compiled kernels (bench/cycles), not by timing; tests/compile holds the
kernels to the cycles of that model.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import NamedTuple

import torch

from . import profiles
from .architectures import architecture_of
from .tile_config import COVERAGES, MAX_BLOCK, TileConfig
from .tile_config import KERNELS as KERNELS

PROGRAMS_PER_MULTIPROCESSOR = 4  # of the dtable kernel, whose walks differ in length: several balance each other


@functools.cache
def architecture(device: torch.device) -> str:
    """Return the name of a device's architecture: "sm_90", "gfx942", ...; "interpreter" on the CPU."""
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def padded_width(width: int) -> int:
    """Return the width of a tile that holds so many columns: a power of two, and at least the 16 that matrix units need."""
    return max(16, 1 << (width - 1).bit_length())


def input_precision(dtype: torch.dtype, arch: str) -> str:
    """Return "ieee" or "tf32", the precision of float32 products, as torch.set_float32_matmul_precision says. It does not matter
    for 16-bit inputs."""
    if dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest":
        return "ieee"
    return "tf32" if architecture_of(arch).has_tf32 else "ieee"


def needs_wide_index(tensor: torch.Tensor, rows: int = MAX_BLOCK) -> bool:
    """Return whether offsets within so many rows of the tensor's (length, width) matrices exceed 31 bits.

    A tile is addressed from its first row, whose own offset has 64 bits anyway; only a clamped table is addressed from row 0.
    """
    row_stride, column_stride = tensor.stride()[-2:]
    return rows * row_stride + (tensor.shape[-1] + MAX_BLOCK) * column_stride >= 2**31


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors (compute units) the device has; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def table_splits(device: torch.device, programs: int, units: int) -> int:
    """Return how many programs share each block of a table's rows: as few as keep the device busy, since each has its own sum.

    Args:
        programs: the number of blocks of rows, of all tables.
        units: the number of things that the programs of a block share out: batch entries, times heads if those share the table.
    """
    return max(1, min(units, PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device) // programs))


# Configurations for 16-bit inputs on NVIDIA GPUs that rotate in registers. A key is: kernel (or kernel and special, see select),
# padded width, matrix unit, coverage. The last two may be missing; of the keys that match a call the longest wins. Widths below
# 64 take the entry of 64. Matrix units: "wgmma" (sm_90) multiplies 64 rows of four warps, "mma" (sm_80) and "small mma" (sm_86,
# sm_89, sm_12x: 100 KB of shared memory) 16 rows of one.
#
# The model of cycles chose them (bench/cycles, bfloat16; float16 agrees): a tile of 64 x 64 is the fastest nearly everywhere,
# though at width 128 it spills some hundred bytes; with 168 registers three programs share a multiprocessor.
_CONFIGS: dict[tuple[object, ...], TileConfig] = {
    ("forward", 64): TileConfig(64, 64, 4, 2, max_registers=168),
    ("forward", 64, "wgmma"): TileConfig(64, 64, 4, 1, max_registers=128),
    ("forward", 64, "wgmma", "no table"): TileConfig(128, 64, 8, 3),
    ("forward", 64, "mma", "no table"): TileConfig(64, 64, 4, 3, max_registers=168),
    ("forward", 128): TileConfig(128, 64, 8, 3),
    ("forward", 128, "wgmma", "no table"): TileConfig(128, 64, 8, 1, max_registers=128),
    ("dq", 64): TileConfig(64, 64, 4, 2, "both"),
    ("dq", 64, "wgmma", "zero"): TileConfig(64, 64, 4, 2, None),
    ("dq", 64, "wgmma", "no table"): TileConfig(128, 64, 8, 3, max_registers=128),
    ("dq", 64, "mma", "no table"): TileConfig(64, 64, 4, 3, max_registers=168),
    ("dq", 128): TileConfig(64, 64, 4, 1, "both"),
    ("dq", 128, "mma"): TileConfig(64, 32, 4, 2, "both"),
    ("dq", 128, "wgmma", "no table"): TileConfig(64, 64, 4, 2),
    ("dq", 128, "mma", "no table"): TileConfig(128, 64, 8, 3),
    ("dkv", 64): TileConfig(64, 64, 4, 1),
    ("dkv", 64, "mma", "no table"): TileConfig(64, 64, 4, 3),
    ("dkv", 64, "small mma", "no table"): TileConfig(64, 64, 4, 2),
    ("dkv", 64, "wgmma"): TileConfig(64, 64, 4, 1, max_registers=168),
    ("dkv", 128): TileConfig(64, 64, 4, 1),
    ("dkv", 128, "wgmma", "no table"): TileConfig(64, 64, 4, 2),
    ("dtable", 64): TileConfig(64, 64, 4, 2),
    ("dtable", 128): TileConfig(64, 64, 4, 1),
    ("dtable_words", 64): TileConfig(64, 64, 4, 1),
    ("dtable_words", 128): TileConfig(64, 64, 4, 1),
    ("forward, rel_bias", 64): TileConfig(64, 64, 4, 3, max_registers=168),
    ("dq, rel_key and rel_bias", 64, "mma"): TileConfig(64, 32, 4, 2, "both"),
    ("dq, rel_bias", 64): TileConfig(64, 32, 4, 2, "both"),
    ("forward, rel_bias", 128): TileConfig(64, 32, 4, 3),
    ("forward, rel_query", 128): TileConfig(128, 64, 8, 2),
    ("dq, rel_query", 128): TileConfig(64, 32, 4, 1, "both"),
    ("dtable, rel_query", 64): TileConfig(64, 64, 4, 1),
    ("forward, narrow rel_query", 64): TileConfig(64, 64, 4, 3, max_registers=168),
    ("dq, narrow rel_query", 64, "wgmma"): TileConfig(64, 64, 4, 1, "both"),
    ("forward, rel_value", 64): TileConfig(64, 64, 4, 2),
    ("dkv, rel_value", 64): TileConfig(64, 64, 4, 1),
    ("dtable, rel_value", 64): TileConfig(64, 64, 4, 1),
    ("forward, rel_value", 128): TileConfig(64, 32, 4, 3),
    ("forward, rel_value", 128, "wgmma", "zero"): TileConfig(64, 32, 4, 1),
    ("dq, rel_value", 64, "wgmma", "zero"): TileConfig(64, 32, 4, 1, "both"),
}

# The same where rotations are gathers: on sm_100, and where registers do not suffice for large tiles. These were chosen by
# compiling, so that no registers are spilled.
_GATHERED: dict[tuple[object, ...], TileConfig] = {
    ("forward", 64): TileConfig(64, 64, 4, 2),
    ("forward", 128): TileConfig(128, 64, 8, 2),
    ("forward", 128, "wgmma", "clamp"): TileConfig(64, 32, 4, 2),
    ("forward", 256): TileConfig(64, 32, 8, 2),
    ("dq", 64): TileConfig(64, 32, 4, 2, "both"),
    ("dq", 64, "wgmma", "full"): TileConfig(64, 64, 4, 2, None),
    ("dq", 64, "wgmma", "clamp"): TileConfig(64, 32, 4, 1, "both"),
    ("dq", 128): TileConfig(32, 32, 4, 1, "both"),
    ("dq", 128, "wgmma", "full"): TileConfig(64, 32, 4, 2, None),
    ("dkv", 64): TileConfig(64, 64, 4, 2),
    ("dkv", 64, "wgmma", "clamp"): TileConfig(64, 64, 4, 1),
    ("dkv", 64, "wgmma", "zero"): TileConfig(64, 64, 4, 1),
    ("dkv", 128): TileConfig(32, 32, 4, 2),
    ("dtable", 64): TileConfig(32, 32, 4, 1),
    ("dtable", 64, "wgmma", "clamp"): TileConfig(32, 32, 4, 2),
    ("dtable", 128): TileConfig(32, 32, 8, 2),
    ("dtable_words", 64): TileConfig(64, 64, 4, 1),
    ("dtable_words", 128): TileConfig(64, 64, 4, 1),
    ("dtable_words", 256): TileConfig(64, 64, 4, 1),
    ("dtable_words", 256, "mma"): TileConfig(32, 32, 4, 1),
    ("dtable_words", 256, "small mma"): TileConfig(32, 32, 4, 1),
    ("forward, rel_value", 64): TileConfig(64, 64, 4, 2, None),
    ("forward, rel_value", 128): TileConfig(64, 32, 4, 1, None),
    ("dq, rel_value", 64): TileConfig(64, 32, 4, 1, None),
    ("dq, rel_value", 128): TileConfig(16, 16, 4, 2, None),
    ("dkv, rel_value", 64): TileConfig(32, 32, 4, 2),
    ("dkv, rel_value", 128): TileConfig(32, 32, 8, 2),
    ("dtable, rel_value", 64): TileConfig(32, 32, 4, 1),
    ("dtable, rel_value", 128): TileConfig(16, 16, 4, 2),
    ("dq, rel_query", 64): TileConfig(64, 32, 4, 1, "both"),
    ("dq, rel_query", 128): TileConfig(32, 32, 4, 1, "both"),
    ("dtable, rel_query", 64): TileConfig(32, 32, 4, 2),
    ("dq, narrow rel_query", 64): TileConfig(64, 32, 4, 2, "both"),
    ("dkv, narrow rel_query", 64): TileConfig(64, 32, 4, 1),
    ("dtable, narrow rel_query", 64): TileConfig(64, 32, 4, 2),
    ("dq, narrow rel_query", 128): TileConfig(32, 16, 2, 2, None),
    ("dkv, narrow rel_query", 128): TileConfig(32, 32, 4, 1),
    ("dtable, narrow rel_query", 128): TileConfig(32, 16, 4, 2),
    ("dq, rel_key and rel_bias", 64): TileConfig(64, 32, 4, 1, "both"),
    ("forward, rel_bias", 128): TileConfig(128, 64, 8, 2, None),
    ("dtable, rel_key and rel_bias", 128): TileConfig(16, 16, 4, 2),
    ("dtable, rel_bias", 64): TileConfig(32, 32, 4, 1),
    ("dtable, rel_bias", 128): TileConfig(16, 16, 2, 2),
    ("forward", 256, "mma", "no table"): TileConfig(64, 64, 8, 2),
    ("forward", 256, "mma"): TileConfig(32, 32, 4, 1),
    ("forward", 256, "small mma"): TileConfig(32, 32, 4, 1),
    ("forward", 128, "mma"): TileConfig(64, 64, 8, 2),
    ("forward", 128, "small mma"): TileConfig(64, 64, 8, 1),
    ("forward", 128, "small mma", "no table"): TileConfig(128, 64, 8, 2),
    ("dq", 128, "small mma", "no table"): TileConfig(64, 32, 4, 2),
    ("forward, rel_bias", 128, "mma"): TileConfig(64, 64, 8, 2),
    ("forward, rel_bias", 128, "small mma"): TileConfig(64, 64, 8, 2),
    ("dq, rel_bias", 128, "mma"): TileConfig(64, 32, 4, 2, None),
    ("dq, rel_bias", 128, "small mma"): TileConfig(64, 32, 4, 2, None),
    ("forward, rel_value", 64, "mma"): TileConfig(64, 32, 4, 2, None),
    ("forward, rel_value", 64, "small mma"): TileConfig(64, 32, 4, 2, None),
    ("forward, rel_value", 128, "mma"): TileConfig(32, 32, 4, 2, None),
    ("forward, rel_value", 128, "small mma"): TileConfig(32, 32, 4, 2, None),
    ("dq, rel_value", 64, "mma"): TileConfig(32, 32, 4, 2, "both"),
    ("dq, rel_value", 64, "small mma"): TileConfig(32, 32, 4, 2, "both"),
    ("forward", 64, "wgmma", "no table"): TileConfig(128, 64, 8, 2),
    ("forward", 128, "wgmma", "no table"): TileConfig(128, 64, 8, 2),
    ("dq", 64, "wgmma", "no table"): TileConfig(128, 64, 8, 2),
    ("dq", 128, "wgmma", "no table"): TileConfig(128, 64, 8, 2),
    ("dkv", 128, "wgmma", "no table"): TileConfig(64, 32, 4, 1),
}


# Attention on a grid, whose terms need no rotation, likewise; a grid 64 wide decides.
_ON_GRIDS: dict[tuple[object, ...], TileConfig] = {
    ("forward", 64): TileConfig(64, 64, 4, 3, max_registers=168),
    ("forward", 64, "wgmma"): TileConfig(128, 64, 8, 3, max_registers=128),
    ("forward", 128): TileConfig(128, 64, 8, 2),
    ("forward", 128, "wgmma"): TileConfig(64, 64, 4, 2),
    ("dq", 64): TileConfig(64, 32, 4, 3, max_registers=168),
    ("dq", 64, "wgmma"): TileConfig(64, 64, 4, 1),
    ("dq", 128): TileConfig(128, 32, 8, 2),
    ("dq", 128, "wgmma"): TileConfig(64, 64, 4, 1),
    ("dkv", 64): TileConfig(64, 64, 4, 2),
    ("dkv", 64, "wgmma"): TileConfig(64, 64, 4, 1, max_registers=168),
    ("dkv", 128): TileConfig(32, 64, 4, 1),
    ("dkv", 128, "wgmma"): TileConfig(64, 64, 4, 1),
}


class Kind(NamedTuple):
    """Properties of a call that ``select`` depends on besides kernel and length; ``select`` explains them."""

    arch: str
    dtype: torch.dtype
    width: int
    coverage: str
    is_causal: bool
    special: str | None


def _find(table: dict[tuple[object, ...], TileConfig], calls: list[tuple[object, ...]]) -> TileConfig | None:
    """Return the most specific entry for the first of these calls that has any."""
    entries = (table.get(call[:length]) for call in calls for length in (4, 3, 2))
    return next((entry for entry in entries if entry is not None), None)


def _tile_width(width: int) -> int:
    return max(64, padded_width(width))


def profile_key(
    kernel: str,
    arch: str,
    dtype: torch.dtype,
    width: int,
    coverage: str,
    is_causal: bool,
    special: str | None,
    length: int,
) -> profiles.Key:
    """Return the properties that select depends on, as a profile stores them. Arguments as of select."""
    precision = input_precision(dtype, arch)
    dtype_name = str(dtype).removeprefix("torch.") if precision == "ieee" else precision
    bucket = profiles.length_bucket(length)
    return profiles.Key(kernel, arch, dtype_name, _tile_width(width), coverage, is_causal, special, bucket)


def rounds_terms(arch: str, dtype: torch.dtype) -> bool:
    """Return whether terms, q.E with a bias, are rounded to float16 before they are added to the scores.

    All kernels of a call must agree, whatever their tiles and rotations, so this depends on nothing else. If a backward kernel
    had other terms than the forward, its probabilities would not sum to one, and an error that all keys of a query share adds up
    in the gradient of a table. Terms in float16 obey the error rule for bfloat16 inputs. With float16 inputs, the gradient of a
    table would be off by several times the error that rounding the inputs costs.
    """
    return dtype == torch.bfloat16 and architecture_of(arch).rotates_in_registers


def candidates(kernel: str, arch: str, has_table: bool) -> list[TileConfig]:
    """Return every configuration that a search for the best one looks at. All are valid; only compiling tells which fit."""
    carries = {"forward": ("scores", None), "dq": ("both", "scores", None)} if has_table else {}
    rotations = ("gather", "registers") if has_table and architecture_of(arch).rotates_in_registers else ("gather",)
    # 128 registers: two programs of eight warps, or four of four, share a multiprocessor. 168: three of four warps.
    limits = (None, 128, 168) if architecture_of(arch).is_nvidia else (None,)
    blocks, warps, stages = (16, 32, 64, 128), (2, 4, 8), (1, 2, 3)
    every = itertools.product(blocks, blocks, warps, stages, carries.get(kernel, ("scores",)), rotations, limits)
    return [config for config in itertools.starmap(TileConfig, every) if config.why_invalid(arch, has_table) is None]


def select(
    kernel: str,
    arch: str,
    dtype: torch.dtype,
    width: int,
    coverage: str = "no table",
    is_causal: bool = False,
    special: str | None = None,
    length: int | None = None,
) -> TileConfig:
    """Return the configuration of one of KERNELS for a call.

    Args:
        width: the largest width of a head: of query, value or rel_query.
        coverage: see AttentionSpec.coverage; "no table" if there is none.
        special: "grid" on a grid; else "rel_value" with a table for the values; else "rel_p2c" with a table for the keys; else
            "rel_query" if the call has one ("narrow rel_query" if it is narrower than the query); else "rel_key and rel_bias", or
            "rel_bias" if that is the only term; else None.
        length: length of the longest sequence, of queries or keys. None: return the default, whatever the profiles say.
    """
    if arch == "interpreter":
        return TileConfig(64, 64, 4, 1)  # large, as the interpreter's time is per operation, whatever the size
    if length is not None and profiles.exist(arch):
        tuned = profiles.find(profile_key(kernel, arch, dtype, width, coverage, is_causal, special, length))
        if tuned is not None:
            return tuned
    kind = Kind(arch, dtype, _tile_width(width), coverage, is_causal, special)
    return _default(kernel, kind, input_precision(dtype, arch))


@functools.cache
def _default(kernel: str, kind: Kind, precision: str) -> TileConfig:
    if kind.coverage not in COVERAGES:
        raise ValueError(f"coverage must be one of {COVERAGES}, got {kind.coverage!r}")
    if kind.dtype == torch.float32:
        config = _select_float32(kernel, kind.width, kind.special, precision)
    else:
        config = _select_16_bits(kernel, kind)
    return config if config.why_invalid(kind.arch, kind.coverage != "no table") is None else replace(config, num_stages=1)


def _select_16_bits(kernel: str, kind: Kind) -> TileConfig:
    arch, _, width, coverage, _, special = kind
    unit = architecture_of(arch).unit
    if unit == "unknown":
        return TileConfig(32, 32, 4, 1) if width <= 64 else TileConfig(16, 16, 4, 1)
    if unit == "mfma":
        if width == 256 and kernel != "forward":
            return TileConfig(16, 16, 4, 1)
        # Triton 3.7.1 does not translate some dq kernels on a grid with two stages: "unrealized_conversion_cast".
        return TileConfig(64 if kernel == "forward" else 32, 32, 4, 2 if width <= 128 and special != "grid" else 1)
    on_grid = _find(_ON_GRIDS, [(kernel, width, unit)]) if special == "grid" else None
    if on_grid is not None:
        return on_grid
    names = [kernel] if special is None else [f"{kernel}, {special}", kernel]
    calls: list[tuple[object, ...]] = [(name, width, unit, coverage) for name in names]
    if architecture_of(arch).rotates_in_registers and not _lacks_registers(kernel, width, unit, special):
        config = _find(_CONFIGS, calls)
        if config is not None:
            return replace(config, rotation="gather" if coverage == "no table" or kernel == "dtable_words" else "registers")
    if special == "rel_value":  # a second band: nothing else would fit
        calls = calls[:1]
    return _find(_GATHERED, calls) or TileConfig(16, 16, 4, 1)


def _lacks_registers(kernel: str, width: int, unit: str, special: str | None) -> bool:
    """Return whether large tiles would spill kilobytes: with 16 rows a warp, an operand of width 128 takes 64 registers of a
    lane."""
    if unit == "wgmma":
        return False
    if width == 128:
        has_large_terms = special is not None and (kernel != "dkv" or special == "rel_value")
        return has_large_terms or kernel == "dtable" or unit == "small mma"
    return special == "rel_value" and kernel != "forward"  # two bands


def _select_float32(kernel: str, width: int, special: str | None, precision: str) -> TileConfig:
    if precision == "ieee":  # without matrix units, whole rows of the operands lie in registers
        return TileConfig(32, 32, 8, 1) if kernel == "forward" and width <= 64 else TileConfig(16, 16, 8, 1)
    if kernel == "forward":
        if width == 256 and special is not None:
            return TileConfig(16, 16, 4, 1)
        return TileConfig(64, 32, 8, 2) if width <= 64 else TileConfig(32, 32, 4, 2 if width == 128 and special is None else 1)
    return TileConfig(32, 32, 4, 1) if width <= 64 else TileConfig(16, 16, 4, 1)
